"""LLM.int8(), of Dettmers et al., arXiv 2208.07339, as bitsandbytes computes it."""

import math
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.errors import clipped
from cuquant.functional.checks import floats, like, typed
from cuquant.ops import llm_int8 as on_gpu
from cuquant.reference import llm_int8 as reference


@interop.untraced
def quantize_llm_int8(x: Any, threshold: float = 6.0) -> tuple[Any, Any, Any]:
    """Rows of x as int8 with one scale each, but for columns with outliers.

    Parameters
    ----------
    x
        NumPy, CuPy or torch array [..., K] of float32, float16 or bfloat16, read as float16.
    threshold
        Elements of this size and above are outliers; it is rounded to float16. 0: there are none.

    Returns
    -------
    codes
        int8 of x's shape: rint(x * (127 / absmax)), 0 in columns that hold an outlier.
    absmax
        float32 [...], the largest size of a row's elements that are no outliers. Where it is 0 or
        not finite the row's codes are 0, but NaN is no outlier and makes absmax NaN.
    outliers
        bool [K]: the columns of outliers.

    Raises
    ------
    TypeError
        Where x is no array of these dtypes.
    ValueError
        For a 0-d x, or a threshold below 0 or NaN.

    Notes
    -----
    Bits are those of bitsandbytes' int8_vectorwise_quant on the CPU, everywhere; its kernel for
    GPUs divides with less precision. The format "int8+absmax" is the same idea for weights, with
    codes rint(x / (absmax / 127)), which may be one off at ties. Nothing waits for a GPU.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.array([[1, -2, 0.5, 70]], np.float16)
    >>> codes, absmax, outliers = cq.functional.quantize_llm_int8(x)
    >>> codes, absmax, outliers.nonzero()[0]
    (array([[  64, -127,   32,    0]], dtype=int8), array([2.], dtype=float32), array([3]))
    """
    given, size = _rows(x), _threshold(threshold)
    shape = tuple(given.shape)
    rows = given.reshape(math.prod(shape[:-1]), shape[-1])
    if interop.is_on_gpu(given):
        codes, absmax, outliers = on_gpu.quantized(rows, size)
        found = codes, absmax, interop.viewed(outliers, np.bool_)
    else:
        found = (like(part, x) for part in reference.quantize(interop.to_numpy(rows, "x"), size))
    codes, absmax, outliers = found
    return codes.reshape(shape), absmax.reshape(shape[:-1]), outliers


@interop.traced
def llm_int8_linear(
    x: Any, weight: Any, absmax: Any, bias: Any = None, *, threshold: float = 6.0
) -> Any:
    """x @ w.T + bias for w = weight * absmax / 127: integers multiply, but for outliers in x.

    Parameters
    ----------
    x
        NumPy, CuPy or torch array [..., K] of float32, float16 or bfloat16.
    weight
        int8 [N, K], as `quantize_llm_int8(w, 0)` and the format "int8+absmax" have it.
    absmax
        float32 [N] or [N, 1], the largest sizes of the weight's rows ("SCB").
    bias
        [N] of float32, float16 or bfloat16, or None.
    threshold
        Columns of x with an element of this size or above are multiplied as floats. 0: none.

    Returns
    -------
    [..., N] of x's dtype, kind and device.

    Raises
    ------
    TypeError
        For arrays of other dtypes.
    ValueError
        For shapes that do not fit, or a threshold below 0 or NaN.

    Notes
    -----
    int32 sums times (absmax of x * absmax) / 127^2, plus the bias, rounded to x's dtype; then the
    columns of outliers are multiplied in x's own dtype with the int8 weight's values, and added. On
    the CPU the first step has the bits of bitsandbytes' operator, with its constant for 1 / 127^2,
    which is 2e-5 too large; on a GPU the constant is that of its kernel. There the second product
    reads the whole weight again, so that nothing waits for the number of outliers.

    Gradients flow back to x, as those of x @ w.T, and to the bias.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> weight, absmax, _ = cq.functional.quantize_llm_int8(np.eye(2, dtype=np.float16), 0)
    >>> x = np.array([[1, 70], [2, 8]], np.float16)
    >>> cq.functional.llm_int8_linear(x, weight, absmax)
    array([[ 1., 70.],
           [ 2.,  8.]], dtype=float16)
    """
    arguments = x, weight, absmax, bias, threshold
    if (found := on_gpu.again(*arguments)) is not None:
        return found
    if interop.wants_gradient(x, bias):
        made = interop.by_operator("llm_int8_linear")
        return made(x, weight, absmax, bias, threshold=threshold)
    given, size = _rows(x), _threshold(threshold)
    codes = typed(weight, "weight", np.int8, near=x)
    peaks = typed(absmax, "absmax", np.float32, near=x)
    interop.refuse_gradient(peaks, "absmax")
    added = None if bias is None else floats(bias, "bias", x)
    of_bias = None if added is None else added.shape
    shape = check_shapes(given.shape, codes.shape, peaks.shape, of_bias)
    if interop.is_on_gpu(given):
        return on_gpu.linear(given, codes, peaks, added, size, arguments)
    rows = interop.to_numpy(given).reshape(math.prod(shape[:-1]), given.shape[-1])
    host = None if added is None else interop.to_numpy(added)
    sizes = interop.to_numpy(peaks).reshape(-1)
    y = reference.linear(rows, interop.to_numpy(codes), sizes, host, size)
    return like(y.reshape(shape), x)


def check_shapes(x: Any, weight: Any, absmax: Any, bias: Any) -> tuple[int, ...]:
    """The product's shape, of those of its arrays; ValueError where they do not fit."""
    if len(weight) != 2:
        raise ValueError(f"weight has shape {tuple(weight)}; it must be [N, K]")
    columns, depth = weight
    if not len(x) or x[-1] != depth:
        raise ValueError(
            f"x has shape {tuple(x)}; with weight {tuple(weight)} its last axis must be {depth}"
        )
    of_rows = absmax[:1] if tuple(absmax[1:]) == (1,) else absmax
    for name, shape in (("absmax", of_rows), ("bias", bias)):
        if shape is not None and tuple(shape) != (columns,):
            raise ValueError(
                f"{name} has shape {tuple(shape)}; it must be ({columns},), one a row of weight"
            )
    return (*x[:-1], columns)


def _rows(x: Any) -> Any:
    found = floats(x, "x", x)
    if found.ndim == 0:
        raise ValueError("x is 0-d; it needs at least one axis (x.reshape(1))")
    return found


def _threshold(value: Any) -> float:
    if not isinstance(value, (int, float, np.integer, np.floating)) or not value >= 0:
        raise ValueError(f"threshold must be a number that is not negative, got {clipped(value)}")
    return float(value)
