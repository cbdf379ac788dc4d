"""The operators of linear layers whose input is quantized too: W8A8, W4A8, fp8.

    torch.ops.cuquant.quantized_linear(x, components, format, layout, shape, dtype,
                                       activations, input_scale=None, bias=None, activation=None)
    torch.ops.cuquant.quantized_grouped_linear(x, components, format, layout, shape, dtype,
                                               by, integers, activations, input_scale=None)

are `cuquant.linear(cuquant.quantize(x, activations, scale=input_scale), weight, ...)` in x's dtype,
and the same of `cuquant.grouped_linear`. Codes have no gradient: what flows back is the gradient of
the weight's decoded values, as if x had not been rounded (straight through). So it is in LLM.int8()
and in training that knows of rounding.
"""

import inspect
from typing import Any

import torch

from cuquant.io.state import parse_format
from cuquant.ops.matmul import door
from cuquant.ops.matmul.grouped import grouped_linear
from cuquant.ops.quantize.door import quantize
from cuquant.torch import op, products
from cuquant.torch.operators import Backward, Operator

_product, _codes = inspect.unwrap(door.linear), inspect.unwrap(quantize)
_of_experts = inspect.unwrap(grouped_linear)


def _quantized_linear(
    x: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    layout: str,
    shape: list[int],
    dtype: torch.dtype,
    activations: str,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    weight = op.weight_of(components, format, layout, shape, dtype)
    q: Any = _codes(x.detach(), parse_format(activations), scale=input_scale)
    return _product(q, weight, bias, activation=activation, out_dtype=x.dtype)


def _fake(
    x: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    layout: str,
    shape: list[int],
    dtype: torch.dtype,
    activations: str,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    op.check_together(x, components, bias)
    return op.rows_of(x, shape, x.dtype)


def _kept(x: torch.Tensor, *args: Any) -> tuple[Any, ...]:
    *weight, activations, scale, bias, activation = args
    return *weight, activations, scale, *op.kept_of_finish(x, bias, activation, None, None)


def _gradients(kept: tuple[Any, ...], g: torch.Tensor, needs: tuple[bool, ...]) -> dict[int, Any]:
    *weight, activations, scale, activation, taken, dtypes = kept
    inner = g
    if activation is not None:
        x, *bias = taken
        took = quantized_linear(x, *weight, activations, scale, *(bias or [None]), None)
        inner = op.through(activation, g, took.float())
    found = {_BIAS: op.of_added(g, inner, dtypes)[0]}
    if needs[0]:
        found[0] = op.linear_grad_x(inner.to(g.dtype), *weight, dtypes[0])
    return found


_BIAS = 8  # its place
quantized_linear = Operator(
    f"quantized_linear(Tensor x, {op.WEIGHT}, str activations, Tensor? input_scale=None, "
    "Tensor? bias=None, str? activation=None) -> Tensor",
    _quantized_linear,
    _fake,
    Backward(_kept, _gradients),
)

# ---- of experts ---------------------------------------------------------------------------------


def _quantized_grouped(
    x: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    layout: str,
    shape: list[int],
    dtype: torch.dtype,
    by: str,
    integers: torch.Tensor,
    activations: str,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    weight = op.weight_of(components, format, layout, shape, dtype, 3)
    q: Any = _codes(x.detach(), parse_format(activations), scale=input_scale)
    made: Any = _of_experts(q, weight, **{by: integers})
    return made.to(x.dtype)


quantized_grouped_linear = Operator(
    f"quantized_grouped_linear(Tensor x, {op.WEIGHT}, str by, Tensor integers, str activations, "
    "Tensor? input_scale=None) -> Tensor",
    _quantized_grouped,
    products.fake_grouped,
    Backward(
        lambda _, *args: args[:7],
        lambda kept, g, _: {0: products.grouped_linear_grad_x(g, *kept)},
    ),
)
