"""QuantLinear: a linear layer whose weight is quantized."""

import logging
from typing import Any

import torch
from torch import nn

from cuquant import interop
from cuquant.errors import clipped
from cuquant.formats import Format, get_format
from cuquant.formats.names import FormatName, FormatOptions, Unpack
from cuquant.ops.matmul.door import Activation
from cuquant.reference import ACTIVATIONS
from cuquant.torch.activations import quantized_linear
from cuquant.torch.holder import autocast, quantized_weight
from cuquant.torch.inputs import InputQuantizing
from cuquant.torch.op import multiply
from cuquant.torch.spec import DTYPES, Weight, WeightSpec

_log = logging.getLogger("cuquant.torch")
_TOLD: list[bool] = []  # that x is float32, once a process


class QuantLinear(InputQuantizing, nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """activation(x @ weight.T + bias) with a frozen, quantized weight.

    The weight's components are frozen parameters under their own names ("packed", "scale", ...;
    those of the layout where it is prepacked), seen as bytes: a float16 scale [24, 2] is uint8
    [24, 4]. So `.half()`, `.bfloat16()`, `.to(dtype)`, mixed precision wrappers and loaders that
    cast floats change x, the bias and the dtype that the weight decodes to, never codes or scales.
    `.to(device)` moves them. `.quantized` is the array.

    To other code it is an nn.Linear: `.weight` has the dtype, device and size of one, decodes where
    its values are read, and quantizes what is assigned to it. It is no parameter.

    Bytes have no gradient: `requires_grad_(True)` of a model is an error, and what averages
    parameters (EMA) must leave out those that are no floats.

    state_dict holds the components, the bias and, as "_extra_state", a small uint8 tensor that
    names format, layout with its version, shape and dtype: all tensors, so safetensors takes them
    too.
    load_state_dict refuses another format or an unknown version of a layout; of the layouts it
    knows it takes over the one that was saved.

    Gradients flow back to x, and to the bias where it is told to require one; the weight has none.
    They are those of the decoded weight, and so are gradients of gradients. Forward mode and
    torch.func's transforms are errors.

    Parameters
    ----------
    weight
        QuantArray or PackedWeight [N, K] (N = out_features, K = in_features), of NumPy, CuPy or
        torch arrays. Its memory is shared, not copied.
    bias
        Tensor [N] of float32, float16 or bfloat16; or None.
    activation
        None, "relu", "gelu" (exact) or "silu".
    activations
        A name or Format that x is quantized to before it is multiplied: "int8" (W8A8, W4A8 of an
        int4 weight), "fp8_e4m3", "mxfp8". None: x is not quantized.
    input_scale
        Its scale, found beforehand (static quantization): a number, or an array that fits the
        format's scales. None: from x, call by call (dynamic).
    compute_dtype
        float16 or bfloat16: x is cast to it, and the result back to x's dtype, as QLoRA wants it
        where what is around the layer is float32. None: x's dtype; autocast's goes first.

    Attributes
    ----------
    in_features, out_features
        K and N.
    activation, activations
        As given; the latter as a Format.
    bias
        Parameter [N], or None.
    weight
        A tensor [N, K] of the weight's dtype, on its device, that decodes where it is read.
    quantized
        The QuantArray or PackedWeight [N, K].

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit.

    Examples
    --------
    >>> import torch
    >>> import cuquant as cq
    >>> import cuquant.torch
    >>> q = cq.quantize(torch.randn(32, 64), "int4", block_size=32)
    >>> layer = cuquant.torch.QuantLinear(q, activation="silu")
    >>> layer
    QuantLinear(in_features=64, out_features=32, bias=False, format=int4:32, activation=silu)
    >>> x = torch.randn(5, 64)
    >>> torch.equal(layer(x), cq.linear(x, q, activation="silu"))
    True
    """

    _like: nn.Module | None = None  # what it was made of, if that was no nn.Linear
    bias: nn.Parameter | None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        weight: Weight,
        bias: torch.Tensor | None = None,
        *,
        activation: Activation | None = None,
        activations: FormatName | str | Format | None = None,
        input_scale: float | torch.Tensor | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        if activation is not None and activation not in tuple(ACTIVATIONS):
            known = ", ".join(ACTIVATIONS)
            raise ValueError(
                f"activation must be None or one of {known}, got {clipped(activation)}"
            )
        InputQuantizing.__init__(self, weight)
        self.activation = activation
        self._set_bias(bias)
        if activations is not None or input_scale is not None:
            self.quantize_input_(activations, input_scale)
        self._compute: torch.dtype | None = None
        if compute_dtype is not None:
            self.compute_in_(compute_dtype)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        format: FormatName | str | Format = "nf4",
        *,
        activation: Activation | None = None,
        prepack: bool | None = None,
        activations: FormatName | str | Format | None = None,
        input_scale: float | torch.Tensor | None = None,
        **format_options: Unpack[FormatOptions],
    ) -> "QuantLinear":
        """A layer that does what `linear` does, its weight quantized where it lies.

        Parameters
        ----------
        linear
            Its weight is float32, float16 or bfloat16; on the meta device the layer is there too,
            and waits for `load_state_dict(..., assign=True)`. It is not changed.
        format
            A name of `list_formats()`, a string such as "int4:64", or a Format.
        activation
            None, "relu", "gelu" (exact) or "silu", applied to the result.
        prepack
            Whether to lay the weight out for the GPU kernels (`cuquant.prepack`), which makes them
            faster. None: where it is on a GPU.
        activations, input_scale
            What x is quantized to, as of the class.
        **format_options
            Of `get_format`, such as block_size=32 or double_quant=True.

        Raises
        ------
        TypeError, ValueError
            For another dtype, or where the format cannot hold the shape.

        Examples
        --------
        >>> import torch
        >>> import cuquant.torch
        >>> linear = torch.nn.Linear(64, 8)
        >>> cuquant.torch.QuantLinear.from_linear(linear, "q4_0")
        QuantLinear(in_features=64, out_features=8, bias=True, format=q4_0)
        """
        if not isinstance(linear, nn.Linear) or isinstance(linear, QuantLinear):
            raise TypeError(f"linear must be a float nn.Linear, got {type(linear).__name__}")
        weight = quantized_weight(
            linear.weight.detach(), get_format(format, **format_options), prepack
        )
        of_input = {"activations": activations, "input_scale": input_scale}
        made = cls(weight, linear.bias, activation=activation, **of_input)
        return made.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., N] of x's dtype, or autocast's; x is [..., K], float32, float16 or bfloat16."""
        own = self._parameters  # which nn.Module looks into last
        bias = own.get("bias") if "bias" in own else self.bias
        return self._multiply(input, bias, self.activation)

    def compute_in_(self, dtype: torch.dtype | None) -> "QuantLinear":
        """Have x cast to a dtype, and the result back, or no more (None); the layer.

        The attribute `compute_dtype` says so to others; without one they ask the weight's dtype.
        """
        if dtype is not None:  # which may be a word
            dtype = DTYPES[interop.float_dtype(dtype, "compute_dtype").name]
        self._compute = dtype
        vars(self).pop("compute_dtype", None)
        if dtype is not None:
            self.compute_dtype = dtype
        return self

    def _multiply(self, x: Any, bias: Any, activation: str | None) -> torch.Tensor:
        given, compute = autocast(x), self._compute
        if given.dtype is torch.float32 and given.is_cuda:
            self._tell_of_float32()
        if compute is None or given is not x or x.dtype == compute:
            return self._product(given, bias, activation)
        return self._product(given.to(compute), bias, activation).to(given.dtype)

    def _tell_of_float32(self) -> None:
        """Say once that a 16-bit model computes in float32, which is slow on a GPU."""
        if _TOLD or self._compute is not None or self._spec.dtype is torch.float32:
            return
        if not torch.compiler.is_compiling():
            _TOLD.append(True)
            _log.warning(
                "a QuantLinear of %s weights computes in float32, as x is; compute_dtype= or "
                "x.half() is faster on a GPU",
                str(self._spec.dtype).removeprefix("torch."),
            )

    def _product(self, x: torch.Tensor, bias: Any, activation: str | None) -> torch.Tensor:
        """The product of x as it is, in its dtype."""
        if self._activations_text is None:
            return multiply(x, self._parts(), self._words, bias, activation)
        how = self._activations_text, self.input_scale, bias, activation
        return quantized_linear(x, self._parts(), *self._words, *how)

    def extra_repr(self) -> str:
        """What repr says of the layer."""
        said = (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self._said()}"
        )
        if self._compute is not None:
            said += f", compute_dtype={str(self._compute).removeprefix('torch.')}"
        return said + (f", activation={self.activation}" if self.activation else "")

    def _took(self, spec: WeightSpec) -> None:
        self.out_features, self.in_features = spec.shape
