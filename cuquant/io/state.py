"""A quantized layer in a state_dict: components as bytes, and what describes them in a tensor too.

`cuquant.torch.QuantLinear` called "q_proj" has the tensors "q_proj.packed", "q_proj.scale", ...:
its components seen as bytes, and "q_proj._extra_state", the JSON that `description` writes. Where
`cuquant.save` writes the same weight, it is "q_proj.weight", and the header describes it.
"""

import json
from dataclasses import dataclass
from functools import lru_cache

from cuquant.array.packed_weight import ROWS_LAYOUT, layout_components
from cuquant.errors import FormatError, clipped
from cuquant.formats import Format, get_format, strings
from cuquant.formats.format import Component
from cuquant.interop import INPUT_DTYPES

EXTRA = "_extra_state"  # where torch's nn.Module puts what get_extra_state returns
VERSION = 1
MAX_BYTES = 1 << 20  # of a description; a learned codebook of 256 levels takes 6,000


@dataclass(frozen=True)
class Description:
    """What the component tensors of a weight [N, K] or [E, N, K] mean.

    Attributes
    ----------
    format
        The Format in words (`format_text`).
    layout
        Name and version, as PackedWeight has it; "rows/1" is a QuantArray's.
    shape
        (N, K), or (E, N, K) of the experts of a layer.
    dtype
        Name of the dtype that was quantized.
    """

    format: str
    layout: str
    shape: tuple[int, ...]
    dtype: str

    def components(self) -> tuple[Component, ...]:
        """Names, dtypes and shapes of the arrays.

        Raises
        ------
        ValueError, TypeError
            For an unknown format or layout, or a shape that they cannot have.
        """
        return components(self.format, self.layout, self.shape)

    def to_bytes(self) -> bytes:
        """These words as JSON."""
        return json.dumps({"version": VERSION, **vars(self)}).encode()

    @classmethod
    def from_bytes(cls, stored: bytes) -> "Description":
        """What `to_bytes` made.

        Raises
        ------
        FormatError
            For anything else, and for a format, layout or shape that this version does not have.
        """
        if len(stored) > MAX_BYTES:
            raise FormatError(f"what describes the weight is {len(stored)} bytes long")
        try:
            said = json.loads(stored)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"what describes the weight is no JSON ({error})") from error
        version = said.get("version") if isinstance(said, dict) else None
        if type(version) is not int or version != VERSION:
            raise FormatError(
                f"the weight is of version {clipped(version)}; this cuquant reads {VERSION}"
            )
        text, layout, shape, dtype = (said.get(k) for k in ("format", "layout", "shape", "dtype"))
        if (
            not isinstance(shape, list)
            or len(shape) not in (2, 3)
            or not all(type(n) is int and 0 <= n < 2**63 for n in shape)
        ):
            raise FormatError(f"the weight's shape {clipped(shape)} is not [N, K]")
        if not isinstance(text, str) or dtype not in INPUT_DTYPES:
            raise FormatError(
                f"the weight's format {clipped(text)} or dtype {clipped(dtype)} is malformed"
            )
        if not isinstance(layout, str):
            raise FormatError(f"the weight's layout {clipped(layout)} is malformed")
        found = cls(text, layout, tuple(shape), dtype)
        try:
            found.components()
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise FormatError(str(error)) from error
        return found


def is_description(stored: bytes) -> bool:
    """Whether bytes are meant as a Description: modules of others have extra states too."""
    if len(stored) > MAX_BYTES:
        return False
    try:
        said = json.loads(stored)
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and {"format", "layout"} <= said.keys()


def format_text(fmt: Format) -> str:
    """A Format in words that `parse_format` reads; learned levels too, which `str(fmt)` leaves out.

    Raises
    ------
    ValueError
        For one that its name and options do not describe.

    >>> import cuquant as cq
    >>> format_text(cq.get_format("int4", block_size=64))
    '{"name": "int4", "options": {"block_size": 64}}'
    """
    text = fmt.text or strings.describe(fmt.name, fmt.options)
    if parse_format(text) != fmt:
        raise ValueError(f"{fmt} is not what get_format makes of its name and options")
    return text


@lru_cache(maxsize=256)
def parse_format(text: str) -> Format:
    """The Format of `format_text`, or of `get_format`'s string; ValueError or TypeError for other
    texts."""
    if not text.startswith("{"):
        return get_format(text)
    said = json.loads(text)
    options = said.get("options")
    if said.keys() != {"name", "options"} or not isinstance(options, dict):
        raise ValueError(f"{clipped(text)} does not name a format and its options")
    return get_format(said["name"], **options)


def bytes_shape(component: Component) -> tuple[int, ...]:
    """Of a component's bytes: its last axis is longer by the bytes of an element.

    >>> import numpy as np
    >>> bytes_shape(Component("scale", np.dtype(np.float16), (24, 2)))
    (24, 4)
    """
    size = component.dtype.itemsize
    return (*component.shape[:-1], component.shape[-1] * size) if component.shape else (size,)


@lru_cache(maxsize=1024)
def components(text: str, layout: str, shape: tuple[int, ...]) -> tuple[Component, ...]:
    """The arrays of one of a shape, whose format is `text`; ValueError where there can be none."""
    fmt = parse_format(text)
    fmt.check_shape(shape)
    if layout == ROWS_LAYOUT:
        return fmt.components(shape)
    return layout_components(fmt, shape, layout)
