"""Entries of a file by the names that another kind of files has, with rows in its order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant.array.arranged import ORDER
from cuquant.array.quant_array import QuantArray
from cuquant.array.raw_blocks import RawBlocks
from cuquant.errors import FormatError
from cuquant.formats import Format
from cuquant.interop import INPUT_DTYPES
from cuquant.io.architectures.names import ARCHITECTURES, Architecture, of_gguf, row_order
from cuquant.io.container.messages import quote
from cuquant.io.entries import Entry, Opened
from cuquant.io.experts import split

Heads = Mapping[str, int | None]  # "head_count" and "head_count_kv"; None where none is told


def in_hf(file: Opened) -> dict[str, Entry]:
    """Entries of a GGUF file by transformers' names.

    Raises
    ------
    ValueError
        For an architecture that is not known.
    FormatError
        For metadata that does not say how many heads there are, or not those of the tensors.
    """
    told = file.metadata.get("general.architecture")
    found = of_gguf(file.metadata)
    if found is None:
        known = ", ".join(a.name for a in ARCHITECTURES)
        raise ValueError(
            f"{file.path}: names of the architecture {quote(told)} are not known; known: {known}"
        )
    heads = _heads(file, found)
    made: dict[str, Entry] = {}
    for name, entry in file.items():
        known = found.in_hf(name)
        new = known or name
        try:
            renamed = changed(entry, new, name, found, heads, to_gguf=False)
            parts = list(split(renamed, known)) if known and "{}" in known else [renamed]
        except ValueError as error:
            raise FormatError(f"{file.path}: {quote(name)}: {error}") from error
        for part in parts:
            if part.name in made:
                raise FormatError(f"{file.path}: two tensors are transformers' {quote(part.name)}")
            made[part.name] = part
    return made


def tells_heads(file: Opened, found: Architecture) -> bool:
    """Whether a GGUF file tells the heads that the order of its rows depends on."""
    heads = _heads(file, found)
    return all(key is None or heads[key] is not None for key in map(found.heads_of, file))


def _heads(file: Opened, found: Architecture) -> Heads:
    keys = ("head_count", "head_count_kv")
    return {key: _count(file, f"{found.name}.attention.{key}") for key in keys}


def _count(file: Opened, key: str) -> int | None:
    value = file.metadata.get(key, file.metadata.get(key.removesuffix("_kv")))
    return int(value) if isinstance(value, np.integer) and value >= 1 else None


def changed(
    entry: Entry, new: str, gguf_name: str, found: Architecture, heads: Heads, to_gguf: bool
) -> Entry:
    """An entry by its new name, with rows and norms as the other side has them.

    Raises
    ------
    ValueError
        Where rows of a format cannot be taken apart.
    """
    key = found.heads_of(gguf_name)
    if key is not None and entry.shape:
        count = heads[key]
        if count is None:
            raise ValueError(f"{found.name}.attention.{key} tells no number of heads")
        order = row_order(entry.shape[0], count)
        rows = order if to_gguf else np.argsort(order)
        _refuse_shared_rows(entry)
        read = _after(entry.read, lambda value: by_rows(value, rows))
        return replace(entry, name=new, read=read, rows=None)
    if found.has_one_more(gguf_name) and entry.format is None and entry.dtype.name in INPUT_DTYPES:
        one = np.float32(1 if to_gguf else -1)
        read = _after(entry.read, lambda value: value.astype(np.float32) + one)
        return replace(entry, name=new, dtype=np.dtype(np.float32), read=read)
    return replace(entry, name=new)


def _after(read: Callable[[], Any], change: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: change(read())


def _refuse_shared_rows(entry: Entry) -> None:
    """ValueError where rows share scales with others that will not lie beside them."""
    fmt = entry.format
    if not isinstance(fmt, Format) or fmt.scale is None:
        return
    stored = fmt.components(entry.shape)[0].shape
    is_in_rows = stored[: len(entry.shape) - 1] == entry.shape[:-1] and not entry.axes
    if (
        isinstance(fmt.scale.block, tuple)
        or fmt.is_flat
        or fmt.scale.nested == "double"
        or not is_in_rows
    ):
        raise ValueError(
            f"{quote(entry.name)}: rows of {fmt} share scales, and ggml has rows in another "
            "order; make it a file of cuquant's in another format first"
        )


def by_rows(value: Any, rows: np.ndarray) -> Any:
    """An array with its rows in another order; blocks lie in rows."""
    if isinstance(value, RawBlocks):
        return RawBlocks(value.type, value.shape, value.blocks[rows])
    if not isinstance(value, QuantArray):
        return value[rows]
    alone = {ORDER} & value.components.keys()  # of columns
    parts = {
        name: part[rows] if part.ndim and name not in alone else part
        for name, part in value.components.items()
    }
    return value._with(components=parts)
