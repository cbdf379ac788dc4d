"""The safetensors container: a bounded reader for untrusted files, a streaming atomic writer.

A file is 8 bytes (header length, little-endian), a JSON header, then the data section. This module
knows names, dtypes and bytes; what a group of tensors means is decided elsewhere.
Source of the format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import mmap
import operator
import os
import reprlib
import secrets
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

import ml_dtypes
import numpy as np

from cuquant.errors import FormatError

MAX_HEADER_BYTES = 100_000_000  # the official library's limit
MAX_TENSORS = 1_000_000
DATA_ALIGNMENT = 256  # bytes; where the data section of a file that we write starts

_NUMPY_DTYPES = {
    tag: np.dtype(scalar)
    for tag, scalar in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "C64": np.complex64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "F4": ml_dtypes.float4_e2m1fn,
        "F6_E2M3": ml_dtypes.float6_e2m3fn,
        "F6_E3M2": ml_dtypes.float6_e3m2fn,
    }.items()
}
_TAGS = {dtype: tag for tag, dtype in _NUMPY_DTYPES.items()}
_SUB_BYTE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # bits an element takes in the file
_HIGHEST_BYTE = {"BOOL": 1} | {tag: 2**bits - 1 for tag, bits in _SUB_BYTE_BITS.items()}

_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_RANK = 64  # NumPy's own limit
_MAX_DIGITS = 20  # of 2**64 - 1: no honest header holds a longer number
_CHUNK = 1 << 20  # elements copied or packed at once; a multiple of every packing group

_PRINTER = reprlib.Repr()  # what a hostile header says is quoted, but never at full length
_PRINTER.maxstring = _PRINTER.maxother = 80
_quote = _PRINTER.repr


def numpy_dtype(tag: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a safetensors dtype tag.

    Parameters
    ----------
    tag : str
        Such as ``"F32"`` or ``"F8_E4M3"``.

    Returns
    -------
    numpy.dtype
        Sub-byte tags (F4, F6_*) give an ml_dtypes type of one byte an element.

    Raises
    ------
    ValueError
        If the tag is unknown.

    Examples
    --------
    >>> numpy_dtype("BF16")
    dtype(bfloat16)
    """
    if not isinstance(tag, str) or tag not in _NUMPY_DTYPES:
        raise ValueError(f"unknown dtype {_quote(tag)}; known: {', '.join(_NUMPY_DTYPES)}")
    return _NUMPY_DTYPES[tag]


def tag_of(dtype: Any) -> str:
    """Return the safetensors tag of a NumPy dtype.

    Parameters
    ----------
    dtype : numpy.dtype or scalar type
        Little-endian; ml_dtypes types included.

    Returns
    -------
    str

    Raises
    ------
    TypeError
        If safetensors has no such dtype or its byte order is big-endian.

    Examples
    --------
    >>> tag_of(np.float16)
    'F16'
    """
    dtype = np.dtype(dtype)
    _refuse_big_endian(dtype)
    if dtype not in _TAGS:
        known = ", ".join(str(known) for known in _TAGS)
        raise TypeError(f"safetensors has no dtype for {dtype}; cast to one of {known}")
    return _TAGS[dtype]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in a file, and what it is.

    Parameters
    ----------
    name : str
        An opaque string; never use it as a path.
    dtype : str
        safetensors tag.
    shape : tuple of int
        In elements, also for sub-byte dtypes.
    offset : int
        Bytes from the start of the file.
    nbytes : int
        Bytes stored in the file.

    Examples
    --------
    >>> TensorInfo("w", "F4", (4, 2), offset=256, nbytes=4).numpy_dtype
    dtype(float4_e2m1fn)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the array that holds this tensor in memory."""
        return _NUMPY_DTYPES[self.dtype]


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
        if info.dtype == "BOOL" and stored.max(initial=0) > _HIGHEST_BYTE["BOOL"]:
            raise FormatError(
                f"{self.path}: BOOL tensor {_quote(name)} holds the byte "
                f"{stored.max()}; only 0 and 1 are booleans, read it with raw()"
            )
        if info.dtype in _SUB_BYTE_BITS:
            array = _unpack(stored, _SUB_BYTE_BITS[info.dtype])
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
            raise KeyError(f"{self.path} has no tensor {_quote(name)}; {_known(self.tensors)}")
        info = self.tensors[name]
        return info, self._file_bytes[info.offset : info.offset + info.nbytes]

    def _open(self, max_header_bytes: int, max_tensors: int) -> None:
        with self.path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            header = _read_header(file, file_size, max_header_bytes)
            data_start = 8 + len(header)
            self.metadata, infos = _parse_header(header, data_start, max_tensors)
            infos.sort(key=lambda info: (info.offset, info.nbytes))
            _check_coverage(infos, data_start, file_size)
            self.tensors = {info.name: info for info in infos}
            self._mmap = mmap.mmap(file.fileno(), file_size, access=mmap.ACCESS_READ)
        self._file_bytes = np.frombuffer(self._mmap, np.uint8)


class SafetensorsWriter:
    """Write a safetensors file tensor by tensor; it appears whole under its name, or not at all.

    Bytes go to a temporary file beside `path`, which replaces `path` when the ``with`` block ends
    well; after any exception it is removed and an older `path` is as it was. (A killed process
    leaves ``.NAME.*.tmp`` behind.) Names, dtypes and shapes come first because the header does.
    The data section starts on 256 bytes and tensors are stored by descending item size, otherwise
    in the order of `specs`, so that each starts on a multiple of its item size.
    One thread writes at a time.

    Parameters
    ----------
    path : str or os.PathLike
    specs : mapping of str to (dtype, shape)
        dtype: a NumPy dtype (ml_dtypes included) or a safetensors tag. Strings are tags only:
        NumPy's ``"f4"`` is float32, the tag ``"F4"`` is a 4-bit float.
    metadata : mapping of str to str, optional

    Attributes
    ----------
    tensors : dict of str to TensorInfo
        The layout of the file, in file order; known before anything is written.

    Raises
    ------
    ValueError
        If a name, shape or the metadata cannot be stored.
    TypeError
        If a dtype cannot be stored.
    OSError
        If the directory is missing or `path` is a directory.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> with SafetensorsWriter(path, {"w": ("F4", (2, 2))}, {"format": "pt"}) as writer:
    ...     writer.write("w", np.ones((2, 2), ml_dtypes.float4_e2m1fn))
    >>> path.stat().st_size
    258
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Mapping[str, tuple[Any, Iterable[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        infos = [_plan(name, dtype, shape) for name, (dtype, shape) in specs.items()]
        infos.sort(key=lambda info: -_alignment(info))
        self._header, self.tensors = _lay_out(infos, _checked_metadata(metadata or {}))
        self._file: BinaryIO | None = None
        self._temporary: Path | None = None
        self._pending: set[str] = set()

    def __enter__(self) -> SafetensorsWriter:
        if self._file is not None:
            raise ValueError(f"{self.path}: this writer is open already; make another")
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory; name a file", str(self.path))
        if not self.path.parent.is_dir():
            raise FileNotFoundError(
                errno.ENOENT, "no such directory; create it first", str(self.path.parent)
            )
        self._pending = set(self.tensors)
        # 40 characters are at most 160 bytes: with the rest within the 255 of a file name.
        temporary = f".{self.path.name[:40]}.{secrets.token_hex(8)}.tmp"
        self._temporary = self.path.with_name(temporary)
        try:
            # "x" creates exclusively, with the permissions of the umask. Unbuffered, because a
            # buffer that could not be flushed would come back at close.
            self._file = self._temporary.open("xb", buffering=0)
            _write_all(self._file, self._header)
        except FileExistsError:
            self._temporary = None  # another's file, not ours to remove
            raise
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._discard()

    def write(self, name: str, array: np.ndarray) -> None:
        """Store one tensor; tensors may come in any order, each once.

        Parameters
        ----------
        name : str
        array : numpy.ndarray
            Of the dtype and shape that `specs` gave, with any strides; copied and packed in
            chunks of at most 8 MiB.

        Raises
        ------
        ValueError
            If name, dtype or shape are not those of `specs`, if the tensor is written already, or
            if a sub-byte or bool array holds a byte that is not one of its codes.
        TypeError
            If the array is big-endian.
        OSError
            As the system gives it, such as a full disk.
        """
        info = self._pending_info(name)
        array = np.asarray(array)
        _refuse_big_endian(array.dtype)
        if array.dtype != info.numpy_dtype or array.shape != info.shape:
            raise ValueError(
                f"tensor {_quote(name)} came as {array.dtype} {array.shape}; specs said "
                f"{info.numpy_dtype} {info.shape}: convert the array or correct specs"
            )
        self._store(info, _stored_chunks(array, info))

    def write_raw(self, name: str, data: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Store the bytes of one tensor as they are.

        Parameters
        ----------
        name : str
        data : bytes-like
            Contiguous, ``tensors[name].nbytes`` bytes, little-endian; sub-byte dtypes packed.

        Raises
        ------
        ValueError
            If name or length are not those of `specs`, or the tensor is written already.
        OSError
            As the system gives it, such as a full disk.

        Examples
        --------
        ``writer.write_raw(name, reader.raw(name))`` copies a tensor from another file.
        """
        info = self._pending_info(name)
        stored = np.frombuffer(data, np.uint8)
        if stored.size != info.nbytes:
            raise ValueError(
                f"tensor {_quote(name)} came as {stored.size} bytes; {info.dtype} {info.shape} "
                f"takes {info.nbytes}: give the stored (packed) bytes"
            )
        self._store(info, [stored])

    def _pending_info(self, name: str) -> TensorInfo:
        if self._file is None:
            raise ValueError(f"{self.path}: the writer is not open; write inside its with block")
        if name not in self.tensors:
            raise ValueError(f"specs has no tensor {_quote(name)}; {_known(self.tensors)}")
        if name not in self._pending:
            raise ValueError(f"tensor {_quote(name)} is written already; write each one once")
        return self.tensors[name]

    def _store(self, info: TensorInfo, chunks: Iterable[np.ndarray]) -> None:
        assert self._file is not None  # for the type checker: _pending_info has looked
        self._file.seek(info.offset)
        for chunk in chunks:
            _write_all(self._file, chunk.data)
        self._pending.remove(info.name)

    def _finish(self) -> None:
        assert self._file is not None and self._temporary is not None  # __enter__ has set them
        if self._pending:
            missing = [name for name in self.tensors if name in self._pending]
            raise ValueError(
                f"{self.path}: {len(missing)} of {len(self.tensors)} tensors were "
                f"not written, no file was made; write {_quote(missing)}"
            )
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)
        _sync_directory(self.path.parent)

    def _discard(self) -> None:
        """Close and remove what is left of the temporary file; after _finish nothing is."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
        if self._temporary is not None:
            with suppress(OSError):  # the first error is the one to show
                self._temporary.unlink(missing_ok=True)
            self._temporary = None


def _read_header(file: BinaryIO, file_size: int, max_header_bytes: int) -> bytes:
    if file_size < 8:
        raise ValueError(
            f"is {file_size} bytes long, a safetensors file has at least 8 (its "
            "header length); it is truncated or of another format"
        )
    (length,) = struct.unpack("<Q", file.read(8))
    if length > file_size - 8:
        raise ValueError(
            f"its first 8 bytes say that the header is {length} bytes long, but "
            f"{file_size - 8} follow; it is truncated or of another format"
        )
    if length > max_header_bytes:
        raise ValueError(
            f"the header is {length} bytes long, the limit is {max_header_bytes}; "
            "raise max_header_bytes if you trust the file"
        )
    return file.read(length)


def _parse_header(
    header: bytes, data_start: int, max_tensors: int
) -> tuple[dict[str, str], list[TensorInfo]]:
    if not header.startswith(b"{"):
        raise ValueError(
            f"the header starts with {_quote(header[:8])}, not with a JSON object's "
            "{; the file is corrupt or of another format"
        )
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the header is not UTF-8: {error.reason} at its byte {error.start}; "
            "the file is corrupt"
        ) from None
    try:
        entries = json.loads(
            text,
            object_pairs_hook=_object_hook(max_tensors),
            parse_int=_parse_int,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the header is not JSON: {error.msg} at its character {error.pos}; the file is corrupt"
        ) from None
    metadata = _checked_metadata(entries.pop(_METADATA, {}))
    if len(entries) > max_tensors:
        _refuse_count(max_tensors)
    return metadata, _parse_entries(entries, data_start)


def _object_hook(max_tensors: int) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Make the builder of one JSON object, which refuses duplicate keys and too many objects.

    Objects are counted while they are parsed, so that a flood of them is cut off early.
    """
    count = itertools.count(1)

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if next(count) > max_tensors + 2:  # the header itself and __metadata__
            _refuse_count(max_tensors)
        built = dict(pairs)
        if len(built) < len(pairs):
            seen: set[str] = set()
            duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(
                f"the header has the key {_quote(duplicate)} twice in one object; "
                "readers would disagree about its meaning, do not use this file"
            )
        return built

    return build


def _refuse_count(max_tensors: int) -> NoReturn:
    raise ValueError(
        f"the header has more than {max_tensors} tensors; raise max_tensors if you trust the file"
    )


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:  # before int(), whose time is quadratic
        _refuse_number(digits)
    return int(digits)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(
        f"the header has the number {_quote(text)}; only integers below 2^64 occur "
        "in one, the file is corrupt"
    )


def _parse_entries(entries: dict[str, Any], data_start: int) -> list[TensorInfo]:
    infos = []
    for name, value in entries.items():
        try:
            infos.append(_parse_entry(name, value, data_start))
        except ValueError as error:
            raise ValueError(f"tensor {_quote(name)}: {error}") from None
    return infos


def _parse_entry(name: str, value: Any, data_start: int) -> TensorInfo:
    _check_text(name, "its name")
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise ValueError(
            f"its entry is {_quote(value)}; an object with exactly dtype, shape and "
            "data_offsets is wanted, the file is corrupt"
        )
    tag, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    numpy_dtype(tag)
    if not _are_sizes(shape) or len(shape) > _MAX_RANK:
        raise ValueError(
            f"its shape is {_quote(shape)}; a list of at most {_MAX_RANK} "
            "non-negative integers is wanted, the file is corrupt"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"its data_offsets are {_quote(offsets)}; [start, end] with "
            "0 <= start <= end is wanted, the file is corrupt"
        )
    start, end = offsets
    nbytes = _stored_nbytes(tag, shape)
    if nbytes != end - start:
        raise ValueError(
            f"its data_offsets {_quote(offsets)} hold {end - start} bytes, but "
            f"{tag} {_quote(shape)} takes {nbytes}; the file is corrupt"
        )
    return TensorInfo(name, tag, tuple(shape), data_start + start, nbytes)


def _are_sizes(value: Any) -> bool:
    # type() and not isinstance(): true is an int to Python, but not a size.
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_coverage(infos: list[TensorInfo], data_start: int, file_size: int) -> None:
    """Check that `infos`, sorted by offset, cover the data section: no hole, overlap or rest."""
    position = data_start
    for info in infos:
        if info.offset != position:
            fault = "overlaps the tensor before it" if info.offset < position else "leaves a hole"
            raise ValueError(
                f"tensor {_quote(info.name)} {fault}: it starts at byte "
                f"{info.offset - data_start} of the data, not at "
                f"{position - data_start}; the file is corrupt"
            )
        position += info.nbytes
    if position != file_size:
        fault = "is truncated" if position > file_size else "has trailing bytes"
        raise ValueError(
            f"{fault}: the header describes {position - data_start} bytes of data, "
            f"the file holds {file_size - data_start}; fetch it again"
        )


def _stored_nbytes(tag: str, shape: Iterable[int]) -> int:
    """Return the bytes that a tensor takes in a file; ValueError says why it cannot be one."""
    shape = tuple(shape)
    itemsize = _NUMPY_DTYPES[tag].itemsize
    # Zeros count as ones, as in NumPy: its strides overflow even where the array is empty.
    if math.prod(size or 1 for size in shape) * itemsize >= 2**63:
        raise ValueError(f"{tag} {_quote(shape)} overflows 2^63 bytes")
    bits = math.prod(shape) * _SUB_BYTE_BITS.get(tag, 8 * itemsize)
    if bits % 8:
        raise ValueError(
            f"{tag} {_quote(shape)} takes {bits} bits, which is not a whole number of bytes"
        )
    return bits // 8


def _check_text(text: Any, what: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{what} is {_quote(text)}; a string is wanted")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can spell it, UTF-8 cannot
        raise ValueError(f"{what} is {_quote(text)}, which is not valid Unicode") from None


def _checked_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, Mapping):
        raise ValueError(
            f"{_METADATA} is {_quote(metadata)}; a map of strings to strings is wanted"
        )
    for key, value in metadata.items():
        _check_text(key, f"a key of {_METADATA}")
        _check_text(value, f"{_METADATA}[{_quote(key)}]")
    return dict(metadata)


def _known(tensors: Mapping[str, TensorInfo]) -> str:
    first = list(itertools.islice(tensors, 5))
    return f"it has {len(tensors)}: {_quote(first)}" + (" and more" if len(tensors) > 5 else "")


def _plan(name: str, dtype: Any, shape: Iterable[int]) -> TensorInfo:
    """Check one entry of `specs`; its offset is not known yet."""
    _check_text(name, "a tensor name")
    if name in ("", _METADATA):
        raise ValueError(f"a tensor cannot be named {name!r}; choose another name")
    tag = _TAGS[numpy_dtype(dtype)] if isinstance(dtype, str) else tag_of(dtype)
    sizes = tuple(int(operator.index(size)) for size in shape)  # int(): True is written 1
    if len(sizes) > _MAX_RANK or any(size < 0 for size in sizes):
        raise ValueError(
            f"tensor {_quote(name)} has the shape {sizes}; at most {_MAX_RANK} "
            "non-negative sizes are wanted"
        )
    try:
        nbytes = _stored_nbytes(tag, sizes)
    except ValueError as error:
        raise ValueError(f"tensor {_quote(name)}: {error}; store it as U8") from None
    return TensorInfo(name, tag, sizes, 0, nbytes)


def _alignment(info: TensorInfo) -> float:
    """Return the bytes of an element in the file; bit-packed tensors (below 1) come last."""
    return _SUB_BYTE_BITS.get(info.dtype, 8 * info.numpy_dtype.itemsize) / 8


def _lay_out(
    infos: list[TensorInfo], metadata: dict[str, str]
) -> tuple[bytes, dict[str, TensorInfo]]:
    """Return the first bytes of the file, up to the data section, and the placed tensors."""
    entries: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    ends = list(itertools.accumulate((info.nbytes for info in infos), initial=0))
    for info, start, end in zip(infos, ends, ends[1:], strict=False):
        entries[info.name] = {
            "dtype": info.dtype,
            "shape": info.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)  # spaces: the only padding readers allow
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header would be {len(text)} bytes long, readers accept "
            f"{MAX_HEADER_BYTES}; split the tensors over several files"
        )
    data_start = 8 + len(text)
    placed = {
        info.name: TensorInfo(info.name, info.dtype, info.shape, data_start + start, info.nbytes)
        for info, start in zip(infos, ends, strict=False)
    }
    return struct.pack("<Q", len(text)) + text, placed


def _refuse_big_endian(dtype: np.dtype[Any]) -> None:
    if dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big"):
        raise TypeError(
            f"dtype {dtype} is big-endian, safetensors is little-endian; convert with "
            'x.astype(x.dtype.newbyteorder("<"))'
        )


def _stored_chunks(array: np.ndarray, info: TensorInfo) -> Iterator[np.ndarray]:
    """Yield the bytes of `array` as the file holds them, uint8, in row-major order."""
    # .flat walks any strides and copies only the slice that is asked for.
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    highest = _HIGHEST_BYTE.get(info.dtype, 255)
    for start in range(0, array.size, _CHUNK):
        chunk = flat[start : start + _CHUNK].view(np.uint8)
        if highest < 255 and chunk.max() > highest:
            raise ValueError(
                f"tensor {_quote(info.name)} ({info.numpy_dtype}) holds the byte {chunk.max()}, "
                f"its codes end at {highest}; it was viewed from bytes that are not codes"
            )
        yield _pack(chunk, _SUB_BYTE_BITS[info.dtype]) if info.dtype in _SUB_BYTE_BITS else chunk


def _group(bits: int) -> tuple[int, int]:
    """Return (codes, bytes) of the shortest run of `bits`-bit codes that fills whole bytes."""
    codes = 8 // math.gcd(bits, 8)
    return codes, codes * bits // 8


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8 codes [n] into uint8 bytes [n * bits / 8], least significant bits first."""
    codes_per_group, bytes_per_group = _group(bits)
    codes = codes.reshape(-1, codes_per_group)
    words = np.zeros(len(codes), "<u4")  # a group is at most 24 bits
    for i in range(codes_per_group):
        words |= codes[:, i].astype("<u4") << (bits * i)
    return words.view(np.uint8).reshape(-1, 4)[:, :bytes_per_group].flatten()


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Undo `_pack` in chunks: uint8 bytes [n * bits / 8] to uint8 codes [n]."""
    codes_per_group, bytes_per_group = _group(bits)
    groups = packed.reshape(-1, bytes_per_group)
    codes = np.empty((len(groups), codes_per_group), np.uint8)
    for start in range(0, len(groups), _CHUNK):
        part = groups[start : start + _CHUNK]
        words = np.pad(part, ((0, 0), (0, 4 - bytes_per_group))).view("<u4")[:, 0]
        for i in range(codes_per_group):
            codes[start : start + _CHUNK, i] = (words >> (bits * i)) & (2**bits - 1)
    return codes.reshape(-1)


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write every byte: an unbuffered file may take a part (2 GiB a call on Linux)."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _sync_directory(directory: Path) -> None:
    """Make a rename durable where the system lets a directory be synced (Windows does not)."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
