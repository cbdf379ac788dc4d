"""What is asked of the CUDA driver itself: calls that CuPy does not bind."""

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

from cuquant.errors import BackendUnavailable

# CUlaunchConfig: blocks along x, y, z; threads along x, y, z; bytes of dynamic shared memory;
# the stream; attributes and how many there are.
CONFIG = struct.Struct("<7I4xQQI4x")
# CUlaunchAttribute: its number, and a value of 64 bytes.
ATTRIBUTE = struct.Struct("<I4xI60x")
OVERLAP = ATTRIBUTE.pack(6, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed
OVERLAP_VERSION = 12030  # of the first driver that records it in CUDA graphs

Start = Callable[[int, int, int, int], int]


@cache
def library() -> Any:
    """The driver's library.

    Raises
    ------
    BackendUnavailable
        Without a CUDA driver.
    """
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise BackendUnavailable("the CUDA driver cannot be loaded; `cuquant doctor` tells more")


@cache
def starter() -> Start | None:
    """cuLaunchKernelEx(CONFIG's address, function, parameters' address, 0), or None.

    None where kernels cannot start while others end, or not in a CUDA graph.
    """
    version = ctypes.c_int()
    try:
        found = library()
        if found.cuDriverGetVersion(ctypes.byref(version)) or version.value < OVERLAP_VERSION:
            return None
        start = found.cuLaunchKernelEx
    except (BackendUnavailable, AttributeError):
        return None
    start.argtypes, start.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return start
