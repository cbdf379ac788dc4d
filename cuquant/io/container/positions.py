"""A file that threads read at positions of their own, without a mapping and within its bounds."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from cuquant.disk import open_regular
from cuquant.errors import FormatError


class PositionedFile:
    """A regular file that stays open for reads at given positions, from any thread.

    Nothing is mapped: a file that another process cuts short is an error, not a signal.

    Parameters
    ----------
    path
        A FIFO, a device or a socket is refused.

    Attributes
    ----------
    file
        The open file, whose own position nobody relies on.
    size
        Bytes, as it was opened.

    Raises
    ------
    FormatError
        If it is not a regular file.
    OSError
        As the system gives it.

    Examples
    --------
    >>> file, head = PositionedFile(__file__), bytearray(3)
    >>> file.read_into(0, memoryview(head), "the head")
    >>> file.close(), bytes(head)
    (None, b'\"\"\"')
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seeking = threading.Lock()  # where the system reads at no position of its own
        try:
            self.file = open_regular(path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise FormatError(f"{path}: {error.strerror}") from error
        self.size = os.fstat(self.file.fileno()).st_size

    def read_into(self, position: int, into: memoryview, what: str) -> None:
        """Fill `into` with the bytes from `position` on; FormatError where the file ends before."""
        while into:
            try:
                count = self._read_at(position, into)
            except OSError as error:
                error.filename = str(self.path)  # a bad disk has no name by itself
                raise
            if not count:
                raise FormatError(
                    f"{self.path}: ended at {what}: it was cut short while it was read; "
                    "fetch it again"
                )
            position, into = position + count, into[count:]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self.file.close()

    def _read_at(self, position: int, into: memoryview) -> int:
        """Read some bytes from `position` on; 0 at the end of the file."""
        if hasattr(os, "preadv"):
            return os.preadv(self.file.fileno(), [into], position)
        with self._seeking:  # Windows
            self.file.seek(position)
            return self.file.readinto(into)  # type: ignore[attr-defined]
