"""LLM.int8() on a GPU: rows to int8, the product of integers, and that of the outliers beside it.

Which columns hold outliers stays on the device, so that nothing waits for it: x is 0 in all others
for a second product, of all columns, with the int8 weight as it is. Without a threshold there is
none.

What calls of arrays alike launch is kept for as long as the weight lives, so that they cost the
host little.
"""

import inspect
import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cuquant import interop
from cuquant.array.quant_array import QuantArray
from cuquant.formats import get_format
from cuquant.formats.scales import INVERSE_127
from cuquant.gpu import jit
from cuquant.gpu.arrays import GpuBackend, backend_of, current_backend
from cuquant.gpu.backend import Backend, aligned
from cuquant.gpu.jit import Launch, Program
from cuquant.ops import cpp
from cuquant.ops.matmul import coded_kernels, door
from cuquant.ops.matmul.byte_rows import BYTES
from cuquant.ops.matmul.choose import family_of
from cuquant.ops.matmul.coded import ALIGNMENT, Coded, Groups, Scaling
from cuquant.ops.matmul.coded_on_gpu import NO_NUMBERS
from cuquant.ops.matmul.epilogue import PACK, Epilogue
from cuquant.ops.matmul.operands import resolved
from cuquant.ops.matmul.prepared import ADDRESS, SIGNATURE
from cuquant.ops.matmul.problem import Dense, Product, Weight
from cuquant.ops.plain_products import Integers, Scales, multiply_integers
from cuquant.ops.remember import Remembered
from cuquant.reference.llm_int8 import half_threshold

F32, I8, U8 = np.dtype(np.float32), np.dtype(np.int8), np.dtype(np.uint8)
FILE, THREADS, ROWS_OF_A_BLOCK = "quantize/llm_int8.cu", 256, 32
UNIT = 8  # columns of a thread, where they start on 16 bytes
# 1 / 127^2 to float32, as bitsandbytes' kernel has it.
INVERSE_SQUARE = 6.200012e-05
MOST = 64  # plans of a weight
WEIGHT = get_format("int8+absmax")

_product = inspect.unwrap(door.linear)


# ---- rows ---------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Addresses, or 0: of codes int8 [M, K]; scales float32 [M]; outliers uint8 [K]; apart [M, K].

    Without `outliers` each row's are its own. `weight` packs the kernel's Divided.
    """

    codes: int
    scales: int
    outliers: int = 0
    apart: int = 0
    weight: bytes = bytes(32)


def _divided(backend: Backend, absmax: Any, scales: Any, count: int) -> bytes:
    """The kernel's Divided: scales of so many rows of a weight."""
    at = backend.pointer(absmax), backend.pointer(scales)
    return struct.pack("<2Qqf4x", *at, count, INVERSE_127)


def program_of(entry: str, dtype: np.dtype, unit: int) -> Program:
    return Program(FILE, entry, (cpp.element_of(dtype), unit, THREADS))


@lru_cache(maxsize=256)
def _limit(threshold: float) -> float:
    return float(half_threshold(threshold)) if threshold > 0 else 0.0


def marks_all(rows: int) -> bool:
    """Whether outliers are written whole; else those of so many rows are added to zeros."""
    return rows <= ROWS_OF_A_BLOCK


@lru_cache(maxsize=1024)
def quantizer(
    dtype: np.dtype, shape: tuple[int, int], unit: int, limit: float, scales: int = 0
) -> Callable[[Backend, int, Rows, float], None]:
    """What makes rows of x [M, K] at an address, and so many scales of a weight.

    Scales of x are the largest sizes times a factor.
    """
    rows, width = shape
    grid = (-(-width // (unit * THREADS)), -(-rows // ROWS_OF_A_BLOCK), 1)
    mark = Launch(program_of("outlier_columns", dtype, unit), grid, THREADS)
    blocks = rows + -(-scales // THREADS)
    make = Launch(program_of("llm_int8_rows", dtype, unit), (blocks, 1, 1), THREADS)

    def run(backend: Backend, x: int, to: Rows, factor: float) -> None:
        codes, scales, outliers, apart, weight = to
        if limit and outliers:
            backend.launch(mark, x, outliers, limit, rows, width)
        arrays = x, outliers, codes, scales, apart, weight
        backend.launch(make, *arrays, limit, factor, rows, width)

    return run


def quantize(
    backend: Backend, x: Any, threshold: float, factor: float = 1.0, sets_apart: bool = False
) -> tuple[Any, Any, Any, Any]:
    """The arrays of Rows, of x [M, K], contiguous; the last is None unless it `sets_apart`."""
    (rows, width), dtype = tuple(x.shape), interop.dtype_of(x)
    made = (
        backend.empty((rows, width), I8),
        backend.empty((rows,), F32),
        backend.zeros((width,), U8),
        backend.empty((rows, width), dtype) if sets_apart else None,
    )
    if rows:
        codes, scales, outliers, apart = (0 if a is None else backend.pointer(a) for a in made)
        to = Rows(codes, scales, outliers, apart)
        given = backend.pointer(x)
        unit = UNIT if width % UNIT == 0 and given % 16 == 0 else 1
        limit = _limit(threshold) if width else 0.0
        quantizer(dtype, (rows, width), unit, limit)(backend, given, to, factor)
    return made


def quantized(x: Any, threshold: float) -> tuple[Any, Any, Any]:
    """Codes, largest sizes and outliers (uint8) of x [M, K]."""
    with backend_of(x) as backend:
        return quantize(backend, backend.contiguous(resolved(backend, x), -1), threshold)[:3]


# ---- products -----------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """`run` multiplies, called with the addresses of x, the bias and the result."""

    places: tuple[int, int]  # of the weight and its absmax, which torch may move
    kind: str
    device: int
    shape: tuple[int, ...]
    dtype: np.dtype
    run: Callable[[GpuBackend, int, int, int], None]


# By a weight and its absmax: plans by all else that they depend on, and an array for scales, which
# each product writes anew.
_known: Remembered[tuple[dict[Any, _Plan], Any]] = Remembered()


def _key(x: Any, weight: Any, absmax: Any, bias: Any, threshold: Any) -> Any:
    """All that a plan depends on but the weight's memory; None: no plan fits."""
    kind = interop.kind(x)
    if kind not in SIGNATURE or not isinstance(threshold, (int, float)):
        return None
    if kind == "torch" and interop.wants_gradient(x, absmax, bias):
        return None
    own = SIGNATURE[kind]
    try:  # what is no array of x's library lacks something
        return threshold, own(x), own(weight), own(absmax), None if bias is None else own(bias)
    except AttributeError:
        return None


def again(x: Any, weight: Any, absmax: Any, bias: Any, threshold: Any) -> Any:
    """The product, by the plan of an earlier call with arrays alike; None where there is none."""
    known = _known.get((weight, absmax))
    plan = None if known is None else known[0].get(_key(x, weight, absmax, bias, threshold))
    if plan is None:
        return None
    at, backend = ADDRESS[plan.kind], current_backend(plan.kind, plan.device)
    if backend is None or plan.places != (at(weight), at(absmax)):
        return None
    out = backend.empty(plan.shape, plan.dtype)
    plan.run(backend, at(x), 0 if bias is None else at(bias), at(out))
    return out


def linear(
    x: Any, weight: Any, absmax: Any, bias: Any, threshold: float, given: Sequence[Any]
) -> Any:
    """x [..., K] times the transpose of int8 [N, K], in x's dtype: a new array of its own.

    `given` are the same arguments as the caller has them, by whose identity a plan is kept.
    """
    *lead, depth = tuple(x.shape)
    rows, columns = math.prod(lead), weight.shape[0]
    with backend_of(x) as backend:
        own = [
            None if a is None else backend.contiguous(resolved(backend, a), -1)
            for a in (x, weight, absmax, bias)
        ]
        at = [0 if a is None else backend.pointer(a) for a in own]
        key = _key(*given)
        odd = depth % ALIGNMENT or not rows * columns * depth or jit.is_capturing(backend.stream)
        if odd or key is None or at != [0 if a is None else backend.pointer(a) for a in given[:4]]:
            return _by_steps(backend, own, (*lead, columns), threshold)
        arrays = given[1:3]
        plans, scales = _known.get(arrays) or _known.put(
            arrays, ({}, backend.empty((columns, 1), F32))
        )
        dtype = interop.dtype_of(x)
        run = _prepared(backend, [*own, scales], (rows, columns, depth), dtype, threshold)
        plan = _Plan((at[1], at[2]), backend.kind, backend.device, (*lead, columns), dtype, run)
        if len(plans) >= MOST:
            plans.clear()
        plans[key] = plan
        out = backend.empty(plan.shape, dtype)
        run(backend, at[0], at[3], backend.pointer(out))
        return out


def _prepared(
    backend: GpuBackend,
    arrays: Sequence[Any],
    shape: tuple[int, int, int],
    dtype: np.dtype,
    threshold: float,
) -> Callable[[GpuBackend, int, int, int], None]:
    """A plan's `run`: of x, weight, absmax and bias, all contiguous and on 16 bytes, and scales.

    It holds addresses of the weight, and no array.
    """
    rows, columns, depth = shape
    _, weight, absmax, bias, weight_scales = arrays
    limit, element = _limit(threshold), dtype.itemsize
    make = quantizer(dtype, (rows, depth), UNIT, limit, columns if limit else 0)
    divided = _divided(backend, absmax, weight_scales, columns if limit else 0)
    name, of_bias = interop.name_of(dtype), "float32" if bias is None else _name(bias)
    first = Epilogue(None, name, columns, bias_type=of_bias).constants
    last = Epilogue(None, name, columns, residual_type=name, residual_stride=columns).constants
    multiply = _integers(backend, weight, absmax, shape)
    add = _outliers(backend, weight, weight_scales, shape, dtype) if limit else None
    marks = limit > 0 and rows > 1  # a single row's outliers are its own
    sizes = rows * depth, 4 * rows, depth * marks, rows * depth * element, rows * columns * element
    ends = np.cumsum([aligned(size) for size in sizes[: 5 if limit else 2]]).tolist()
    ends += [0] * (5 - len(ends))
    nbytes = max(ends)

    def run(backend: GpuBackend, x: int, bias: int, out: int) -> None:
        memory = backend.empty((nbytes,), U8)
        codes = backend.pointer(memory)
        scales, outliers, apart, before = (codes + end for end in ends[:-1])
        if marks and not marks_all(rows):
            zeros = backend.zeros((depth,), U8)
            outliers = backend.pointer(zeros)
        to = Rows(codes, scales, outliers * marks, apart if limit else 0, divided)
        make(backend, x, to, INVERSE_SQUARE)
        sums = PACK(before if limit else out, bias, 0, *first)
        multiply(backend, _coded(codes, scales, rows, depth), sums + NO_NUMBERS)
        if add is not None:
            add(backend, apart, PACK(out, 0, before, *last))

    return run


def _name(array: Any) -> str:
    return interop.name_of(interop.dtype_of(array))


@lru_cache(maxsize=4096)
def _coded(codes: int, scales: int, rows: int, depth: int) -> Coded:
    """int8 [rows, depth] at an address, with a scale a row."""
    return Coded("int8", codes, depth, rows, Scaling(scales, across=1))


def _integers(
    backend: GpuBackend, weight: Any, absmax: Any, shape: tuple[int, int, int]
) -> coded_kernels.Run:
    """What multiplies codes of x and the weight."""
    rows, columns, depth = shape
    x = _coded(0, backend.pointer(absmax), rows, depth)  # as if it lay there
    w = _coded(backend.pointer(weight), backend.pointer(absmax), columns, depth)
    return coded_kernels.prepare(backend, x, w, shape, Groups(1, rows), depth)


def _outliers(
    backend: GpuBackend, weight: Any, scales: Any, shape: tuple[int, int, int], dtype: np.dtype
) -> Callable[[Backend, int, bytes], None]:
    """What multiplies x, where it is set apart, by the weight's values."""
    rows, columns, depth = shape
    operand = Weight(WEIGHT.plain, {"packed": weight, "scale": scales}, (columns, depth))
    product = Product(rows, columns, depth, Dense(0, dtype, depth, 1), (operand,))
    family = family_of(backend, product.problem(backend))
    return family.prepare(backend, product)(rows)


def _by_steps(
    backend: GpuBackend, arrays: Sequence[Any], shape: tuple[int, ...], threshold: float
) -> Any:
    """The product of rows that kernels cannot read as they lie, or of none."""
    x, weight, absmax, bias = arrays
    *lead, columns = shape
    depth, dtype = x.shape[-1], interop.dtype_of(x)
    rows = x.reshape(math.prod(lead), depth)
    made = quantize(backend, rows, threshold, INVERSE_SQUARE, threshold > 0)
    whole = *(lead or (1,)), columns
    codes, apart = (None if a is None else a.reshape(*whole[:-1], depth) for a in made[::3])
    pair = (
        Integers(codes, -1, BYTES, "int8", depth),
        Integers(weight.T, -2, BYTES, "int8", depth),
    )
    scales = Scales(made[1].reshape(*whole[:-1], 1), absmax.reshape(1, columns))
    y = multiply_integers(*pair, whole, dtype, scales, bias)
    if apart is not None and math.prod((*whole, depth)):
        parts = {"packed": weight, "scale": absmax.reshape(columns, 1)}
        q = QuantArray(WEIGHT, (columns, depth), dtype, parts, (0, 1))
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
