"""compare: how far the arrays of two files or folders are from each other, one pair at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant.array.components import Stored
from cuquant.array.metrics import error
from cuquant.array.packed_weight import PackedWeight, unpack
from cuquant.array.quant_array import QuantArray
from cuquant.array.raw_blocks import RawBlocks
from cuquant.interop import as_array, dtype_of
from cuquant.io.architectures.names import of_gguf
from cuquant.io.entries import Entry
from cuquant.io.files import GGUF, open
from cuquant.io.renaming import in_hf, tells_heads

Source = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """How far array b is from array a of the same name.

    Attributes
    ----------
    name, shape
        Of both.
    sqnr_db
        10 log10(sum a^2 / sum (a - b)^2), dB; inf where they are equal, NaN where one has a NaN.
    max_error
        max |a - b|.
    cosine
        Of a and b as flat vectors.
    format_a, format_b
        Formats, or dtypes of plain arrays.
    bits_a, bits_b
        Stored bits an element.
    """

    name: str
    shape: tuple[int, ...]
    sqnr_db: float
    max_error: float
    cosine: float
    format_a: str
    format_b: str
    bits_a: float
    bits_b: float


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes
    ----------
    arrays
        Of both sides, the worst first.
    only_a, only_b
        Names of arrays that one side has.
    left_out
        Names of arrays that cannot be compared, and why.
    """

    arrays: tuple[Difference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    left_out: Mapping[str, str]

    @property
    def is_equal(self) -> bool:
        """Whether both sides have the same arrays, with the same numbers."""
        same = all(found.max_error == 0 for found in self.arrays)
        return same and not (self.only_a or self.only_b or self.left_out)

    def __str__(self) -> str:
        lines = [
            f"{found.name}: {found.sqnr_db:.2f} dB, max error {found.max_error:.3g}, cosine "
            f"{found.cosine:.6f}, {found.bits_a:.4g} and {found.bits_b:.4g} bits"
            for found in self.arrays
        ]
        for side, names in (("a", self.only_a), ("b", self.only_b)):
            lines += [f"{name}: only in {side}" for name in names]
        return "\n".join([*lines, *(f"{name}: {why}" for name, why in self.left_out.items())])


def compare(a: Source, b: Source) -> Comparison:
    """Compare the arrays of two files, folders or dicts by name; the worst comes first.

    Two arrays are in memory at a time. Where one side is a GGUF file of a known architecture and
    the other is not, names and rows of the GGUF file are those of transformers, unless the other
    side has more of its own names.

    Parameters
    ----------
    a, b
        What `open` reads, or arrays by name; a holds the true values.

    Raises
    ------
    FormatError
        For a damaged file, or a kind that is not read.
    TypeError
        For what is neither a path nor a dict.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> w = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    >>> found = cq.compare({"w": w, "b": w}, {"w": cq.quantize(w, "q8_0")})
    >>> found.arrays[0].name, round(found.arrays[0].sqnr_db), found.only_a
    ('w', 57, ('b',))
    """
    with Comparing(a, b) as work:
        for _ in work.run():
            pass
        return work.result()


class Comparing:
    """A comparison that goes on pair by pair; arguments as `compare`'s.

    Attributes
    ----------
    pairs
        Name and stored bytes of the arrays that are compared, in the order of the work.
    """

    def __init__(self, a: Source, b: Source) -> None:
        self._stack = ExitStack()
        try:
            self._a, self._b = self._both(a, b)
        except BaseException:
            self._stack.close()
            raise
        self._found: list[Difference] = []
        self._left_out: dict[str, str] = {}
        common = [name for name in self._a if name in self._b]
        self.pairs = [(name, self._a[name].nbytes + self._b[name].nbytes) for name in common]

    def __enter__(self) -> Comparing:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _both(self, a: Source, b: Source) -> list[Mapping[str, Entry]]:
        given = []
        for side in (a, b):
            if isinstance(side, Mapping):
                given.append({name: _in_memory(name, value) for name, value in side.items()})
            elif isinstance(side, (str, os.PathLike)):
                given.append(self._stack.enter_context(open(side)))
            else:
                raise TypeError(f"compare takes paths or dicts, got {type(side).__name__}")
        kinds = [getattr(side, "kind", None) == GGUF for side in given]
        if kinds[0] == kinds[1]:
            return given
        at = kinds.index(True)
        one, other = given[at], given[1 - at]
        if len(one.keys() & other.keys()) < len(_hf_names(one) & other.keys()):
            given[at] = in_hf(one)
        return given

    def run(self) -> Iterator[int]:
        """Compare; yields the stored bytes of each pair when it is done."""
        for name, nbytes in self.pairs:
            a, b = self._a[name], self._b[name]
            why = _why_not(a, b)
            if why:
                self._left_out[name] = why
            else:
                self._found.append(_difference(a, b))
            yield nbytes

    def result(self) -> Comparison:
        """What was found."""
        return Comparison(
            tuple(sorted(self._found, key=_badness)),
            tuple(name for name in self._a if name not in self._b),
            tuple(name for name in self._b if name not in self._a),
            self._left_out,
        )


def _hf_names(side: Any) -> set[str]:
    """Names that the arrays of a GGUF file have in transformers, in part or whole."""
    found = of_gguf(side.metadata)
    return set() if found is None or not tells_heads(side, found) else set(in_hf(side))


def _badness(found: Difference) -> tuple[float, str]:
    return (-math.inf if math.isnan(found.sqnr_db) else found.sqnr_db, found.name)


def _in_memory(name: str, value: Any) -> Entry:
    read: Callable[[], Any] = lambda: value  # noqa: E731
    if isinstance(value, Stored):
        fmt: Any = value.format
        return Entry(name, fmt, value.shape, value.dtype, value.nbytes, (), (), read)
    if isinstance(value, RawBlocks):
        dtype = np.dtype(np.float32)
        return Entry(name, value.type, value.shape, dtype, value.nbytes, (), (), read)
    array = as_array(value, name)
    shape, dtype = tuple(array.shape), dtype_of(array)
    return Entry(name, None, shape, dtype, math.prod(shape) * dtype.itemsize, (), (), lambda: array)


def _why_not(a: Entry, b: Entry) -> str:
    """Why two arrays cannot be compared; "" where they can."""
    for entry in (a, b):
        if entry.error is not None:
            return str(entry.error)
        if isinstance(entry.format, str):
            return f"{entry.format} is not decoded yet"
        if entry.format is None and entry.dtype.kind not in "fiubV":
            return f"{entry.dtype} values"
    return "" if a.shape == b.shape else f"shapes {a.shape} and {b.shape}"


def _difference(a: Entry, b: Entry) -> Difference:
    true = a.read()
    if isinstance(true, PackedWeight):
        true = unpack(true)
    if isinstance(true, QuantArray):
        true = true.dequantize(dtype=np.float32)
    found = error(true, b.read())
    formats = [str(entry.format or entry.dtype) for entry in (a, b)]
    bits = [entry.nbytes * 8 / max(math.prod(entry.shape), 1) for entry in (a, b)]
    return Difference(a.name, a.shape, *found, formats[0], formats[1], bits[0], bits[1])
