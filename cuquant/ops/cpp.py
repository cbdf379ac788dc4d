"""What kernels are told about a format: a C++ struct of facts, and tables as arguments."""

import hashlib
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cuquant.formats import Codebook, Format, Packing, Uniform, get_format
from cuquant.formats.blocks import BlockLayout, Run
from cuquant.formats.codecs import Codec
from cuquant.gpu.backend import Backend
from cuquant.interop import name_of

F32 = np.float32
RULES = {
    "absmax": "AbsMax",
    "signed_max": "SignedMax",
    "range": "Range",
    "mean_abs": "MeanAbs",
    "e8m0": "PowerOfTwo",
}
ROUNDINGS = {"half_even": "HalfEven", "half_away": "HalfAway", "half_up": "HalfUp"}
SPECIALS = {(4, 3): "OneNan", (5, 2): "Ieee", (5, 10): "Ieee", (8, 7): "Ieee"}
STORED = {
    "float32": "Float32",
    "float16": "Float16",
    "bfloat16": "BFloat16",
    "e8m0": "E8M0",
    "e4m3": "E4M3",
}
SCALE_KINDS = {  # of ggml's blocks
    "half": "Float16",
    "e8m0": "E8M0",
    "e4m3": "E4M3",
    "half_e8m0": "HalfE8M0",
    "half_e4m3": "HalfE4M3",
}
OFFSETS = {None: "None", "zero_point": "ZeroPoint", "min": "Minimum"}
ELEMENTS = {"float32": "float", "float16": "Half", "bfloat16": "Bfloat16"}
WORDS = {1: "u8", 2: "u16", 4: "u32"}

EVEN_CELLS = {16: 32, 32: 64, 64: 128, 128: 256, 256: 512}  # by levels; format.cuh's cells_of
MIRRORED_SIGN = 8  # what codes of negative numbers are higher by
DROPPED = 17  # lower bits that do not count in float cells; format.cuh's float_bits
MOST_PER_SIGN = 3200  # of such cells
NO_LOOKUP = bytes(56)


def element_of(dtype: np.dtype) -> str:
    """What kernels call elements of a dtype."""
    return ELEMENTS[name_of(dtype)]


@dataclass(frozen=True)
class Facts:
    """A C++ struct that a kernel is compiled for: its name in namespace formats, and its text."""

    name: str
    text: str

    @property
    def type(self) -> str:
        return f"formats::{self.name}"


def numbers(kind: str, /, **values: int) -> Facts:
    """A struct of integers that a kernel is compiled for: how its work is divided."""
    name = "_".join([kind, *(str(int(n)).replace("-", "minus") for n in values.values())])
    text = ", ".join(f"{field} = {int(value)}" for field, value in values.items())
    return Facts(name, f"struct {name} {{ static constexpr int {text}; }};\n")


def codec_type(codec: Codec, bits: int | None = None) -> str:
    """The C++ type of a codec whose codes are stored in `bits`; None: as few as it needs."""
    if isinstance(codec, Codebook):
        ranked = "true" if codec.code_of_rank is None else "false"
        codes = 1 << (codec.bits if bits is None else bits)
        return f"Codebook<{len(codec.levels)}, Grid::{cells_of(codec).grid}, {ranked}, {codes}>"
    if isinstance(codec, Uniform):
        return f"Uniform<{codec.low}, {codec.high}, Rounding::{ROUNDINGS[codec.rounding]}>"
    kind = SPECIALS.get((codec.exponent, codec.mantissa), "None")
    return f"Minifloat<{codec.exponent}, {codec.mantissa}, Specials::{kind}>"


def packing_type(packing: Packing) -> str:
    """The C++ type of a packing."""
    flag = ", true" if packing.signed else ""
    return f"Packing<{packing.bits}, Order::{packing.order.capitalize()}{flag}>"


@lru_cache(maxsize=256)
def _facts(
    codec: str, packing: str, values: tuple[tuple[str, str, str], ...], rule: str, layout: str
) -> Facts:
    lines = [
        f"    using Codec = {codec};",
        f"    using Rule = {rule};",
        f"    using Packing = cuquant::{packing};",
        *(f"    static constexpr {kind} {field} = {value};" for kind, field, value in values),
        "    __device__ static float peak() { return float_of(static_cast<u32>(peak_bits)); }",
        *([layout] if layout else []),
    ]
    body = "\n".join(lines)
    words = re.findall(r"\w+", f"{codec} {rule} {packing}")
    digest = hashlib.sha256(body.encode()).hexdigest()[:8]  # of what the words leave out
    name = "_".join([*words, digest])
    return Facts(name, f"struct {name} {{\n{body}\n}};\n")


def facts(fmt: Format, *, decoding: bool = False) -> Facts:
    """The struct of a format's facts.

    Codebooks differ in their number of levels alone: the levels are arguments. `decoding` says
    which scales a kernel meets where they are nested: those it reads, or those it makes.
    """
    scale = fmt.scale
    stored, peak, exact, mean = "None", 1.0, False, False
    if scale is not None:
        double = decoding and scale.nested == "double"
        stored = "Double" if double else STORED[scale.dtype]
        peak, mean = scale.peak, scale.rule == "mean_abs"
        exact = scale.encode_with == "exact" or fmt.is_blocks
    values = (
        ("Stored", "stored", f"Stored::{stored}"),
        ("Offset", "offset", f"Offset::{OFFSETS[fmt.offset]}"),
        ("int", "peak_bits", f"static_cast<int>({int(F32(peak).view(np.uint32)):#x}u)"),
        ("bool", "encode_exact", str(exact).lower()),
        ("bool", "mean", str(mean).lower()),
        ("bool", "signed_zero", str(fmt.codec.signed_zero).lower()),
        ("bool", "integers", str(isinstance(fmt.codec, Uniform)).lower()),
    )
    rule = RULES.get(scale.rule, "AbsMax") if scale is not None else "AbsMax"
    layout = layout_struct(fmt.layout) if fmt.is_blocks else ""
    return _facts(
        codec_type(fmt.codec, fmt.bits), packing_type(fmt.row_packing), values, rule, layout
    )


def layout_struct(layout: BlockLayout) -> str:
    """The struct of where the bits of ggml's blocks lie, for format/blocks.cuh."""
    fields = ", ".join(
        f"Field<{f.byte}, {f.bits}, {f.span}, {f.shift}>" for f in layout.code_fields
    )
    places = math.gcd(layout.nbytes, *(f.byte for f in layout.code_fields))
    numbers = {
        "elements": layout.elements,
        "bytes": layout.nbytes,
        "sub_block": layout.sub_block,
        "align": math.gcd(places, 4),
        "scale_byte": layout.scale_byte,
        "minimum_byte": -1 if layout.minimum_byte is None else layout.minimum_byte,
        "sum_byte": -1 if layout.sum_byte is None else layout.sum_byte,
        "scale_zero": layout.sc_zero,
        "is_signed": int(layout.signed),
    }
    lines = [
        *(f"static constexpr int {name} = {value};" for name, value in numbers.items()),
        f"static constexpr Stored stored = Stored::{SCALE_KINDS[layout.scale_kind]};",
        f"using Codes = Fields<{fields}>;",
        f"using ScaleRuns = Runs<{_runs(layout.sc_runs)}>;",
        f"using MinimumRuns = Runs<{_runs(layout.m_runs)}>;",
    ]
    return "\n".join(["    struct Layout {", *(f"        {line}" for line in lines), "    };"])


def _runs(runs: tuple[Run, ...]) -> str:
    return ", ".join(
        f"Run<{r.byte}, {r.count}, {r.first}, {r.low}, {r.bits}, {r.shift}, {r.step}>" for r in runs
    )


def with_plain_codes(fmt: Format) -> Format:
    """The format with one byte a code, for packings that another kernel makes from codes."""
    return replace(fmt, packing=Packing(8))


@lru_cache(maxsize=256)
def largest_value(fmt: Format) -> float:
    """The largest magnitude that a code stands for before its scale."""
    largest = float(np.nanmax(np.abs(fmt.codec.numbers)))
    if isinstance(fmt.codec, Uniform):
        largest = max(largest, fmt.codec.offset)
    return float(2 * largest if fmt.offset == "zero_point" else largest)


# ---- tables of codebooks ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Cells:
    """How a number finds the rank of a codebook: see Lookup and Grid in format.cuh."""

    grid: str
    image: np.ndarray  # uint8: the EncodeTables
    steps: int  # borders in the fullest cell
    to_unit: float = 0.0
    scale: float = 0.0
    lowest: int = 0
    per_sign: int = 1


@lru_cache(maxsize=64)
def cells_of(codec: Codebook) -> Cells:
    """The cells of a codebook: even ones, unless many levels crowd around zero."""
    if codec.code_of_rank is not None:
        return _mirrored_cells(codec)
    even = _even_cells(codec)
    if even.steps > 1 and len(codec.levels) > 32:
        return _float_cells(codec.borders)
    return even


def _count(levels: int) -> int:
    return next(cells for most, cells in EVEN_CELLS.items() if levels <= most)


def _places(unit: np.ndarray, cells: int) -> np.ndarray:
    """The cells of places in 0..1, as the kernel computes them: a monotone function."""
    exact = unit.astype(np.float64) * (4 * (cells - 1)) + 2.0**23
    return (exact.astype(F32).view(np.uint32).astype(np.int64) - 0x4B000000) // 4


def _by_cell(borders: np.ndarray, where: np.ndarray, cells: int) -> tuple[np.ndarray, ...]:
    """Of each cell: how many borders lie below all of it, and the next one; and the fullest.

    A border counts as below a cell where the next number above the border is in a lower one.
    """
    ranks = np.searchsorted(where, np.arange(cells), side="left")
    return ranks, np.append(borders, F32(np.inf))[ranks], np.bincount(where).max()


def _reach(numbers: np.ndarray) -> int:
    """n of the least 2^n that no magnitude exceeds."""
    mantissa, exponent = np.frexp(np.abs(numbers).max())
    return int(np.clip(exponent - (mantissa == 0.5), -125, 126))


def _even_cells(codec: Codebook) -> Cells:
    """Cells of even width over [-2^n, 2^n]."""
    cells = _count(len(codec.levels))
    reach = _reach(np.concatenate([codec.borders, np.asarray(codec.levels, F32)]))
    to_unit = F32(2.0 ** (-1 - reach))
    above = np.nextafter(codec.borders, F32(np.inf))
    with np.errstate(over="ignore", under="ignore"):
        unit = np.clip(above * to_unit + F32(0.5), F32(0), F32(1))
    ranks, border, steps = _by_cell(codec.borders, _places(unit, cells), cells)
    image = _image(border, ranks.astype(np.uint32), _all_borders(codec.borders))
    return Cells("Even", image, int(steps), float(to_unit), 4.0 * (cells - 1))


def _mirrored_cells(codec: Codebook) -> Cells:
    """Cells of even width for sizes; codes of negative numbers are those of their sizes, and 8."""
    half = len(codec.levels) // 2
    borders, codes = codec.borders[half:], codec.ranks_to_codes[half:]
    below = np.nextafter(-borders[::-1], F32(-np.inf))  # ties go to the smaller size
    same = (codec.ranks_to_codes[:half] == codes[::-1] + MIRRORED_SIGN).all()
    if not (same and (codec.borders[: half - 1] == below).all() and codec.borders[half - 1] < 0):
        raise TypeError("no kernel knows a codebook whose codes are neither ranks nor mirrored")
    cells, reach = EVEN_CELLS[16], _reach(np.asarray(codec.levels, F32))
    to_unit = F32(2.0**-reach)
    unit = np.clip(np.nextafter(borders, F32(np.inf)) * to_unit, F32(0), F32(1))
    ranks, border, steps = _by_cell(borders, _places(unit, cells), cells)
    if steps > 1:
        raise TypeError("the levels of a mirrored codebook are too close for its cells")
    pairs = codes[ranks].astype(np.uint32) | codes[np.minimum(ranks + 1, half - 1)] << np.uint32(8)
    image = _image(border, pairs.astype(np.uint32), _all_borders(codec.borders))
    return Cells("Mirrored", image, 1, float(to_unit), 4.0 * (cells - 1))


def _float_cells(borders: np.ndarray) -> Cells:
    """Cells of numbers that share sign, exponent and six bits of mantissa."""
    size = np.abs(borders[borders != 0])
    high = int(size.max().view(np.uint32) >> DROPPED) + 1
    low = max(int(size.min().view(np.uint32) >> DROPPED), high - MOST_PER_SIGN + 1)
    edges = (np.arange(low, high + 2, dtype=np.uint32) << np.uint32(DROPPED)).view(F32)
    first, last = edges[:-1].copy(), np.nextafter(edges[1:], F32(0))
    first[0], last[-1] = 0, np.inf
    lowest, highest = np.concatenate([first, -last]), np.concatenate([last, -first])
    ranks = np.searchsorted(borders, lowest, side="left")
    steps = np.searchsorted(borders, highest, side="left") - ranks
    image = _image(_all_borders(borders), ranks.astype(np.uint8))
    return Cells("Float", image, max(int(steps.max()), 1), lowest=low, per_sign=len(first))


def _all_borders(borders: np.ndarray) -> np.ndarray:
    return np.append(borders, F32(np.inf)).astype(F32)


def _image(*parts: np.ndarray) -> np.ndarray:
    """uint8: arrays one after the other, each from 16 bytes on."""
    flat = [np.ascontiguousarray(part).view(np.uint8) for part in parts]
    return np.concatenate([np.pad(part, (0, -len(part) % 16)) for part in flat])


@lru_cache(maxsize=64)
def _table(codec: Codebook) -> tuple[np.ndarray, tuple[int, ...]]:
    """uint8: image, levels, values and codes, one after the other; and where each begins."""
    parts = (
        cells_of(codec).image,
        np.asarray(codec.levels, F32),
        codec.values,
        codec.ranks_to_codes,
    )
    images = [_image(part) for part in parts]
    starts = np.cumsum([0, *(len(image) for image in images[:-1])])
    return np.concatenate(images), tuple(int(start) for start in starts)


def lookup(codec: Codec, backend: Backend) -> bytes:
    """The Lookup struct of a codec, its tables on the backend's device; zeros where it has none."""
    if not isinstance(codec, Codebook):
        return NO_LOOKUP
    table, _ = _table(codec)
    return _lookup(codec, backend.pointer(backend.upload(table)))


@lru_cache(maxsize=256)
def _lookup(codec: Codebook, at: int) -> bytes:
    """The same of a table at an address."""
    _, starts = _table(codec)
    cells = cells_of(codec)
    return struct.pack(
        "<4Q2f2I2i",
        *(at + start for start in starts),
        cells.to_unit,
        cells.scale,
        cells.lowest,
        cells.per_sign,
        len(cells.image) // 16,
        cells.steps,
    )


def scale_arrays(backend: Backend, fmt: Format, parts: Mapping[str, Any]) -> bytes:
    """The ScaleArrays struct of dequantize/dequantize.cu."""
    names = ("scale", "zero_point", "minimum", "global_scale", "nested_scale", "nested_offset")
    pointers = [backend.pointer(parts[name]) if name in parts else 0 for name in names]
    nested = fmt.scale is not None and fmt.scale.nested == "double"
    table = 0
    if nested:
        values = get_format("dynamic8").codec.values  # type: ignore[union-attr]
        table = backend.pointer(backend.upload(values))
    return struct.pack("<7Q", *pointers, table)
