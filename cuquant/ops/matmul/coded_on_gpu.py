"""Products of two quantized arrays on a GPU, as codes: which are, and one call."""

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cuquant.array.packed_weight import PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.gpu.arrays import GpuBackend
from cuquant.gpu.view import c_strides
from cuquant.ops.matmul import coded_kernels
from cuquant.ops.matmul.check import Finish, Operand
from cuquant.ops.matmul.coded import (
    Coded,
    Groups,
    codes_of,
    segment_of,
    sides,
    tall_of,
)
from cuquant.ops.matmul.coded_kernels import Run
from cuquant.ops.matmul.experts import Rows, as_int64, clear_lost
from cuquant.ops.matmul.operands import epilogue_of, row_steps, stored_rows
from cuquant.ops.matmul.prepared import Again, Call, keep
from cuquant.ops.matmul.problem import Weight
from cuquant.ops.matmul.route import gather_part, route, route_bytes, scatter

F32, BYTES = np.dtype(np.float32), np.dtype(np.uint8)
NO_NUMBERS = bytes(16)  # of a CodedResults: no factor, no scale of the output


class Pair(NamedTuple):
    """x [groups * rows, K] and weights [groups * columns, K], that meet group by group."""

    kinds: tuple[str, str]
    groups: int
    rows: int
    columns: int
    depth: int


def pair_of(left: Operand, right: Operand, depths: tuple[int, int]) -> Pair | None:
    """Two operands as codes that kernels multiply; `depths` are the axes that are summed over.

    None where they are no such pair, or lie in another order than matrices of rows.
    """
    if left.dtype is not None or right.dtype is not None:
        return None
    kinds = codes_of(left.quantized.format, right.quantized.format)
    if kinds is None or not all(
        is_in_order(side, axis) for side, axis in zip((left, right), depths, strict=True)
    ):
        return None
    batch, rows = rows_of(left.shape, depths[0])
    weights_batch, columns = rows_of(right.shape, depths[1])
    depth = left.shape[depths[0]]
    if not depth:
        return None
    if math.prod(weights_batch) == 1:
        if rows % tall_of(left.quantized.format) and math.prod(batch) > 1:
            return None  # rows of two matrices would share scales
        return Pair(kinds, 1, math.prod(batch) * rows, columns, depth)
    longest = max(len(batch), len(weights_batch))
    padded = ((1,) * (longest - len(shape)) + shape for shape in (batch, weights_batch))
    first, second = padded
    return Pair(kinds, math.prod(batch), rows, columns, depth) if first == second else None


def rows_of(shape: tuple[int, ...], depth: int) -> tuple[tuple[int, ...], int]:
    """The batch of an operand, and the rows of each of its matrices."""
    if len(shape) == 1:
        return (), 1
    return shape[:-2], shape[-1 if depth == len(shape) - 2 else -2]


def is_in_order(side: Operand, depth: int) -> bool:
    """Whether its rows run along the contraction and follow each other as its axes do."""
    q = side.quantized
    if q.axis != depth % len(side.shape):
        return False
    kept = [axis for axis in range(len(side.shape)) if axis != depth % len(side.shape)]
    sizes = tuple(side.shape[axis] for axis in kept)
    steps = tuple(row_steps(q)[axis] for axis in kept)
    wanted = c_strides(sizes)
    return all(
        size == 1 or step == own for size, step, own in zip(sizes, steps, wanted, strict=True)
    )


def multiply(
    backend: GpuBackend,
    pair: Pair,
    left: Operand,
    right: Operand,
    out: Any,
    finish: Finish,
    call: Call | None = None,
) -> None:
    """Write the finished product to `out`; `call` remembers how, where no array was copied."""
    x, weights = (stored_rows(backend, side.quantized, 1) for side in (left, right))
    sources = (left.source, x), (right.source, weights)
    own = all(is_own(source, weight) for source, weight in sources)
    if pair.groups == 1:
        x = replace(x, stored=(pair.rows, pair.depth))
    groups = Groups(pair.groups, pair.rows)
    made = run(backend, pair, (x, weights), groups, out, finish)
    if call is not None and made is not None and own:
        launch, coded, constants = made
        keep(call, out, again_of(call, launch, coded), constants, backend)


def again_of(call: Call, run: Run, x: Coded) -> Again:
    """What a plan runs: the same of a call's x at other addresses."""
    parts = tuple(call.x.components)

    def again(backend: GpuBackend, addresses: tuple[int, ...], epilogue: bytes) -> None:
        run(backend, x.at(parts, addresses), epilogue + NO_NUMBERS)

    return again


def is_own(source: Any, weight: Weight) -> bool:
    """Whether kernels read the memory of the array that was given, not a copy."""
    if not isinstance(source, (QuantArray, PackedWeight)):
        return False
    return all(source.components.get(name) is part for name, part in weight.parts.items())


def pair_of_experts(left: Operand, right: Operand, rows: Rows) -> Pair | None:
    """Rows of x and experts' weights [E, N, K] as codes that kernels multiply, or None."""
    if left.dtype is not None or right.dtype is not None:
        return None
    fmt = left.quantized.format
    kinds = codes_of(fmt, right.quantized.format)
    last = len(left.shape) - 1
    if kinds is None or not (is_in_order(left, last) and is_in_order(right, 2)):
        return None
    if rows.name == "experts" and tall_of(fmt) > 1:  # rows that share scales do not move alone
        return None
    known, columns, depth = right.shape
    return Pair(kinds, known, left.shape[-2], columns, depth) if depth else None


def multiply_experts(
    backend: GpuBackend,
    pair: Pair,
    left: Operand,
    right: Operand,
    rows: Rows,
    integers: Any,
    out: Any,
    finish: Finish,
) -> None:
    """Write the product of each row and its expert's weight to `out`; `integers` are of `rows`."""
    x, weights = (stored_rows(backend, side.quantized, 1) for side in (left, right))
    if rows.name != "experts":
        numbers = as_int64(backend, integers)  # until the kernels are launched
        groups = rows.groups(backend, numbers)
        run(backend, pair, (x, weights), groups, out, finish)
        clear_lost(backend, groups, backend.view(out))
        return
    # Rows sorted by expert, and back.
    count = rows.count
    memory = backend.empty((route_bytes(count, pair.groups, count),), BYTES)
    at = backend.pointer(memory)
    routing = route(backend, backend.view(integers), pair.groups, count, pair.columns, at)
    parts = {
        name: gather_part(backend, backend.view(part), routing)
        if name in ("packed", "scale", "zero_point") and part.ndim
        else part
        for name, part in x.parts.items()
    }
    made = backend.empty(finish.shape, finish.dtype)
    groups = Groups(pair.groups, count, routing.offsets)
    run(backend, pair, (replace(x, parts=parts), weights), groups, made, finish)
    scatter(backend, backend.pointer(made), routing, pair.groups, backend.view(out))


def run(
    backend: GpuBackend,
    pair: Pair,
    weights: Sequence[Any],
    groups: Groups,
    out: Any,
    finish: Finish,
    factor: Any = None,
) -> tuple[Run, Coded, tuple[int, ...]] | None:
    """The product of a pair's two Weights, for `groups` of rows; `factor` multiplies its sums.

    What multiplies, x, and the constants of an Epilogue; None where another call cannot have them,
    as it has numbers, or arrays that are made for it.
    """
    x, w = weights
    epilogue, given = epilogue_of(backend, pair.columns, out, finish)
    target = epilogue.out
    known = (
        None if number is None else backend.broadcast(number, (1,), F32)
        for number in (factor, finish.out_scale)
    )
    kept = list(known)  # until the kernel is launched
    pointers = (0 if number is None else backend.pointer(number) for number in kept)
    results = epilogue.pack(backend) + struct.pack("<2Q", *pointers)
    segment = segment_of(x.fmt, w.fmt, pair.depth)
    shape = pair.rows, pair.columns, pair.depth
    kinds = coded_kernels.kinds_on(backend, x, w, pair.kinds)
    with sides(backend, x, w, kinds, segment) as (first, second):
        invariant = finish.batch_invariant
        arguments = first, second, shape, groups, segment
        launch = coded_kernels.prepare(backend, *arguments, batch_invariant=invariant)
        launch(backend, first, results)
        in_place = not (first.sums or second.sums) and all(
            side.codes == backend.pointer(weight.parts["packed"])
            for side, weight in ((first, x), (second, w))
        )
    if target is not out:
        backend.copy_into(out, target)
    if not (given and in_place) or any(number is not None for number in kept):
        return None
    return launch, first, epilogue.constants
