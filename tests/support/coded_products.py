"""Products of two quantized arrays: which are tested, and their bound."""

from typing import Any

import numpy as np
from products import exact, is_close, normal, values

import cuquant as cq
from cuquant.ops.matmul.coded import codes_of

# x's format, the weights' and M, N, K: every tile, ragged ends, scales of every kind on both sides.
CASES = (
    ("int8", "int8", (3, 20, 64)),
    ("int8:tensor", "int8", (17, 70, 131)),
    ("int8:32", "int8:128", (40, 33, 300)),
    ("int8", "int4", (8, 35, 256)),
    ("int4", "int4:32", (65, 130, 96)),
    ("uint8:row", "uint8:row", (5, 7, 50)),
    ("uint8:32", "int4", (70, 130, 256)),
    ("int8", "uint8:64", (9, 40, 200)),
    ("uint8:row", "int8:tensor", (130, 9, 70)),
    ("int3", "uint5", (4, 12, 131)),
    ("int1", "int1", (4, 9, 100)),
    ("int8", "int1", (4, 9, 64)),
    ("int1", "int1", (7, 9, 128)),
    ("int1", "int1:tensor", (40, 33, 384)),
    ("int1:row", "int1", (130, 70, 1152)),
    ("fp8_e4m3", "fp8_e5m2", (40, 33, 96)),
    ("fp8_e5m2:tensor", "fp8_e4m3:tensor", (2, 5, 33)),
    ("fp8_e4m3:128", "fp8_e4m3:128x128", (9, 150, 300)),
    ("fp8_e4m3:1x128", "fp8_e4m3:1x128", (66, 20, 256)),
    ("mxfp8", "mxfp8", (20, 40, 80)),
    ("nvfp4", "mxfp8", (20, 40, 80)),
    ("mxfp4", "nvfp4", (3, 40, 100)),
    ("fp8_e4m3", "fp4_e2m1", (3, 40, 100)),
    ("mxfp6", "mxfp6_e3m2", (3, 24, 64)),
    ("fp8_e4m3", "int4", (4, 24, 256)),
    ("uint4", "fp8_e4m3", (4, 9, 256)),
)


def pair(case: tuple[str, str, tuple[int, int, int]]) -> tuple[cq.QuantArray, cq.QuantArray]:
    first, second, (m, n, k) = case
    return cq.quantize(normal((m, k)), first), cq.quantize(normal((n, k), seed=5), second)


def check(y: np.ndarray, x: Any, w: Any, roundings: int = 4) -> None:
    """Sums of codes are exact or float32 sums; scales, and their product, are rounded."""
    wanted, size = exact(x, w)
    assert y.shape == wanted.shape and y.dtype == np.float32
    assert is_close(y, wanted, size, values(w).shape[-1] + roundings)


def with_scales(w: cq.QuantArray, scale: np.ndarray) -> cq.QuantArray:
    """The same codes; where a byte is negative a group of zeros, whose scale is its opposite."""
    codes = w.codes()
    zero = np.repeat(scale < 0, w.format.scale.block, axis=-1)[..., : w.shape[-1]]
    kept = np.where(zero, 0, codes).astype(np.uint8).reshape(-1, w.shape[-1])
    packed = w.format.row_packing.pack(kept, 0).reshape(*w.shape[:-1], -1)
    parts = {**w.arrays(), "packed": packed, "scale": np.abs(scale).astype(np.uint8)}
    return cq.QuantArray(w.format, w.shape, w.dtype, parts, w.axes)


def scales_far_apart(rows: int, groups: int) -> dict[str, np.ndarray]:
    """Bytes of e8m0 scales, which operands have no room for together: see with_scales."""
    rng = np.random.default_rng(rows)
    near = rng.integers(118, 130, (rows, groups))
    some = rng.random((rows, groups))
    return {
        "within 11 octaves": near,
        "11 or 12 octaves": np.where(some < 0.3, 127 - 11 - (some < 0.15), 127),
        "any": rng.integers(70, 180, (rows, groups)),
        "zeros with the smallest": np.where(some < 0.3, 0, near) * np.where(some < 0.3, -1, 1),
        "zeros with the largest": np.where(some < 0.3, -254, near),
        "one is large": np.where(np.arange(groups) == groups // 2, 180, near),
        "the last is small": np.where(np.arange(groups) == groups - 1, 90, near),
        "the smallest": np.where(some < 0.5, 0, 3),
        "one row": np.where(
            np.arange(rows)[:, None] == rows - 1, rng.integers(70, 180, groups), near
        ),
    }


def check_on_gpu(y: np.ndarray, x: Any, w: Any) -> None:
    """The same; but Hopper's tensor cores add 32 products of small floats to a sum with 13 bits
    behind the largest of them: what is cut off each of the 33 is less than 2^-13 of it."""
    kinds = codes_of(x.format, w.format)
    if kinds is None or not kinds[0].startswith("fp8"):
        return check(y, x, w)
    wanted, size = exact(x, w)
    steps = -(-values(w).shape[-1] // 32)
    off = np.abs(y - wanted)
    assert y.shape == wanted.shape and y.dtype == np.float32
    assert (off <= 33 * steps * 2.0**-13 * size).all()
    # Errors of many steps have both signs: of all results together they are as small as this.
    assert np.linalg.norm(off) <= 2.0**-8 * np.linalg.norm(wanted)
    return None


def check_rows_on_gpu(y: np.ndarray, x: Any, w: Any, ids: np.ndarray, others: float) -> None:
    """The same of grouped products: each row of y is of the expert that `ids` name, or `others`."""
    for row, expert in enumerate(ids):
        if expert < 0:
            assert np.array_equal(y[row], np.full(len(y[row]), others), equal_nan=True)
        else:
            check_on_gpu(y[row : row + 1], x[row : row + 1], w[int(expert)])
