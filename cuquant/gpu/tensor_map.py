"""Tensor maps: what the copy engine (sm_90 and newer) is told of a matrix, made by the driver."""

import ctypes
from functools import lru_cache

from cuquant.gpu import driver

MAP_BYTES = 128
LINE = 128  # bytes of a row of a box that the copy swizzles
COLUMNS = LINE // 2  # of such a box, of 16 bits each
# cuTensorMapEncodeTiled's words for types, and for what the copies do; and bytes of an element.
DATA_TYPES = {"uint8": 0, "uint16": 1, "float16": 6, "bfloat16": 9}
SIZES = {"uint8": 1, "uint16": 2, "float16": 2, "bfloat16": 2}
STRAIGHT, SWIZZLE_64, SWIZZLE_128, PROMOTE_256 = 0, 2, 3, 3


@lru_cache(maxsize=1024)
def tensor_map(
    pointer: int,
    rows: int,
    columns: int,
    stride: int,
    height: int,
    dtype: str,
    width: int = COLUMNS,
) -> bytes:
    """The CUtensorMap of rows of a type of DATA_TYPES, copied by boxes of `height` x `width`.

    Boxes of LINE bytes a row are swizzled, and those of half a line whose elements are bytes;
    others lie as they are. `stride` is from row to row, in bytes; it, `pointer` and the bytes of
    `width` are multiples of 16.

    Raises
    ------
    BackendUnavailable
        Without a CUDA driver.
    RuntimeError
        Where the driver refuses the matrix.
    """
    nbytes = width * SIZES[dtype]
    half = dtype == "uint8" and nbytes == LINE // 2
    swizzle = SWIZZLE_128 if nbytes == LINE else SWIZZLE_64 if half else STRAIGHT
    room = ctypes.create_string_buffer(MAP_BYTES + 64)
    aligned = (ctypes.addressof(room) + 63) & ~63
    result = driver.library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        DATA_TYPES[dtype],
        2,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(stride),
        (ctypes.c_uint32 * 2)(width, height),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        swizzle,
        PROMOTE_256,
        0,
    )
    if result:
        raise RuntimeError(f"the CUDA driver refuses a tensor map: error {result}")
    return ctypes.string_at(aligned, MAP_BYTES)
