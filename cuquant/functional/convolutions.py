"""Convolutions of integers and of signs: exact, as a product of patches and filters."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.errors import clipped
from cuquant.functional.checks import integer, like, typed
from cuquant.functional.product_arguments import (
    along,
    exact_product,
    scaled,
    signed,
    signs_of_host,
)
from cuquant.ops.matmul.byte_rows import BYTES, signs_of
from cuquant.ops.matmul.patches import Window
from cuquant.ops.plain_convolutions import Image, convolve
from cuquant.ops.plain_products import Scales

F32 = np.float32
Pair = int | Sequence[int]
INT8 = np.dtype(np.int8)


def int8_conv2d(x: Any, w: Any, stride: Pair = 1, padding: Pair = 0, scale: Any = None) -> Any:
    """The convolution of integers of 8 bits, as neural networks have it: nothing is mirrored.

    Parameters
    ----------
    x
        int8 or uint8 [B, C, H, W].
    w
        int8 or uint8 [O, C, kH, kW].
    stride
        From patch to patch: an int, or one for rows and one for columns.
    padding
        Rows and columns of zeros on each side of an image: an int or two.
    scale
        None, one number, or one for each filter: [O] or [O, 1].

    Returns
    -------
    [B, O, oH, oW] of x's kind and device, oH = (H + 2 * padding - kH) // stride + 1. Without a
    scale int32: the exact sum modulo 2^32; with one float32: that int32 * scale.

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        For shapes that do not fit, a stride below 1 or a negative padding.

    Notes
    -----
    On a GPU patches are gathered while they are multiplied, and never written. The arithmetic is
    that of Jacob et al., arXiv 1712.05877.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.arange(9, dtype=np.int8).reshape(1, 1, 3, 3)
    >>> cq.functional.int8_conv2d(x, np.ones((1, 1, 2, 2), np.int8), stride=(1, 2), padding=(0, 1))
    array([[[[ 3, 12],
             [ 9, 24]]]], dtype=int32)
    """
    image, filters = (typed(v, n, np.int8, np.uint8, near=x) for v, n in ((x, "x"), (w, "w")))
    window, shape = _window(image, filters, stride, padding)
    factor = _per_filter(scale, shape, image)
    if interop.is_on_gpu(image):
        pixels, rows = (Image(each, BYTES, interop.dtype_of(each)) for each in (image, filters))
        return convolve(pixels, rows, window, shape, factor)
    return like(_convolved(image.astype(np.int16), filters.astype(np.int16), window, factor), x)


def binary_conv2d(x: Any, w: Any, stride: Pair = 1, padding: Pair = 0, scale: Any = None) -> Any:
    """The convolution of the signs of x and w, where 0 and -0.0 count as +1.

    Parameters
    ----------
    x
        [B, C, H, W] of float32, float16, bfloat16 or integers.
    w
        [O, C, kH, kW] of these.
    stride, padding, scale
        As in `int8_conv2d`; padded places add 0, they have no sign.

    Returns
    -------
    int32 [B, O, oH, oW] of x's kind and device; float32 with a scale.

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        For shapes that do not fit, a stride below 1, a negative padding, or NaN, which has no
        sign; on a GPU, where looking for it would wait, it counts as +1.

    Notes
    -----
    XNOR-Net, arXiv 1603.05279, multiplies each filter's result by the mean of its weights'
    magnitudes: those are the scales of the format int1, whose codes are these signs.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((1, 8, 5, 5), np.float32)
    >>> w = rng.standard_normal((4, 8, 3, 3), np.float32)
    >>> alpha = cq.quantize(w.reshape(4, -1), "int1").scale
    >>> y = cq.functional.binary_conv2d(x, w, padding=1, scale=alpha)
    >>> signs = cq.functional.binary_conv2d(x, w, padding=1)
    >>> signs.dtype, bool((y == signs * alpha.reshape(4, 1, 1).astype(np.float32)).all())
    (dtype('int32'), True)
    """
    image, filters = (signed(v, n, near=x) for v, n in ((x, "x"), (w, "w")))
    window, shape = _window(image, filters, stride, padding)
    factor = _per_filter(scale, shape, image)
    if interop.is_on_gpu(image):
        pixels, rows = (
            Image(each, signs_of(interop.dtype_of(each)), INT8) for each in (image, filters)
        )
        return convolve(pixels, rows, window, shape, factor)
    ones, others = signs_of_host(image, "x"), signs_of_host(filters, "w")
    return like(_convolved(ones, others, window, factor), x)


def _convolved(x: np.ndarray, w: np.ndarray, window: Window, scale: Any) -> np.ndarray:
    """int32, or float32 with a scale, of int16."""
    (down, across), (above, before) = window.stride, window.padding
    padded = np.pad(x, ((0, 0), (0, 0), (above, above), (before, before)))
    patches = np.lib.stride_tricks.sliding_window_view(padded, window.taps, (2, 3))
    patches = patches[:, :, ::down, ::across].transpose(0, 2, 3, 1, 4, 5)
    images, high, wide = patches.shape[:3]
    size = math.prod(w.shape[1:])
    rows = exact_product(patches.reshape(images * high * wide, size), w.reshape(len(w), size).T)
    sums = rows.reshape(images, high, wide, len(w)).transpose(0, 3, 1, 2).astype(np.int32)
    made = sums if scale is None else scaled(sums, Scales(a=scale.reshape(-1, 1, 1)))
    return np.ascontiguousarray(made)


def _per_filter(scale: Any, shape: tuple[int, ...], near: Any) -> Any:
    """One number, or [O, 1]."""
    return along(scale, "scale", shape[1], (shape[1], 1), near)


def _window(
    x: Any, w: Any, stride: Pair, padding: Pair
) -> tuple[Window, tuple[int, int, int, int]]:
    """How the filter moves, and the output's shape."""
    image, filters = tuple(x.shape), tuple(w.shape)
    wanted = (("x", image, "[B, C, H, W]"), ("w", filters, "[O, C, kH, kW]"))
    for name, given, axes in wanted:
        if len(given) != 4:
            raise ValueError(f"{name} has shape {given}; it must be {axes}")
    if image[1] != filters[1]:
        raise ValueError(f"x has shape {image} and w {filters}; their channels differ")
    taps = filters[2], filters[3]
    if 0 in taps:
        raise ValueError(f"w has shape {filters}: a filter without taps")
    steps, zeros = _pair(stride, "stride", 1), _pair(padding, "padding", 0)
    window = Window((image[2], image[3]), taps, steps, zeros)
    if min(window.out) < 1:
        raise ValueError(
            f"w has shape {filters}, which is larger than x {image} with padding {zeros}"
        )
    return window, (image[0], filters[0], *window.out)


def _pair(value: Any, name: str, low: int) -> tuple[int, int]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != 2:
            raise ValueError(f"{name} must be an int or two, got {clipped(value)}")
        return integer(value[0], name, low), integer(value[1], name, low)
    both = integer(value, name, low)
    return both, both
