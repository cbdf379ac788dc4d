"""MLX: mlx-lm's checkpoints.

weight U32 [N, K bits / 32], codes densely; scales [N, K / g]; affine ones have biases too, and are
code * scale + bias. Modes
"mxfp4" and "mxfp8" have scales U8 (exponents) of 32, "nvfp4" U8 (e4m3) of 16. The configuration
has "quantization": group_size, bits, mode, and entries of single modules. Source: mlx 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.errors import FormatError
from cuquant.formats import get_format
from cuquant.formats.codecs import Uniform
from cuquant.formats.names import FormatName
from cuquant.formats.packing import Packing
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.messages import quote
from cuquant.io.schema.layer import (
    Found,
    Layer,
    Parts,
    attempt,
    integer,
    model_dtype,
    refuse,
    scale_dtype,
    stems,
)
from cuquant.io.schema.pieces import ONE_BIT, block_floats, packed_by_rows
from cuquant.io.schema.recipe import (
    FLOATS,
    Recipe,
    Source,
    Specs,
    Tensors,
    as_tag,
    dense_words,
    finer,
    group_minimums,
    group_scales,
    group_zeros,
    integers_of,
    of_all_rows,
    scale_tag,
)

KIND = "mlx"
MODES: dict[str, tuple[FormatName, int, int]] = {
    "mxfp4": ("mxfp4", 4, 32),
    "mxfp8": ("mxfp8", 8, 32),
    "nvfp4": ("nvfp4", 4, 16),
}
LARGEST = 2688.0  # what nvfp4's global_scale, a largest number, is divided by: 6 x 448


def recognises(c: Checkpoint) -> bool:
    """By words beside scales."""
    if c.method:
        return False
    return any(True for _ in _modules(c))


def _modules(c: Checkpoint) -> Iterator[str]:
    for stem in stems(c, "scales"):
        if stem + "weight" in c and c.info(stem + "weight").dtype == "U32":
            yield stem


def layers(c: Checkpoint) -> Iterator[Found]:
    """Modules whose weight is of words."""
    for stem in _modules(c):
        yield attempt(stem + "weight", _layer, c, stem)


def _layer(c: Checkpoint, stem: str) -> Layer:
    own = _own(c.quantization, stem.removesuffix("."))
    mode = own.get("mode") or _mode(c, stem)
    if mode == "affine":
        return _affine(c, stem, own if "group_size" in own else {**own, **_groups(c, stem)})
    if not isinstance(mode, str) or mode not in MODES:
        raise refuse(stem + "weight", f"MLX's mode {quote(mode)} is unknown")
    return _floats(c, stem, *MODES[mode])


def _mode(c: Checkpoint, stem: str) -> str:
    """Of a module whose configuration does not tell: scales without biases are of floats, and words
    of the columns that share one tell which."""
    scales, words = c.info(stem + "scales"), c.info(stem + "weight").shape
    if stem + "biases" in c or scales.dtype != "U8" or not (words and scales.shape):
        return "affine"
    fitting = [
        mode
        for mode, (_, bits, block) in MODES.items()
        if words[-1] * 32 == scales.shape[-1] * bits * block
    ]
    return fitting[0] if fitting else "affine"


def _groups(c: Checkpoint, stem: str) -> Mapping[str, int]:
    """Bits and group_size of affine codes that no configuration tells: words and scales tell their
    product, which one pair of MLX's may have."""
    words, scales = c.info(stem + "weight").shape, c.info(stem + "scales").shape
    fitting = [
        {"bits": bits, "group_size": size}
        for bits in (1, *AFFINE)
        for size in GROUPS
        if words and scales and words[-1] * 32 == scales[-1] * bits * size
    ]
    if len(fitting) != 1:
        raise FormatError(  # without the name: one line tells it of all modules
            "what MLX's codes mean stands in config.json, under 'quantization', and there is none; "
            "copy it from the original folder"
        )
    return fitting[0]


def _own(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    found = config.get(module)
    return {**config, **found} if isinstance(found, dict) else config


def _affine(c: Checkpoint, stem: str, own: Mapping[str, Any]) -> Layer:
    """code * scale + bias, both of a group's; scales may be negative."""
    codes, scales, biases = (c.info(stem + end) for end in ("weight", "scales", "biases"))
    name, size = codes.name, integer(own, "group_size", 8, 1 << 20)
    width, depth = codes.shape[-1], scales.shape[-1] * size if scales.shape else 0
    bits = width * 32 // max(depth, 1)
    if depth * bits != width * 32 or scales.shape[:-1] != codes.shape[:-1]:
        raise refuse(name, f"scales {list(scales.shape)} do not fit codes {list(codes.shape)}")
    if bits not in (1, *AFFINE) or own.get("bits") != bits:
        said = quote(own.get("bits"))
        raise refuse(name, f"codes of {bits} bits in groups of {size} are not read; bits is {said}")
    if (biases.shape, biases.dtype) != (scales.shape, scales.dtype):
        raise refuse(name, f"biases {biases.dtype}{list(biases.shape)} are not those of scales")
    kept = scale_dtype(scales, "scales")
    fmt = get_format(f"uint{max(bits, 2)}", block_size=size, offset="min", scale_dtype=kept)

    def parts() -> Parts:
        words = c.read(name)
        if bits == 1:
            flat, bit = words.reshape(-1, width), Packing(1, "dense")

            def unpacked(start: int, stop: int) -> np.ndarray:
                return bit.unpack(flat[start:stop], depth)

            words = packed_by_rows(fmt, len(flat), depth, unpacked)
        return {
            "packed": words.view(fmt.row_packing.dtype),
            "scale": c.read(scales.name),
            "minimum": c.read(biases.name),
        }

    names, notes = (name, scales.name, biases.name), (ONE_BIT,) if bits == 1 else ()
    shape = (*codes.shape[:-1], depth)
    return Layer(name, fmt, shape, model_dtype(c, scales), names, parts, notes)


def _floats(c: Checkpoint, stem: str, name: FormatName, bits: int, block: int) -> Layer:
    codes, scales = c.info(stem + "weight"), c.info(stem + "scales")
    shape = (*codes.shape[:-1], codes.shape[-1] * 32 // bits)
    if scales.shape != (*shape[:-1], -(-shape[-1] // block)) or scales.dtype != "U8":
        raise refuse(codes.name, f"scales {scales.dtype}{list(scales.shape)} do not fit {shape}")
    whole = (stem + "global_scale", lambda largest: largest / LARGEST)
    given = whole if whole[0] in c and name == "nvfp4" else None
    return block_floats(c, codes.name, name, codes, scales, model_dtype(c), given)


# ---- writing ------------------------------------------------------------------------------------

NEAREST = {**{bits: f"int{bits}:64" for bits in (2, 3, 4, 5, 6)}, 8: "int8:64+float16"}
FORMATS = {name: (mode, bits, block) for mode, (name, bits, block) in MODES.items()}
AFFINE = (2, 3, 4, 5, 6, 8)  # bits
GROUPS = (128, 64, 32)


def recipe(source: Source) -> Recipe:
    """Integers with zero points or minimums, mxfp4, mxfp8, and nvfp4 whose global scale is 1."""
    fmt, (*rows, depth) = source.format, source.shape
    if fmt.name not in FORMATS or fmt.options:
        return _affine_recipe(source)
    mode, bits, block = FORMATS[fmt.name]
    if depth % block or depth * bits % 32:
        raise ValueError(f"MLX has whole groups of {fmt}, not rows of {depth}")
    if fmt.rule.nested and float(source.read().components["global_scale"]) != 1:
        raise ValueError("MLX's nvfp4 has no global scale, and that of the array is not 1")
    stem = source.stem

    def encode(q: QuantArray) -> Tensors:
        return {
            source.name: np.ascontiguousarray(q.packed).view(np.uint32),
            stem + "scales": q.arrays()["scale"],
        }

    specs: Specs = {
        source.name: ("U32", (*rows, depth * bits // 32)),
        stem + "scales": ("U8", (*rows, depth // block)),
    }
    said = {"group_size": block, "bits": bits, "mode": mode}
    return Recipe(specs, encode, mode, said, source.module)


def _affine_recipe(source: Source) -> Recipe:
    """Codes whose numbers are code * scale + bias: -zero * scale, or the minimum.

    MLX rounds to the dtype of scales and biases. Those of `+min` formats, which are MLX's own, keep
    it; others become float32, in which products of a code and a scale of 16 bits are exact.
    """
    if len(source.shape) == 3:
        return of_all_rows(source, _affine_recipe)
    fmt, (rows, depth) = source.format, source.matrix("MLX")
    found = integers_of(fmt, source.shape)
    has_minimum = fmt.offset == "min" and isinstance(fmt.codec, Uniform)
    is_square = isinstance(fmt.rule.block, tuple) or fmt.rule.dtype not in FLOATS
    if found is None and (is_square or not has_minimum):
        raise ValueError(f"MLX holds integers of groups, {', '.join(FORMATS)}")
    own = found.group if found else min(fmt.rule.tile(1, depth)[1], max(depth, 1))
    size = next((g for g in GROUPS if depth % g == 0 and finer(own, depth, g)), 0)
    if not size or fmt.bits not in AFFINE or depth * fmt.bits % 32:
        raise ValueError(f"MLX has groups of {GROUPS} and {AFFINE} bits, not {fmt} of {depth}")
    if found:
        scale_tag(source, ("F16", "BF16"))  # or ValueError: then biases are rounded
        _refuse_infinite(source)
    stem, groups, times = source.stem, depth // size, -(-own // size)
    kept = FLOATS[fmt.rule.dtype] if has_minimum and not fmt.is_blocks else "F32"

    def encode(q: QuantArray) -> Tensors:
        scales = group_scales(q, own)
        if found:
            bias = -group_zeros(q, own).astype(np.float32) * scales.astype(np.float32)
        else:
            bias = group_minimums(q, own)
        spread = [np.repeat(part, times, axis=1)[:, :groups] for part in (scales, bias)]
        return {
            source.name: dense_words(q, fmt.zero_code).view(np.uint32),
            stem + "scales": as_tag(spread[0], kept),
            stem + "biases": as_tag(spread[1], kept),
        }

    specs: Specs = {
        source.name: ("U32", (rows, depth * fmt.bits // 32)),
        stem + "scales": (kept, (rows, groups)),
        stem + "biases": (kept, (rows, groups)),
    }
    said = {"group_size": size, "bits": fmt.bits, "mode": "affine"}
    axes = dict.fromkeys(specs, 0)
    return Recipe(specs, encode, f"affine, groups of {size}", said, source.module, axes)


def _refuse_infinite(source: Source) -> None:
    """ValueError where products of codes and scales may be infinite: then sums are NaN."""
    fmt = source.format
    if fmt.rule.dtype == "float16" or fmt.is_blocks:
        most = np.finfo(np.float16).max  # of which no product overflows
    else:
        most = float(np.finfo(np.float32).max) / (1 << fmt.bits)
    scales = np.abs(np.asarray(source.read().scale, np.float32))
    if not (scales <= most).all():
        raise ValueError("a scale is so large that a bias of MLX's, a zero times it, is infinite")


def configuration(recipes: Sequence[Recipe], plain: Sequence[str]) -> dict[str, Any]:
    """The commonest mode is the checkpoint's; modules of another have entries of their own."""
    if not recipes:
        return {}
    settings = [dict(made.said) for made in recipes]
    usual = max(settings, key=settings.count)
    others = {made.module: own for made, own in zip(recipes, settings, strict=True) if own != usual}
    if taken := sorted(usual.keys() & others.keys()):
        raise ValueError(
            f"a module is called {quote(taken[0])}, as MLX's setting of all modules is, and has "
            "other settings than most"
        )
    said = {**usual, **others}
    return {"quantization": said, "quantization_config": said}
