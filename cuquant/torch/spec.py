"""A quantized weight as torch takes it: tensors of bytes, and words that say what they mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cuquant import interop
from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.errors import FormatError
from cuquant.formats.format import Component
from cuquant.io.state import EXTRA, Description, bytes_shape, components, format_text, parse_format

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

KERNEL_BYTES = 16  # that one load of a GPU takes, from a multiple of them

Weight = QuantArray | PackedWeight


@dataclass(frozen=True)
class WeightSpec:
    """What the component tensors of a weight [N, K], or of another array, mean.

    Attributes
    ----------
    format
        The Format in words: its name, or JSON of name and options.
    layout
        Name and version, as PackedWeight has it; "rows/1" is a QuantArray's.
    shape
        (N, K); of another array all axes, as they are stored.
    dtype
        That was quantized.
    """

    format: str
    layout: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Weight, axes: int = 2) -> "WeightSpec":
        """Of a QuantArray or PackedWeight [N, K], or [E, N, K] for three axes.

        Raises
        ------
        TypeError, ValueError
            For anything else.
        """
        if not isinstance(weight, (QuantArray, PackedWeight)):
            raise TypeError(
                f"weight must be a QuantArray or PackedWeight, got {type(weight).__name__}; "
                "from_linear, from_embedding and from_conv make a layer of a float one"
            )
        turned = isinstance(weight, QuantArray) and weight.axes != tuple(range(axes))
        if len(weight.shape) != axes or turned:
            wanted = "[N, K]" if axes == 2 else "[E, N, K]"
            raise ValueError(
                f"weight must be {wanted}, quantized along K; got shape {weight.shape}"
            )
        layout = weight.layout if isinstance(weight, PackedWeight) else ROWS_LAYOUT
        text = format_text(weight.format)
        return cls(text, layout, tuple(weight.shape), DTYPES[weight.dtype.name])

    def components(self) -> tuple[Component, ...]:
        """Names, dtypes and shapes of the arrays.

        Raises
        ------
        ValueError
            For an unknown format or layout, or a shape that they cannot have.
        """
        return components(self.format, self.layout, self.shape)

    def weight(self, parts: Sequence[torch.Tensor]) -> Weight:
        """The QuantArray or PackedWeight of these tensors, whose memory it shares.

        Raises
        ------
        ValueError
            Where they are not the components, by number, shape, element size or memory order.
        """
        wanted = self.components()
        if len(parts) != len(wanted):
            names = ", ".join(part.name for part in wanted)
            raise ValueError(f"{self} has the components {names}; got {len(parts)} tensors")
        arrays = {c.name: _alias(c, part) for c, part in zip(wanted, parts, strict=True)}
        fmt, dtype = parse_format(self.format), np.dtype(interop.numpy_dtype(self.dtype))
        if self.layout == ROWS_LAYOUT:
            return QuantArray(fmt, self.shape, dtype, arrays, tuple(range(len(self.shape))))
        return PackedWeight(fmt, self.layout, arrays, self.shape, dtype)

    def to_tensor(self) -> torch.Tensor:
        """These words as uint8 [bytes] of JSON, on the CPU: a tensor, for any file format."""
        name = str(self.dtype).removeprefix("torch.")
        said = Description(self.format, self.layout, self.shape, name).to_bytes()
        return torch.from_numpy(np.frombuffer(said, np.uint8).copy())

    @classmethod
    def from_tensor(cls, stored: Any) -> "WeightSpec":
        """What `to_tensor` made.

        Raises
        ------
        FormatError
            For anything else.
        """
        if not is_bytes(stored) or stored.is_meta or stored.layout != torch.strided:
            raise FormatError("what describes the weight is no uint8 tensor of JSON")
        found = Description.from_bytes(stored.detach().cpu().contiguous().numpy().tobytes())
        return cls(found.format, found.layout, found.shape, DTYPES[found.dtype])

    def __str__(self) -> str:
        return f"{parse_format(self.format)}, layout={self.layout}, shape={self.shape}"


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    """A component's tensor as uint8 [`bytes_shape`], on its memory where that is contiguous."""
    shape = part.shape or (1,)
    # Flat first: torch takes [N, 1] with any stride for contiguous, and then refuses the view.
    flat = part.contiguous().reshape(-1).view(torch.uint8)
    return flat.reshape(*shape[:-1], shape[-1] * part.element_size())


def is_bytes(value: object) -> bool:
    """Whether a value is a tensor of uint8, as components and descriptions are stored."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8


def stated(weight: Weight, axes: int = 2) -> dict[str, torch.Tensor]:
    """What a state_dict says of a weight: its components as bytes, and what they mean."""
    parts = {name: as_bytes(tensor_of(part)) for name, part in weight.components.items()}
    return {**parts, EXTRA: WeightSpec.of(weight, axes).to_tensor()}


def tensor_of(part: Any) -> torch.Tensor:
    """A component as a tensor, on the same memory."""
    kind = interop.kind(part)
    if kind == "torch":
        return part.detach()
    if kind == "cupy":
        return torch.from_dlpack(part)
    return interop.from_numpy(part, "torch")


def own_dtype(component: Component) -> torch.dtype:
    """A component's dtype; of fp8 and the like, which torch gets as bytes, uint8."""
    if component.dtype.name == "bfloat16" or component.dtype.kind != "V":
        return getattr(torch, component.dtype.name)
    return torch.uint8


def _alias(component: Component, part: torch.Tensor) -> torch.Tensor:
    """A tensor of the component's own dtype, on the same memory where that is `usable`; never
    `part` itself."""
    own = own_dtype(component)
    said = part.dtype, tuple(part.shape)
    wanted = (own, component.shape), (torch.uint8, bytes_shape(component))
    if said not in wanted or not part.is_contiguous():
        raise ValueError(
            f"{component.name} is {part.dtype}{list(part.shape)} with strides {part.stride()}; it "
            f"must be {own}{list(component.shape)} or uint8{list(wanted[1][1])}, contiguous"
        )
    return usable(component, part.detach()).view(own).view(component.shape)


def usable(component: Component, part: torch.Tensor) -> torch.Tensor:
    """A component's tensor, copied where it lies as nobody can read it.

    A CPU's elements stand on multiples of their size, kernels read 16 bytes at once, and all of
    them want C order. Views of one flat buffer begin anywhere.
    """
    if part.is_meta:
        return part
    size = component.dtype.itemsize
    offset = part.storage_offset() * part.element_size()  # which torch's own views look at
    if part.data_ptr() % (KERNEL_BYTES if part.is_cuda else size) or offset % size:
        return part.clone(memory_format=torch.contiguous_format)
    return part.contiguous()
