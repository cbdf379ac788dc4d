"""QuantLinear: a linear layer whose weight is quantized."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cuquant import interop
from cuquant.array.arranged import ORDER, check_permutation
from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight, layout_for
from cuquant.array.packed_weight import prepack as prepacked
from cuquant.array.quant_array import QuantArray
from cuquant.errors import clipped
from cuquant.formats import Format, get_format
from cuquant.formats.format import Component
from cuquant.formats.names import FormatName, FormatOptions, Unpack
from cuquant.io.state import EXTRA, bytes_shape, format_text, parse_format
from cuquant.ops.matmul.door import Activation
from cuquant.ops.quantize.door import quantize
from cuquant.reference import ACTIVATIONS
from cuquant.torch.op import DEQUANTIZE, multiply, weight_of
from cuquant.torch.spec import (
    DTYPES,
    Weight,
    WeightSpec,
    as_bytes,
    is_bytes,
    stated,
    tensor_of,
    usable,
)
from cuquant.torch.weight import QuantWeight


class QuantLinear(nn.Linear):
    """activation(x @ weight.T + bias) with a frozen, quantized weight.

    The weight's components are buffers under their own names ("packed", "scale", ...; those of the
    layout where it is prepacked), seen as bytes: a float16 scale [24, 2] is uint8 [24, 4]. So
    `.half()`, `.bfloat16()`, `.to(dtype)`, mixed precision wrappers and loaders that cast floats
    change x, the bias and the dtype that the weight decodes to, never codes or scales.
    `.to(device)` moves them. `.quantized` is the array.

    To other code it is an nn.Linear: `.weight` has the dtype, device and size of one, decodes where
    its values are read, and quantizes what is assigned to it. It is no parameter.

    state_dict holds the buffers, the bias and, as "_extra_state", a small uint8 tensor that names
    format, layout with its version, shape and dtype: all tensors, so safetensors takes them too.
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

    Attributes
    ----------
    in_features, out_features
        K and N.
    activation
        As given.
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

    bias: nn.Parameter | None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        weight: Weight,
        bias: torch.Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which makes a float weight
        self._spec = WeightSpec.of(weight)
        if activation is not None and activation not in tuple(ACTIVATIONS):
            known = ", ".join(ACTIVATIONS)
            raise ValueError(
                f"activation must be None or one of {known}, got {clipped(activation)}"
            )
        self.activation = activation
        self._names: tuple[str, ...] = ()
        self._words: tuple[Any, ...] = ()
        self._take(weight)
        self.register_parameter("bias", None if bias is None else _frozen(bias, self.out_features))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        format: FormatName | str | Format = "nf4",
        *,
        activation: Activation | None = None,
        prepack: bool | None = None,
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
        made = cls(weight, linear.bias, activation=activation)
        return made.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., N] of x's dtype, or autocast's; x is [..., K], float32, float16 or bfloat16."""
        return self._multiply(input, self.bias, self.activation)

    @property
    def quantized(self) -> Weight:
        """The QuantArray or PackedWeight [N, K], on the buffers' memory."""
        return weight_of(self._parts(), *self._words)

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A tensor [N, K] that decodes where its values are read, with dtype and device.

        Assigned to it can be a tensor [N, K], which is quantized in this layer's format and layout;
        a QuantArray, a PackedWeight or another QuantLinear's weight, which is taken as it is, its
        memory shared. The size may be another one.
        """
        return self._decoded() if torch.compiler.is_compiling() else QuantWeight(self)

    @weight.setter
    def weight(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if isinstance(value, QuantWeight):
            if value._layer is self:
                return
            value = value._layer.quantized
        if isinstance(value, torch.Tensor):
            value = self._like_this(value)
        self._take(value)

    def __setattr__(self, name: str, value: Any) -> None:
        """nn.Module's, which would make a parameter of a weight that is one."""
        if name == "weight":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def format(self) -> Format:
        """The weight's Format."""
        return parse_format(self._spec.format)

    @property
    def layout(self) -> str:
        """Name and version of the weight's layout; "rows/1" where it is not prepacked."""
        return self._spec.layout

    def extra_repr(self) -> str:
        """What repr says of the layer."""
        said = (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.format}"
        )
        layout = "" if self.layout == ROWS_LAYOUT else f", layout={self.layout}"
        return said + layout + (f", activation={self.activation}" if self.activation else "")

    # ---- the weight -------------------------------------------------------------------------

    def _multiply(self, x: Any, bias: Any, activation: str | None) -> torch.Tensor:
        """activation(x @ weight.T + bias), of autocast's dtype where that is on."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x must be a tensor, got {type(x).__name__}")
        kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else None
        if kind is not None and torch.is_autocast_enabled(kind):
            interop.float_dtype(x.dtype, "x")
            x = x.to(torch.get_autocast_dtype(kind))
        return multiply(x, self._parts(), self._words, bias, activation)

    def _decoded(self) -> torch.Tensor:
        """The weight's values, a new tensor [N, K]."""
        return DEQUANTIZE(self._parts(), *self._words)

    def _like_this(self, values: Any) -> Weight:
        """Values [N, K] in this layer's format and layout."""
        if not isinstance(values, torch.Tensor) or values.ndim != 2:
            found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values)
            raise ValueError(f"weight must be a tensor [N, K] of floats, got {found}")
        return quantized_weight(values.detach(), self.format, self.layout != ROWS_LAYOUT)

    def _take(self, weight: Weight) -> None:
        """Hold a weight's arrays, whose memory is shared."""
        spec = WeightSpec.of(weight)
        parts = {name: tensor_of(part) for name, part in weight.components.items()}
        self._hold(spec, lambda c: as_bytes(parts[c.name]))
        self.out_features, self.in_features = spec.shape

    def _fill(self, values: Any) -> None:
        """Quantize values into the buffers there are, which other layers may share."""
        new, old = self._like_this(values), self._parts()
        spec, parts = WeightSpec.of(new), [as_bytes(tensor_of(p)) for p in new.components.values()]
        if spec.shape != self._spec.shape or spec.layout != self.layout:
            raise ValueError(f"weight.data must be of shape {self._spec.shape}, got {spec.shape}")
        if any(a.device != b.device or a.is_inference() for a, b in zip(old, parts, strict=True)):
            self._take(new)
            return
        with torch.no_grad():
            for mine, part in zip(old, parts, strict=True):
                mine.copy_(part)
        self._decode_to(spec.dtype)

    def _decode_to(self, dtype: torch.dtype) -> None:
        """Let the weight be of a dtype, if it is one that can be quantized."""
        if dtype in DTYPES.values():
            self._spec = replace(self._spec, dtype=dtype)
            self._words = (*self._words[:-1], dtype)

    # ---- buffers ----------------------------------------------------------------------------

    def _parts(self) -> list[Any]:
        return [self._buffers[name] for name in self._names]

    def _hold(self, spec: WeightSpec, part: Callable[[Component], torch.Tensor]) -> None:
        """Buffers for the components of `spec`, in place of those there are."""
        made = {component.name: part(component) for component in spec.components()}
        for name in self._names:
            delattr(self, name)
        for name, tensor in made.items():
            self.register_buffer(name, tensor)
        self._spec, self._names = spec, tuple(made)
        self._words = (spec.format, spec.layout, spec.shape, spec.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """What `.to()` and its like do; `.type(dtype)`, which casts integers too, spares these."""

        def spared(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            if tensor.is_floating_point() or result.dtype == tensor.dtype:
                return result
            return tensor.to(result.device)

        super()._apply(spared, recurse)
        probe = torch.empty(0, dtype=self._spec.dtype, device=self._parts()[0].device)
        self._decode_to(fn(probe).dtype)
        return self

    # ---- state_dict -------------------------------------------------------------------------

    def get_extra_state(self) -> torch.Tensor:
        """Format, layout, shape and dtype, as uint8 [bytes] of JSON."""
        return self._spec.to_tensor()

    def set_extra_state(self, state: Any) -> None:
        """Take over layout and dtype of what was saved; buffers of a new layout hold zeros.

        Raises
        ------
        FormatError
            For a malformed state, or a layout this version does not know.
        ValueError
            For another format or shape.
        """
        spec = self._checked(state)
        if spec.layout == self._spec.layout:
            self._hold(spec, lambda c: self.get_buffer(c.name))
            return
        device = self._parts()[0].device
        self._hold(spec, lambda c: _zeros(c, device))

    def _checked(self, state: Any) -> WeightSpec:
        """What a description says, if that is a weight of this layer's format and shape."""
        spec = WeightSpec.from_tensor(state)
        if (parse_format(spec.format), spec.shape) != (self.format, self._spec.shape):
            raise ValueError(f"the saved weight is {spec}; this layer's is {self._spec}")
        return spec

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """nn.Module's, once it is known that the saved weight is one for this layer.

        Taken are also the names of `cuquant.save`: "weight.packed", ... of components in their own
        dtypes, which do not say their format and are taken to be of this layer's; and "weight", a
        QuantArray or PackedWeight, as `cuquant.load` returns it.
        """
        dtype, assign = self._spec.dtype, local_metadata.get("assign_to_params_buffers", False)
        try:
            mine = self._translated(
                {k: v for k, v in state_dict.items() if k.startswith(prefix)}, prefix
            )
            self._expect(mine, prefix)
            if assign and (bias := mine.get(prefix + "bias")) is not None:
                _check_bias(bias, self.out_features)
        except (ValueError, TypeError) as error:
            error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {error}")
            return
        super()._load_from_state_dict(
            mine, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if not assign:
            self._decode_to(dtype)  # as floats keep their dtype where others are copied into them
        for component in self._spec.components():  # views of one flat buffer begin anywhere
            self._buffers[component.name] = usable(component, self.get_buffer(component.name))

    def _translated(self, saved: dict[str, Any], prefix: str) -> dict[str, Any]:
        """What is saved under a prefix, by the names of this module's own state_dict."""
        name, saved = prefix + "weight", {k: v for k, v in saved.items() if k.startswith(prefix)}
        weight = saved.get(name)
        if isinstance(weight, (QuantArray, PackedWeight)):
            del saved[name]
            weight.check()
        else:
            parts = {k: saved[k] for k in saved if k.startswith(name + ".")}
            if not parts:
                return saved
            saved = {k: v for k, v in saved.items() if k not in parts}
            weight = self._assembled({k.removeprefix(name + "."): v for k, v in parts.items()})
        return saved | {prefix + key: part for key, part in stated(weight).items()}

    def _assembled(self, parts: dict[str, Any]) -> Weight:
        """A weight of this layer's format from its components."""
        for name, part in parts.items():
            if not isinstance(part, torch.Tensor):
                raise TypeError(f"weight.{name} must be a tensor, got {type(part).__name__}")
        fmt, spec, names = self.format, self._spec, ", ".join(sorted(parts))
        for layout in dict.fromkeys((ROWS_LAYOUT, layout_for(fmt, spec.shape))):
            found = replace(spec, layout=layout)
            wanted = found.components()
            if {c.name for c in wanted} == parts.keys():
                return found.weight([_own(c, parts[c.name]) for c in wanted])
        raise ValueError(f"the saved weight has the components {names}, which {spec} does not have")

    def _expect(self, saved: dict[str, Any], prefix: str) -> None:
        """Check what is saved under a prefix, then make room for it; ValueError changes nothing."""
        spec, described = self._spec, saved.get(prefix + EXTRA)
        if described is None and prefix + EXTRA in saved:
            raise ValueError(f"{EXTRA} is None, where a uint8 tensor describes the weight")
        if described is not None:
            spec = self._checked(described)
        for component in spec.components():
            name, wanted = component.name, bytes_shape(component)
            part = saved.get(prefix + name)
            if part is None and spec.layout != self.layout:
                raise ValueError(f"{name} is missing, a component of {spec}")
            if part is None:
                continue
            # Another dtype would be copied as numbers, and these are bytes.
            if not is_bytes(part):
                found = getattr(part, "dtype", type(part).__name__)
                raise ValueError(f"{name} is {found}; it is stored as uint8 bytes")
            if tuple(part.shape) != wanted:
                raise ValueError(f"size mismatch for {name}: {tuple(part.shape)}, not {wanted}")
            if name == ORDER and not part.is_meta:
                check_permutation({ORDER: part.detach().cpu().clone().view(torch.int32)})
        if described is not None:
            self.set_extra_state(described)


def quantized_weight(weight: torch.Tensor, fmt: Format, prepack: bool | None) -> Weight:
    """A weight [N, K] quantized where it lies; of a meta tensor one on the meta device."""
    interop.float_dtype(weight.dtype, "weight")
    wanted = weight.is_cuda if prepack is None else prepack
    if not weight.is_meta:
        q = quantize(weight, fmt)
        return prepacked(q) if wanted else q
    shape = (weight.shape[0], weight.shape[1])
    layout = layout_for(fmt, shape) if wanted else ROWS_LAYOUT
    spec = WeightSpec(format_text(fmt), layout, shape, weight.dtype)
    return spec.weight([_zeros(c, weight.device) for c in spec.components()])


def _zeros(component: Component, device: torch.device) -> torch.Tensor:
    return torch.zeros(bytes_shape(component), dtype=torch.uint8, device=device)


def _own(component: Component, part: torch.Tensor) -> torch.Tensor:
    """A component as `cuquant.save` writes it, as bytes; ValueError for another dtype or shape."""
    found = interop.dtype_of(part), tuple(part.shape)
    if found != (component.dtype, component.shape):
        wanted = f"{component.dtype}{list(component.shape)}"
        raise ValueError(f"weight.{component.name} is {found[0]}{list(found[1])}, not {wanted}")
    return as_bytes(part.detach())


def _frozen(bias: torch.Tensor, width: int) -> nn.Parameter:
    """A copy that requires no gradient."""
    _check_bias(bias, width)
    return nn.Parameter(bias.detach().clone(), requires_grad=False)


def _check_bias(bias: Any, width: int) -> None:
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias must be a tensor, got {type(bias).__name__}")
    interop.float_dtype(bias.dtype, "bias")
    if tuple(bias.shape) != (width,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be {(width,)}")
