"""What a layer does to a row before it is quantized, and the quantization, in one call.

A kernel reads the row once; nothing is rounded to x's dtype between the two steps.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array.quant_array import QuantArray
from cuquant.formats import Format
from cuquant.formats.names import FormatName
from cuquant.functional.checks import floats, integer, like, number
from cuquant.ops.outputs import writable_out
from cuquant.ops.quantize.door import quantize
from cuquant.reference import silu

F32 = np.float32
CHUNK = 1 << 16  # elements whose squares are held in float64 at a time
SQUARES = 2.0**-126, float(np.finfo(F32).max)  # mean squares that float32 holds as well as any
UNIT = 2.0**100


def rmsnorm_quantize(
    x: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    format: FormatName | str | Format = "int8",
    **options: Any,
) -> QuantArray:
    """Quantize x / sqrt(mean(x^2) + eps) * weight, the mean along the last axis.

    Parameters
    ----------
    x
        NumPy or torch array [..., K] of float32, float16 or bfloat16.
    weight
        [K], of these dtypes.
    eps
        Added to the mean of squares; not negative.
    format
        Name or Format to quantize to.
    options
        Those of `cuquant.quantize`: block_size, scale, nonfinite, out, ...

    Returns
    -------
    QuantArray
        Of x's shape, kind and dtype.

    Raises
    ------
    TypeError
        For arrays of other dtypes.
    ValueError
        For shapes that do not fit, and what `cuquant.quantize` raises.

    Notes
    -----
    RMSNorm: Zhang and Sennrich, arXiv 1910.07467. The squares are added in float64 in index
    order and their mean is rounded once to float32; then (x * (1 / sqrt(mean + eps))) * weight
    in float32. A row whose mean + eps is not a normal float32 is multiplied by 2^100 or 2^-100
    before, so that values of 1e20 and more, whose squares overflow, are normalized as all others.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.array([[3.0, -4.0, 0.0, 0.0]], np.float32)
    >>> q = cq.functional.rmsnorm_quantize(x, np.ones(4, np.float32))
    >>> q.packed
    array([[  95, -127,    0,    0]], dtype=int8)
    >>> q.dequantize().round(2)
    array([[ 1.2, -1.6,  0. ,  0. ]], dtype=float32)
    """
    host = _rows(x, "x")
    values = _rmsnorm(host.astype(F32), _weight(weight, host), _eps(eps))
    return _quantize(values, x, format, options)


def add_rmsnorm_quantize(
    x: Any,
    residual: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    format: FormatName | str | Format = "int8",
    residual_out: Any = None,
    **options: Any,
) -> QuantArray:
    """`rmsnorm_quantize` of x + residual, with the sum kept for the next residual.

    Parameters
    ----------
    x, residual
        NumPy or torch arrays [..., K] of float32, float16 or bfloat16, of one shape.
    weight
        [K], of these dtypes.
    eps
        Added to the mean of squares; not negative.
    format
        Name or Format to quantize to.
    residual_out
        An array of x's shape, dtype and kind to write x + residual to; it may be x or residual.
    options
        Those of `cuquant.quantize`: block_size, scale, nonfinite, out, ...

    Returns
    -------
    QuantArray
        Of x's shape, kind and dtype.

    Raises
    ------
    TypeError
        For arrays of other dtypes.
    ValueError
        For shapes that do not fit, and what `cuquant.quantize` raises; residual_out is not
        written then.

    Notes
    -----
    The sum is float32, rounded once to x's dtype; what is normalized is this rounded sum.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.array([[1.0, -4.0]], np.float16)
    >>> residual = np.array([[2.0, 0.0]], np.float16)
    >>> q = cq.functional.add_rmsnorm_quantize(
    ...     x, residual, np.ones(2, np.float16), residual_out=residual
    ... )
    >>> residual, q.packed
    (array([[ 3., -4.]], dtype=float16), array([[  95, -127]], dtype=int8))
    """
    host, carried = _rows(x, "x"), _same_shape(residual, "residual", x)
    scale, small = _weight(weight, host), _eps(eps)
    target = None
    if residual_out is not None:
        kind = interop.kind(x) or "numpy"
        target = writable_out(residual_out, host.shape, kind, host.dtype, [])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        total = (host.astype(F32) + carried.astype(F32)).astype(host.dtype)
    result = _quantize(_rmsnorm(total.astype(F32), scale, small), x, format, options)
    if target is not None:
        target[...] = total
    return result


def silu_mul_quantize(
    gate: Any, up: Any, *, format: FormatName | str | Format = "int8", **options: Any
) -> QuantArray:
    """Quantize silu(gate) * up, the middle of a gated MLP.

    Parameters
    ----------
    gate, up
        NumPy or torch arrays of float32, float16 or bfloat16, of one shape.
    format
        Name or Format to quantize to.
    options
        Those of `cuquant.quantize`: block_size, axis, scale, nonfinite, out, ...

    Returns
    -------
    QuantArray
        Of gate's shape, kind and dtype.

    Raises
    ------
    TypeError
        For arrays of other dtypes.
    ValueError
        For shapes that do not fit, and what `cuquant.quantize` raises.

    Notes
    -----
    silu(g) = g / (1 + exp(-g)), in float32. SwiGLU: Shazeer, arXiv 2002.05202.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> gate, up = np.array([[0.0, 20.0]], np.float32), np.array([[5.0, 0.5]], np.float32)
    >>> cq.functional.silu_mul_quantize(gate, up).dequantize()
    array([[ 0., 10.]], dtype=float32)
    """
    left, right = _rows(gate, "gate"), _same_shape(up, "up", gate, "gate")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = silu(left.astype(F32)) * right.astype(F32)
    return _quantize(values, gate, format, options)


def hadamard_quantize(
    x: Any, *, group: int | None = None, format: FormatName | str | Format = "int8", **options: Any
) -> QuantArray:
    """Quantize the orthonormal Walsh-Hadamard transform along the last axis.

    The transform spreads an outlier over its group; it is its own inverse.

    Parameters
    ----------
    x
        NumPy or torch array [..., K] of float32, float16 or bfloat16.
    group
        Elements that are transformed together: a power of two that divides K. None: K.
    format
        Name or Format to quantize to.
    options
        Those of `cuquant.quantize`: block_size, scale, nonfinite, out, ...

    Returns
    -------
    QuantArray
        Of x's shape, kind and dtype, of the transformed values.

    Raises
    ------
    TypeError
        For an array of another dtype.
    ValueError
        For another group, and what `cuquant.quantize` raises.

    Notes
    -----
    y = H x / sqrt(group) with Sylvester's H, as in QuaRot, arXiv 2404.00456. Sums and
    differences are float32, of neighbours at distance 1, then 2, 4, ...; 1 / sqrt(group) is
    multiplied last.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.array([[4.0, 0.0, 0.0, 0.0]], np.float32)
    >>> cq.functional.hadamard_quantize(x).dequantize()
    array([[2., 2., 2., 2.]], dtype=float32)
    """
    host = _rows(x, "x")
    size = _group(group, host.shape[-1])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rows = host.astype(F32).reshape(-1, size)
        # Where sums may be beyond float32 a row is taken in other units, of a power of two.
        largest = np.abs(rows).max(axis=-1, keepdims=True, initial=0)
        unit = np.where(largest > np.finfo(F32).max / size, F32(1 / size), F32(1))
        values = _walsh_hadamard(rows * unit) * F32(1 / math.sqrt(size)) / unit
    return _quantize(values.reshape(host.shape), x, format, options)


def _rmsnorm(rows: np.ndarray, weight: np.ndarray, eps: np.float32) -> np.ndarray:
    """float32 of float32 rows [..., K]."""
    with np.errstate(all="ignore"):
        mean = _mean_square(rows)
        square = mean.astype(F32) + eps
        # Where squares leave float32's normal numbers the row is taken in other units.
        unit = np.where(square > SQUARES[1], 1 / UNIT, np.where(square < SQUARES[0], UNIT, 1.0))
        square = (mean * unit**2).astype(F32) + (eps * unit**2).astype(F32)
        inverse = F32(1) / np.sqrt(square)
        return (rows * unit.astype(F32) * inverse) * weight


def _mean_square(rows: np.ndarray) -> np.ndarray:
    """float64 [..., 1]: the mean of the squares, which are added in index order."""
    columns = rows.shape[-1]
    matrix = rows.reshape(-1, columns) if rows.size else rows.reshape(0, columns)
    mean = np.zeros((math.prod(rows.shape[:-1]), 1))
    step = max(CHUNK // max(columns, 1), 1)
    for start in range(0, len(matrix), step):
        squares = np.square(matrix[start : start + step], dtype=np.float64)
        total = np.cumsum(squares, axis=-1)[:, -1:]
        mean[start : start + step] = total / columns
    return mean.reshape(*rows.shape[:-1], 1)


def _walsh_hadamard(rows: np.ndarray) -> np.ndarray:
    """H x of float32 [n, group], not scaled."""
    count, size = rows.shape
    distance = 1
    while distance < size:
        pairs = rows.reshape(count, size // (2 * distance), 2, distance)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        rows = np.stack([first + second, first - second], axis=2).reshape(count, size)
        distance *= 2
    return rows


def _quantize(values: np.ndarray, x: Any, format: Any, options: dict[str, Any]) -> QuantArray:
    """The QuantArray of float32 `values`, which stands for an array like x."""
    dtype = interop.dtype_of(x)
    out = options.get("out")
    if not isinstance(out, QuantArray):
        return replace(quantize(like(values, x), format, **options), dtype=dtype)
    if out.dtype != dtype:
        raise ValueError(f"out has dtype {out.dtype}; this call gives {dtype}")
    wide = replace(out, dtype=np.dtype(F32))  # the same arrays, as the float32 values fit them
    quantize(like(values, x), format, **{**options, "out": wide})
    return out


def _rows(x: Any, name: str) -> np.ndarray:
    host = floats(x, name)
    if host.ndim == 0:
        raise ValueError(f"{name} is 0-d; it needs at least one axis ({name}.reshape(1))")
    return host


def _same_shape(x: Any, name: str, other: Any, other_name: str = "x") -> np.ndarray:
    host = floats(x, name)
    if host.shape != tuple(other.shape):
        raise ValueError(
            f"{name} has shape {host.shape} and {other_name} {tuple(other.shape)}; "
            "they must be equal"
        )
    return host


def _weight(weight: Any, x: np.ndarray) -> np.ndarray:
    """float32 [K]."""
    host = floats(weight, "weight")
    if host.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {host.shape}; x has {x.shape[-1]} columns")
    return host.astype(F32)


def _eps(eps: Any) -> np.float32:
    value = number(eps, "eps")
    if not (np.isfinite(value) and value >= 0):
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    return value


def _group(group: Any, columns: int) -> int:
    """The size of a group: a power of two that divides the columns; 1 where there are none."""
    size = max(columns, 1) if group is None else integer(group, "group", 1)
    if size & (size - 1):
        hint = f"; pass group=, such as {columns & -columns}" if group is None else ""
        raise ValueError(f"group must be a power of two, got {size}{hint}")
    if columns % size:
        raise ValueError(f"group is {size}, which does not divide x's {columns} columns")
    return size
