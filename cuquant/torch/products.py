"""The operators of products that are no linear layer's: matmul, swiglu, grouped_linear.

    torch.ops.cuquant.matmul(x, components, format, shape, axes, dtype, on_left,
                             bias=None, activation=None, residual=None, out_dtype=None)
    torch.ops.cuquant.swiglu(x, gate, gate_format, gate_layout, gate_shape, gate_dtype,
                             up, up_format, up_layout, up_shape, up_dtype)
    torch.ops.cuquant.grouped_linear(x, components, format, layout, shape, dtype, by, integers)
    torch.ops.cuquant.grouped_linear_grad_x(g, ...)

`shape` of a factor of matmul is that of the stored array, `axes` the order in which the factor has
its axes, and `on_left` whether it is q of q @ x. `by` says what the integers of grouped_linear are:
"experts", "offsets" or "counts".
"""

import inspect
from typing import Any

import torch

from cuquant.array.packed_weight import ROWS_LAYOUT
from cuquant.ops.matmul import door
from cuquant.ops.matmul.grouped import grouped_linear as _grouped_door
from cuquant.torch import op
from cuquant.torch.operators import Backward, Operator

_product, _gated = inspect.unwrap(door.matmul), inspect.unwrap(door.swiglu)
_of_experts = inspect.unwrap(_grouped_door)
F32 = torch.float32

# ---- matmul -------------------------------------------------------------------------------------


def _matmul(
    x: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    shape: list[int],
    axes: list[int],
    dtype: torch.dtype,
    on_left: bool,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    q = op.rows(op.weight_of(components, format, ROWS_LAYOUT, shape, dtype, None)).transpose(*axes)
    pair = (q, x) if on_left else (x, q)
    finish = {"activation": activation, "residual": residual, "out_dtype": out_dtype}
    return _product(*pair, bias=bias, **finish)


def _fake_matmul(
    x: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    shape: list[int],
    axes: list[int],
    dtype: torch.dtype,
    on_left: bool,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    op.check_together(x, components, bias, residual)
    q = tuple(shape[axis] for axis in axes)
    a, b = (q, tuple(x.shape)) if on_left else (tuple(x.shape), q)
    if not a or not b or a[-1] != b[-2 if len(b) > 1 else 0]:
        raise ValueError(f"shapes {a} and {b} do not multiply")
    lead = torch.broadcast_shapes(a[:-2], b[:-2])
    made = (*lead, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))
    return x.new_empty(made, dtype=out_dtype or x.dtype)


def _kept_of_matmul(x: torch.Tensor, *args: Any) -> tuple[Any, ...]:
    return *args[:6], tuple(x.shape), *op.kept_of_finish(x, *args[6:])


def _gradients_of_matmul(
    kept: tuple[Any, ...], g: torch.Tensor, needs: tuple[bool, ...]
) -> dict[int, Any]:
    *factor, of_x, activation, taken, dtypes = kept
    inner = g
    if activation is not None:
        x, *bias = taken
        took = matmul(x, *factor, *(bias or [None]), None, None, F32)
        inner = op.through(activation, g, took)
    of_bias, of_residual = op.of_added(g, inner, dtypes)
    found = {_BIAS: of_bias, _RESIDUAL: of_residual}
    if needs[0]:
        found[0] = _grad_of_factor(inner.to(g.dtype), factor, of_x, dtypes[0])
    return found


def _grad_of_factor(g: torch.Tensor, factor: list[Any], shape: Any, dtype: Any) -> torch.Tensor:
    """g times the transposed q, of x's shape: axes that were added for x are summed away."""
    components, format, stored, axes, of_q, on_left = factor
    described = components, format, ROWS_LAYOUT, stored, of_q
    if len(axes) == 2 and len(shape) > 1 and not on_left:
        if list(axes) == [1, 0]:
            return op.linear_grad_x(g, *described, dtype)
        return op.linear(g, *described, None, None, None, dtype)
    if len(axes) == 1:  # g has no axis for q's
        q = op.decoded(*described).to(F32)
        column = g.to(F32).unsqueeze(-2 if on_left and len(shape) > 1 else -1)
        return (column * (q[:, None] if on_left and len(shape) > 1 else q)).to(dtype)
    other = [*axes[:-2], axes[-1], axes[-2]]
    if len(shape) == 1:
        g = g.unsqueeze(-1 if on_left else -2)
    made = matmul(g, components, format, stored, other, of_q, on_left, None, None, None, F32)
    if len(shape) == 1:
        made = made.squeeze(-1 if on_left else -2)
    return made.sum_to_size(shape).to(dtype)


_BIAS, _RESIDUAL = 7, 9  # places of arguments
matmul = Operator(
    "matmul(Tensor x, Tensor[] components, str format, int[] shape, int[] axes, ScalarType dtype, "
    "bool on_left, Tensor? bias=None, str? activation=None, Tensor? residual=None, "
    "ScalarType? out_dtype=None) -> Tensor",
    _matmul,
    _fake_matmul,
    Backward(_kept_of_matmul, _gradients_of_matmul),
)

# ---- swiglu -------------------------------------------------------------------------------------


def _swiglu(x: torch.Tensor, *weights: Any) -> torch.Tensor:
    return _gated(x, op.weight_of(*weights[:5]), op.weight_of(*weights[5:]))


def _fake_swiglu(x: torch.Tensor, *weights: Any) -> torch.Tensor:
    gate, up = weights[:5], weights[5:]
    if list(gate[3]) != list(up[3]):
        raise ValueError(f"w_gate has shape {gate[3]} and w_up {up[3]}; they must be equal")
    op.check_together(x, [*gate[0], *up[0]])
    return op.rows_of(x, gate[3], x.dtype)


def _gradients_of_swiglu(
    kept: tuple[Any, ...], g: torch.Tensor, needs: tuple[bool, ...]
) -> dict[int, Any]:
    """Of silu(a) * b; a and b are multiplied again, for fused they are never stored."""
    x, gate, up = kept[0], kept[1:6], kept[6:]
    a, b = (op.linear(x, *w, None, None, None, F32) for w in (gate, up))
    wide = g.to(F32)
    of_a = op.through("silu", wide * b, a).to(g.dtype)
    of_b = (wide * torch.nn.functional.silu(a)).to(g.dtype)
    made = op.linear_grad_x(of_a, *gate, F32) + op.linear_grad_x(of_b, *up, F32)
    return {0: made.to(x.dtype)}


def _of(name: str) -> str:
    return (
        f"Tensor[] {name}, str {name}_format, str {name}_layout, int[] {name}_shape, "
        f"ScalarType {name}_dtype"
    )


swiglu = Operator(
    f"swiglu(Tensor x, {_of('gate')}, {_of('up')}) -> Tensor",
    _swiglu,
    _fake_swiglu,
    Backward(lambda *args: args, _gradients_of_swiglu),
)

# ---- grouped_linear -----------------------------------------------------------------------------


def _grouped(
    x: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    layout: str,
    shape: list[int],
    dtype: torch.dtype,
    by: str,
    integers: torch.Tensor,
) -> torch.Tensor:
    weight = op.weight_of(components, format, layout, shape, dtype, 3)
    return _of_experts(x, weight, **{by: integers})


def _grouped_grad_x(
    g: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    layout: str,
    shape: list[int],
    dtype: torch.dtype,
    by: str,
    integers: torch.Tensor,
) -> torch.Tensor:
    weight = op.rows(op.weight_of(components, format, layout, shape, dtype, 3))
    return _of_experts(g, weight.transpose(0, 2, 1), **{by: integers})


def fake_grouped(x: torch.Tensor, *args: Any) -> torch.Tensor:
    op.check_together(x, args[0])
    return op.rows_of(x, args[3][1:], x.dtype)


def _fake_grouped_grad_x(g: torch.Tensor, *args: Any) -> torch.Tensor:
    return op.rows_of(g, args[3][:0:-1], g.dtype)


_INTEGERS = "str by, Tensor integers"
grouped_linear = Operator(
    f"grouped_linear(Tensor x, {op.WEIGHT}, {_INTEGERS}) -> Tensor",
    _grouped,
    fake_grouped,
    Backward(lambda _, *rest: rest, lambda kept, g, _: {0: grouped_linear_grad_x(g, *kept)}),
)
grouped_linear_grad_x = Operator(
    f"grouped_linear_grad_x(Tensor g, {op.WEIGHT}, {_INTEGERS}) -> Tensor",
    _grouped_grad_x,
    _fake_grouped_grad_x,
    Backward(lambda _, *rest: rest, lambda kept, h, _: {0: grouped_linear(h, *kept)}),
)
