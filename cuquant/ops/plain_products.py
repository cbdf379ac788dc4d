"""Products of plain arrays on a GPU, b as [..., K, N].

Integers of 8 and 4 bits, and signs, are rows of bytes for matmul/dense_warps.cu, whose sums are
those of int64 modulo 2^32. Floats go through the vendor's GEMM, or the plain kernels.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuquant import interop
from cuquant.gpu.arrays import GpuBackend, backend_of
from cuquant.gpu.backend import aligned
from cuquant.ops.matmul import dense_warps
from cuquant.ops.matmul.byte_rows import ByteRows, expanded
from cuquant.ops.matmul.coded import SUM_BYTES, Coded, Groups, Scaling, add_up
from cuquant.ops.matmul.epilogue import Epilogue
from cuquant.ops.matmul.operands import name_of, resolved

F32 = np.dtype(np.float32)


class Scales(NamedTuple):
    """What a product is multiplied by, one after the other; float32, or None: not at all.

    Attributes
    ----------
    a, b
        One number, or [..., M, 1] and [..., 1, N].
    c
        One number.
    """

    a: Any = None
    b: Any = None
    c: Any = None


@dataclass(frozen=True)
class Integers:
    """An operand whose elements become bytes.

    Attributes
    ----------
    array
        [..., M, K] or [..., K, N]; of nibbles K is that of bytes.
    axis
        That of K: -1 or -2.
    element
        What bytes are made of, as `ByteRows` has it.
    dtype
        int8 or uint8: what the bytes are then.
    depth
        K.
    zero_point
        One integer, on the host or of the device; None: 0.
    """

    array: Any
    axis: int
    element: str
    dtype: np.dtype
    depth: int
    zero_point: Any = None


def one_number(backend: GpuBackend, value: Any, dtype: np.dtype, count: int = 1) -> Any:
    """A number, of the host or of the device, as an array [count] on the device."""
    if interop.is_on_gpu(value):
        return backend.broadcast(value.reshape(1), (count,), dtype)
    return backend.broadcast(np.asarray(value).reshape(())[()], (count,), dtype)


class Sides:
    """Both operands as kernels read them, and the arrays that must live until the launch."""

    def __init__(self, backend: GpuBackend, operands: Sequence[Integers], groups: Groups) -> None:
        self.backend, self.groups = backend, groups
        self.operands = operands
        self.kept: list[Any] = []

    def keep(self, array: Any) -> Any:
        self.kept.append(array)
        return array

    def scaling(self, scale: Any, shape: tuple[int, ...], rows: int) -> tuple[Scaling, int]:
        """The scales of a side whose matrices have so many rows, and how many there are."""
        if scale is None:
            return Scaling(), 1
        if math.prod(scale.shape) == 1:
            own = self.keep(one_number(self.backend, scale, F32))
            return Scaling(self.backend.pointer(own)), 1
        whole = self.keep(self.backend.broadcast(scale, shape, F32))
        matrix = rows if self.groups.count > 1 else 0
        return Scaling(self.backend.pointer(whole), across=1, matrix=matrix), math.prod(shape)

    def coded(
        self,
        i: int,
        rows: ByteRows,
        scaling: tuple[Scaling, int],
        each: int,
        at: int,
        sums: int,
    ) -> Coded:
        """Side i: rows of bytes, made at an address; sums of rows at another one, if it is not 0.

        `each` are the rows of a matrix.
        """
        operand, codes = self.operands[i], rows.make(self.backend, at)
        scales, places = scaling
        kind = operand.dtype.name
        if sums:
            shape = rows.rows, rows.depth, rows.stride
            add_up(self.backend, kind, codes, shape, max(rows.depth, 1), sums)
        points = 0
        if operand.zero_point is not None:
            made = one_number(self.backend, operand.zero_point, operand.dtype, places)
            points = self.backend.pointer(self.keep(made))
        return Coded(kind, codes, rows.stride, each, scales, points, sums)


def multiply_integers(
    a: Integers,
    b: Integers,
    shape: tuple[int, ...],
    dtype: object,
    scales: Scales | None = None,
    bias: Any = None,
    activation: str | None = None,
) -> Any:
    """A new array of `shape`, [..., M, N]: int32 sums, or what scales and the bias make of them."""
    with backend_of(a.array) as backend:
        out = backend.empty(shape, interop.numpy_dtype(dtype))
        if not math.prod(shape):
            return out
        *batch, rows, columns = shape
        own = scales or Scales()
        shared = all(math.prod(x.shape[:-2]) == 1 for x in (b.array, own.b) if x is not None)
        groups = Groups(1, math.prod(shape[:-1])) if shared else Groups(math.prod(batch), rows)
        sides = Sides(backend, (a, b), groups)
        left, right = (
            ByteRows.along(
                expanded(backend.view(array), (*outer, *array.shape[-2:])),
                operand.axis,
                operand.element,
                operand.depth,
            )
            for operand, array, outer in (
                (a, sides.keep(resolved(backend, a.array)), batch),
                (b, sides.keep(resolved(backend, b.array)), () if shared else batch),
            )
        )
        scalings = (
            sides.scaling(own.a, (*batch, rows, 1), groups.rows),
            sides.scaling(own.b, (*(() if shared else batch), 1, columns), columns),
        )
        factor = None if own.c is None else sides.keep(one_number(backend, own.c, F32))
        added = None if bias is None else sides.keep(backend.contiguous(bias.reshape(columns), -1))
        epilogue = Epilogue(
            out=out,
            out_type=interop.name_of(out_dtype := interop.numpy_dtype(dtype)),
            out_stride=columns,
            bias=added,
            bias_type=name_of(backend, added),
            activation=activation,
        )
        results = epilogue.pack(backend) + struct.pack(
            "<2Q", 0 if factor is None else backend.pointer(factor), 0
        )
        sums = [
            aligned(side.rows * SUM_BYTES) if other.zero_point is not None else 0
            for side, other in ((left, b), (right, a))
        ]
        with backend.workspace(max(left.nbytes + right.nbytes + sum(sums), 1)) as at:
            free = at + left.nbytes + right.nbytes
            x = sides.coded(0, left, scalings[0], groups.rows, at, sums[0] and free)
            w = sides.coded(
                1, right, scalings[1], columns, at + left.nbytes, sums[1] and free + sums[0]
            )
            product = groups.rows, columns, a.depth
            dense_warps.multiply(backend, x, w, product, groups, max(a.depth, 1), results)
        return out
