"""Arrays of a file before they are read, and the file as a mapping of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.errors import FormatError, did_you_mean
from cuquant.formats import Format
from cuquant.io.container.closing import Closing
from cuquant.io.container.messages import quote


@dataclass(frozen=True)
class Entry:
    """One array of a file: what it is, before it is read.

    Attributes
    ----------
    name
        The weight's own name.
    format
        Of a QuantArray, or the name of a type of ggml's without codec; None for plain arrays.
    shape, dtype
        Of the array.
    nbytes
        That it takes in the file, scales and all.
    tensors
        Of the file, that hold it.
    notes
        What a reader should know, in words.
    read
        Reads it.
    axes
        Of a QuantArray whose last axis is not the quantized one; else None.
    layout
        Of a PackedWeight; None for other arrays.
    error
        Why it cannot be read; None where it can.
    rows
        Reads rows [start, stop) of a quantized matrix; None where it is read whole.
    """

    name: str
    format: Format | str | None
    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int
    tensors: tuple[str, ...]
    notes: tuple[str, ...]
    read: Callable[[], Any] = field(repr=False)
    axes: tuple[int, ...] | None = None
    layout: str | None = None
    error: FormatError | None = None
    rows: Callable[[int, int], QuantArray] | None = field(default=None, repr=False)


class Opened(Closing, Mapping[str, Entry]):
    """The arrays of a file or a folder, listed and not read; close it, or use it in `with`.

    Attributes
    ----------
    path
        What was opened.
    kind
        "cuquant", "safetensors" (plain arrays), "gguf", or a kind of checkpoint: "gptq", "awq", ...
    metadata
        Of a GGUF file its keys and values; of other files config.json.
    header
        Texts in the headers of safetensors files.
    unread
        Why a kind is listed and not read; "" of those that `open` gives.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        entries: Mapping[str, Entry],
        metadata: Mapping[str, Any],
        close: Callable[[], None],
        header: Mapping[str, str] | None = None,
        unread: str = "",
    ) -> None:
        self.path, self.kind, self.metadata = path, kind, metadata
        self.header, self.unread = header or {}, unread
        self._entries, self._close = entries, close

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            hint = did_you_mean(name, self._entries)
            raise KeyError(f"{self.path} has no array {quote(name)}{hint}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def architecture(self) -> str:
        """Of the model, in the file's own words; "" where it does not say."""
        classes = self.metadata.get("architectures")
        told = (
            self.metadata.get("general.architecture"),
            *(classes if isinstance(classes, list) else ()),
            self.metadata.get("model_type"),
        )
        return next((text for text in told if isinstance(text, str)), "")

    def close(self) -> None:
        """Close the files; what was read stays."""
        self._close()
