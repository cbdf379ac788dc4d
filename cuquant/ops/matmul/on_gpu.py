"""Products on a GPU: one call of the kernel that was chosen.

Where both sides are quantized they are multiplied as codes, if kernels have such a pair; else the
smaller one is decoded to float32.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array.fragments import FRAGMENTS_LAYOUT
from cuquant.formats import get_format
from cuquant.gpu.arrays import GpuBackend, backend_of
from cuquant.gpu.backend import Backend
from cuquant.gpu.view import View
from cuquant.ops.matmul import hopper_codes, packed_codes_on_gpu
from cuquant.ops.matmul.any import MOST_DIMS
from cuquant.ops.matmul.check import Finish, Operand
from cuquant.ops.matmul.choose import FAMILIES, PLAIN_TILES, choose, family_of, invariant
from cuquant.ops.matmul.coded_on_gpu import (
    multiply,
    multiply_experts,
    pair_of,
    pair_of_experts,
)
from cuquant.ops.matmul.epilogue import Epilogue
from cuquant.ops.matmul.experts import Rows, as_int64, clear_lost
from cuquant.ops.matmul.hopper import segment_rows
from cuquant.ops.matmul.operands import (
    counted_rows,
    dense_of,
    epilogue_of,
    epilogue_to,
    floats_of,
    name_of,
    row_steps,
    row_weight_of,
    runs_along,
    stored_rows,
    weight_of,
)
from cuquant.ops.matmul.prepared import Call, keep
from cuquant.ops.matmul.problem import Dense, Product, Run, Weight
from cuquant.ops.matmul.route import gather_bytes, route, route_bytes
from cuquant.ops.matmul.unpacked import Filling, rows_of
from cuquant.ops.quantize.door import quantize

F32 = np.dtype(np.float32)


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
    packed = packed_codes_on_gpu.kind_of(left, weights, finish)
    if packed is not None:
        with backend_of(left.memory()[0], stream) as backend:
            if backend.arch == hopper_codes.ARCH:
                return _packed(backend, packed, left, weights, finish, stream, call)
    pairs = [pair_of(left, weight, (len(left.shape) - 1, 1)) for weight in weights]
    pair = pairs[0] if len(weights) == 1 else None
    if len(weights) == 2 and None not in pairs:
        gate = linear(left, weights[:1], finish.as_float32, stream)
        gated = replace(finish, residual=gate, activation="gated")
        return linear(left, weights[1:], gated, stream)
    if finish.out_scale is not None and pair is None:
        return _requantized(linear(left, weights, finish.as_float32, stream), finish, stream)
    with backend_of(left.memory()[0], stream) as backend:
        _record(backend, stream, (left, *weights), finish)
        out = _result(backend, finish)
        if not math.prod(finish.shape):
            return out
        if pair is not None:
            multiply(backend, pair, left, weights[0], out, finish, call)
            return out
        given = floats_of(backend, left)
        given = backend.contiguous(given, -1) if finish.batch_invariant else given
        x, view, (rows, down, across) = counted_rows(backend, given)
        epilogue, own_arrays = epilogue_of(backend, finish.shape[-1], out, finish)
        product = Product(
            rows,
            finish.shape[-1],
            left.shape[-1],
            dense_of(view, down, across, x),
            tuple(weight_of(backend, operand)[0] for operand in weights),
        )
        problem = product.problem(backend)
        family = invariant(problem) if finish.batch_invariant else family_of(backend, problem)
        as_given = all(map(_is_as_given, product.weights, weights))
        fillings: list[Filling] = []
        if any(w.layout not in family.layouts for w in product.weights):
            product, fillings, own = _with_rows(backend, product, weights)
            as_given &= own
        run = _after(fillings, family.prepare(backend, product)(product.rows))
        run(backend, view.pointer, epilogue.pack(backend))
        if epilogue.out is not out:
            backend.copy_into(out, epilogue.out)
        is_own = as_given and own_arrays and x is left.source
        if call is not None and stream is None and is_own:
            keep(call, out, run, epilogue.constants, backend, product)
        return out


def _packed(
    backend: GpuBackend,
    kind: str,
    left: Operand,
    weights: tuple[Operand, ...],
    finish: Finish,
    stream: object,
    call: Call | None = None,
) -> Any:
    """`linear` of codes with prepacked weights."""
    if len(weights) == 2:
        gate = _packed(backend, kind, left, weights[:1], finish.as_float32, stream)
        weights, finish = weights[1:], replace(finish, residual=gate, activation="gated")
        call = None
    _record(backend, stream, (left, *weights), finish)
    out = _result(backend, finish)
    if math.prod(finish.shape):
        packed_codes_on_gpu.multiply(backend, kind, left, weights[0], out, finish, call)
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
        return dense_of(self.view, self.row_step, self.steps[self.depth], self.owner)

    def batch_steps(self, batch: tuple[int, ...]) -> tuple[int, ...]:
        """Steps along the axes of the result's batch, 0 where the operand is repeated."""
        steps = [s if n > 1 else 0 for n, s in zip(self.shape[:-2], self.steps, strict=False)]
        return (*[0] * (len(batch) - len(steps)), *steps)


def _side(backend: GpuBackend, operand: Operand, depth: int, *, stored: bool) -> _Side:
    """`stored`: as it is stored, in blocks along the contraction; else as floats."""
    if stored:
        q = operand.quantized
        weight = stored_rows(backend, q, 1)
        return _Side(operand.shape, row_steps(q), depth, weight=weight)
    floats = floats_of(backend, operand)
    view = backend.view(floats)
    return _Side(operand.shape, view.strides, depth, view, floats)


def _copied_side(
    backend: GpuBackend, operand: Operand, depth: int, batch: tuple[int, ...]
) -> _Side:
    """The operand as contiguous floats, repeated along all axes of the batch."""
    shape = (*batch, *operand.shape[-2:])
    floats = floats_of(backend, operand)
    copy = backend.broadcast(floats, shape, backend.view(floats).dtype)
    view = backend.view(copy)
    return _Side(shape, view.strides, depth + len(shape) - len(operand.shape), view, copy)


def matmul(
    left: Operand, right: Operand, finish: Finish, stream: object = None, call: Call | None = None
) -> Any:
    """activation(a @ b + bias) + residual by NumPy's rules."""
    depths = len(left.shape) - 1, max(len(right.shape) - 2, 0)
    pair = pair_of(left, right, depths)
    if left.dtype is not None and len(right.shape) == 2 and runs_along(right, 0):
        transposed = replace(right, source=right.quantized.T, shape=right.shape[::-1])
        return linear(left, (transposed,), finish, stream, call)
    if pair is None and finish.out_scale is not None:
        return _requantized(matmul(left, right, finish.as_float32, stream), finish, stream)
    if pair is None and finish.residual is not None:
        return _with_residual(left, right, finish, stream)
    with backend_of(left.memory()[0], stream) as backend:
        _record(backend, stream, (left, right), finish)
        out = _result(backend, finish)
        if not math.prod(finish.shape):
            return out
        if pair is not None:
            multiply(backend, pair, left, right, out, finish, call)
            return out
        stored = [runs_along(side, axis) for side, axis in zip((left, right), depths, strict=True)]
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
        epilogue = epilogue_to(backend, target, (out_row, out_column), finish)
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
        problem = product.problem(backend)
        family = PLAIN_TILES if finish.batch_invariant else family_of(backend, problem)
        run = family.prepare(backend, product)(product.rows)
        run(backend, product.x.pointer, epilogue.pack(backend))
        if target is not out:
            backend.copy_into(out, target)
        return out


def _with_residual(left: Operand, right: Operand, finish: Finish, stream: object) -> Any:
    """The same of a batch, whose matrices' residuals kernels do not find: added afterwards."""
    plain = replace(finish.as_float32, residual=None)
    sums = matmul(left, right, plain, stream)
    with backend_of(sums, stream) as backend:
        made = interop.astype(sums + interop.astype(finish.residual, F32), finish.dtype)
        if finish.out is None:
            return made
        backend.copy_into(finish.out, made)
        return finish.out


def _requantized(result: Any, finish: Finish, stream: object) -> Any:
    """int8 of a float32 result and the scale that is known."""
    whole = get_format("int8", block_size="tensor")
    flat = result.reshape(-1)
    made = quantize(flat, whole, scale=finish.out_scale, stream=stream).packed
    made = made.reshape(finish.shape)
    if finish.out is None:
        return made
    with backend_of(result, stream) as backend:
        backend.copy_into(finish.out, made)
    return finish.out


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
    left: Operand, right: Operand, rows: Rows, finish: Finish, stream: object = None
) -> Any:
    """Rows of x through the weights of their experts, which the host does not wait for."""
    known, _, depth = right.shape
    packed = packed_codes_on_gpu.kind_of_experts(left, right, rows, finish)
    with backend_of(left.memory()[0], stream) as backend:
        _record(backend, stream, (left, right), finish, None if rows.on_host else rows.integers)
        out = _result(backend, finish)
        if not math.prod(finish.shape):
            return out
        if not known:
            raise ValueError(f"w has shape {right.shape}: there are no experts for the rows of x")
        integers = backend.array(rows.integers) if rows.on_host else rows.integers
        if packed is not None and backend.arch == hopper_codes.ARCH:
            given = left, right, rows, integers, out, finish
            packed_codes_on_gpu.multiply_experts(backend, packed, *given)
            return out
        pair = pair_of_experts(left, right, rows)
        if pair is not None:
            multiply_experts(backend, pair, left, right, rows, integers, out, finish)
            return out
        x = floats_of(backend, left).reshape(rows.count, depth)
        if rows.name == "experts":
            _routed(backend, x, right, integers, out)
            return out
        # Kernels make NaN of rows whose expert does not exist.
        numbers = as_int64(backend, integers)  # until the kernels are launched
        groups, whole = rows.groups(backend, numbers), out
        if len(finish.shape) > 2 and not backend.view(out).is_contiguous:
            whole = backend.empty(finish.shape, finish.dtype)
        flat = whole.reshape(rows.count, right.shape[1])
        _routed(backend, x, right, rows.ids(backend, groups), flat)
        if whole is not out:
            backend.copy_into(out, whole)
        clear_lost(backend, groups, backend.view(out))
        return out


def _routed(backend: GpuBackend, x: Any, right: Operand, experts: Any, out: Any) -> None:
    """Write the product of each row of x [T, K] and its expert's weight to `out` [T, N]."""
    known, width, depth = right.shape
    view, rows = backend.view(x), x.shape[0]
    weight, step = weight_of(backend, right)
    dense = dense_of(view, view.strides[0], view.strides[1], x)
    product = Product(rows, width, depth, dense, (weight,))
    problem = replace(product.problem(backend), rows=-(-rows // known), experts=known)
    family = FAMILIES[choose(problem)]
    if weight.layout not in family.layouts:
        weight, step = row_weight_of(backend, right)
        product = replace(product, weights=(weight,))
    height = family.height or segment_rows(problem)
    down, across = backend.view(out).strides
    epilogue = Epilogue(out, name_of(backend, out), down, across)
    # What takes rows wherever they lie has a height of its own; else they are copied.
    copied = 0 if family.height else gather_bytes(rows, depth, height)
    with backend.workspace(route_bytes(rows, known, height) + copied) as at:
        routing = route(backend, backend.view(experts), known, height, step, at)
        run = family.prepare(backend, replace(product, routing=routing))(rows)
        run(backend, view.pointer, epilogue.pack(backend))
