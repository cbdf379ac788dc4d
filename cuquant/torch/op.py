"""The operators of linear layers with a quantized weight, and how layers call them.

    torch.ops.cuquant.linear(x, components, format, layout, shape, dtype,
                             bias=None, activation=None, residual=None, out_dtype=None)
    torch.ops.cuquant.linear_grad_x(g, components, format, layout, shape, dtype, out_dtype)
    torch.ops.cuquant.dequantize(components, format, layout, shape, dtype)

are `cuquant.linear` of the weight that `components` hold, which the four arguments behind them
describe (`WeightSpec`); g @ weight, which is the gradient of x; and the weight's values. Gradients
flow back to x, bias and residual, never to the weight.

`multiply` is what layers call: the same product, without torch's dispatcher where nobody watches
it.
"""

import inspect
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from cuquant.array.packed_weight import PackedWeight, unpack
from cuquant.array.quant_array import QuantArray
from cuquant.ops.dequantize.door import dequantize
from cuquant.ops.matmul import door
from cuquant.ops.matmul.prepared import MOST, SIGNATURE, Call, Plan, plan_of, repeated
from cuquant.torch.operators import PLAIN, Backward, Operator, is_watched
from cuquant.torch.spec import Weight, WeightSpec

# torch.compile does not look into the operators anyway.
_product, _matmul = inspect.unwrap(door.linear), inspect.unwrap(door.matmul)
_signature, _address = SIGNATURE["torch"], torch.Tensor.data_ptr
decode, _unpack = inspect.unwrap(dequantize), inspect.unwrap(unpack)
WEIGHT = "Tensor[] components, str format, str layout, int[] shape, ScalarType dtype"


class _Kept(NamedTuple):
    """A weight made before, and what it was made of.

    `parts` watch over the components, whose identities and addresses are told beside: the entry
    goes with the first of them that does. `plans` are those of the weight's products, by what
    layers multiply it with.
    """

    said: tuple[object, ...]
    parts: tuple[weakref.ref[torch.Tensor], ...]
    identities: list[int]
    addresses: list[int]
    weight: Weight
    plans: dict[Any, Plan]

    def is_of(self, said: tuple[object, ...], components: Sequence[torch.Tensor]) -> bool:
        return (
            (self.said is said or self.said == said)
            and self.identities == [*map(id, components)]
            and self.addresses == [*map(_address, components)]  # `part.data = ...` moves it
        )


# By the id of the first component. The weights hold aliases of the components, so that these die
# as if nothing were kept here, and take their entry with them.
_kept: dict[int, _Kept] = {}


def weight_of(
    components: Sequence[torch.Tensor],
    format: str,
    layout: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    axes: int | None = 2,
) -> Weight:
    """The QuantArray or PackedWeight of these tensors; the same object as long as they live, unless
    one must be copied, because it starts where its elements cannot: the copy would not see changes.

    It has so many `axes`; None: any number.

    Raises
    ------
    ValueError
        Where the tensors are not what the words describe.
    """
    said = (format, layout, tuple(shape), dtype)
    found = _kept.get(id(components[0])) if components else None
    if found is not None and found.is_of(said, components):
        return found.weight
    if axes is not None and len(shape) != axes:
        wanted = "[N, K]" if axes == 2 else "[E, N, K]"
        raise ValueError(f"shape must be {wanted}, got {list(shape)}")
    weight = WeightSpec(format, layout, tuple(shape), dtype).weight(components)
    key = id(components[0])
    mine = zip(weight.components.values(), components, strict=True)
    if any(alias.data_ptr() != part.data_ptr() for alias, part in mine):
        _kept.pop(key, None)
        return weight

    def forget(_: object, kept: dict[int, _Kept] = _kept) -> None:
        kept.pop(key, None)  # a module's names are gone when Python ends

    parts = tuple(weakref.ref(part, forget) for part in components)
    told = [*map(id, components)], [*map(_address, components)]
    _kept[key] = _Kept(said, parts, *told, weight, {})
    return weight


def forget(components: Sequence[torch.Tensor]) -> None:
    """Keep nothing of these tensors, as torch wants it before it swaps them for others."""
    _kept.pop(id(components[0]), None)


def multiply(
    x: torch.Tensor,
    components: list[torch.Tensor],
    words: tuple[str, str, tuple[int, int], torch.dtype],
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """The operator's result, by the shortest way; `words` are its arguments behind components."""
    if type(x) not in PLAIN or x.is_meta or components[0].is_meta or is_watched():
        return LINEAR(x, components, *words, bias, activation)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return linear.differentiable((x, components, *words, bias, activation, None, None))
    return _planned(x, components, words, bias, activation)


def _planned(
    x: torch.Tensor,
    components: list[torch.Tensor],
    words: tuple[str, str, tuple[int, ...], torch.dtype],
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """The product, without autograd; by the plan of one before, where there is one."""
    kept = _kept.get(id(components[0])) if components else None
    if kept is None or not kept.is_of(words, components):
        weight = weight_of(components, *words)
        kept = _kept.get(id(components[0]))
        if kept is None or kept.weight is not weight:  # it is a copy
            return _product(x, weight, bias, activation=activation)
    key = activation, _signature(x), None if bias is None else _signature(bias)
    plan = kept.plans.get(key)
    if plan is not None:
        out = x.new_empty(plan.shape)
        if repeated(plan, x, bias, out):
            return out
    made = _product(x, kept.weight, bias, activation=activation)
    plan = plan_of(Call("linear", x, (kept.weight,), bias, activation=activation))
    if plan is not None:
        if len(kept.plans) >= MOST:
            kept.plans.clear()
        kept.plans[key] = plan
    return made


def rows(weight: Weight) -> QuantArray:
    """The QuantArray of a weight."""
    return _unpack(weight) if isinstance(weight, PackedWeight) else weight


def values(weight: Weight, dtype: torch.dtype | None = None, out: Any = None) -> torch.Tensor:
    """What a weight decodes to."""
    if isinstance(weight, PackedWeight):
        return weight.dequantize(dtype, out=out)
    return decode(weight, dtype, out=out)


def _linear(
    x: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    layout: str,
    shape: list[int],
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    words = format, layout, tuple(shape), dtype
    if residual is None and out_dtype is None:
        return _planned(x, components, words, bias, activation)
    weight = weight_of(components, *words)
    return _product(x, weight, bias, activation=activation, residual=residual, out_dtype=out_dtype)


def _fake_linear(
    x: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    layout: str,
    shape: list[int],
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    check_together(x, components, bias, residual)
    return rows_of(x, shape, out_dtype or x.dtype)


def check_together(
    x: torch.Tensor,
    components: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """ValueError unless all tensors of a product are on one device."""
    parts = [(f"components[{i}]", part) for i, part in enumerate(components)]
    for name, tensor in (*parts, ("bias", bias), ("residual", residual)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, and x on {x.device}; move one there")


def rows_of(x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for the product of rows of x and a weight [N, K]."""
    width, depth = shape
    if x.ndim == 0 or x.shape[-1] != depth:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; with w {(width, depth)} its last axis must be {depth}"
        )
    return x.new_empty((*x.shape[:-1], width), dtype=dtype)


def _kept_of_linear(
    x: Any, components: Any, format: Any, layout: Any, shape: Any, dtype: Any, *finish: Any
) -> tuple[Any, ...]:
    """x and the bias where what the activation took is computed again; else their dtypes."""
    return components, format, layout, shape, dtype, *kept_of_finish(x, *finish)


def _gradients_of_linear(
    kept: tuple[Any, ...], g: torch.Tensor, needs: tuple[bool, ...]
) -> dict[int, Any]:
    """Of y = activation(x @ w.T + bias) + residual."""
    *weight, activation, taken, dtypes = kept
    inner = g
    if activation is not None:
        x, *bias = taken
        took = linear(x, *weight, *(bias or [None]), None, None, torch.float32)
        inner = through(activation, g, took)
    of_bias, of_residual = of_added(g, inner, dtypes)
    found = {_BIAS: of_bias, _RESIDUAL: of_residual}
    if needs[_X]:
        found[_X] = linear_grad_x(inner.to(g.dtype), *weight, dtypes[0])
    return found


def kept_of_finish(
    x: torch.Tensor, bias: Any, activation: str | None, residual: Any, _: Any
) -> tuple[Any, ...]:
    """What the backward of a product needs beside the weight: the activation, what computes again
    what it took, and the dtypes of x, bias and residual where they require a gradient."""
    taken = None if activation is None else [x, *([] if bias is None else [bias])]
    dtypes = [t.dtype if t is not None and t.requires_grad else None for t in (x, bias, residual)]
    return activation, taken, dtypes


def of_added(g: torch.Tensor, inner: torch.Tensor, dtypes: Sequence[Any]) -> tuple[Any, Any]:
    """The gradients of bias and residual, None of those that need none."""
    _, bias, residual = dtypes
    return (
        None
        if bias is None
        else inner.reshape(-1, g.shape[-1]).sum(0, dtype=torch.float32).to(bias),
        None if residual is None else g.to(residual),
    )


def through(activation: str, g: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """The gradient of what an activation took, z, of that of what it gave; float32 as z."""
    backward, aten = g.float(), torch.ops.aten
    if activation == "relu":
        return aten.threshold_backward(backward, z, 0)
    if activation == "gelu":
        return aten.gelu_backward(backward, z)
    if not torch.is_grad_enabled():
        return aten.silu_backward(backward, z)
    s = torch.sigmoid(z)  # torch differentiates this, and not silu_backward
    return backward * s * (1 + z * (1 - s))


def _linear_grad_x(
    g: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    layout: str,
    shape: list[int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    weight = weight_of(components, format, layout, shape, dtype)
    if not g.is_cuda:
        return _matmul(g, rows(weight), out_dtype=out_dtype)
    # Along N codes are read against their order: decoding all of them first takes a quarter of the
    # time even for one row.
    casts = torch.is_autocast_enabled("cuda")  # it would choose another dtype
    with torch.autocast("cuda", enabled=False) if casts else nullcontext():
        return torch.matmul(g.detach(), values(weight, g.dtype)).to(out_dtype)


def _fake_linear_grad_x(
    g: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    layout: str,
    shape: list[int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return rows_of(g, shape[::-1], out_dtype)


def _gradients_of_linear_grad_x(
    kept: tuple[Any, ...], h: torch.Tensor, needs: tuple[bool, ...]
) -> dict[int, Any]:
    """g @ w is linear in g: what flows back is h @ w.T."""
    *weight, of_g = kept
    return {_X: linear(h, *weight, None, None, None, of_g)}


def _dequantize(
    components: list[torch.Tensor], format: str, layout: str, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    out = components[0].new_empty(shape, dtype=dtype)  # of its own: bfloat16 comes as a view
    values(weight_of(components, format, layout, shape, dtype, None), out=out)
    return out


def _fake_dequantize(
    components: list[torch.Tensor], format: str, layout: str, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    return components[0].new_empty(shape, dtype=dtype)


_X, _BIAS, _RESIDUAL = 0, 6, 8  # places of arguments

linear = Operator(
    f"linear(Tensor x, {WEIGHT}, Tensor? bias=None, str? activation=None, "
    "Tensor? residual=None, ScalarType? out_dtype=None) -> Tensor",
    _linear,
    _fake_linear,
    Backward(_kept_of_linear, _gradients_of_linear),
)
linear_grad_x = Operator(
    f"linear_grad_x(Tensor g, {WEIGHT}, ScalarType out_dtype) -> Tensor",
    _linear_grad_x,
    _fake_linear_grad_x,
    Backward(lambda g, *weight: (*weight[:-1], g.dtype), _gradients_of_linear_grad_x),
)
decoded = Operator(f"dequantize({WEIGHT}) -> Tensor", _dequantize, _fake_dequantize)

LINEAR, DEQUANTIZE = linear.overload, decoded.overload
