"""SafetensorsReader: tensors of an untrusted file, read where they lie."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cuquant.errors import FormatError
from cuquant.io.container.closing import Closing
from cuquant.io.container.messages import known, quote
from cuquant.io.container.positions import PositionedFile
from cuquant.io.container.safetensors.header import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    check_coverage,
    parse_header,
    read_header,
)
from cuquant.io.container.safetensors.kinds import folder_advice, other_kind
from cuquant.io.container.safetensors.tensors import (
    SUB_BYTE_BITS,
    TensorInfo,
    unpack,
)
from cuquant.reference.memory import empty

CHUNK_BYTES = 1 << 23  # that `chunks` holds at once


class SafetensorsReader(Closing):
    """Read a safetensors file that nobody vouches for.

    The header is checked completely before any data is touched: every byte of the data section
    belongs to exactly one tensor. Memory is bounded by the header that is really in the file (a
    hostile one costs up to about 25 times its size while it is parsed) and by what is read.
    Nothing is mapped: a file that another process cuts short is an error, not a signal. Threads
    may read at the same time.

    Parameters
    ----------
    path : str or os.PathLike
    max_header_bytes : int
        Longer headers are refused.
    max_tensors : int
        Files with more tensors are refused.

    Attributes
    ----------
    metadata : dict of str to str
    tensors : dict of str to TensorInfo
        In file (offset) order.

    Raises
    ------
    FormatError
        If the file is malformed, truncated, over a limit or not a regular file.
    OSError
        As the system gives it: FileNotFoundError, PermissionError, IsADirectoryError.

    Examples
    --------
    >>> import tempfile
    >>> from cuquant.io.container.safetensors import SafetensorsWriter
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> with SafetensorsWriter(path, {"w": ("F32", (2,))}) as writer:
    ...     writer.write("w", np.ones(2, np.float32))
    >>> with SafetensorsReader(path) as reader:
    ...     reader.read("w")
    array([1., 1.], dtype=float32)
    """

    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_header_bytes: int = MAX_HEADER_BYTES,
        max_tensors: int = MAX_TENSORS,
    ) -> None:
        self.path = Path(path)
        self._file: PositionedFile | None = None
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, folder_advice(self.path), str(self.path))
        self._file = PositionedFile(self.path)
        try:
            self._parse(self._file, max_header_bytes, max_tensors)
        except RecursionError:
            self.close()
            raise FormatError(
                f"{self.path}: the header nests too deep; a real one has 3 levels "
                "(do not use this file)"
            ) from None
        except ValueError as error:
            kind = other_kind(self._file.file, self.path)
            self.close()
            raise FormatError(f"{self.path}: {kind or error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; what was read stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self, name: str, *, copy: bool = True) -> np.ndarray:
        """Return one tensor as an array.

        Parameters
        ----------
        name : str
        copy : bool
            False: the array is read-only. Nothing is mapped, so it is in memory all the same.

        Returns
        -------
        numpy.ndarray
            A fresh array of ``tensors[name].shape`` and ``tensors[name].numpy_dtype`` that starts
            on 256 bytes.

        Raises
        ------
        KeyError
            If the file has no such tensor.
        FormatError
            If the file was cut short.
        ValueError
            If the reader is closed.
        """
        stored = self.raw(name)
        info = self.tensors[name]
        if info.dtype == "BOOL":  # to the official reader every byte but 0 is true
            np.minimum(stored, 1, out=stored)
        if info.dtype in SUB_BYTE_BITS:
            stored = unpack(stored, SUB_BYTE_BITS[info.dtype])
        array = stored.view(info.numpy_dtype).reshape(info.shape)
        array.flags.writeable = copy
        return array

    def raw(self, name: str) -> np.ndarray:
        """Return the stored bytes of one tensor.

        Parameters
        ----------
        name : str

        Returns
        -------
        numpy.ndarray
            uint8 [nbytes]; sub-byte dtypes stay packed.

        Raises
        ------
        KeyError, FormatError, ValueError
            As `read`.
        """
        stored = empty((self._info(name).nbytes,), np.dtype(np.uint8))
        self.read_into(name, stored)
        return stored

    def read_into(self, name: str, stored: np.ndarray, start: int = 0) -> None:
        """Fill an array with the stored bytes of one tensor, from its byte `start` on.

        Parameters
        ----------
        name : str
        stored : numpy.ndarray
            uint8 [at most nbytes - start], contiguous.

        Raises
        ------
        KeyError, FormatError, ValueError
            As `read`.
        """
        position = self._info(name).offset + start
        assert self._file is not None  # for the type checker: _info has looked
        self._file.read_into(position, stored.data, f"tensor {quote(name)}")

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """Yield the stored bytes of one tensor, at most 8 MiB at once, each over the one before.

        Examples
        --------
        ``writer.write_raw(name, reader.chunks(name))`` copies a tensor into another file.
        """
        left = self._info(name).nbytes
        chunk = np.empty(min(left, CHUNK_BYTES), np.uint8)
        for start in range(0, left, CHUNK_BYTES):
            part = chunk[: left - start]
            self.read_into(name, part, start)
            yield part

    def _info(self, name: str) -> TensorInfo:
        if self._file is None:
            raise ValueError(f"{self.path}: the reader is closed; read inside its with block")
        if name not in self.tensors:
            raise KeyError(f"{self.path} has no tensor {quote(name)}; {known(self.tensors)}")
        return self.tensors[name]

    def _parse(self, file: PositionedFile, max_header_bytes: int, max_tensors: int) -> None:
        header = read_header(file.file, file.size, max_header_bytes)
        data_start = 8 + len(header)
        self.metadata, infos = parse_header(header, data_start, max_tensors)
        infos.sort(key=lambda info: (info.offset, info.nbytes))
        check_coverage(infos, data_start, file.size)
        self.tensors = {info.name: info for info in infos}
