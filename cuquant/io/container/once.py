"""Writers of tensors whose layout is known first: each is written once, and none is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

import numpy as np

from cuquant.disk import write_all
from cuquant.io.container.messages import known, quote


class Placed(Protocol):
    """A tensor in a file: its name, and where its bytes lie."""

    @property
    def name(self) -> str: ...

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=Placed)


class Once(Generic[P]):
    """Base of writers, which say what file a tensor lies in.

    Attributes
    ----------
    path
        Of the file, or the first of several.
    tensors
        What is written, by name; known before anything is.
    """

    path: Path
    tensors: dict[str, P]
    _pending: set[str] | None = None  # names that are left to be written; None: it is not open

    def write_raw(
        self, name: str, data: bytes | bytearray | memoryview | np.ndarray | Iterator[np.ndarray]
    ) -> None:
        """Store the bytes of one tensor as they are.

        Parameters
        ----------
        name : str
        data : bytes-like, or an iterator of uint8 arrays
            ``tensors[name].nbytes`` contiguous bytes, little-endian; sub-byte dtypes packed.

        Raises
        ------
        ValueError
            If name or length are not those of `specs`, or the tensor is written already.
        OSError
            As the system gives it, such as a full disk.

        Examples
        --------
        ``writer.write_raw(name, reader.chunks(name))`` copies a tensor from another file.
        """
        info = self._pending_info(name)
        if isinstance(data, Iterator):
            self._store(info, data)
            return
        stored = np.frombuffer(data, np.uint8)
        if stored.size != info.nbytes:
            raise ValueError(
                f"tensor {quote(name)} came as {stored.size} bytes and takes {info.nbytes}: give "
                "the stored (packed) bytes"
            )
        self._store(info, [stored])

    def _place(self, info: P) -> tuple[BinaryIO, Path]:
        """The open file that a tensor lies in, and the name that the caller knows it by."""
        raise NotImplementedError

    def _pending_info(self, name: str) -> P:
        if self._pending is None:
            raise ValueError(f"{self.path}: the writer is not open; write inside its with block")
        if name not in self.tensors:
            raise ValueError(f"specs has no tensor {quote(name)}; {known(self.tensors)}")
        if name not in self._pending:
            raise ValueError(f"tensor {quote(name)} is written already; write each one once")
        return self.tensors[name]

    def _store(self, info: P, chunks: Iterable[np.ndarray]) -> None:
        file, path = self._place(info)
        file.seek(info.offset)
        left = info.nbytes
        for chunk in chunks:
            left -= chunk.nbytes
            if left < 0:
                break
            try:
                write_all(file, chunk.data)
            except OSError as problem:
                problem.filename = str(path)  # a full disk has no name by itself
                raise
        if left:
            raise ValueError(
                f"tensor {quote(info.name)} takes {info.nbytes} bytes, and its chunks hold "
                f"{'more' if left < 0 else info.nbytes - left}; give the stored (packed) bytes"
            )
        assert self._pending is not None  # _pending_info has looked
        self._pending.remove(info.name)

    def _refuse_missing(self) -> None:
        if self._pending:
            missing = [name for name in self.tensors if name in self._pending]
            raise ValueError(
                f"{self.path}: {len(missing)} of {len(self.tensors)} tensors were "
                f"not written, no file was made; write {quote(missing)}"
            )
