"""Products with arrays of odd formats: by the plain arrays that they store, or by their values.

Columns of x follow the permutation of a weight; blocks of the flattened array that end with its
rows are a plain array's; absmax becomes scales. What is left is decoded to float32.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array import arranged
from cuquant.array.packed_weight import PackedWeight, unpack
from cuquant.formats.scales import INVERSE_127
from cuquant.gpu.arrays import backend_of
from cuquant.ops.dequantize.door import dequantize
from cuquant.ops.matmul.check import F32, Finish, Operand
from cuquant.ops.remember import Remembered

Pair = tuple[Any, Any]


def is_odd(operand: Operand) -> bool:
    """Whether kernels do not read an operand as it is stored."""
    return operand.dtype is None and not operand.source.format.is_plain


def at_hand(x: Any, w: Any) -> Pair | None:
    """x with its columns in the order of a weight [N, K], and the plain weight; None: `rearranged`
    has to look closer.

    Of arrays on one GPU: the plain weight's components are the same objects in every call, so that
    a product is made by the plan of the call before.
    """
    fmt, kind = w.format, interop.kind(x)
    if fmt.is_plain or kind not in ("cupy", "torch") or not (fmt.permuted or fmt.rule.absmax):
        return None
    parts = w.components
    first = next(iter(parts.values()))
    is_row_major = isinstance(w, PackedWeight) or w.axes == (0, 1)
    if not is_row_major or len(w.shape) != 2 or w.kind != kind or not interop.is_on_gpu(x):
        return None
    if x.device != first.device or not x.shape or x.shape[-1] != w.shape[1]:
        return None
    if kind == "torch" and interop.wants_gradient(x):
        return None
    if fmt.permuted:
        return arranged.gathered(x, parts[arranged.ORDER], x.ndim - 1), arranged.plain(w)
    absmax = parts["scale"]
    scale = _scales.get([absmax])
    if scale is None:
        scale = _scales.put([absmax], _like(absmax))
    interop.namespace(absmax).multiply(absmax, INVERSE_127.item(), out=scale)
    return x, w._with(format=fmt.plain, components={**parts, "scale": scale})


def _like(array: Any) -> Any:
    """Memory for as many numbers; of torch none that only its inference mode may write to."""
    library = interop.namespace(array)
    with library.inference_mode(False) if interop.kind(array) == "torch" else nullcontext():
        return library.empty_like(array)


# Where scales of absmax go, which each product makes anew: absmax may have changed.
_scales: Remembered[Any] = Remembered()


def rearranged(left: Operand, right: Operand, axes: tuple[int, int], stream: object) -> Pair | None:
    """Factors of the same product of which none is odd, and one is quantized; None: there are none.

    `axes` are those that are summed over.
    """
    first = left.memory()[0]
    with backend_of(first, stream) if left.place.is_gpu else nullcontext():
        if is_odd(left) and is_odd(right):
            return _with(right, dequantize(left.quantized, F32), axes[1], axes[0])
        if is_odd(right):
            return _with(right, left.source, axes[1], axes[0])
        made = _with(left, right.source, axes[0], axes[1])
        return made and made[::-1]


def decoded(operand: Operand, stream: object) -> Operand:
    """An odd operand on a GPU as an array of float32; others as they are."""
    if not (operand.place.is_gpu and is_odd(operand)):
        return operand
    values = dequantize(operand.quantized, F32, stream=stream)
    return replace(operand, source=values, dtype=np.dtype(F32))


def _with(odd: Operand, other: Any, axis: int, others: int) -> Pair | None:
    """The other factor and the odd one, as `rearranged` has them."""
    source, fmt = odd.source, odd.source.format
    if fmt.is_flat:
        source = arranged.in_rows(unpack(source) if isinstance(source, PackedWeight) else source)
        return None if source is None else (other, source)
    if not fmt.permuted:
        return other, arranged.plain(source)
    is_along = isinstance(source, PackedWeight) or source.axis == axis
    if not is_along:
        return None
    if interop.kind(other) is None:  # quantized
        other = other.dequantize(dtype=F32)
    order = interop.beside(source.components[arranged.ORDER], other, arranged.ORDER)
    return arranged.gathered(other, order, others), arranged.plain(source)


def product_of(gated: Any, other: Any, finish: Finish, stream: object) -> Any:
    """The elements of two float32 results multiplied, as a product's `finish` has them."""
    if not finish.place.is_gpu:
        return finish(lambda: interop.to_numpy(gated) * interop.to_numpy(other))
    with backend_of(gated, stream) as backend:
        made = interop.astype(gated * other, finish.dtype)
        if finish.out is None:
            return made
        backend.copy_into(finish.out, made)
        return finish.out
