"""Weights decoded to a matrix of float32, float16 or bfloat16 that the vendor's GEMM multiplies."""

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from cuquant.array.fragments import FRAGMENTS_LAYOUT, STRIP, UNIT
from cuquant.formats import Format
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.ops import cpp
from cuquant.ops.geometry import CHUNK
from cuquant.ops.layout import packed_weight
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
        return of_fragments(backend, weight.fmt, weight.parts, weight.stored, dtype)
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


def of_fragments(
    backend: Backend, fmt: Format, parts: Mapping[str, Any], shape: tuple[int, ...], dtype: str
) -> Decode:
    """The same of a weight of layout "fragments/1"."""
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
