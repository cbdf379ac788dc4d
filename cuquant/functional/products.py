"""Matrix products of plain integer and float arrays, b as [K, N]."""

from typing import Any

import numpy as np

from cuquant import interop
from cuquant.errors import FormatError
from cuquant.functional.checks import check_product, integer, like, typed
from cuquant.functional.integers import INT4, unpack_int4
from cuquant.functional.product_arguments import (
    addend_of,
    bias_of,
    differs,
    exact_product,
    factor,
    number_of,
    scaled,
    scales_of,
    signed,
    signs_of_host,
    zero_point_of,
)
from cuquant.ops.matmul.byte_rows import BYTES, NIBBLES
from cuquant.ops.plain_floats import Ending, multiply_floats
from cuquant.ops.plain_products import (
    UNSCALED,
    Integers,
    Scales,
    multiply_integers,
    multiply_signs,
)
from cuquant.reference import relu

F32 = np.float32


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
        int8 or uint8 [..., M, K] and [..., K, N], as `quantize_tensor` and `dynamic_quantize` give
        them; leading axes broadcast, as NumPy's matmul has it.
    scale_a
        A number, or one for each row: [M], [M, 1] or, of a batch, what broadcasts to [..., M, 1].
    scale_b
        A number, or one for each column: [N], [1, N] or what broadcasts to [..., 1, N].
    scale_c
        A number for the whole product.
    zero_point_a, zero_point_b
        The integers that stand for 0.

    Returns
    -------
    [..., M, N] of a's kind and device. Without scales int32: the exact sum modulo 2^32, as in
    hardware (below 2^31 for up to 131071 columns of int8, and 33025 of uint8). With any of them
    float32: that int32 * scale_a * scale_b * scale_c, in this order.

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        For shapes that do not multiply, scales of another shape, or a zero point that the dtype
        of its operand cannot hold (of one on a GPU, which is not looked at, the low 8 bits count).

    Notes
    -----
    Scale once: either here, or afterwards with `dequantize_tensor`. The README this signature
    comes from does both, and so multiplies by scale_a * scale_b twice. The arithmetic is that of
    Jacob et al., arXiv 1712.05877. On a GPU the bits are those of the CPU; b, whose columns
    kernels want as rows, is turned on the way, which a b that is the transpose of contiguous rows
    of a multiple of 16 elements saves.

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
    left, right = (typed(v, n, np.int8, np.uint8, near=a) for v, n in ((a, "a"), (b, "b")))
    shape = check_product(left, right)
    scales = scales_of(scale_a, scale_b, scale_c, shape, left)
    points = [
        zero_point_of(point, name, operand)
        for point, name, operand in (
            (zero_point_a, "zero_point_a", left),
            (zero_point_b, "zero_point_b", right),
        )
    ]
    if interop.is_on_gpu(left):
        operands = _bytes_of(left, -1, points[0]), _bytes_of(right, -2, points[1])
        return multiply_integers(*operands, shape, "float32" if scales else "int32", scales)
    left, right = (
        operand.astype(np.int16) - np.int16(point or 0)
        for operand, point in zip((left, right), points, strict=True)
    )
    product = exact_product(left, right).astype(np.int32)
    return like(scaled(product, scales) if scales else product, a)


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
        uint8 [..., M, (K + 1) // 2], `pack_int4(..., axis=-1)`.
    b
        uint8 [..., (K + 1) // 2, N], `pack_int4(..., axis=-2)`.
    K
        Elements of a row of a. None: two for each byte (an odd K was padded with 0).
    scale_a, scale_b, scale_c
        As in `int8_matmul`.

    Returns
    -------
    [..., M, N] of a's kind and device: int32 without scales, float32 with any of them.

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
    left, right = typed(a, "a", np.uint8, near=a), typed(b, "b", np.uint8, near=a)
    shape = check_product(left, right)
    depth = 2 * left.shape[-1] if K is None else integer(K, "K", 0)
    if INT4.words(depth) != left.shape[-1]:
        raise FormatError(
            f"a has {left.shape[-1]} bytes in a row; K = {depth} integers have {INT4.words(depth)}"
        )
    if not interop.is_on_gpu(left):
        whole = unpack_int4(left, depth, axis=-1), unpack_int4(right, depth, axis=-2)
        return like(int8_matmul(*whole, scale_a, scale_b, scale_c), a)
    scales = scales_of(scale_a, scale_b, scale_c, shape, left)
    first, second = (
        Integers(x, axis, NIBBLES, "int8", depth) for x, axis in ((left, -1), (right, -2))
    )
    return multiply_integers(first, second, shape, "float32" if scales else "int32", scales)


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
        [..., M, K] and [..., K, N]: both int8 or uint8, or both of float32, float16 or bfloat16.
    bias
        [N] or [1, N], floats.
    scale_a, scale_b, scale_c
        As in `int8_matmul`.
    out_dtype
        float32, float16 or bfloat16. None: a's dtype, float32 for integers.

    Returns
    -------
    [..., M, N] of a's kind and device.

    Raises
    ------
    TypeError
        For other dtypes, or an integer beside a float.
    ValueError
        For shapes that do not fit.

    Notes
    -----
    The sums of integers are those of `int8_matmul`, int32 that wrap from K = 33026 of uint8 or
    131072 of int8 on at the earliest, rounded once to float32; the sums of floats have BLAS's
    order, which is another one on each device.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> a, b = np.array([[1, 2]], np.int8), np.array([[3, -3], [4, -4]], np.int8)
    >>> cq.functional.matmul_bias_relu(a, b, np.ones(2, np.float32), scale_c=0.5)
    array([[6.5, 0. ]], dtype=float32)
    """
    left, right = interop.beside(a, a, "a"), interop.beside(b, a, "b")
    found = [interop.dtype_of(operand) for operand in (left, right)]
    whole = [dtype in (np.int8, np.uint8) for dtype in found]
    if whole[0] != whole[1]:
        raise TypeError(f"a is {found[0]} and b {found[1]}; pass two integers or two floats")
    if not whole[0]:
        left, right = factor(a, "a", a), factor(b, "b", a)
    shape = check_product(left, right)
    dtype = np.dtype(F32) if whole[0] else found[0]
    dtype = dtype if out_dtype is None else interop.float_dtype(out_dtype, "out_dtype")
    scales = scales_of(scale_a, scale_b, scale_c, shape, left)
    added = bias_of(bias, shape[-1], left)
    if interop.is_on_gpu(left):
        if not whole[0]:
            ending = Ending(scales or UNSCALED, added, relu=True)
            return multiply_floats(left, right, shape, dtype, ending)
        operands = _bytes_of(left, -1), _bytes_of(right, -2)
        return multiply_integers(*operands, shape, dtype, scales, added, "relu")
    if whole[0]:
        wide = left.astype(np.int16), right.astype(np.int16)
        product = exact_product(*wide).astype(np.int32)
    else:
        product = _float_product(left, right)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        result = relu(scaled(product, scales) + added.astype(F32))
        return like(result.astype(dtype, copy=False), a)


def binary_matmul(a: Any, b: Any) -> Any:
    """The product of the signs of a and b, where 0 and -0.0 count as +1.

    Parameters
    ----------
    a, b
        [..., M, K] and [..., K, N], of float32, float16, bfloat16 or integers.

    Returns
    -------
    int32 [..., M, N] of a's kind and device.

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        For shapes that do not multiply, or NaN, which has no sign; on a GPU, where looking for it
        would wait, it counts as +1.

    Notes
    -----
    The signs are those of the format int1. GPUs of sm_80 to sm_90 multiply them as bits, eight in
    a byte; others as bytes. XNOR-Net, arXiv 1603.05279.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> a = np.array([[0.3, -2.0, 0.0]], np.float32)
    >>> cq.functional.binary_matmul(a, a.T)
    array([[3]], dtype=int32)
    """
    left, right = (signed(x, name, near=a) for x, name in ((a, "a"), (b, "b")))
    shape = check_product(left, right)
    if interop.is_on_gpu(left):
        return multiply_signs(left, right, shape)
    signs = signs_of_host(left, "a"), signs_of_host(right, "b")
    return like(exact_product(*signs).astype(np.int32), a)


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
        [..., M, K] and [..., K, N] of float16, bfloat16 or float32.
    c
        [..., M, N] or what broadcasts to it, of the same dtypes. It is not read where beta is 0.
    alpha, beta
        Numbers, or arrays of one: on a GPU nothing waits for those that are there.
    out_dtype
        float32, float16 or bfloat16.

    Returns
    -------
    [..., M, N] of a's kind and device.

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        For shapes that do not fit, or a beta without a c.

    Notes
    -----
    BLAS's GEMM, with its rule for beta = 0: NaN in c does not come through. On a GPU operands of
    one dtype are multiplied by cuBLAS, where it is installed, and others by a plain kernel.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> a = np.full((1, 4097), 8, np.float16)
    >>> cq.functional.fp16_gemm(a, a.T, np.ones((1, 1), np.float16), alpha=0.5, beta=2)
    array([[131106.]], dtype=float32)
    """
    return _gemm(a, b, c, alpha, beta, interop.float_dtype(out_dtype, "out_dtype"))


def bf16_gemm(
    a: Any,
    b: Any,
    c: Any = None,
    alpha: Any = 1,
    beta: Any = 0,
    out_dtype: object = "bfloat16",
) -> Any:
    """`fp16_gemm` whose result is bfloat16, unless it is told otherwise.

    Parameters
    ----------
    a, b, c, alpha, beta, out_dtype
        As in `fp16_gemm`: the dtypes of the operands are theirs, not the name's.

    Returns
    -------
    [..., M, N] of a's kind and device.

    Raises
    ------
    TypeError, ValueError
        As in `fp16_gemm`.

    Notes
    -----
    bfloat16 has float32's range, so that a sum that fits float32 is not lost on the way to the
    next layer: it stays bfloat16. A float16 sum may be beyond 65504, so `fp16_gemm` keeps float32.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, cuquant as cq
    >>> a = np.full((1, 4096), 16, ml_dtypes.bfloat16)
    >>> cq.functional.bf16_gemm(a, a.T)
    array([[1.04858e+06]], dtype=bfloat16)
    """
    return _gemm(a, b, c, alpha, beta, interop.float_dtype(out_dtype, "out_dtype"))


def _gemm(a: Any, b: Any, c: Any, alpha: Any, beta: Any, dtype: np.dtype) -> Any:
    left, right = factor(a, "a", a), factor(b, "b", a)
    shape = check_product(left, right)
    times, share = number_of(alpha, "alpha", left), number_of(beta, "beta", left)
    if c is None and differs(share, 0):
        given = "an array" if interop.is_on_gpu(share) else float(share)
        raise ValueError(f"beta is {given} without a c; pass c, or leave beta out")
    added = None if c is None else addend_of(factor(c, "c", a), shape, "c")
    if interop.is_on_gpu(left):
        read = added is not None and differs(share, 0)
        scales = Scales(c=times if differs(times, 1) else None)
        ending = Ending(scales, added, share) if read else Ending(scales)
        return multiply_floats(left, right, shape, dtype, ending)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        result = times * _float_product(left, right)
        if added is not None and share != 0:
            result = result + share * np.broadcast_to(added, shape).astype(F32)
        return like(result.astype(dtype, copy=False), a)


def _bytes_of(x: Any, axis: int, zero_point: Any = None) -> Integers:
    return Integers(x, axis, BYTES, interop.dtype_of(x).name, x.shape[axis], zero_point)


def _float_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return a.astype(F32, copy=False) @ b.astype(F32, copy=False)
