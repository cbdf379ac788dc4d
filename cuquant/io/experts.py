"""Arrays of experts: one [E, N, K], or E matrices with names of their own.

GGUF and MLX have one array, transformers' checkpoints and the kinds of linear layers E matrices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.array.raw_blocks import RawBlocks
from cuquant.formats import Format, get_format
from cuquant.io.container.messages import quote
from cuquant.io.entries import Entry

MANY = 4096  # experts of an array
_OWN = re.compile(r"(?:(.+)\.)?experts\.(\d{1,4})\.(\w+)\.weight")
_JOINED = re.compile(r"(?:(.+)\.)?switch_mlp\.(\w+)\.weight")
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # in block_sparse_moe


def in_mlx(name: str) -> tuple[str, int] | None:
    """MLX's name of the array that has a matrix of an expert, and which; None for other names.

    >>> in_mlx("layers.0.mlp.experts.7.up_proj.weight")
    ('layers.0.mlp.switch_mlp.up_proj.weight', 7)
    """
    found = _OWN.fullmatch(name)
    if found is None:
        return None
    before, number, part = found.groups()
    if before and before.endswith("block_sparse_moe"):
        part = MIXTRAL.get(part, part)
    joined = ".".join(filter(None, (before, "switch_mlp", part, "weight")))
    return joined, int(number)


def of_mlx(name: str) -> str | None:
    """The names of the matrices of an array of MLX's, with {} for the number; None for others.

    >>> of_mlx("layers.0.block_sparse_moe.switch_mlp.up_proj.weight")
    'layers.0.block_sparse_moe.experts.{}.w3.weight'
    """
    found = _JOINED.fullmatch(name)
    if found is None:
        return None
    before, part = found.groups()
    if before and before.endswith("block_sparse_moe"):
        part = next((own for own, joined in MIXTRAL.items() if joined == part), part)
    return ".".join(filter(None, (before, "experts.{}", part, "weight")))


# ---- one array, many entries --------------------------------------------------------------------


def split(entry: Entry, name: str) -> Iterator[Entry]:
    """An entry for each expert; the array is read once where they are read in order.

    Parameters
    ----------
    entry
        Of an array [E, N, K].
    name
        Of the matrices, with {} for the number.

    Raises
    ------
    ValueError
        For an array that is none of matrices, or whose matrices share a part of it.
    """
    count = _count(entry)
    shared = _Shared(entry.read, count)
    before, _, after = name.rpartition("{}")
    for number in range(count):
        yield replace(
            entry,
            name=f"{before}{number}{after}",
            format=_of_one(entry.format),
            shape=entry.shape[1:],
            nbytes=entry.nbytes // count,
            read=shared.reader(number),
            rows=None,
        )


def _of_one(fmt: Any) -> Any:
    """The format of one matrix of several."""
    alone = isinstance(fmt, Format) and fmt.scale is not None and fmt.scale.per_matrix
    return get_format(fmt, per_matrix=False) if alone else fmt


def _of_all(fmt: Any) -> Any:
    """The format of several matrices of one: each keeps its global scale."""
    has_one = isinstance(fmt, Format) and fmt.scale is not None and fmt.scale.nested == "global"
    return get_format(fmt, per_matrix=True) if has_one else fmt


def _count(entry: Entry) -> int:
    fmt = entry.format
    if len(entry.shape) != 3 or not 0 < entry.shape[0] <= MANY or entry.axes is not None:
        raise ValueError(f"{quote(entry.name)} of shape {entry.shape} is no array of experts")
    is_apart = not isinstance(fmt, Format) or fmt.usual.is_plain
    if not is_apart or (isinstance(fmt, Format) and fmt.scale and fmt.scale.nested == "double"):
        raise ValueError(f"{quote(entry.name)}: experts share parts of {fmt}")
    return entry.shape[0]


class _Shared:
    """An array of which matrices are taken one by one: it is kept until the last one is."""

    def __init__(self, read: Callable[[], Any], count: int) -> None:
        self._read, self._count = read, count
        self._array: Any = None

    def reader(self, number: int) -> Callable[[], Any]:
        return lambda: self._taken(number)

    def _taken(self, number: int) -> Any:
        array = self._array if self._array is not None else self._read()
        self._array = array if number + 1 < self._count else None
        if isinstance(array, RawBlocks):
            return RawBlocks(array.type, array.shape[1:], array.blocks[number])
        taken = array[number]
        return taken if isinstance(taken, QuantArray) else np.array(taken)


# ---- many entries, one array --------------------------------------------------------------------


def joined(
    entries: Iterable[tuple[str, Entry]], place: Callable[[str], tuple[str, int] | None]
) -> dict[str, Entry]:
    """Entries by name, where those of experts are one array.

    Parameters
    ----------
    entries
        By the names that they have.
    place
        The name of the array that holds one of such a name, and which of it that is; None for
        entries that stay as they are.

    Raises
    ------
    ValueError
        For experts that are missing, differ, or share scales.
    """
    found: dict[str, Entry] = {}
    parts: dict[str, dict[int, Entry]] = {}
    for name, entry in entries:
        where = place(name)
        new = name if where is None else where[0]
        if where is None:
            if new in found:
                raise ValueError(f"two arrays are {quote(new)}")
            found[new] = entry
            continue
        if new not in parts:
            if new in found:
                raise ValueError(f"two arrays are {quote(new)}")
            found[new] = entry  # its place
        if where[1] in parts.setdefault(new, {}):
            raise ValueError(f"two arrays are expert {where[1]} of {quote(new)}")
        parts[new][where[1]] = entry
    return found | {name: _stacked(name, given) for name, given in parts.items()}


def _stacked(name: str, given: Mapping[int, Entry]) -> Entry:
    if sorted(given) != list(range(len(given))) or len(given) > MANY:
        raise ValueError(f"{quote(name)} has the experts {sorted(given)[:10]}, and not all")
    entries = [given[i] for i in range(len(given))]
    first = entries[0]
    for entry in entries:
        if entry.error is not None:
            return replace(entry, name=name)
        if (entry.format, entry.shape, entry.dtype, entry.axes) != (
            first.format, first.shape, first.dtype, first.axes,
        ):  # fmt: skip
            raise ValueError(
                f"experts are one array: {quote(first.name)} is {first.format or first.dtype}"
                f"{first.shape}, and {quote(entry.name)} {entry.format or entry.dtype}{entry.shape}"
            )
    if isinstance(fmt := first.format, Format):
        _refuse_shared(first, fmt)

    def read() -> Any:
        return _together([entry.read() for entry in entries])

    return replace(
        first,
        name=name,
        format=_of_all(first.format),
        shape=(len(entries), *first.shape),
        nbytes=sum(entry.nbytes for entry in entries),
        tensors=tuple(tensor for entry in entries for tensor in entry.tensors),
        read=read,
        rows=None,
    )


def _refuse_shared(entry: Entry, fmt: Format) -> None:
    """ValueError where experts cannot lie in one array: a block of several rows, or one scale."""
    scale = fmt.scale
    is_shared = scale is not None and (
        isinstance(scale.block, tuple)
        or scale.block == "tensor"
        or scale.nested == "double"
        or (scale.nested is not None and len(entry.shape) != 2)
    )
    if is_shared or entry.axes or not fmt.usual.is_plain:
        raise ValueError(f"{quote(entry.name)}: parts of {fmt} cannot lie in one array")


def _together(arrays: Sequence[Any]) -> Any:
    """One array of experts of matrices of one format and shape."""
    first = arrays[0]
    if isinstance(first, RawBlocks):
        blocks = np.stack([array.blocks for array in arrays])
        return RawBlocks(first.type, (len(arrays), *first.shape), blocks)
    if not isinstance(first, QuantArray):
        return np.stack(arrays)
    shape = (len(arrays), *first.shape)
    parts = {}
    fmt = _of_all(first.format)
    for part in fmt.components(shape):
        stacked = np.stack([array.arrays()[part.name] for array in arrays])
        if stacked.size != math.prod(part.shape):
            raise ValueError(f"experts of {first.format} share their {part.name}")
        parts[part.name] = stacked.reshape(part.shape)
    return QuantArray(fmt, shape, first.dtype, parts, tuple(range(len(shape))))
