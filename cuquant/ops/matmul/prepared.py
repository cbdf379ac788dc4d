"""Products that were made before with arrays alike: only addresses differ, and little is done anew.

What a call needs is kept by all that it depends on but the addresses, as long as the arrays of its
weights live: a model's layers are called over and over with the same shapes, and a call must
cost less than its kernel. QuantArrays that are made anew of the same arrays share it, as `q.T`.
An x that is quantized has an address for each of its components.

What does not depend on the number of rows of x is kept beside it, so that another number of rows
(each prompt has its own) is checked and prepared again only as far as it matters.
"""

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cuquant import interop
from cuquant.array.packed_weight import PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.gpu.arrays import GpuBackend, current_backend
from cuquant.ops.matmul.choose import Family, family_of
from cuquant.ops.matmul.epilogue import PACK
from cuquant.ops.matmul.problem import Prepared, Problem, Product
from cuquant.ops.remember import Remembered

MOST = 64  # kinds of calls that are kept for a weight, the latest ones
LEAST_ROWS = 2  # of x, from which on it matters where the next one begins

Span = tuple[int, int]  # of memory: the first byte, and the one behind the last
Signature = Callable[[Any], tuple]
# Multiplies, called with x's address, or a tuple of its components', and the bytes of an Epilogue.
Again = Callable[[GpuBackend, Any, bytes], None]


class Plan(NamedTuple):
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
        What out, bias, residual and x or its components span, relative to their addresses.
    spans, around
        The weights' memory, and one span around all of it.
    """

    places: list[int] | None
    kept: list[Any]
    run: Again
    constants: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str
    device: int
    reaches: tuple[Span, ...]
    spans: tuple[Span, ...]
    around: Span


@dataclass(frozen=True, slots=True)
class Rows:
    """A plan whose x, residual and out are contiguous, and what multiplies other rows alike.

    Attributes
    ----------
    plan
        Of one number of rows.
    product, problem
        The same, without the weights' arrays and without x's; and as `choose` is asked.
    prepared
        By family; what other rows needed until now.
    """

    plan: Plan
    product: Product
    problem: Problem
    prepared: dict[Family, Prepared]


class Known(NamedTuple):
    """What is kept for weights: plans by _key, and Rows by the same of _ROWS."""

    plans: dict[Any, Plan]
    rows: dict[Any, Rows]


# By the weights' components.
_known: Remembered[Known] = Remembered()


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


def _cupy_rows(x: Any) -> tuple:
    data = x.data
    return type(x), x.shape[-1], x.flags.c_contiguous, x.dtype, data.device_id, data.ptr & 15


def _torch_rows(x: Any) -> tuple:
    signature = type(x), x.shape[-1], x.is_contiguous(), x.dtype, x.device
    return *signature, x.data_ptr() & 15, x.is_neg()


ADDRESS = {"cupy": _cupy_address, "torch": _torch_address}
SIGNATURE = {"cupy": _cupy_signature, "torch": _torch_signature}
_ROWS = {"cupy": _cupy_rows, "torch": _torch_rows}  # the same, but for how many rows there are
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


def _key(call: Call, signatures: Mapping[str, Signature] = SIGNATURE) -> Any:
    """All but the components that decides how the product is made; None: no plan fits.

    Of x, residual and out it is what `signatures` say, of the bias all.
    """
    operation, x, weights, bias, residual, out, activation, out_dtype = call
    coded = isinstance(x, QuantArray)
    kind = interop.kind(next(iter(x.components.values())) if coded else x)
    signature = signatures.get(kind)  # type: ignore[arg-type]
    if signature is None:
        return None
    if kind == "torch" and interop.wants_gradient(x, bias, residual, out):
        return None
    first, own = weights[0], SIGNATURE[kind]  # type: ignore[index]
    try:  # what is no array of x's library lacks something
        return (
            operation,
            activation,
            out_dtype,
            _identity(first),
            None if len(weights) == 1 else tuple(map(_identity, weights[1:])),
            (*_identity(x), *map(own, x.components.values())) if coded else signature(x),
            None if bias is None else own(bias),
            None if residual is None else signature(residual),
            None if out is None else signature(out),
        )
    except (AttributeError, IndexError):
        return None


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
    known = _known.get(parts)
    if known is None:
        return None
    key = _key(call)
    plan = known.plans.get(key) or _of_other_rows(call, known, key)
    if plan is None:
        return None
    address = ADDRESS[plan.kind]
    if plan.places is not None and plan.places != list(map(_torch_address, parts)):
        return None
    backend = current_backend(plan.kind, plan.device)
    if backend is None:
        return None
    x = call.x
    coded = isinstance(x, QuantArray)
    places = tuple(map(address, x.components.values() if coded else (x,)))
    bias = 0 if call.bias is None else address(call.bias)
    residual = 0 if call.residual is None else address(call.residual)
    out = call.out
    if out is None:
        out = backend.empty(plan.shape, plan.dtype)
        to = address(out)
    else:
        to = address(out)
        if _may_overlap(plan, to, bias, residual, *places):
            return None
        interop.mark_written(out)
    plan.run(backend, places if coded else places[0], PACK(to, bias, residual, *plan.constants))
    return out


def plan_of(call: Call) -> Plan | None:
    """The plan by which `again` makes a product of these arrays, if there is one."""
    known = _known.get(_parts(call))
    return None if known is None else known.plans.get(_key(call))


def repeated(plan: Plan, x: Any, bias: Any, out: Any) -> bool:
    """Make a product, to a new array, by a plan that is known to be of these ones, x not quantized;
    False where another device is current."""
    backend = current_backend(plan.kind, plan.device)
    if backend is None:
        return False
    address = ADDRESS[plan.kind]
    to = address(out), 0 if bias is None else address(bias)
    plan.run(backend, address(x), PACK(*to, 0, *plan.constants))
    return True


def _of_other_rows(call: Call, known: Known, key: Any) -> Plan | None:
    """The plan of a call that only differs in the rows of x from one that was made, if any."""
    rows = known.rows.get(_key(call, _ROWS)) if known.rows and key is not None else None
    if rows is None:
        return None
    plan, x = rows.plan, call.x
    count, shape = math.prod(x.shape[:-1]), (*x.shape[:-1], rows.product.columns)
    backend = current_backend(plan.kind, plan.device)
    fits = all(a is None or tuple(a.shape) == shape for a in (call.residual, call.out))
    moved = plan.places is not None and plan.places != list(map(_torch_address, _parts(call)))
    if count < LEAST_ROWS or not fits or moved or backend is None:
        return None
    family = family_of(backend, replace(rows.problem, rows=count))
    prepared = rows.prepared.get(family)
    if prepared is None:
        if any(w.layout not in family.layouts for w in rows.product.weights):
            return None
        stored = zip(rows.product.weights, call.weights, strict=True)
        weights = tuple(replace(w, parts=own.components) for w, own in stored)
        prepared = family.prepare(backend, replace(rows.product, weights=weights))
        rows.prepared[family] = prepared
    arrays = x, call.residual, call.out
    of_x, of_residual, of_out = ((0, 0 if a is None else a.nbytes) for a in arrays)
    reaches = of_out, plan.reaches[1], of_residual, of_x
    made = plan._replace(run=prepared(count), shape=shape, reaches=reaches)
    _put(known.plans, key, made)
    return made


def _may_overlap(plan: Plan, out: int, *inputs: int) -> bool:
    """Whether the memory that `out` spans overlaps that of an input; those that are None are 0."""
    (first, end), *reaches = plan.reaches
    low, high = first + out, end + out
    for at, (first, end) in zip(inputs, reaches, strict=True):
        if at + first < high and low < at + end:
            return True
    first, end = plan.around
    return first < high and low < end and any(a < high and low < b for a, b in plan.spans)


def keep(
    call: Call,
    out: Any,
    run: Again,
    constants: tuple[int, ...],
    backend: GpuBackend,
    product: Product | None = None,
) -> None:
    """Remember how the product was made; `product` says how other rows of a plain x are."""
    kind, x = backend.kind, call.x
    key = _key(call) if kind in ADDRESS else None
    if key is None:
        return
    parts = list(_parts(call))
    weights = () if product is None else product.weights
    used = [part for w in weights for part in getattr(w, "parts", {}).values()]
    others = [part for part in used if not any(part is own for own in parts)]
    spans = tuple(map(interop.span, parts))
    coded = isinstance(x, QuantArray)
    arrays = call.out, call.bias, call.residual, *(x.components.values() if coded else (x,))
    plan = Plan(
        None if kind in _STAYS else list(map(_torch_address, parts)),
        [*(q.format for q in (*call.weights, x) if hasattr(q, "format")), *others],
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
    known = _known.get(parts) or _known.put(parts, Known({}, {}))
    _put(known.plans, key, plan)
    if product is None or product.rows < LEAST_ROWS or others:
        return
    if all(map(_is_contiguous, arrays)):
        problem = product.problem(backend)
        _put(known.rows, _key(call, _ROWS), Rows(plan, product.bare, problem, {}))


def _put(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value; where there are MOST, the oldest goes."""
    if len(kept) >= MOST:
        with suppress(RuntimeError, StopIteration):  # another thread puts or clears meanwhile
            kept.pop(next(iter(kept)), None)
    kept[key] = value


def _is_contiguous(array: Any) -> bool:
    return array is None or interop.is_contiguous(array)


def _reach(array: Any, kind: str) -> Span:
    """The bytes that an array spans, relative to its address; none for None."""
    if array is None:
        return 0, 0
    first, end = interop.span(array)
    address = ADDRESS[kind](array)
    return first - address, end - address
