"""cuBLAS, where it is installed: one matrix product, by its C interface.

CuPy's own calls refuse a stream that is being captured into a CUDA graph, and give no way to set
cuBLAS's workspace, without which it allocates.
"""

import ctypes
import importlib.util
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

from cuquant.gpu.backend import Gemm

# cublasOperation_t, cublasComputeType_t, cublasGemmAlgo_t, cublasMath_t and cudaDataType.
TRANSPOSED, PLAIN = 1, 0
COMPUTE_32F, ALGORITHM = 68, -1
NO_REDUCED_REDUCTION = 16  # partial sums meet in float32, whatever the result's type is
TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}

_POINTER = ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "cublasCreate_v2": [_POINTER],
    "cublasSetMathMode": [_POINTER, ctypes.c_int],
    "cublasSetStream_v2": [_POINTER, _POINTER],
    "cublasSetPointerMode_v2": [_POINTER, ctypes.c_int],
    "cublasSetWorkspace_v2": [_POINTER, _POINTER, ctypes.c_size_t],
    "cublasGemmEx": [
        _POINTER,
        *[ctypes.c_int] * 5,
        _POINTER,
        *[_POINTER, ctypes.c_int, ctypes.c_int] * 2,
        _POINTER,
        *[_POINTER, ctypes.c_int, ctypes.c_int],
        ctypes.c_int,
        ctypes.c_int,
    ],
}


class CublasError(RuntimeError):
    """cuBLAS returned a status that is not success."""


class Cublas:
    """A handle of the library on the current device.

    It is this class's alone, so that nobody's settings of CuPy's or torch's handles change.

    Raises
    ------
    CublasError
        Where the library cannot be used on the device.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._lock = threading.Lock()  # a stream and a workspace belong to the call that follows
        self._handle = _POINTER()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetMathMode", self._handle, NO_REDUCED_REDUCTION)

    def gemm(self, stream: int, gemm: Gemm) -> None:
        """A product on the stream of this handle."""
        (rows, columns, depth), x, weights, out, *_ = gemm
        one, zero = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))
        on_device = bool(gemm.factor)
        factors = (gemm.factor, gemm.factor + 4) if on_device else (one, zero)
        with self._lock:
            self._call("cublasSetPointerMode_v2", self._handle, int(on_device))
            self._call("cublasSetStream_v2", self._handle, stream)
            self._call("cublasSetWorkspace_v2", self._handle, *gemm.scratch)
            # Its matrices run down columns, so these are transposed: out.T = weights @ x.T.
            self._call(
                "cublasGemmEx",
                self._handle,
                PLAIN if weights.transposed else TRANSPOSED,
                TRANSPOSED if x.transposed else PLAIN,
                columns,
                rows,
                depth,
                factors[0],
                *(weights.pointer, TYPES[weights.dtype], weights.stride),
                *(x.pointer, TYPES[x.dtype], x.stride),
                factors[1],
                *(out.pointer, TYPES[out.dtype], out.stride),
                COMPUTE_32F,
                ALGORITHM,
            )

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CublasError(f"{name} of cuBLAS returned status {status}")


@cache
def library(major: int) -> Any | None:
    """The shared library for a CUDA major version, None where it is not installed."""
    windows = sys.platform == "win32"
    name = f"cublas64_{major}.dll" if windows else f"libcublas.so.{major}"
    for path in (name, *(str(folder / name) for folder in _wheel_folders(major))):
        try:
            found = ctypes.CDLL(path)
            for function, types in _SIGNATURES.items():
                getattr(found, function).argtypes = types
        except (OSError, AttributeError):  # not there, or too old
            continue
        return found
    return None


def _wheel_folders(major: int) -> list[Path]:
    """Where NVIDIA's own wheels have their libraries."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    inner = ("cublas/lib", "cublas/bin", f"cu{major}/lib", f"cu{major}/bin/x86_64")
    return [Path(root) / each for root in roots for each in inner]
