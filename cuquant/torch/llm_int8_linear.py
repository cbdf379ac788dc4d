"""LLMInt8Linear: LLM.int8(), outlier columns in x's own dtype and the rest in int8."""

from typing import Any

import torch
from torch import nn

from cuquant import interop
from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight, unpack
from cuquant.formats import get_format
from cuquant.functional import quantize_llm_int8
from cuquant.io.state import format_text
from cuquant.ops.matmul.door import Activation
from cuquant.reference import ACTIVATIONS
from cuquant.torch.holder import quantized_weight
from cuquant.torch.llm_int8 import llm_int8
from cuquant.torch.module import QuantLinear
from cuquant.torch.op import weight_of
from cuquant.torch.operators import is_watched
from cuquant.torch.spec import Weight, WeightSpec

FORMAT = get_format("int8+absmax")
NAME = "llm_int8"  # in place of a format, to `quantize_`
THRESHOLD = 6.0  # transformers'


class LLMInt8Linear(QuantLinear):
    """A linear layer that multiplies as bitsandbytes' Linear8bitLt does, bit for bit.

    Rows of x and of the weight have one scale each, their largest magnitude. Columns of x in which
    a value reaches `threshold` are multiplied in x's own dtype by the decoded weight, the others in
    int8 (Dettmers et al., LLM.int8(), arXiv 2208.07339). Gradients are those of the decoded weight.

    load_state_dict takes bitsandbytes' names, too: weight (int8) and SCB.

    Parameters
    ----------
    weight
        QuantArray or PackedWeight [N, K] of the format "int8+absmax"; a PackedWeight is unpacked.
    bias
        Tensor [N] of float32, float16 or bfloat16; or None.
    threshold
        Magnitude from which a value of x makes its column an outlier. 0: there are none.
    activation
        None, "relu", "gelu" (exact) or "silu".

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit.

    Examples
    --------
    >>> import torch
    >>> import cuquant.torch
    >>> cuquant.torch.LLMInt8Linear.from_float(torch.nn.Linear(64, 8))
    LLMInt8Linear(in_features=64, out_features=8, bias=True, format=int8+absmax, threshold=6.0)
    """

    def __init__(
        self,
        weight: Weight,
        bias: torch.Tensor | None = None,
        *,
        threshold: float = THRESHOLD,
        activation: Activation | None = None,
    ) -> None:
        if not threshold >= 0:
            raise ValueError(f"threshold must be 0 or more, got {threshold}")
        super().__init__(weight, bias, activation=activation)
        self.threshold = float(threshold)

    @classmethod
    def from_float(cls, linear: nn.Linear, threshold: float = THRESHOLD) -> "LLMInt8Linear":
        """A layer for an nn.Linear, its weight rounded to float16 first, as bitsandbytes does."""
        if not isinstance(linear, nn.Linear) or isinstance(linear, QuantLinear):
            raise TypeError(f"linear must be a float nn.Linear, got {type(linear).__name__}")
        made = cls(rows_of(linear.weight.detach()), linear.bias, threshold=threshold)
        return made.train(linear.training)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *_: Any, **__: Any) -> "LLMInt8Linear":
        """TypeError: the format is no choice here, and x is quantized in any case."""
        raise TypeError("LLMInt8Linear has one format; from_float(linear, threshold=6.0) makes it")

    def prepack_(self) -> "LLMInt8Linear":
        """Nothing: the operator reads rows."""
        return self

    def extra_repr(self) -> str:
        """What repr says of the layer."""
        return f"{super().extra_repr()}, threshold={self.threshold}"

    def _take(self, weight: Weight) -> None:
        if weight.format != FORMAT:
            raise ValueError(f"LLM.int8() takes weights of {FORMAT}, got {weight.format}")
        super()._take(unpack(weight) if isinstance(weight, PackedWeight) else weight)

    def _product(self, x: torch.Tensor, bias: Any, activation: str | None) -> torch.Tensor:
        codes, absmax = parts = self._parts()
        if is_watched(x) or codes.is_meta:
            codes, absmax = codes.view(torch.int8), absmax.view(torch.float32)
        else:  # the same objects in every call, which finds the plan of the one before
            codes, absmax = weight_of(parts, *self._words).components.values()
        y = llm_int8(x, codes, absmax, self.threshold, bias)
        return y if activation is None else _ACTIVATIONS[activation](y)

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """QuantLinear's, of bitsandbytes' names too."""
        weight, scales = (state_dict.get(prefix + key) for key in ("weight", "SCB"))
        if isinstance(weight, torch.Tensor) and isinstance(scales, torch.Tensor):
            theirs = [prefix + key for key in ("weight", "SCB", "weight_format")]
            state_dict = {k: v for k, v in state_dict.items() if k not in theirs}
            state_dict[f"{prefix}weight.packed"] = weight
            state_dict[f"{prefix}weight.scale"] = scales.float().view(-1, 1)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def rows_of(weight: torch.Tensor) -> Weight:
    """A weight [N, K] as LLM.int8() has it: rint(w * (127 / absmax)) of w in float16.

    `cuquant.quantize` divides by absmax / 127, which may be one off at ties.
    """
    interop.float_dtype(weight.dtype, "weight")
    if weight.is_meta:
        return quantized_weight(weight, FORMAT, prepack=False)
    codes, absmax, _ = quantize_llm_int8(weight.half().contiguous(), threshold=0)
    spec = WeightSpec(format_text(FORMAT), ROWS_LAYOUT, tuple(weight.shape), weight.dtype)
    return spec.weight([codes, absmax[:, None]])


_ACTIVATIONS = {name: getattr(torch.nn.functional, name) for name in ACTIVATIONS if name}
