"""The operator that makes codes: quantize.

    torch.ops.cuquant.quantize(x, format, axis, nonfinite) -> Tensor[]

gives the components of `cuquant.quantize(x, format, axis=axis, nonfinite=nonfinite)` in the
format's order. Codes have no gradient: an x that requires one is read, as if it were detached.
"""

import inspect

import torch

from cuquant.io.state import parse_format
from cuquant.ops import geometry
from cuquant.ops.quantize import door
from cuquant.torch.operators import Operator
from cuquant.torch.spec import own_dtype

_codes = inspect.unwrap(door.quantize)


def _quantize(x: torch.Tensor, format: str, axis: int, nonfinite: str) -> list[torch.Tensor]:
    made = _codes(x, parse_format(format), axis=axis, nonfinite=nonfinite)  # type: ignore[arg-type]
    return list(made.components.values())


def _fake_quantize(x: torch.Tensor, format: str, axis: int, nonfinite: str) -> list[torch.Tensor]:
    fmt, order = parse_format(format), geometry.axis_last(x.ndim, door.checked_axis(x, axis))
    stored = tuple(int(x.shape[i]) for i in order)
    fmt.check_shape(stored)
    return [x.new_empty(c.shape, dtype=own_dtype(c)) for c in fmt.components(stored)]


quantize = Operator(
    "quantize(Tensor x, str format, int axis, str nonfinite) -> Tensor[]",
    _quantize,
    _fake_quantize,
    is_codes=True,
)
