"""Holder: a module that holds one quantized weight as frozen parameters of bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cuquant import interop
from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight, layout_for
from cuquant.array.packed_weight import prepack as prepacked
from cuquant.array.packed_weight import unpack as unpacked
from cuquant.array.quant_array import QuantArray
from cuquant.formats import Format
from cuquant.formats.format import Component
from cuquant.io.state import bytes_shape, format_text, parse_format
from cuquant.ops.quantize.door import quantize
from cuquant.torch.op import DEQUANTIZE, forget, multiply, weight_of
from cuquant.torch.saved import checked, expect, translated
from cuquant.torch.spec import DTYPES, Weight, WeightSpec, as_bytes, tensor_of, usable
from cuquant.torch.weight import Loan, QuantWeight, settle


class Holder(nn.Module):
    """A module with one quantized weight, which modules of torch's own kind are made of.

    The weight's components are parameters under their own names ("packed", "scale", ...), seen as
    bytes and frozen: a float16 scale [24, 2] is uint8 [24, 4]. DistributedDataParallel sends them
    once and not with every step, FSDP2 shards and gathers them, casts leave them alone.

    `requires_grad_(True)` of a whole model is torch's error, for bytes have no gradient. What
    averages parameters (EMA, `torch.optim.swa_utils.AveragedModel`) must be told to leave out those
    that are no floats: averaged bytes are no codes.

    A subclass says in `_AXES` how many axes the stored weight has, and in `_took` what it makes of
    a new one.
    """

    _AXES = 2
    _loans: tuple[Loan, ...] = ()  # of `weight.data`

    def __init__(self, weight: Weight) -> None:
        nn.Module.__init__(self)  # and no other's, which would make a float weight
        self._names: tuple[str, ...] = ()
        self._words: tuple[Any, ...] = ()
        self.register_parameter("bias", None)  # which state_dicts name first
        self._spec = WeightSpec.of(weight, self._AXES)
        self._take(weight)

    @property
    def quantized(self) -> Weight:
        """The QuantArray or PackedWeight, on the parameters' memory."""
        return weight_of(self._parts(), *self._words, axes=self._AXES)

    @property
    def weight(self) -> torch.Tensor:
        """A tensor that decodes where its values are read, with the weight's dtype and device.

        Assigned to it can be a tensor of as many axes, which is quantized in this layer's format
        and layout; a QuantArray or a PackedWeight, which is taken as it is, its memory shared; or
        what `weight` of a quantized module was: that of another one, whose parameters are then
        those of both, or this one's own of before, which is put back. The size may be another one.
        """
        return self._decoded() if torch.compiler.is_compiling() else QuantWeight(self)

    @weight.setter
    def weight(self, value: Any) -> None:
        if isinstance(value, QuantWeight):
            self._share(value)
            return
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            interop.refuse_gradient(value, "weight")  # functional_call hopes for one
        self._take(self._like_this(value) if isinstance(value, torch.Tensor) else value)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled."""
        self._parts()  # which settles what was changed
        return {key: value for key, value in vars(self).items() if key != "_loans"}

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

    @property
    def is_prepacked(self) -> bool:
        """Whether the weight is laid out for GPU kernels."""
        return self.layout != ROWS_LAYOUT

    def prepack_(self) -> Any:
        """Lay the weight out for GPU kernels, in place (`cuquant.prepack`); the layer.

        Modules that share the weight keep it as it was.
        """
        if isinstance(held := self.quantized, QuantArray):
            self._take(prepacked(held))
        return self

    def unpack_(self) -> Any:
        """Undo `prepack_`, bit for bit; the layer."""
        if isinstance(held := self.quantized, PackedWeight):
            self._take(unpacked(held))
        return self

    def _said(self) -> str:
        """Format and layout, for `extra_repr`."""
        return f"format={self.format}" + (f", layout={self.layout}" if self.is_prepacked else "")

    # ---- the weight -------------------------------------------------------------------------

    def _shape(self) -> tuple[int, ...]:
        """The weight's shape as others see it."""
        return self._spec.shape

    def _took(self, spec: WeightSpec) -> None:
        """Learn a new weight's shape."""

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the weight in the shape in which they are quantized."""
        return values

    def _multiply(self, x: Any, bias: Any, activation: str | None) -> torch.Tensor:
        """activation(x @ weight.T + bias), of autocast's dtype where that is on."""
        return multiply(autocast(x), self._parts(), self._words, bias, activation)

    def _decoded(self) -> torch.Tensor:
        """The weight's values, a new tensor."""
        return DEQUANTIZE(self._parts(), *self._words).view(self._shape())

    def _like_this(self, values: Any) -> Weight:
        """Values in this layer's format and layout."""
        wanted = len(self._shape())
        if not isinstance(values, torch.Tensor) or values.ndim != wanted:
            found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values)
            raise ValueError(f"weight must be a tensor of floats with {wanted} axes, got {found}")
        return quantized_weight(self._rows(values.detach()), self.format, self.is_prepacked)

    def _take(self, weight: Weight) -> None:
        """Hold a weight's arrays, whose memory is shared."""
        spec = WeightSpec.of(weight, self._AXES)
        parts = {name: tensor_of(part) for name, part in weight.components.items()}
        self._took(spec)
        self._hold(spec, lambda c: as_bytes(parts[c.name]))

    def _share(self, weight: QuantWeight) -> None:
        """Have the parameters that a weight was read from, as modules with one weight do."""
        spec, parts = weight._held
        if len(spec.shape) != self._AXES:
            raise ValueError(f"weight must have {self._AXES} axes, got {spec.shape}")
        self._took(spec)
        held = {c.name: part for c, part in zip(spec.components(), parts, strict=True)}
        self._hold(spec, lambda c: held[c.name])

    def _fill(self, values: Any) -> None:
        """Quantize values into the parameters there are, which other layers may share."""
        if isinstance(values, torch.Tensor) and values.shape != self._shape():
            raise ValueError(
                f"weight.data must be of shape {self._shape()}, got {tuple(values.shape)}; "
                "dequantize_(model, include=...) first what is to be resized"
            )
        new, old = self._like_this(values), self._parts()
        spec = WeightSpec.of(new, self._AXES)
        parts = [as_bytes(tensor_of(p)) for p in new.components.values()]
        if any(a.device != b.device or a.is_inference() for a, b in zip(old, parts, strict=True)):
            self._take(new)
            return
        self._loans = ()
        with torch.no_grad():
            for mine, part in zip(old, parts, strict=True):
                mine.copy_(part)
        self._decode_to(spec.dtype)

    def _decode_to(self, dtype: torch.dtype) -> None:
        """Let the weight be of a dtype, if it is one that can be quantized."""
        if dtype in DTYPES.values():
            self._spec = replace(self._spec, dtype=dtype)
            self._words = (*self._words[:-1], dtype)

    # ---- parameters -------------------------------------------------------------------------

    def _parts(self) -> list[Any]:
        if self._loans and not torch.compiler.is_compiling():
            settle(self)
        own = self._parameters
        return [own[name] for name in self._names]

    def _hold(self, spec: WeightSpec, part: Callable[[Component], Any]) -> None:
        """Parameters for the components of `spec`, in place of those there are."""
        made = {component.name: _frozen(part(component)) for component in spec.components()}
        self._loans = ()
        for name in self._names:
            delattr(self, name)
        for name, parameter in made.items():
            self.register_parameter(name, parameter)
        self._spec, self._names = spec, tuple(made)
        self._words = (spec.format, spec.layout, spec.shape, spec.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """What `.to()` and its like do; `.type(dtype)`, which casts integers too, spares these."""

        def spared(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            if tensor.is_floating_point() or result.dtype == tensor.dtype:
                return result
            return tensor.to(result.device)

        forget(self._parts())
        self._loans = ()
        super()._apply(spared, recurse)
        probe = torch.empty(0, dtype=self._spec.dtype, device=self._parts()[0].device)
        self._decode_to(fn(probe).dtype)
        return self

    # ---- state_dict -------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._parts()  # which settles what was changed
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def get_extra_state(self) -> torch.Tensor:
        """Format, layout, shape and dtype, as uint8 [bytes] of JSON."""
        return self._spec.to_tensor()

    def set_extra_state(self, state: Any) -> None:
        """Take over layout and dtype of what was saved; parameters of a new layout hold zeros.

        Raises
        ------
        FormatError
            For a malformed state, or a layout this version does not know.
        ValueError
            For another format or shape.
        """
        spec = checked(self._spec, state)
        if spec.layout == self._spec.layout:
            self._hold(spec, lambda c: self._parameters[c.name])
            return
        device = self._parts()[0].device
        self._hold(spec, lambda c: _zeros(c, device))

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
            own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
            mine = translated(own, self._spec)
            described = expect(mine, self._spec)
            if assign and (bias := mine.get("bias")) is not None:
                check_bias(bias, self._bias_shape())
            if described is not None:
                self.set_extra_state(described)
        except (ValueError, TypeError) as error:
            error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {error}")
            return
        mine = {prefix + key: value for key, value in mine.items()}
        forget(self._parts())
        super()._load_from_state_dict(
            mine, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if not assign:
            self._decode_to(dtype)  # as floats keep their dtype where others are copied into them
        for component in self._spec.components():  # views of one flat buffer begin anywhere
            part = self._parameters[component.name]
            assert part is not None
            if type(part.data) is torch.Tensor:
                made = usable(component, part.detach())
                if made.data_ptr() != part.data_ptr():
                    self._parameters[component.name] = _frozen(made)

    def _bias_shape(self) -> tuple[int, ...]:
        return self._spec.shape[:1]

    def _set_bias(self, bias: torch.Tensor | None) -> None:
        """Have a copy of a bias, which requires no gradient."""
        if bias is not None:
            check_bias(bias, self._bias_shape())
            with torch.inference_mode(False):
                self.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)


def autocast(x: Any) -> torch.Tensor:
    """x in autocast's dtype, where that is on."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else None
    if kind is not None and torch.is_autocast_enabled(kind):
        interop.float_dtype(x.dtype, "x")
        return x.to(torch.get_autocast_dtype(kind))
    return x


def quantized_weight(weight: torch.Tensor, fmt: Format, prepack: bool | None) -> Weight:
    """A weight [..., N, K] quantized where it lies; of a meta tensor one on the meta device."""
    interop.float_dtype(weight.dtype, "weight")
    wanted = weight.is_cuda if prepack is None else prepack
    if not weight.is_meta:
        q = quantize(weight, fmt)
        return prepacked(q) if wanted else q
    shape = tuple(weight.shape)
    layout = layout_for(fmt, shape) if wanted else ROWS_LAYOUT
    spec = WeightSpec(format_text(fmt), layout, shape, weight.dtype)
    return spec.weight([_zeros(c, weight.device) for c in spec.components()])


def check_bias(bias: Any, shape: tuple[int, ...]) -> None:
    """TypeError or ValueError for what is no bias of a shape."""
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias must be a tensor, got {type(bias).__name__}")
    interop.float_dtype(bias.dtype, "bias")
    if tuple(bias.shape) != shape:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be {shape}")


def _zeros(component: Component, device: torch.device) -> torch.Tensor:
    return torch.zeros(bytes_shape(component), dtype=torch.uint8, device=device)


def _frozen(part: Any) -> nn.Parameter:
    if isinstance(part, nn.Parameter):
        return part
    if part.is_inference():  # which autograd saves nowhere, and nothing loads into
        with torch.inference_mode(False):
            part = part.clone()
    return nn.Parameter(part, requires_grad=False)
