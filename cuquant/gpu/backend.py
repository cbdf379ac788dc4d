"""Where kernels run: the few things that launching needs of an array library."""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from cuquant.gpu.jit import Launch
from cuquant.gpu.rates import Rates
from cuquant.gpu.tensor_map import COLUMNS

ALIGNMENT = 256  # of a workspace


def aligned(nbytes: int) -> int:
    """So many bytes, and those to the next place on ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Matrix(NamedTuple):
    """Rows of floats, whose elements follow each other.

    Attributes
    ----------
    pointer, stride
        The address, and elements from row to row.
    dtype
        Its name.
    transposed
        The rows in memory are the matrix's columns.
    """

    pointer: int
    stride: int
    dtype: str
    transposed: bool = False


class Gemm(NamedTuple):
    """out = factor * x @ weights.T, of [M, K], [N, K] and [M, N], with float32 sums.

    Attributes
    ----------
    shape
        M, N and K.
    x, weights, out
        x and the weights are of one dtype, and out is of the same or of float32; out is not
        transposed.
    factor
        The address of a float32 number that the float32 sums are multiplied by, which 0.0 follows;
        0: they are not.
    scratch
        Address and bytes of memory that the product may use.
    """

    shape: tuple[int, int, int]
    x: Matrix
    weights: Matrix
    out: Matrix
    factor: int
    scratch: tuple[int, int]


class Backend(Protocol):
    """An array library on one device and one stream; tests run the same kernels on the CPU."""

    @property
    def multiprocessors(self) -> int:
        """Of the device; launch rules ask."""
        ...

    @property
    def arch(self) -> int:
        """The device's compute capability, 90 for 9.0; the choice of a kernel asks."""
        ...

    @property
    def rates(self) -> Rates:
        """What the device does in a microsecond; the choice of a kernel asks."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A C-contiguous array on 256 bytes, uninitialised."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """The same, of zeros."""
        ...

    def contiguous(self, x: Any, axis: int) -> Any:
        """`moveaxis(x, axis, -1)` in C order on 16 bytes: x itself, or a copy."""
        ...

    def broadcast(self, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A contiguous copy of an array of numbers, in this shape and dtype."""
        ...

    def copy_into(self, target: Any, source: Any) -> None:
        """target[...] = source."""
        ...

    def read(self, array: Any) -> np.ndarray:
        """The array on the host, once all work before is done: the one call that waits."""
        ...

    def pointer(self, array: Any) -> int:
        """The address of an array's first element."""
        ...

    def upload(self, array: np.ndarray) -> Any:
        """A constant NumPy array on the device; kept, so that the same table travels once."""
        ...

    def tensor_map(
        self,
        pointer: int,
        rows: int,
        columns: int,
        stride: int,
        height: int,
        dtype: str,
        width: int = COLUMNS,
    ) -> bytes:
        """The tensor map of a matrix: see tensor_map.py."""
        ...

    @property
    def has_vendor(self) -> bool:
        """Whether `gemm` can be called."""
        ...

    def gemm(self, gemm: Gemm) -> None:
        """A product by the vendor's library."""
        ...

    def workspace(self, nbytes: int) -> AbstractContextManager[int]:
        """The address, on ALIGNMENT, of memory that a call has while it runs: see workspace.py."""
        ...

    def launch(self, launch: Launch, *arguments: int | float | bytes) -> None:
        """Start a kernel.

        An int is a pointer or an integer parameter, a float a float32 one, and bytes are a struct
        passed by value.
        """
        ...
