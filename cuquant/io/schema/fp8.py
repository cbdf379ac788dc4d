"""Weights of 8-bit floats with scales that multiply: transformers' "fp8" and FBGEMM's.

weight F8_E4M3 [N, K]; weight_scale_inv [ceil(N / bm), ceil(K / bn)], which multiplies despite its
name, or weight_scale [N, 1]. Source: transformers 5, integrations/finegrained_fp8 and fbgemm_fp8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.formats import get_format
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.safetensors import TensorInfo
from cuquant.io.schema.layer import (
    SCALE_DTYPES,
    Found,
    Layer,
    Parts,
    attempt,
    model_dtype,
    refuse,
    stems,
)
from cuquant.io.schema.pieces import extent_of
from cuquant.io.schema.recipe import FLOATS, Recipe, Source, Specs, Tensors, same

KIND = "fp8"
METHODS = ("fp8", "fbgemm_fp8")
SCALES = ("weight_scale_inv", "weight_scale")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FORMATS = {"F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"}


def recognises(c: Checkpoint) -> bool:
    """By its configuration, or weights beside weight_scale_inv."""
    if c.method:
        return c.method in METHODS
    return any(stem + "weight" in c for stem in stems(c, SCALES[0]))


def layers(c: Checkpoint) -> Iterator[Found]:
    """Modules whose weight is of 8-bit floats and has a scale."""
    block = c.quantization.get("weight_block_size")
    for end in SCALES:
        for stem in stems(c, end):
            if stem + "weight" in c and c.info(stem + "weight").dtype in FORMATS:
                codes, scales = c.info(stem + "weight"), c.info(stem + end)
                yield attempt(codes.name, layer, c, codes, scales, block)


def layer(
    c: Checkpoint, codes: TensorInfo, scales: TensorInfo, block: object, group: object = None
) -> Layer:
    """Codes with scales of a tensor, of rows, of groups of columns or of blocks [bm, bn]."""
    if codes.dtype not in FORMATS or not codes.shape:
        raise refuse(codes.name, f"codes of {codes.dtype}{list(codes.shape)} are no 8-bit floats")
    extent = extent_of(codes.shape, scales.shape, codes.name, group, block)
    kept = SCALE_DTYPES.get(scales.dtype, "float32")
    fmt = get_format(FORMATS[codes.dtype], block_size=extent, scale_dtype=kept)

    def parts() -> Parts:
        stored = c.read(scales.name)
        return {
            "packed": c.read(codes.name).view(np.uint8),
            "scale": stored if scales.dtype in SCALE_DTYPES else of_exponents(stored, scales),
        }

    names = (codes.name, scales.name)
    return Layer(codes.name, fmt, codes.shape, model_dtype(c, scales), names, parts)


def of_exponents(scales: np.ndarray, info: TensorInfo) -> np.ndarray:
    """float32 scales of the exponents of powers of two; 0 is 2^-127 and 255 is NaN."""
    if info.dtype not in ("F8_E8M0", "U8"):
        raise refuse(info.name, f"scales of dtype {info.dtype} are unknown")
    bits = np.maximum(scales.view(np.uint8).astype(np.int32) << 23, 1 << 22)
    return np.where(bits == 255 << 23, np.float32(np.nan), bits.view(np.float32))


# ---- writing ------------------------------------------------------------------------------------

NEAREST = {8: "fp8_e4m3:128x128"}


def recipe(source: Source) -> Recipe:
    """Floats e4m3 with a scale for each block [bm, bn], or for the whole matrix."""
    source.matrix("fine-grained FP8")
    fmt, block = source.format, source.format.block_size
    if fmt.name != FORMATS["F8_E4M3"] or not (isinstance(block, tuple) or block == "tensor"):
        raise ValueError("fine-grained FP8 holds fp8_e4m3 with a scale for each block or matrix")
    if fmt.rule.nested or fmt.rule.dtype not in FLOATS:
        raise ValueError("its scales are none of float32")
    stem = source.stem
    shape = fmt.rule.shape(source.shape) or (1, 1)

    def encode(q: QuantArray) -> Tensors:
        scales = np.asarray(q.scale, np.float32).reshape(shape)
        return {source.name: q.packed.view(E4M3), stem + SCALES[0]: scales}

    specs: Specs = {source.name: ("F8_E4M3", source.shape), stem + SCALES[0]: ("F32", shape)}
    size = block if isinstance(block, tuple) else None
    return Recipe(specs, encode, str(fmt), {"block": size, "shape": source.shape}, source.module)


def configuration(recipes: Sequence[Recipe], plain: Sequence[str]) -> dict[str, Any]:
    """One block for all modules."""
    if not recipes:
        return {}
    blocked = [made for made in recipes if made.said["block"]]
    block = same(blocked, "block", "fine-grained FP8")
    for made in recipes:  # a scale of a whole matrix is one of a block that holds it
        tall, wide = made.said["shape"]
        if block and not made.said["block"] and (tall > block[0] or wide > block[1]):
            raise ValueError(f"fine-grained FP8 has one block, {block}, and {made.module} has none")
    return {
        "quantization_config": {
            "quant_method": KIND,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": block and list(block),
            "modules_to_not_convert": list(plain),
        }
    }
