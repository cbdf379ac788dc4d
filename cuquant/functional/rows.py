"""What a layer does to a row before it is quantized, and the quantization, in one call.

The values are float32 and rounded to x's dtype, and these are quantized: the result has the bytes
that the layer and `cuquant.quantize` after it would give. On a GPU one kernel reads each row once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array.quant_array import QuantArray
from cuquant.formats import Format
from cuquant.formats.names import FormatName
from cuquant.functional.checks import floats, integer, like, number
from cuquant.ops.outputs import writable_out
from cuquant.ops.quantize.door import quantize
from cuquant.ops.rows import door
from cuquant.ops.rows.source import GELU, LAYER, RMS, SILU, Rows, Source, check_group
from cuquant.reference import rows as reference

F32 = np.float32


@interop.traced
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
        NumPy, CuPy or torch array [..., K] of float32, float16 or bfloat16.
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
    RMSNorm: Zhang and Sennrich, arXiv 1910.07467. (x * (1 / sqrt(mean + eps))) * weight is float32,
    rounded to x's dtype. The squares are added in one order everywhere: eight neighbours in index
    order and the two halves of 16 then, in float32; the sum of the elements from 16 m on belongs
    to partial sum m % 256, which adds in index order in float64, and the partial sums are added
    by a tree, p and p + 128 first, p and p + 1 last. The mean is rounded once to float32. A row
    whose mean + eps is below 2^-80 or above 2^126 is multiplied by 2^100 or 2^-100 before, so that
    values of 1e20, whose squares overflow, are normalized as all others.

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
    rows = _rows(x, "x")
    scale, small = _along(weight, "weight", rows), _eps(eps)
    source = Source(norm=RMS, weight=True, wide=_is_wide(rows, scale))

    def values() -> np.ndarray:
        return reference.rmsnorm(rows, scale.astype(F32), small)[0]

    return _quantized(Rows(source, rows, weight=scale, eps=small), values, x, format, options)


@interop.traced
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
        NumPy, CuPy or torch arrays [..., K] of float32, float16 or bfloat16, of one shape and
        dtype.
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
    RuntimeError
        Where a tensor requires a gradient and there is a residual_out, to which none flows back.

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
    rows, carried = _rows(x, "x"), _same_shape(residual, "residual", x)
    if residual_out is not None:  # whose values have a gradient, unlike codes
        interop.refuse_gradient(x, "x")
        interop.refuse_gradient(residual, "residual")
    scale, small = _along(weight, "weight", rows), _eps(eps)
    if interop.is_on_gpu(rows):
        source = Source(adds=True, norm=RMS, weight=True, wide=_is_wide(rows, scale))
        given = Rows(source, rows, carried, scale, eps=small)
        return door.quantized(given, format, options, residual_out)
    target = None
    if residual_out is not None:
        kind = interop.kind(x) or "numpy"
        target = writable_out(residual_out, rows.shape, kind, rows.dtype, [])
    values, total = reference.rmsnorm(rows, scale.astype(F32), small, carried)
    result = quantize(like(values, x), format, **options)
    if target is not None:
        target[...] = total
    return result


@interop.traced
def layernorm_quantize(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    format: FormatName | str | Format = "int8",
    **options: Any,
) -> QuantArray:
    """Quantize (x - mean) / sqrt(variance + eps) * weight + bias, both along the last axis.

    Parameters
    ----------
    x
        NumPy, CuPy or torch array [..., K] of float32, float16 or bfloat16.
    weight
        [K], of these dtypes.
    bias
        [K], of these dtypes, or None for none.
    eps
        Added to the variance, which is that of a population; not negative.
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
    LayerNorm: Ba, Kiros and Hinton, arXiv 1607.06450. Sums and units are those of
    `rmsnorm_quantize`: the mean is rounded to float32, and the variance is the mean of
    (x - mean)^2. Of float32 x the mean of x - mean is taken off, too, so that neither the rounding
    of a large mean nor that of its sum is left: rows far from 0 are as exact as others, and a
    constant row gives `bias`, or 0. With eps = 0 that is 0 / 0, NaN. Rows whose sums overflow are
    taken in other units.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.array([[5.0, 1.0, 3.0, 3.0]], np.float32)
    >>> cq.functional.layernorm_quantize(x, np.ones(4, np.float32)).packed
    array([[ 127, -127,    0,    0]], dtype=int8)
    """
    rows = _rows(x, "x")
    scale, small = _along(weight, "weight", rows), _eps(eps)
    shift = None if bias is None else _along(bias, "bias", rows)
    wide = _is_wide(rows, scale) or (shift is not None and _is_wide(rows, shift))
    source = Source(norm=LAYER, weight=True, bias=shift is not None, wide=wide)

    def values() -> np.ndarray:
        added = None if shift is None else shift.astype(F32)
        return reference.layernorm(rows, scale.astype(F32), added, small)

    given = Rows(source, rows, weight=scale, bias=shift, eps=small)
    return _quantized(given, values, x, format, options)


@interop.traced
def silu_mul_quantize(
    gate: Any, up: Any, *, format: FormatName | str | Format = "int8", **options: Any
) -> QuantArray:
    """Quantize silu(gate) * up, the middle of a gated MLP.

    Parameters
    ----------
    gate, up
        NumPy, CuPy or torch arrays of float32, float16 or bfloat16, of one shape and
        dtype.
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
    silu(g) = g / (1 + exp(-g)) is float32, within 3 ulp, and -0 below -87, but NaN of -infinity, as
    torch has it; its product with `up` is rounded to gate's dtype. SwiGLU: Shazeer, arXiv
    2002.05202.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> gate, up = np.array([[0.0, 20.0]], np.float32), np.array([[5.0, 0.5]], np.float32)
    >>> cq.functional.silu_mul_quantize(gate, up).dequantize()
    array([[ 0., 10.]], dtype=float32)
    """
    return _gated(Source(gate=SILU), reference.silu_mul, gate, up, format, options)


@interop.traced
def gelu_mul_quantize(
    gate: Any, up: Any, *, format: FormatName | str | Format = "int8", **options: Any
) -> QuantArray:
    """Quantize gelu(gate) * up, the middle of a gated MLP.

    Parameters
    ----------
    gate, up
        NumPy, CuPy or torch arrays of float32, float16 or bfloat16, of one shape and
        dtype.
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
    gelu(g) = g / 2 * (1 + erf(g / sqrt 2)), the exact one of Hendrycks and Gimpel, arXiv
    1606.08415, is float32 with an error below 5 * 2^-24 * |g|; its product with `up` is rounded to
    gate's dtype. GeGLU: Shazeer, arXiv 2002.05202.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> gate, up = np.array([[0.0, 20.0]], np.float32), np.array([[5.0, 0.5]], np.float32)
    >>> cq.functional.gelu_mul_quantize(gate, up).dequantize()
    array([[ 0., 10.]], dtype=float32)
    """
    return _gated(Source(gate=GELU), reference.gelu_mul, gate, up, format, options)


@interop.traced
def hadamard_quantize(
    x: Any,
    *,
    group: int | None = None,
    signs: Any = None,
    format: FormatName | str | Format = "int8",
    **options: Any,
) -> QuantArray:
    """Quantize the orthonormal Walsh-Hadamard transform along the last axis.

    The transform spreads an outlier over its group; it is its own inverse.

    Parameters
    ----------
    x
        NumPy or torch array [..., K] of float32, float16 or bfloat16.
    group
        Elements that are transformed together: a power of two that divides K. None: K. On a GPU
        one kernel does 16 to 1024; others take two.
    signs
        [K] of 1 and -1, which x is multiplied with before: a randomized transform. None: all 1.
        Values on a GPU are not checked, which would wait for them.
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
        For another group, other signs, and what `cuquant.quantize` raises.

    Notes
    -----
    y = H x / sqrt(group) with Sylvester's H, as in QuaRot, arXiv 2404.00456. Sums and
    differences are float32, of neighbours at distance 1, then 2, 4, ...; 1 / sqrt(group) is
    multiplied last, and the result is rounded to x's dtype. A group whose sums are beyond float32
    is divided by its size before and multiplied after.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.array([[4.0, 0.0, 0.0, 0.0]], np.float32)
    >>> cq.functional.hadamard_quantize(x).dequantize()
    array([[2., 2., 2., 2.]], dtype=float32)
    """
    rows = _rows(x, "x")
    size = _group(group, rows.shape[-1])
    turns = None if signs is None else _signs(signs, rows)
    source = Source(group=size, weight=turns is not None)

    def values() -> np.ndarray:
        return reference.hadamard(rows, size, None if turns is None else turns.astype(F32))

    return _quantized(Rows(source, rows, weight=turns), values, x, format, options)


# ---- what they share ----------------------------------------------------------------------------


def _gated(
    source: Source,
    reckon: Callable[[np.ndarray, np.ndarray], np.ndarray],
    gate: Any,
    up: Any,
    format: Any,
    options: dict[str, Any],
) -> QuantArray:
    left, right = _rows(gate, "gate"), _same_shape(up, "up", gate, "gate")
    given = Rows(source, left, right)
    return _quantized(given, lambda: reckon(left, right), gate, format, options)


def _quantized(
    rows: Rows,
    values: Callable[[], np.ndarray],
    x: Any,
    format: Any,
    options: dict[str, Any],
) -> QuantArray:
    """The QuantArray of what `rows` stands for: of `values()` on the CPU."""
    if interop.is_on_gpu(rows.x):
        return door.quantized(rows, format, options)
    return quantize(like(values(), x), format, **options)


def _rows(x: Any, name: str) -> Any:
    found = floats(x, name, x)
    if found.ndim == 0:
        raise ValueError(f"{name} is 0-d; it needs at least one axis ({name}.reshape(1))")
    return found


def _same_shape(x: Any, name: str, other: Any, other_name: str = "x") -> Any:
    found = floats(x, name, other)
    if tuple(found.shape) != tuple(other.shape):
        raise ValueError(
            f"{name} has shape {tuple(found.shape)} and {other_name} {tuple(other.shape)}; "
            "they must be equal"
        )
    dtype, other_dtype = interop.dtype_of(found), interop.dtype_of(other)
    if dtype != other_dtype:
        raise TypeError(
            f"{name} is {dtype} and {other_name} {other_dtype}; convert one of them to the other's"
        )
    return found


def _along(vector: Any, name: str, x: Any) -> Any:
    """A vector [K] where x is."""
    found = floats(vector, name, x)
    if tuple(found.shape) != tuple(x.shape[-1:]):
        raise ValueError(f"{name} has shape {tuple(found.shape)}; x has {x.shape[-1]} columns")
    return found


def _is_wide(x: Any, vector: Any) -> bool:
    return interop.dtype_of(vector) != interop.dtype_of(x)


def _signs(signs: Any, x: Any) -> Any:
    """[K] of x's dtype, where x is."""
    given = signs if interop.kind(signs) else np.asarray(signs)
    if interop.dtype_of(given).kind not in "fi" and interop.dtype_of(given).name != "bfloat16":
        raise TypeError(f"signs must be a numeric array, got {interop.dtype_of(given)}")
    if tuple(given.shape) != tuple(x.shape[-1:]):
        raise ValueError(f"signs has shape {tuple(given.shape)}; x has {x.shape[-1]} columns")
    if not interop.is_on_gpu(given):
        host = interop.to_numpy(given, "signs").astype(F32)
        if (np.abs(host) != 1).any():
            raise ValueError("signs must be 1 and -1")
        return interop.beside(host.astype(interop.dtype_of(x)), x, "signs")
    return interop.astype(interop.beside(given, x, "signs"), interop.dtype_of(x))


def _eps(eps: Any) -> np.float32:
    value = number(eps, "eps")
    if not (np.isfinite(value) and value >= 0):
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    return value


def _group(group: Any, columns: int) -> int:
    """The size of a group: a power of two that divides the columns; 1 where there are none."""
    size = max(columns, 1) if group is None else integer(group, "group", 1)
    hint = f"; pass group=, such as {columns & -columns}" if group is None else ""
    return check_group(size, columns, hint)
