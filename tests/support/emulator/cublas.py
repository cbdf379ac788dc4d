"""The few functions of cuBLAS that cuquant calls, on NumPy: products of matrices that run down
columns, as its documentation has them."""

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

HANDLE = 0xB1A5
TYPES = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}
NOT_INITIALIZED, INVALID, NOT_SUPPORTED = 1, 7, 15  # cublasStatus_t
TRANSPOSE, COMPUTE_32F = 1, 68


class Library:
    """In the place of the shared library.

    Parameters
    ----------
    broken
        It loads, but no handle can be made.
    alignment
        Of workspaces; torch's allocator on the CPU has a smaller one.
    """

    def __init__(self, broken: bool = False, alignment: int = 256) -> None:
        self.broken, self.alignment = broken, alignment
        self.calls: list[str] = []
        self.stream: Any = None
        self.workspace: tuple[int, int] | None = None
        self.math = self.pointers = 0

    def cublasCreate_v2(self, handle: Any) -> int:
        handle._obj.value = HANDLE
        return NOT_INITIALIZED if self.broken else 0

    def cublasSetMathMode(self, handle: Any, mode: int) -> int:
        self.math = mode
        return self._known(handle)

    def cublasSetPointerMode_v2(self, handle: Any, mode: int) -> int:
        self.pointers = mode
        return self._known(handle)

    def cublasSetStream_v2(self, handle: Any, stream: int) -> int:
        """It resets the workspace."""
        self.stream, self.workspace = stream, None
        return self._known(handle)

    def cublasSetWorkspace_v2(self, handle: Any, address: int, nbytes: int) -> int:
        self.workspace = address, nbytes
        return self._known(handle) or (INVALID if address % self.alignment else 0)

    def cublasGemmEx(self, handle: Any, *arguments: Any) -> int:
        """c = alpha * op(a) @ op(b), of [m, n]. Sums are exact for 16-bit floats, so that it does
        not matter how a product is cut; then they become float32."""
        self.calls.append("gemm")
        a_order, b_order, m, n, k, alpha, *rest = arguments
        a, a_type, a_step, b, b_type, b_step, beta, c, c_type, c_step, compute, _ = rest
        dtypes = [TYPES[kind] for kind in (a_type, b_type, c_type)]
        wrong = a_type != b_type or c_type not in (a_type, 0) or compute != COMPUTE_32F
        if wrong or self.workspace is None or self._known(handle):
            return NOT_SUPPORTED
        if any(pointer % dtype.itemsize for pointer, dtype in zip((a, b, c), dtypes, strict=True)):
            return NOT_SUPPORTED
        shapes = [(k, m) if a_order == TRANSPOSE else (m, k)]
        shapes += [(n, k) if b_order == TRANSPOSE else (k, n), (m, n)]
        for (down, _), step in zip(shapes, (a_step, b_step, c_step), strict=True):
            if step < max(1, down):
                return INVALID
        left, right = (
            _columns(pointer, dtype, *shape, step).astype(np.float64)
            for pointer, dtype, shape, step in zip(
                (a, b), dtypes[:2], shapes[:2], (a_step, b_step), strict=True
            )
        )
        left = left.T if a_order == TRANSPOSE else left
        right = right.T if b_order == TRANSPOSE else right
        with np.errstate(all="ignore"):
            made = self._factor(alpha) * np.matmul(left, right)
            _columns(c, dtypes[2], m, n, c_step)[...] = made.astype(np.float32)
        return 0 if self._factor(beta) == 0 else NOT_SUPPORTED

    def _factor(self, given: Any) -> float:
        """A number on the host, or at an address of the device."""
        return ctypes.c_float.from_address(given).value if self.pointers else given._obj.value

    @staticmethod
    def _known(handle: Any) -> int:
        return 0 if handle.value == HANDLE else NOT_INITIALIZED


def _columns(pointer: int, dtype: np.dtype, down: int, across: int, step: int) -> np.ndarray:
    """The matrix [down, across] in memory, whose columns begin `step` elements apart."""
    count = (across - 1) * step + down if across and down else 0
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    flat = np.frombuffer(memory, dtype)
    strides = (dtype.itemsize, step * dtype.itemsize)
    return np.lib.stride_tricks.as_strided(flat, (down, across), strides)
