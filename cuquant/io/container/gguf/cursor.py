"""Cursor: a header of unknown length, read forwards as far as it really goes."""

from __future__ import annotations

import struct
from array import array
from typing import Literal

import numpy as np

from cuquant.io.container.positions import PositionedFile

FIRST_BYTES = 1 << 16  # read at first; then as much again as there is

# What takes time one by one, in a whole header. The largest vocabularies have 10^6 strings with
# their merges, and no model has arrays in arrays.
MOST = {"strings": 2_000_000, "nested arrays": 100_000}


class Cursor:
    """The bytes of a header, one field after the other.

    A length that the file states is compared with the file and the limit before anything is read
    or allocated for it.

    Parameters
    ----------
    file
        Read from its start on.
    limit
        Bytes; a longer header is refused.

    Attributes
    ----------
    at
        The byte of the file that comes next.
    order
        ``"<"`` or ``">"``.

    Raises
    ------
    ValueError
        From every method, where the file or the limit ends before the field.
    """

    def __init__(self, file: PositionedFile, limit: int) -> None:
        self._file, self._limit = file, limit
        self._data = bytearray()
        self.at = 0
        self.order: Literal["<", ">"] = "<"
        self._left = dict(MOST)

    def number(self, code: str) -> int:
        """An integer, by its letter in `struct`."""
        return self.fields(code)[0]

    def fields(self, codes: str) -> tuple[int, ...]:
        """Integers, by their letters in `struct`; there is no padding."""
        codes = self.order + codes
        self._need(end := self.at + struct.calcsize(codes))
        found = struct.unpack_from(codes, self._data, self.at)
        self.at = end
        return found

    def take(self, size: int) -> bytearray:
        """The next `size` bytes, as a copy."""
        self._need(self.at + size)
        start, self.at = self.at, self.at + size
        return self._data[start : self.at]

    def string(self) -> bytearray:
        """A string, without its length."""
        return self.take(self.number("Q"))

    def numbers(self, dtype: np.dtype, count: int) -> np.ndarray:
        """An array [count] in the machine's order."""
        stored = self.take(count * dtype.itemsize)
        return np.frombuffer(stored, dtype.newbyteorder(self.order)).astype(dtype, copy=False)

    def spend(self, what: str, count: int) -> None:
        """Refuse more of what takes time than any model has; `what` is a key of MOST."""
        self._left[what] -= count
        if self._left[what] < 0:
            raise ValueError(f"the header has more than {MOST[what]} {what}, which no model has")

    def strings(self, count: int) -> tuple[bytearray, np.ndarray]:
        """The bytes of `count` strings with their lengths, and where each starts in them.

        Starts are int64 [count + 1]; the last one is the end.
        """
        self._need_room(count * 8)
        self.spend("strings", count)
        starts, unpack = array("q", [0]), struct.Struct(self.order + "Q").unpack_from
        data, at, loaded = self._data, self.at, len(self._data)
        for _ in range(count):  # the only way: each length says where the next one is
            if at + 8 > loaded:
                self._need(at + 8)
                loaded = len(data)
            at += 8 + unpack(data, at)[0]
            if at > loaded:
                self._need_room(at - self.at)
            starts.append(at - self.at)
        stored = self.take(at - self.at)
        return stored, np.frombuffer(starts, np.int64)

    def _need_room(self, size: int) -> None:
        """Refuse what cannot end within the file and the limit; nothing is read."""
        end = self.at + size
        if end > self._file.size:
            raise ValueError(
                f"it is said to reach byte {end}, and the file is {self._file.size} bytes long; "
                "it is truncated or corrupt"
            )
        if end > self._limit:
            raise ValueError(
                f"the header is longer than {self._limit} bytes; pass max_header_bytes= if you "
                "trust the file"
            )

    def _need(self, end: int) -> None:
        """Have the bytes before `end` in memory."""
        loaded = len(self._data)
        if end <= loaded:
            return
        self._need_room(end - self.at)
        wanted = min(max(end, 2 * loaded, FIRST_BYTES), self._file.size, self._limit)
        more = bytearray(wanted - loaded)
        self._file.read_into(loaded, memoryview(more), "its header")
        self._data += more
