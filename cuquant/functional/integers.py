"""Integers with one scale for the whole array, and int4 in nibbles."""

from dataclasses import replace
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.errors import FormatError
from cuquant.formats import Packing, Uniform, get_format
from cuquant.functional.checks import integer, integers, like, numbers, real, typed
from cuquant.ops.plain_arrays import pack_codes, quotients, scaled, unpack_codes
from cuquant.ops.quantize.door import quantize

INT4 = Packing(4, "low")


def quantize_tensor(x: Any, bits: int = 8) -> tuple[Any, Any]:
    """Symmetric integers with one scale, absmax / (2^(bits - 1) - 1).

    Parameters
    ----------
    x
        NumPy, CuPy or torch array of float32, float16 or bfloat16, any shape but 0-d.
    bits
        2 to 8: the integers reach from -(2^(bits - 1) - 1) to 2^(bits - 1) - 1.

    Returns
    -------
    q
        int8 of x's shape, x * (1 / scale) rounded half to even.
    scale
        float32, 0-d: x is about q * scale. 0 where x is all zeros, NaN where it is not finite
        (q is 0 then).

    Raises
    ------
    TypeError
        Where x is no array of these dtypes.
    ValueError
        For a 0-d x or other bits.

    Notes
    -----
    The format int8 of `cuquant.quantize` with block_size="tensor", in a narrower range for fewer
    bits. Linear quantization: Jacob et al., arXiv 1712.05877.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> q, scale = cq.functional.quantize_tensor(np.array([-1, 0.25, 0.5], np.float32))
    >>> q, scale
    (array([-127,   32,   64], dtype=int8), array(0.00787402, dtype=float32))
    """
    top = (1 << (integer(bits, "bits", 2, 8) - 1)) - 1
    fmt = get_format("int8", block_size="tensor")
    codec = Uniform(-top, top)
    scale = replace(fmt.rule, peak=float(top))
    parts = quantize(real(x), replace(fmt, codec=codec, scale=scale)).components
    # A byte holds the code less 128, and the code is the integer and the codec's offset.
    return parts["packed"] + (128 - codec.offset), parts["scale"]


def dequantize_tensor(q: Any, scale: Any) -> Any:
    """q * scale in float32.

    Parameters
    ----------
    q
        Array of integers: int8 of `quantize_tensor`, or int32 of `int8_matmul`.
    scale
        A number or an array that broadcasts to q's shape.

    Returns
    -------
    float32 of q's shape and kind, on its device.

    Raises
    ------
    TypeError
        Where q holds no integers, or scale no numbers.
    ValueError
        Where scale does not broadcast to q's shape.

    Notes
    -----
    The inverse of Jacob et al.'s linear quantization, arXiv 1712.05877.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> cq.functional.dequantize_tensor(np.array([-127, 64], np.int8), 0.5)
    array([-63.5,  32. ], dtype=float32)
    """
    dtype = interop.dtype_of(interop.beside(q, q, "q"))
    if dtype.kind == "f":
        raise TypeError(
            f"q is {dtype}, not integers: values that are scaled already, such as those of "
            "int8_matmul with scales; scale once"
        )
    values = integers(q, "q", near=q)
    factor = numbers(scale, "scale", near=q)
    shape, given = tuple(values.shape), tuple(factor.shape)
    if not _broadcasts(given, shape):
        raise ValueError(f"scale has shape {given}, which does not broadcast to q's {shape}")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return like(scaled(values, factor), q)


def dynamic_quantize(x: Any) -> tuple[Any, Any, Any]:
    """ONNX's DynamicQuantizeLinear: uint8, and x is about (q - zero_point) * scale.

    Parameters
    ----------
    x
        NumPy, CuPy or torch array of float32, float16 or bfloat16, any shape but 0-d.

    Returns
    -------
    q
        uint8 of x's shape: x / scale rounded half to even, plus zero_point, saturated.
    scale
        float32, 0-d: (max - min) / 255 over the range of x widened to hold 0, which may be beyond
        float32. 0 where x is all zeros, NaN where it is not finite (q is 0 then, as it is below a
        scale of 2^-128).
    zero_point
        uint8, 0-d: the code of 0, rint(-min / scale).

    Raises
    ------
    TypeError
        Where x is no array of these dtypes.
    ValueError
        For a 0-d x.

    Notes
    -----
    ONNX's DynamicQuantizeLinear, which divides by the scale. The format uint8 of
    `cuquant.quantize` with block_size="tensor" and float32 scales has the same scale and zero
    point, but multiplies by the reciprocal, which may round to the code beside it. Where max - min
    is beyond float32, (max / 2 - min / 2) / 255 * 2 is taken; ONNX's scale is infinite there. The
    code of an end may stand for a number up to half a scale beyond it, and so beyond float32.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> cq.functional.dynamic_quantize(np.array([-1, 0, 1.55], np.float32))
    (array([  0, 100, 255], dtype=uint8), array(0.01, dtype=float32), array(100, dtype=uint8))
    """
    fmt = get_format("uint8", block_size="tensor", scale_dtype="float32")
    parts = quantize(real(x), fmt).components
    scale, zero_point = parts["scale"], parts["zero_point"]
    if interop.is_on_gpu(x):
        return quotients(x, scale, zero_point), scale, zero_point
    host = [interop.to_numpy(part) for part in (x, scale, zero_point)]
    return like(quotients(*host), x), scale, zero_point


def pack_int4(x: Any, axis: int = -1) -> Any:
    """Two signed 4-bit integers in each byte, the first of them in the low nibble.

    Parameters
    ----------
    x
        Array of integers in -8..7.
    axis
        The axis whose neighbours share a byte; an odd length is padded with 0.

    Returns
    -------
    uint8, with (n + 1) // 2 bytes for the n elements along `axis`; two's complement nibbles.

    Raises
    ------
    TypeError
        Where x holds no integers.
    ValueError
        For values outside -8..7 (on a GPU, where looking at them would wait, their low four bits
        count), a 0-d x or an axis that x has not.

    Notes
    -----
    The order is that of ONNX's and PyTorch's int4: low nibble first.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> [hex(byte) for byte in cq.functional.pack_int4(np.array([1, -1, 7], np.int8))]
    ['0xf1', '0x7']
    """
    values = integers(x, "x", near=x)
    axis = _axis(values, axis, "x")
    if isinstance(values, np.ndarray) and values.size:
        low, high = values.min(), values.max()
        if low < -8 or high > 7:
            raise ValueError(f"x holds {low}..{high}; int4 holds -8..7")
    codes = interop.viewed(interop.astype(values, np.int8), np.uint8) & 0x0F
    packed = pack_codes(_moved(codes, axis, -1), INT4, 0)
    return like(_moved(packed, -1, axis), x)


def unpack_int4(packed: Any, n: int | None = None, axis: int = -1) -> Any:
    """The signed 4-bit integers of `pack_int4`.

    Parameters
    ----------
    packed
        uint8, two integers in each byte along `axis`, the first in the low nibble.
    n
        Integers along `axis`: 2 * bytes or one less. None: 2 * bytes.
    axis
        The axis that was packed.

    Returns
    -------
    int8 in -8..7, with n elements along `axis`.

    Raises
    ------
    TypeError
        Where packed is not uint8.
    FormatError
        Where n integers have another number of bytes.
    ValueError
        For a 0-d packed or an axis that it has not.

    Notes
    -----
    The order is that of ONNX's and PyTorch's int4: low nibble first.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> cq.functional.unpack_int4(np.array([0xF1, 0x07], np.uint8), 3)
    array([ 1, -1,  7], dtype=int8)
    """
    given = typed(packed, "packed", np.uint8, near=packed)
    axis = _axis(given, axis, "packed")
    moved = _moved(given, axis, -1)
    count = 2 * moved.shape[-1] if n is None else integer(n, "n", 0)
    if INT4.words(count) != moved.shape[-1]:
        raise FormatError(
            f"packed has {moved.shape[-1]} bytes along axis {axis}; {count} integers have "
            f"{INT4.words(count)}"
        )
    codes = unpack_codes(moved, INT4, count)
    values = interop.viewed(codes ^ 8, np.int8) - 8  # 8..15 stand for -8..-1
    return like(_moved(values, -1, axis), packed)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts to the shape `to`."""
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def _axis(x: Any, axis: Any, name: str) -> int:
    if x.ndim == 0:
        raise ValueError(f"{name} is 0-d; nibbles need an axis to run along ({name}.reshape(1))")
    axis = integer(axis, "axis", -x.ndim, x.ndim - 1)
    return axis % x.ndim


def _moved(x: Any, source: int, target: int) -> Any:
    """np.moveaxis, in C order."""
    return interop.contiguous(interop.namespace(x).moveaxis(x, source, target))
