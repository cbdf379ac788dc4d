"""What a reader of a kind of checkpoint finds: quantized arrays, and the tensors that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from cuquant import interop
from cuquant.array.arranged import check_permutation
from cuquant.array.quant_array import QuantArray
from cuquant.errors import FormatError, shortened
from cuquant.formats import Format
from cuquant.formats.names import ScaleDtype
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.messages import quote
from cuquant.io.container.safetensors import TensorInfo
from cuquant.io.quantized import stored_shape

Parts = dict[str, np.ndarray]
Extent = int | Literal["row", "tensor"] | tuple[int, int]  # what shares a scale
SCALE_DTYPES: dict[str, ScaleDtype] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""What formats call the dtypes of scales in a checkpoint, which keep theirs."""


@dataclass(frozen=True)
class Layer:
    """One quantized array of a checkpoint.

    Attributes
    ----------
    name
        The weight's own, such as "model.layers.0.mlp.up_proj.weight".
    format, shape, dtype
        Of the QuantArray.
    tensors
        Of the checkpoint, that hold it.
    parts
        Reads its components from these.
    notes
        What a reader of a report should know, in words.
    axes
        As a QuantArray's; None where the last axis is the quantized one.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    tensors: tuple[str, ...]
    parts: Callable[[], Parts]
    notes: tuple[str, ...] = ()
    axes: tuple[int, ...] | None = None

    def read(self) -> QuantArray:
        """The array; FormatError where its tensors do not fit together."""
        axes = self.axes or tuple(range(len(self.shape)))
        wanted = self.format.components(stored_shape(self.shape, axes))
        try:
            found = self.parts()
        except FormatError:
            raise
        except (ValueError, OverflowError) as error:  # bytes that do not have these shapes
            raise refuse(self.name, str(error)) from error
        parts = {}
        for part in wanted:
            array = np.ascontiguousarray(found[part.name])
            if array.dtype != part.dtype or array.size != np.prod(part.shape, dtype=np.int64):
                raise FormatError(
                    f"{quote(self.name)}: {part.name} is {array.dtype}{list(array.shape)}; "
                    f"{self.format} of shape {self.shape} needs {part.dtype}{list(part.shape)}"
                )
            parts[part.name] = array.reshape(part.shape)
        try:
            check_permutation(parts)
        except FormatError as error:
            raise refuse(self.name, str(error)) from error
        return QuantArray(self.format, self.shape, self.dtype, parts, axes)


@dataclass(frozen=True)
class Plain:
    """An array of floats that several tensors of a checkpoint hold.

    Attributes
    ----------
    name
        The weight's own.
    shape, dtype
        Of the array.
    tensors
        Of the checkpoint, that hold it.
    make
        Makes it of these.
    notes
        What a reader of a report should know, in words.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    tensors: tuple[str, ...]
    make: Callable[[], np.ndarray]
    notes: tuple[str, ...] = ()

    def read(self) -> np.ndarray:
        """The array; FormatError where its tensors do not fit together."""
        try:
            return self.make()
        except (ValueError, OverflowError) as error:
            raise refuse(self.name, str(error)) from error


@dataclass(frozen=True)
class Unread:
    """An array of a checkpoint that cannot be read; its tensors are listed as they lie.

    Attributes
    ----------
    name
        The weight's own.
    error
        Which says why.
    """

    name: str
    error: FormatError


Found = Layer | Plain | Unread


def attempt(name: str, make: Callable[..., Layer | Plain], *args: Any) -> Found:
    """The array that a reader makes, or why there is none: others of the file can be read."""
    try:
        return make(*args)
    except FormatError as error:
        return Unread(name, error)
    except (ValueError, OverflowError) as error:  # of formats and shapes that there are not
        return Unread(name, refuse(name, str(error)))


class Schema(Protocol):
    """One kind of checkpoint: a module of this folder, which is also its table of facts."""

    @property
    def KIND(self) -> str:
        """Its name."""
        ...

    def recognises(self, c: Checkpoint) -> bool:
        """Whether a checkpoint is of this kind."""
        ...

    def layers(self, c: Checkpoint) -> Iterator[Found]:
        """Its arrays that are no tensors of their own; other tensors are plain."""
        ...


def stems(c: Checkpoint, ending: str) -> Iterator[str]:
    """What comes before the ending of tensors' names, which is empty or ends with a dot."""
    for name in c:
        stem = name.removesuffix(ending)
        if stem != name and (not stem or stem.endswith(".")):
            yield stem


def model_dtype(c: Checkpoint, like: TensorInfo | None = None) -> np.dtype:
    """The dtype of a checkpoint's weights: its configuration's, or that of its scales."""
    said = c.config.get("torch_dtype") or c.config.get("dtype")
    if isinstance(said, str) and said in ("float16", "bfloat16", "float32"):
        return interop.float_dtype(said)
    if like is not None and like.dtype in SCALE_DTYPES:
        return np.dtype(like.numpy_dtype)
    return np.dtype(np.float32)


def scale_dtype(info: TensorInfo, what: str) -> ScaleDtype:
    """The `scale_dtype` of a format that holds these scales."""
    if info.dtype not in SCALE_DTYPES:
        raise FormatError(f"{quote(info.name)}: {what} of dtype {info.dtype} are unknown")
    return SCALE_DTYPES[info.dtype]


def integer(config: Mapping[str, Any], key: str, least: int, most: int) -> int:
    """A whole number of a configuration; FormatError for anything else."""
    found = config.get(key)
    if type(found) is not int or not least <= found <= most:
        raise FormatError(f"{key} is {quote(found)}; a number from {least} to {most} is wanted")
    return found


def refuse(name: str, why: str) -> FormatError:
    """The error of a layer that cannot be read."""
    return FormatError(f"{quote(name)}: {shortened(why, 500)}")
