"""Rows on a GPU: their values, or at once their scales and codes."""

import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.formats import Format
from cuquant.gpu.backend import Backend
from cuquant.ops import cpp, geometry
from cuquant.ops.quantize.call import Task
from cuquant.ops.quantize.nested import set_global_scale
from cuquant.ops.rows import kernel
from cuquant.ops.rows.source import Rows, Source
from cuquant.reference.rows import UNIT, least_eps

NOTHING = bytes(40), bytes(32)  # of Scales and Given


def fits(fmt: Format, task: Task, source: Source) -> bool:
    """Whether one kernel makes the scales and codes of rows; x is contiguous and aligned."""
    view, columns = task.view, task.stored[-1]
    if task.stochastic or task.axis != len(view.shape) - 1 or not kernel.takes_format(fmt, columns):
        return False
    if fmt.scale is not None and fmt.scale.nested == "global" and task.known.global_scale is None:
        return False  # the data decides, all of it
    if fmt.rule.block == "tensor" and task.known.scale is None:
        return False
    share = kernel.share_of(fmt, columns)
    return kernel.work_of(source, share, columns, view.dtype.itemsize) is not None


def quantize_rows(backend: Backend, rows: Rows, fmt: Format, task: Task, total: Any = None) -> None:
    """Write the components, where `fits`, and x + residual to `total`, contiguous and aligned."""
    columns, dtype = task.stored[-1], task.view.dtype
    if fmt.scale is not None and fmt.scale.nested == "global":
        set_global_scale(backend, fmt, task)
    share = kernel.share_of(fmt, columns)
    work = kernel.work_of(rows.source, share, columns, dtype.itemsize)
    assert work is not None
    packed = backend.pointer(task.parts["packed"])
    arrays = packed, task.scales(backend), task.given(backend), cpp.lookup(fmt.codec, backend)
    if fmt.rule.block != "tensor":
        _launch(backend, rows, dtype, fmt, work, task.flags, total, (0, *arrays))
        return
    # Any row may lose the scale of all.
    lost = None if task.clamp else backend.zeros((1,), np.dtype(np.uint32))
    at = 0 if lost is None else backend.pointer(lost)
    _launch(backend, rows, dtype, fmt, work, task.flags, total, (0, *arrays), 0, at)
    if lost is not None:
        chunks = math.prod(task.stored) // geometry.CHUNK
        launch = kernel.lose_launch(fmt, backend.multiprocessors, chunks)
        backend.launch(launch, packed, arrays[1], arrays[3], chunks, at)


def values_of(backend: Backend, rows: Rows, out: Any, total: Any = None) -> None:
    """Write the values to `out` and x + residual to `total`; both are contiguous and aligned."""
    shape, dtype = tuple(rows.x.shape), interop.dtype_of(out)
    if not math.prod(shape):
        return
    columns, count = shape[-1], math.prod(shape)
    work = kernel.work_of(rows.source, None, columns, dtype.itemsize)
    to = backend.pointer(out)
    if work is not None:
        arrays = (to, 0, *NOTHING, cpp.NO_LOOKUP)
        _launch(backend, rows, dtype, None, work, 0, total, arrays)
        return
    operands = _operands(backend, rows, columns, total)
    group = rows.source.group
    # Kernels are compiled for a transform, whatever its group.
    source = replace(rows.source, group=1) if group else rows.source
    launch = kernel.plain_launch(dtype, source, count // (group or columns))
    if group:
        room = backend.empty((count,), np.dtype(np.float32))
        backend.launch(launch, operands, to, backend.pointer(room), columns, group)
    else:
        backend.launch(launch, operands, to, columns)


def _launch(
    backend: Backend,
    rows: Rows,
    dtype: np.dtype,
    fmt: Format | None,
    work: kernel.Work,
    flags: int,
    total: Any,
    arrays: tuple[Any, ...],
    step: int = 1,
    lost: int = 0,
) -> None:
    shape = tuple(rows.x.shape)
    units, along = math.prod(shape) // UNIT, shape[-1] // UNIT
    if not rows.source.has_rows and (work.share or fmt is None):
        along = work.lanes * work.units
    launch = kernel.launch_of(fmt, dtype, rows.source, work, flags, -(-units // along))
    operands = _operands(backend, rows, shape[-1], total)
    backend.launch(launch, operands, *arrays, units, along, step, lost)


def _operands(backend: Backend, rows: Rows, columns: int, total: Any) -> bytes:
    """The Operands struct."""
    arrays = (rows.x, rows.other, rows.weight, rows.bias, total)
    pointers = (0 if array is None else backend.pointer(array) for array in arrays)
    numbers = (rows.eps, least_eps(np.float32(rows.eps)), rows.source.scale)
    return struct.pack("<5Q3f4xd", *pointers, *map(float, numbers), 1 / columns)
