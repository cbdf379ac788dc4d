"""Products of plain arrays of integers on a GPU, b as [..., K, N].

Integers of 8 and 4 bits, and signs, are rows of bytes for products of codes, whose sums are
those of int64 modulo 2^32. Where tensor cores multiply bits signs are rows of those: an eighth is
read, and multiplied faster.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuquant import interop
from cuquant.formats import Format
from cuquant.gpu.arrays import GpuBackend, backend_of
from cuquant.gpu.backend import aligned
from cuquant.gpu.jit import Program
from cuquant.ops.matmul import coded_kernels, dense, dense_warps
from cuquant.ops.matmul.byte_rows import (
    BYTES,
    NIBBLES,
    ByteRows,
    bits_of,
    expanded,
    program_of,
    signs_of,
)
from cuquant.ops.matmul.coded import (
    BITS,
    SUM_BYTES,
    Coded,
    Groups,
    Scaling,
    add_up,
    sums_program,
)
from cuquant.ops.matmul.epilogue import Epilogue
from cuquant.ops.matmul.operands import name_of, resolved
from cuquant.ops.matmul.patches import Patches

F32 = np.dtype(np.float32)
MOST_KEPT = 256 << 20  # bytes of rows in a workspace


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


UNSCALED = Scales()


@dataclass(frozen=True)
class Integers:
    """An operand whose elements become bytes, or bits.

    Attributes
    ----------
    array
        [..., M, K] or [..., K, N]; of nibbles K is that of bytes.
    axis
        That of K: -1 or -2.
    element
        What bytes are made of, as `ByteRows` has it.
    kind
        "int8", "uint8" or BITS: what the bytes are then.
    depth
        K.
    zero_point
        One integer, on the host or of the device; None: 0.
    """

    array: Any
    axis: int
    element: str
    kind: str
    depth: int
    zero_point: Any = None


def one_number(backend: GpuBackend, value: Any, dtype: np.dtype, count: int = 1) -> Any:
    """A number, of the host or of the device, as an array [count] on the device."""
    if interop.is_on_gpu(value):
        return _whole(backend, value.reshape(1), (count,), dtype)
    return backend.broadcast(np.asarray(value).reshape(())[()], (count,), dtype)


def _whole(backend: GpuBackend, values: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """An array in a shape, a dtype and C order: itself where it has them, or a copy."""
    view = backend.view(values)
    if view.shape == shape and view.dtype == dtype and view.is_contiguous:
        return resolved(backend, values)
    return backend.broadcast(values, shape, dtype)


@contextmanager
def memory(backend: GpuBackend, nbytes: int) -> Iterator[int]:
    """The address of so many bytes while a call runs: those of a workspace, but for more than
    should be kept."""
    if not nbytes:
        yield 0
    elif nbytes <= MOST_KEPT:
        with backend.workspace(nbytes) as at:
            yield at
    else:
        array = backend.empty((nbytes,), np.dtype(np.uint8))
        yield backend.pointer(array)


class _Sides:
    """Both operands as kernels read them, and the arrays that must live until the launch.

    Where all matrices of b are one, those of a are the rows of one too.
    """

    def __init__(
        self,
        backend: GpuBackend,
        operands: tuple[Integers, Integers],
        shape: tuple[int, ...],
        scales: Scales,
    ) -> None:
        *batch, rows, columns = shape
        b = operands[1].array
        together = all(math.prod(x.shape[:-2]) == 1 for x in (b, scales.b) if x is not None)
        self.backend, self.kept = backend, list[Any]()
        self.groups = (
            Groups(1, math.prod(shape[:-1])) if together else Groups(math.prod(batch), rows)
        )
        self.rows = self.groups.rows, columns  # of a matrix
        outer = tuple(batch), (1,) if together else tuple(batch)
        wanted = (*outer[0], rows, 1), (*outer[1], 1, columns)
        self._scalings = [
            self._scaling(scale, whole, each)
            for scale, whole, each in zip(scales[:2], wanted, self.rows, strict=True)
        ]
        self._bytes = [
            self._rows_of(operand, axes) for operand, axes in zip(operands, outer, strict=True)
        ]
        self._points = [
            self._zero_points(operand, scaling)
            for operand, scaling in zip(operands, self._scalings, strict=True)
        ]
        self._kinds = [operand.kind for operand in operands]

    def keep(self, array: Any) -> Any:
        self.kept.append(array)
        return array

    def _rows_of(self, operand: Integers, outer: tuple[int, ...]) -> ByteRows:
        array = self.keep(resolved(self.backend, operand.array))
        view = self.backend.view(array)
        if math.prod(view.shape[:-2]) == 1:
            view = view._replace(shape=view.shape[-2:], strides=view.strides[-2:])
        whole = expanded(view, (*outer, *view.shape[-2:]))
        return ByteRows.along(whole, operand.axis, operand.element, operand.depth)

    def _scaling(self, scale: Any, shape: tuple[int, ...], rows: int) -> tuple[Scaling, int]:
        """The scales of a side whose matrices have so many rows, and how many there are."""
        if scale is None:
            return Scaling(), 1
        if math.prod(scale.shape) == 1:
            own = self.keep(one_number(self.backend, scale, F32))
            return Scaling(self.backend.pointer(own)), 1
        if math.prod(scale.shape[:-2]) == 1:
            scale = scale.reshape(scale.shape[-2:])
        whole = self.keep(_whole(self.backend, scale, shape, F32))
        matrix = rows if self.groups.count > 1 else 0
        return Scaling(self.backend.pointer(whole), across=1, matrix=matrix), math.prod(shape)

    def _zero_points(self, operand: Integers, scaling: tuple[Scaling, int]) -> int:
        """The address of one for each scale, or 0; without columns it does not matter."""
        if operand.zero_point is None or not operand.depth:
            return 0
        made = one_number(self.backend, operand.zero_point, np.dtype(operand.kind), scaling[1])
        return self.backend.pointer(self.keep(made))

    @contextmanager
    def coded(self) -> Iterator[tuple[Coded, Coded]]:
        """Both as kernels read them, while the context lasts."""
        sums = [  # of a side's rows, which meet the zero points of the other; or of their ones
            aligned(rows.rows * SUM_BYTES) if other or rows.is_bits else 0
            for rows, other in zip(self._bytes, self._points[::-1], strict=True)
        ]
        sizes = [*(rows.nbytes for rows in self._bytes), *sums]
        with memory(self.backend, sum(sizes)) as start:
            places = [start + sum(sizes[:i]) for i in range(len(sizes))]
            made = []
            for i, rows in enumerate(self._bytes):
                codes, kind, total = rows.make(self.backend, places[i]), self._kinds[i], 0
                if sums[i]:
                    total = places[2 + i]
                    wide = rows.width if rows.is_bits else rows.depth
                    lie = rows.rows, wide, rows.stride
                    add_up(self.backend, kind, codes, lie, wide, total)
                scaling, points = self._scalings[i][0], self._points[i]
                made.append(Coded(kind, codes, rows.stride, self.rows[i], scaling, points, total))
            yield made[0], made[1]


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
        own, columns = scales or UNSCALED, shape[-1]
        sides = _Sides(backend, (a, b), shape, own)
        added = None if bias is None else sides.keep(backend.contiguous(bias.reshape(columns), -1))
        epilogue = Epilogue(
            out=out,
            out_type=name_of(backend, out),
            out_stride=columns,
            bias=added,
            bias_type=name_of(backend, added),
            activation=activation,
        )
        factor = 0
        if own.c is not None:
            factor = backend.pointer(sides.keep(one_number(backend, own.c, F32)))
        results = epilogue.pack(backend) + struct.pack("<2Q", factor, 0)
        with sides.coded() as (x, w):
            product = *sides.rows, a.depth
            segment = max(a.depth, 1)
            run = coded_kernels.prepare(backend, x, w, product, sides.groups, segment)
            run(backend, x, results)
        return out


def multiply_signs(a: Any, b: Any, shape: tuple[int, ...]) -> Any:
    """A new int32 array of `shape`: the product of the signs of a and b, as bits where a GPU has
    products of them, or as bytes -1 and +1."""
    depth = a.shape[-1]
    with backend_of(a) as backend:
        as_bits = coded_kernels.has_bits(backend.arch) and depth > 0
    made, kind = (bits_of, BITS) if as_bits else (signs_of, "int8")
    first, second = (
        Integers(x, axis, made(interop.dtype_of(x)), kind, depth) for x, axis in ((a, -1), (b, -2))
    )
    return multiply_integers(first, second, shape, "int32")


# ---- what is compiled ---------------------------------------------------------------------------


def programs(fmt: Format, dtypes: Sequence[str] = ("float32",), arch: int = 0) -> list[Program]:
    """The programs of products and convolutions of plain arrays: of int8 and uint8, of int4's
    nibbles, and of int1's signs of arrays of `dtypes`."""
    by_bits = coded_kernels.has_bits(arch)
    signs = [signs_of, bits_of] if by_bits else [signs_of]
    made = {
        "int8": [BYTES],
        "uint8": [BYTES],
        "int4": [NIBBLES],
        "int1": [sign(interop.float_dtype(name)) for sign in signs for name in dtypes],
    }.get(fmt.name)
    if made is None:
        return []
    own = "uint8" if fmt.name == "uint8" else "int8"
    kinds = dict.fromkeys(((own, "int8"), ("int8", own), (own, own)))
    products = [(pair, x) for pair in kinds for x in (Coded.struct, Patches.struct)]
    if fmt.name == "int1" and by_bits and arch != dense.ARCH:
        products.append(((BITS, BITS), Coded.struct))
    return [
        *(program_of(element) for element in made),
        *([sums_program(BITS)] if fmt.name == "int1" and by_bits else []),
        *(
            dense_warps.program_of(pair, tile, dense_warps.STEP, False, x)
            for pair, x in products
            for tile in dense_warps.TILES
        ),
    ]
