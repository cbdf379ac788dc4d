"""Activation functions in float32, for NumPy and CuPy arrays alike."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

# erf(x) = x P(x^2) / Q(x^2) on |x| <= 4, lowest power first: a relative minimax fit by
# Lawson-weighted least squares, relative error 2.6e-9. All coefficients are positive, so
# nothing cancels.
_ERF_LIMIT = 4.0  # erf(4) = 1 - 1.5e-8, which rounds to 1 in float32
_ERF_P = (4331781.5792, 740450.36478, 214019.37560, 16225.266416, 1578.8776438, 26.071855751)
_ERF_Q = (3838941.4609, 1935854.5898, 451057.95999, 62556.147329, 5455.9420403, 278.57007340, 1.0)

_CHUNK = 16384  # elements; erf's four float64 temporaries take 512 KiB, inside an L2 cache


def erf(x: Any, xp: ModuleType = np) -> Any:
    """The error function, elementwise.

    Parameters
    ----------
    x
        Array of floats of the array module `xp`; NaN gives NaN.

    Returns
    -------
    Array of x's shape and dtype. The arithmetic is float64: the absolute error is below 1.6e-8
    before the result is rounded to x's dtype.
    """
    t = xp.clip(x.astype(np.float64), -_ERF_LIMIT, _ERF_LIMIT)
    s = t * t
    t *= _polynomial(_ERF_P, s)
    t /= _polynomial(_ERF_Q, s)
    return t.astype(x.dtype)


def _polynomial(coefficients: Sequence[float], s: Any) -> Any:
    """A polynomial, lowest power first, by Horner's rule in one buffer."""
    *lower, highest = coefficients
    value = s * 0 + highest
    for coefficient in reversed(lower):
        value *= s
        value += coefficient
    return value


def gelu(x: Any, xp: ModuleType = np) -> Any:
    """x / 2 * (1 + erf(x / sqrt 2)), the exact GELU (Hendrycks and Gimpel), of float32 `x`."""
    flat = xp.ascontiguousarray(x).reshape(-1)
    out = xp.empty_like(flat)
    # NumPy makes one pass over memory per operation, so it gets pieces that stay in the cache;
    # a GPU gets everything at once.
    chunk = _CHUNK if xp is np else max(flat.size, 1)
    for start in range(0, flat.size, chunk):
        piece = flat[start : start + chunk]
        value = erf(piece * np.float32(0.5**0.5), xp)
        value += np.float32(1)
        value *= piece * np.float32(0.5)  # half first: x may be the largest
        out[start : start + chunk] = value
    return out.reshape(x.shape)


def relu(x: Any, xp: ModuleType = np) -> Any:
    """max(x, 0); NaN stays."""
    return xp.maximum(x, np.float32(0))


def silu(x: Any, xp: ModuleType = np) -> Any:
    """x / (1 + exp(-x)), of float32 `x`."""
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, -0
        return x / (np.float32(1) + xp.exp(-x))


ACTIVATIONS: dict[str, Callable[..., Any]] = {"relu": relu, "gelu": gelu, "silu": silu}
