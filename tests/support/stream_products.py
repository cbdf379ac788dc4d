"""Products by matmul/stream.cu: how they are divided, gated units and bounds, codes by rows."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from fragment_products import Case, Expected, with_scale
from oracle import bits_equal
from products import UNIT, normal, values, weight

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


def swiglu_bound(x: np.ndarray, gate: cq.QuantArray, up: cq.QuantArray) -> tuple:
    """The exact result and how far off it may be: |silu'| < 1.1 and |silu(a)| <= |a|."""
    a, b = (Expected.of(x, w) for w in (gate, up))
    true = a.sums / (1 + np.exp(-a.sums)) * b.sums
    off_a, off_b = (UNIT * (x.shape[1] + 24) * (e.size + e.off) + e.off for e in (a, b))
    bound = 1.1 * off_a * (np.abs(b.sums) + off_b) + np.abs(a.sums) * off_b
    return true, bound + 8 * UNIT * np.abs(true)


# ---- weights by rows with several groups in a unit ----------------------------------------------

# Formats and columns that share a scale of float16.
ROW_GROUPS = [
    (name, block)
    for bits in range(2, 8)
    for name in (f"int{bits}", f"uint{bits}")
    for block in (16, 32)
]
ROW_GROUPS += [("k2", 32), *((name, 16) for name in ("k2", "k3", "k5", "k6", "k7", "fp6_e3m2"))]
# Integers, whose scales may be large.
LARGE = [
    Case(name, dtype, rows, (20, 512), options=(("block_size", block),))
    for name, block, dtype, rows in (
        ("int2", 16, "float16", 2),
        ("uint3", 32, "float16", 5),
        ("int4", 16, "float16", 2),
        ("int3", 16, "bfloat16", 5),
        ("uint5", 16, "bfloat16", 3),
    )
]
Linear = Callable[[np.ndarray, cq.QuantArray], np.ndarray]  # to float32


def check_large_scales(linear: Linear, case: Case, on_gpu: bool = False) -> None:
    """Weights beyond float16 are not lost, and change no results of other rows."""
    x, q = case.x * case.x.dtype.type(2.0**-10), case.weight
    scale, usual = q.arrays()["scale"].copy(), q.arrays()["scale"]
    for row, at, value in ((3, 5, 65504), (3, 15, -40000), (9, 0, 300), (12, 9, 255), (17, -1, 2)):
        scale[row, at] = value
    large = with_scale(q, scale)
    y, before = (linear(x, w) for w in (large, q))
    assert np.abs(values(large)).max() > 65504 and np.isfinite(y).all()
    assert Expected.of(x, large).admits(y, case.shape[1], on_gpu=on_gpu)
    same = (scale == usual).all(axis=1)
    assert same.sum() == len(scale) - 4 and bits_equal(y[:, same], before[:, same])


def check_columns(linear: Linear, case: Case) -> None:
    """A row of x that is 1 in one column has that column's weights for results, as they are."""
    x, columns = np.zeros_like(case.x), 97 * np.arange(case.rows) % case.shape[1]
    x[np.arange(case.rows), columns] = 1
    assert bits_equal(linear(x, case.weight), case.weight.dequantize().T[columns])
