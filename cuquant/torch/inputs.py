"""Layers that may quantize their input before they multiply it."""

from collections.abc import Callable
from typing import Any

import torch

from cuquant.formats import Format, get_format
from cuquant.formats.names import FormatName
from cuquant.io.state import format_text
from cuquant.torch.holder import Holder
from cuquant.torch.spec import Weight


class InputQuantizing(Holder):
    """A module whose input is quantized where `activations` says how, call by call or statically.

    Attributes
    ----------
    activations
        The Format that the input is quantized to, or None.
    input_scale
        A buffer of float32 that casts leave alone: the input's scale, found beforehand; or None.
    """

    def __init__(self, weight: Weight) -> None:
        super().__init__(weight)
        self.register_buffer("input_scale", None)
        self.activations: Format | None = None
        self._activations_text: str | None = None

    def quantize_input_(
        self,
        activations: FormatName | str | Format | None,
        input_scale: float | torch.Tensor | None = None,
    ) -> Any:
        """Have x quantized before it is multiplied, or no more (None); the layer.

        Gradients flow back as if x were not rounded. A state_dict holds `input_scale` where there
        is one; the format is the layer's own, as an activation is.

        Examples
        --------
        >>> import torch
        >>> import cuquant as cq
        >>> import cuquant.torch
        >>> layer = cuquant.torch.QuantLinear.from_linear(torch.nn.Linear(64, 8), "int4")
        >>> layer.quantize_input_("int8")
        QuantLinear(in_features=64, out_features=8, bias=True, format=int4, activations=int8)
        >>> x = torch.randn(3, 64)
        >>> wanted = cq.linear(cq.quantize(x, "int8"), layer.quantized, layer.bias.detach())
        >>> torch.equal(layer(x), wanted)
        True
        """
        if activations is None and input_scale is not None:
            raise ValueError("input_scale is that of quantized activations; pass activations too")
        scale = None
        if input_scale is not None:
            scale = torch.as_tensor(
                input_scale, dtype=torch.float32, device=self._parts()[0].device
            )
        fmt = None if activations is None else get_format(activations)
        self.activations, self._activations_text = fmt, None if fmt is None else format_text(fmt)
        self.input_scale = scale
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        scale, self.input_scale = self.input_scale, None
        super()._apply(fn, recurse)
        if scale is not None:  # is moved, and never rounded
            where = fn(scale).device
            empty = scale.is_meta and where.type != "meta"
            self.input_scale = torch.empty_like(scale, device=where) if empty else scale.to(where)
        return self

    def _said(self) -> str:
        said = super()._said()
        if self.activations is None:
            return said
        static = "" if self.input_scale is None else " (static)"
        return f"{said}, activations={self.activations}{static}"
