"""gpt-oss: experts of MXFP4.

experts.NAME_blocks U8 [E, N, K / 32, 16], the low nibble first, and NAME_scales U8 [E, N, K / 32]:
w = e2m1 * 2^(scale - 127). transformers' parameter NAME is the transpose. Source: transformers 5,
integrations/mxfp4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cuquant.io.checkpoint import Checkpoint
from cuquant.io.schema.layer import Layer, model_dtype, refuse
from cuquant.io.schema.pieces import block_floats

KIND = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"


def _names(c: Checkpoint) -> Iterator[str]:
    for name in c:
        stem = name.removesuffix(BLOCKS)
        if stem != name and stem + SCALES in c and c.info(name).dtype == "U8":
            yield stem


def recognises(c: Checkpoint) -> bool:
    """By its configuration, or blocks beside scales."""
    return c.method == "mxfp4" if c.method else any(True for _ in _names(c))


def layers(c: Checkpoint) -> Iterator[Layer]:
    """Parameters that are stored as blocks and scales."""
    for name in _names(c):
        blocks, scales = c.info(name + BLOCKS), c.info(name + SCALES)
        if len(blocks.shape) < 3 or blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]:
            raise refuse(name, f"blocks {list(blocks.shape)} and scales {list(scales.shape)}")
        flat = replace(blocks, shape=(*blocks.shape[:-2], blocks.shape[-2] * 16))
        yield block_floats(c, name, "mxfp4", flat, scales, model_dtype(c))
