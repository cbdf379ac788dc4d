"""What several kinds of checkpoints have in common: what shares a scale, and arrays of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from cuquant.formats import Format, get_format
from cuquant.formats.names import FormatName
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.safetensors import TensorInfo
from cuquant.io.schema.columns import CHUNK
from cuquant.io.schema.layer import Extent, Layer, Parts, refuse, scale_dtype

ONE_BIT = "codes of 1 bit take 2"  # a note of layers, of which cuquant has no format


def extent_of(
    codes: tuple[int, ...],
    scales: tuple[int, ...],
    name: str,
    group: object = None,
    tile: object = None,
) -> Extent:
    """What shares a scale of a weight of the shape `codes`, by the scales' shape.

    `group` and `tile` are a configuration's: columns of a group, and [rows, columns] of a block;
    groups that it does not tell are equal parts of the columns. Of several matrices [E, N, K] each
    may have one scale, [E], [E, 1] or [E, 1, 1]: a block that holds a whole matrix.
    """
    if int(np.prod(scales, dtype=np.int64)) == 1:
        return "tensor"
    if scales in (codes[:-1], (*codes[:-1], 1)):
        return "row"
    if scales[:-1] == codes[:-1] and scales[-1]:
        size = group if isinstance(group, int) and group > 0 else codes[-1] // scales[-1]
        if size and -(-codes[-1] // size) == scales[-1]:
            return size
    if isinstance(tile, (list, tuple)) and len(tile) == 2 and len(codes) > 1:
        tall, wide = tile
        whole = type(tall) is type(wide) is int and min(tall, wide) > 0
        if whole and scales[-2:] == (-(-codes[-2] // tall), -(-codes[-1] // wide)):
            return tall, wide
    if len(codes) > 2 and is_of_matrices(codes, scales):
        return max(codes[-2], 1), max(-(-codes[-1] // 8), 1) * 8
    raise refuse(name, f"scales {list(scales)} do not fit a weight of {list(codes)}")


def is_of_matrices(codes: tuple[int, ...], numbers: tuple[int, ...]) -> bool:
    """Whether there is a number for each matrix of a weight [..., N, K].

    >>> is_of_matrices((8, 64, 32), (8,)), is_of_matrices((8, 64, 32), (8, 1, 1))
    (True, True)
    >>> is_of_matrices((8, 64, 32), (1, 8)), is_of_matrices((64, 32), (64,))
    (False, False)
    """
    leading = codes[:-2]
    ones = numbers[len(leading) :]
    return bool(leading) and numbers[: len(leading)] == leading and ones in ((), (1,), (1, 1))


def integers(
    c: Checkpoint,
    name: str,
    codes: TensorInfo,
    scales: TensorInfo,
    extent: Extent,
    dtype: np.dtype,
    zeros: str | None = None,
) -> Layer:
    """Two's complement bytes I8, with scales and perhaps zero points I8 of the same shape."""
    if codes.dtype != "I8":
        raise refuse(name, f"integers of {codes.dtype}")
    kept = scale_dtype(scales, "scales")
    fmt = get_format("uint8" if zeros else "int8", block_size=extent, scale_dtype=kept)

    def parts() -> Parts:
        stored = c.read(codes.name)
        found = {"packed": stored, "scale": c.read(scales.name)}
        if zeros:
            found["packed"] = stored.view(np.uint8) ^ np.uint8(128)
            found["zero_point"] = c.read(zeros).astype(np.int8).view(np.uint8) ^ np.uint8(128)
        return found

    names = (codes.name, scales.name, *((zeros,) if zeros else ()))
    return Layer(name, fmt, codes.shape, dtype, names, parts)


def block_floats(
    c: Checkpoint,
    name: str,
    kind: FormatName,
    codes: TensorInfo,
    scales: TensorInfo,
    dtype: np.dtype,
    whole: tuple[str, Callable[[np.ndarray], np.ndarray]] | None = None,
    divisor: bool = False,
) -> Layer:
    """An MX format's or NVFP4's codes, densely in bytes or words, and the bytes of their scales.

    `whole`: the tensor of NVFP4's global scale, or of the `divisor`, and what that is of its
    number; 1 without it. Several matrices may have one each.
    """
    size = () if whole is None else c.info(whole[0]).shape
    of_each = math.prod(size) != 1
    if of_each and not is_of_matrices(codes.shape, size):
        raise refuse(name, f"global scales {list(size)} do not fit {list(codes.shape)}")
    fmt = get_format(kind, divisor=divisor, per_matrix=of_each)
    shape = (*codes.shape[:-1], codes.shape[-1] * 8 * codes.numpy_dtype.itemsize // fmt.bits)

    def parts() -> Parts:
        packed = c.read(codes.name).view(fmt.row_packing.dtype)
        found = {"packed": packed, "scale": c.read(scales.name).view(np.uint8)}
        if fmt.rule.nested == "global":
            found["global_scale"] = np.ones((), np.float32)
            if whole is not None:
                with np.errstate(all="ignore"):
                    number = c.read(whole[0]).astype(np.float32)
                    found["global_scale"] = np.asarray(whole[1](number), np.float32)
        return found

    names = (codes.name, scales.name, *((whole[0],) if whole else ()))
    return Layer(name, fmt, shape, dtype, names, parts)


def packed_by_rows(
    fmt: Format, rows: int, depth: int, codes: Callable[[int, int], np.ndarray]
) -> np.ndarray:
    """Packed rows of a matrix, of which `codes` gives the uint8 codes of rows [start, stop)."""
    packing = fmt.row_packing
    out = np.empty((rows, packing.words(depth)), packing.dtype)
    step = max(CHUNK // max(depth, 1) // 4, 1) * 4
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        out[start:stop] = packing.pack(codes(start, stop).reshape(-1, depth), fmt.zero_code)
    return out


def of_slabs(
    words: np.ndarray, bits: int, shifts: Sequence[int], start: int, stop: int
) -> np.ndarray:
    """uint8 codes of rows [start, stop) of words [words, g], whose field at shifts[i] is of the
    i-th slab of rows; the last slab may be padded.

    >>> of_slabs(np.array([[0x21], [0x43]], np.uint8), 4, (0, 4), 1, 4).ravel().tolist()
    [3, 2, 4]
    """
    tall, mask = len(words), (1 << bits) - 1
    if not 0 <= start <= stop <= len(shifts) * tall:
        raise ValueError(f"rows to {stop} are not in {len(shifts)} slabs of {tall}")
    codes = np.empty((stop - start, words.shape[1]), np.uint8)
    for slab, shift in enumerate(shifts):
        first, last = max(start, slab * tall), min(stop, (slab + 1) * tall)
        if first < last:
            fields = words[first - slab * tall : last - slab * tall] >> shift & mask
            codes[first - start : last - start] = fields
    return codes
