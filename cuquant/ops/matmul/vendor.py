"""Many rows of x: the weight is decoded to x's dtype, and the vendor's GEMM multiplies.

What is decoded lies in a workspace that all products of a stream share; a weight that is larger
than DECODED is multiplied in slabs of its rows. Each weight is rounded once to x's dtype, and sums
are float32. Where something happens to them (bias, activation, residual, a gated unit, strides that
a GEMM does not take), slabs of them stay float32 until an Epilogue has been applied.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cuquant.array.fragments import FRAGMENTS_LAYOUT
from cuquant.formats import blocks
from cuquant.gpu.backend import Backend, Gemm, Matrix, aligned
from cuquant.gpu.jit import Launch, Program
from cuquant.ops import cpp
from cuquant.ops.matmul.decoded import Decode, decoder, pitch_of
from cuquant.ops.matmul.epilogue import GATED, PACK, TYPES, UNPACK
from cuquant.ops.matmul.problem import (
    MOST_STRIDE,
    Operand,
    Prepared,
    Problem,
    Product,
    Run,
    Weight,
)
from cuquant.ops.quantize.nested import E4M3_PEAK

DECODED = 256 << 20  # bytes of decoded weights, at most, unless 256 rows have more
SUMS = 64 << 20  # bytes of float32 sums; with more a GPU's caches would not hold them
SLAB = 256  # rows of a weight or of x, of which slabs are made
NAMES = {code: name for name, code in TYPES.items()}
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
THREADS = 256
FOUR = 4  # columns of a thread of finish_sums


@dataclass(frozen=True)
class Division:
    """How a product is cut, and its workspace: decoded weights, sums, what the GEMM uses.

    Attributes
    ----------
    wide, tall
        Rows of the weights, and of x where there are sums, that are multiplied at a time.
    pitch, sums_pitch
        Elements from row to row of a decoded weight, and of sums.
    decoded, sums
        Bytes of one of each.
    scratch
        Bytes for the GEMM itself.
    """

    wide: int
    tall: int
    pitch: int
    sums_pitch: int
    decoded: int
    sums: int
    scratch: int


def _slab(count: int, most: int) -> int:
    """How many of `count` rows to take at a time, where `most` have room."""
    return min(count, max(most // SLAB, 1) * SLAB)


@lru_cache(maxsize=4096)
def divide(rows: int, columns: int, depth: int, itemsize: int, weights: int, arch: int) -> Division:
    """How to cut x [rows, depth] times so many weights [columns, depth]."""
    pitch = pitch_of(depth)
    wide = _slab(columns, DECODED // (pitch * itemsize * weights))
    wide = _slab(wide, SUMS // (SLAB * 4 * weights))
    sums_pitch = -(-wide // FOUR) * FOUR
    tall = _slab(rows, SUMS // (sums_pitch * 4 * weights))
    decoded, sums = aligned(wide * pitch * itemsize), aligned(tall * sums_pitch * 4)
    return Division(wide, tall, pitch, sums_pitch, decoded, sums, scratch_bytes(arch))


def scratch_bytes(arch: int) -> int:
    """Memory for a GEMM itself: NVIDIA's recommendation for cublasSetWorkspace."""
    return (32 if arch >= 90 else 4) << 20


# ---- where it wins ------------------------------------------------------------------------------

LEAST_ROWS = 17
LAUNCHES_US = 2.5  # of two more launches


# ---- the product --------------------------------------------------------------------------------

# Finds what a weight is multiplied by, a power of two, in UNIT_BYTES at an address; answers where
# it is, or 0.
FindUnit = Callable[[Backend, int], int]


@dataclass(frozen=True)
class Vendor:
    """The orchestrator of decoding and the vendor's GEMM."""

    layouts = (Weight.layout, FRAGMENTS_LAYOUT)
    height = 0

    def takes(self, p: Problem) -> bool:
        """Many rows of x, wherever these lie apart, and one weight or a gated unit's."""
        most = max(p.rows, p.columns, p.depth)
        known = p.dtype != "bfloat16" or p.arch >= 80
        return p.vendor and p.is_single and p.rows >= LEAST_ROWS and most < MOST_STRIDE and known

    def time_us(self, p: Problem) -> float:
        """Decoding reads the weights and writes floats, which the GEMM reads; a gated unit's sums
        are written and read too."""
        assert p.format is not None
        size = _SIZES[p.dtype]
        rate = p.rates.float32 if size == 4 else p.rates.tensor
        moved = p.weights * (p.format.bits / 8 + size)
        moved += 8 * p.rows * p.weights / p.depth if p.gated else 0
        gemm = max(2 * p.rows * p.weights / rate, p.weights * size / p.rates.read)
        return LAUNCHES_US + moved / p.rates.read + gemm

    def prepare(self, backend: Backend, product: Product) -> Prepared:
        columns, depth = product.columns, product.depth
        dtype, size, count = product.x.type_name, product.x.dtype.itemsize, len(product.weights)
        decoders = [_decoder(backend, weight, dtype, depth) for weight in product.weights]
        x_stride = max(product.x.row_stride, depth)  # of one row it may be anything
        all_units = count * UNIT_BYTES

        def of_rows(rows: int) -> Run:
            d = divide(rows, columns, depth, size, count, backend.arch)
            all_decoded, all_sums = count * d.decoded, count * d.sums
            sum_places = [all_units + all_decoded + i * d.sums for i in range(count)]
            slabs, row_slabs = _slabs(columns, d.wide), _slabs(rows, d.tall)

            def run(backend: Backend, pointer: int, epilogue: bytes) -> None:
                end = Ending(*UNPACK(epilogue))
                straight = count == 1 and end.is_plain(dtype, rows, columns)
                taken = all_units + all_decoded + (0 if straight else all_sums)
                with backend.workspace(taken + d.scratch) as start:
                    decoded, free = start + all_units, (start + taken, d.scratch)
                    each = [
                        (decode, unit(backend, start + i * UNIT_BYTES), decoded + i * d.decoded)
                        for i, (decode, unit) in enumerate(decoders)
                    ]
                    sums = [start + place for place in sum_places]
                    for column, wide in slabs:
                        for decode, unit, at in each:
                            decode(backend, at, unit, column, wide)
                        out = end.matrix(column, columns) if straight else None
                        for row, tall in ((0, rows),) if straight else row_slabs:
                            x = Matrix(pointer + row * x_stride * size, x_stride, dtype)
                            for (_, unit, at), to in zip(each, sums, strict=True):
                                y = out or Matrix(to, d.sums_pitch, "float32")
                                weights = Matrix(at, d.pitch, dtype)
                                factor = unit and unit + INVERSE
                                backend.gemm(Gemm((tall, wide, depth), x, weights, y, factor, free))
                            if not straight:
                                end.finish(backend, sums, d.sums_pitch, (row, column), (tall, wide))

            return run

        return of_rows


def _decoder(backend: Backend, weight: Operand, dtype: str, depth: int) -> tuple[Decode, FindUnit]:
    """What decodes rows of a weight, and what finds the number that they are multiplied by."""
    assert isinstance(weight, Weight)
    return decoder(backend, weight, dtype, depth), _unit_finder(backend, weight, dtype)


def _slabs(count: int, step: int) -> list[tuple[int, int]]:
    """The first of each slab, and how many it has."""
    return [(first, min(step, count - first)) for first in range(0, count, step)]


# ---- the range of float16 -----------------------------------------------------------------------


def _unit_finder(backend: Backend, weight: Weight, dtype: str) -> FindUnit:
    """What brings the largest weight below 2^14 where x is float16.

    The scales are read on the device, in stream order: they may have been overwritten.
    """
    scales = _scales(backend, weight) if dtype == "float16" else []
    if not scales:
        return lambda *_: 0
    structs = [*scales, NO_SCALES][:2]
    blocks = min(-(-max(s.many for s in scales) // SCALE_THREADS), MOST_SIZES)
    sizes = Launch(_SIZES_OF, (blocks, 1, 1), SCALE_THREADS)
    packed, reach = [s.pack() for s in structs], cpp.largest_value(weight.fmt)

    def find(backend: Backend, at: int) -> int:
        backend.launch(sizes, *packed, at + SIZES_AT)
        backend.launch(_UNIT_OF_SIZES, at + SIZES_AT, blocks, reach, at)
        return at

    return find


class _Scales(NamedTuple):
    """unit.cu's Scales."""

    pointer: int
    many: int
    step: int  # bytes
    kind: int
    reach: float

    def pack(self) -> bytes:
        return struct.pack("<Q2qif", *self)


NO_SCALES = _Scales(0, 0, 0, 0, 0.0)
FLOAT, HALF, EXPONENT, BFLOAT, HALF_EXPONENT = range(5)  # matmul/float16_range.cu's ScaleType
SCALE_THREADS, MOST_SIZES = 512, 128  # of scale_sizes, and its blocks at most
INVERSE, SIZES_AT = 4, 16  # bytes, from the unit on
UNIT_BYTES = aligned(SIZES_AT + 4 * MOST_SIZES)
_SIZES_OF = Program("matmul/float16_range.cu", "scale_sizes", (SCALE_THREADS,))
_UNIT_OF_SIZES = Launch(Program("matmul/float16_range.cu", "unit_of_sizes", (32,)), (1, 1, 1), 32)


def _scales(backend: Backend, weight: Weight) -> list[_Scales]:
    """What a weight's numbers are multiplied by at most: one array of scales, or the sum of two."""
    fmt, parts, reach = weight.fmt, weight.parts, cpp.largest_value(weight.fmt)

    def of(name: str, kind: int, reach: float) -> _Scales:
        part = parts[name]
        size = (4, 2, 1, 2, 1)[kind]
        return _Scales(backend.pointer(part), math.prod(part.shape), size, kind, reach)

    if fmt.is_blocks:
        layout = fmt.layout
        reach *= _largest_field(layout.sc_runs)
        added = _largest_field(layout.m_runs)
        if "blocks" in parts:
            count = math.prod(parts["blocks"].shape) // layout.nbytes
            at = backend.pointer(parts["blocks"])
            if layout.scale_kind == "half_e4m3":  # float16 has all of their numbers
                return []
            kind = {"half": HALF, "half_e8m0": HALF_EXPONENT}[layout.scale_kind]
            found = [_Scales(at + layout.scale_byte, count, layout.nbytes, kind, reach)]
            if layout.minimum_byte is not None:
                place = at + layout.minimum_byte
                found.append(_Scales(place, count, layout.nbytes, HALF, added))
            return found
        found = [of("scale", HALF, reach)]
        return [*found, of("minimum", HALF, added)] if "minimum" in parts else found
    if fmt.scale is None:
        return []
    if "nested_scale" in parts:
        return [of("nested_scale", FLOAT, reach), of("nested_offset", FLOAT, reach)]
    if "global_scale" in parts:
        return [of("global_scale", FLOAT, reach * E4M3_PEAK)]
    kinds = {"float32": FLOAT, "float16": HALF, "bfloat16": BFLOAT, "e8m0": EXPONENT}
    kind = kinds[fmt.scale.dtype]
    found = [of("scale", kind, reach)]
    return [*found, of("minimum", kind, 1.0)] if "minimum" in parts else found


def _largest_field(runs: tuple[blocks.Run, ...]) -> int:
    """What the integers of ggml's sub-blocks are at most; 1 where there are none."""
    bits = 0
    for run in runs:
        bits |= run.mask << run.shift
    return bits or 1


# ---- what happens to the sums -------------------------------------------------------------------

_FINISH = Program("matmul/vendor_finish.cu", "finish_sums", contract=True)


class Ending(NamedTuple):
    """An Epilogue struct, of which slabs have their own.

    Attributes
    ----------
    out, bias, residual
        Addresses; 0 where there is none.
    out_stride, out_column, residual_stride
        In elements.
    out_type, bias_type, residual_type, activation
        Numbers of matmul/epilogue.cuh.
    """

    out: int
    bias: int
    residual: int
    out_stride: int
    out_column: int
    residual_stride: int
    out_type: int
    bias_type: int
    residual_type: int
    activation: int

    def is_plain(self, dtype: str, rows: int, columns: int) -> bool:
        """Whether a GEMM of x of `dtype` can store to `out` itself."""
        untouched = not (self.bias or self.residual or self.activation)
        apart = rows == 1 or columns <= self.out_stride < MOST_STRIDE
        known = NAMES[self.out_type] in (dtype, "float32")
        return untouched and apart and known and self.out_column == 1

    def matrix(self, column: int, columns: int) -> Matrix:
        """`out` from a column on."""
        name = NAMES[self.out_type]
        return Matrix(self.out + column * _SIZES[name], max(self.out_stride, columns), name)

    def finish(
        self,
        backend: Backend,
        sums: list[int],
        pitch: int,
        start: tuple[int, int],
        shape: tuple[int, int],
    ) -> None:
        """Store a slab of the result, of sums that begin at its row and column `start`."""
        (row, column), (tall, wide) = start, shape
        out = self.out + self._size(self.out_type) * (
            row * self.out_stride + column * self.out_column
        )
        if len(sums) > 1:
            residual, stride, kind, activation = sums[0], pitch, TYPES["float32"], GATED
        else:
            stride, kind, activation = self.residual_stride, self.residual_type, self.activation
            residual = self.residual
            residual += self._size(kind) * (row * stride + column) if residual else 0
        bias = self.bias + self._size(self.bias_type) * column if self.bias else 0
        types = self.out_type, self.bias_type, kind, activation
        struct = PACK(out, bias, residual, self.out_stride, self.out_column, stride, *types)
        backend.launch(_finish_launch(tall, wide), sums[-1], struct, tall, wide, pitch)

    @staticmethod
    def _size(kind: int) -> int:
        return _SIZES[NAMES[kind]]


@lru_cache(maxsize=4096)
def _finish_launch(tall: int, wide: int) -> Launch:
    return Launch(_FINISH, (-(-tall * -(-wide // FOUR) // THREADS), 1, 1), THREADS)
