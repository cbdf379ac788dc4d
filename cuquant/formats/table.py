"""The table of all formats, computed from the formats themselves; a guide holds it."""

from dataclasses import astuple, dataclass

from cuquant.formats.catalogue import ALIASES, get_format, list_formats
from cuquant.formats.codecs import Codebook, Uniform
from cuquant.formats.format import Format
from cuquant.formats.packing import Packing

SHAPE = (4096, 4096)  # of the array whose bits and components the table counts
START, END = "<!-- formats -->", "<!-- /formats -->"  # around the table in examples/formats.md
_ORDERS = {
    "low": "low first",
    "high": "high first",
    "dense": "bit stream in uint32",
    "word": "words of uint32",
    "planes": "bit planes in uint32",
}


@dataclass(frozen=True)
class Row:
    """What the table says of one format."""

    name: str
    aliases: str
    bits: str  # an element of a 4096 x 4096 array, scales and all
    block: str
    scale: str
    offset: str
    codes: str
    packing: str


HEADINGS = (
    "name", "aliases", "bits per element", "block", "scale", "offset", "codes", "packing"
)  # fmt: skip


def format_rows() -> list[Row]:
    """A row for each of `list_formats()`, in its order."""
    return [format_row(get_format(name)) for name in list_formats()]


def format_table() -> str:
    """The table in Markdown, as examples/formats.md holds it between START and END.

    Examples
    --------
    >>> print(format_table().splitlines()[2])
    | nf4 |  | 4.5 | 64 | absmax, float32 |  | 16 levels | 4 bits, high first |
    """
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(astuple(row) for row in format_rows())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def format_row(fmt: Format) -> Row:
    """The row of one format."""
    return Row(
        str(fmt),
        ", ".join(alias for alias, name in ALIASES.items() if name == fmt.name),
        f"{fmt.bits_per_element:.6g}",
        _block(fmt),
        _scale(fmt),
        {"zero_point": "zero point", "min": "min"}.get(fmt.offset or "", ""),
        _codes(fmt),
        _packing(fmt),
    )


def _block(fmt: Format) -> str:
    if fmt.scale is None:
        return ""
    if fmt.is_blocks and fmt.layout.elements != fmt.rule.block:
        return f"{fmt.layout.elements} in {fmt.rule.block}s"
    return str(fmt.scale.block)


def _scale(fmt: Format) -> str:
    if fmt.scale is None:
        return ""
    if fmt.scale.rule == "e8m0":
        return f"power of two, {fmt.scale.dtype}"
    nested = ", float32 over all" if fmt.scale.nested == "global" else ""
    rule, dtype = fmt.scale.rule.replace("_", " "), fmt.scale.dtype
    if fmt.is_blocks and fmt.layout.sc_runs:
        dtype = "integer x float16"
    return f"{rule}, {dtype}{nested}"


def _codes(fmt: Format) -> str:
    codec = fmt.codec
    if isinstance(codec, Codebook):
        return f"{len(codec.levels)} levels"
    if isinstance(codec, Uniform):
        return f"{codec.low}..{codec.high}"
    return f"e{codec.exponent}m{codec.mantissa}"


def _packing(fmt: Format) -> str:
    packing = fmt.packing
    if not isinstance(packing, Packing):
        return f"{packing.nbytes} bytes a block"
    if packing.order == "low" and packing.bits in (8, 16):
        return str(packing.dtype)
    return f"{packing.bits} bit{'s' if packing.bits > 1 else ''}, {_ORDERS[packing.order]}"
