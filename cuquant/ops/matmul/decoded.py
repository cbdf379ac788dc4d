"""Weights decoded to a matrix of float32, float16 or bfloat16, which the vendor's GEMM multiplies.

`values` is `PackedWeight.dequantize`: the same kernel, without rows of codes on the way.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from cuquant import interop
from cuquant.array.components import OPERATIONS
from cuquant.array.fragments import FRAGMENTS_LAYOUT, STRIP, UNIT, Fragments
from cuquant.array.packed_weight import PackedWeight
from cuquant.formats import Format
from cuquant.gpu.arrays import backend_of, contiguous
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.view import View
from cuquant.ops import cpp
from cuquant.ops.dequantize.on_gpu import check_out_of
from cuquant.ops.geometry import CHUNK
from cuquant.ops.layout import packed_weight
from cuquant.ops.layout.on_gpu import ALIGNMENT
from cuquant.ops.layout.packed_weight import Groups
from cuquant.ops.matmul.epilogue import TYPES
from cuquant.ops.matmul.problem import Weight

THREADS, EACH = 256, 2  # of dequantize_rows, and the chunks of a thread
WARPS, UNITS = 4, 4  # of dequantize_fragments, and the units of a warp

# Writes rows first .. first + count - 1 of a weight to an address, times the number at another one
# (0: times 1).
Decode = Callable[[Backend, int, int, int, int], None]


def pitch_of(depth: int) -> int:
    """Elements from row to row of a decoded weight."""
    return -(-depth // CHUNK) * CHUNK


def decoder(backend: Backend, weight: Weight, dtype: str, depth: int) -> Decode:
    """What decodes rows of a weight [N, K] to a matrix that starts on 16 bytes."""
    if weight.layout == FRAGMENTS_LAYOUT:
        return _of_fragments(backend, weight.fmt, weight.parts, weight.stored, dtype)
    return _of_rows(backend, weight, dtype, depth)


def _of_rows(backend: Backend, weight: Weight, dtype: str, depth: int) -> Decode:
    program = _rows_program(weight.type, weight.facts)
    operand, kind, pitch = weight.pack(backend), TYPES[dtype], pitch_of(depth)

    @cache
    def launch(count: int) -> Launch:
        return Launch(program, (-(-count * (pitch // CHUNK) // (THREADS * EACH)), 1, 1), THREADS)

    def decode(backend: Backend, to: int, unit: int, first: int, count: int) -> None:
        backend.launch(launch(count), operand, to, kind, unit, first, count, depth, pitch)

    return decode


@lru_cache(maxsize=1024)
def _rows_program(operand: str, facts: str) -> Program:
    return Program("matmul/vendor_rows.cu", "dequantize_rows", (operand, THREADS, EACH), facts)


def _of_fragments(
    backend: Backend, fmt: Format, parts: Mapping[str, Any], shape: tuple[int, ...], dtype: str
) -> Decode:
    columns, depth = shape
    units, groups = -(-depth // UNIT), Groups.of(fmt, depth)
    program = _fragments_program(fmt)
    packed = packed_weight.pack(backend, fmt, parts, (columns, depth))
    lookup = cpp.lookup(fmt.codec, backend)
    kind, numbers = TYPES[dtype], (depth, pitch_of(depth), groups.units, groups.fine)

    @cache
    def launch(count: int) -> Launch:
        blocks = -(-(-(-count // STRIP) * units) // (WARPS * UNITS))
        return Launch(program, (blocks, 1, 1), 32 * WARPS)

    def decode(backend: Backend, to: int, unit: int, first: int, count: int) -> None:
        place = first // STRIP, count
        backend.launch(launch(count), packed, lookup, to, kind, unit, *place, *numbers)

    return decode


@lru_cache(maxsize=1024)
def _fragments_program(fmt: Format) -> Program:
    facts = cpp.facts(fmt, decoding=not fmt.is_blocks)
    arguments = (facts.type, packed_weight.lie(fmt, FRAGMENTS_LAYOUT), WARPS, UNITS)
    return Program("matmul/vendor_fragments.cu", "dequantize_fragments", arguments, facts.text)


# ---- all values of a prepacked weight -----------------------------------------------------------


@lru_cache(maxsize=1024)
def _matrix_of(fmt: Format, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The one weight [N, K] whose components and values lie as those of a weight of this shape;
    None where there is none, or its rows of values do not start on 16 bytes."""
    *experts, rows, depth = shape
    if not math.prod(shape) or depth % CHUNK or not fmt.is_plain:
        return None
    if not experts:
        return rows, depth
    whole = (experts[0] * rows, depth)
    block = fmt.rule.block
    tall = block[0] if isinstance(block, tuple) else 1
    same = [[math.prod(c.shape) for c in Fragments(fmt, s).components] for s in (shape, whole)]
    return whole if rows % math.lcm(STRIP, tall) == 0 and same[0] == same[1] else None


def decode_to(
    backend: Backend, fmt: Format, parts: Mapping[str, Any], shape: tuple[int, ...], out: View
) -> bool:
    """Whether all values of a weight went to `out`: see `_matrix_of`."""
    matrix = _matrix_of(fmt, shape)
    if matrix is None or out.pointer % ALIGNMENT or not out.is_contiguous:
        return False
    decode = _of_fragments(backend, fmt, parts, matrix, out.dtype.name)
    decode(backend, out.pointer, 0, 0, matrix[0])
    return True


@interop.untraced
def values(p: PackedWeight, dtype: object, out: Any) -> Any:
    """`p.dequantize(dtype, out=out)` on a GPU; None where its rows must be made first."""
    p.check()
    if out is not None:
        check_out_of(p, dtype, out)
    if _matrix_of(p.format, p.shape) is None:
        return None
    with backend_of(p.components["codes"]) as backend:
        wanted = interop.float_dtype(p.dtype if dtype is None else dtype)
        target = backend.empty(p.shape, wanted) if out is None else out
        parts = contiguous(backend, p.components, ALIGNMENT)
        done = decode_to(backend, p.format, parts, p.shape, backend.view(target))
        return target if done else None


OPERATIONS["laid_values"] = values
