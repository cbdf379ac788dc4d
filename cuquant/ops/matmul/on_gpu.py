"""Products on a GPU: operands as kernels read them, and one call of the kernel that was chosen.

An operand that kernels cannot read as it lies is decoded to float32 first: one whose blocks do not
run along the contraction, and the smaller one where both sides are quantized.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array.fragments import FRAGMENTS_LAYOUT
from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.gpu.arrays import GpuBackend, backend_of, contiguous
from cuquant.gpu.backend import Backend
from cuquant.gpu.view import View, c_strides
from cuquant.ops.dequantize.decoder import decoder
from cuquant.ops.dequantize.on_gpu import contiguous_parts
from cuquant.ops.matmul.any import MOST_DIMS
from cuquant.ops.matmul.check import Finish, Operand
from cuquant.ops.matmul.choose import FAMILIES, choose, family_of
from cuquant.ops.matmul.epilogue import Epilogue
from cuquant.ops.matmul.hopper import segment_rows
from cuquant.ops.matmul.prepared import Call, keep
from cuquant.ops.matmul.problem import Dense, Product, Run, Weight
from cuquant.ops.matmul.route import gather_bytes, route, route_bytes
from cuquant.ops.matmul.unpacked import Filling, rows_of

F32 = np.dtype(np.float32)
BLOCK_ALIGNMENT = 4  # bytes, of ggml's blocks: kernels read their fields as words
PACKED_ALIGNMENT = 16  # of what `prepack` lays out: kernels read vectors, and the copy engine does


# ---- operands -----------------------------------------------------------------------------------


def _runs_along(operand: Operand, axis: int) -> bool:
    """Whether it is quantized, in blocks along this axis."""
    return operand.dtype is None and operand.quantized.axis == axis


def _floats(backend: GpuBackend, operand: Operand) -> Any:
    """The operand as an array of floats: itself, or decoded to a new one."""
    if operand.dtype is not None:
        return _resolved(backend, operand.source)
    q = operand.quantized
    stored = backend.empty(q.stored_shape, F32)
    decoder(q.format)(backend, contiguous_parts(backend, q), q.stored_shape, backend.view(stored))
    return backend.permuted(stored, q.axes)


def _resolved(backend: GpuBackend, array: Any) -> Any:
    """The array, or a copy where torch would negate what lies in its memory."""
    return array.resolve_neg() if backend.kind == "torch" else array


def _row_steps(q: QuantArray) -> tuple[int, ...]:
    """For each axis of an array, how many of its stored rows lie from one index to the next."""
    steps = (*c_strides(q.stored_shape[:-1]), 0)
    return tuple(steps[axis] for axis in q.axes)


def _stored_rows(backend: GpuBackend, q: QuantArray, row_step: int) -> Weight:
    parts = contiguous_parts(backend, q)
    if q.format.is_blocks and backend.pointer(parts["blocks"]) % BLOCK_ALIGNMENT:
        parts["blocks"] = backend.contiguous(parts["blocks"], -1)
    return Weight(q.format, parts, q.stored_shape, row_step)


def _dense(view: View, row_stride: int, column_stride: int, owner: Any) -> Dense:
    return Dense(view.pointer, view.dtype, row_stride, column_stride, owner)


def _weight(backend: GpuBackend, operand: Operand) -> tuple[Weight | Dense, int]:
    """The weight [N, K] or [E, N, K], and the step from one expert's rows to the next."""
    packed = operand.source
    if isinstance(packed, PackedWeight) and packed.layout != ROWS_LAYOUT:
        parts = contiguous(backend, packed.components, PACKED_ALIGNMENT)
        *_, rows, _ = packed.shape
        return Weight(packed.format, parts, packed.shape, 1, packed.layout), rows
    return _row_weight(backend, operand)


def _row_weight(backend: GpuBackend, operand: Operand) -> tuple[Weight | Dense, int]:
    """The same as rows, which the plain kernels take."""
    if _runs_along(operand, len(operand.shape) - 1):
        q = operand.quantized
        *experts, rows, _ = _row_steps(q)
        return _stored_rows(backend, q, rows), experts[0] if experts else 0
    floats = _floats(backend, operand)
    view = backend.view(floats)
    *experts, rows, columns = view.strides
    return _dense(view, rows, columns, floats), experts[0] if experts else 0


def _flat(view: View) -> tuple[int, int, int] | None:
    """An array [..., C] as rows: how many, and steps down and across; None where none will do."""
    rows, down = 1, 0
    for size, step in zip(view.shape[-2::-1], view.strides[-2::-1], strict=True):
        if size == 1:
            continue
        if rows == 1:
            down = step
        elif step != rows * down:
            return None
        rows *= size
    return rows, down, view.strides[-1]


def _rows_of(backend: GpuBackend, array: Any) -> tuple[Any, View, tuple[int, int, int]]:
    """The array, or a copy in C order whose rows can be counted through; its view and rows."""
    view = backend.view(array)
    flat = _flat(view)
    if flat is not None:
        return array, view, flat
    copy = backend.contiguous(array, -1)
    view = backend.view(copy)
    return copy, view, _flat(view) or (0, 0, 0)


def _unit_columns(backend: GpuBackend, array: Any) -> tuple[Any, int]:
    """bias or residual with neighbouring columns, or a copy; and its rows' step."""
    if array is None:
        return None, 0
    made, view, (_, down, across) = _rows_of(backend, _resolved(backend, array))
    if across == 1 or view.shape[-1] == 1:
        return made, down
    copy = backend.contiguous(made, -1)
    return copy, (_flat(backend.view(copy)) or (0, 0, 0))[1]


# ---- one call -----------------------------------------------------------------------------------


def _record(
    backend: GpuBackend, stream: object, operands: Sequence[Operand], f: Finish, *others: Any
) -> None:
    """torch must not use the memory of these arrays anew before this stream's work is done."""
    if stream is None or backend.kind != "torch":
        return
    own = sys.modules["torch"].cuda.current_stream(backend.device)
    inputs = [part for operand in operands for part in operand.memory()]
    for array in (*inputs, f.bias, f.residual, f.out, *others):
        if array is not None:
            array.record_stream(own)


def _result(backend: GpuBackend, finish: Finish) -> Any:
    return backend.empty(finish.shape, finish.dtype) if finish.out is None else finish.out


def _name(backend: GpuBackend, array: Any) -> str:
    return "float32" if array is None else interop.name_of(backend.view(array).dtype)


def linear(
    left: Operand,
    weights: tuple[Operand, ...],
    finish: Finish,
    stream: object = None,
    call: Call | None = None,
) -> Any:
    """activation(x @ w.T + bias) + residual, or the gated unit of two weights.

    `call` remembers how, where no array had to be copied or decoded.
    """
    with backend_of(left.memory()[0], stream) as backend:
        _record(backend, stream, (left, *weights), finish)
        out = _result(backend, finish)
        if not math.prod(finish.shape):
            return out
        x, view, (rows, down, across) = _rows_of(backend, _floats(backend, left))
        bias, _ = _unit_columns(backend, finish.bias)
        residual, residual_step = _unit_columns(backend, finish.residual)
        target, flat = out, _flat(backend.view(out))
        if flat is None:
            target, flat = backend.empty(finish.shape, finish.dtype), (0, finish.shape[-1], 1)
        product = Product(
            rows,
            finish.shape[-1],
            left.shape[-1],
            _dense(view, down, across, x),
            tuple(_weight(backend, operand)[0] for operand in weights),
        )
        family = family_of(backend, product.problem(backend))
        as_given = all(map(_is_as_given, product.weights, weights))
        fillings: list[Filling] = []
        if any(w.layout not in family.layouts for w in product.weights):
            product, fillings, own = _with_rows(backend, product, weights)
            as_given &= own
        epilogue = Epilogue(
            out=target,
            out_type=interop.name_of(finish.dtype),
            out_stride=flat[1],
            out_column=flat[2],
            bias=bias,
            bias_type=_name(backend, bias),
            activation=finish.activation,
            residual=residual,
            residual_type=_name(backend, residual),
            residual_stride=residual_step,
        )
        run = _after(fillings, family.prepare(backend, product)(product.rows))
        run(backend, view.pointer, epilogue.pack(backend))
        if target is not out:
            backend.copy_into(out, target)
        made = (x, bias, residual, target)
        given = (left.source, finish.bias, finish.residual, out)
        if (
            call is not None
            and stream is None
            and all(a is b for a, b in zip(made, given, strict=True))
            and as_given
        ):
            keep(call, out, product, run, epilogue.constants, backend)
        return out


def _is_as_given(weight: Weight | Dense, operand: Operand) -> bool:
    """Whether kernels read the operand's own memory: not a copy of it."""
    if not isinstance(weight, Weight):
        return False
    own = operand.source.components
    return all(own[k] is part for k, part in weight.parts.items())


def _with_rows(
    backend: GpuBackend, product: Product, weights: tuple[Operand, ...]
) -> tuple[Product, list[Filling], bool]:
    """The product with all weights as rows, what fills those, and whether from their own arrays."""
    rows, fillings, own = list(product.weights), [], True
    for i, operand in enumerate(weights):
        if rows[i].layout == FRAGMENTS_LAYOUT:
            rows[i], filling, is_own = rows_of(backend, operand.source)
            fillings.append(filling)
            own &= is_own
    return replace(product, weights=tuple(rows)), fillings, own


def _after(fillings: list[Filling], run: Run) -> Run:
    """`run` behind what it reads."""
    if not fillings:
        return run

    def filled(backend: Backend, pointer: int, epilogue: bytes) -> None:
        for filling in fillings:
            filling.run(backend)
        run(backend, pointer, epilogue)

    return filled


# ---- matmul -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """An operand of `matmul`: its steps along its axes, in elements or in rows of a Weight."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    depth: int  # which axis is contracted
    view: View | None = None
    owner: Any = None  # of the view's memory
    weight: Weight | None = None

    @property
    def across(self) -> int | None:
        """The axis that the result keeps beside the batch; None for one vector."""
        if len(self.shape) == 1:
            return None
        return len(self.shape) - 1 if self.depth == len(self.shape) - 2 else len(self.shape) - 2

    @property
    def count(self) -> int:
        """Rows that run along the contraction, in each matrix."""
        return 1 if self.across is None else self.shape[self.across]

    @property
    def row_step(self) -> int:
        return 0 if self.across is None else self.steps[self.across]

    def operand(self) -> Dense | Weight:
        """What kernels read."""
        if self.weight is not None:
            return replace(self.weight, row_step=self.row_step)
        assert self.view is not None
        return _dense(self.view, self.row_step, self.steps[self.depth], self.owner)

    def batch_steps(self, batch: tuple[int, ...]) -> tuple[int, ...]:
        """Steps along the axes of the result's batch, 0 where the operand is repeated."""
        steps = [s if n > 1 else 0 for n, s in zip(self.shape[:-2], self.steps, strict=False)]
        return (*[0] * (len(batch) - len(steps)), *steps)


def _side(backend: GpuBackend, operand: Operand, depth: int, *, stored: bool) -> _Side:
    """`stored`: as it is stored, in blocks along the contraction; else as floats."""
    if stored:
        q = operand.quantized
        weight = _stored_rows(backend, q, 1)
        return _Side(operand.shape, _row_steps(q), depth, weight=weight)
    floats = _floats(backend, operand)
    view = backend.view(floats)
    return _Side(operand.shape, view.strides, depth, view, floats)


def _copied_side(
    backend: GpuBackend, operand: Operand, depth: int, batch: tuple[int, ...]
) -> _Side:
    """The operand as contiguous floats, repeated along all axes of the batch."""
    shape = (*batch, *operand.shape[-2:])
    floats = _floats(backend, operand)
    copy = backend.broadcast(floats, shape, backend.view(floats).dtype)
    view = backend.view(copy)
    return _Side(shape, view.strides, depth + len(shape) - len(operand.shape), view, copy)


def matmul(
    left: Operand, right: Operand, finish: Finish, stream: object = None, call: Call | None = None
) -> Any:
    """activation(a @ b + bias) by NumPy's rules."""
    if left.dtype is not None and len(right.shape) == 2 and _runs_along(right, 0):
        transposed = replace(right, source=right.quantized.T, shape=right.shape[::-1])
        return linear(left, (transposed,), finish, stream, call)
    with backend_of(left.memory()[0], stream) as backend:
        _record(backend, stream, (left, right), finish)
        out = _result(backend, finish)
        if not math.prod(finish.shape):
            return out
        depths = len(left.shape) - 1, max(len(right.shape) - 2, 0)
        stored = [_runs_along(side, axis) for side, axis in zip((left, right), depths, strict=True)]
        if all(stored):  # the larger one stays as it is
            stored = [math.prod(left.shape) > math.prod(right.shape)]
            stored.append(not stored[0])
        a, b = (
            _side(backend, side, axis, stored=own)
            for side, axis, own in zip((left, right), depths, stored, strict=True)
        )
        kept = (len(left.shape) > 1) + (len(right.shape) > 1)
        batch = finish.shape[: len(finish.shape) - kept]
        target, steps = out, backend.view(out).strides
        dims = _batch(batch, a, b, steps)
        if len(dims) > MOST_DIMS:
            a = _copied_side(backend, left, depths[0], batch)
            b = _copied_side(backend, right, depths[1], batch)
            target = backend.empty(finish.shape, finish.dtype)
            steps = backend.view(target).strides
            dims = _batch(batch, a, b, steps)
        out_row = 0 if a.across is None else steps[len(batch)]
        out_column = 0 if b.across is None else steps[-1]
        bias, _ = _unit_columns(backend, finish.bias)
        epilogue = Epilogue(
            out=target,
            out_type=interop.name_of(finish.dtype),
            out_stride=out_row,
            out_column=out_column,
            bias=bias,
            bias_type=_name(backend, bias),
            activation=finish.activation,
        )
        swapped = stored[0]  # kernels read quantized rows on the right
        x, w = (b, a) if swapped else (a, b)
        if swapped:
            dims = [(size, second, first, own) for size, first, second, own in dims]
        dense = x.operand()
        assert isinstance(dense, Dense)
        product = Product(
            x.count, w.count, left.shape[-1], dense, (w.operand(),), tuple(dims), swapped
        )
        if not swapped:
            product, epilogue = _with_rows_of_batch(product, epilogue)
        family = family_of(backend, product.problem(backend))
        run = family.prepare(backend, product)(product.rows)
        run(backend, product.x.pointer, epilogue.pack(backend))
        if target is not out:
            backend.copy_into(out, target)
        return out


def _batch(
    batch: tuple[int, ...], a: _Side, b: _Side, out: tuple[int, ...]
) -> list[tuple[int, int, int, int]]:
    """(size, steps of a, of b and of out) of the batch's axes; neighbours are merged."""
    dims: list[tuple[int, int, int, int]] = []
    for size, *steps in zip(batch, a.batch_steps(batch), b.batch_steps(batch), out, strict=False):
        if size == 1:
            continue
        if dims and all(
            before == size * step for before, step in zip(dims[-1][1:], steps, strict=True)
        ):
            size *= dims.pop()[0]
        first, second, own = steps
        dims.append((size, first, second, own))
    return dims


def _with_rows_of_batch(product: Product, epilogue: Epilogue) -> tuple[Product, Epilogue]:
    """The last axes of a batch become rows of x, where they all meet the same weights."""
    dims, rows, x = list(product.batch), product.rows, product.x
    while dims and dims[-1][2] == 0:
        size, step, _, out_step = dims[-1]
        if rows == 1:
            x = replace(x, row_stride=step)
            epilogue = replace(epilogue, out_stride=out_step)
        elif step != rows * x.row_stride or out_step != rows * epilogue.out_stride:
            break
        rows *= size
        dims.pop()
    return replace(product, rows=rows, x=x, batch=tuple(dims)), epilogue


# ---- experts ------------------------------------------------------------------------------------


def grouped_linear(
    left: Operand, right: Operand, experts: Any, finish: Finish, stream: object = None
) -> Any:
    """Rows of x through the weights of their experts, which the host does not wait for."""
    known, width, depth = right.shape
    with backend_of(left.memory()[0], stream) as backend:
        on_host = isinstance(experts, np.ndarray)
        _record(backend, stream, (left, right), finish, None if on_host else experts)
        out = _result(backend, finish)
        if not math.prod(finish.shape):
            return out
        if not known:
            raise ValueError(f"w has shape {right.shape}: there are no experts for the rows of x")
        x, rows = _floats(backend, left), finish.shape[0]
        view = backend.view(x)
        weight, step = _weight(backend, right)
        product = Product(
            rows, width, depth, _dense(view, view.strides[0], view.strides[1], x), (weight,)
        )
        problem = replace(product.problem(backend), rows=-(-rows // known), experts=known)
        family = FAMILIES[choose(problem)]
        if weight.layout not in family.layouts:
            weight, step = _row_weight(backend, right)
            product = replace(product, weights=(weight,))
        numbers = backend.array(experts) if on_host else experts
        height = family.height or segment_rows(problem)
        down, across = backend.view(out).strides
        epilogue = Epilogue(out, interop.name_of(finish.dtype), down, across)
        # What takes rows wherever they lie has a height of its own; else they are copied.
        copied = 0 if family.height else gather_bytes(rows, depth, height)
        with backend.workspace(route_bytes(rows, known, height) + copied) as at:
            routing = route(backend, backend.view(numbers), known, height, step, at)
            run = family.prepare(backend, replace(product, routing=routing))(rows)
            run(backend, view.pointer, epilogue.pack(backend))
        return out
