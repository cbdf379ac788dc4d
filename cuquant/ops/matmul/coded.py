"""Sides of products whose two sides are codes, a byte each: which formats, and their structs.

Integers of 8 bits and fewer are bytes less their zero points, or unsigned bytes with them; small
floats are e4m3 or e5m2. What is packed more densely becomes bytes first, in a call's workspace.
"""

import math
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from cuquant.formats import Codebook, Format, get_format
from cuquant.formats.codecs import Minifloat, Uniform
from cuquant.gpu.backend import Backend, aligned
from cuquant.gpu.jit import Launch, Program
from cuquant.ops import cpp
from cuquant.ops.matmul.problem import Weight
from cuquant.reference.tiles import Tiles

ALIGNMENT = 16  # bytes, of rows of codes
LEAST_BLOCK = 16  # columns: a step of the tensor cores
# Of matmul/coded.cuh's ScaleType, and of the codes of matmul/dense_warps.cu.
SCALE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "e8m0": 3, "e4m3": 4}
BITS = "bits"  # eight codes a byte
KINDS = {"int8": 0, "uint8": 1, "fp8_e4m3": 2, "fp8_e5m2": 3, BITS: 4}
INTEGERS, FLOATS = ("int8", "uint8"), ("fp8_e4m3", "fp8_e5m2")  # of KINDS
AS_STORED, AS_INT8, AS_E4M3 = 0, 1, 2  # matmul/codes.cu's Made
SUMMED = {"uint8": 0, "int8": 1, BITS: 2}  # and its Summed
WHOLE_E4M3 = 16  # integers up to here are e4m3's
# Small floats whose numbers e4m3 has, all of them.
IN_E4M3 = ((4, 3), (2, 1), (2, 3), (3, 2))
THREADS, WARPS, CHUNK = 256, 8, 8  # of a block of matmul/codes.cu; codes of a thread
SUM_BYTES = 4


def bytes_of(kind: str, depth: int) -> int:
    """Bytes of a row of codes."""
    return -(-depth // 8) if kind == BITS else depth


@lru_cache(maxsize=4096)
def codes_of(first: Format, second: Format) -> tuple[str, str] | None:
    """What the codes of two formats are multiplied as; None: they are no pair that kernels have."""
    if not (_has_scaling(first) and _has_scaling(second)):
        return None
    for kind in (_integer, _float):
        kinds = kind(first), kind(second)
        if None not in kinds:
            return kinds  # type: ignore[return-value]
    return None


def are_bits(backend: Backend, first: Weight, second: Weight) -> bool:
    """Whether two arrays of -1 and 1 lie as kernels multiply bits: rows of whole vectors, and a
    scale for each row or for all."""
    sides = first, second
    depth = first.stored[-1]
    return (
        all(side.fmt.codec == get_format("int1").codec for side in sides)
        and all(side.fmt.row_packing.order == "low" for side in sides)
        and depth % (8 * ALIGNMENT) == 0
        and segment_of(first.fmt, second.fmt, depth) == depth
        and all(backend.pointer(side.parts["packed"]) % ALIGNMENT == 0 for side in sides)
    )


def _has_scaling(fmt: Format) -> bool:
    """Whether its numbers are codes times scales that kernels read."""
    scale = fmt.scale
    if fmt.is_blocks or not fmt.is_plain or fmt.offset == "min" or fmt.bits > 8:
        return False
    if scale is None:
        return True
    return scale.nested != "double" and scale.flat is None and wide_of(fmt) % LEAST_BLOCK == 0


def wide_of(fmt: Format) -> int:
    """Columns of a block; 0: as many as there are."""
    block = fmt.scale.block if fmt.scale is not None else "row"
    wide = block[1] if isinstance(block, tuple) else block
    return wide if isinstance(wide, int) else 0


def tall_of(fmt: Format) -> int:
    """Rows of a block, of formats whose blocks are not the whole array."""
    block = fmt.scale.block if fmt.scale is not None else 1
    return block[0] if isinstance(block, tuple) else 1


def segment_of(first: Format, second: Format, depth: int) -> int:
    """Columns that share scales on both sides: `depth`, or fewer that divide both blocks."""
    wides = [wide for wide in map(wide_of, (first, second)) if 0 < wide < depth]
    return math.gcd(*wides) if wides else depth


def _integer(fmt: Format) -> str | None:
    codec = fmt.codec
    if isinstance(codec, Codebook):
        whole = all(level == int(level) and abs(level) < 128 for level in codec.levels)
        return "int8" if whole else None
    if not isinstance(codec, Uniform):
        return None
    return "uint8" if fmt.offset == "zero_point" and fmt.bits == 8 else "int8"


def _float(fmt: Format) -> str | None:
    codec = fmt.codec
    if isinstance(codec, Uniform):
        reach = codec.high - codec.low if fmt.offset == "zero_point" else codec.offset
        return "fp8_e4m3" if reach <= WHOLE_E4M3 else None
    if not isinstance(codec, Minifloat):
        return None
    shape = codec.exponent, codec.mantissa
    return "fp8_e5m2" if shape == (5, 2) else "fp8_e4m3" if shape in IN_E4M3 else None


@dataclass(frozen=True)
class Scaling:
    """Scales of a side: the struct of the same name in matmul/coded.cuh.

    Attributes
    ----------
    scale, global_scale
        Addresses, or 0.
    tall, wide, across, matrix
        Rows and columns of a block, blocks beside each other, and scales of a matrix.
    dtype
        How a scale is stored.
    """

    scale: int = 0
    global_scale: int = 0
    tall: int = 1
    wide: int = 1 << 30  # more than there are; kernels divide by it in 32 bits
    across: int = 0
    matrix: int = 0
    dtype: str = "float32"

    @classmethod
    def of(cls, backend: Backend, weight: Weight) -> "Scaling":
        """Those of an array [..., rows, K] of matrices."""
        fmt, stored = weight.fmt, weight.stored
        rows, depth = (*([1] * (2 - len(stored))), *stored)[-2:]
        if fmt.scale is None:
            return cls(tall=max(rows, 1), wide=max(depth, 1))
        tiles = Tiles.of(fmt, (rows, depth))
        whole = fmt.scale.block == "tensor"
        own, shared = (
            backend.pointer(weight.parts[name]) if name in weight.parts else 0
            for name in ("scale", "global_scale")
        )
        _, down, across = tiles.grid
        matrix = 0 if whole else down * across
        return cls(own, shared, tiles.tall, tiles.wide, across, matrix, fmt.scale.dtype)

    def pack(self) -> bytes:
        """The struct's 56 bytes."""
        numbers = self.tall, self.wide, self.across, self.matrix
        return struct.pack(
            "<2Q4qi4x", self.scale, self.global_scale, *numbers, SCALE_TYPES[self.dtype]
        )


@dataclass(frozen=True)
class Coded:
    """A side as kernels read it: the struct of the same name in matmul/coded.cuh.

    Attributes
    ----------
    kind
        "int8", "uint8", "fp8_e4m3", "fp8_e5m2" or BITS.
    codes, stride
        The address of the first row, and bytes from row to row, multiples of ALIGNMENT.
    rows
        Of a matrix.
    scaling
        What codes are worth.
    zero_point, sums
        Addresses, or 0.
    """

    kind: str
    codes: int
    stride: int
    rows: int
    scaling: Scaling
    zero_point: int = 0
    sums: int = 0

    struct: ClassVar[str] = "Coded"

    def at(self, parts: Iterable[str], addresses: Iterable[int]) -> "Coded":
        """The same of an array whose components lie elsewhere, without sums."""
        own = dict(zip(parts, addresses, strict=True))
        scaling = self.scaling
        if scaling.scale:
            shared = own.get("global_scale", 0)
            scaling = replace(scaling, scale=own["scale"], global_scale=shared)
        point = own["zero_point"] if self.zero_point else 0
        return Coded(self.kind, own["packed"], self.stride, self.rows, scaling, point)

    def pack(self) -> bytes:
        """The struct's 96 bytes."""
        head = struct.pack("<Q2q", self.codes, self.stride, self.rows)
        return head + self.scaling.pack() + struct.pack("<2Q", self.zero_point, self.sums)


@dataclass(frozen=True)
class Groups:
    """The struct of the same name in matmul/grouped.cuh: which rows meet which weights."""

    count: int
    rows: int
    offsets: int = 0
    counts: int = 0

    @property
    def typical(self) -> int:
        """About as many rows as a group has."""
        return -(-self.rows // self.count) if self.offsets else self.rows

    def tiles(self, height: int) -> int:
        """At least as many tiles of `height` rows as all groups have."""
        if self.offsets:
            return -(-self.rows // height) + self.count
        return self.count * -(-self.rows // height)

    def pack(self) -> bytes:
        return struct.pack("<2q2Q", self.count, self.rows, self.offsets, self.counts)


# ---- from arrays to sides -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """A quantized array on its way to a Coded; `made` is one of matmul/codes.cu's."""

    weight: Weight
    kind: str
    made: int

    @classmethod
    def of(cls, weight: Weight, kind: str) -> "_Side":
        fmt = weight.fmt
        minifloat = isinstance(fmt.codec, Minifloat)
        made = AS_E4M3 if kind == "fp8_e4m3" else AS_INT8
        if kind in ("uint8", BITS) or (minifloat and fmt.bits == 8):
            made = AS_STORED
        return cls(weight, kind, made)

    @property
    def rows(self) -> int:
        """Of all matrices."""
        return math.prod(self.weight.stored[:-1])

    @property
    def depth(self) -> int:
        return self.weight.stored[-1]

    @property
    def stride(self) -> int:
        return -(-bytes_of(self.kind, self.depth) // ALIGNMENT) * ALIGNMENT

    @property
    def is_summed(self) -> bool:
        """Whether products need the sums of the other side's codes, or how many ones it has."""
        return self.kind in ("uint8", BITS)

    def is_ready(self, backend: Backend) -> bool:
        """Whether its bytes are codes as kernels read them."""
        if self.kind == BITS:  # as are_bits said
            return True
        stays = self.weight.fmt.bits == 8 and self.weight.fmt.row_packing.order == "low"
        stays &= self.made == AS_STORED or isinstance(self.weight.fmt.codec, Uniform)
        whole = self.depth % ALIGNMENT == 0
        return stays and whole and backend.pointer(self.weight.parts["packed"]) % ALIGNMENT == 0

    def coded(self, backend: Backend, codes: int, sums: int) -> Coded:
        points = self.weight.parts.get("zero_point") if self.kind == "uint8" else None
        *_, rows, _ = 1, *self.weight.stored
        zero_point = 0 if points is None else backend.pointer(points)
        scaling = Scaling.of(backend, self.weight)
        return Coded(self.kind, codes, self.stride, rows, scaling, zero_point, sums)

    def make(self, backend: Backend, to: int) -> None:
        """Write the codes as bytes to an address."""
        weight = self.weight
        word = cpp.WORDS[weight.fmt.row_packing.dtype.itemsize]
        facts = cpp.facts(weight.fmt, decoding=True)
        program = Program(
            "matmul/codes.cu", "code_bytes", (facts.type, word, self.made), facts.text
        )
        chunks = self.rows * self.stride // CHUNK
        launch = Launch(program, (-(-chunks // THREADS), 1, 1), THREADS)
        source = replace(weight, row_step=1).pack(backend)
        backend.launch(launch, source, to, self.rows, self.depth, self.stride)

    def make_sums(self, backend: Backend, codes: int, segment: int, to: int) -> None:
        """Write the sums of its codes to an address."""
        columns = self.stride if self.kind == BITS else self.depth
        shape = self.rows, columns, self.stride
        add_up(backend, self.kind, codes, shape, min(segment, columns), to)


def add_up(
    backend: Backend, kind: str, codes: int, shape: tuple[int, int, int], segment: int, to: int
) -> None:
    """Write the sums of rows of codes to an address; `shape` is rows, columns, bytes of a row."""
    rows, depth, _ = shape
    segments = -(-depth // segment)
    launch = Launch(sums_program(kind), (-(-rows * segments // WARPS), 1, 1), THREADS)
    backend.launch(launch, codes, to, *shape, segment, segments)


def sums_program(kind: str) -> Program:
    """The kernel that adds up codes, or counts the ones of bits."""
    return Program("matmul/codes.cu", "code_sums", (SUMMED[kind],), overlaps=True)


@contextmanager
def sides(
    backend: Backend, x: Weight, weights: Weight, kinds: tuple[str, str], segment: int
) -> Iterator[tuple[Coded, Coded]]:
    """Both sides as kernels read them, while the context lasts."""
    pair = _Side.of(x, kinds[0]), _Side.of(weights, kinds[1])
    ready = [side.is_ready(backend) for side in pair]
    summed = [side.is_summed for side in pair][::-1]
    codes_bytes = [side.rows * side.stride for side in pair]
    sums_bytes = [side.rows * -(-side.depth // segment) * SUM_BYTES for side in pair]
    wanted = *(not own for own in ready), *summed
    sizes = [
        aligned(nbytes) * own
        for nbytes, own in zip((*codes_bytes, *sums_bytes), wanted, strict=True)
    ]
    with backend.workspace(max(sum(sizes), 1)) as at:
        made = []
        for i, side in enumerate(pair):
            codes, sums = at + sum(sizes[:i]), at + sum(sizes[: 2 + i])
            if ready[i]:
                codes = backend.pointer(side.weight.parts["packed"])
            else:
                side.make(backend, codes)
            if summed[i]:
                side.make_sums(backend, codes, segment, sums)
            made.append(side.coded(backend, codes, sums if summed[i] else 0))
        yield made[0], made[1]


def side_bytes(backend: Backend, x: Weight, kind: str) -> int:
    """How much memory `side` wants."""
    own = _Side.of(x, kind)
    return 0 if own.is_ready(backend) else aligned(own.rows * own.stride)


def side(backend: Backend, x: Weight, kind: str, at: int) -> Coded:
    """One side alone, without sums of its codes; at an address of side_bytes where these must be
    made."""
    own = _Side.of(x, kind)
    if own.is_ready(backend):
        return own.coded(backend, backend.pointer(x.parts["packed"]), 0)
    own.make(backend, at)
    return own.coded(backend, at, 0)
