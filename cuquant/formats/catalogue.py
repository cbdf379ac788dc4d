"""The catalogue: every format by name, and the one function that makes them."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from itertools import pairwise

import numpy as np

from cuquant.errors import clipped, did_you_mean, shortened
from cuquant.formats import strings, tables
from cuquant.formats.blocks import BLOCK_LAYOUTS, FLOAT_LEVELS, IQ4_LEVELS
from cuquant.formats.changes import CHANGES
from cuquant.formats.codecs import Codebook, Minifloat, Uniform
from cuquant.formats.format import ARRANGED, Format
from cuquant.formats.names import FormatName, FormatOptions, Unpack
from cuquant.formats.packing import Packing
from cuquant.formats.scales import FLAT, Block, Scale, check_block

# Just below 0 and just below -x: codebooks count borders strictly below a value, so a border one
# step lower moves a tie up. The steps are float32's.
BELOW_ZERO = float(np.nextafter(np.float32(0), np.float32(-1)))

NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip

# bitsandbytes' FP4 (csrc/kernels.cu): sign and magnitude; 8 magnitudes in code order, and the
# borders of its decision tree as written there, which are not the midpoints.
FP4_MAGNITUDES = (0.0, 0.0625 / 12, 8 / 12, 12 / 12, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FP4_ORDER = (0, 1, 6, 7, 4, 5, 2, 3)  # magnitude codes by rising magnitude
FP4_BORDERS = (0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333)

MAPS: dict[str, tuple[float, ...]] = {
    "dynamic": tables.DYNAMIC_MAP,
    "dynamic_unsigned": tables.DYNAMIC_UNSIGNED_MAP,
    "linear": tables.LINEAR_MAP,
    "fp8_e4m3": tables.FP8_E4M3_MAP,
    "fp8_e5m2": tables.FP8_E5M2_MAP,
    "nf4": NF4_LEVELS,
}
"""bitsandbytes' codebooks (functional.py's create_*_map) as float32 constants, ascending."""


def _fp4() -> Codebook:
    """Levels ascending from -1 by -0.0 and 0.0 to 1; code = sign * 8 + magnitude code.

    A tie of |x| goes to the smaller magnitude, which for negative x is the upper rank: there the
    border lies one float32 below. Negative values that round to zero are -0.0 (code 8).
    """
    size = [float(np.float32(FP4_MAGNITUDES[code])) for code in FP4_ORDER]
    borders = np.asarray(FP4_BORDERS, np.float32)
    below = np.nextafter(-borders[::-1], np.float32(-np.inf))
    return Codebook(
        levels=(*(-v for v in size[::-1]), *size),
        thresholds=(*below.tolist(), BELOW_ZERO, *borders.tolist()),
        code_of_rank=(*(8 + code for code in FP4_ORDER[::-1]), *FP4_ORDER),
    )


NF4 = Codebook(NF4_LEVELS)
FP4 = _fp4()
DYNAMIC8 = Codebook(tables.DYNAMIC_MAP, tie="even")
LINEAR8 = Codebook(tables.LINEAR_MAP, tie="even")
SIGN = Codebook((-1.0, 1.0), thresholds=(BELOW_ZERO,))  # 0 is +1

E4M3, E5M2 = Minifloat(4, 3), Minifloat(5, 2)
E2M3, E3M2, E2M1 = Minifloat(2, 3), Minifloat(3, 2), Minifloat(2, 1)

LLOYD_BLOCKS = (32, 64, 128, 256)  # block sizes that fit_levels.py fits

NIBBLES = Packing(4, "low")
BYTES = Packing(8, "low")


def _codebook(codec: Codebook, packing: Packing, block: int) -> Callable[..., Format]:
    """bitsandbytes': float32 absmax, which codes use exactly (it stays exact if nested)."""

    def make(name: str, **_: object) -> Format:
        scale = Scale("absmax", 1.0, block, "float32", "exact")
        return Format(name, codec, scale, None, packing)

    return make


@lru_cache(maxsize=64)
def _learned(levels: tuple[float, ...]) -> Codebook:
    """The codebook of `levels`; kept, because its tables take milliseconds to make."""
    return Codebook(levels)


def _bof4s(name: str, **_: object) -> Format:
    scale = Scale("signed_max", 1.0, 64, "float16")
    return Format(name, _learned(tables.BOF4S), scale, None, NIBBLES)


def _kbit(bits: int) -> Callable[..., Format]:
    def make(
        name: str,
        levels: object = "lloyd",
        packing: str = "dense",
        block_size: object = 64,
        **_: object,
    ) -> Format:
        if packing not in ("dense", "word", "planes"):
            raise ValueError(
                f"packing {clipped(packing)} is unknown; pass 'dense', 'word' or 'planes'"
            )
        rule = "signed_max" if isinstance(levels, str) and levels == "lloyd" else "absmax"
        scale = Scale(rule, 1.0, 64, "float16")
        block = check_block(block_size)
        extent = scale.block if block == FLAT else replace(scale, block=block).flat or block
        codec = _learned(_levels(levels, bits, extent))
        return Format(name, codec, scale, None, Packing(bits, packing))

    return make


def _levels(levels: object, bits: int, block: Block) -> tuple[float, ...]:
    """The named table of 2^bits levels, or the user's own after a check.

    The maximum of a longer block lies further out: Lloyd's are those of the nearest fitted block.
    """
    if isinstance(levels, str):
        if levels not in ("lloyd", "normal", "linear"):
            raise ValueError(
                f"levels {clipped(levels)} is unknown; pass 'lloyd', 'normal', 'linear' or an array"
            )
        if levels == "lloyd":
            extent = block if isinstance(block, int) else LLOYD_BLOCKS[-1]
            fitted = min(LLOYD_BLOCKS, key=lambda size: abs(math.log2(size / extent)))
            return getattr(tables, f"LLOYD_{bits}_{fitted}")
        return getattr(tables, f"{levels.upper()}_{bits}")
    try:
        values = np.asarray(levels)
        if values.dtype.kind == "c":
            raise TypeError("these are complex")
        values = values.astype(np.float32)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's, of one that requires grad
        raise TypeError(
            f"levels must be a name or an array of numbers that NumPy reads, got {clipped(levels)} "
            f"({shortened(str(error))})"
        ) from error
    if values.ndim != 1 or not 2 <= values.size <= 2**bits:
        raise ValueError(
            f"levels has shape {values.shape}; {bits} bits hold 2 to {2**bits} levels in one axis"
        )
    if not np.isfinite(values).all():
        raise ValueError("levels must be finite, in float32")
    if (np.diff(values) <= 0).any():
        raise ValueError("levels must be ascending and unique in float32; pass np.unique(levels)")
    return tuple(float(v) for v in values)


def _int8(name: str, **_: object) -> Format:
    scale = Scale("absmax", 127.0, "row", "float32")
    return Format(name, Uniform(-127, 127), scale, None, Packing(8, "low", signed=True))


def _signed(bits: int) -> Callable[..., Format]:
    """Full range by signed max: the furthest element becomes -2^(bits - 1) exactly."""
    low = -(1 << (bits - 1))

    def make(name: str, **_: object) -> Format:
        scale = Scale("signed_max", float(low), 128, "float16")
        return Format(name, Uniform(low, -low - 1), scale, None, _integers(bits))

    return make


def _unsigned(bits: int) -> Callable[..., Format]:
    high = (1 << bits) - 1

    def make(name: str, **_: object) -> Format:
        scale = Scale("range", float(high), 128, "float16")
        return Format(name, Uniform(0, high), scale, "zero_point", _integers(bits))

    return make


def _integers(bits: int) -> Packing:
    return {4: NIBBLES, 8: BYTES}.get(bits, Packing(bits, "dense"))


def _int1(name: str, **_: object) -> Format:
    return Format(name, SIGN, Scale("mean_abs", 1.0, "row", "float16"), None, Packing(1, "low"))


def _value(exponent: int, mantissa: int) -> Callable[..., Format]:
    def make(name: str, **_: object) -> Format:
        return Format(name, Minifloat(exponent, mantissa), None, None, Packing(16))

    return make


def _minifloat(codec: Minifloat, block: int | str, dtype: str) -> Callable[..., Format]:
    def make(name: str, **_: object) -> Format:
        scale = Scale("absmax", codec.peak, block, dtype)
        return Format(name, codec, scale, None, _integers(codec.bits))

    return make


def _mx(codec: Minifloat) -> Callable[..., Format]:
    def make(name: str, **_: object) -> Format:
        scale = Scale("e8m0", codec.peak, 32, "e8m0")
        return Format(name, codec, scale, None, _integers(codec.bits))

    return make


def _nvfp4(name: str, **_: object) -> Format:
    scale = Scale("absmax", E2M1.peak, 16, "e4m3", nested="global")
    return Format(name, E2M1, scale, None, NIBBLES)


def _doubled_e2m1() -> Codebook:
    """ggml's, where code 8 is 0.0 too; what lies between two numbers goes to the smaller one."""
    borders = np.array([(a + b) / 2 for a, b in pairwise(FLOAT_LEVELS)], np.float32)
    below = np.nextafter(-borders[::-1], np.float32(-np.inf))
    return Codebook(
        levels=(*(float(-v) for v in FLOAT_LEVELS[:0:-1]), 0.0, *map(float, FLOAT_LEVELS)),
        thresholds=(*below.tolist(), BELOW_ZERO, *borders.tolist()),
        code_of_rank=(*range(15, 7, -1), *range(8)),
    )


IQ4 = Codebook(tuple(float(v) for v in IQ4_LEVELS))
DOUBLED_E2M1 = _doubled_e2m1()
_GGML: dict[str, tuple[Codebook | Uniform, str, float, str | None]] = {
    # codec, scale rule, peak, offset; the K-quants and IQ4 search for their scales
    "q4_0": (Uniform(-8, 7, "half_up"), "signed_max", -8.0, None),
    "q4_1": (Uniform(0, 15, "half_up"), "range", 15.0, "min"),
    "q5_0": (Uniform(-16, 15, "half_up"), "signed_max", -16.0, None),
    "q5_1": (Uniform(0, 31, "half_up"), "range", 31.0, "min"),
    "q8_0": (Uniform(-127, 127, "half_away"), "absmax", 127.0, None),
    "q8_1": (Uniform(-127, 127, "half_away"), "absmax", 127.0, None),
    "iq4_nl": (IQ4, "search", 1.0, None),
    "iq4_xs": (IQ4, "search", 1.0, None),
    "q2_k": (Uniform(0, 3), "search", 1.0, "min"),
    "q3_k": (Uniform(-4, 3), "search", 1.0, None),
    "q4_k": (Uniform(0, 15), "search", 1.0, "min"),
    "q5_k": (Uniform(0, 31), "search", 1.0, "min"),
    "q6_k": (Uniform(-32, 31), "search", 1.0, None),
    "ggml_mxfp4": (DOUBLED_E2M1, "e8m0", 6.0, None),
    "ggml_nvfp4": (DOUBLED_E2M1, "absmax", 6.0, None),
}


def _ggml(name: str, **_: object) -> Format:
    codec, rule, peak, offset = _GGML[name]
    layout = BLOCK_LAYOUTS[name]
    dtype = {"half_e8m0": "e8m0", "half_e4m3": "e4m3"}.get(layout.scale_kind, "float16")
    scale = Scale(rule, peak, layout.sub_block, dtype, "exact")
    return Format(name, codec, scale, offset, layout)


_MAKERS: dict[str, Callable[..., Format]] = {
    "nf4": _codebook(NF4, Packing(4, "high"), 64),
    "fp4": _codebook(FP4, Packing(4, "high"), 64),
    "bof4s": _bof4s,
    "dynamic8": _codebook(DYNAMIC8, BYTES, 256),
    "linear8": _codebook(LINEAR8, BYTES, 256),
    **{f"k{bits}": _kbit(bits) for bits in range(2, 9)},
    "int8": _int8,
    **{f"int{bits}": _signed(bits) for bits in range(7, 1, -1)},
    "int1": _int1,
    **{f"uint{bits}": _unsigned(bits) for bits in range(8, 1, -1)},
    "fp16": _value(5, 10),
    "bf16": _value(8, 7),
    "fp8_e4m3": _minifloat(E4M3, "row", "float32"),
    "fp8_e5m2": _minifloat(E5M2, "row", "float32"),
    "fp6_e2m3": _minifloat(E2M3, 32, "float16"),
    "fp6_e3m2": _minifloat(E3M2, 32, "float16"),
    "fp4_e2m1": _minifloat(E2M1, 32, "float16"),
    "mxfp8": _mx(E4M3),
    "mxfp8_e5m2": _mx(E5M2),
    "mxfp6": _mx(E2M3),
    "mxfp6_e3m2": _mx(E3M2),
    "mxfp4": _mx(E2M1),
    "nvfp4": _nvfp4,
    **dict.fromkeys(_GGML, _ggml),
}

ALIASES = {
    "float16": "fp16",
    "f16": "fp16",  # gguf's
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "mxfp8_e4m3": "mxfp8",
    "mxfp6_e2m3": "mxfp6",
}

# Members of gguf.GGMLQuantizationType that are called like a format with other bytes.
_OF_GGML = {"mxfp4": "ggml_mxfp4", "nvfp4": "ggml_nvfp4"}

_OPTIONS = tuple(FormatOptions.__annotations__)
_FILES = " (a kind of files: to= or --to makes them)"
_NO_FORMATS = {  # names of something else, which are asked for all the same
    **dict.fromkeys(("gguf", "gptq", "awq", "bitsandbytes", "mlx", "compressed-tensors"), _FILES),
    "llm_int8": " (a kind of layers, which cuquant.torch.quantize_ makes; weights are int8+absmax)",
}


def list_formats() -> list[str]:
    """Names of all formats, in the order of the documentation's table.

    Examples
    --------
    >>> from cuquant import list_formats
    >>> list_formats()[:3]
    ['nf4', 'fp4', 'bof4s']
    """
    return list(_MAKERS)


def get_format(name: FormatName | str | Format | Enum, **options: Unpack[FormatOptions]) -> Format:
    """The format called `name`, with `options` in place of its defaults.

    Parameters
    ----------
    name
        A name of `list_formats()` in any case, an alias such as "float8_e4m3fn", one with options,
        `NAME[:BLOCK][+OPTION...][^RULE]`, a member of gguf.GGMLQuantizationType, or a Format to
        alter. BLOCK is a `block_size`, two numbers as ROWSxCOLUMNS; an option is dq (double_quant),
        permuted, absmax, divisor, per_matrix, or one of `levels`, `packing`, `offset` (min) or
        `scale_dtype`; a rule is floor, for MX formats, which have it. `str(format)` is such a
        string; levels of one's own are printed as "custom" and not read.
    block_size
        Elements that share a scale: a multiple of 8, "row", "tensor", a pair (rows, columns) or
        "flat": the format's own number of elements of the flattened array, across rows as
        bitsandbytes has it; "flat128": 128 of them.
    double_quant
        True: float32 scales become 8-bit codes themselves, in nested blocks of 256 (QLoRA).
    levels
        k2..k8 only: "lloyd" (least squared error on normal data in blocks of that size,
        signed-max scale), "normal", "linear", or an array of 2 to 2^k ascending values (absmax
        scale).
    packing
        k2..k8 only: "dense" (a bit stream), "word" (32 // k codes a uint32) or "planes".
    offset
        uint2..uint8 only: "zero_point" (x' = (code - zero point) * scale, zero has a code) or "min"
        (x' = code * scale + minimum, both of the scales' dtype, codes from each block's smallest to
        its largest).
    scale_dtype
        "float32", "float16" or "bfloat16", for formats whose scales are one of these; of fp4, fp6,
        fp8 and int2..int8 also "e8m0", powers of two by OCP's rule: 2^(floor(log2 absmax) - emax).
    permuted
        True: columns are stored sorted by group, with the permutation beside them (GPTQ's
        desc_act). `quantize` leaves them where they are.
    absmax
        int8 by row only: True stores absmax in place of the scale, absmax / 127 (LLM.int8()).
    divisor
        nvfp4 only: True stores what block scales are divided by in place of the global scale that
        they are multiplied by (compressed-tensors).
    per_matrix
        nvfp4 only: True: each matrix of an array [..., N, K] has a global scale of its own, such
        as those of experts.

    Raises
    ------
    ValueError
        For an unknown name (the known ones are listed), an option the format does not have, or an
        option whose value differs from the one that the string gives.

    Examples
    --------
    >>> import cuquant as cq
    >>> cq.get_format("nf4", block_size=128).bits_per_element
    4.25
    >>> cq.get_format("nf4:32+dq") == cq.get_format("nf4", block_size=32, double_quant=True)
    True
    >>> str(cq.get_format("fp8_e4m3", block_size=(128, 128)))
    'fp8_e4m3:128x128'
    """
    if isinstance(name, Format):
        if not options:
            return name
        return _new_format(name.name, {**name.options, **options})
    if isinstance(name, Enum):
        name = _name_of(name)
    if not all(map(_is_constant, options.values())):  # an array may change, and be what it was
        return _asked_format(name, options)
    try:
        kinds = repr(list(options.values()))  # 64 and 64.0 are alike to a dict, but not to a format
        return _kept_format(name, tuple(options.items()), kinds)
    except TypeError:  # options that cannot be hashed, or wrong ones
        return _asked_format(name, options)


def _is_constant(value: object) -> bool:
    """Whether an option is made of numbers, names and tuples, which never change."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (str, int, float, np.generic))


@lru_cache(maxsize=256)
def _kept_format(name: str, options: tuple[tuple[str, object], ...], kinds: str) -> Format:
    return _asked_format(name, dict(options))


def _asked_format(text: object, options: Mapping[str, object]) -> Format:
    """The format of a string and of options beside it, which may not contradict it."""
    if not isinstance(text, str):
        raise TypeError(f"format must be a name or a Format, got {type(text).__name__}")
    name, said = strings.parse(text)
    name = ALIASES.get(name, name)
    if name not in _MAKERS:
        hint = _NO_FORMATS.get(name) or did_you_mean(name, [*_MAKERS, *ALIASES])
        raise ValueError(
            f"unknown format {clipped(text)}{hint}; known are {', '.join(_MAKERS)}, "
            f"with options as {strings.SHAPE}"
        )
    rule = said.pop("scale_rule", None)
    beside = {option: value for option, value in options.items() if value is not None}
    fmt = _new_format(name, {**options, **said, **beside})
    if rule and (fmt.scale is None or fmt.scale.rule != "e8m0"):
        raise ValueError(f"the rule ^{rule} is that of MX formats; leave it out for {name}")
    both = sorted(said.keys() & beside.keys())
    if both and _new_format(name, {**beside, **said}) != fmt:
        raise ValueError(
            f"format {clipped(text)} and {both[0]}={clipped(beside[both[0]])} contradict each "
            "other; pass one of them"
        )
    return fmt


def _name_of(member: Enum) -> str:
    """The name of a member of gguf.GGMLQuantizationType; gguf itself is not looked at."""
    name = member.name.lower()
    if type(member).__name__ != "GGMLQuantizationType":
        raise TypeError(
            f"format must be a name, a Format or a gguf.GGMLQuantizationType, got {clipped(member)}"
        )
    return _OF_GGML.get(name, name)


def _new_format(name: str, options: dict[str, object]) -> Format:
    if unknown := sorted(set(options) - set(_OPTIONS)):
        hint = did_you_mean(unknown[0], _OPTIONS)
        raise TypeError(
            f"unknown option {clipped(unknown)}{hint}; options are {', '.join(_OPTIONS)}"
        )
    unset = (type(None), bool, np.bool_)  # None, False and NumPy's False
    given = {k: v for k, v in options.items() if not isinstance(v, unset) or v}
    for option in ("levels", "packing"):
        if option in given and not _takes_levels(name):
            raise ValueError(f"{name} takes no {option}=; k2..k8 do")
    fmt = _MAKERS[name](name, **given)
    for option, change in CHANGES.items():
        if option in given:
            fmt = change(fmt, given[option])
    made = replace(fmt, options=_kept(fmt, given))
    with suppress(TypeError, ValueError):  # what JSON does not write has none
        object.__setattr__(made, "text", strings.describe(made.name, made.options))
    return made


def _takes_levels(name: str) -> bool:
    return name in {f"k{bits}" for bits in range(2, 9)}


def _kept(fmt: Format, given: dict[str, object]) -> dict[str, object]:
    """Options that are not the format's own, in their checked form: what a file header holds."""
    kept = dict(given)
    if "block_size" in kept and fmt.scale is not None:
        kept["block_size"] = fmt.scale.block
    if isinstance(fmt.codec, Codebook) and not isinstance(kept.get("levels", ""), str):
        kept["levels"] = fmt.codec.levels
    for flag in ("double_quant", *ARRANGED):
        if flag in kept:
            kept[flag] = True
    usual = _MAKERS[fmt.name](fmt.name)
    if kept.get("block_size") == f"{FLAT}{usual.block_size}":
        kept["block_size"] = FLAT
    defaults = {
        "block_size": usual.block_size,
        "levels": "lloyd",
        "packing": getattr(usual.packing, "order", None),
        "offset": usual.offset,
        "scale_dtype": usual.scale.dtype if usual.scale else None,
    }
    return {option: value for option, value in kept.items() if defaults.get(option) != value}
