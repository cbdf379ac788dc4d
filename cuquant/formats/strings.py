"""A format in one string, `NAME[:BLOCK][+OPTION...][^RULE]`, and back.

`nf4:32+dq`, `uint4:64+min`, `fp8_e4m3:128x128+e8m0`, `k3:32+normal+word`, `mxfp8^floor`.
"""

import json
import re
from collections.abc import Mapping

from cuquant.errors import clipped, did_you_mean, shortened

CUSTOM = "custom"  # what an array of levels prints as, which no string can hold

# What a word behind "+" says: an option of `get_format` and its value.
WORDS: dict[str, tuple[str, object]] = {
    "dq": ("double_quant", True),
    "double_quant": ("double_quant", True),
    **{name: ("levels", name) for name in ("lloyd", "normal", "linear")},
    **{name: ("packing", name) for name in ("dense", "word", "planes")},
    "permuted": ("permuted", True),
    "absmax": ("absmax", True),
    "divisor": ("divisor", True),
    "per_matrix": ("per_matrix", True),
    "min": ("offset", "min"),
    **{name: ("scale_dtype", name) for name in ("float32", "float16", "bfloat16", "e8m0")},
}
OPTIONS = (  # in the order they are written
    "double_quant",
    "levels",
    "packing",
    "offset",
    "scale_dtype",
    "permuted",
    "absmax",
    "divisor",
    "per_matrix",
)
RULES = ("floor", "ceil", "even", "4over6", "mse")
SHAPE = "NAME[:BLOCK][+OPTION...], such as nf4:32+dq or fp8_e4m3:128x128"

_TRANSFORM = re.compile(r"hadamard\d*")
_FLAT = re.compile(r"flat(\d{1,10})?")
_BLOCK = re.compile(r"(\d{1,10})(?:x(\d{1,10}))?")


def parse(text: str) -> tuple[str, dict[str, object]]:
    """The name in a format's string, in lower case, and the options of `get_format` behind it.

    >>> parse("nf4:32+dq")
    ('nf4', {'block_size': 32, 'double_quant': True})

    Raises
    ------
    ValueError
        For what is not written so, an unknown word, two values of one option, or what this
        version does not have.
    """
    said = text.lower()
    head, caret, rule = said.partition("^")
    first, *words = head.split("+")
    name, colon, block = first.partition(":")
    options: dict[str, object] = {}
    if colon:
        options["block_size"] = _block(block, text)
    for word in words:
        option, value = _option(word, text)
        if option in options:
            raise ValueError(f"format {clipped(text)} says {option} twice; say it once")
        options[option] = value
    if caret:
        options["scale_rule"] = _rule(rule, text)
    return name, options


def write(name: str, options: Mapping[str, object]) -> str:
    """The string of a format: `parse` gives name and options back, but for an array of levels.

    >>> write("k3", {"block_size": (128, 8), "levels": (-1.0, 1.0)})
    'k3:128x8+custom'
    """
    text = name
    block = options.get("block_size")
    if block is not None:
        text += ":" + ("x".join(map(str, block)) if isinstance(block, tuple) else str(block))
    for option in OPTIONS:
        value = options.get(option)
        if value is not None:
            text += "+" + _word(option, value)
    return text


def describe(name: str, options: Mapping[str, object]) -> str:
    """The same with arrays of levels: JSON where there are options.

    >>> describe("int4", {"block_size": 64})
    '{"name": "int4", "options": {"block_size": 64}}'

    Raises
    ------
    TypeError, ValueError
        For what JSON does not write.
    """
    if not options:
        return name
    return json.dumps({"name": name, "options": dict(options)}, allow_nan=False)


def _word(option: str, value: object) -> str:
    if value is True:
        return "dq" if option == "double_quant" else option
    return value if isinstance(value, str) else CUSTOM


def _block(said: str, text: str) -> object:
    if _FLAT.fullmatch(said):
        return said
    found = _BLOCK.fullmatch(said)
    if found:
        rows, columns = found.groups()
        return int(rows) if columns is None else (int(rows), int(columns))
    if said not in ("row", "tensor"):
        raise ValueError(
            f"format {clipped(text)} has the block {clipped(said)} behind ':'; pass a size, row, "
            "tensor, flat or ROWSxCOLUMNS, as in nf4:32, int8:tensor or fp8_e4m3:128x128"
        )
    return said


def _option(word: str, text: str) -> tuple[str, object]:
    if _TRANSFORM.fullmatch(word):
        raise _not_yet(f"a transform (+{shortened(word, 60)})")
    if word == CUSTOM:
        raise ValueError(
            f"{clipped(text)}: custom stands for levels of one's own, which no string holds; "
            "pass the Format, or levels= and the string without it"
        )
    if word not in WORDS:
        if _BLOCK.fullmatch(word) or _FLAT.fullmatch(word) or word in ("row", "tensor"):
            hint = f"; a block stands behind ':', as in {text.partition('+')[0]}:{word}"
            hint = hint if len(hint) < 100 else ""
        else:
            hint = did_you_mean(word, WORDS)
        raise ValueError(
            f"format {clipped(text)} has the unknown option {clipped(word)}{hint}; "
            f"known are {', '.join(WORDS)}"
        )
    return WORDS[word]


def _rule(rule: str, text: str) -> str:
    if rule not in RULES:
        raise ValueError(
            f"format {clipped(text)} has the unknown rule {clipped(rule)} behind '^'"
            f"{did_you_mean(rule, RULES)}; known are {', '.join(RULES)}"
        )
    if rule != "floor":
        raise _not_yet(f"the scale rule {rule} (^{rule})")
    return rule


def _not_yet(what: str) -> ValueError:
    return ValueError(f"{what} is not available yet in this version of cuquant; leave it out")
