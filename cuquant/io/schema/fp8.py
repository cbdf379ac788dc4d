"""Weights of 8-bit floats with scales that multiply: transformers' "fp8" and FBGEMM's.

weight F8_E4M3 [N, K]; weight_scale_inv [ceil(N / bm), ceil(K / bn)], which multiplies despite its
name, or weight_scale [N, 1]. Source: transformers 5, integrations/finegrained_fp8 and fbgemm_fp8.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cuquant.formats import get_format
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.safetensors import TensorInfo
from cuquant.io.schema.layer import (
    Layer,
    Parts,
    Unread,
    attempt,
    model_dtype,
    refuse,
    stems,
)
from cuquant.io.schema.pieces import extent_of

KIND = "fp8"
METHODS = ("fp8", "fbgemm_fp8")
SCALES = ("weight_scale_inv", "weight_scale")
FORMATS = {"F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"}


def recognises(c: Checkpoint) -> bool:
    """By its configuration, or weights beside weight_scale_inv."""
    if c.method:
        return c.method in METHODS
    return any(stem + "weight" in c for stem in stems(c, SCALES[0]))


def layers(c: Checkpoint) -> Iterator[Layer | Unread]:
    """Modules whose weight is of 8-bit floats and has a scale."""
    block = c.quantization.get("weight_block_size")
    for end in SCALES:
        for stem in stems(c, end):
            if stem + "weight" in c and c.info(stem + "weight").dtype in FORMATS:
                codes, scales = c.info(stem + "weight"), c.info(stem + end)
                yield attempt(codes.name, layer, c, codes, scales, block)


def layer(c: Checkpoint, codes: TensorInfo, scales: TensorInfo, block: object) -> Layer:
    """Codes with scales of a tensor, of rows or of blocks [bm, bn]."""
    if codes.dtype not in FORMATS or not codes.shape:
        raise refuse(codes.name, f"codes of {codes.dtype}{list(codes.shape)} are no 8-bit floats")
    extent = extent_of(codes.shape, scales.shape, codes.name, tile=block)
    fmt = get_format(FORMATS[codes.dtype], block_size=extent)

    def parts() -> Parts:
        return {
            "packed": c.read(codes.name).view(np.uint8),
            "scale": as_float32(c.read(scales.name), scales),
        }

    names = (codes.name, scales.name)
    return Layer(codes.name, fmt, codes.shape, model_dtype(c, scales), names, parts)


def as_float32(scales: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Scales as float32: floats, or the exponents of powers of two."""
    if info.dtype in ("F8_E8M0", "U8"):
        bits = np.maximum(scales.view(np.uint8).astype(np.int32) << 23, 1 << 22)  # 0 is 2^-127
        return np.where(bits == 255 << 23, np.float32(np.nan), bits.view(np.float32))
    if info.dtype not in ("F32", "BF16", "F16"):
        raise refuse(info.name, f"scales of dtype {info.dtype} are unknown")
    return scales.astype(np.float32)
