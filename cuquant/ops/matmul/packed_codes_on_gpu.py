"""Products of a quantized x and a prepacked weight, as codes: which are, and one call."""

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cuquant.array.packed_weight import PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.gpu.arrays import GpuBackend
from cuquant.ops.matmul import hopper_codes
from cuquant.ops.matmul.check import Finish, Operand
from cuquant.ops.matmul.coded import side, tall_of
from cuquant.ops.matmul.coded_on_gpu import epilogue_of, is_in_order
from cuquant.ops.matmul.operands import stored_rows, weight_of


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


def _kind(x: QuantArray, weight: Operand, depth: int) -> str | None:
    packed = weight.source
    if not isinstance(packed, PackedWeight):
        return None
    taken = hopper_codes.takes(x.format, packed.format, packed.layout, depth)
    return hopper_codes.kind_of(x.format, packed.format, depth) if taken else None


def multiply(
    backend: GpuBackend, kind: str, left: Operand, right: Operand, out: Any, finish: Finish
) -> None:
    """Write the finished product with a weight [N, K] to `out`."""
    *lead, depth = left.shape
    rows = math.prod(lead)
    x = replace(stored_rows(backend, left.quantized, 1), stored=(rows, depth))
    weight, columns = weight_of(backend, right)
    epilogue, _ = epilogue_of(backend, rows, columns, out, finish)
    results = epilogue.pack(backend) + struct.pack("<2Q", 0, 0)
    run = hopper_codes.prepare(backend, x.fmt, weight, kind, (rows, columns, depth))
    with side(backend, x, kind) as codes:
        run(backend, codes, results)
    if epilogue.out is not out:
        backend.copy_into(out, epilogue.out)
