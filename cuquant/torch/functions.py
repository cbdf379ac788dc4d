"""cuquant's products of torch's tensors, by operators: what gradients flow through.

`cuquant.linear` and the others call the function of the same name here, with the same arguments,
where a tensor requires a gradient (`interop.by_operator`).
"""

from typing import Any

import numpy as np
import torch

from cuquant import interop
from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.io.state import format_text
from cuquant.ops.matmul.check import stored
from cuquant.torch import op, products
from cuquant.torch.module import QuantLinear
from cuquant.torch.spec import DTYPES, tensor_of

_WHERE = ("out", "stream", "out_scale", "batch_invariant")  # which operators are not told


def linear(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    residual: Any = None,
    out_dtype: object = None,
    **where: Any,
) -> torch.Tensor:
    """`cuquant.linear`."""
    if isinstance(w, QuantArray) and w.axes == (1, 0):  # its blocks run along N
        finish = {"bias": bias, "activation": activation, "residual": residual}
        return matmul(x, w.T, out_dtype=out_dtype, **finish, **where)
    x, bias, residual = _checked(where, x=x, bias=bias, residual=residual)
    return op.linear(x, *_weight(w), bias, activation, residual, _dtype(out_dtype))


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    out_dtype: object = None,
    **where: Any,
) -> torch.Tensor:
    """`cuquant.matmul`."""
    on_left = isinstance(a, QuantArray)
    q, x = (a, b) if on_left else (b, a)
    given = {"b" if on_left else "a": x, "bias": bias, "residual": residual}
    x, bias, residual = _checked(where, **given)
    if not isinstance(q, QuantArray):
        raise TypeError(f"b must be a QuantArray, got {type(q).__name__}")
    parts, fmt, _, shape, dtype = _described(q, q.stored_shape)
    factor = parts, fmt, shape, q.axes, dtype, on_left
    return products.matmul(x, *factor, bias, activation, residual, _dtype(out_dtype))


def swiglu(x: Any, w_gate: Any, w_up: Any, **where: Any) -> torch.Tensor:
    """`cuquant.swiglu`."""
    (x,) = _checked(where, x=x)
    return products.swiglu(x, *_weight(w_gate, "w_gate"), *_weight(w_up, "w_up"))


def grouped_linear(
    x: Any, w: Any, experts: Any = None, *, offsets: Any = None, counts: Any = None, **where: Any
) -> torch.Tensor:
    """`cuquant.grouped_linear`."""
    (x,) = _checked(where, x=x)
    by = "experts" if experts is not None else "offsets" if offsets is not None else "counts"
    integers = next(given for given in (experts, offsets, counts) if given is not None)
    if interop.kind(integers) is None:
        integers = np.asarray(integers)
    return products.grouped_linear(x, *_weight(w, "w", 3), by, tensor_of(integers))


def traced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch.compile sees in place of a call of cuquant's: the operator's result.

    None where no operator takes the arguments. The code here is what Dynamo follows.
    """
    given = *args, *kwargs.values()
    weights = [w for w in given if isinstance(w, (QuantArray, PackedWeight, QuantLinear))]
    if len(weights) != (2 if name == "swiglu" else 1) or _told(kwargs):
        return None
    if not any(isinstance(value, torch.Tensor) for value in given):
        return None
    if any(not isinstance(w, QuantLinear) and w.kind != "torch" for w in weights):
        return None
    return _FUNCTIONS[name](*args, **kwargs)


def _checked(where: dict[str, Any], **arrays: Any) -> list[Any]:
    """Arrays as tensors, those of NumPy on their own memory; the first must be one, for where codes
    are multiplied nothing flows back to what is added to them.

    RuntimeError for what says where or how a result is made, which operators are not told.
    """
    if told := _told(where):
        raise RuntimeError(
            f"a product that gradients flow through takes no {', '.join(told)}=; call it under "
            "torch.no_grad(), or pass x.detach()"
        )
    name, first = next(iter(arrays.items()))
    if not isinstance(first, torch.Tensor):
        for name, value in arrays.items():
            interop.refuse_gradient(value, name)
    return [
        interop.from_numpy(value, "torch") if interop.kind(value) == "numpy" else value
        for value in arrays.values()
    ]


def _told(given: dict[str, Any]) -> list[str]:
    """What of a call's arguments by name says where or how a result is made."""
    return [key for key in _WHERE if given.get(key) is not None and given.get(key) is not False]


@torch.compiler.assume_constant_result
def _dtype(value: Any) -> torch.dtype | None:
    return None if value is None else interop.torch_dtype(interop.float_dtype(value, "out_dtype"))


def _weight(w: Any, name: str = "w", ndim: int = 2) -> tuple[Any, ...]:
    """A weight [N, K] or [E, N, K], or what holds one, as an operator takes it."""
    if isinstance(w, QuantLinear) and ndim == 2:
        return w._parts(), *w._words
    w = stored(w)
    if not isinstance(w, (QuantArray, PackedWeight)):
        raise TypeError(f"{name} must be a QuantArray or PackedWeight, got {type(w).__name__}")
    if len(w.shape) != ndim:
        wanted = "[N, K]" if ndim == 2 else "[E, N, K]"
        raise ValueError(f"{name} has shape {w.shape}; it must be {wanted}")
    if isinstance(w, QuantArray) and w.axes != tuple(range(ndim)):
        raise ValueError(f"{name} must be quantized along its last axis for gradients to flow")
    return _described(w, w.shape)


def _described(w: QuantArray | PackedWeight, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """A weight as an operator takes it: its arrays as tensors, and what they mean."""
    if not torch.compiler.is_compiling():  # where the kernel does
        w.check()
    own = w.kind == "torch"
    tensors = [part if own else tensor_of(part) for part in w.components.values()]
    parts = [part.contiguous() for part in tensors]
    layout = w.layout if isinstance(w, PackedWeight) else ROWS_LAYOUT
    return parts, _text(w.format), layout, tuple(shape), DTYPES[w.dtype.name]


_FUNCTIONS = {f.__name__: f for f in (linear, matmul, swiglu, grouped_linear)}
_text = torch.compiler.assume_constant_result(format_text)
