"""Kinds of checkpoints, one module each: what its tensors mean, and how to recognise it.

A kind is a module with KIND, `recognises(checkpoint)` and `layers(checkpoint)`; see layer.py.
"""

from cuquant.io.checkpoint import Checkpoint
from cuquant.io.schema import (
    awq,
    bitsandbytes,
    comfyui,
    compressed_tensors,
    fp8,
    gptq,
    hqq,
    mlx,
    modelopt,
    mxfp4,
    quanto,
    torchao,
)
from cuquant.io.schema.layer import Layer, Schema

SCHEMAS: tuple[Schema, ...] = (
    torchao, comfyui, gptq, awq, compressed_tensors, bitsandbytes, modelopt, mxfp4, fp8, hqq,
    quanto, mlx,
)  # fmt: skip
"""The first that recognises a checkpoint reads it."""

__all__ = ["SCHEMAS", "Checkpoint", "Layer", "Schema", "schema_of"]


def schema_of(c: Checkpoint) -> Schema | None:
    """The kind of a checkpoint; None for one of float weights."""
    return next((schema for schema in SCHEMAS if schema.recognises(c)), None)
