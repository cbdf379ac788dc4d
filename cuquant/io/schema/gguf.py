"""GGUF's types of tensors: which of them holds an array, and its blocks.

The container and its reader are cuquant.io.container.gguf. Integers with scales of float16, whose
groups are whole blocks of 32, are q4_0's, q5_0's or q8_0's numbers: d * (code - zero); with
minimums they are q4_1's or q5_1's: d * code + m. The global scale of nvfp4 is a tensor beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuquant.array.arranged import reciprocal
from cuquant.array.quant_array import QuantArray
from cuquant.formats import get_format
from cuquant.formats.codecs import Uniform
from cuquant.io.container.gguf.types import TYPES, gguf_type
from cuquant.io.schema.recipe import (
    FLOATS,
    Integers,
    Recipe,
    Source,
    Specs,
    Tensors,
    codes_of,
    finer,
    group_minimums,
    group_scales,
    group_zeros,
    holds,
    integers_of,
    row_chunks,
    scale_tag,
)

KIND = "gguf"
ODD = ("divisor", "per_matrix")
NEAREST = {2: "q2_k", 3: "q3_k", 4: "q4_k", 5: "q5_k", 6: "q6_k", 8: "q8_0"}
SMALL = {4: "q4_0", 5: "q5_0", 8: "q8_0"}  # of rows that 256 does not divide
INTEGERS = ("q4_0", "q5_0", "q8_0")  # the first that has the codes is taken
MINIMUMS = {"q4_1": 4, "q5_1": 5}  # bits of those that have one
BLOCK = 32
SAME = {kind.format: kind for kind in TYPES.values() if kind.format is not None}
OF_OTHERS = {"mxfp4": "MXFP4", "nvfp4": "NVFP4"}  # types that hold our codes and scales otherwise


def recipe(source: Source) -> Recipe:
    """Types of ggml's as they are, mxfp4, nvfp4, integers, and minimums."""
    fmt, name = source.format, source.name
    if fmt.name in SAME:
        return Recipe({name: (SAME[fmt.name], source.shape)}, _blocks(source), fmt.name)
    if fmt.name in OF_OTHERS and not fmt.usual.options:
        kind = gguf_type(OF_OTHERS[fmt.name])
        if source.shape[-1] % kind.elements:
            raise ValueError(f"{kind.name} has rows of whole blocks of {kind.elements}")
        q = source.read()
        _refuse_odd_scales(q)
        scale = _scale_of(q)
        specs: Specs = {name: (kind, source.shape)}
        if scale is not None:
            specs[source.stem + "scale"] = ("F32", scale.shape)
        return Recipe(specs, _blocks(source, scale), kind.name)
    if isinstance(fmt.codec, Uniform) and fmt.offset == "min" and not fmt.is_blocks:
        return _minimums(source)
    found = integers_of(fmt, source.shape)
    if found is None:
        raise ValueError("GGUF has no type with such codes and scales")
    return _integers(source, found)


def _minimums(source: Source) -> Recipe:
    """q4_1 or q5_1, with d and m for each 32 of a row."""
    fmt, depth = source.format, source.shape[-1]
    kind = next((kind for kind, bits in MINIMUMS.items() if fmt.bits <= bits), None)
    group = min(fmt.rule.tile(1, depth)[1], max(depth, 1))
    if kind is None or fmt.rule.nested or isinstance(fmt.rule.block, tuple):
        raise ValueError(f"GGUF has minimums of codes of up to 5 bits, not of {fmt}")
    if depth % BLOCK or not finer(group, depth, BLOCK):
        raise ValueError(f"ggml has a minimum for each {BLOCK} columns, not {group} of {depth}")
    is_narrowed = scale_tag(source, ("F16",)) != FLOATS[fmt.rule.dtype]
    if is_narrowed and not holds(np.dtype(np.float16), np.asarray(source.read().minimum)):
        raise ValueError("its minimums are no numbers of float16")

    def encode(q: QuantArray) -> Tensors:
        layout, times = get_format(kind).layout, -(-group // BLOCK)
        fields = [group_scales(q, group), group_minimums(q, group)]
        d, m = (np.repeat(f, times, axis=1)[:, : depth // BLOCK].reshape(-1, 1) for f in fields)
        codes = codes_of(q).reshape(-1, BLOCK)
        blocks = layout.pack(codes, d.astype(np.float16), m.astype(np.float16))
        return {source.name: blocks.reshape(*q.shape[:-1], depth // BLOCK * layout.nbytes)}

    axes = {source.name: 0}
    return Recipe({source.name: (SAME[kind], source.shape)}, encode, kind, axes=axes)


def _refuse_odd_scales(q: QuantArray) -> None:
    """ValueError where ggml reads another number: its scales have no NaN and no sign."""
    parts = q.arrays()
    if "global_scale" in parts:
        odd = (parts["scale"] & 0x7F) == 0x7F
        odd |= parts["scale"] > 0x7F
    else:
        odd = parts["scale"] >= 253  # from 2^126 on its larger numbers are infinite there
    if odd.any():
        raise ValueError(f"ggml reads {int(odd.sum())} of its scales as other numbers")


def _scale_of(q: QuantArray) -> np.ndarray | None:
    """What llama.cpp multiplies products by: float32 [1], or [E] of experts; None where that is 1.

    Raises
    ------
    ValueError
        Where numbers would differ: of a divisor they do, unless it is a power of two.
    """
    number = q.arrays().get("global_scale")
    if number is None:
        return None
    if q.format.rule.divisor:
        number = reciprocal(number)
        if (np.frexp(number)[0] != 0.5).any():
            raise ValueError("its global scale divides, and GGUF's multiplies: values would differ")
    if (number == 1).all():
        return None
    if q.ndim > 3:
        raise ValueError(f"GGUF has scales of experts in one axis, not {q.shape[:-2]}")
    each = q.shape[:-2] or (1,)  # of experts that share a number too, as llama.cpp wants it
    return np.ascontiguousarray(np.broadcast_to(number, each))


def _blocks(source: Source, scale: np.ndarray | None = None) -> Any:
    name = source.name

    def encode(q: QuantArray) -> Tensors:
        if "global_scale" in q.components:
            one = {**q.components, "global_scale": np.ones((), np.float32)}
            q = q._with(format=q.format.usual, components=one)
        blocks = q.to_blocks()
        made = {name: blocks.reshape(*blocks.shape[:-2], -1)}
        return made if scale is None else {**made, source.stem + "scale": scale}

    return encode


def _integers(source: Source, found: Integers) -> Recipe:
    """The smallest of ggml's types that has all codes, with d for each 32 of a row."""
    depth = source.shape[-1]
    if depth % BLOCK or not finer(found.group, depth, BLOCK):
        raise ValueError(
            f"ggml has a scale for each {BLOCK} columns, and not for {found.group} of {depth}"
        )
    scale_tag(source, ("F16",))
    kind = _fitting(source, found)

    def encode(q: QuantArray) -> Tensors:
        codes, zeros = codes_of(q), group_zeros(q, found.group)
        fmt = get_format(kind)
        middle = fmt.zero_code
        if found.zero != middle:
            codes = moved(codes, zeros, found.group, middle).astype(np.uint8)
        scales = group_scales(q, found.group).astype(np.float16)
        scales = np.repeat(scales, -(-found.group // BLOCK), axis=1)[:, : depth // BLOCK]
        count = codes.size // BLOCK
        blocks = fmt.layout.pack(codes.reshape(count, BLOCK), scale=scales.reshape(count, 1))
        return {source.name: blocks.reshape(*q.shape[:-1], depth // BLOCK * fmt.layout.nbytes)}

    axes = {source.name: 0}
    return Recipe({source.name: (SAME[kind], source.shape)}, encode, kind, axes=axes)


def moved(codes: np.ndarray, zeros: np.ndarray, group: int, middle: int) -> np.ndarray:
    """Codes, int16, whose zero point is `middle`."""
    by_code = np.repeat(zeros, group, axis=1)[:, : codes.shape[1]]
    return codes.astype(np.int16) - by_code + np.int16(middle)


def _fitting(source: Source, found: Integers) -> str:
    """The type that has all integers code - zero; the array is read where only it tells them."""
    if found.zero is not None:
        low, high = -found.zero, (1 << found.bits) - 1 - found.zero
    else:
        low = high = 0
        for q in row_chunks(source):
            codes, zeros = codes_of(q), group_zeros(q, found.group)
            signed = moved(codes, zeros, found.group, 0)
            low, high = min(low, int(signed.min(initial=0))), max(high, int(signed.max(initial=0)))
    for kind in INTEGERS:
        middle = get_format(kind).zero_code
        if -middle <= low and high < middle:
            return kind
    raise ValueError(f"its integers, {low} to {high}, are beyond the 8 bits of q8_0")


def nearest(bits: float, columns: int) -> str:
    """The format that an array of so many bits, which GGUF cannot hold, may become."""
    held = NEAREST if columns % 256 == 0 else SMALL
    return held[min((b for b in held if b >= bits), default=max(held))]


def configuration(recipes: Sequence[Recipe], plain: Sequence[str]) -> dict[str, Any]:
    """Nothing: types are told tensor by tensor."""
    return {}
