"""How far quantized values are from the true ones."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cuquant import interop
from cuquant.array.components import Stored
from cuquant.array.packed_weight import PackedWeight, unpack
from cuquant.array.quant_array import QuantArray


class Error(NamedTuple):
    """What quantization changed.

    Attributes
    ----------
    sqnr_db
        Signal to quantization noise, 10 log10(sum x^2 / sum (x - x')^2), dB; inf where equal.
    max_error
        max |x - x'|.
    cosine
        Of x and x' as flat vectors; 1 where both are zero.
    """

    sqnr_db: float
    max_error: float
    cosine: float


def error(x: Any, q: Any) -> Error:
    """SQNR, largest error and cosine of a quantized array against the values it came from.

    Parameters
    ----------
    x
        The true values, an array.
    q
        QuantArray, PackedWeight or array of x's shape. Either may be on a GPU: q is decoded there,
        and the sums are taken on the CPU, in float64.

    Returns
    -------
    Error
        (sqnr_db, max_error, cosine); all NaN where x or q holds a NaN.

    Raises
    ------
    TypeError
        Where x is quantized, or one of the two is no array.
    ValueError
        Where the shapes differ.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.array([[1.0, -1.0, 0.5, 0.25] * 16], np.float32)
    >>> cq.error(x, cq.quantize(x, "fp16"))
    Error(sqnr_db=inf, max_error=0.0, cosine=1.0)
    """
    if isinstance(x, Stored):
        better = "error(x.dequantize(), q)" if isinstance(q, Stored) else "error(q, x)"
        raise TypeError(
            f"x is a {type(x).__name__}, and the true values come first: call cuquant.{better}"
        )
    true = _checked(x, "x")
    whole = unpack(q) if isinstance(q, PackedWeight) else q
    found = whole.dequantize(dtype=np.float32) if isinstance(whole, QuantArray) else whole
    found = _checked(found, "q")
    shape, other = tuple(true.shape), tuple(found.shape)
    if shape != other:
        raise ValueError(f"x has shape {shape} and q {other}; they must be equal")
    signal = noise = product = energy = largest = 0.0
    with np.errstate(invalid="ignore"):
        for a, b in zip(_pieces(true), _pieces(found), strict=True):
            gap = a - b
            signal, energy = signal + float(a @ a), energy + float(b @ b)
            product, noise = product + float(a @ b), noise + float(gap @ gap)
            largest = float(np.maximum(largest, np.abs(gap).max(initial=0.0)))
    if math.isnan(noise):
        return Error(math.nan, math.nan, math.nan)
    sqnr = sqnr_db(signal, noise)
    both = math.sqrt(signal * energy)
    cosine = min(1.0, product / both) if both else float(signal == energy)
    return Error(sqnr, largest, cosine)


def sqnr_db(signal: float, noise: float) -> float:
    """10 log10(signal / noise) of two sums of squares; inf without noise, NaN where one is NaN.

    >>> sqnr_db(100.0, 1.0), sqnr_db(0.0, 0.0), sqnr_db(0.0, 1.0), sqnr_db(1.0, math.inf)
    (20.0, inf, -inf, -inf)
    """
    if math.isnan(noise) or math.isnan(signal):
        return math.nan
    if noise == 0:
        return math.inf
    ratio = signal / noise  # 0 of infinite noise too
    return 10 * math.log10(ratio) if ratio else -math.inf


def _checked(x: Any, name: str) -> Any:
    """An array on the CPU as NumPy's, one on a GPU as it is."""
    found = interop.as_array(x, name)
    found = found if interop.is_on_gpu(found) else interop.to_numpy(found, name)
    if interop.dtype_of(found).kind == "c":
        raise TypeError(f"{name} is complex; its real and imaginary parts have errors of their own")
    return found


def _pieces(x: Any, size: int = 1 << 20) -> Iterator[np.ndarray]:
    """Flat float64 pieces in C order."""
    flat, count = x.reshape(-1), math.prod(x.shape)
    for start in range(0, count, size):
        yield interop.to_host(flat[start : start + size]).astype(np.float64)
