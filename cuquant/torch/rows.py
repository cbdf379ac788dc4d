"""The operators that quantize what a layer makes of rows: quantize_rows, quantize_rows_with_sum.

    torch.ops.cuquant.quantize_rows(x, operation, other, weight, bias, eps, group,
                                    format, axis, nonfinite) -> Tensor[]

gives the components of the function of `cuquant.functional` that `operation` names ("rmsnorm",
"add_rmsnorm", "layernorm", "silu_mul", "gelu_mul", "hadamard"), in the format's order. `other` is
its residual or up, `weight` may be its signs; what an operation does not take is None, eps 0. Codes
have no gradient. quantize_rows_with_sum gives x + other behind them, which has one that nobody
computes: tensors that require gradients are errors.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from cuquant.functional import rows
from cuquant.io.state import parse_format
from cuquant.torch.codes import fake_components
from cuquant.torch.operators import Operator

_T = torch.Tensor
_rmsnorm, _add_rmsnorm = map(inspect.unwrap, (rows.rmsnorm_quantize, rows.add_rmsnorm_quantize))
_layernorm, _hadamard = map(inspect.unwrap, (rows.layernorm_quantize, rows.hadamard_quantize))
_silu_mul, _gelu_mul = map(inspect.unwrap, (rows.silu_mul_quantize, rows.gelu_mul_quantize))

# Of x, other, weight, bias, eps and group.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "rmsnorm": lambda x, _, w, __, eps, g, **o: _rmsnorm(x, w, eps=eps, **o),
    "add_rmsnorm": lambda x, r, w, _, eps, g, **o: _add_rmsnorm(x, r, w, eps=eps, **o),
    "layernorm": lambda x, _, w, b, eps, g, **o: _layernorm(x, w, b, eps=eps, **o),
    "silu_mul": lambda x, up, *_, **o: _silu_mul(x, up, **o),
    "gelu_mul": lambda x, up, *_, **o: _gelu_mul(x, up, **o),
    "hadamard": lambda x, _, signs, __, eps, g, **o: _hadamard(x, group=g, signs=signs, **o),
}


def _quantize_rows(
    x: _T,
    operation: str,
    other: _T | None,
    weight: _T | None,
    bias: _T | None,
    eps: float,
    group: int | None,
    format: str,
    axis: int,
    nonfinite: str,
    **more: Any,
) -> list[_T]:
    if operation not in _OPERATIONS:
        raise ValueError(f"operation must be one of {', '.join(_OPERATIONS)}, got {operation!r}")
    options = {"format": parse_format(format), "axis": axis, "nonfinite": nonfinite, **more}
    made = _OPERATIONS[operation](x, other, weight, bias, eps, group, **options)
    return list(made.components.values())


def _with_sum(x: _T, *args: Any) -> list[_T]:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [*_quantize_rows(x, *args, residual_out=total), total]


def _fake(x: _T, *args: Any) -> list[_T]:
    return fake_components(x, *args[-3:])


def _fake_with_sum(x: _T, *args: Any) -> list[_T]:
    return [*_fake(x, *args), x.new_empty(x.shape)]


_SCHEMA = (
    "(Tensor x, str operation, Tensor? other, Tensor? weight, Tensor? bias, float eps, int? group, "
    "str format, int axis, str nonfinite) -> Tensor[]"
)
quantize_rows = Operator("quantize_rows" + _SCHEMA, _quantize_rows, _fake, is_codes=True)
with_sum = Operator("quantize_rows_with_sum" + _SCHEMA, _with_sum, _fake_with_sum)
