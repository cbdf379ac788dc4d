"""Products of two quantized arrays that were made before with arrays alike.

As prepared.py has it for plain x: what a call needs is kept by all that it depends on but the
addresses, as long as the weights' components live. Of x every component has an address.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cuquant import interop
from cuquant.array.packed_weight import PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.gpu.arrays import GpuBackend, current_backend
from cuquant.ops.matmul import prepared
from cuquant.ops.matmul.coded import Coded
from cuquant.ops.matmul.coded_kernels import Run
from cuquant.ops.matmul.epilogue import PACK
from cuquant.ops.matmul.prepared import ADDRESS, MOST, SIGNATURE, Call
from cuquant.ops.remember import Remembered

NO_NUMBERS = bytes(16)  # of a CodedResults: no factor, no scale of the output


class Plan(NamedTuple):
    """What was found out about a call.

    Attributes
    ----------
    formats
        Of x and the weights, which a key names by identity.
    places
        Where the weights' components lay.
    run, x, constants
        What launches, x but for its addresses, and an Epilogue but for its own.
    shape, dtype, kind, device
        Of the result.
    sizes
        Bytes of x's components, of bias, residual and out, and of the weights' components.
    """

    formats: tuple[Any, ...]
    places: tuple[int, ...]
    run: Run
    x: Coded
    constants: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str
    device: int
    sizes: tuple[tuple[int, ...], ...]


# By the weights' components, then by _key.
_known: Remembered[dict[Any, Plan]] = Remembered()


def _key(call: Call, kind: str) -> Any:
    signature = SIGNATURE[kind]
    x, w = call.x, call.weights[0]
    others = (
        None if array is None else signature(array)
        for array in (call.bias, call.residual, call.out)
    )
    return (
        call.operation,
        call.activation,
        call.out_dtype,
        id(x.format),
        x.shape,
        x.axes,
        id(w.format),
        w.shape,
        w.layout if isinstance(w, PackedWeight) else w.axes,
        *map(signature, x.components.values()),
        *others,
    )


def again(call: Call) -> Any:
    """The product, by the plan of an earlier call with arrays alike on the current device.

    None where there is none, or where `out` may overlap an input.
    """
    x, w = call.x, call.weights[0]
    if not isinstance(x, QuantArray):
        return prepared.again(call)
    if not isinstance(w, (QuantArray, PackedWeight)) or len(call.weights) > 1:
        return None
    parts = w.components.values()
    plans = _known.get(parts)
    if plans is None:
        return None
    kind = interop.kind(next(iter(parts)))
    try:
        plan = plans.get(_key(call, kind))  # type: ignore[arg-type]
    except (AttributeError, IndexError, KeyError):  # what is no array of the weights' library
        return None
    if plan is None or interop.wants_gradient(call.bias, call.residual, call.out):
        return None
    address = ADDRESS[plan.kind]
    backend = current_backend(plan.kind, plan.device)
    if backend is None or plan.places != tuple(map(address, parts)):
        return None
    own = {name: address(part) for name, part in x.components.items()}
    added = tuple(0 if a is None else address(a) for a in (call.bias, call.residual))
    out = call.out
    if out is None:
        out = backend.empty(plan.shape, plan.dtype)
        to = address(out)
    else:
        to = address(out)
        if _overlaps(plan, to, tuple(own.values()), added):
            return None
        interop.mark_written(out)
    results = PACK(to, *added, *plan.constants) + NO_NUMBERS
    plan.run(backend, _at(plan.x, own), results)
    return out


def _at(x: Coded, own: dict[str, int]) -> Coded:
    """x at other addresses."""
    scaling = x.scaling
    if scaling.scale:
        shared = own.get("global_scale", 0)
        scaling = replace(scaling, scale=own["scale"], global_scale=shared)
    point = own["zero_point"] if x.zero_point else 0
    return Coded(x.kind, own["packed"], x.stride, x.rows, scaling, point, 0)


def _overlaps(plan: Plan, to: int, x: tuple[int, ...], added: tuple[int, ...]) -> bool:
    """Whether the memory of `out`, which is contiguous, is some input's."""
    of_x, of_added, (of_out,), of_weights = plan.sizes
    starts, sizes = (*x, *added, *plan.places), (*of_x, *of_added, *of_weights)
    end = to + of_out
    return any(start < end and to < start + size for start, size in zip(starts, sizes, strict=True))


def keep(
    call: Call, out: Any, run: Run, x: Coded, constants: tuple[int, ...], backend: GpuBackend
) -> None:
    """Remember how the product was made, where all arrays are contiguous."""
    kind, w = backend.kind, call.weights[0]
    parts = list(w.components.values())
    arrays = *call.x.components.values(), call.bias, call.residual, out, *parts
    if kind not in ADDRESS or not all(a is None or interop.is_contiguous(a) for a in arrays):
        return
    sizes = tuple(
        tuple(0 if a is None else a.nbytes for a in some)
        for some in (call.x.components.values(), (call.bias, call.residual), (out,), parts)
    )
    plan = Plan(
        (call.x.format, w.format),
        tuple(map(ADDRESS[kind], parts)),
        run,
        x,
        constants,
        tuple(out.shape),
        interop.dtype_of(out),
        kind,
        backend.device,
        sizes,
    )
    plans = _known.get(parts)
    if plans is None:
        plans = _known.put(parts, {})
    if len(plans) >= MOST:
        plans.pop(next(iter(plans)), None)
    plans[_key(call, kind)] = plan
