"""NVIDIA ModelOpt's exported checkpoints.

FP8: weight F8_E4M3, weight_scale [], [N], or of blocks [N / bm, 1, K / bn, 1]. NVFP4: weight U8
[N, K / 2], weight_scale F8_E4M3 [N, K / 16], weight_scale_2 []: both multiply. MXFP4: weight U8,
weight_scale U8. INT4: weight U8 [N / 2, K], rows 2 j in the low nibbles and 2 j + 1 in the high
ones, two's complement; weight_scale F32 [N, K / 128]. AWQ's have pre_quant_scale [K] too, which
stays a tensor: x is multiplied by it before the product. Source: nvidia-modelopt 0.47, export.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cuquant.formats import get_format
from cuquant.formats.packing import Packing
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.safetensors import TensorInfo
from cuquant.io.schema import fp8
from cuquant.io.schema.layer import (
    Found,
    Layer,
    Parts,
    attempt,
    model_dtype,
    refuse,
    scale_dtype,
    stems,
)
from cuquant.io.schema.pieces import block_floats

KIND = "modelopt"
PRE_SCALE = "pre_quant_scale"
PRE_NOTE = f"x is multiplied by {PRE_SCALE} before the product with this weight"


def recognises(c: Checkpoint) -> bool:
    """By its configuration, or two scales that multiply."""
    if c.method:
        return c.method.startswith("modelopt")
    if "producer" in c.json("hf_quant_config.json"):
        return True
    return any(stem + "weight_scale" in c for stem in stems(c, "weight_scale_2"))


def layers(c: Checkpoint) -> Iterator[Found]:
    """Modules whose weight has a scale."""
    for stem in stems(c, "weight_scale"):
        if stem + "weight" in c:
            yield attempt(stem + "weight", _layer, c, stem)


def _layer(c: Checkpoint, stem: str) -> Layer:
    made, scale = _codes(c, stem), stem + PRE_SCALE
    if scale not in c:
        return made
    if c.info(scale).shape not in ((made.shape[-1],), (1, made.shape[-1])):
        raise refuse(made.name, f"{PRE_SCALE} {list(c.info(scale).shape)} is none of its columns")
    return replace(made, notes=(*made.notes, PRE_NOTE))


def _codes(c: Checkpoint, stem: str) -> Layer:
    codes, scales = c.info(stem + "weight"), c.info(stem + "weight_scale")
    if codes.dtype in fp8.FORMATS:
        return _floats(c, codes, scales)
    if codes.dtype == "U8" and stem + "weight_scale_2" in c and scales.dtype == "F8_E4M3":
        whole = (stem + "weight_scale_2", np.positive)
        return block_floats(c, codes.name, "nvfp4", codes, scales, model_dtype(c), whole)
    if codes.dtype == "U8" and scales.dtype in ("U8", "F8_E8M0"):
        return block_floats(c, codes.name, "mxfp4", codes, scales, model_dtype(c))
    if codes.dtype == "U8" and len(scales.shape) == 2:
        return _int4(c, stem, codes, scales)
    raise refuse(codes.name, f"codes of {codes.dtype} with scales of {scales.dtype} are unknown")


def _floats(c: Checkpoint, codes: TensorInfo, scales: TensorInfo) -> Layer:
    if len(scales.shape) != 4:
        return fp8.layer(c, codes, scales, None)
    if len(codes.shape) != 2:
        raise refuse(codes.name, f"weights {list(codes.shape)} have blocks of a matrix")
    rows, columns = codes.shape
    tall, wide = rows // max(scales.shape[0], 1), columns // max(scales.shape[2], 1)
    flat = TensorInfo(scales.name, scales.dtype, scales.shape[::2], scales.offset, scales.nbytes)
    return fp8.layer(c, codes, flat, (tall, wide))


def _int4(c: Checkpoint, stem: str, codes: TensorInfo, scales: TensorInfo) -> Layer:
    if len(codes.shape) != 2:
        raise refuse(codes.name, f"codes {list(codes.shape)} are none of a matrix")
    pairs, depth = codes.shape
    groups = scales.shape[1]
    if scales.shape[0] != 2 * pairs or depth % max(groups, 1):
        raise refuse(codes.name, f"scales {list(scales.shape)} do not fit {list(codes.shape)}")
    kept = scale_dtype(scales, "scales")
    fmt = get_format("int4", block_size=depth // groups, scale_dtype=kept)

    def parts() -> Parts:
        stored = c.read(codes.name)
        rows = np.stack([stored & 15, stored >> 4], axis=1).reshape(2 * pairs, depth)
        packed = Packing(4, "low").pack(rows ^ np.uint8(8), fmt.zero_code)
        return {"packed": packed, "scale": c.read(scales.name)}

    names = (codes.name, scales.name)
    return Layer(codes.name, fmt, (2 * pairs, depth), model_dtype(c), names, parts)
