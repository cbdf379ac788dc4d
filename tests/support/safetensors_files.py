"""Files for the tests of the safetensors container: arrays of every dtype, and bytes by hand."""

import json
import struct

import numpy as np

from cuquant.io.container.safetensors import SafetensorsWriter, numpy_dtype

NUMPY_TAGS = [
    "BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64", "C64"
]  # fmt: skip
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
TAGS = [*NUMPY_TAGS, "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", *BITS]
SHAPES = [(), (1,), (0,), (0, 7), (3, 0, 5), (7,), (31, 33), (2, 3, 5, 7), (4,), (8, 12), (1,) * 64]


def fits(tag, shape):
    return int(np.prod(shape)) * BITS.get(tag, 8) % 8 == 0


def sample(tag, shape, seed=0):
    """Random bytes of every kind (NaN payloads included), as an array of that dtype."""
    dtype = numpy_dtype(tag)
    highest = 1 if tag == "BOOL" else 2 ** BITS.get(tag, 8) - 1
    size = int(np.prod(shape)) * dtype.itemsize
    codes = np.random.default_rng(seed).integers(0, highest, size, np.uint8, endpoint=True)
    return codes.view(dtype).reshape(shape)


def bytes_of(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def assert_same(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert bytes_of(got) == bytes_of(want)


def write_file(path, arrays, metadata=None):
    specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    with SafetensorsWriter(path, specs, metadata) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
    return path


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def container(header, data=b"", length=None):
    """The bytes of a file; header is an object to dump, or text or bytes to take as they are."""
    if isinstance(header, dict):
        header = json.dumps(header)
    header = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(header) if length is None else length) + header + data
