"""QuantArrays of random numbers, by format."""

import numpy as np

import cuquant as cq

NAMES = cq.list_formats()
BLOCKED = [n for n in NAMES if cq.get_format(n).is_blocks]
OWN = [n for n in NAMES if n not in BLOCKED]


def make(name: str, shape=(4, 512), **options) -> cq.QuantArray:
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    if name == "nvfp4":
        options.setdefault("global_scale", 0.01)
    return cq.quantize(x, name, **options)
