"""Weights of layout "fragments/1" as kernels read them: the Prepacked struct, groups and tables."""

import math
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cuquant import interop
from cuquant.formats import Codebook, Format, Minifloat, Uniform, get_format
from cuquant.formats.blocks import Run
from cuquant.fragments import FRAGMENTS_LAYOUT, STRIP, UNIT
from cuquant.ops.backend import Backend
from cuquant.ops.kernels import facts as words

ALL_ROWS = 1 << 30  # Prepacked::tall of one scale for all rows

# Largest weights, or powers of two below, that float16 holds as exactly as a weight near 1.
LEAST, MOST = 2.0**-4, 2.0**14
MOST_UNIT = 2.0**126  # whose inverse float32 holds as well

# By the identity of a scale array: interop.version of it, and the unit.
_units: dict[int, tuple[int, float]] = {}


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


IN_STRIPS, IN_BLOCKS, IN_ROWS = 0, 1, 2  # prepacked.cuh's Lie


def lie(fmt: Format, layout: str) -> int:
    """How scales lie: in strips, but for those of a tensor and of 2-D blocks; or by rows."""
    if layout != FRAGMENTS_LAYOUT:
        return IN_ROWS
    if fmt.is_blocks:
        return IN_STRIPS
    in_blocks = fmt.rule.block == "tensor" or isinstance(fmt.rule.block, tuple)
    return IN_BLOCKS if in_blocks else IN_STRIPS


def takes_rows(fmt: Format, depth: int) -> bool:
    """Whether matmul_stream.cu reads a QuantArray of so many columns as it is: see rows.cuh.

    Rows are whole units, and groups are too, or 16 or 32 columns.
    """
    packing = fmt.row_packing
    if fmt.is_blocks or fmt.scale is None or packing.order not in ("low", "high", "dense"):
        return False
    if packing.bits > 8 or depth % UNIT:
        return False
    block = fmt.rule.block
    if not isinstance(block, int):
        return block == "row"
    return block >= depth or block % UNIT == 0 or block in (16, 32)


def table_bytes(fmt: Format, wide: bool = False) -> int:
    """Shared memory of fragment.cuh's Decoder; `wide`: with a copy for each lane, and 256 bytes for
    what a byte finds."""
    bits = fmt.bits
    if not isinstance(fmt.codec, Codebook) and not (bits == 4 and isinstance(fmt.codec, Minifloat)):
        return 0
    copies = 32 if bits < 7 or wide else 16 if bits == 7 else 8
    apart = 256 if wide and bits in (4, 8) else copies * 4
    return (1 << (2 * bits if bits <= 4 else bits)) * apart


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
    unit: float = 1.0,
) -> bytes:
    """The Prepacked struct of a weight [N, K], in fragments or in rows.

    `unit` is a power of two by which kernels that round scaled weights multiply them before.
    """
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
        unit,
    )


class Scaling(NamedTuple):
    """How scaled weights come into the range of the dtype that kernels round them to.

    Attributes
    ----------
    unit
        A power of two that they are multiplied by; so are their scales, which meet codes in that
        dtype.
    wide
        Whether codes times float16 scales must be, which else are multiplied in float16.
    """

    unit: float
    wide: bool = False


def scaling(backend: Backend, fmt: Format, parts: Mapping[str, Any], dtype: str) -> Scaling:
    """Of a weight that kernels multiply by its scales and then round to `dtype`.

    bfloat16 has float32's range. For float16 it is the scales that say it: they are read once for
    a weight, and so the host waits for the device.
    """
    scale = fmt.scale
    if dtype != "float16" or scale is None or scale.dtype == "e4m3":
        return Scaling(1.0)
    found = unit_of(backend, fmt, parts)
    pure = scale.dtype == "float16" and not fmt.is_blocks
    # An integer times a float16 has few enough bits, however small the scale is.
    smallest = 0.0 if isinstance(fmt.codec, Uniform) else LEAST
    if pure and smallest <= 1 / found <= MOST:
        return Scaling(1.0)
    # Codes are up to 57344: scales of weights near 1 would be too small for float16, whose smallest
    # number is 2^-24. With this they are off by 2^-22 of the largest weight at most.
    room = max(2.0 ** math.floor(math.log2(words.largest_value(fmt) / 4)), 1.0)
    return Scaling(min(found * room, MOST_UNIT), pure and not isinstance(fmt.codec, Codebook))


def is_wide(fmt: Format) -> bool:
    """Whether scales are wider than float16."""
    scale = fmt.scale
    return not fmt.is_blocks and scale is not None and scale.dtype in ("float32", "e8m0")


def unit_of(backend: Backend, fmt: Format, parts: Mapping[str, Any]) -> float:
    """The power of two that brings the largest weight to 1..2, found once for a weight.

    It reads the scales, and so waits for the device.
    """
    name = "nested_scale" if "nested_scale" in parts else "scale"
    array = parts[name]
    version, known = interop.version(array), _units.get(id(array))
    if known is not None and known[0] == version:
        return known[1]
    dtype = None if fmt.is_blocks or fmt.scale is None else fmt.scale.dtype
    largest = _largest(backend, array, dtype)
    if name == "nested_scale":
        largest += _largest(backend, parts["nested_offset"])
    largest *= words.largest_value(fmt)
    if fmt.is_blocks:
        layout = fmt.layout
        largest *= _largest_field(layout.sc_runs)
        if "minimum" in parts:
            largest += _largest(backend, parts["minimum"]) * _largest_field(layout.m_runs)
    exponent = math.frexp(largest)[1] - 1 if largest else 0
    found = 2.0 ** -min(max(exponent, -120), 120)
    _units[id(array)] = version, found
    if known is None:
        weakref.finalize(array, _units.pop, id(array), None)
    return found


def forget_unit(array: Any) -> None:
    """Find the unit of a scale array anew, which was written to."""
    if id(array) in _units:
        _units[id(array)] = -1, 0.0


def _largest(backend: Backend, array: Any, dtype: str | None = None) -> float:
    """The largest finite magnitude of an array, of scales where a dtype is named."""
    values = np.asarray(backend.read(array))
    if dtype == "e8m0" and values.dtype == np.uint8:
        values = values.view(ml_dtypes.float8_e8m0fnu)
    sizes = np.abs(values.astype(np.float64))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def _largest_field(runs: tuple[Run, ...]) -> int:
    """What the integers of ggml's sub-blocks are at most; 1 where there are none."""
    bits = 0
    for run in runs:
        bits |= run.mask << run.shift
    return bits or 1
