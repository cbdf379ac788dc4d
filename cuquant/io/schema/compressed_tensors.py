"""compressed-tensors: what llm-compressor writes, and vLLM reads.

Each module has a format, by the group of the configuration that names it: see READERS. Integers
are stored with 2^(bits - 1) added. From 0.18.0 on codes of 3, 5, 6 and 7 bits lie densely in words;
before, a word held 32 // bits of them. Source: compressed-tensors 0.9 to 0.20, compressors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from cuquant.formats import Format, get_format
from cuquant.formats.names import FormatName
from cuquant.formats.packing import Packing
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.safetensors import TensorInfo
from cuquant.io.schema import fp8
from cuquant.io.schema.layer import (
    Extent,
    Layer,
    Parts,
    Unread,
    attempt,
    integer,
    model_dtype,
    refuse,
    scale_dtype,
    scales_of,
    stems,
)
from cuquant.io.schema.patterns import matches
from cuquant.io.schema.pieces import block_floats, extent_of, integers

KIND = "compressed-tensors"
CODES = ("weight_packed", "weight")
DENSE_FROM = (0, 18)  # version
Group = Mapping[str, Any]


def recognises(c: Checkpoint) -> bool:
    """By its configuration, or packed codes."""
    if c.method:
        return c.method == KIND
    return any(stem + "weight_scale" in c for stem in stems(c, "weight_packed"))


def layers(c: Checkpoint) -> Iterator[Layer | Unread]:
    """Modules that have scales, in the format of their group."""
    for stem in stems(c, "compressed"):
        if stem + "bitmask" in c:
            why = "weights with a bitmask (2 of 4) are not read yet"
            yield Unread(stem + "weight", refuse(stem + "weight", why))
    for stem in stems(c, "scale_packed"):
        why = "marlin-24 is in the order of a kernel; take the original"
        yield Unread(stem + "weight", refuse(stem + "weight", why))
    for stem in stems(c, "weight_scale"):
        codes = next((stem + end for end in CODES if stem + end in c), None)
        if codes is None:
            continue
        yield attempt(stem + "weight", _layer, c, stem, codes)


def _layer(c: Checkpoint, stem: str, codes: str) -> Layer:
    group = group_of(c, stem)
    kind = group.get("format") or c.quantization.get("format")
    if not isinstance(kind, str) or kind not in READERS:
        kind = _kind(c, stem, codes)
    weights = group.get("weights")
    return READERS[kind](c, stem, weights if isinstance(weights, dict) else {})


def group_of(c: Checkpoint, stem: str) -> Group:
    """The group that names a module: by a pattern or its name, else by its class."""
    groups = c.quantization.get("config_groups")
    values = groups.values() if isinstance(groups, dict) else ()
    found = [group for group in values if isinstance(group, dict)]
    module = stem.removesuffix(".")
    by_class: Group = {}
    for group in found:
        targets = group.get("targets")
        for target in targets if isinstance(targets, list) else []:
            if not isinstance(target, str):
                continue
            if target == module or (target.startswith("re:") and matches(target[3:], module)):
                return group
            if not by_class and not target.startswith("re:") and "." not in target:
                by_class = group
    return by_class


def _kind(c: Checkpoint, stem: str, codes: str) -> str:
    """The format of a module, by its tensors."""
    dtype, scale = c.info(codes).dtype, c.info(stem + "weight_scale").dtype
    if dtype == "I32":
        return "pack-quantized"
    if dtype == "I8":
        return "int-quantized"
    if dtype == "U8" and stem + "weight_global_scale" in c:
        return "nvfp4-pack-quantized"
    if dtype == "U8" and scale == "U8":
        return "mxfp4-pack-quantized"
    if dtype in fp8.FORMATS:
        return "mxfp8-quantized" if scale == "U8" else "float-quantized"
    raise refuse(codes, f"codes of {dtype} with scales of {scale} are unknown")


def _extent(shape: tuple[int, ...], scales: TensorInfo, weights: Group, name: str) -> Extent:
    said = weights.get("group_size"), weights.get("block_structure")
    return extent_of(shape, scales.shape, name, *said)


def _names(c: Checkpoint, stem: str, *ends: str) -> tuple[str, ...]:
    return tuple(stem + end for end in ends if stem + end in c)


def _packed(c: Checkpoint, stem: str, weights: Group) -> Layer:
    """Words of integers."""
    name, codes, scales = (
        stem + "weight",
        c.info(stem + "weight_packed"),
        c.info(stem + "weight_scale"),
    )
    if stem + "weight_g_idx" in c:
        raise refuse(name, "columns in the order of actorder are not read yet")
    bits = integer(weights, "num_bits", 2, 8)
    shape = _shape(c, stem, codes.shape, bits, name)
    words, depth = codes.shape[-1], shape[-1]
    if codes.dtype != "I32" or codes.shape[:-1] != shape[:-1]:
        raise refuse(name, f"codes {codes.dtype}{list(codes.shape)} are none of a weight {shape}")
    ways = _packings(c, bits, words, depth, name)
    zeros = stem + "weight_zero_point"
    has_zeros = zeros in c
    if has_zeros and len(c.info(zeros).shape) != 2:
        raise refuse(name, f"zero points {list(c.info(zeros).shape)} are none of a matrix")
    extent = _extent(shape, scales, weights, name)
    kept = scale_dtype(scales, "scales")
    if bits == 8 and not has_zeros:
        fmt = get_format("int8", block_size=extent, scale_dtype=kept)
    else:
        fmt = get_format(f"{'u' * has_zeros}int{bits}", block_size=extent, scale_dtype=kept)

    def parts() -> Parts:
        rows = c.read(codes.name).view(np.uint32).reshape(-1, words)
        used = 32 // bits * bits  # of a padded word
        padded = len(ways) > 1 and not np.any(rows >> np.uint32(used))
        stored = ways[-1] if padded else ways[0]
        found = {
            "packed": repacked(rows, stored, depth, fmt),
            "scale": scales_of(c.read(scales.name), kept),
        }
        if has_zeros:
            found["zero_point"] = _zeros(c.read(zeros), bits, stored, scales.shape)
        return found

    names = _names(c, stem, "weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
    return Layer(name, fmt, shape, model_dtype(c, scales), names, parts)


def _shape(
    c: Checkpoint, stem: str, codes: tuple[int, ...], bits: int, name: str
) -> tuple[int, ...]:
    if stem + "weight_shape" not in c:
        return (*codes[:-1], codes[-1] * 32 // bits)
    info = c.info(stem + "weight_shape")
    if info.dtype not in ("I64", "I32") or info.shape not in ((2,), (3,)):
        raise refuse(name, f"weight_shape is {info.dtype}{list(info.shape)}")
    shape = tuple(int(n) for n in c.read(info.name))
    if not all(0 < n < 2**40 for n in shape):
        raise refuse(name, f"weight_shape is {shape}")
    return shape


def _packings(c: Checkpoint, bits: int, words: int, depth: int, name: str) -> list[Packing]:
    """How codes may lie in words, by their number and the version; two ways where neither tells:
    the top bits of all words are empty in the second one."""
    ways = [Packing(bits, "dense"), Packing(bits, "word")]
    fitting = [way for way in ways if way.words(depth) == words]
    if not fitting:
        raise refuse(name, f"{words} words do not hold {depth} codes of {bits} bits")
    if len(fitting) == 1 or 32 % bits == 0:
        return fitting[:1]
    version = _version(c)
    return fitting if version is None else [ways[version < DENSE_FROM]]


def _version(c: Checkpoint) -> tuple[int, ...] | None:
    """Of the library that wrote a checkpoint."""
    said = c.quantization.get("version")
    numbers = said.split(".")[:2] if isinstance(said, str) else []
    return tuple(map(int, numbers)) if numbers and all(n.isdecimal() for n in numbers) else None


def repacked(rows: np.ndarray, stored: Packing, depth: int, fmt: Format) -> np.ndarray:
    """Codes of words [rows, words], as a format packs them."""
    wanted = fmt.row_packing
    if wanted == stored and depth % 32 == 0:
        return rows
    codes = stored.unpack(np.ascontiguousarray(rows), depth)
    return wanted.pack(codes, fmt.zero_code)


def _zeros(words: np.ndarray, bits: int, stored: Packing, shape: tuple[int, ...]) -> np.ndarray:
    """Zero points uint8 [N, G] of words [ceil(N bits / 32), G], which lie along N."""
    columns = np.ascontiguousarray(words.view(np.uint32).T)
    return stored.unpack(columns, shape[0]).T


def _integers(c: Checkpoint, stem: str, weights: Group) -> Layer:
    """One integer a byte."""
    name, codes, scales = stem + "weight", c.info(stem + "weight"), c.info(stem + "weight_scale")
    zeros = stem + "weight_zero_point"
    extent = _extent(codes.shape, scales, weights, name)
    dtype = model_dtype(c, scales)
    return integers(c, name, codes, scales, extent, dtype, zeros if zeros in c else None)


def _floats(c: Checkpoint, stem: str, weights: Group) -> Layer:
    return fp8.layer(
        c, c.info(stem + "weight"), c.info(stem + "weight_scale"), weights.get("block_structure")
    )


def _nvfp4(c: Checkpoint, stem: str, weights: Group) -> Layer:
    """Block scales that are divided by a global one."""
    codes, scales = c.info(stem + "weight_packed"), c.info(stem + "weight_scale")
    whole = (stem + "weight_global_scale", np.reciprocal)
    c.info(whole[0])
    notes = ("the global scale is 1 / weight_global_scale, rounded to float32",)
    name = stem + "weight"
    return block_floats(c, name, "nvfp4", codes, scales, model_dtype(c), whole, notes)


def _mx(kind: FormatName, end: str) -> Callable[[Checkpoint, str, Group], Layer]:
    def reader(c: Checkpoint, stem: str, weights: Group) -> Layer:
        codes, scales = c.info(stem + end), c.info(stem + "weight_scale")
        return block_floats(c, stem + "weight", kind, codes, scales, model_dtype(c))

    return reader


READERS: dict[str, Callable[[Checkpoint, str, Group], Layer]] = {
    "pack-quantized": _packed,
    "int-quantized": _integers,
    "float-quantized": _floats,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mx("mxfp4", "weight_packed"),
    "mxfp6-pack-quantized": _mx("mxfp6", "weight_packed"),
    "mxfp8-quantized": _mx("mxfp8", "weight"),
}
