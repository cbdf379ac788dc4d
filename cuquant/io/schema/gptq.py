"""GPTQ: AutoGPTQ's and GPTQModel's checkpoints.

qweight I32 [K bits / 32, N], codes densely along K; qzeros I32 [G, N bits / 32], densely along N;
scales [G, N]; g_idx I32 [K]. w = (code - zero) * scale, of group g_idx[k]. Format "gptq" stores
zeros less one ("v1"), "gptq_v2" as they are; where they are symmetric, the first row tells which
it is, because some files are labelled as the other. Source: GPTQModel 7.7, qlinear and convert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.errors import FormatError
from cuquant.formats import get_format
from cuquant.formats.packing import Packing
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.messages import quote
from cuquant.io.container.safetensors import TensorInfo
from cuquant.io.schema.columns import column_order, permuted_rows
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
from cuquant.io.schema.patterns import matches
from cuquant.io.schema.recipe import (
    Recipe,
    Source,
    Specs,
    Tensors,
    as_tag,
    common_zero,
    dense_words,
    fits_group,
    group_scales,
    group_size_of,
    group_zeros,
    integers_of,
    scale_tag,
    words_of,
)

KIND = "gptq"
BITS = (2, 3, 4, 8)  # that are written
PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}  # widths, the lowest bits first
PLANAR = "gptq_p"
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # one in each field of a word
LOST = (
    "AutoGPTQ has overwritten zero points behind one of 0, which the file does not hold any more; "
    "quantize it again with GPTQModel, or as gptq_v2"
)
CONFIGS = ("quantize_config.json", "quant_config.json")


def recognises(c: Checkpoint) -> bool:
    """By its configuration, or codes beside g_idx."""
    if c.method:
        return c.method == "gptq"
    return any(stem + "g_idx" in c for stem in stems(c, "qweight"))


def settings(c: Checkpoint) -> Mapping[str, Any]:
    """The quantization's configuration, wherever it lies."""
    return c.quantization or next(filter(None, map(c.json, CONFIGS)), {})


def layers(c: Checkpoint) -> Iterator[Found]:
    """Modules with qweight, qzeros and scales."""
    config = settings(c)
    for stem in stems(c, "qweight"):
        if stem + "qzeros" in c and stem + "scales" in c:
            yield attempt(stem + "weight", _layer, c, config, stem)


def _layer(c: Checkpoint, config: Mapping[str, Any], stem: str) -> Layer:
    name = stem + "weight"
    own = {**config, **_override(config, stem)}
    codes, zeros, scales = (c.info(stem + end) for end in ("qweight", "qzeros", "scales"))
    if (codes.dtype, zeros.dtype) != ("I32", "I32") or not (
        len(codes.shape) == len(zeros.shape) == len(scales.shape) == 2
    ):
        raise refuse(name, f"codes {codes.dtype}{list(codes.shape)} are none of GPTQ's")
    groups, columns = scales.shape
    bits = _bits(own, zeros.shape[1], columns, name)
    if not groups or not columns or codes.shape[1] != columns or codes.shape[0] * 32 % bits:
        raise refuse(name, f"codes {list(codes.shape)} do not fit scales {list(scales.shape)}")
    depth = codes.shape[0] * 32 // bits
    size = _group_size(own, depth, groups, name)
    order = _order(c, own, stem, depth, size, groups)
    planar = bits in PLANES and (bits not in BITS or _label(own) == PLANAR)
    first, notes = (False, ()) if planar else _version(c, own, zeros, bits, columns)
    packing = Packing(bits, "low" if bits in (4, 8) else "dense")
    kept = scale_dtype(scales, "scales")
    fmt = get_format(
        f"uint{bits}",
        block_size=size if groups > 1 else "row",
        scale_dtype=kept,
        permuted=order is not None,
    )

    def parts() -> Parts:
        of_zeros = c.read(zeros.name).view(np.uint32)
        if first and not _is_gptqmodels(own) and _are_lost(of_zeros, bits):
            raise refuse(name, LOST)
        words = c.transposed(codes.name).view(np.uint32)
        if planar:
            planes, wanted = Planes(bits), np.arange(depth) if order is None else order
            given = words, planes, depth, fmt.row_packing, wanted, fmt.zero_code
            found = {"packed": permuted_rows(*given), "scale": c.read(scales.name).T}
            found["zero_point"] = planes.unpack(of_zeros, columns).T
            return found if order is None else {**found, "permutation": order}
        stored = unpacked_zeros(of_zeros, bits, columns, first)
        packed = words if packing.dtype == np.uint32 else words.view(np.uint8)
        found = {"scale": c.read(scales.name).T, "zero_point": stored.T}
        if order is None:
            return {"packed": packed, **found}
        packed = permuted_rows(packed, packing, depth, fmt.row_packing, order, fmt.zero_code)
        return {"packed": packed, "permutation": order, **found}

    tensors = [codes.name, zeros.name, scales.name]
    if stem + "g_idx" in c:
        tensors.append(stem + "g_idx")
    return Layer(name, fmt, (columns, depth), model_dtype(c, scales), tuple(tensors), parts, notes)


@dataclass(frozen=True)
class Planes:
    """Codes of `bits` in planes: of each 32 the words of the lowest bits, then those of the next.

    >>> Planes(5).unpack(np.array([[0x21, 0, 0, 0, 1]], np.uint32), 4).tolist()
    [[17, 2, 0, 0]]
    """

    bits: int

    def unpack(self, words: np.ndarray, count: int) -> np.ndarray:
        """uint8 codes [rows, count] of words [rows, words]."""
        units = words.reshape(-1, self.bits)
        codes = np.zeros((len(units), 32), np.uint8)
        start = 0
        for width in PLANES[self.bits]:  # whose 32 codes are as many words
            plane = np.ascontiguousarray(units[:, start : start + width])
            codes |= Packing(width, "dense").unpack(plane, 32) << np.uint8(start)
            start += width
        return codes.reshape(len(words), -1)[:, :count]


def _is_gptqmodels(config: Mapping[str, Any]) -> bool:
    """Whether GPTQModel wrote a checkpoint, which borrows from whole words."""
    meta = config.get("meta")
    return isinstance(meta, dict) and "gptqmodel" in str(meta.get("quantizer", "")).lower()


def _are_lost(words: np.ndarray, bits: int) -> bool:
    """Whether two fields or more at the top of a word of zero points are all ones.

    AutoGPTQ stores a zero point of 0 as -1 of 32 bits, over all fields behind it in its word.
    """
    return bool((~words >> np.uint32(32 - 2 * bits) == 0).any())


def unpacked_zeros(words: np.ndarray, bits: int, columns: int, first: bool) -> np.ndarray:
    """Zero points uint8 [G, N] of words [G, N bits / 32]; `first`: of the first version.

    Its writers subtract one from each field of a whole word, so that a zero point of 0 borrows
    from its neighbour: one is added to whole words as well, with carry.
    """
    if first and bits in ONES:
        words = words + np.uint32(ONES[bits])
    codes = Packing(bits, "dense").unpack(np.ascontiguousarray(words), columns)
    if first and bits not in ONES:
        codes = codes + 1 & (1 << bits) - 1
    return codes.astype(np.uint8)


def _bits(config: Mapping[str, Any], words: int, columns: int, name: str) -> int:
    """Of a code: as configured, and as the zero points' words have it."""
    fitting = [bits for bits in sorted({*BITS, *PLANES}) if words * 32 == columns * bits]
    said = config.get("bits")
    if type(said) is int and said in fitting:
        return said
    if said is None and len(fitting) == 1:
        return fitting[0]
    raise refuse(name, f"{quote(said)} bits, in {words} words for {columns} zero points")


def _group_size(config: Mapping[str, Any], depth: int, groups: int, name: str) -> int:
    if groups == 1:
        return depth
    size = integer(config, "group_size", 8, 1 << 30) if "group_size" in config else depth // groups
    if not size or -(-depth // size) != groups:
        raise refuse(name, f"{groups} groups of {size} columns do not make {depth} columns")
    return size


def _order(
    c: Checkpoint, config: Mapping[str, Any], stem: str, depth: int, size: int, groups: int
) -> np.ndarray | None:
    """Columns sorted by group, where desc_act has them in another order; else None."""
    if stem + "g_idx" in c:
        return column_order(c.read(stem + "g_idx"), depth, size, groups, stem + "weight")
    if config.get("desc_act") is True and groups > 1:
        raise refuse(
            stem + "weight", "desc_act is true and its g_idx is missing: groups are not known"
        )
    return None


def _label(config: Mapping[str, Any]) -> str:
    """What the configuration calls the format: "gptq", "gptq_v2" or "gptq_p"."""
    said = config.get("checkpoint_format", config.get("format", "gptq"))
    if said not in ("gptq", "gptq_v2", PLANAR):
        raise FormatError(f"GPTQ's checkpoint format {quote(said)} is unknown")
    return said


def _version(
    c: Checkpoint, config: Mapping[str, Any], zeros: TensorInfo, bits: int, columns: int
) -> tuple[bool, tuple[str, ...]]:
    """Whether zero points are stored less one, and what is to be said of it.

    Where they are symmetric, all are 2^(bits - 1): their first row tells more than the label.
    """
    said = _label(config) == "gptq"
    if config.get("sym") is not True or not zeros.shape[0]:
        return said, ()
    words = c.read_rows(zeros.name, 0, 1).view(np.uint32)
    row = unpacked_zeros(words, bits, columns, first=False)
    middle = 1 << (bits - 1)
    found = bool((row == middle - 1).all())
    if found == said or not (found or (row == middle).all()):
        return said, ()
    names = ("gptq", "gptq_v2") if found else ("gptq_v2", "gptq")
    note = f"zero points are {names[0]}'s, and the configuration says {names[1]}: read as they lie"
    return found, (note,)


def _override(config: Mapping[str, Any], stem: str) -> Mapping[str, Any]:
    """What `dynamic` says of a module: the first pattern that fits its name's beginning."""
    dynamic = config.get("dynamic")
    if not isinstance(dynamic, dict):
        return {}
    for pattern, found in dynamic.items():
        text = pattern.removeprefix("+:")
        if text.startswith("-:") or not isinstance(found, dict):
            continue
        if matches(text, stem.removesuffix(".")):
            return found
    return {}


# ---- writing ------------------------------------------------------------------------------------

NEAREST = {2: "int2", 3: "int3", 4: "int4", 8: "int8:128+float16"}
ODD = ("permuted",)


def recipe(source: Source) -> Recipe:
    """Integers of 2, 3, 4 or 8 bits with scales of float16, as "gptq_v2".

    Codes of permuted columns go back to their place, and g_idx says which group they are of.
    """
    columns, depth = source.matrix("GPTQ")
    found = integers_of(source.format, source.shape)
    if found is None or found.bits not in BITS:
        raise ValueError("GPTQ holds integers of 2, 3, 4 or 8 bits with a scale for each group")
    bits, group, _ = found
    if depth * bits % 32 or columns * bits % 32:
        raise ValueError(
            f"GPTQ packs {bits} bits in whole words of 32, which {source.shape} is not"
        )
    if group % 8 and group < depth:
        raise ValueError(f"groups of {group} columns are no multiple of 8")
    stem, groups, kept = source.stem, -(-depth // group), scale_tag(source, ("F16",))
    packing = Packing(bits, "dense")
    zero = common_zero(source, found)

    def encode(q: QuantArray) -> Tensors:
        words = dense_words(q, q.format.zero_code)
        zeros = np.ascontiguousarray(group_zeros(q, group).T)
        return {
            stem + "qweight": np.ascontiguousarray(words.T),
            stem + "qzeros": words_of(packing.pack(zeros, 0)),
            stem + "scales": as_tag(group_scales(q, group).T, kept),
            stem + "g_idx": _groups_of(q, group),
        }

    specs: Specs = {
        stem + "qweight": ("I32", (depth * bits // 32, columns)),
        stem + "qzeros": ("I32", (groups, columns * bits // 32)),
        stem + "scales": (kept, (groups, columns)),
        stem + "g_idx": ("I32", (depth,)),
    }
    said = {
        "bits": bits,
        "group_size": group,
        "groups": groups,
        "sym": zero == 1 << (bits - 1),
        "desc_act": source.format.permuted,
    }
    axes = {stem + "qweight": 1, stem + "qzeros": 1, stem + "scales": 1}
    return Recipe(specs, encode, f"{bits} bits, groups of {group}", said, source.module, axes)


def _groups_of(q: QuantArray, group: int) -> np.ndarray:
    """int32 [K]: the group of each column."""
    groups = (np.arange(q.shape[-1]) // group).astype(np.int32)
    if not q.format.permuted:
        return groups
    g_idx = np.empty_like(groups)
    g_idx[q.arrays()["permutation"]] = groups
    return g_idx


def configuration(recipes: Sequence[Recipe], plain: Sequence[str]) -> dict[str, Any]:
    """The commonest setting is the checkpoint's; `dynamic` has those of other modules."""
    if not recipes:
        return {}
    usual = group_size_of(recipes)
    settings = [
        (made.said["bits"], usual if fits_group(made, usual) else made.said["group_size"])
        for made in recipes
    ]
    bits, group_size = max(dict.fromkeys(settings), key=settings.count)
    dynamic: dict[str, Any] = {f"-:{re.escape(name)}$": {} for name in plain}
    for made, own in zip(recipes, settings, strict=True):
        if own != (bits, group_size):
            pattern = f"+:{re.escape(made.module)}$"
            dynamic[pattern] = {"bits": own[0], "group_size": own[1]}
    return {
        "quantization_config": {
            "quant_method": KIND,
            "bits": bits,
            "group_size": group_size,
            "sym": all(made.said["sym"] for made in recipes),
            "desc_act": any(made.said["desc_act"] for made in recipes),
            "checkpoint_format": "gptq_v2",
            "lm_head": any(made.module == "lm_head" for made in recipes),
            "dynamic": dynamic,
        }
    }
