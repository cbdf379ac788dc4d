"""What a fused row quantizer runs: its own rules, asked about arrays that do not exist."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cuquant import interop
from cuquant.formats import Format
from cuquant.gpu.boards import Board
from cuquant.gpu.view import View, c_strides
from cuquant.ops.candidate import Candidate
from cuquant.ops.programs import ADDRESS, Plan
from cuquant.ops.quantize.call import Known, Task
from cuquant.ops.quantize.quantizer import quantizer
from cuquant.ops.rows.on_gpu import fits, quantize_rows, values_of
from cuquant.ops.rows.source import GELU, LAYER, RMS, SILU, Rows, Source, check_group

# What functions of cuquant.functional do to rows, with vectors of x's dtype. A transform takes
# whole rows, as it does where nothing else is asked.
SOURCES = {
    "rmsnorm_quantize": Source(norm=RMS, weight=True),
    "add_rmsnorm_quantize": Source(adds=True, norm=RMS, weight=True),
    "layernorm_quantize": Source(norm=LAYER, weight=True, bias=True),
    "silu_mul_quantize": Source(gate=SILU),
    "gelu_mul_quantize": Source(gate=GELU),
    "hadamard_quantize": Source(group=1),
}


class _Array(NamedTuple):
    """An array of which only shape and dtype are known."""

    shape: tuple[int, ...]
    dtype: np.dtype


def source_of(operation: str, columns: int) -> Source:
    """What an operation does to rows of so many columns."""
    source = SOURCES[operation]
    if not source.group:
        return source
    return Source(group=check_group(columns, columns, ", the columns of shape"))


def explain_rows(
    operation: str, fmt: Format, shape: tuple[int, ...], dtype: str, board: Board
) -> tuple[list[Candidate], int]:
    """The kernels that run, one after the other, and the bytes that the operation must move.

    Parameters
    ----------
    operation
        One of SOURCES; x + residual is written by the one that adds.
    """
    number = interop.float_dtype(dtype)
    source = source_of(operation, shape[-1])
    size = math.prod(shape) * number.itemsize
    vectors = (source.weight + source.bias) * shape[-1] * number.itemsize
    read = size * (2 if source.adds or source.gate else 1) + vectors
    written = size if source.adds else 0
    made = fmt.nbytes(shape)

    plan = Plan(board.arch, board.multiprocessors, board.rates)
    array = _Array(shape, number)
    parts = {c.name: plan.empty(c.shape, c.dtype) for c in fmt.components(shape)}
    view = View(ADDRESS, shape, c_strides(shape), number)
    task = Task(view, len(shape) - 1, Known(), parts, False, False, 0)
    rows = Rows(source, array, array, array, array, np.float32(1e-6))
    moved = read + written + made
    if fits(fmt, task, source):
        quantize_rows(plan, rows, fmt, task, array if source.adds else None)
        found = _noted(plan, moved / board.rates.read, "each row is read once, all in one kernel")
        return found, moved
    values_of(plan, rows, array, array if source.adds else None)
    first = (read + written + size) / board.rates.read
    found = _noted(plan, first, "the values that are quantized")
    plan.programs.clear()
    quantizer(fmt)(plan, array, task)
    note = "their scales and codes"
    if fits(fmt, replace(task, known=Known(global_scale=1.0)), source):
        note += "; all in the kernel before where global_scale is given"
    return found + _noted(plan, (size + made) / board.rates.read, note), moved


def _noted(plan: Plan, us: float, note: str) -> list[Candidate]:
    """What a plan has launched; the last one makes what all of it is for, in the bytes' time."""
    *others, last = dict.fromkeys(program.file for program in plan.programs)
    before = [Candidate(file, "", None, "", True) for file in others]
    return [*before, Candidate(last, "", us, note, True)]
