"""Products of plain arrays of floats on a GPU, b as [..., K, N].

float32 sums are the vendor's GEMM's, where it takes the operands, or the plain kernels'.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.gpu.arrays import GpuBackend, backend_of
from cuquant.gpu.backend import Gemm, Matrix
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.view import View
from cuquant.ops.matmul import on_gpu
from cuquant.ops.matmul.byte_rows import expanded
from cuquant.ops.matmul.check import Finish, Operand
from cuquant.ops.matmul.epilogue import TYPES
from cuquant.ops.matmul.operands import name_of, resolved
from cuquant.ops.matmul.problem import MOST_STRIDE
from cuquant.ops.matmul.vendor import scratch_bytes
from cuquant.ops.plain_products import F32, UNSCALED, Scales, one_number

THREADS = 256  # of a block of matmul/plain_end.cu
MOST_GEMMS = 64  # of a batch by the vendor's library, one after the other
NO_PLANE = bytes(40)
END = Program("matmul/plain_end.cu", "plain_end")


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
        launch = Launch(END, (math.prod(shape[:-1]) * blocks, 1, 1), THREADS)
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
