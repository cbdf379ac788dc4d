"""QuantConv2d: a convolution whose filters are quantized."""

import torch
from torch import nn

from cuquant.formats import Format, get_format
from cuquant.formats.names import FormatName, FormatOptions, Unpack
from cuquant.torch.holder import Holder, autocast, quantized_weight
from cuquant.torch.spec import Weight, WeightSpec


class QuantConv2d(Holder, nn.Conv2d):  # pyright: ignore[reportIncompatibleVariableOverride]
    """nn.Conv2d with frozen, quantized filters, which are decoded for each call.

    A filter [C / groups, kH, kW] is one row of the array, so that blocks run across its places:
    rows of 3 elements would take a scale each. The memory that is saved is that of the weights at
    rest; a call decodes all of them, and multiplies as torch does.

    Parameters
    ----------
    weight
        QuantArray [O, C / groups * kH * kW], of NumPy, CuPy or torch arrays; its memory is shared.
    like
        The nn.Conv2d whose channels, kernel_size, stride, padding, dilation, groups, padding_mode
        and bias it has. Its own weight is not read.

    Attributes
    ----------
    weight
        A tensor [O, C / groups, kH, kW] that decodes where it is read.
    quantized
        The QuantArray.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit.

    Examples
    --------
    >>> import torch
    >>> import cuquant.torch
    >>> conv = torch.nn.Conv2d(16, 32, 3, padding=1)
    >>> layer = cuquant.torch.QuantConv2d.from_conv(conv, "int8")
    >>> layer
    QuantConv2d(16, 32, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), format=int8)
    >>> layer(torch.zeros(1, 16, 8, 8)).shape
    torch.Size([1, 32, 8, 8])
    """

    def __init__(self, weight: Weight, like: nn.Conv2d) -> None:
        if not isinstance(like, nn.Conv2d):
            raise TypeError(f"like must be an nn.Conv2d, got {type(like).__name__}")
        vars(self).update({name: getattr(like, name) for name in _SAME})
        Holder.__init__(self, weight)
        self._set_bias(like.bias)

    @classmethod
    def from_conv(
        cls,
        conv: nn.Conv2d,
        format: FormatName | str | Format = "int8",
        **format_options: Unpack[FormatOptions],
    ) -> "QuantConv2d":
        """A layer that does what `conv` does, its filters quantized where they lie.

        Raises
        ------
        TypeError, ValueError
            For another dtype, or where the format cannot hold the shape.
        """
        if not isinstance(conv, nn.Conv2d) or isinstance(conv, QuantConv2d):
            raise TypeError(f"conv must be a float nn.Conv2d, got {type(conv).__name__}")
        fmt = get_format(format, **format_options)
        weight = quantized_weight(conv.weight.detach().flatten(1), fmt, prepack=False)
        return cls(weight, conv).train(conv.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[B, O, H', W'] of x's dtype, or autocast's; x is [B, C, H, W]."""
        x = autocast(input)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return self._conv_forward(x, self._decoded().to(x.dtype), bias)

    def extra_repr(self) -> str:
        """What repr says of the layer."""
        return f"{nn.Conv2d.extra_repr(self)}, {self._said()}"

    def prepack_(self) -> "QuantConv2d":
        """Nothing: filters are decoded as they lie."""
        return self

    def _filters(self) -> tuple[int, ...]:
        return self.out_channels, self.in_channels // self.groups, *self.kernel_size

    def _shape(self) -> tuple[int, ...]:
        return self._filters()

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        return values.flatten(1)

    def _took(self, spec: WeightSpec) -> None:
        rows, columns = spec.shape
        if (rows, columns) != (self.out_channels, torch.Size(self._filters()[1:]).numel()):
            raise ValueError(
                f"weight is {[rows, columns]}; {list(self._filters())} are its filters"
            )


_SAME = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups",
    "padding_mode", "transposed", "output_padding", "_reversed_padding_repeated_twice",
)  # fmt: skip
