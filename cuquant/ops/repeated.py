"""Products that were made before with arrays alike: only addresses differ, and little is done anew.

What a call needs is kept by all that it depends on but the addresses, as long as the first array of
its weight lives: a model's layers are called over and over with the same shapes, and a call must
cost less than its kernel. QuantArrays that are made anew of the same arrays share it, as `q.T`.
"""

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array import QuantArray
from cuquant.ops.gpu import GpuBackend, current_backend
from cuquant.ops.kernels.epilogue import PACK
from cuquant.ops.kernels.operands import Product
from cuquant.ops.kernels.product import Run
from cuquant.packed import PackedWeight

MOST = 64  # kinds of calls that are kept for a weight

Span = tuple[int, int]  # of memory: the first byte, and the one behind the last


@dataclass(frozen=True)
class Plan:
    """What was found out about a call.

    Attributes
    ----------
    parts, addresses
        References to all components of the weights, and where they lay.
    kept
        What must live as long as the plan: what was unpacked for it, and the formats, which a
        Call's key names by identity. Not the components: the plan goes when they do.
    run, constants
        What launches, and an Epilogue but for its addresses.
    shape, dtype, kind, device
        Of the result.
    reaches, spans
        What x, bias, residual and out span, relative to their addresses; and the weights' memory.
    """

    parts: tuple[Any, ...]
    addresses: list[int]
    kept: list[Any]
    run: Run
    constants: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str
    device: int
    reaches: tuple[Span, ...]
    spans: tuple[Span, ...]


# By the identity of the first weight's first component, then by Call.key.
_plans: dict[int, dict[Any, Plan]] = {}


# ---- arrays of a library ------------------------------------------------------------------------


def _cupy_address(x: Any) -> int:
    return x.data.ptr


def _torch_address(x: Any) -> int:
    return x.data_ptr()


def _cupy_signature(x: Any) -> tuple:
    return x.shape, x.strides, x.dtype, x.device.id, x.data.ptr & 15


def _torch_signature(x: Any) -> tuple:
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.is_neg()


_ADDRESS = {"cupy": _cupy_address, "torch": _torch_address}
_SIGNATURE = {"cupy": _cupy_signature, "torch": _torch_signature}


def _identity(weight: Any) -> tuple:
    """What a QuantArray or PackedWeight is beside its components."""
    place = weight.axes if isinstance(weight, QuantArray) else weight.layout
    return id(weight.format), weight.shape, place


# ---- calls --------------------------------------------------------------------------------------


class Call:
    """A product of x and weights, with all of its arguments but the stream.

    `operation` names it: "linear" takes weights [N, K], and "matmul" one [K, N].
    """

    __slots__ = ("arrays", "backend", "key", "options", "weights")

    def __init__(
        self,
        operation: str,
        x: Any,
        weights: tuple[Any, ...],
        bias: Any = None,
        residual: Any = None,
        out: Any = None,
        activation: str | None = None,
        out_dtype: object = None,
    ) -> None:
        self.weights, self.arrays = weights, (x, bias, residual, out)
        self.options = operation, activation, out_dtype
        self.key: Any = None
        self.backend: GpuBackend | None = None

    def known(self) -> Plan | None:
        """The plan of an earlier call with arrays alike, on the current device."""
        if not isinstance(self.weights[0], (QuantArray, PackedWeight)):
            return None
        plans = _plans.get(id(next(iter(self.weights[0].components.values()))))
        plan = None if plans is None else plans.get(self._key())
        if plan is None:
            return None
        parts = [part for weight in self.weights for part in weight.components.values()]
        address = _ADDRESS[plan.kind]
        for reference, before, part in zip(plan.parts, plan.addresses, parts, strict=True):
            if reference() is not part or address(part) != before:
                return None
        self.backend = current_backend(plan.kind, plan.device)
        return None if self.backend is None else plan

    def _key(self) -> Any:
        """All but the components that decides how the product is made; None: no plan fits."""
        x = self.arrays[0]
        kind = interop.kind(x)
        signature = _SIGNATURE.get(kind)  # type: ignore[arg-type]
        if signature is None:
            return None
        if kind == "torch" and x.requires_grad and sys.modules["torch"].is_grad_enabled():
            return None
        key = [*self.options, *map(_identity, self.weights)]
        for array in self.arrays:
            if array is None:
                key.append(None)
            elif interop.kind(array) == kind:
                key.append(signature(array))
            else:
                return None
        self.key = tuple(key)
        return self.key

    def again(self, plan: Plan) -> Any:
        """The product by a plan that `known` gave."""
        backend, out, address = self.backend, self.arrays[3], _ADDRESS[plan.kind]
        assert backend is not None
        inputs = [0 if array is None else address(array) for array in self.arrays[:3]]
        if out is None:
            out = backend.empty(plan.shape, plan.dtype)
            at = address(out)
        else:
            at = address(out)
            low, high = plan.reaches[3]
            low, high = low + at, high + at
            for start, (first, end) in zip(inputs, plan.reaches, strict=False):
                if start + first < high and low < start + end:
                    raise ValueError("out overlaps an input in memory")
            for first, end in plan.spans:
                if first < high and low < end:
                    raise ValueError("out overlaps an input in memory")
        epilogue = PACK(at, inputs[1], inputs[2], *plan.constants)
        plan.run(backend, inputs[0], epilogue)
        return out

    def keep(
        self, out: Any, product: Product, run: Run, constants: tuple[int, ...], backend: GpuBackend
    ) -> None:
        """Remember how the product was made."""
        kind = backend.kind
        if kind not in _ADDRESS or self._key() is None:
            return
        parts = [part for weight in self.weights for part in weight.components.values()]
        used = [part for w in product.weights for part in getattr(w, "parts", {}).values()]
        plan = Plan(
            tuple(map(weakref.ref, parts)),
            [_ADDRESS[kind](part) for part in parts],
            [w.format for w in self.weights]
            + [part for part in used if not any(part is own for own in parts)],
            run,
            constants,
            tuple(out.shape),
            interop.dtype_of(out),
            kind,
            backend.device,
            tuple(_reach(array, kind) for array in self.arrays),
            tuple(map(interop.span, parts)),
        )
        first = parts[0]
        plans = _plans.get(id(first))
        if plans is None:
            plans = _plans[id(first)] = {}
            weakref.finalize(first, _forget, id(first))
        if len(plans) >= MOST:
            plans.clear()
        plans[self.key] = plan


def _forget(identity: int) -> None:
    _plans.pop(identity, None)


def _reach(array: Any, kind: str) -> Span:
    """The bytes that an array spans, relative to its address; none for None."""
    if array is None:
        return 0, 0
    first, end = interop.span(array)
    address = _ADDRESS[kind](array)
    return first - address, end - address
