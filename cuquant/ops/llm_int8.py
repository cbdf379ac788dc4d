"""LLM.int8() on a GPU: rows to int8, the product of integers, and that of the outliers beside it.

Which columns hold outliers stays on the device, so that nothing waits for it: x is 0 in all others
for a second product, of all columns, with the int8 weight as it is. Without a threshold there is
none.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cuquant import interop
from cuquant.array.quant_array import QuantArray
from cuquant.formats import get_format
from cuquant.gpu.arrays import backend_of
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.ops import cpp
from cuquant.ops.matmul import door
from cuquant.ops.matmul.byte_rows import BYTES
from cuquant.ops.plain_products import Integers, Scales, multiply_integers
from cuquant.reference.llm_int8 import half_threshold

F32, I8, U8 = np.dtype(np.float32), np.dtype(np.int8), np.dtype(np.uint8)
FILE, THREADS, ROWS_OF_A_BLOCK = "quantize/llm_int8.cu", 256, 32
UNIT = 8  # columns of a thread, where they start on 16 bytes
# 1 / 127^2 to float32, as bitsandbytes' kernel has it.
INVERSE_SQUARE = 6.200012e-05

_product = inspect.unwrap(door.linear)


class Rows(NamedTuple):
    """codes int8 [M, K]; scales float32 [M]; outliers uint8 [K]; apart [M, K], or None."""

    codes: Any
    scales: Any
    outliers: Any
    apart: Any


def program_of(entry: str, dtype: np.dtype, unit: int) -> Program:
    return Program(FILE, entry, (cpp.element_of(dtype), unit, THREADS))


def quantize(
    backend: Backend, x: Any, threshold: float, factor: float = 1.0, sets_apart: bool = False
) -> Rows:
    """Of x [M, K], contiguous; scales are the largest sizes times a factor."""
    (rows, width), dtype = tuple(x.shape), interop.dtype_of(x)
    limit = float(half_threshold(threshold)) if threshold > 0 else 0.0
    made = Rows(
        backend.empty((rows, width), I8),
        backend.empty((rows,), F32),
        backend.zeros((width,), U8),
        backend.empty((rows, width), dtype) if sets_apart else None,
    )
    if not rows:
        return made
    to = [0 if array is None else backend.pointer(array) for array in made]
    codes, scales, outliers, apart = to
    given = backend.pointer(x)
    unit = UNIT if width % UNIT == 0 and given % 16 == 0 else 1
    if limit and width:
        grid = (-(-width // (unit * THREADS)), -(-rows // ROWS_OF_A_BLOCK), 1)
        launch = Launch(program_of("outlier_columns", dtype, unit), grid, THREADS)
        backend.launch(launch, given, outliers, limit, rows, width)
    launch = Launch(program_of("llm_int8_rows", dtype, unit), (rows, 1, 1), THREADS)
    backend.launch(launch, given, outliers, codes, scales, apart, limit, factor, width)
    return made


def quantized(x: Any, threshold: float) -> tuple[Any, Any, Any]:
    """Codes, largest sizes and outliers (uint8) of x [M, K]."""
    with backend_of(x) as backend:
        return quantize(backend, backend.contiguous(x, -1), threshold)[:3]


def linear(x: Any, weight: Any, absmax: Any, bias: Any, threshold: float) -> Any:
    """x [..., K] times the transpose of int8 [N, K], in x's dtype: a new array of its own."""
    *lead, depth = tuple(x.shape)
    rows, columns, dtype = math.prod(lead), weight.shape[0], interop.dtype_of(x)
    with backend_of(x) as backend:
        weight, absmax = backend.contiguous(weight, -1), backend.contiguous(absmax, -1)
        given = backend.contiguous(x, -1).reshape(rows, depth)
        made = quantize(backend, given, threshold, INVERSE_SQUARE, threshold > 0)
    shape = *(lead or (1,)), columns
    codes, apart = (None if a is None else a.reshape(*shape[:-1], depth) for a in made[::3])
    pair = (
        Integers(codes, -1, BYTES, "int8", depth),
        Integers(weight.T, -2, BYTES, "int8", depth),
    )
    scales = Scales(made.scales.reshape(*shape[:-1], 1), absmax.reshape(1, columns))
    y = multiply_integers(*pair, shape, dtype, scales, bias)
    if apart is not None and math.prod((rows, columns, depth)):
        parts = {"packed": weight, "scale": absmax.reshape(columns, 1)}
        q = QuantArray(get_format("int8+absmax"), (columns, depth), dtype, parts, (0, 1))
        y = _product(apart, q, residual=y)
    return y if lead else interop.copied(y.reshape(columns))


def programs(dtypes: Sequence[str]) -> list[Program]:
    """Those of arrays of these dtypes."""
    entries, units = ("outlier_columns", "llm_int8_rows"), (UNIT, 1)
    return [
        program_of(entry, interop.float_dtype(name), unit)
        for name in dtypes
        for entry in entries
        for unit in units
    ]
