"""Allocation: every array that cuquant makes starts on 256 bytes, as device memory does."""

import math
import sys

import numpy as np

ALIGNMENT = 256


def holds(shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether NumPy can have such an array: it multiplies the extents that are not 0."""
    return math.prod(n or 1 for n in shape) * dtype.itemsize + ALIGNMENT <= sys.maxsize


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised C-contiguous array whose first byte stands on a multiple of 256.

    Raises
    ------
    ValueError
        For a shape that NumPy cannot hold.
    """
    dtype = np.dtype(dtype)
    if not holds(shape, dtype):
        raise ValueError(f"{dtype}{list(shape)} is more than NumPy's arrays can be")
    nbytes = math.prod(shape) * dtype.itemsize
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
