"""Nested scales on the GPU: double quantization's, and nvfp4's global scale."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cuquant.formats import Format
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.view import View
from cuquant.ops import cpp, geometry
from cuquant.ops.cpp import scale_arrays
from cuquant.ops.geometry import CHUNK
from cuquant.ops.quantize.call import CLAMP, Known, Parts, Task

F32 = np.dtype(np.float32)
THREADS, WARP = 256, 32
MOST_SUMS = 1024  # of warps, that the mean of the scales is put together from
E4M3_PEAK = 448.0


def elementwise(entry: str, count: int) -> Launch:
    """Of a kernel of quantize/nested.cu, a thread an element."""
    program = Program("quantize/nested.cu", entry, (THREADS,))
    return Launch(program, (-(-count // THREADS), 1, 1), THREADS)


def nest(
    backend: Backend, scales: Any, parts: Parts, quantize: Callable[[Backend, Any, Task], None]
) -> None:
    """The components of nested scales, from float32 ones: less their mean, in 8 bits.

    `quantize` is dynamic8's, in blocks of 256.
    """
    count = math.prod(scales.shape)
    sums = min(MOST_SUMS, -(-count // WARP))
    parts_of_sum = backend.empty((sums, 4), np.dtype(np.float64))
    found, source = backend.pointer(parts_of_sum), backend.pointer(scales)
    mean = backend.pointer(parts["nested_offset"])
    backend.launch(elementwise("offset_parts", WARP * sums), source, found, count, sums)
    program = Program("quantize/nested.cu", "offset", (WARP,))
    backend.launch(Launch(program, (1, 1, 1), WARP), source, found, mean, count, sums)
    shifted = backend.empty((count,), F32)
    backend.launch(elementwise("shift", count), source, mean, backend.pointer(shifted), count)
    inner = {"packed": parts["scale"], "scale": parts["nested_scale"]}
    view = View(backend.pointer(shifted), (count,), (1,), F32)
    quantize(backend, shifted, Task(view, 0, Known(), inner, False, False, 0))


def nested_encoding(backend: Backend, fmt: Format, parts: Parts) -> Any:
    """float32 [blocks, 2]: what codes are made with, from the scale that decoding will see."""
    count = math.prod(parts["scale"].shape)
    encoding = backend.empty((count, 2), F32)
    arrays = scale_arrays(backend, fmt, parts)
    backend.launch(elementwise("encoding", count), arrays, backend.pointer(encoding), count)
    return encoding


def set_global_scale(backend: Backend, fmt: Format, task: Task) -> None:
    """nvfp4's: the given number, or from the largest finite element."""
    component = task.parts["global_scale"]
    at, given = backend.pointer(component), task.known.global_scale
    if given is not None and not isinstance(given, float):
        backend.copy_into(component, backend.broadcast(given, (), F32))
        return
    if given is not None:
        program = Program("quantize/finite.cu", "set", (1,))
        backend.launch(Launch(program, (1, 1, 1), 1), at, given)
        return
    top = backend.zeros((1,), np.dtype(np.uint32))
    *rows, columns = task.view.shape  # in any order: the largest is the largest
    source = geometry.strided(task.view, len(rows), with_flat=False)
    items = math.prod(rows) * -(-columns // CHUNK)
    grid = min(-(-items // THREADS), 16 * backend.multiprocessors)
    arguments = (cpp.element_of(task.view.dtype), task.flags & CLAMP)
    program = Program("quantize/finite.cu", "largest_finite", arguments)
    counts = (math.prod(rows), columns, grid * THREADS)
    launch = Launch(program, (grid, 1, 1), THREADS)
    backend.launch(launch, task.view.pointer, backend.pointer(top), source, *counts)
    peak = float(np.float32(fmt.rule.peak * E4M3_PEAK))
    program = Program("quantize/finite.cu", "global_scale_of", (1,))
    backend.launch(Launch(program, (1, 1, 1), 1), backend.pointer(top), at, peak)
