"""Allocation: every array that cuquant makes starts on 256 bytes, as device memory does."""

import numpy as np

ALIGNMENT = 256


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised C-contiguous array whose first byte stands on a multiple of 256."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def aligned(x: np.ndarray, copy: bool = False) -> np.ndarray:
    """A contiguous array that starts on 256 bytes: `x` itself where it does and may, or a copy."""
    if not copy and x.flags.c_contiguous and x.ctypes.data % ALIGNMENT == 0:
        return x
    made = empty(x.shape, x.dtype)
    made[...] = x
    return made
