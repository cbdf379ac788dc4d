"""Metadata values: what NumPy and Python have for GGUF's 13 value types, and the bytes of each.

Every value tells its type, so that what was read is written with the same bytes: numbers are NumPy
scalars and arrays, truths are bool, text is str. Text that is not UTF-8 holds its odd bytes as
surrogates (PEP 383), as file names do: ``text.encode("utf-8", "surrogateescape")`` gives them back.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np

from cuquant.io.container.gguf.cursor import Cursor
from cuquant.io.container.messages import quote

BOOL, STRING, ARRAY = 7, 8, 9

NUMBERS = {
    0: np.dtype(np.uint8),
    1: np.dtype(np.int8),
    2: np.dtype(np.uint16),
    3: np.dtype(np.int16),
    4: np.dtype(np.uint32),
    5: np.dtype(np.int32),
    6: np.dtype(np.float32),
    BOOL: np.dtype(np.bool_),
    10: np.dtype(np.uint64),
    11: np.dtype(np.int64),
    12: np.dtype(np.float64),
}
_TYPE_OF = {dtype: number for number, dtype in NUMBERS.items()}

MAX_DEPTH = 8  # of arrays in arrays; no model has any


class Strings(Sequence[str]):
    """An array of strings of a header, decoded one by one as they are asked for.

    A vocabulary has 250,000: this keeps their bytes and eight more each.

    Examples
    --------
    >>> strings = Strings(bytearray(b"\\1" + bytes(7) + b"a" + bytes(8)), np.array([0, 9, 17]))
    >>> list(strings), strings[0]
    (['a', ''], 'a')
    """

    def __init__(self, stored: bytearray, starts: np.ndarray) -> None:
        self._stored = stored  # each string after its length of 8 bytes
        self._starts = starts  # int64 [count + 1]

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[operator.index(index)]  # IndexError, and negative ones
        return decoded(self._stored[int(self._starts[at]) + 8 : int(self._starts[at + 1])])

    def __iter__(self) -> Iterator[str]:
        starts = self._starts.tolist()
        for start, end in pairwise(starts):
            yield decoded(self._stored[start + 8 : end])

    def __repr__(self) -> str:
        return f"Strings({quote(self[:3])}, {len(self)} in all)"


Value = bool | str | np.generic | np.ndarray | Strings | tuple[Any, ...]
"""A metadata value as it is read. A tuple is an array of arrays."""


def decoded(stored: bytes | bytearray) -> str:
    """Text of any bytes."""
    return stored.decode("utf-8", "surrogateescape")


# ---- reading ------------------------------------------------------------------------------------


def read_value(cursor: Cursor) -> Value:
    """A value after its type; ValueError says what is wrong with it."""
    kind = cursor.number("I")
    if kind == STRING:
        return decoded(cursor.string())
    if kind == ARRAY:
        return _read_array(cursor, 1)
    if kind not in NUMBERS:
        raise ValueError(f"its value has the type {kind}; the types end at 12, the file is corrupt")
    value = _read_numbers(cursor, kind, 1)[0]
    return bool(value) if kind == BOOL else value


def _read_numbers(cursor: Cursor, kind: int, count: int) -> np.ndarray:
    if kind != BOOL:
        return cursor.numbers(NUMBERS[kind], count)
    stored = cursor.numbers(NUMBERS[0], count)
    if count and stored.max() > 1:
        raise ValueError(f"a truth is stored as {stored.max()}; 0 or 1 is wanted")
    return stored.view(np.bool_)


def _read_array(cursor: Cursor, depth: int) -> np.ndarray | Strings | tuple:
    """An array after its type; `depth` arrays deep, itself included."""
    kind, count = cursor.number("I"), cursor.number("Q")
    if kind in NUMBERS:
        return _read_numbers(cursor, kind, count)
    if kind == STRING:
        return Strings(*cursor.strings(count))
    if kind != ARRAY:
        raise ValueError(f"its array has the type {kind}; the types end at 12, the file is corrupt")
    if depth == MAX_DEPTH:
        raise ValueError(f"its arrays nest too deep, more than {MAX_DEPTH} levels")
    cursor.spend("nested arrays", count)
    return tuple(_read_array(cursor, depth + 1) for _ in range(count))


# ---- writing ------------------------------------------------------------------------------------


def string_bytes(text: str) -> bytes:
    """A string as it is stored, after its length."""
    try:
        stored = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ValueError(f"{quote(text)} is not valid Unicode") from None
    return struct.pack("<Q", len(stored)) + stored


def value_bytes(value: Any) -> bytes:
    """A value as it is stored, after its type.

    Raises
    ------
    TypeError
        For what does not tell its type, or has none in GGUF.
    ValueError
        For what has a type and cannot be stored.

    Examples
    --------
    >>> value_bytes(np.uint16(7)).hex()
    '020000000700'
    """
    kind, stored = _encoded(value, 0)
    return struct.pack("<I", kind) + stored


def _encoded(value: Any, depth: int) -> tuple[int, bytes]:
    """The number of the type, and the bytes."""
    if isinstance(value, str):
        return STRING, string_bytes(value)
    if isinstance(value, bool):
        return BOOL, bytes([value])
    if isinstance(value, (list, tuple, Strings)) or (isinstance(value, np.ndarray) and value.ndim):
        return ARRAY, _array_bytes(value, depth + 1)
    if isinstance(value, (np.generic, np.ndarray)):
        return _number_bytes(np.asarray(value))
    if isinstance(value, (int, float)):
        wanted = "np.uint32 or np.int32" if isinstance(value, int) else "np.float32"
        raise TypeError(
            f"{type(value).__name__} {quote(value)} does not tell its width; give a NumPy number, "
            f"such as {wanted}"
        )
    raise TypeError(
        f"{quote(value)} is a {type(value).__name__}; give str, bool, a NumPy number, an array or "
        "a list"
    )


def _number_bytes(array: np.ndarray) -> tuple[int, bytes]:
    dtype = array.dtype.newbyteorder("=")
    if dtype not in _TYPE_OF:
        raise TypeError(f"GGUF has no {dtype}; give one of {', '.join(map(str, _TYPE_OF))}")
    return _TYPE_OF[dtype], array.astype(dtype.newbyteorder("<"), copy=False).tobytes()


def _array_bytes(value: Any, depth: int) -> bytes:
    """An array's type, length and elements."""
    if depth > MAX_DEPTH:
        raise ValueError(f"arrays nest too deep, more than {MAX_DEPTH} levels")
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise ValueError(f"an array has the shape {value.shape}; one axis is wanted")
        kind, stored = _number_bytes(value)
        return struct.pack("<IQ", kind, len(value)) + stored
    if isinstance(value, list) and not value:
        raise TypeError("an empty list tells no type; give np.empty(0, dtype) or leave it out")
    encoded = [_encoded(element, depth) for element in value]
    kinds = {kind for kind, _ in encoded} or {STRING if isinstance(value, Strings) else ARRAY}
    if len(kinds) > 1 or (isinstance(value, tuple) and kinds != {ARRAY}):
        raise TypeError(
            f"{quote(value)} mixes types; a list has elements of one type, a tuple holds arrays"
        )
    return struct.pack("<IQ", *kinds, len(value)) + b"".join(stored for _, stored in encoded)
