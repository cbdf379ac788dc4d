"""LLM.int8(), arXiv 2208.07339: rows of x as int8, and the product with int8 weights.

The arithmetic is that of bitsandbytes' operators for the CPU, rounding by rounding.
"""

from typing import NamedTuple

import numpy as np

from cuquant.formats.scales import INVERSE_127

F32 = np.float32
# What its operator for the CPU multiplies by: 1 / 127^2, but for the last digits.
INVERSE_SQUARE = F32(6.200124e-05)


class Eight(NamedTuple):
    """Rows as LLM.int8() multiplies them.

    Attributes
    ----------
    codes
        int8 [M, K], 0 in the columns of outliers.
    absmax
        float32 [M]: the largest size of a row's elements that are no outliers.
    outliers
        bool [K]: of which columns.
    """

    codes: np.ndarray
    absmax: np.ndarray
    outliers: np.ndarray


def half_threshold(threshold: float) -> np.float16:
    """What float16 elements are compared with."""
    with np.errstate(over="ignore"):
        return np.float16(threshold)


def quantize(x: np.ndarray, threshold: float) -> Eight:
    """Of x [M, K]; a threshold of 0 leaves no outliers."""
    with np.errstate(all="ignore"):
        half = x.astype(np.float16)
        large = np.abs(half) >= half_threshold(threshold)
        large &= threshold > 0
        rest = np.where(large, np.float16(0), half).astype(F32)
        absmax = np.abs(rest).max(axis=1, initial=0)
        z = rest * (F32(1) / absmax * F32(127))[:, None]
    codes = np.where(np.isnan(z), F32(0), np.rint(z)).astype(np.int8)
    outliers = np.logical_or.reduce(large, axis=0)
    codes[:, outliers] = 0
    return Eight(codes, absmax, outliers)


def linear(
    x: np.ndarray,
    weight: np.ndarray,
    absmax: np.ndarray,
    bias: np.ndarray | None,
    threshold: float,
) -> np.ndarray:
    """x [M, K] times the transpose of int8 [N, K], whose rows' largest sizes are float32 [N]."""
    rows = quantize(x, threshold)
    with np.errstate(all="ignore"):
        whole = rows.codes.astype(np.float64) @ weight.astype(np.float64).T  # exact
        y = whole.astype(np.int64).astype(np.int32).astype(F32)
        y = y * (rows.absmax[:, None] * absmax) * INVERSE_SQUARE
        if bias is not None:
            y += bias.astype(F32)
        y = y.astype(x.dtype)
        if rows.outliers.any():
            columns = weight[:, rows.outliers].astype(F32) * absmax[:, None] * INVERSE_127
            apart = x[:, rows.outliers].astype(F32) @ columns.astype(x.dtype).astype(F32).T
            y = (y.astype(F32) + apart).astype(x.dtype)
    return y
