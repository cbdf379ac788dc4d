"""The operator of LLM.int8()'s product.

    torch.ops.cuquant.llm_int8(x, weight_codes, absmax, threshold, bias)

is `cuquant.functional.llm_int8_linear`. Gradients flow back to x, as those of the decoded weight's
product, for outliers in x are its values too; and to the bias.
"""

import inspect
from typing import Any

import torch

from cuquant.array.packed_weight import ROWS_LAYOUT
from cuquant.formats import get_format
from cuquant.formats.scales import INVERSE_127
from cuquant.functional import llm_int8 as functional
from cuquant.io.state import format_text
from cuquant.torch import op
from cuquant.torch.operators import Backward, Operator

_product = inspect.unwrap(functional.llm_int8_linear)
_ROWS = format_text(get_format("int8"))  # with a scale a row
_X, _ABSMAX, _BIAS = 0, 2, 4  # places of arguments


def _llm_int8(
    x: torch.Tensor,
    weight_codes: torch.Tensor,
    absmax: torch.Tensor,
    threshold: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return _product(x, weight_codes, absmax, bias, threshold=threshold)


def _fake_llm_int8(
    x: torch.Tensor,
    weight_codes: torch.Tensor,
    absmax: torch.Tensor,
    threshold: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    op.check_together(x, [weight_codes, absmax], bias)
    of_bias = None if bias is None else bias.shape
    shape = functional.check_shapes(x.shape, weight_codes.shape, absmax.shape, of_bias)
    return x.new_empty(shape)


def _kept(x: Any, codes: Any, absmax: Any, threshold: float, bias: Any) -> tuple[Any, ...]:
    wanted = None if bias is None or not bias.requires_grad else bias.dtype
    return codes, absmax, x.dtype, wanted


def _gradients(
    kept: tuple[Any, ...], g: torch.Tensor, needs: tuple[bool, ...]
) -> dict[int, torch.Tensor]:
    codes, absmax, dtype, of_bias = kept
    if needs[_ABSMAX]:
        raise RuntimeError("absmax requires grad, and no gradient flows back to it; detach it")
    found = {}
    if of_bias is not None:
        found[_BIAS] = g.reshape(-1, g.shape[-1]).sum(0, dtype=torch.float32).to(of_bias)
    if needs[_X]:
        scale = (absmax * INVERSE_127.item()).reshape(-1, 1)
        weight = [codes, scale], _ROWS, ROWS_LAYOUT, list(codes.shape), dtype
        found[_X] = op.linear_grad_x(g, *weight, dtype)
    return found


llm_int8 = Operator(
    "llm_int8(Tensor x, Tensor weight_codes, Tensor absmax, float threshold, Tensor? bias) "
    "-> Tensor",
    _llm_int8,
    _fake_llm_int8,
    Backward(_kept, _gradients),
)
