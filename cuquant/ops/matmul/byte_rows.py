"""Rows of bytes, or of bits, along an axis of an array: as they lie, or made by
matmul/byte_rows.cu.

Kernels that multiply codes read rows that run along the contraction and start on 16 bytes.
"""

import math
import struct
from dataclasses import dataclass, replace
from functools import lru_cache

from cuquant import interop
from cuquant.gpu.backend import Backend, aligned
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.view import View
from cuquant.lazy import lazy
from cuquant.ops import cpp
from cuquant.ops.matmul.coded import ALIGNMENT

BYTES, NIBBLES = "Bytes", "Nibbles"  # of what matmul/byte_rows.cu makes bytes
MOST_DIMS = 5  # its Given::most
TURNED, ACROSS, ALONG = range(3)  # its Way
TILE, THREADS, FOUR = 128, 256, 4
OF_BITS, BITS_WIDTH = 8, 32  # columns of a byte of bits; bytes of a tile's row, of bits


def signs_of(dtype: object) -> str:
    """What makes signs of an array of floats or integers."""
    return f"Signs<{_type_of(dtype)}>"


def bits_of(dtype: object) -> str:
    """What makes signs of them as bits, eight in a byte."""
    return f"Bits<{_type_of(dtype)}>"


def _type_of(dtype: object) -> str:
    found = interop.numpy_dtype(dtype)
    integer = found.kind in "iu"
    return f"{found.kind}{8 * found.itemsize}" if integer else cpp.element_of(found)


def expanded(view: View, shape: tuple[int, ...]) -> View:
    """The view broadcast to a shape, as NumPy does."""
    missing = len(shape) - len(view.shape)
    steps = (0,) * missing + tuple(
        0 if size == 1 else step for size, step in zip(view.shape, view.strides, strict=True)
    )
    return View(view.pointer, shape, steps, view.dtype)


@dataclass(frozen=True)
class ByteRows:
    """An array on its way to rows of bytes.

    Attributes
    ----------
    view
        [..., K]; of NIBBLES the last axis has bytes.
    element
        What a byte is made of: BYTES, NIBBLES, `signs_of` or, of eight columns, `bits_of`.
    depth
        K.
    dense
        Whether rows must follow each other without gaps but those up to ALIGNMENT.
    """

    view: View
    element: str
    depth: int
    dense: bool = False

    @classmethod
    def along(
        cls, view: View, axis: int, element: str, depth: int | None = None, dense: bool = False
    ) -> "ByteRows":
        """Rows along an axis; the others follow each other in their order."""
        axis %= len(view.shape)
        others = tuple(i for i in range(len(view.shape)) if i != axis)
        moved = view.moved((*others, axis))
        return cls(moved, element, moved.shape[-1] if depth is None else depth, dense)

    @property
    def rows(self) -> int:
        return math.prod(self.view.shape[:-1])

    @lazy
    def _dims(self) -> list[tuple[int, int]]:
        """Sizes and steps of the axes but K; those that can be counted through are one."""
        dims: list[tuple[int, int]] = []
        for size, step in zip(self.view.shape[:-1], self.view.strides[:-1], strict=True):
            if size == 1:
                continue
            if dims and dims[-1][1] == size * step:
                size *= dims.pop()[0]
            dims.append((size, step))
        return dims or [(1, 0)]

    @lazy
    def is_ready(self) -> bool:
        """Whether kernels read the array as it lies."""
        dims = self._dims
        along = self.element == BYTES and self.view.strides[-1] == 1 and len(dims) == 1
        places = self.view.pointer, dims[0][1], self.depth
        along &= not self.dense or dims[0][1] == self.depth
        return not self.depth or (along and all(n % ALIGNMENT == 0 for n in places))

    @property
    def is_bits(self) -> bool:
        return self.element.startswith("Bits<")

    @property
    def width(self) -> int:
        """Bytes of a row, to the next place on ALIGNMENT: behind K there are zeros."""
        columns = ALIGNMENT * (OF_BITS if self.is_bits else 1)
        return -(-self.depth // columns) * ALIGNMENT

    @property
    def stride(self) -> int:
        """Bytes from row to row: of the array where it is ready, else of what is made."""
        return self._dims[0][1] if self.is_ready and self.depth else self.width

    @property
    def nbytes(self) -> int:
        """Memory for what is made."""
        return 0 if self.is_ready else aligned(self.rows * self.stride)

    def make(self, backend: Backend, to: int) -> int:
        """Write the rows to an address, unless they are ready; and where they are."""
        if self.is_ready:
            return self.view.pointer
        if self.rows:
            self._make(backend, to, self._dims)
        return to

    def _make(self, backend: Backend, to: int, dims: list[tuple[int, int]]) -> None:
        *matrices, (rows, row_step) = dims
        if len(matrices) > MOST_DIMS:  # one by one along the first axis
            (size, step), *rest = dims
            item = self.view.dtype.itemsize
            for i in range(size):
                own = self.view._replace(pointer=self.view.pointer + i * step * item)
                nbytes = math.prod(n for n, _ in rest) * self.stride
                replace(self, view=own)._make(backend, to + i * nbytes, rest)
            return
        count = math.prod(size for size, _ in matrices)
        wide = BITS_WIDTH if self.is_bits else TILE
        row_tiles, column_tiles = -(-rows // TILE), -(-self.stride // wide)
        launch = _launch(self.element, count * row_tiles * column_tiles)
        given = self._given(rows, row_step, matrices)
        backend.launch(launch, given, to, self.depth, self.stride, row_tiles, column_tiles)

    def _given(self, rows: int, row_step: int, matrices: list[tuple[int, int]]) -> bytes:
        """The Given struct."""
        pointer, column_step = self.view.pointer, self.view.strides[-1]
        steps = [step for _, step in matrices]
        turned = self.element == BYTES and row_step == 1
        turned &= all(n % FOUR == 0 for n in (pointer, column_step, *steps))
        across = abs(row_step) < abs(column_step)
        if turned:
            vectors = all(n % ALIGNMENT == 0 for n in (pointer, column_step, *steps))
        else:
            together = OF_BITS if self.is_bits else FOUR
            vectors = self.element != NIBBLES and column_step == 1
            vectors &= all(n % together == 0 for n in (row_step, *steps))
            vectors &= pointer % (together * self.view.dtype.itemsize) == 0
        padded = [*matrices, *[(1, 0)] * (MOST_DIMS - len(matrices))]
        return struct.pack(
            f"<Q4q{2 * MOST_DIMS}q2i",
            pointer,
            rows,
            row_step,
            column_step,
            len(matrices),
            *(size for size, _ in padded),
            *(step for _, step in padded),
            TURNED if turned else ACROSS if across else ALONG,
            vectors,
        )


@lru_cache(maxsize=1024)
def _launch(element: str, blocks: int) -> Launch:
    return Launch(program_of(element), (blocks, 1, 1), THREADS)


def program_of(element: str) -> Program:
    """The kernel that makes rows of an element."""
    return Program("matmul/byte_rows.cu", "byte_rows", (element,))
