"""Sides of products whose two sides are codes, a byte each: which formats, and their structs.

Integers of 8 bits and fewer are bytes less their zero points, or unsigned bytes with them; small
floats are e4m3 or e5m2. What is packed more densely becomes bytes first.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache

from cuquant.formats import Format
from cuquant.formats.codecs import Minifloat, Uniform
from cuquant.gpu.backend import Backend
from cuquant.ops.matmul.problem import Weight
from cuquant.reference.tiles import Tiles

ALIGNMENT = 16  # bytes, of rows of codes
LEAST_BLOCK = 16  # columns: a step of the tensor cores
# kernels/matmul/coded.cuh's ScaleType.
SCALE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "e8m0": 3, "e4m3": 4}
INTEGERS, FLOATS = ("int8", "uint8"), ("fp8_e4m3", "fp8_e5m2")
WHOLE_E4M3 = 16  # integers up to here are e4m3's
# Small floats whose numbers e4m3 has, all of them.
IN_E4M3 = ((4, 3), (2, 1), (2, 3), (3, 2))


@lru_cache(maxsize=4096)
def codes_of(first: Format, second: Format) -> tuple[str, str] | None:
    """What the codes of two formats are multiplied as; None: they are no pair that kernels have."""
    if not (_has_scaling(first) and _has_scaling(second)):
        return None
    one, other = first.codec, second.codec
    if isinstance(one, Uniform) and isinstance(other, Uniform):
        return _integer(first), _integer(second)
    kinds = _float(first), _float(second)
    return None if None in kinds else kinds  # type: ignore[return-value]


def _has_scaling(fmt: Format) -> bool:
    """Whether its numbers are codes times scales that kernels read."""
    scale = fmt.scale
    if fmt.is_blocks or not fmt.is_plain or fmt.offset == "min" or fmt.bits > 8:
        return False
    if scale is None:
        return True
    if scale.nested == "double" or scale.flat is not None:
        return False
    return _wide(fmt) is None or _wide(fmt) % LEAST_BLOCK == 0  # type: ignore[operator]


def _wide(fmt: Format) -> int | None:
    """Columns of a block; None: as many as there are."""
    assert fmt.scale is not None
    block = fmt.scale.block
    if isinstance(block, tuple):
        return block[1]
    return block if isinstance(block, int) else None


def _integer(fmt: Format) -> str:
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
    wide: int = 1
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
        pointers = (
            backend.pointer(weight.parts[name]) if name in weight.parts else 0
            for name in ("scale", "global_scale")
        )
        across = tiles.grid[2]
        down = tiles.grid[1]
        return cls(
            *pointers, tiles.tall, tiles.wide, across, 0 if whole else down * across,
            fmt.scale.dtype,
        )  # fmt: skip

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
        "int8", "uint8", "fp8_e4m3" or "fp8_e5m2".
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

    def tiles(self, height: int) -> int:
        """At least as many tiles of `height` rows as all groups have."""
        if self.offsets:
            return -(-self.rows // height) + self.count
        return self.count * -(-self.rows // height)

    def pack(self) -> bytes:
        return struct.pack("<2q2Q", self.count, self.rows, self.offsets, self.counts)
