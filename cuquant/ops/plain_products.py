"""Products of plain arrays on a GPU, b as [..., K, N].

Integers of 8 and 4 bits, and signs, are rows of bytes for matmul/dense_warps.cu, whose sums are
those of int64 modulo 2^32. Floats go through the vendor's GEMM, or the plain kernels.
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
from cuquant.gpu.backend import Gemm, Matrix, aligned
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.view import View
from cuquant.ops.matmul import dense_warps, on_gpu
from cuquant.ops.matmul.byte_rows import BYTES, NIBBLES, ByteRows, expanded, program_of, signs_of
from cuquant.ops.matmul.check import Finish, Operand
from cuquant.ops.matmul.coded import SUM_BYTES, Coded, Groups, Scaling, add_up
from cuquant.ops.matmul.epilogue import TYPES, Epilogue
from cuquant.ops.matmul.operands import name_of, resolved
from cuquant.ops.matmul.patches import Patches
from cuquant.ops.matmul.problem import MOST_STRIDE
from cuquant.ops.matmul.vendor import scratch_bytes

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
        self._kinds = [operand.dtype.name for operand in operands]

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
        made = one_number(self.backend, operand.zero_point, operand.dtype, scaling[1])
        return self.backend.pointer(self.keep(made))

    @contextmanager
    def coded(self) -> Iterator[tuple[Coded, Coded]]:
        """Both as kernels read them, while the context lasts."""
        sums = [  # of a side's rows, which meet the zero points of the other
            aligned(rows.rows * SUM_BYTES) if other else 0
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
                    lie = rows.rows, rows.depth, rows.stride
                    add_up(self.backend, kind, codes, lie, rows.depth, total)
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
            run = dense_warps.prepare(x, w, product, sides.groups, max(a.depth, 1))
            run(backend, x, results)
        return out


def multiply_signs(a: Any, b: Any, shape: tuple[int, ...]) -> Any:
    """A new int32 array of `shape`: the product of the signs of a and b, as bytes -1 and +1.

    Bytes are for every GPU; a kernel of bits takes over here.
    """
    sides = (
        Integers(x, axis, signs_of(interop.dtype_of(x)), np.dtype(np.int8), x.shape[axis])
        for x, axis in ((a, -1), (b, -2))
    )
    first, second = sides
    return multiply_integers(first, second, shape, "int32")


# ---- floats -------------------------------------------------------------------------------------

THREADS = 256  # of a block of matmul/plain_end.cu
MOST_GEMMS = 64  # of a batch by the vendor's library, one after the other
NO_PLANE = bytes(40)
_END = Program("matmul/plain_end.cu", "plain_end")


@dataclass(frozen=True)
class Ending:
    """What becomes of float32 sums: activation(sums * scales + beta * added).

    Attributes
    ----------
    scales
        As for integers.
    added
        Floats that broadcast to the result, or None.
    beta
        One number; None: 1. `added` is not read where it is 0.
    relu
        Whether what is negative becomes 0.
    """

    scales: Scales = UNSCALED
    added: Any = None
    beta: Any = None
    relu: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether sums are stored as they are."""
        given = (*self.scales, self.added)
        return not self.relu and all(each is None for each in given)

    def run(self, backend: GpuBackend, sums: Any, out: Any) -> None:
        """Write the result of contiguous sums to an array in C order."""
        shape, kept = tuple(out.shape), []
        planes = [
            _plane(backend, each, shape, kept) for each in (*self.scales, self.added, self.beta)
        ]
        *_, rows, columns = shape
        kind = TYPES[name_of(backend, out)]
        ending = b"".join(planes) + struct.pack("<2q2i", rows, columns, kind, self.relu)
        blocks = -(-columns // THREADS)
        launch = Launch(_END, (math.prod(shape[:-1]) * blocks, 1, 1), THREADS)
        backend.launch(launch, backend.pointer(sums), ending, backend.pointer(out), blocks)


def _plane(backend: GpuBackend, values: Any, shape: tuple[int, ...], kept: list[Any]) -> bytes:
    """The Plane struct of numbers that broadcast to `shape`; `kept` holds their memory."""
    if values is None:
        return NO_PLANE
    if math.prod(values.shape) == 1:
        values = one_number(backend, values, F32)
    values = resolved(backend, values)
    view = expanded(backend.view(values), shape)
    step = _batch_step(view)
    if step is None:
        values = backend.broadcast(values, shape, view.dtype)
        view = backend.view(values)
        step = view.shape[-2] * view.shape[-1]
    kept.append(values)
    kind = TYPES[interop.name_of(view.dtype)]
    return struct.pack("<Q3qi4x", view.pointer, step, *view.strides[-2:], kind)


def _batch_step(view: View) -> int | None:
    """From matrix to matrix, where all of them are as far apart; None where they are not."""
    count, found = 1, 0
    for size, step in zip(view.shape[-3::-1], view.strides[-3::-1], strict=True):
        if size == 1:
            continue
        if count == 1:
            found = step
        elif step != count * found:
            return None
        count *= size
    return found


def multiply_floats(a: Any, b: Any, shape: tuple[int, ...], dtype: np.dtype, ending: Ending) -> Any:
    """A new array of `shape`, [..., M, N]: float32 sums, their ending, and one rounding."""
    with backend_of(a) as backend:
        plain = ending.is_plain
        if not math.prod(shape):
            return backend.empty(shape, dtype)
        sums = _vendor_sums(backend, a, b, shape, dtype if plain else F32)
        if sums is None:
            left, right = Operand.of(a, "a"), Operand.of(b, "b")
            finish = Finish.check([left, right], shape, out_dtype=dtype if plain else F32)
            sums = on_gpu.matmul(left, right, finish)
        if plain:
            return sums
        out = backend.empty(shape, dtype)
        ending.run(backend, sums, out)
        return out


def _vendor_sums(
    backend: GpuBackend, a: Any, b: Any, shape: tuple[int, ...], dtype: np.dtype
) -> Any | None:
    """a @ b by the vendor's GEMM; None where it does not take it, or is not there."""
    *batch, rows, columns = shape
    depth, kind = a.shape[-1], name_of(backend, a)
    taken = kind == name_of(backend, b) and interop.name_of(dtype) in (kind, "float32")
    taken &= kind != "bfloat16" or backend.arch >= 80
    taken &= depth > 0 and max(rows, columns, depth) < MOST_STRIDE
    if not (taken and math.prod(batch) <= MOST_GEMMS and backend.has_vendor):
        return None
    left, right = resolved(backend, a), resolved(backend, b)
    x, left = _matrices(backend, left, batch, turned=False)
    weights, right = _matrices(backend, right, batch, turned=True)
    out = backend.empty(shape, dtype)
    start, size = backend.pointer(out), rows * columns * dtype.itemsize
    scratch = scratch_bytes(backend.arch)
    with backend.workspace(scratch) as at:
        for i, sides in enumerate(zip(x, weights, strict=True)):
            target = Matrix(start + i * size, columns, interop.name_of(dtype))
            backend.gemm(Gemm((rows, columns, depth), *sides, target, 0, (at, scratch)))
    return out


def _matrices(
    backend: GpuBackend, array: Any, batch: Sequence[int], *, turned: bool
) -> tuple[list[Matrix], Any]:
    """An operand's matrices, or `turned` ones, for a batch; and the array that they lie in."""
    view = backend.view(array)
    lie = _lie(view)
    if lie is None:
        array = backend.contiguous(array, -1)
        view = backend.view(array)
        lie = view.shape[-1], False
    stride, down_columns = lie
    whole = expanded(view, (*batch, *view.shape[-2:]))
    steps = whole.strides[: len(batch)]
    name, size = interop.name_of(view.dtype), view.dtype.itemsize
    found = [
        Matrix(
            view.pointer + size * sum(n * step for n, step in zip(index, steps, strict=True)),
            stride,
            name,
            down_columns != turned,
        )
        for index in np.ndindex(*batch)
    ]
    return found, array


def _lie(view: View) -> tuple[int, bool] | None:
    """Elements from line to line, and whether lines are columns; None where a GEMM has no such."""
    *_, rows, columns = view.shape
    down, across = view.strides[-2:]
    if (across == 1 or columns == 1) and (rows == 1 or columns <= down < MOST_STRIDE):
        return (columns if rows == 1 else down), False
    if (down == 1 or rows == 1) and (columns == 1 or rows <= across < MOST_STRIDE):
        return (rows if columns == 1 else across), True
    return None


# ---- what is compiled ---------------------------------------------------------------------------


def programs(fmt: Format, dtypes: Sequence[str] = ("float32",), arch: int = 0) -> list[Program]:
    """The programs of products and convolutions of plain arrays: of int8 and uint8, of int4's
    nibbles, of int1's signs of arrays of `dtypes`, and of float16 and bfloat16."""
    made = {
        "int8": [BYTES],
        "uint8": [BYTES],
        "int4": [NIBBLES],
        "int1": [signs_of(interop.float_dtype(name)) for name in dtypes],
    }.get(fmt.name)
    if made is None:
        return [_END] if fmt.name in ("fp16", "bf16") else []
    own = "uint8" if fmt.name == "uint8" else "int8"
    kinds = dict.fromkeys(((own, "int8"), ("int8", own), (own, own)))
    return [
        *(program_of(element) for element in made),
        *(
            dense_warps.program_of(pair, tile, dense_warps.STEP, False, x)
            for pair in kinds
            for tile in dense_warps.TILES
            for x in (Coded.struct, Patches.struct)
        ),
    ]
