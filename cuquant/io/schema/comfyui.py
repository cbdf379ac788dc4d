"""ComfyUI: diffusion models and text encoders with scales beside some weights.

A layer says what it is in STEM.comfy_quant, JSON as U8, or in the metadata's
"_quantization_metadata": {"layers": {STEM: {"format", ...}}}. float8: weight F8 [N, K] and
weight_scale []; int8_tensorwise: weight I8, weight_scale [] or [N, 1]; nvfp4: weight U8 [N, K / 2],
the high nibble first, weight_scale F8_E4M3 and weight_scale_2 [], which multiply; mxfp8: weight F8
and weight_scale of exponents. Scales of blocks lie in cuBLAS's tiles. Older files have a tensor
scaled_fp8, whose dtype is that of the weights, and STEM.scale_weight. Source: ComfyUI, comfy/ops
and comfy/utils; comfy-kitchen, tensor.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant.errors import FormatError
from cuquant.formats.names import FormatName
from cuquant.interop import float_dtype
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.messages import quote
from cuquant.io.schema import fp8
from cuquant.io.schema.layer import Found, Layer, Parts, attempt, refuse, stems
from cuquant.io.schema.modelopt import PRE_NOTE, PRE_SCALE
from cuquant.io.schema.pieces import block_floats, extent_of, integers

KIND = "comfyui"
SAYS, MARK, OLD_SCALE = "comfy_quant", "scaled_fp8", "scale_weight"
METADATA = "_quantization_metadata"
MAX_TEXT = 1 << 16  # bytes of a layer's JSON
ROTATED = ("convrot_w4a4", "asym_w4a8_int8")
PLAIN = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
Said = Mapping[str, Any]


def recognises(c: Checkpoint) -> bool:
    """By what it says of its layers, or the scales of older files."""
    if c.method:
        return False
    if METADATA in c.metadata or any(True for _ in stems(c, SAYS)):
        return True
    return any(True for _ in _old(c))


def layers(c: Checkpoint) -> Iterator[Found]:
    """Layers that have a format of their own."""
    dtype = _dtype(c)
    listed = _listed(c)
    marks = [stem + MARK for stem in stems(c, MARK)]
    for stem in dict.fromkeys([*(f"{name}." for name in listed), *stems(c, SAYS)]):
        if stem + "weight" in c:
            yield attempt(stem + "weight", _layer, c, stem, listed, dtype)
    for stem in _old(c):
        if stem.removesuffix(".") not in listed and stem + SAYS not in c:
            yield attempt(stem + "weight", _scaled, c, stem, stem + OLD_SCALE, dtype, tuple(marks))
            marks = []  # of the whole file; its first layer has it


def _old(c: Checkpoint) -> Iterator[str]:
    for stem in stems(c, OLD_SCALE):
        if stem + "weight" in c and c.info(stem + "weight").dtype in fp8.FORMATS:
            yield stem


def _listed(c: Checkpoint) -> dict[str, Any]:
    """What the metadata says of layers, by their names."""
    if METADATA not in c.metadata:
        return {}
    found = _parsed(c.metadata[METADATA], f"{c.path}: metadata {quote(METADATA)}").get("layers")
    if not isinstance(found, dict):
        raise FormatError(f"{c.path}: metadata {quote(METADATA)} has no layers")
    return found


def _parsed(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is no JSON") from error
    if not isinstance(found, dict):
        raise FormatError(f"{what} holds no JSON object")
    return found


def _dtype(c: Checkpoint) -> np.dtype:
    """What most of the floats are that are not quantized; bfloat16 where there are none."""
    counts = Counter[str]()
    for info in c.tensors.values():
        if info.dtype in PLAIN and not info.name.endswith(("scale", "scale_2", OLD_SCALE)):
            counts[info.dtype] += info.nbytes // info.numpy_dtype.itemsize
    return float_dtype(PLAIN[counts.most_common(1)[0][0]] if counts else "bfloat16")


def _layer(c: Checkpoint, stem: str, listed: Said, dtype: np.dtype) -> Layer:
    name, own = stem + "weight", stem + SAYS
    said = listed.get(stem.removesuffix("."))
    if said is None:
        info = c.info(own)
        if info.dtype != "U8" or info.nbytes > MAX_TEXT:
            raise refuse(name, f"{SAYS} is {info.nbytes} bytes of {info.dtype}")
        said = _parsed(c.read(own).tobytes(), quote(own))
    if not isinstance(said, dict):
        raise refuse(name, f"its format is {quote(said)}")
    kind, params = said.get("format"), said.get("params")
    more = params if isinstance(params, dict) else {}
    if kind in ROTATED or said.get("convrot", more.get("convrot", False)):
        raise refuse(name, f"{quote(kind)}, whose columns are rotated (ConvRot), is not read yet")
    if not isinstance(kind, str) or kind not in READERS:
        raise refuse(name, f"ComfyUI's format {quote(kind)} is not read")
    made = READERS[kind](c, stem, dtype)
    notes = (PRE_NOTE,) if stem + PRE_SCALE in c else ()
    tensors = (*made.tensors, own) if own in c else made.tensors
    return replace(made, tensors=tensors, notes=(*made.notes, *notes))


def _scaled(
    c: Checkpoint, stem: str, scale: str, dtype: np.dtype, marks: tuple[str, ...] = ()
) -> Layer:
    """8-bit floats with a scale of the whole weight, or of rows."""
    made = fp8.layer(c, c.info(stem + "weight"), c.info(scale), None)
    return replace(made, dtype=dtype, tensors=(*made.tensors, *marks))


def _floats(c: Checkpoint, stem: str, dtype: np.dtype) -> Layer:
    return _scaled(c, stem, stem + "weight_scale", dtype)


def _integers(c: Checkpoint, stem: str, dtype: np.dtype) -> Layer:
    codes, scales = c.info(stem + "weight"), c.info(stem + "weight_scale")
    extent = extent_of(codes.shape, scales.shape, codes.name)
    return integers(c, codes.name, codes, scales, extent, dtype)


def _blocks(
    kind: FormatName, size: int, codes_of: tuple[str, ...], scales_of: tuple[str, ...]
) -> Callable[[Checkpoint, str, np.dtype], Layer]:
    """Of a format whose blocks of so many columns have scales in tiles."""

    def reader(c: Checkpoint, stem: str, dtype: np.dtype) -> Layer:
        codes, scales = c.info(stem + "weight"), c.info(stem + "weight_scale")
        name = codes.name
        if codes.dtype not in codes_of or scales.dtype not in scales_of or len(codes.shape) != 2:
            raise refuse(name, f"codes {codes.dtype} with scales {scales.dtype} are no {kind}")
        rows, depth = codes.shape[0], codes.shape[1] * (1 if kind == "mxfp8" else 2)
        bias = stem + "bias"
        if depth % size or (bias in c and c.info(bias).shape != (rows,)):
            raise refuse(name, f"{rows} rows of {depth} columns are padded, to which is not said")
        whole = (stem + "weight_scale_2", np.positive) if kind == "nvfp4" else None
        if whole:
            c.info(whole[0])
        made = block_floats(c, name, kind, codes, scales, dtype, whole)

        def parts() -> Parts:
            found = dict(made.parts())
            found["scale"] = untiled(found["scale"], rows, depth // size)
            if kind == "nvfp4":  # the high nibble is the first
                packed = found["packed"]
                found["packed"] = packed >> 4
                packed <<= 4
                found["packed"] |= packed
            return found

        return replace(made, parts=parts)

    return reader


def untiled(scales: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Scales [rows, columns] of tiles of 128 x 4, in which four rows lie side by side.

    A tile is [32, 4, 4]: rows r, r + 32, r + 64 and r + 96, each of four columns. Source: cuBLAS,
    "1D block scaling factors layout".

    >>> tiles = np.zeros(128 * 4, np.uint8)
    >>> tiles[4] = 7  # of row 32
    >>> untiled(tiles, 48, 2)[32].tolist()
    [7, 0]
    """
    tall, wide = -(-rows // 128), -(-columns // 4)
    if scales.size != tall * wide * 512:
        raise ValueError(f"{scales.size} scales do not fill tiles of {rows} rows of {columns}")
    tiles = scales.reshape(tall, wide, 32, 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(tall * 128, wide * 4)[:rows, :columns]


READERS: dict[str, Callable[[Checkpoint, str, np.dtype], Layer]] = {
    "float8_e4m3fn": _floats,
    "float8_e5m2": _floats,
    "int8_tensorwise": _integers,
    "nvfp4": _blocks("nvfp4", 16, ("U8",), ("F8_E4M3", "U8")),
    "mxfp8": _blocks("mxfp8", 32, ("F8_E4M3", "U8"), ("F8_E8M0", "U8")),
}
