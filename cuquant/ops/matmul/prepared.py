"""Products that were made before with arrays alike: only addresses differ, and little is done anew.

What a call needs is kept by all that it depends on but the addresses, as long as the arrays of its
weights live: a model's layers are called over and over with the same shapes, and a call must
cost less than its kernel. QuantArrays that are made anew of the same arrays share it, as `q.T`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuquant import interop
from cuquant.array.packed_weight import PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.gpu.arrays import GpuBackend, current_backend
from cuquant.ops.matmul.choose import Run
from cuquant.ops.matmul.epilogue import PACK
from cuquant.ops.matmul.problem import Product
from cuquant.ops.remember import Remembered

MOST = 64  # kinds of calls that are kept for a weight

Span = tuple[int, int]  # of memory: the first byte, and the one behind the last


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found out about a call.

    Attributes
    ----------
    places
        Where the components of the weights lay; None of a library whose arrays stay where they are.
    kept
        What must live as long as the plan: what was unpacked for it, and the formats, which a
        key names by identity. Not the components: the plan goes when they do.
    run, constants
        What launches, and an Epilogue but for its addresses.
    shape, dtype, kind, device
        Of the result.
    reaches
        What x, bias, residual and out span, relative to their addresses.
    spans, around
        The weights' memory, and one span around all of it.
    """

    places: list[int] | None
    kept: list[Any]
    run: Run
    constants: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str
    device: int
    reaches: tuple[Span, ...]
    spans: tuple[Span, ...]
    around: Span


# By the weights' components, then by _key.
_plans: Remembered[dict[Any, Plan]] = Remembered()


# ---- arrays of a library ------------------------------------------------------------------------


def _cupy_address(x: Any) -> int:
    return x.data.ptr


def _torch_address(x: Any) -> int:
    return x.data_ptr()


def _cupy_signature(x: Any) -> tuple:
    data = x.data
    return type(x), x.shape, x.strides, x.dtype, data.device_id, data.ptr & 15


def _torch_signature(x: Any) -> tuple:
    return type(x), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.is_neg()


_ADDRESS = {"cupy": _cupy_address, "torch": _torch_address}
_SIGNATURE = {"cupy": _cupy_signature, "torch": _torch_signature}
_STAYS = ("cupy",)  # whose arrays' memory is what it was when they were made


def _identity(weight: Any) -> tuple:
    """What a QuantArray or PackedWeight is beside its components."""
    place = weight.axes if isinstance(weight, QuantArray) else weight.layout
    return id(weight.format), weight.shape, place


# ---- calls --------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A product of x and weights, with all of its arguments but the stream.

    `operation` names it: "linear" takes weights [N, K], and "matmul" one [K, N].
    """

    operation: str
    x: Any
    weights: tuple[Any, ...]
    bias: Any = None
    residual: Any = None
    out: Any = None
    activation: str | None = None
    out_dtype: object = None


def _key(call: Call) -> Any:
    """All but the components that decides how the product is made; None: no plan fits."""
    operation, x, weights, bias, residual, out, activation, out_dtype = call
    kind = interop.kind(x)
    signature = _SIGNATURE.get(kind)  # type: ignore[arg-type]
    if signature is None:
        return None
    if kind == "torch" and _wants_gradient(x, bias, residual, out):
        return None
    first = weights[0]
    try:  # what is no array of x's library lacks something
        return (
            operation,
            activation,
            out_dtype,
            _identity(first),
            None if len(weights) == 1 else tuple(map(_identity, weights[1:])),
            signature(x),
            None if bias is None else signature(bias),
            None if residual is None else signature(residual),
            None if out is None else signature(out),
        )
    except AttributeError:
        return None


def _wants_gradient(*tensors: Any) -> bool:
    return any(t is not None and interop.wants_gradient(t) for t in tensors)


def _parts(call: Call) -> Collection[Any]:
    """The components of a call's weights."""
    if len(call.weights) == 1:
        return call.weights[0].components.values()
    return [part for weight in call.weights for part in weight.components.values()]


def again(call: Call) -> Any:
    """The product, by the plan of an earlier call with arrays alike on the current device.

    None where there is none, or where `out` may overlap an input.
    """
    for weight in call.weights:
        if not isinstance(weight, (QuantArray, PackedWeight)):
            return None
    parts = _parts(call)
    plans = _plans.get(parts)
    plan = None if plans is None else plans.get(_key(call))
    if plan is None:
        return None
    address = _ADDRESS[plan.kind]
    if plan.places is not None and plan.places != list(map(_torch_address, parts)):
        return None
    backend = current_backend(plan.kind, plan.device)
    if backend is None:
        return None
    at = address(call.x)
    bias = 0 if call.bias is None else address(call.bias)
    residual = 0 if call.residual is None else address(call.residual)
    out = call.out
    if out is None:
        out = backend.empty(plan.shape, plan.dtype)
        to = address(out)
    else:
        to = address(out)
        if _may_overlap(plan, at, bias, residual, to):
            return None
        interop.mark_written(out)
    plan.run(backend, at, PACK(to, bias, residual, *plan.constants))
    return out


def _may_overlap(plan: Plan, x: int, bias: int, residual: int, out: int) -> bool:
    """Whether the memory that `out` spans overlaps that of an input."""
    own, of_bias, of_residual, (first, end) = plan.reaches
    low, high = first + out, end + out
    first, end = plan.around
    overlaps = x + own[0] < high and low < x + own[1]
    if bias:
        overlaps |= bias + of_bias[0] < high and low < bias + of_bias[1]
    if residual:
        overlaps |= residual + of_residual[0] < high and low < residual + of_residual[1]
    if first < high and low < end:
        overlaps |= any(first < high and low < end for first, end in plan.spans)
    return overlaps


def keep(
    call: Call,
    out: Any,
    product: Product,
    run: Run,
    constants: tuple[int, ...],
    backend: GpuBackend,
) -> None:
    """Remember how the product was made."""
    kind = backend.kind
    key = _key(call) if kind in _ADDRESS else None
    if key is None:
        return
    parts = list(_parts(call))
    used = [part for w in product.weights for part in getattr(w, "parts", {}).values()]
    spans = tuple(map(interop.span, parts))
    arrays = call.x, call.bias, call.residual, call.out
    plan = Plan(
        None if kind in _STAYS else list(map(_torch_address, parts)),
        [w.format for w in call.weights]
        + [part for part in used if not any(part is own for own in parts)],
        run,
        constants,
        tuple(out.shape),
        interop.dtype_of(out),
        kind,
        backend.device,
        tuple(_reach(array, kind) for array in arrays),
        spans,
        (min(first for first, _ in spans), max(end for _, end in spans)),
    )
    plans = _plans.get(parts)
    if plans is None:
        plans = _plans.put(parts, {})
    if len(plans) >= MOST:
        plans.clear()
    plans[key] = plan


def _reach(array: Any, kind: str) -> Span:
    """The bytes that an array spans, relative to its address; none for None."""
    if array is None:
        return 0, 0
    first, end = interop.span(array)
    address = _ADDRESS[kind](array)
    return first - address, end - address
