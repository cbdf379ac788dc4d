"""The command line in this process, and plain files for it."""

import ml_dtypes
import numpy as np
from typer.testing import CliRunner

from cuquant.cli import app
from cuquant.io.container.safetensors import SafetensorsWriter, tag_of

WEIGHTS = {
    "layer.0.weight": "float32", "layer.1.weight": "float16", "head.weight": "bfloat16"
}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write(path, arrays, metadata=None):
    """A plain safetensors file, without anything of cuquant's in its metadata."""
    specs = {name: (tag_of(a.dtype), a.shape) for name, a in arrays.items()}
    with SafetensorsWriter(path, specs, metadata) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
    return path


def model_arrays():
    rng = np.random.default_rng(7)
    shapes = ((64, 256), (32, 512), (8, 256))
    arrays = {
        name: rng.standard_normal(shape, dtype=np.float32).astype(np.dtype(dtype))
        for (name, dtype), shape in zip(WEIGHTS.items(), shapes, strict=True)
    }
    payload = np.array([0x7FC00001, 0x7F800000, 0x80000000], np.uint32).view(np.float32)
    kept = {
        "norm.bias": payload,  # a NaN with a payload, infinity, -0.0
        "ids": np.arange(6).reshape(2, 3),
        "mask": np.array([[True, False]]),
        "tiny": np.arange(4, dtype=np.uint8).reshape(2, 2).view(ml_dtypes.float4_e2m1fn),
    }
    return arrays | kept
