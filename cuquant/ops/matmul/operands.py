"""Operands of products as kernels on a GPU read them, and results as they write them.

An operand that kernels cannot read as it lies is decoded to float32 first: its blocks do not run
along the contraction.
"""

from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.gpu.arrays import GpuBackend, contiguous
from cuquant.gpu.view import View, c_strides
from cuquant.ops.dequantize.decoder import decoder
from cuquant.ops.dequantize.on_gpu import contiguous_parts
from cuquant.ops.matmul.check import Finish, Operand
from cuquant.ops.matmul.epilogue import Epilogue
from cuquant.ops.matmul.problem import Dense, Weight

F32 = np.dtype(np.float32)
BLOCK_ALIGNMENT = 4  # bytes, of ggml's blocks: kernels read their fields as words
PACKED_ALIGNMENT = 16  # of what `prepack` lays out: kernels read vectors, and the copy engine does


def runs_along(operand: Operand, axis: int) -> bool:
    """Whether it is quantized, in blocks along this axis."""
    return operand.dtype is None and operand.quantized.axis == axis


def floats_of(backend: GpuBackend, operand: Operand) -> Any:
    """The operand as an array of floats: itself, or decoded to a new one."""
    if operand.dtype is not None:
        return resolved(backend, operand.source)
    q = operand.quantized
    stored = backend.empty(q.stored_shape, F32)
    decoder(q.format)(backend, contiguous_parts(backend, q), q.stored_shape, backend.view(stored))
    return backend.permuted(stored, q.axes)


def resolved(backend: GpuBackend, array: Any) -> Any:
    """The array, or a copy where torch would negate what lies in its memory."""
    return array.resolve_neg() if backend.kind == "torch" else array


def row_steps(q: QuantArray) -> tuple[int, ...]:
    """For each axis of an array, how many of its stored rows lie from one index to the next."""
    steps = (*c_strides(q.stored_shape[:-1]), 0)
    return tuple(steps[axis] for axis in q.axes)


def stored_rows(backend: GpuBackend, q: QuantArray, row_step: int) -> Weight:
    parts = contiguous_parts(backend, q)
    if q.format.is_blocks and backend.pointer(parts["blocks"]) % BLOCK_ALIGNMENT:
        parts["blocks"] = backend.contiguous(parts["blocks"], -1)
    return Weight(q.format, parts, q.stored_shape, row_step)


def dense_of(view: View, row_stride: int, column_stride: int, owner: Any) -> Dense:
    return Dense(view.pointer, view.dtype, row_stride, column_stride, owner)


def weight_of(backend: GpuBackend, operand: Operand) -> tuple[Weight | Dense, int]:
    """The weight [N, K] or [E, N, K], and the step from one expert's rows to the next."""
    packed = operand.source
    if isinstance(packed, PackedWeight) and packed.layout != ROWS_LAYOUT:
        parts = contiguous(backend, packed.components, PACKED_ALIGNMENT)
        *_, rows, _ = packed.shape
        return Weight(packed.format, parts, packed.shape, 1, packed.layout), rows
    return row_weight_of(backend, operand)


def row_weight_of(backend: GpuBackend, operand: Operand) -> tuple[Weight | Dense, int]:
    """The same as rows, which the plain kernels take."""
    if runs_along(operand, len(operand.shape) - 1):
        q = operand.quantized
        *experts, rows, _ = row_steps(q)
        return stored_rows(backend, q, rows), experts[0] if experts else 0
    floats = floats_of(backend, operand)
    view = backend.view(floats)
    *experts, rows, columns = view.strides
    return dense_of(view, rows, columns, floats), experts[0] if experts else 0


def flat_rows(view: View) -> tuple[int, int, int] | None:
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


def counted_rows(backend: GpuBackend, array: Any) -> tuple[Any, View, tuple[int, int, int]]:
    """The array, or a copy in C order whose rows can be counted through; its view and rows."""
    view = backend.view(array)
    flat = flat_rows(view)
    if flat is not None:
        return array, view, flat
    copy = backend.contiguous(array, -1)
    view = backend.view(copy)
    return copy, view, flat_rows(view) or (0, 0, 0)


def unit_columns(backend: GpuBackend, array: Any) -> tuple[Any, int]:
    """bias or residual with neighbouring columns, or a copy; and its rows' step."""
    if array is None:
        return None, 0
    made, view, (_, down, across) = counted_rows(backend, resolved(backend, array))
    if across == 1 or view.shape[-1] == 1:
        return made, down
    copy = backend.contiguous(made, -1)
    return copy, (flat_rows(backend.view(copy)) or (0, 0, 0))[1]


def name_of(backend: GpuBackend, array: Any) -> str:
    return "float32" if array is None else interop.name_of(backend.view(array).dtype)


def epilogue_to(
    backend: GpuBackend, target: Any, steps: tuple[int, int], finish: Finish
) -> Epilogue:
    """What sums become in `target`, whose elements are `steps` apart down and across."""
    bias, _ = unit_columns(backend, finish.bias)
    residual, residual_step = unit_columns(backend, finish.residual)
    return Epilogue(
        out=target,
        out_type=interop.name_of(finish.dtype),
        out_stride=steps[0],
        out_column=steps[1],
        bias=bias,
        bias_type=name_of(backend, bias),
        activation=finish.activation,
        residual=residual,
        residual_type=name_of(backend, residual),
        residual_stride=residual_step,
    )


def epilogue_of(
    backend: GpuBackend, columns: int, out: Any, finish: Finish
) -> tuple[Epilogue, bool]:
    """What rows of sums become, and whether all of its arrays are those that were given.

    Its own `out` is another array where kernels cannot write to this one.
    """
    view = backend.view(out)
    rows = flat_rows(view) if finish.shape[-1:] == (columns,) else None
    target, steps = out, (columns, 1)
    if rows is not None:
        steps = rows[1:]
    elif not view.is_contiguous:
        target = backend.empty(finish.shape, finish.dtype)
    made = epilogue_to(backend, target, steps, finish)
    arrays = (made.out, out), (made.bias, finish.bias), (made.residual, finish.residual)
    return made, all(own is given for own, given in arrays)
