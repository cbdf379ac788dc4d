"""Products by matmul/stream.cu: how they are divided, gated units and bounds."""

from typing import Any
from unittest import mock

import numpy as np
from fragment_products import (
    Expected,
)
from products import UNIT, normal, weight

import cuquant as cq
from cuquant.ops.matmul import stream
from cuquant.ops.matmul.stream import Shape


def divided(numbers: tuple[int, ...]) -> Any:
    """The rule names these tokens, tiles, strips, depth, split, strips taken, and units ahead."""
    rule = stream.divide

    def divide(*problem: Any, **options: Any) -> Shape:
        found = rule(*problem, **options)
        assert found is not None
        return Shape(*numbers[:6], *(numbers[6:] or (found.ahead,)))

    return mock.patch.object(stream, "divide", divide)


def gated(first: str, second: str, options: dict) -> tuple[cq.QuantArray, cq.QuantArray]:
    up = cq.quantize(normal((70, 256), seed=5), cq.get_format(second, **options))
    return weight(first, (70, 256), **options), up


def swiglu_bound(
    x: np.ndarray, gate: cq.QuantArray, up: cq.QuantArray, unit: float | None = None
) -> tuple:
    """The exact result and how far off it may be: |silu'| < 1.1 and |silu(a)| <= |a|."""
    a, b = (Expected.of(x, w, unit) for w in (gate, up))
    true = a.sums / (1 + np.exp(-a.sums)) * b.sums
    off_a, off_b = (UNIT * (x.shape[1] + 24) * (e.size + e.off) + e.off for e in (a, b))
    bound = 1.1 * off_a * (np.abs(b.sums) + off_b) + np.abs(a.sums) * off_b
    return true, bound + 8 * UNIT * np.abs(true)
