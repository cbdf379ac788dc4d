"""What kernels are told about a format: a C++ struct of facts, and tables as arguments."""

import hashlib
import re
import struct
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from cuquant.formats import Codebook, Format, Minifloat, Packing, Uniform
from cuquant.formats.blocks import BlockLayout, Run
from cuquant.formats.codecs import Codec
from cuquant.ops.backend import Backend

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
STORED = {"float32": "Float32", "float16": "Float16", "e8m0": "E8M0", "e4m3": "E4M3"}
OFFSETS = {None: "None", "zero_point": "ZeroPoint", "min": "Minimum"}
ELEMENTS = {"float32": "float", "float16": "Half", "bfloat16": "Bfloat16"}
WORDS = {1: "u8", 2: "u16", 4: "u32"}

EVEN_CELLS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
CROWDED = 32  # codebooks of more levels find their cells by a float's upper bits
DROPPED = 17  # lower bits that do not count there; format.cuh's float_bits
MOST_PER_SIGN = 3200  # of such cells
NO_LOOKUP = bytes(64)


@dataclass(frozen=True)
class Facts:
    """The C++ struct of a format: its name in namespace formats, and its text."""

    name: str
    text: str

    @property
    def type(self) -> str:
        return f"formats::{self.name}"


def codec_type(codec: Codec) -> str:
    """The C++ type of a codec."""
    if isinstance(codec, Codebook):
        grid = "Float" if len(codec.levels) > CROWDED else "Even"
        ranked = "true" if codec.code_of_rank is None else "false"
        return f"Codebook<{len(codec.levels)}, Grid::{grid}, {ranked}>"
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
    layout = _layout(fmt.layout) if fmt.is_blocks else ""
    return _facts(codec_type(fmt.codec), packing_type(fmt.row_packing), values, rule, layout)


def _layout(layout: BlockLayout) -> str:
    """The struct of where the bits of ggml's blocks lie, for blocks.cuh."""
    fields = ", ".join(
        f"Field<{f.byte}, {f.bits}, {f.span}, {f.shift}>" for f in layout.code_fields
    )
    wide = all(f.byte % 4 == 0 for f in layout.code_fields) and layout.nbytes % 4 == 0
    numbers = {
        "elements": layout.elements,
        "bytes": layout.nbytes,
        "sub_block": layout.sub_block,
        "align": 4 if wide else 2,
        "scale_byte": layout.scale_byte,
        "minimum_byte": -1 if layout.minimum_byte is None else layout.minimum_byte,
        "sum_byte": -1 if layout.sum_byte is None else layout.sum_byte,
        "scale_zero": layout.sc_zero,
        "is_signed": int(layout.signed),
    }
    lines = [
        *(f"static constexpr int {name} = {value};" for name, value in numbers.items()),
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


def largest_value(fmt: Format) -> float:
    """The largest magnitude that a code stands for before its scale."""
    largest = float(np.nanmax(np.abs(fmt.codec.numbers)))
    if isinstance(fmt.codec, Uniform):
        largest = max(largest, fmt.codec.offset)
    return float(2 * largest if fmt.offset == "zero_point" else largest)


# ---- tables of codebooks ------------------------------------------------------------------------


@dataclass(frozen=True)
class Cells:
    """How a number finds the rank of a codebook: see Lookup in format.cuh."""

    ranks: np.ndarray  # uint8 [cells]: the rank of the lowest number of a cell
    steps: int  # borders in the fullest one
    to_unit: float = 0.0
    scale: float = 0.0
    lowest: int = 0
    per_sign: int = 1


def cells_of(codec: Codebook) -> Cells:
    """The cells of a codebook, in the kind of grid that its number of levels has."""
    if len(codec.levels) > CROWDED:
        return _float_cells(codec.borders)
    return _even_cells(codec)


def _even_cells(codec: Codebook) -> Cells:
    """Cells of even width over [-reach, reach], as few as hold one border each.

    A number's cell is a monotone function of it, computed here as the kernel does: a border
    counts as below all of a cell where the next number above the border lies in a lower one.
    """
    reach = max(np.abs(codec.borders).max(), np.abs(np.asarray(codec.levels, F32)).max())
    exponent = int(np.clip(np.frexp(reach)[1], -125, 126))
    to_unit = F32(2.0 ** (-1 - exponent))
    above = np.nextafter(codec.borders, F32(np.inf))
    with np.errstate(over="ignore", under="ignore"):
        unit = np.clip(above * to_unit + F32(0.5), F32(0), F32(1))
    best = None
    for cells in EVEN_CELLS:
        where = (unit * F32(cells) + F32(2**23)).view(np.uint32).astype(np.int64) - 0x4B000000
        ranks = np.searchsorted(where, np.arange(cells + 1), side="left").astype(np.uint8)
        steps = int(np.bincount(where).max())
        if best is None or steps < best.steps:
            best = Cells(ranks, steps, to_unit=float(to_unit), scale=float(cells))
        if steps == 1:
            break
    assert best is not None
    return best


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
    return Cells(
        ranks.astype(np.uint8), max(int(steps.max()), 1), lowest=low, per_sign=len(first)
    )


@lru_cache(maxsize=64)
def lookup_table(codec: Codebook) -> tuple[np.ndarray, Cells]:
    """uint8: borders, levels, values, codes and ranks of a codebook, as they lie behind another."""
    cells = cells_of(codec)
    borders = np.append(codec.borders, F32(np.inf)).astype(F32)
    parts = (borders, np.asarray(codec.levels, F32), codec.values, codec.ranks_to_codes)
    aligned = [_padded(part) for part in (*parts, cells.ranks)]
    return np.concatenate(aligned), cells


def _padded(part: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(part).view(np.uint8)
    return np.pad(flat, (0, -len(flat) % 16))


def lookup(codec: Codec, backend: Backend) -> bytes:
    """The Lookup struct of a codec, its tables on the backend's device; zeros where it has none."""
    if not isinstance(codec, Codebook):
        return NO_LOOKUP
    table, cells = lookup_table(codec)
    at = backend.pointer(backend.upload(table))
    count = len(codec.levels)
    pointers = []
    for nbytes in (4 * count, 4 * count, 1024, count, 0):
        pointers.append(at)
        at += nbytes + -nbytes % 16
    return struct.pack(
        "<5Q2f2I2i",
        *pointers,
        cells.to_unit,
        cells.scale,
        cells.lowest,
        cells.per_sign,
        len(cells.ranks),
        cells.steps,
    )


def check_codec(fmt: Format) -> None:
    """TypeError for a codec that kernels do not know; there is none in the catalogue."""
    if not isinstance(fmt.codec, (Codebook, Uniform, Minifloat)):
        raise TypeError(f"no kernel knows the codec of {fmt}")
