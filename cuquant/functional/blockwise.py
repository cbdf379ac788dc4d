"""bitsandbytes' 4-bit blocks: a flat array becomes nibbles and an absmax for each block."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cuquant import interop, reference
from cuquant.array.quant_array import QuantArray
from cuquant.errors import FormatError
from cuquant.formats import MAPS, get_format
from cuquant.formats.scales import NESTED_BLOCK
from cuquant.functional.checks import extents, flat, floats, integer, like, number, typed
from cuquant.ops.plain_arrays import nested_absmax
from cuquant.ops.quantize.door import quantize

NESTED_PARTS = ("absmax_q", "nested_absmax", "nested_map", "offset")

Absmax = Any  # an array, or the dict of a double quantization


def quantize_nf4(
    x: Any, block_size_outer: int = 64, block_size_inner: int = 1
) -> tuple[Any, Absmax]:
    """Quantize to NF4 (QLoRA, arXiv 2305.14314) with bitsandbytes' bytes.

    Parameters
    ----------
    x
        NumPy, CuPy or torch array of float32, float16 or bfloat16, any shape but 0-d; it is
        flattened.
    block_size_outer
        Elements that share an absmax, a multiple of 8; blocks run on across rows.
    block_size_inner
        1: float32 absmax. 256: double quantization, the absmax less their mean become 8-bit codes
        in nested blocks of 256.

    Returns
    -------
    packed
        uint8 [(n + 1) // 2], the first of two elements in the high nibble; the unused nibble of
        an odd n holds the code of 0.
    absmax
        float32 [ceil(n / block_size_outer)]; with double quantization a dict of absmax_q (uint8,
        one a block), nested_absmax (float32 [ceil(blocks / 256)]), nested_map (float32 [256], the
        value of each 8-bit code) and offset (float32, 0-d): absmax = nested_map[absmax_q] *
        nested_absmax[block // 256] + offset.

    Raises
    ------
    TypeError
        Where x is no array of these dtypes.
    ValueError
        For a 0-d x or another block size.

    Notes
    -----
    Codes, thresholds and bytes: csrc/kernels.cu of bitsandbytes. They differ from its CUDA kernels
    only where a value is within 2 ulp of a threshold (those use an approximate reciprocal) and in
    a block of zeros, which here holds the code of 0.0 (0x77).

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> packed, absmax = cq.functional.quantize_nf4(np.array([-2.0, 0.0, 1.0, 2.0], np.float32))
    >>> packed, absmax
    (array([  7, 207], dtype=uint8), array([2.], dtype=float32))
    """
    return _quantize("nf4", x, block_size_outer, block_size_inner)


def quantize_fp4(
    x: Any, block_size_outer: int = 64, block_size_inner: int = 1
) -> tuple[Any, Absmax]:
    """Quantize to bitsandbytes' FP4 (not OCP's e2m1), with its bytes.

    Parameters
    ----------
    x
        NumPy, CuPy or torch array of float32, float16 or bfloat16, any shape but 0-d; it is
        flattened.
    block_size_outer
        Elements that share an absmax, a multiple of 8; blocks run on across rows.
    block_size_inner
        1: float32 absmax. 256: double quantization, as in `quantize_nf4`.

    Returns
    -------
    packed
        uint8 [(n + 1) // 2], the first of two elements in the high nibble; bit 3 is the sign.
    absmax
        float32 [ceil(n / block_size_outer)], or the dict that `quantize_nf4` describes.

    Raises
    ------
    TypeError
        Where x is no array of these dtypes.
    ValueError
        For a 0-d x or another block size.

    Notes
    -----
    The 16 values and the borders between them: csrc/kernels.cu of bitsandbytes.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> packed, absmax = cq.functional.quantize_fp4(np.array([-2.0, 0.0, 1.0, 2.0], np.float32))
    >>> packed, absmax
    (array([176,  83], dtype=uint8), array([2.], dtype=float32))
    """
    return _quantize("fp4", x, block_size_outer, block_size_inner)


def dequantize_nf4(
    packed: Any,
    absmax: Absmax,
    shape: int | Sequence[int] | None = None,
    block_size: int = 64,
    dtype: object = "float32",
) -> Any:
    """The values of NF4 blocks: level of the code times absmax in float32, rounded once.

    Parameters
    ----------
    packed
        uint8, (n + 1) // 2 bytes of any shape, as `quantize_nf4` and bitsandbytes give them.
    absmax
        Floats [ceil(n / block_size)], or the dict of a double quantization.
    shape
        Of the result, n elements. None: one axis of 2 * len(packed).
    block_size
        Elements that share an absmax.
    dtype
        float32, float16 or bfloat16.

    Returns
    -------
    Array of `shape` and `dtype`, of packed's kind and on its device.

    Raises
    ------
    TypeError
        For another dtype of packed, absmax or the result.
    FormatError
        Where the lengths of packed, absmax and shape contradict each other.

    Notes
    -----
    The format: csrc/kernels.cu of bitsandbytes; double quantization: QLoRA, arXiv 2305.14314.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> packed, absmax = np.array([7, 207], np.uint8), np.array([2], np.float32)
    >>> cq.functional.dequantize_nf4(packed, absmax, (2, 2))
    array([[-2.        ,  0.        ],
           [ 0.88141966,  2.        ]], dtype=float32)
    """
    return _dequantize("nf4", packed, absmax, shape, block_size, dtype)


def dequantize_fp4(
    packed: Any,
    absmax: Absmax,
    shape: int | Sequence[int] | None = None,
    block_size: int = 64,
    dtype: object = "float32",
) -> Any:
    """The values of bitsandbytes' FP4 blocks: value of the code times absmax, rounded once.

    Parameters
    ----------
    packed
        uint8, (n + 1) // 2 bytes of any shape, as `quantize_fp4` and bitsandbytes give them.
    absmax
        Floats [ceil(n / block_size)], or the dict of a double quantization.
    shape
        Of the result, n elements. None: one axis of 2 * len(packed).
    block_size
        Elements that share an absmax.
    dtype
        float32, float16 or bfloat16.

    Returns
    -------
    Array of `shape` and `dtype`, of packed's kind and on its device.

    Raises
    ------
    TypeError
        For another dtype of packed, absmax or the result.
    FormatError
        Where the lengths of packed, absmax and shape contradict each other.

    Notes
    -----
    The format: csrc/kernels.cu of bitsandbytes.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> packed, absmax = np.array([176, 83], np.uint8), np.array([2], np.float32)
    >>> cq.functional.dequantize_fp4(packed, absmax)
    array([-2.,  0.,  1.,  2.], dtype=float32)
    """
    return _dequantize("fp4", packed, absmax, shape, block_size, dtype)


def _quantize(name: str, x: Any, outer: Any, inner: Any) -> tuple[Any, Absmax]:
    outer = integer(outer, "block_size_outer", 1)
    inner = integer(inner, "block_size_inner", 1)
    if inner not in (1, NESTED_BLOCK):
        raise ValueError(
            f"block_size_inner is {inner}; pass 1, or {NESTED_BLOCK} for double quantization"
        )
    fmt = get_format(name, block_size=outer, double_quant=inner != 1)
    parts = dict(quantize(flat(x), fmt).components)
    if inner == 1:
        return parts["packed"], parts["scale"]
    return parts["packed"], {
        "absmax_q": parts["scale"],
        "nested_absmax": parts["nested_scale"],
        "nested_map": like(np.asarray(MAPS["dynamic"], np.float32), x),
        "offset": parts["nested_offset"],
    }


def _dequantize(
    name: str, packed: Any, absmax: Absmax, shape: Any, block_size: Any, dtype: object
) -> Any:
    fmt = get_format(name, block_size=integer(block_size, "block_size", 1))
    codes = typed(packed, "packed", np.uint8, near=packed).reshape(-1)
    shape = (2 * len(codes),) if shape is None else extents(shape)
    count = math.prod(shape)
    (size,), (blocks,) = (part.shape for part in fmt.components((count,)))
    if len(codes) != size:
        raise FormatError(
            f"packed has {len(codes)} bytes; {count} elements (shape {shape}) have {size}, "
            "two in each"
        )
    parts = {"packed": codes, "scale": _effective_absmax(absmax, blocks, codes)}
    values = QuantArray(fmt, (count,), np.dtype(np.float32), parts, (0,)).dequantize(dtype=dtype)
    return like(values.reshape(shape), packed)


def _effective_absmax(absmax: Absmax, blocks: int, near: Any) -> Any:
    """float32 [blocks], where `near` is."""
    if not isinstance(absmax, Mapping):
        return _float32_per_block(absmax, "absmax", blocks, near)
    missing = [part for part in NESTED_PARTS if part not in absmax]
    if missing:
        raise FormatError(f"absmax lacks {', '.join(missing)}; quantize_nf4 tells what it holds")
    codes = typed(absmax["absmax_q"], "absmax_q", np.uint8, near=near)
    codes = _per_block(codes, "absmax_q", blocks)
    groups = -(-blocks // NESTED_BLOCK)
    scale = _float32_per_block(absmax["nested_absmax"], "nested_absmax", groups, near)
    # A file may bring a map that another version of torch computed: it is what its codes mean.
    levels = _float32_per_block(absmax["nested_map"], "nested_map", 256, near)
    offset = number(absmax["offset"], "offset", near)
    if interop.is_on_gpu(near):
        return nested_absmax(codes, scale, levels, offset)
    parts = {"scale": codes, "nested_scale": scale, "nested_offset": offset}
    return reference.nested_scales(parts, tuple(levels.tolist()))


def _float32_per_block(values: Any, name: str, count: int, near: Any) -> Any:
    return interop.astype(_per_block(floats(values, name, near), name, count), np.float32)


def _per_block(values: Any, name: str, count: int) -> Any:
    flat = values.reshape(-1)
    if len(flat) != count:
        raise FormatError(f"{name} has {len(flat)} entries; {count} are needed")
    return flat
