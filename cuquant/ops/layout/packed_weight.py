"""Weights of layout "fragments/1" as kernels read them: the Prepacked struct, groups and tables."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cuquant.array.fragments import FRAGMENTS_LAYOUT, STRIP, UNIT
from cuquant.formats import Codebook, Format, Minifloat, get_format
from cuquant.gpu.backend import Backend
from cuquant.ops import cpp

ALL_ROWS = 1 << 30  # Prepacked::tall of one scale for all rows


@dataclass(frozen=True)
class Groups:
    """How scales divide the units of a row.

    Attributes
    ----------
    units
        Of a group; 0 where a row is one group.
    fine
        Groups in a unit where it has several, else 1.
    """

    units: int
    fine: int

    @classmethod
    def of(cls, fmt: Format, depth: int) -> "Groups":
        """Of rows of `depth` columns; the layout takes no others."""
        columns = _columns(fmt)
        if columns is None or (columns >= depth and not fmt.is_blocks):
            return cls(0, 1)
        return cls(1, UNIT // columns) if columns < UNIT else cls(columns // UNIT, 1)

    def count(self, fmt: Format, depth: int) -> int:
        """Groups of a row."""
        columns = _columns(fmt)
        return 1 if columns is None else max(-(-depth // columns), 1)


def _columns(fmt: Format) -> int | None:
    """Columns that share a scale; None: all."""
    if fmt.is_blocks:
        return fmt.layout.sub_block
    block = fmt.rule.block
    if isinstance(block, tuple):
        return block[1]
    return block if isinstance(block, int) else None


IN_STRIPS, IN_BLOCKS, IN_ROWS = 0, 1, 2  # layout/packed_weight.cuh's Lie


def lie(fmt: Format, layout: str) -> int:
    """How scales lie: in strips, but for those of a tensor and of 2-D blocks; or by rows."""
    if layout != FRAGMENTS_LAYOUT:
        return IN_ROWS
    if fmt.is_blocks:
        return IN_STRIPS
    in_blocks = fmt.rule.block == "tensor" or isinstance(fmt.rule.block, tuple)
    return IN_BLOCKS if in_blocks else IN_STRIPS


def takes_rows(fmt: Format, depth: int) -> bool:
    """Whether matmul/stream.cu reads a QuantArray of so many columns as it is.

    matmul/stream_rows.cuh says how. Rows are whole units, and groups are too, or 16 or 32 columns.
    """
    packing = fmt.row_packing
    if fmt.is_blocks or fmt.scale is None or packing.order not in ("low", "high", "dense"):
        return False
    if packing.bits > 8 or depth % UNIT:
        return False
    block = fmt.rule.block
    if not isinstance(block, int):
        return block == "row"
    if fmt.offset == "min" and packing.bits == 8 and fmt.rule.dtype == "float32" and block < UNIT:
        return False  # registers have no room
    return block >= depth or block % UNIT == 0 or block in (16, 32)


def table_bytes(fmt: Format, wide: bool = False) -> int:
    """Shared memory of layout/fragments.cuh's Decoder; `wide`: with a copy for each lane, and 256
    bytes for what a byte finds."""
    bits = fmt.bits
    if not isinstance(fmt.codec, Codebook) and not (bits == 4 and isinstance(fmt.codec, Minifloat)):
        return 0
    copies = 32 if bits < 7 or wide else 16 if bits == 7 else 8
    apart = 256 if wide and bits in (4, 8) else copies * 4
    return (1 << (2 * bits if bits <= 4 else bits)) * apart


@lru_cache(maxsize=256)
def fits(fmt: Format) -> bool:
    """Whether what codes stand for has a place in 16-bit floats: levels that users gave may not.

    Rounded to float16, levels whose largest is in this range are off by less than 2^-11 of
    themselves or 2^-21 of the largest one.
    """
    if not isinstance(fmt.codec, Codebook):
        return True
    return 2.0**-4 <= float(np.abs(fmt.codec.numbers).max()) <= 2.0**15


def pack(
    backend: Backend,
    fmt: Format,
    parts: Mapping[str, Any],
    shape: tuple[int, ...],
) -> bytes:
    """The Prepacked struct of a weight [N, K], in fragments or in rows."""
    rows, depth = shape
    blocks, groups = 0, Groups.of(fmt, depth).count(fmt, depth)
    tall, scale_rows = 0, rows
    if fmt.is_blocks:
        blocks = groups * fmt.layout.sub_block // fmt.layout.elements
    else:
        block = fmt.rule.block
        if block == "tensor":
            tall, scale_rows = ALL_ROWS, 1
        elif isinstance(block, tuple):
            tall, scale_rows = block[0], -(-rows // block[0])
    names = ("codes", "scale", "zero_point", "minimum", "sub_scale", "sub_minimum", "global_scale")
    names += ("nested_scale", "nested_offset")
    parts = {"codes": parts["packed"], **parts} if "packed" in parts else parts
    pointers = [backend.pointer(parts[name]) if name in parts else 0 for name in names]
    nested = values = 0
    if "nested_scale" in parts:
        table = get_format("dynamic8").codec.values  # type: ignore[union-attr]
        nested = backend.pointer(backend.upload(table))
    if isinstance(fmt.codec, Codebook):
        values = backend.pointer(backend.upload(fmt.codec.values))
    return struct.pack(
        "<11Q5q3if",
        *pointers,
        nested,
        values,
        rows,
        groups,
        blocks,
        scale_rows,
        0,
        -(-rows // STRIP),
        -(-depth // UNIT),
        tall,
        cpp.largest_value(fmt),
    )
