"""GgufReader: tensors of an untrusted file, whole or split, read where they lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuquant.errors import FormatError
from cuquant.io.container.closing import Closing
from cuquant.io.container.gguf import endian, splits
from cuquant.io.container.gguf.header import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    Header,
    read_header,
)
from cuquant.io.container.gguf.layout import alignment_of, place_part
from cuquant.io.container.gguf.types import TYPES, GgufTensor
from cuquant.io.container.gguf.values import Value
from cuquant.io.container.messages import known, quote
from cuquant.io.container.positions import PositionedFile
from cuquant.reference.memory import empty

CHUNK_BYTES = 1 << 23  # that `chunks` holds at once


@dataclass(frozen=True)
class _Part:
    """One file of a split one, or the only one."""

    file: PositionedFile
    header: Header


class GgufReader(Closing):
    """Read a GGUF file that nobody vouches for, of version 2 or 3 and of either byte order.

    The headers of all parts are checked completely before any data is touched. Memory is bounded by
    the headers that are really in the files and by what is read; a length that a file states is
    compared with the file first. Nothing is mapped: a file that another process cuts short is an
    error, not a signal. Threads may read at the same time.

    What is read is as in a little-endian file. In a big-endian one, whether the scales in blocks
    are turned is told by their values: see `cuquant.io.container.gguf.endian`.

    Parameters
    ----------
    path : str or os.PathLike
        A file, or any part of a split one; the others are looked for beside it.
    max_header_bytes : int
        Longer headers are refused.
    max_tensors : int
        Files with more tensors are refused.

    Attributes
    ----------
    metadata : dict of str to bool, str, NumPy number or array, Strings or tuple
        In file order; of the first part. What says that a file is split is left out.
    tensors : dict of str to GgufTensor
        In the order of the data.
    alignment : int
        Bytes.
    version : int
    byte_order : str
        ``"little"`` or ``"big"``.
    parts : list of pathlib.Path

    Raises
    ------
    FormatError
        If a file is malformed, truncated, over a limit, not a regular file, or a part is missing.
    OSError
        As the system gives it: FileNotFoundError, PermissionError, IsADirectoryError.

    Examples
    --------
    >>> import tempfile
    >>> from cuquant.io.container.gguf import GgufWriter
    >>> path = Path(tempfile.mkdtemp()) / "model.gguf"
    >>> with GgufWriter(path, {"w": ("F32", (2,))}, {"general.name": "tiny"}) as writer:
    ...     writer.write("w", np.ones(2, np.float32))
    >>> with GgufReader(path) as reader:
    ...     reader.metadata["general.name"], reader.read("w")
    ('tiny', array([1., 1.], dtype=float32))
    """

    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_header_bytes: int = MAX_HEADER_BYTES,
        max_tensors: int = MAX_TENSORS,
    ) -> None:
        self.path = Path(path)
        self._limits = max_header_bytes, max_tensors
        self._parts: list[_Part] = []
        self._opened: list[PositionedFile] = []
        self._turned: endian.Turned | None = None
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files; what was read stays."""
        for file in self._opened:
            file.close()
        self._opened, self._parts = [], []

    def read(self, name: str) -> np.ndarray:
        """Return one tensor as an array.

        Parameters
        ----------
        name : str

        Returns
        -------
        numpy.ndarray
            A fresh array of ``tensors[name].stored_shape`` and ``tensors[name].dtype`` that starts
            on 256 bytes: numbers of plain types, uint8 [..., bytes of a row] of blocks.

        Raises
        ------
        KeyError
            If the file has no such tensor.
        FormatError
            If the file was cut short, or the tensor's type is not known.
        ValueError
            If the reader is closed.
        """
        stored = self.raw(name)
        info = self.tensors[name]
        return stored.view(info.dtype).reshape(info.stored_shape)

    def raw(self, name: str) -> np.ndarray:
        """Return the bytes of one tensor, uint8 [nbytes], as a little-endian file has them.

        Raises
        ------
        KeyError, FormatError, ValueError
            As `read`.
        """
        stored = empty((self._info(name).nbytes,), np.dtype(np.uint8))
        self.read_into(name, stored)
        return stored

    def read_into(self, name: str, stored: np.ndarray, start: int = 0) -> None:
        """Fill an array with the bytes of one tensor, from its byte `start` on.

        Parameters
        ----------
        name : str
        stored : numpy.ndarray
            uint8 [at most nbytes - start], contiguous: whole blocks.
        start : int
            A multiple of the type's ``nbytes``.

        Raises
        ------
        KeyError, FormatError
            As `read`.
        ValueError
            If the reader is closed, or parts of a block are asked for.
        """
        info = self._info(name)
        if start % info.type.nbytes or stored.nbytes % info.type.nbytes:
            raise ValueError(
                f"{stored.nbytes} bytes from byte {start} on are not whole blocks; those of "
                f"{info.type.name} have {info.type.nbytes} bytes"
            )
        part = self._parts[info.part]
        part.file.read_into(info.offset + start, stored.data, f"tensor {quote(name)}")
        if part.header.order == ">":
            endian.turn(stored, info.type, self._how_turned())

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """Yield the bytes of one tensor, at most 8 MiB at once, each over the one before.

        Examples
        --------
        ``writer.write_raw(name, reader.chunks(name))`` copies a tensor into another file.
        """
        info = self._info(name)
        step = max(CHUNK_BYTES // info.type.nbytes, 1) * info.type.nbytes
        chunk = np.empty(min(info.nbytes, step), np.uint8)
        for start in range(0, info.nbytes, step):
            part = chunk[: info.nbytes - start]
            self.read_into(name, part, start)
            yield part

    def _info(self, name: str) -> GgufTensor:
        if not self._parts:
            raise ValueError(f"{self.path}: the reader is closed; read inside its with block")
        if name not in self.tensors:
            raise KeyError(f"{self.path} has no tensor {quote(name)}; {known(self.tensors)}")
        info = self.tensors[name]
        if not info.type.is_known:
            raise FormatError(
                f"{self.path}: tensor {quote(name)} is of {info.type.name}, which is not known; "
                f"known are those of the ids {', '.join(map(str, TYPES))}"
            )
        return info

    def _open_all(self) -> None:
        """Open the file and its other parts, and check that they belong together."""
        given = self._open(self.path)
        with _faults_of(self.path):
            self.parts = splits.parts_beside(self.path, given.header.metadata)
        for number, path in enumerate(self.parts):
            part = given if path == self.path else self._open(path)
            self._parts.append(part)
            if len(self.parts) > 1:
                with _faults_of(path):
                    splits.check_part(part.header.metadata, number, len(self.parts))
        first = self._parts[0].header
        self.version = first.version
        self.byte_order = "little" if first.order == "<" else "big"
        with _faults_of(self.parts[0]):
            self.alignment = alignment_of(first.metadata)
            self._place_all()
            splits.check_total(first.metadata, len(self.tensors))
        self.metadata = {k: v for k, v in first.metadata.items() if k not in splits.KEYS}

    def _open(self, path: Path) -> _Part:
        file = PositionedFile(path)
        self._opened.append(file)
        with _faults_of(path):
            return _Part(file, read_header(file, *self._limits))

    def _place_all(self) -> None:
        self.tensors = {}
        for number, part in enumerate(self._parts):
            with _faults_of(part.file.path):
                for info in place_part(part.header, self.alignment, part.file.size, number):
                    if info.name in self.tensors:
                        raise ValueError(f"has tensor {quote(info.name)} twice; it is corrupt")
                    self.tensors[info.name] = info
                if len(self.tensors) > (most := self._limits[1]):
                    raise ValueError(f"has, with its other parts, more than {most} tensors")

    def _how_turned(self) -> endian.Turned:
        """Looked at once, when the first tensor is read; threads that meet here agree."""
        if self._turned is None:
            told = [
                info
                for info in self.tensors.values()
                if endian.is_told_by_samples(info.type)
                and self._parts[info.part].header.order == ">"
            ]
            self._turned = endian.turned(
                [(info.type, self._sample(info)) for info in told[: endian.SAMPLE_TENSORS]]
            )
        return self._turned

    def _sample(self, info: GgufTensor) -> np.ndarray:
        """The first blocks of a tensor as they are stored."""
        stored = np.empty(min(info.nbytes, endian.SAMPLE_BLOCKS * info.type.nbytes), np.uint8)
        file = self._parts[info.part].file
        file.read_into(info.offset, stored.data, f"tensor {quote(info.name)}")
        return stored


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Turn a ValueError inside into a FormatError that names the file."""
    try:
        yield
    except FormatError:
        raise  # it names the file already
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from error
