"""A quantized weight as torch takes it: tensors of bytes, and words that say what they mean."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from cuquant import interop
from cuquant.array import QuantArray
from cuquant.errors import FormatError
from cuquant.formats import Format, get_format
from cuquant.formats.format import Component
from cuquant.packed import ROWS_LAYOUT, PackedWeight, layout_components

VERSION = 1  # of what `to_tensor` writes
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

KERNEL_BYTES = 16  # that one load of a GPU takes, from a multiple of them

Weight = QuantArray | PackedWeight


@dataclass(frozen=True)
class WeightSpec:
    """What the component tensors of a weight [N, K] mean.

    Attributes
    ----------
    format
        The Format in words: its name, or JSON of name and options.
    layout
        Name and version, as PackedWeight has it; "rows/1" is a QuantArray's.
    shape
        (N, K).
    dtype
        That was quantized.
    """

    format: str
    layout: str
    shape: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Weight) -> "WeightSpec":
        """Of a QuantArray or PackedWeight [N, K].

        Raises
        ------
        TypeError, ValueError
            For anything else.
        """
        if not isinstance(weight, (QuantArray, PackedWeight)):
            raise TypeError(
                f"weight must be a QuantArray or PackedWeight, got {type(weight).__name__}"
            )
        rows_last = isinstance(weight, QuantArray) and weight.axes != (0, 1)
        if len(weight.shape) != 2 or rows_last:
            raise ValueError(f"weight must be [N, K], quantized along K; got shape {weight.shape}")
        layout = weight.layout if isinstance(weight, PackedWeight) else ROWS_LAYOUT
        text = format_text(weight.format)
        return cls(text, layout, (weight.shape[0], weight.shape[1]), DTYPES[weight.dtype.name])

    def components(self) -> tuple[Component, ...]:
        """Names, dtypes and shapes of the arrays.

        Raises
        ------
        ValueError
            For an unknown format or layout, or a shape that they cannot have.
        """
        return _components(self.format, self.layout, self.shape)

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
            return QuantArray(fmt, self.shape, dtype, arrays, (0, 1))
        return PackedWeight(fmt, self.layout, arrays, self.shape, dtype)

    def to_tensor(self) -> torch.Tensor:
        """These words as uint8 [bytes] of JSON, on the CPU: a tensor, for any file format."""
        said = {
            "version": VERSION,
            "format": self.format,
            "layout": self.layout,
            "shape": self.shape,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        return torch.from_numpy(np.frombuffer(json.dumps(said).encode(), np.uint8).copy())

    @classmethod
    def from_tensor(cls, stored: Any) -> "WeightSpec":
        """What `to_tensor` made.

        Raises
        ------
        FormatError
            For anything else.
        """
        if not isinstance(stored, torch.Tensor) or stored.is_meta or stored.dtype != torch.uint8:
            raise FormatError("what describes the weight is no uint8 tensor of JSON")
        try:
            said = json.loads(stored.cpu().numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise FormatError(f"what describes the weight is no JSON ({error})") from error
        version = said.get("version") if isinstance(said, dict) else None
        if version != VERSION:
            raise FormatError(f"the weight is of version {version!r}; this cuquant reads {VERSION}")
        fmt, layout, shape, dtype = (said.get(k) for k in ("format", "layout", "shape", "dtype"))
        if (
            not isinstance(shape, list)
            or len(shape) != 2
            or not all(type(n) is int and 0 <= n < 2**63 for n in shape)
        ):
            raise FormatError(f"the weight's shape {shape!r} is not [N, K]")
        if not isinstance(fmt, str) or dtype not in DTYPES:
            raise FormatError(f"the weight's format {fmt!r} or dtype {dtype!r} is malformed")
        if not isinstance(layout, str):
            raise FormatError(f"the weight's layout {layout!r} is malformed")
        found = cls(fmt, layout, (shape[0], shape[1]), DTYPES[dtype])
        try:
            found.components()
        except (ValueError, TypeError, OverflowError) as error:
            raise FormatError(str(error)) from error
        return found

    def __str__(self) -> str:
        return f"{parse_format(self.format)}, layout={self.layout}, shape={self.shape}"


def format_text(fmt: Format) -> str:
    """A Format in words that `parse_format` reads.

    Raises
    ------
    ValueError
        For one that its name and options do not describe.

    >>> import cuquant as cq
    >>> format_text(cq.get_format("int4", block_size=64))
    '{"name": "int4", "options": {"block_size": 64}}'
    """
    text = fmt.name
    if fmt.options:
        text = json.dumps({"name": fmt.name, "options": dict(fmt.options)}, allow_nan=False)
    if parse_format(text) != fmt:
        raise ValueError(f"{fmt} is not what get_format makes of its name and options")
    return text


@lru_cache(maxsize=256)
def parse_format(text: str) -> Format:
    """The Format of `format_text`; ValueError or TypeError for other texts."""
    if not text.startswith("{"):
        return get_format(text)
    said = json.loads(text)
    options = said.get("options")
    if said.keys() != {"name", "options"} or not isinstance(options, dict):
        raise ValueError(f"{text!r} does not name a format and its options")
    return get_format(said["name"], **options)


def bytes_shape(component: Component) -> tuple[int, ...]:
    """Of a component's bytes: its last axis is longer by the bytes of an element.

    >>> bytes_shape(Component("scale", np.dtype(np.float16), (24, 2)))
    (24, 4)
    """
    size = component.dtype.itemsize
    return (*component.shape[:-1], component.shape[-1] * size) if component.shape else (size,)


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    """A component's tensor as uint8 [`bytes_shape`], on its memory where that is contiguous."""
    return (part.contiguous() if part.ndim else part.reshape(1)).view(torch.uint8)


@lru_cache(maxsize=1024)
def _components(text: str, layout: str, shape: tuple[int, int]) -> tuple[Component, ...]:
    fmt = parse_format(text)
    fmt.check_shape(shape)
    return layout_components(fmt, shape, layout)


def _alias(component: Component, part: torch.Tensor) -> torch.Tensor:
    """A tensor of the component's own dtype, on the same memory unless that is `misaligned`; never
    `part` itself."""
    own = torch.uint8  # of fp8 and the like, which torch gets as bytes
    if component.dtype.name == "bfloat16" or component.dtype.kind != "V":
        own = getattr(torch, component.dtype.name)
    said = part.dtype, tuple(part.shape)
    wanted = (own, component.shape), (torch.uint8, bytes_shape(component))
    if said not in wanted or not part.is_contiguous():
        raise ValueError(
            f"{component.name} is {part.dtype}{list(part.shape)} with strides {part.stride()}; it "
            f"must be {own}{list(component.shape)} or uint8{list(wanted[1][1])}, contiguous"
        )
    part = part.clone() if misaligned(component, part) else part.detach()
    return part.view(own).view(component.shape)


def misaligned(component: Component, part: torch.Tensor) -> bool:
    """Whether a component's tensor starts where it cannot be read: a CPU's elements stand on
    multiples of their size, and kernels read 16 bytes at once."""
    if part.is_meta:
        return False
    size = component.dtype.itemsize
    offset = part.storage_offset() * part.element_size()  # which torch's own views look at
    return part.data_ptr() % (KERNEL_BYTES if part.is_cuda else size) != 0 or offset % size != 0
