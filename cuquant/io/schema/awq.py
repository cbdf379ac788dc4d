"""AWQ: AutoAWQ's and GPTQModel's checkpoints of 4 bits.

w = (code - zero) * scale. "gemm": qweight I32 [K, N / 8], qzeros I32 [G, N / 8], scales [G, N],
whose words hold eight columns in the order ORDER; "gemv": qweight I32 [N, K / 8], qzeros I32
[N, Z], scales [N, 8 Z], in order. "gemv_fast": qweight I16 [N / 4, K] in tiles, qzeros of floats
[8 Z, N], which are added: w = code * scale + zero. Source: AutoAWQ 0.2.9, modules/linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.formats import get_format
from cuquant.formats.packing import Packing
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.safetensors import TensorInfo
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
from cuquant.io.schema.pieces import packed_by_rows
from cuquant.io.schema.recipe import (
    CHUNK,
    Recipe,
    Source,
    Specs,
    Tensors,
    as_tag,
    codes_of,
    common_zero,
    fits_group,
    group_scales,
    group_size_of,
    group_zeros,
    integers_of,
    scale_tag,
    words_of,
)

KIND = "awq"
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column j of eight is field ORDER[j] of a word
NIBBLES = Packing(4, "low")
SIZES = (128, 64, 32)
TILE = 64  # columns of gemv_fast's tiles


def recognises(c: Checkpoint) -> bool:
    """By its configuration, or codes without g_idx."""
    if c.method:
        return c.method == "awq"
    found = [stem for stem in stems(c, "qweight") if stem + "qzeros" in c]
    return bool(found) and not any(stem + "g_idx" in c for stem in found)


def layers(c: Checkpoint) -> Iterator[Found]:
    """Modules with qweight, qzeros and scales."""
    for stem in stems(c, "qweight"):
        if stem + "qzeros" in c and stem + "scales" in c:
            yield attempt(stem + "weight", _layer, c, stem)


def _layer(c: Checkpoint, stem: str) -> Layer:
    codes, zeros, scales = (c.info(stem + end) for end in ("qweight", "qzeros", "scales"))
    name = stem + "weight"
    whole = all(len(info.shape) == 2 for info in (codes, zeros, scales))
    if codes.dtype == "I16" and whole:
        return _gemv_fast(c, name, codes, zeros, scales)
    if (codes.dtype, zeros.dtype) != ("I32", "I32") or not whole:
        raise refuse(name, f"codes {codes.dtype}{list(codes.shape)} are none of AWQ's")
    by_columns = scales.shape[1] == 8 * codes.shape[1] == 8 * zeros.shape[1]
    if by_columns and scales.shape[0] == zeros.shape[0]:
        return _gemm(c, name, codes, zeros, scales)
    return _gemv(c, name, codes, zeros, scales)


def _gemm(
    c: Checkpoint, name: str, codes: TensorInfo, zeros: TensorInfo, scales: TensorInfo
) -> Layer:
    depth, (groups, columns) = codes.shape[0], scales.shape
    if not groups or depth % groups:
        raise refuse(name, f"{groups} groups do not make {depth} columns")
    kept = scale_dtype(scales, "scales")
    fmt = get_format("uint4", block_size=depth // groups, scale_dtype=kept)

    def parts() -> Parts:
        return {
            "packed": turned(c, codes.name, fmt.zero_code),
            "scale": c.read(scales.name).T,
            "zero_point": in_order(c.read(zeros.name)).T,
        }

    names = (codes.name, zeros.name, scales.name)
    return Layer(name, fmt, (columns, depth), model_dtype(c, scales), names, parts)


def _gemv(
    c: Checkpoint, name: str, codes: TensorInfo, zeros: TensorInfo, scales: TensorInfo
) -> Layer:
    columns, depth = codes.shape[0], 8 * codes.shape[1]
    if scales.shape != (columns, 8 * zeros.shape[1]) or zeros.shape[0] != columns:
        raise refuse(name, f"scales {list(scales.shape)} do not fit codes {list(codes.shape)}")
    size = _group_size(c, depth, zeros.shape[1], name)
    groups = -(-depth // size)
    kept = scale_dtype(scales, "scales")
    fmt = get_format("uint4", block_size=size, scale_dtype=kept)

    def parts() -> Parts:
        words = c.read(zeros.name).view(np.uint32)
        return {
            "packed": c.read(codes.name).view(np.uint8),
            "scale": c.read(scales.name)[:, :groups],
            "zero_point": Packing(4, "dense").unpack(words, groups),
        }

    names = (codes.name, zeros.name, scales.name)
    return Layer(name, fmt, (columns, depth), model_dtype(c, scales), names, parts)


def _gemv_fast(
    c: Checkpoint, name: str, codes: TensorInfo, zeros: TensorInfo, scales: TensorInfo
) -> Layer:
    columns, depth = 4 * codes.shape[0], codes.shape[1]
    fits = scales.shape == zeros.shape and scales.shape[1] == columns and scales.shape[0] % 8 == 0
    if not fits or zeros.dtype != scales.dtype or depth % TILE:
        raise refuse(name, f"scales {list(scales.shape)} do not fit codes {list(codes.shape)}")
    size = _group_size(c, depth, scales.shape[0] // 8, name)
    groups = -(-depth // size)
    kept = scale_dtype(scales, "scales")
    fmt = get_format("uint4", block_size=size, offset="min", scale_dtype=kept)

    def parts() -> Parts:
        words = c.read(codes.name)

        def unpacked(start: int, stop: int) -> np.ndarray:
            return untiled(words[start // 4 : stop // 4])

        return {
            "packed": packed_by_rows(fmt, columns, depth, unpacked),
            "scale": c.read(scales.name)[:groups].T,
            "minimum": c.read(zeros.name)[:groups].T,
        }

    names = (codes.name, zeros.name, scales.name)
    return Layer(name, fmt, (columns, depth), model_dtype(c, scales), names, parts)


def untiled(words: np.ndarray) -> np.ndarray:
    """uint8 codes [4 rows, K] of words I16 [rows, K]: tiles are four rows of TILE nibbles.

    Column c of 32 is nibble 8 a + 4 b + d of them, where c is 8 d + 2 a + b.
    """
    rows, depth = words.shape
    stored = np.ascontiguousarray(words).view(np.uint8).reshape(rows, depth // TILE, 4, TILE // 2)
    fields = np.stack([stored & 15, stored >> 4], axis=-1).reshape(rows, depth // TILE, 4, TILE)
    straight = fields.swapaxes(1, 2).reshape(4 * rows, depth // 32, 4, 2, 4)
    return np.moveaxis(straight, -1, -3).reshape(4 * rows, depth)


def _group_size(c: Checkpoint, depth: int, words: int, name: str) -> int:
    """Columns of a group, of which the zero points take so many words: the configuration's, or that
    of SIZES which fits."""
    said = integer(c.quantization, "group_size", 8, 1 << 30)
    for size in (said, *SIZES):
        needed = -(-(depth // size) // 8)
        multiple = {64: 2, 32: 4}.get(size, 1)
        if -(-needed // multiple) * multiple == words:
            return size
    raise refuse(name, f"{words} words of zero points do not fit {depth} columns")


def turned(c: Checkpoint, name: str, pad: int) -> np.ndarray:
    """Packed rows uint8 [8 words, K / 2] of a tensor I32 [K, words] in ORDER, read by columns."""
    depth, count = c.info(name).shape
    packed = np.empty((8 * count, NIBBLES.words(depth)), np.uint8)
    step = max(CHUNK // max(8 * count, 1) // 8, 1) * 8
    for start in range(0, depth, step):
        stop = min(start + step, depth)
        words = np.ascontiguousarray(c.read_rows(name, start, stop).T).view(np.uint32)
        codes = np.empty((count, 8, stop - start), np.uint8)
        for column, field in enumerate(ORDER):
            codes[:, column] = words >> np.uint32(4 * field) & np.uint32(15)
        packed[:, start // 2 : -(-stop // 2)] = NIBBLES.pack(codes.reshape(8 * count, -1), pad)
    return packed


def in_order(words: np.ndarray) -> np.ndarray:
    """uint8 codes [rows, 8 words] of words I32 [rows, words] in ORDER."""
    rows, count = words.shape
    fields = Packing(4, "dense").unpack(np.ascontiguousarray(words).view(np.uint32), 8 * count)
    return fields.reshape(rows, count, 8)[..., ORDER].reshape(rows, 8 * count)


# ---- writing ------------------------------------------------------------------------------------

NEAREST = {4: "uint4"}
FIELDS = tuple(
    ORDER.index(i) for i in range(8)
)  # field i of a word holds column FIELDS[i] of eight


def recipe(source: Source) -> Recipe:
    """Integers of 4 bits with scales of float16 or bfloat16, as "gemm"."""
    columns, depth = source.matrix("AWQ")
    found = integers_of(source.format, source.shape)
    if found is None or found.bits != 4:
        raise ValueError("AWQ holds integers of 4 bits with a scale for each group")
    group = found.group
    if columns % 8 or depth % group or group % 8:
        raise ValueError(f"AWQ has whole groups, and columns by eight: not {source.shape}:{group}")
    stem, groups, kept = source.stem, depth // group, scale_tag(source, ("F16", "BF16"))
    common_zero(source, found)  # or ValueError

    def encode(q: QuantArray) -> Tensors:
        return {
            stem + "qweight": out_of_order(codes_of(q).T),
            stem + "qzeros": out_of_order(group_zeros(q, group).T),
            stem + "scales": as_tag(group_scales(q, group).T, kept),
        }

    specs: Specs = {
        stem + "qweight": ("I32", (depth, columns // 8)),
        stem + "qzeros": ("I32", (groups, columns // 8)),
        stem + "scales": (kept, (groups, columns)),
    }
    said = {"group_size": group, "groups": groups}
    axes = dict.fromkeys(specs, 1)
    return Recipe(specs, encode, f"gemm, groups of {group}", said, source.module, axes)


def out_of_order(codes: np.ndarray) -> np.ndarray:
    """Words I32 [rows, words] in ORDER of uint8 codes [rows, 8 words]; `in_order` undoes it."""
    rows, columns = codes.shape
    fields = codes.reshape(rows, columns // 8, 8)[..., FIELDS].reshape(rows, columns)
    return words_of(NIBBLES.pack(fields, 0))


def configuration(recipes: Sequence[Recipe], plain: Sequence[str]) -> dict[str, Any]:
    """One size of groups for all modules."""
    if not recipes:
        return {}
    size = group_size_of(recipes)
    if odd := next((made for made in recipes if not fits_group(made, size)), None):
        raise ValueError(
            f"AWQ has one size of groups for all arrays: most have {size}, and {odd.module} has "
            f"{odd.said['group_size']}"
        )
    return {
        "quantization_config": {
            "quant_method": KIND,
            "bits": 4,
            "group_size": size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(plain) or None,
        }
    }
