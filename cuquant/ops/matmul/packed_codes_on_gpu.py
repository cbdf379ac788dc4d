"""Products of a quantized x and a prepacked weight, as codes: which are, and one call."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cuquant.array.packed_weight import PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.gpu.arrays import GpuBackend
from cuquant.gpu.backend import aligned
from cuquant.ops.matmul import hopper_codes, hopper_codes_tiles
from cuquant.ops.matmul.check import Finish, Operand
from cuquant.ops.matmul.coded import side, side_bytes, tall_of
from cuquant.ops.matmul.coded_on_gpu import again_of, is_in_order, is_own
from cuquant.ops.matmul.experts import Rows, as_int64
from cuquant.ops.matmul.operands import epilogue_of, stored_rows, weight_of
from cuquant.ops.matmul.prepared import Call, keep
from cuquant.ops.matmul.problem import Weight
from cuquant.ops.matmul.route import route, route_bytes


def kind_of(left: Operand, weights: Sequence[Operand], finish: Finish) -> str | None:
    """What codes of x and of prepacked weights are multiplied as, on a GPU of hopper_codes.ARCH;
    None where they are no such pair."""
    x = left.source
    if not isinstance(x, QuantArray) or finish.out_scale is not None or finish.batch_invariant:
        return None
    *lead, depth = left.shape
    if not depth or not is_in_order(left, len(lead)):
        return None
    if tall_of(x.format) > 1 and len(lead) > 1:
        return None  # rows of two matrices would share scales
    kinds = {_kind(x, weight, depth) for weight in weights}
    return kinds.pop() if len(kinds) == 1 else None


def kind_of_experts(left: Operand, right: Operand, rows: Rows, finish: Finish) -> str | None:
    """The same of rows of x and experts' weights [E, N, K]."""
    kind = kind_of(left, (right,), finish)
    if kind is None or (rows.name == "experts" and tall_of(left.source.format) > 1):
        return None  # rows that share scales do not move alone
    return kind


def _kind(x: QuantArray, weight: Operand, depth: int) -> str | None:
    packed = weight.source
    if not isinstance(packed, PackedWeight):
        return None
    taken = hopper_codes_tiles.takes(x.format, packed.format, packed.layout, depth)
    return hopper_codes_tiles.kind_of(x.format, packed.format, depth) if taken else None


def _weight(backend: GpuBackend, right: Operand) -> tuple[Weight, int]:
    weight, step = weight_of(backend, right)
    assert isinstance(weight, Weight)
    return weight, step


def multiply(
    backend: GpuBackend,
    kind: str,
    left: Operand,
    right: Operand,
    out: Any,
    finish: Finish,
    call: Call | None = None,
) -> None:
    """Write the finished product with a weight [N, K] to `out`.

    `call` remembers how, where no array was copied.
    """
    *lead, depth = left.shape
    rows = math.prod(lead)
    x = replace(stored_rows(backend, left.quantized, 1), stored=(rows, depth))
    weight, columns = _weight(backend, right)
    epilogue, given = epilogue_of(backend, columns, out, finish)
    ready = hopper_codes.prepare(backend, x.fmt, weight, kind, (rows, columns, depth))
    made = side_bytes(backend, x, kind)
    with backend.workspace(made + ready.nbytes) as at:
        codes = side(backend, x, kind, at)
        ready.run(backend, codes, epilogue.pack(backend), at + made)
    if epilogue.out is not out:
        backend.copy_into(out, epilogue.out)
    own = is_own(left.source, x) and is_own(right.source, weight)
    if call is not None and given and own and not made:
        run = again_of(call, ready.again, codes)
        keep(call, out, run, epilogue.constants, backend)


def multiply_experts(
    backend: GpuBackend,
    kind: str,
    left: Operand,
    right: Operand,
    rows: Rows,
    integers: Any,
    out: Any,
    finish: Finish,
) -> None:
    """Write the product of each row and its expert's weight to `out`; `integers` are of `rows`."""
    known, columns, depth = right.shape
    x = replace(stored_rows(backend, left.quantized, 1), stored=(rows.count, depth))
    weight, step = _weight(backend, right)
    epilogue, _ = epilogue_of(backend, columns, out, finish)
    height = hopper_codes_tiles.height_of(x.fmt, weight.fmt, depth, -(-rows.count // known))
    spans = {"experts": 0, "offsets": known + 2, "counts": 2 * known}[rows.name]
    shape = rows.count, columns, depth
    ready = hopper_codes.prepare_experts(backend, x.fmt, weight, kind, shape, known, height, spans)
    made = side_bytes(backend, x, kind)
    routing = 0 if spans else aligned(route_bytes(rows.count, known, height))
    numbers = as_int64(backend, integers) if spans else integers  # until the kernels are launched
    with backend.workspace(made + routing + ready.nbytes) as at:
        codes = side(backend, x, kind, at)
        if spans:
            experts = rows.groups(backend, numbers)
        else:
            experts = route(backend, backend.view(numbers), known, height, step, at + made)
        ready.run(backend, codes, experts, epilogue.pack(backend), at + made + routing)
    if epilogue.out is not out:
        backend.copy_into(out, epilogue.out)
