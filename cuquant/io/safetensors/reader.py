"""SafetensorsReader: tensors of an untrusted file, through a memory map."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from cuquant.errors import FormatError
from cuquant.io.safetensors.header import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    check_coverage,
    parse_header,
    read_header,
)
from cuquant.io.safetensors.tensors import (
    HIGHEST_BYTE,
    SUB_BYTE_BITS,
    TensorInfo,
    known,
    quote,
    unpack,
)


class SafetensorsReader:
    """Read a safetensors file that nobody vouches for.

    The header is checked completely before any data is touched: every byte of the data section
    belongs to exactly one tensor. Memory is bounded by the header that is really in the file (a
    hostile one costs up to about 25 times its size while it is parsed) and by what is read.
    The file must not shrink while it is open: data is read through a memory map.

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
    >>> from cuquant.io.safetensors import SafetensorsWriter
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
        self._mmap: mmap.mmap | None = None
        self._file_bytes: np.ndarray | None = None  # uint8 [file size]
        mode = self.path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(
                errno.EISDIR, "is a directory; give one .safetensors file in it", str(self.path)
            )
        if not stat.S_ISREG(mode):  # opening a FIFO would wait for ever
            raise FormatError(f"{self.path}: is not a regular file; copy it to disk first")
        try:
            self._open(max_header_bytes, max_tensors)
        except RecursionError:
            raise FormatError(
                f"{self.path}: the header nests too deep; a real one has 3 levels "
                "(do not use this file)"
            ) from None
        except ValueError as error:
            raise FormatError(f"{self.path}: {error}") from error

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the memory map; views that were handed out keep it alive until they go."""
        self._file_bytes = None
        if self._mmap is not None:
            with suppress(BufferError):  # a zero-copy view is still out
                self._mmap.close()
            self._mmap = None

    def read(self, name: str, *, copy: bool = True) -> np.ndarray:
        """Return one tensor as an array.

        Parameters
        ----------
        name : str
        copy : bool
            True: a fresh writable array. False: a read-only view of the file, which may start at
            any byte (``flags.aligned`` can be False); sub-byte dtypes are unpacked all the same.

        Returns
        -------
        numpy.ndarray
            Of ``tensors[name].shape`` and ``tensors[name].numpy_dtype``.

        Raises
        ------
        KeyError
            If the file has no such tensor.
        FormatError
            If a BOOL tensor holds a byte other than 0 and 1.
        ValueError
            If the reader is closed.
        """
        info, stored = self._stored(name)
        if info.dtype == "BOOL" and stored.max(initial=0) > HIGHEST_BYTE["BOOL"]:
            raise FormatError(
                f"{self.path}: BOOL tensor {quote(name)} holds the byte "
                f"{stored.max()}; only 0 and 1 are booleans, read it with raw()"
            )
        if info.dtype in SUB_BYTE_BITS:
            array = unpack(stored, SUB_BYTE_BITS[info.dtype])
            array = array.view(info.numpy_dtype).reshape(info.shape)
            array.flags.writeable = copy
            return array
        if not copy:
            return stored.view(info.numpy_dtype).reshape(info.shape)
        array = np.empty(info.shape, info.numpy_dtype)
        array.reshape(-1).view(np.uint8)[:] = stored  # as bytes: no NaN is changed on the way
        return array

    def raw(self, name: str) -> np.ndarray:
        """Return the stored bytes of one tensor, for a byte-for-byte copy.

        Parameters
        ----------
        name : str

        Returns
        -------
        numpy.ndarray
            uint8 [nbytes], a read-only view of the file; sub-byte dtypes stay packed.

        Raises
        ------
        KeyError
            If the file has no such tensor.
        ValueError
            If the reader is closed.

        Examples
        --------
        ``writer.write_raw(name, reader.raw(name))`` copies a tensor into another file.
        """
        return self._stored(name)[1]

    def _stored(self, name: str) -> tuple[TensorInfo, np.ndarray]:
        if self._file_bytes is None:
            raise ValueError(f"{self.path}: the reader is closed; read inside its with block")
        if name not in self.tensors:
            raise KeyError(f"{self.path} has no tensor {quote(name)}; {known(self.tensors)}")
        info = self.tensors[name]
        return info, self._file_bytes[info.offset : info.offset + info.nbytes]

    def _open(self, max_header_bytes: int, max_tensors: int) -> None:
        with self.path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            header = read_header(file, file_size, max_header_bytes)
            data_start = 8 + len(header)
            self.metadata, infos = parse_header(header, data_start, max_tensors)
            infos.sort(key=lambda info: (info.offset, info.nbytes))
            check_coverage(infos, data_start, file_size)
            self.tensors = {info.name: info for info in infos}
            self._mmap = mmap.mmap(file.fileno(), file_size, access=mmap.ACCESS_READ)
        self._file_bytes = np.frombuffer(self._mmap, np.uint8)
