"""The operators that make codes and look them up: quantize, embedding.

    torch.ops.cuquant.quantize(x, format, axis, nonfinite) -> Tensor[]
    torch.ops.cuquant.embedding(ids, components, format, shape, axes, dtype)

The first gives the components of `cuquant.quantize(x, format, axis=axis, nonfinite=nonfinite)` in
the format's order. Codes have no gradient: an x that requires one is read, as if it were detached.
The second is `cuquant.embedding`, its table described as a factor of cuquant::matmul is; `dtype` is
the result's.
"""

import inspect

import torch

from cuquant.array.packed_weight import ROWS_LAYOUT
from cuquant.io.state import parse_format
from cuquant.ops import geometry
from cuquant.ops.dequantize import gathered
from cuquant.ops.quantize import door
from cuquant.torch import op
from cuquant.torch.operators import Operator
from cuquant.torch.spec import own_dtype

_codes, _looked_up = inspect.unwrap(door.quantize), inspect.unwrap(gathered.embedding)


def _quantize(x: torch.Tensor, format: str, axis: int, nonfinite: str) -> list[torch.Tensor]:
    made = _codes(x, parse_format(format), axis=axis, nonfinite=nonfinite)  # type: ignore[arg-type]
    return list(made.components.values())


def fake_components(x: torch.Tensor, format: str, axis: int, nonfinite: str) -> list[torch.Tensor]:
    """Memory for the components of x in a format."""
    fmt, order = parse_format(format), geometry.axis_last(x.ndim, door.checked_axis(x, axis))
    stored = tuple(int(x.shape[i]) for i in order)
    fmt.check_shape(stored)
    return [x.new_empty(c.shape, dtype=own_dtype(c)) for c in fmt.components(stored)]


quantize = Operator(
    "quantize(Tensor x, str format, int axis, str nonfinite) -> Tensor[]",
    _quantize,
    fake_components,
    is_codes=True,
)


def _embedding(
    ids: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    shape: list[int],
    axes: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    table = op.rows(op.weight_of(components, format, ROWS_LAYOUT, shape, dtype))
    return _looked_up(ids, table.transpose(*axes))


def _fake_embedding(
    ids: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    shape: list[int],
    axes: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    return components[0].new_empty((*ids.shape, shape[axes[1]]), dtype=dtype)


embedding = Operator(
    "embedding(Tensor ids, Tensor[] components, str format, int[] shape, int[] axes, "
    "ScalarType dtype) -> Tensor",
    _embedding,
    _fake_embedding,
)
