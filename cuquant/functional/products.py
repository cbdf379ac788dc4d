"""Matrix products of plain integer and float arrays, b as [K, N]."""

from typing import Any

import numpy as np

from cuquant import interop
from cuquant.formats import get_format
from cuquant.functional.checks import (
    check_product,
    floats,
    integer,
    like,
    number,
    numbers,
    typed,
)
from cuquant.functional.integers import unpack_int4
from cuquant.reference import relu

F32 = np.float32
EXACT_FLOAT32 = 1 << 24  # integers up to here, and their sums, are exact in float32


def int8_matmul(
    a: Any,
    b: Any,
    scale_a: Any = None,
    scale_b: Any = None,
    scale_c: Any = 1.0,
    zero_point_a: Any = 0,
    zero_point_b: Any = 0,
) -> Any:
    """(a - zero_point_a) @ (b - zero_point_b): int32, or float32 if it is given scales.

    Parameters
    ----------
    a, b
        int8 or uint8 [M, K] and [K, N], as `quantize_tensor` and `dynamic_quantize` give them.
    scale_a
        A number, or one for each row: [M] or [M, 1].
    scale_b
        A number, or one for each column: [N] or [1, N].
    scale_c
        A number for the whole product.
    zero_point_a, zero_point_b
        The integers that stand for 0.

    Returns
    -------
    [M, N] of a's kind. Without scales int32: the exact sum, which wraps beyond 2^31 as in
    hardware (8-bit operands of 131072 columns may reach it). With any of them float32: that int32
    * scale_a * scale_b * scale_c, in this order.

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        For shapes that do not multiply, scales of another shape, or a zero point that the dtype
        of its operand cannot hold.

    Notes
    -----
    Scale once: either here, or afterwards with `dequantize_tensor`. The README this signature
    comes from does both, and so multiplies by scale_a * scale_b twice. The arithmetic is that of
    Jacob et al., arXiv 1712.05877.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> rng = np.random.default_rng(0)
    >>> x, w = rng.standard_normal((2, 64, 64), dtype=np.float32)
    >>> a, scale_a = cq.functional.quantize_tensor(x)
    >>> b, scale_b = cq.functional.quantize_tensor(w)
    >>> c = cq.functional.int8_matmul(a, b)
    >>> y = cq.functional.dequantize_tensor(c, scale_a * scale_b)
    >>> c.dtype, bool(abs(y - x @ w).max() < 1)
    (dtype('int32'), True)
    >>> bool(np.allclose(y, cq.functional.int8_matmul(a, b, scale_a, scale_b)))
    True
    """
    left, right = (typed(v, n, np.int8, np.uint8) for v, n in ((a, "a"), (b, "b")))
    check_product(left, right)
    scales = _scales(scale_a, scale_b, scale_c, left.shape[0], right.shape[1])
    left = _centred(left, zero_point_a, "zero_point_a")
    right = _centred(right, zero_point_b, "zero_point_b")
    product = _exact_product(left, right).astype(np.int32)
    return like(_scaled(product, scales) if scales else product, a)


int8_gemm = int8_matmul


def int4_matmul(
    a: Any,
    b: Any,
    K: int | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
    scale_c: Any = 1.0,
) -> Any:
    """a @ b of signed 4-bit integers, two in each byte: int32, or float32 if it is given scales.

    Parameters
    ----------
    a
        uint8 [M, (K + 1) // 2], `pack_int4(..., axis=-1)`.
    b
        uint8 [(K + 1) // 2, N], `pack_int4(..., axis=0)`.
    K
        Elements of a row of a. None: two for each byte (an odd K was padded with 0).
    scale_a, scale_b, scale_c
        As in `int8_matmul`.

    Returns
    -------
    [M, N] of a's kind: int32 without scales, float32 with any of them.

    Raises
    ------
    TypeError
        Where an operand is not uint8.
    FormatError
        Where K integers have another number of bytes.
    ValueError
        For shapes that do not multiply or scales of another shape.

    Notes
    -----
    The nibbles are those of ONNX's and PyTorch's int4: the low one first.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> a = cq.functional.pack_int4(np.array([[1, -2, 3]]))
    >>> b = cq.functional.pack_int4(np.array([[7], [5], [-8]]), axis=0)
    >>> cq.functional.int4_matmul(a, b, K=3)
    array([[-27]], dtype=int32)
    """
    left, right = typed(a, "a", np.uint8), typed(b, "b", np.uint8)
    check_product(left, right)
    product = int8_matmul(
        unpack_int4(left, K, axis=1), unpack_int4(right, K, axis=0), scale_a, scale_b, scale_c
    )
    return like(product, a)


def matmul_bias_relu(
    a: Any,
    b: Any,
    bias: Any,
    scale_a: Any = None,
    scale_b: Any = None,
    scale_c: Any = 1.0,
    out_dtype: object = None,
) -> Any:
    """relu(a @ b * scale_a * scale_b * scale_c + bias), summed in float32 and rounded once.

    Parameters
    ----------
    a, b
        [M, K] and [K, N]: both int8 or uint8, or both of float32, float16 or bfloat16.
    bias
        [N] or [1, N], floats.
    scale_a, scale_b, scale_c
        As in `int8_matmul`.
    out_dtype
        float32, float16 or bfloat16. None: a's dtype, float32 for integers.

    Returns
    -------
    [M, N] of a's kind.

    Raises
    ------
    TypeError
        For other dtypes, or an integer beside a float.
    ValueError
        For shapes that do not fit.

    Notes
    -----
    The sums of integers are exact at any K, and rounded once to float32 (those of `int8_matmul`
    wrap beyond int32, from K = 131072 on at the earliest); the sums of floats have BLAS's order.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> a, b = np.array([[1, 2]], np.int8), np.array([[3, -3], [4, -4]], np.int8)
    >>> cq.functional.matmul_bias_relu(a, b, np.ones(2, np.float32), scale_c=0.5)
    array([[6.5, 0. ]], dtype=float32)
    """
    left, right = interop.to_numpy(a, "a"), interop.to_numpy(b, "b")
    whole = [operand.dtype in (np.int8, np.uint8) for operand in (left, right)]
    if whole[0] != whole[1]:
        raise TypeError(f"a is {left.dtype} and b {right.dtype}; pass two integers or two floats")
    if not whole[0]:
        left, right = floats(a, "a"), floats(b, "b")
    check_product(left, right)
    dtype = np.dtype(F32) if whole[0] else left.dtype
    dtype = dtype if out_dtype is None else interop.float_dtype(out_dtype, "out_dtype")
    scales = _scales(scale_a, scale_b, scale_c, left.shape[0], right.shape[1])
    added = _bias(bias, right.shape[1])
    if whole[0]:
        product = _exact_product(left.astype(np.int16), right.astype(np.int16))
    else:
        product = _float_product(left, right)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        result = relu(_scaled(product, scales) + added)
        return like(result.astype(dtype, copy=False), a)


def binary_matmul(a: Any, b: Any) -> Any:
    """The product of the signs of a and b, where 0 and -0.0 count as +1.

    Parameters
    ----------
    a, b
        [M, K] and [K, N], of float32, float16, bfloat16 or integers.

    Returns
    -------
    int32 [M, N] of a's kind.

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        For shapes that do not multiply, or NaN, which has no sign.

    Notes
    -----
    The signs are those of the format int1. XNOR-Net, arXiv 1603.05279.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> a = np.array([[0.3, -2.0, 0.0]], np.float32)
    >>> cq.functional.binary_matmul(a, a.T)
    array([[3]], dtype=int32)
    """
    left, right = _signs(a, "a"), _signs(b, "b")
    check_product(left, right)
    return like(_exact_product(left, right).astype(np.int32), a)


def fp16_gemm(
    a: Any,
    b: Any,
    c: Any = None,
    alpha: Any = 1,
    beta: Any = 0,
    out_dtype: object = "float32",
) -> Any:
    """alpha * a @ b + beta * c with float32 sums, rounded once.

    Parameters
    ----------
    a, b
        [M, K] and [K, N] of float16, bfloat16 or float32.
    c
        [M, N] or what broadcasts to it, of the same dtypes. It is not read where beta is 0.
    alpha, beta
        Numbers.
    out_dtype
        float32, float16 or bfloat16.

    Returns
    -------
    [M, N] of a's kind.

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        For shapes that do not fit, or a beta without a c.

    Notes
    -----
    BLAS's GEMM, with its rule for beta = 0: NaN in c does not come through.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> a = np.full((1, 4097), 8, np.float16)
    >>> cq.functional.fp16_gemm(a, a.T, np.ones((1, 1), np.float16), alpha=0.5, beta=2)
    array([[131106.]], dtype=float32)
    """
    left, right = floats(a, "a"), floats(b, "b")
    check_product(left, right)
    dtype = interop.float_dtype(out_dtype, "out_dtype")
    alpha, beta = number(alpha, "alpha"), number(beta, "beta")
    if c is None and beta != 0:
        raise ValueError(f"beta is {beta} without a c; pass c, or leave beta out")
    added = None if c is None else _broadcast(floats(c, "c"), (left.shape[0], right.shape[1]), "c")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        result = alpha * _float_product(left, right)
        if added is not None and beta != 0:
            result = result + beta * added.astype(F32)
        return like(result.astype(dtype, copy=False), a)


def _centred(x: np.ndarray, zero_point: Any, name: str) -> np.ndarray:
    """int16: x less its zero point."""
    limits = np.iinfo(x.dtype)
    point = integer(zero_point, name, int(limits.min), int(limits.max))
    return x.astype(np.int16) - np.int16(point)


def _exact_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """int64 of int16 matrices, by the BLAS of a float that holds every partial sum."""
    peaks = [int(np.abs(x).max(initial=0)) for x in (a, b)]
    wide = F32 if a.shape[1] * peaks[0] * peaks[1] <= EXACT_FLOAT32 else np.float64
    return (a.astype(wide) @ b.astype(wide)).astype(np.int64)


def _float_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return a.astype(F32, copy=False) @ b.astype(F32, copy=False)


def _scales(
    scale_a: Any, scale_b: Any, scale_c: Any, rows: int, columns: int
) -> tuple[np.ndarray, ...]:
    """The given scales, broadcastable to [rows, columns]; empty if the product stays as it is."""
    last = number(scale_c, "scale_c")
    if scale_a is None and scale_b is None and last == 1:
        return ()
    found = []
    if scale_a is not None:
        found.append(_along(scale_a, "scale_a", rows, (rows, 1)))
    if scale_b is not None:
        found.append(_along(scale_b, "scale_b", columns, (1, columns)))
    return (*found, last.reshape(1, 1))


def _along(scale: Any, name: str, count: int, shape: tuple[int, int]) -> np.ndarray:
    values = numbers(scale, name)
    if values.size == 1:
        return values.reshape(1, 1)
    if values.shape not in ((count,), shape):
        raise ValueError(
            f"{name} has shape {values.shape}; it must be a number, ({count},) or {shape}"
        )
    return values.reshape(shape)


def _scaled(product: np.ndarray, scales: tuple[np.ndarray, ...]) -> np.ndarray:
    values = product.astype(F32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for scale in scales:
            values *= scale
    return values


def _bias(bias: Any, columns: int) -> np.ndarray:
    values = floats(bias, "bias")
    if values.shape not in ((columns,), (1, columns)):
        raise ValueError(f"bias has shape {values.shape}; it must be ({columns},), one a column")
    return values.astype(F32)


def _broadcast(values: np.ndarray, shape: tuple[int, int], name: str) -> np.ndarray:
    try:
        return np.broadcast_to(values, shape)
    except ValueError as error:
        raise ValueError(f"{name} has shape {values.shape}; the product has {shape}") from error


def _signs(x: Any, name: str) -> np.ndarray:
    """int16 -1 or +1."""
    host = interop.to_numpy(x, name)
    if host.dtype.kind not in "iu":
        host = floats(x, name)
    values = np.ascontiguousarray(host, dtype=F32)
    if np.isnan(values).any():
        raise ValueError(f"{name} holds NaN, which has no sign; np.nan_to_num(x) makes it 0")
    codec = get_format("int1").codec
    return codec.decode(codec.encode(values)).astype(np.int16)
