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
from cuquant.gpu.arrays import backend_of
from cuquant.ops.dequantize.door import dequantize
from cuquant.ops.matmul.check import F32, Finish, Operand
from cuquant.ops.remember import Remembered

Pair = tuple[Any, Any]

# The component of an odd array that kernels read another one in place of, and what computes that.
COMPUTED = {
    ("absmax",): ("scale", arranged.scales_of),
    ("divisor",): ("global_scale", arranged.reciprocal),
}
# By such a component on a GPU, what was computed of it. Each product writes that anew, for the
# component may have changed; what was prepared for a product is found by the arrays that it reads.
_computed: Remembered[Any] = Remembered()


def is_odd(operand: Operand) -> bool:
    """Whether kernels do not read an operand as it is stored."""
    return operand.dtype is None and not operand.source.format.is_plain


def at_hand(x: Any, w: Any) -> Pair | None:
    """x with its columns in the order of an odd weight [N, K], and the plain weight.

    Of arrays on one GPU; None: `rearranged` has to look closer. The plain
    weight's components are the same objects in every call, so that a product is made by the plan
    of the call before.
    """
    odd, kind = w.format.odd, interop.kind(x)
    if not (odd in COMPUTED or odd == ("permuted",)) or kind not in ("cupy", "torch"):
        return None
    first = next(iter(w.components.values()))
    is_row_major = isinstance(w, PackedWeight) or w.axes == (0, 1)
    if not is_row_major or len(w.shape) != 2 or w.kind != kind or not interop.is_on_gpu(x):
        return None
    if x.device != first.device or not x.shape or x.shape[-1] != w.shape[1]:
        return None
    if kind == "torch" and interop.wants_gradient(x):
        return None
    if odd in COMPUTED:
        return x, computed(w)
    order = w.components[arranged.ORDER]
    return arranged.gathered(x, order, x.ndim - 1), arranged.plain(w)


def is_computed(source: Any) -> bool:
    """Whether a component that kernels read another one in place of is all that makes it odd."""
    return interop.kind(source) is None and source.format.odd in COMPUTED


def computed(source: Any) -> Any:
    """The plain array of one that is not permuted; its arrays are the same in every call."""
    if not is_computed(source):
        return arranged.plain(source)
    name, make = COMPUTED[source.format.odd]
    part = source.components[name]
    if not interop.is_on_gpu(part):
        return arranged.plain(source)
    kept = _computed.get((part,))
    # torch writes to what was made in inference mode in that mode alone, and to others there too.
    is_torch = interop.kind(part) == "torch"
    with interop.namespace(part).inference_mode() if is_torch else nullcontext():
        made = make(part, kept)
    if kept is None:
        kept = _computed.put((part,), made)
    return source._with(format=source.format.plain, components={**source.components, name: kept})


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
    if fmt.rule.per_matrix and isinstance(source, PackedWeight):  # which lies in rows
        source = unpack(source)
    if not fmt.permuted:
        return other, computed(source)
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
