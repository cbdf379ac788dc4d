"""Rows on a GPU to a QuantArray: what is fused, what goes through the values, where a sum goes."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array.quant_array import QuantArray
from cuquant.formats import Format, get_format
from cuquant.gpu.arrays import GpuBackend, backend_of
from cuquant.gpu.backend import Backend
from cuquant.ops import geometry
from cuquant.ops.outputs import check_out
from cuquant.ops.quantize import door
from cuquant.ops.quantize.call import Task
from cuquant.ops.quantize.on_gpu import EncodeOnGpu
from cuquant.ops.quantize.quantizer import quantizer
from cuquant.ops.rows.on_gpu import fits, quantize_rows, values_of
from cuquant.ops.rows.source import Rows

F32 = np.dtype(np.float32)
FORMAT_OPTIONS = ("block_size", "levels", "double_quant")
DRAWS = ("stochastic", "seed")
# What one kernel has: with other options, or other values of these, the values are made first.
FUSED = {*FORMAT_OPTIONS, "axis", "scale", "zero_point", "global_scale", "nonfinite", "out"}


@interop.untraced
def quantized(
    rows: Rows,
    format: str | Format,
    options: Mapping[str, Any],
    residual_out: Any = None,
) -> QuantArray:
    """`cuquant.quantize` of what `rows` stands for, whose arrays are x's library's on its GPU.

    Parameters
    ----------
    rows
        Arrays of any strides; weights and biases of any float dtype.
    options
        Those of `cuquant.quantize`.
    residual_out
        Where x + residual goes, or None; not written where anything is refused.
    """
    # What says that rounding is not stochastic is as good as left out.
    given = {n: v for n, v in options.items() if n not in DRAWS or not (v is None or v is False)}
    stream = given.pop("stream", None)
    fmt = get_format(format, **door.format_options(*(given.get(name) for name in FORMAT_OPTIONS)))
    x = rows.x
    if residual_out is not None:
        _check_residual_out(residual_out, x)
    with ExitStack() as stack:
        operands = [a for a in (rows.other, rows.weight, rows.bias, residual_out) if a is not None]
        for operand in operands if stream is not None else ():
            stack.enter_context(backend_of(operand, stream))  # whose memory is in use there too
        backend = stack.enter_context(backend_of(x, stream))
        whole = _whole(backend, rows)
        plain = given.keys() <= FUSED and given.get("nonfinite", "propagate") in (
            "propagate",
            "clamp",
        )
        if plain and fmt.is_plain:
            return _fused(backend, whole, fmt, given, residual_out, rows)
        values, total = _values(backend, whole, residual_out)
        for name in FORMAT_OPTIONS:
            given.pop(name, None)
        found = door.quantize(values, fmt, **given)
        if residual_out is not None:
            backend.copy_into(residual_out, total)
        return found


def _fused(
    backend: GpuBackend,
    rows: Rows,
    fmt: Format,
    given: Mapping[str, Any],
    residual_out: Any,
    originals: Rows,
) -> QuantArray:
    """In one kernel, or, where it does not take the format, by way of the values."""
    x, out = rows.x, given.get("out")
    shape, dtype = tuple(x.shape), interop.dtype_of(x)
    axis = door.checked_axis(x, given.get("axis", -1))
    order = geometry.axis_last(len(shape), axis)
    stored, axes = tuple(shape[i] for i in order), tuple(order.index(i) for i in range(len(order)))
    fmt.check_shape(stored)
    operands = [a for a in (originals.x, originals.other, originals.weight) if a is not None]
    if out is not None:
        for operand in operands:
            door.check_out(out, fmt, shape, dtype, axes, operand)
    total, copied = residual_out, False
    if residual_out is not None and not _is_free(backend, residual_out, originals):
        total, copied = backend.empty(shape, dtype), True

    def make(backend: GpuBackend, x: Any, task: Task) -> None:
        if fits(fmt, task, rows.source):
            quantize_rows(backend, rows, fmt, task, total)
            return
        values = backend.empty(shape, dtype)
        values_of(backend, rows, values, total)
        quantizer(fmt)(backend, values, replace(task, view=backend.view(values)))

    run = EncodeOnGpu(fmt, axis, False, 0, given.get("nonfinite", "propagate"), out, make)
    scale, zero_point, global_scale = map(given.get, ("scale", "zero_point", "global_scale"))
    parts = run(x, stored, scale, zero_point, global_scale, None)
    if copied:
        backend.copy_into(residual_out, total)
    if out is None:
        return QuantArray(fmt, shape, dtype, parts, axes)
    for part in out.components.values():
        interop.mark_written(part)
    return out


def _values(backend: Backend, rows: Rows, residual_out: Any) -> tuple[Any, Any]:
    """The values, and x + residual where it is wanted, in new arrays."""
    shape, dtype = tuple(rows.x.shape), interop.dtype_of(rows.x)
    values = backend.empty(shape, dtype)
    total = None if residual_out is None else backend.empty(shape, dtype)
    values_of(backend, rows, values, total)
    return values, total


def _whole(backend: GpuBackend, rows: Rows) -> Rows:
    """The same with contiguous, aligned arrays."""
    arrays = {"x": rows.x, "other": rows.other}
    made = {n: a if a is None else backend.contiguous(a, -1) for n, a in arrays.items()}
    # A kernel reads both vectors in x's dtype, or both in float32.
    dtype = F32 if rows.source.wide else interop.dtype_of(rows.x)
    for name in ("weight", "bias"):
        vector = getattr(rows, name)
        if vector is not None and interop.dtype_of(vector) != dtype:
            vector = backend.broadcast(vector, tuple(vector.shape), dtype)
        made[name] = None if vector is None else backend.contiguous(vector, -1)
    return replace(rows, **made)


def _check_residual_out(out: Any, x: Any) -> None:
    wanted, came = (interop.kind(x), interop.device(x)), (interop.kind(out), None)
    if came[0] is not None:
        came = (came[0], interop.device(out))
    if came != wanted:
        raise TypeError(
            f"residual_out must be a {wanted[0]} array on {wanted[1]}, got {type(out).__name__}"
        )
    check_out(out, tuple(x.shape), interop.dtype_of(x), [])


def _is_free(backend: GpuBackend, out: Any, rows: Rows) -> bool:
    """Whether a kernel may write to `out` while it reads: it is an operand as a whole, or none."""
    view = backend.view(out)
    if not view.is_contiguous or view.pointer % 16:
        return False
    for operand in (rows.x, rows.other, rows.weight, rows.bias):
        if operand is None or not math.prod(operand.shape):
            continue
        own = backend.view(operand)
        same = own.pointer == view.pointer and own.shape == view.shape and own.is_contiguous
        if not same and interop.may_share_memory(out, operand):
            return False
    return True
