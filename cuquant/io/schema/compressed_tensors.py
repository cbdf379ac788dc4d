"""compressed-tensors: what llm-compressor writes, and vLLM reads.

Each module has a format, by the group of the configuration that names it: see READERS. Integers
are stored with 2^(bits - 1) added. From 0.18.0 on codes of 3, 5, 6 and 7 bits lie densely in words;
before, a word held 32 // bits of them. Source: compressed-tensors 0.9 to 0.20, compressors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.formats import Format, get_format
from cuquant.formats.names import FormatName
from cuquant.formats.packing import Packing
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.safetensors import TensorInfo
from cuquant.io.schema import fp8, sparse
from cuquant.io.schema.columns import column_order, permuted_rows
from cuquant.io.schema.layer import (
    Extent,
    Found,
    Layer,
    Parts,
    Unread,
    attempt,
    integer,
    model_dtype,
    refuse,
    scale_dtype,
    stems,
)
from cuquant.io.schema.patterns import matches
from cuquant.io.schema.pieces import block_floats, extent_of, integers
from cuquant.io.schema.recipe import (
    CHUNK,
    Integers,
    Recipe,
    Source,
    Specs,
    Tensors,
    as_tag,
    common_zero,
    dense_words,
    group_zeros,
    integers_of,
    of_all_rows,
    scale_tag,
    words_of,
)

KIND = "compressed-tensors"
CODES = ("weight_packed", "weight")
ODD = ("divisor", "per_matrix")
DENSE_FROM = (0, 18)  # version
Group = Mapping[str, Any]


def recognises(c: Checkpoint) -> bool:
    """By its configuration, or packed codes."""
    if c.method:
        return c.method == KIND
    if any(stem + "weight_scale" in c for stem in stems(c, "weight_packed")):
        return True
    return any(stem + "bitmask" in c for stem in stems(c, "compressed"))


def layers(c: Checkpoint) -> Iterator[Found]:
    """Modules that have scales, in the format of their group, and those of which half is zero."""
    for stem in stems(c, "compressed"):
        if stem + "bitmask" in c:
            yield attempt(stem + "weight", sparse.layer, c, stem, _weights(group_of(c, stem)))
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
    return READERS[kind](c, stem, _weights(group))


def _weights(group: Group) -> Group:
    """What a group says of weights."""
    found = group.get("weights")
    return found if isinstance(found, dict) else {}


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
    order = _order(c, stem, depth, extent, name)
    fmt = get_format(
        f"{'u' * has_zeros}int{bits}",
        block_size=extent,
        scale_dtype=kept,
        permuted=order is not None,
    )

    def parts() -> Parts:
        rows = c.read(codes.name).view(np.uint32).reshape(-1, words)
        used = 32 // bits * bits  # of a padded word
        padded = len(ways) > 1 and not np.any(rows >> np.uint32(used))
        stored = ways[-1] if padded else ways[0]
        found = {"scale": c.read(scales.name)}
        if order is None:
            found["packed"] = repacked(rows, stored, depth, fmt)
        else:
            own = fmt.row_packing, order, fmt.zero_code
            found |= {"packed": permuted_rows(rows, stored, depth, *own), "permutation": order}
        if has_zeros:
            found["zero_point"] = _zeros(c.read(zeros), bits, stored, scales.shape)
        return found

    ends = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    names = _names(c, stem, *ends)
    return Layer(name, fmt, shape, model_dtype(c, scales), names, parts)


def _order(c: Checkpoint, stem: str, depth: int, extent: Extent, name: str) -> np.ndarray | None:
    """Columns sorted by group, where actorder has them in another order; else None.

    A group of -1 says that they are in order.
    """
    if stem + "weight_g_idx" not in c:
        return None
    g_idx = c.read(stem + "weight_g_idx")
    if g_idx.size and (g_idx == -1).all():
        return None
    size = extent if isinstance(extent, int) else depth
    return column_order(g_idx, depth, size, -(-depth // size), name)


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
    if depth % 32 == 0 and wanted == stored:
        return rows
    if depth % 32 == 0 and (stored.order, wanted.order, wanted.signed) == ("dense", "low", False):
        return rows.view(np.uint8)  # whole bytes of codes, the lowest first
    made = np.empty((len(rows), wanted.words(depth)), wanted.dtype)
    step = max(CHUNK // max(depth, 1), 1)
    for start in range(0, len(rows), step):
        codes = stored.unpack(np.ascontiguousarray(rows[start : start + step]), depth)
        made[start : start + step] = wanted.pack(codes, fmt.zero_code)
    return made


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
    codes, scales = c.info(stem + "weight"), c.info(stem + "weight_scale")
    return fp8.layer(c, codes, scales, weights.get("block_structure"), weights.get("group_size"))


def _nvfp4(c: Checkpoint, stem: str, weights: Group) -> Layer:
    """Block scales that are divided by a global one; of experts each may have its own."""
    codes, scales = c.info(stem + "weight_packed"), c.info(stem + "weight_scale")
    whole = (stem + "weight_global_scale", np.positive)
    name = stem + "weight"
    return block_floats(c, name, "nvfp4", codes, scales, model_dtype(c), whole, divisor=True)


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


# ---- writing ------------------------------------------------------------------------------------

NEAREST = {
    **{bits: f"int{bits}" for bits in range(2, 8)},
    8: "int8:128+float16",
}
WRITTEN = "0.19.0"  # the version whose words are written
FLOATS = {  # of which codes and exponents lie as ours: format, tensor of the codes, weights
    "mxfp4": ("mxfp4-pack-quantized", "weight_packed", "U8", {"num_bits": 4, "group_size": 32}),
    "mxfp6": ("mxfp6-pack-quantized", "weight_packed", "U8", {"num_bits": 6, "group_size": 32}),
    "mxfp8": ("mxfp8-quantized", "weight", "F8_E4M3", {"num_bits": 8, "group_size": 32}),
    "nvfp4": ("nvfp4-pack-quantized", "weight_packed", "U8", {"num_bits": 4, "group_size": 16}),
}


def recipe(source: Source) -> Recipe:
    """Integers of 2 to 8 bits, fp8_e4m3, MX formats and nvfp4; of matrices, or of experts."""
    name = source.format.name
    if len(source.shape) in (2, 3) and name in FLOATS and not source.format.usual.options:
        return _block_recipe(source)
    if len(source.shape) == 3:
        return _experts_recipe(source)
    source.matrix("compressed-tensors")
    if name == fp8.FORMATS["F8_E4M3"]:
        return _float_recipe(source)
    found = integers_of(source.format, source.shape)
    if found is None or found.bits < 2:
        raise ValueError(
            f"compressed-tensors holds integers, fp8_e4m3, {', '.join(FLOATS)}, with their scales"
        )
    return _integer_recipe(source, found)


def _experts_recipe(source: Source) -> Recipe:
    """[E, N, K], of which `weight_shape` has three numbers."""
    made = of_all_rows(source, recipe)
    shape, zeros = source.stem + "weight_shape", source.stem + "weight_zero_point"
    if zeros in made.specs:
        raise ValueError("compressed-tensors has no zero points of experts")
    if shape not in made.specs:
        return made

    given = {shape: np.array(source.shape, np.int64)}
    return replace(made, specs={**made.specs, shape: ("I64", (3,))}, given=given)


def _strategy(source: Source) -> dict[str, Any]:
    """What the configuration says of blocks, by the format's."""
    block = source.format.block_size
    if isinstance(block, tuple):
        return {"strategy": "block", "block_structure": list(block)}
    if isinstance(block, int) and block < source.shape[-1]:
        return {"strategy": "group", "group_size": block}
    return {"strategy": "tensor" if block == "tensor" else "channel"}


def _scale_shape(source: Source) -> tuple[int, ...]:
    return source.format.rule.shape(source.shape) or (1,)


def _said(kind: str, bits: int, type_: str, symmetric: bool, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": type_, "symmetric": symmetric, **more}
    return {"format": kind, "weights": weights}


def _integer_recipe(source: Source, found: Integers) -> Recipe:
    rows, depth = source.shape
    stem, bits, kept = source.stem, found.bits, scale_tag(source)
    packing, shape = Packing(bits, "dense"), _scale_shape(source)
    middle = 1 << (bits - 1)
    zero = common_zero(source, found)
    groups = -(-depth // found.group)
    if zero != middle and shape != (rows, groups):
        raise ValueError("compressed-tensors has zero points of rows and groups alone")

    def encode(q: QuantArray) -> Tensors:
        scales = np.asarray(q.scale)
        made = {
            stem + "weight_packed": dense_words(q, middle),
            stem + "weight_scale": as_tag(scales.reshape(scales.shape or (1,)), kept),
            stem + "weight_shape": np.array(source.shape, np.int64),
        }
        if zero != middle:
            zeros = np.ascontiguousarray(group_zeros(q, found.group).T)
            made[stem + "weight_zero_point"] = np.ascontiguousarray(
                words_of(packing.pack(zeros, 0)).T
            )
        return made

    specs: Specs = {
        stem + "weight_packed": ("I32", (rows, packing.words(depth))),
        stem + "weight_scale": (kept, shape),
        stem + "weight_shape": ("I64", (2,)),
    }
    if zero != middle:
        specs[stem + "weight_zero_point"] = ("I32", (packing.words(rows), groups))
    said = _said("pack-quantized", bits, "int", zero == middle, **_strategy(source))
    axes = {stem + "weight_packed": 0, stem + "weight_zero_point": 0}
    if len(shape) == 2:  # a scale of the whole array is one of any rows
        axes[stem + "weight_scale"] = 0
    return Recipe(specs, encode, f"pack-quantized, {bits} bits", said, source.module, axes)


def _float_recipe(source: Source) -> Recipe:
    if source.format.rule.nested:
        raise ValueError("compressed-tensors has no scales of scales of fp8_e4m3")
    stem, kept, shape = source.stem, scale_tag(source), _scale_shape(source)

    def encode(q: QuantArray) -> Tensors:
        scales = np.asarray(q.scale).reshape(shape)
        return {source.name: q.packed.view(fp8.E4M3), stem + "weight_scale": as_tag(scales, kept)}

    specs: Specs = {
        source.name: ("F8_E4M3", source.shape),
        stem + "weight_scale": (kept, shape),
    }
    said = _said("float-quantized", 8, "float", True, **_strategy(source))
    return Recipe(specs, encode, "float-quantized", said, source.module)


def _block_recipe(source: Source) -> Recipe:
    """Formats whose codes and scales lie as ours."""
    fmt, stem, (*rows, depth) = source.format, source.stem, source.shape
    kind, end, tag, weights = FLOATS[fmt.name]
    if depth % weights["group_size"]:
        raise ValueError(f"compressed-tensors has whole groups of {fmt}, not {source.shape}")
    scale = "F8_E4M3" if fmt.rule.nested else "U8"
    shape = fmt.rule.shape(source.shape)
    specs: Specs = {
        stem + end: (tag, (*rows, depth * fmt.bits // 8)),
        stem + "weight_scale": (scale, shape),
    }
    count: tuple[int, ...] = (1,)
    if fmt.rule.nested:
        experts = fmt.rule.per_matrix and len(rows) > 1
        count = (rows[0], 1, 1) if experts else count
        specs[stem + "weight_global_scale"] = ("F32", count)
        if not fmt.rule.divisor:
            _refuse_rounding(source.read())

    def encode(q: QuantArray) -> Tensors:
        codes = np.ascontiguousarray(q.packed).view(np.uint8)
        parts = q.arrays()
        made = {
            stem + end: codes.view(fp8.E4M3) if tag == "F8_E4M3" else codes,
            stem + "weight_scale": parts["scale"].view(fp8.E4M3)
            if fmt.rule.nested
            else parts["scale"],
        }
        if fmt.rule.nested:
            divisors = np.asarray(as_held_array(q).components["global_scale"], np.float32)
            made[stem + "weight_global_scale"] = divisors.reshape(count)
        return made

    strategy = "tensor_group" if fmt.rule.nested else "group"
    said = _said(kind, weights["num_bits"], "float", True, strategy=strategy, **{
        "group_size": weights["group_size"],
        "scale_dtype": "torch.float8_e4m3fn" if fmt.rule.nested else "torch.uint8",
    })  # fmt: skip
    return Recipe(specs, encode, kind, said, source.module)


def _refuse_rounding(q: QuantArray) -> None:
    """ValueError where dividing block scales by 1 / global_scale gives other float32 numbers."""
    if not np.array_equal(np.asarray(as_held_array(q).scale), np.asarray(q.scale)):
        raise ValueError(
            "its global scale multiplies block scales and compressed-tensors' divides them, which "
            "moves some numbers by a unit in the last place of float32"
        )


def as_held_array(q: QuantArray) -> QuantArray:
    """An array of nvfp4 as compressed-tensors has it: codes and scales stay, and what divides these
    is 1 / global_scale, rounded."""
    if as_held(q.format) is q.format:
        return q
    number = np.asarray(q.components["global_scale"], np.float32)
    with np.errstate(divide="ignore"):
        divisor = np.asarray(np.reciprocal(number), np.float32)
    return q._with(format=as_held(q.format), components={**q.components, "global_scale": divisor})


def as_held(fmt: Format) -> Format:
    """A format as the kind has it: nvfp4's global scale divides.

    >>> as_held(get_format("nvfp4")), as_held(get_format("mxfp4"))
    (Format('nvfp4+divisor'), Format('mxfp4'))
    """
    if fmt.name != "nvfp4" or fmt.rule.divisor:
        return fmt
    options: dict[str, Any] = {**fmt.options, "divisor": True}
    return get_format(fmt.name, **options)


def configuration(recipes: Sequence[Recipe], plain: Sequence[str]) -> dict[str, Any]:
    """A group of modules for each format; the commonest one is that of all linear layers."""
    if not recipes:
        return {}
    groups: dict[str, list[Recipe]] = {}
    for made in recipes:
        groups.setdefault(json.dumps(made.said), []).append(made)
    ordered = sorted(groups.values(), key=len, reverse=True)
    named = {f"group_{i}": _group(made, not i) for i, made in enumerate(ordered)}
    kinds = {made.said["format"] for made in recipes}
    return {
        "quantization_config": {
            "quant_method": KIND,
            "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "version": WRITTEN,
            "ignore": list(plain),
            # Groups of single modules come first: the owner takes the first that fits.
            "config_groups": dict(reversed(named.items())),
        }
    }


def _group(recipes: Sequence[Recipe], is_commonest: bool) -> dict[str, Any]:
    return {
        "targets": ["Linear"]
        if is_commonest
        else [f"re:{re.escape(made.module)}$" for made in recipes],
        **recipes[0].said,
        "input_activations": None,
        "output_activations": None,
    }
