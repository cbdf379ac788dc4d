"""GgufWriter: tensor by tensor, whole or not at all; in one file or in parts."""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from cuquant.disk import Replacement
from cuquant.io.container.gguf import splits
from cuquant.io.container.gguf.header import (
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_NAME_BYTES,
    VERSION,
)
from cuquant.io.container.gguf.layout import ALIGNMENT_KEY, alignment_of, up
from cuquant.io.container.gguf.types import GgufTensor, gguf_type
from cuquant.io.container.gguf.values import Value, string_bytes, value_bytes
from cuquant.io.container.messages import quote
from cuquant.io.container.once import Once
from cuquant.io.container.shards import by_size

CHUNK = 1 << 20  # elements copied at once


class GgufWriter(Once[GgufTensor]):
    """Write a GGUF file tensor by tensor; it appears whole under its name, or not at all.

    Each file is a `cuquant.disk.Replacement`. Names, types and shapes come first because the header
    does; tensors lie in the order of `specs`, without gaps but for the alignment, as llama.cpp
    wants them. Version 3, little-endian. One thread writes at a time.

    Parameters
    ----------
    path : str or os.PathLike
    specs : mapping of str to (type, shape)
        type: a GgufType, the name of one (``"q4_k"``), or a NumPy dtype for plain numbers.
        shape: in elements, the slowest axis first. llama.cpp wants names of at most 63 bytes.
    metadata : mapping of str to value, optional
        str, bool, NumPy numbers, one-axis arrays of those; lists of str, bool or NumPy numbers; a
        tuple of arrays is an array of arrays. Python's int and float do not tell their width:
        give ``np.uint32(7)``. ``general.alignment`` sets the alignment, 32 bytes otherwise.
    part_bytes : int, optional
        Tensors of more bytes than this go to parts beside `path`: NAME-00001-of-00003.gguf; a part
        has more where one tensor has. None: one file, as with tensors of less.

    Attributes
    ----------
    paths : list of pathlib.Path
        Of the files that are written. The first one appears last.
    tensors : dict of str to GgufTensor
        The layout of the files; known before anything is written.
    alignment : int

    Raises
    ------
    ValueError
        If a name, shape or value cannot be stored.
    TypeError
        If a dtype or value has no type in GGUF, or does not tell it.
    OSError
        If the directory is missing or `path` is a directory.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "model.gguf"
    >>> with GgufWriter(path, {"w": ("q8_0", (2, 32))}, {"a.size": np.uint32(2)}) as writer:
    ...     writer.write("w", np.zeros((2, 34), np.uint8))
    >>> path.stat().st_size
    192
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Mapping[str, tuple[Any, Iterable[int]]],
        metadata: Mapping[str, Any] | None = None,
        *,
        part_bytes: int | None = None,
    ) -> None:
        self.path = Path(path)
        entries = _checked(metadata or {})
        self.alignment = alignment_of(entries)
        planned = [_plan(name, kind, shape) for name, (kind, shape) in specs.items()]
        groups = _grouped(planned, part_bytes)
        count = len(groups)
        self.paths = [self.path] if count == 1 else splits.part_paths(self.path, count)
        self.tensors: dict[str, GgufTensor] = {}
        self._headers: list[bytes] = []
        self._sizes: list[int] = []  # bytes of the whole files
        for number, group in enumerate(groups):
            told = _part_metadata(entries, number, count, len(planned))
            self._lay_out(number, group, told)
        self._new: list[Replacement] = []
        self._stack = ExitStack()

    def __enter__(self) -> GgufWriter:
        self._new = [Replacement(path) for path in self.paths]
        with ExitStack() as stack:
            for new, header, size in zip(self._new, self._headers, self._sizes, strict=True):
                stack.enter_context(new)
                assert new.file is not None  # for the type checker: it is entered
                new.write(header)
                new.file.truncate(size)  # padding is zeros, up to the end
            self._stack = stack.pop_all()
        self._pending = set(self.tensors)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._refuse_missing()
        except ValueError as missing:
            self._stack.__exit__(ValueError, missing, None)
            raise
        finally:
            self._pending = None
        # The last part is the first to appear: the first one has the metadata.
        self._stack.__exit__(kind, error, traceback)

    def write(self, name: str, array: np.ndarray) -> None:
        """Store one tensor; tensors may come in any order, each once.

        Parameters
        ----------
        name : str
        array : numpy.ndarray
            Of ``tensors[name].dtype`` and ``tensors[name].stored_shape``, with any strides; copied
            in chunks of at most 8 MiB.

        Raises
        ------
        ValueError
            If name, dtype or shape are not those of `specs`, or the tensor is written already.
        OSError
            As the system gives it, such as a full disk.
        """
        info = self._pending_info(name)
        array = np.asarray(array)
        if array.dtype.newbyteorder("=") != info.dtype or array.shape != info.stored_shape:
            raise ValueError(
                f"tensor {quote(name)} came as {array.dtype} {array.shape}; specs said "
                f"{info.type.name} {info.shape}, which is stored as {info.dtype} "
                f"{info.stored_shape}: convert the array or correct specs"
            )
        self._store(info, _stored_chunks(array, info))

    def _lay_out(self, number: int, group: list[GgufTensor], metadata: dict[str, Value]) -> None:
        """Place the tensors of a part behind its header."""
        offsets, end = [], 0
        for info in group:
            offsets.append(end)
            end = up(end + info.nbytes, self.alignment)
        header = _header(group, offsets, metadata)
        header += bytes(-len(header) % self.alignment)
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(
                f"the header would be {len(header)} bytes long, readers accept "
                f"{MAX_HEADER_BYTES}; split the tensors over several files"
            )
        self._headers.append(header)
        self._sizes.append(len(header) + end)
        for info, offset in zip(group, offsets, strict=True):
            placed = replace(info, offset=len(header) + offset, part=number)
            self.tensors[info.name] = placed

    def _place(self, info: GgufTensor) -> tuple[BinaryIO, Path]:
        file = self._new[info.part].file
        assert file is not None  # for the type checker: it is open
        return file, self.paths[info.part]


def _checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata, of which the keys that say how a file is split are the writer's own."""
    for key in splits.KEYS:
        if key in metadata:
            raise ValueError(f"metadata has {key}, which the writer sets; pass part_bytes=")
    return dict(metadata)


def _plan(name: str, which: Any, shape: Iterable[int]) -> GgufTensor:
    """Check one entry of `specs`; its place is not known yet."""
    _check_name(name, "a tensor name")
    sizes = tuple(int(operator.index(size)) for size in shape)
    try:
        kind = gguf_type(which)
        if not kind.is_known:
            raise ValueError(f"{kind.name} is not known, and nothing can be written of it")
        nbytes = kind.stored_nbytes(sizes)
    except (ValueError, TypeError) as error:
        raise type(error)(f"tensor {quote(name)}: {error}") from None
    return GgufTensor(name, kind, sizes, 0, nbytes)


def _check_name(name: Any, what: str) -> bytes:
    """The stored bytes of a key or a tensor's name."""
    if not isinstance(name, str):
        raise ValueError(f"{what} is {quote(name)}; a string is wanted")
    try:
        stored = name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is {quote(name)}, which is not valid Unicode") from None
    if len(stored) > MAX_NAME_BYTES:
        raise ValueError(f"{what} is {len(stored)} bytes long, the limit is {MAX_NAME_BYTES}")
    return stored


def _grouped(planned: list[GgufTensor], most: int | None) -> list[list[GgufTensor]]:
    """Tensors by parts, each of at most `most` bytes or of one tensor; at least one part."""
    if most is None:
        return [planned]
    if most < 1:
        raise ValueError(f"part_bytes is {most}; a positive number of bytes is wanted")
    groups = by_size(planned, lambda info: info.nbytes, most)
    if len(groups) > splits.MAX_PARTS:
        raise ValueError(
            f"part_bytes={most} makes {len(groups)} parts; {splits.MAX_PARTS} is the limit"
        )
    return groups


def _part_metadata(
    metadata: dict[str, Any], number: int, count: int, tensors: int
) -> dict[str, Any]:
    """What one of `count` files says; the alignment is in each, since not all readers keep it."""
    if count == 1:
        return metadata
    split = splits.split_entries(number, count, tensors)
    if number == 0:
        return metadata | split
    return {key: metadata[key] for key in (ALIGNMENT_KEY,) if key in metadata} | split


def _header(group: list[GgufTensor], offsets: list[int], metadata: dict[str, Any]) -> bytes:
    """The bytes before the padding."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(group), len(metadata))]
    for key, value in metadata.items():
        _check_name(key, "a key of the metadata")
        try:
            parts += string_bytes(key), value_bytes(value)
        except (ValueError, TypeError) as error:
            raise type(error)(f"metadata {quote(key)}: {error}") from None
    for info, offset in zip(group, offsets, strict=True):
        axes = len(info.shape)
        parts += string_bytes(info.name), struct.pack(f"<I{axes}Q", axes, *info.shape[::-1])
        parts.append(struct.pack("<IQ", info.type.id, offset))
    return b"".join(parts)


def _stored_chunks(array: np.ndarray, info: GgufTensor) -> Iterator[np.ndarray]:
    """Yield the bytes of `array` as the file holds them, uint8, in row-major order."""
    # .flat walks any strides and copies only the slice that is asked for.
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    little = info.dtype if info.dtype.kind == "V" else info.dtype.newbyteorder("<")
    for start in range(0, array.size, CHUNK):
        yield flat[start : start + CHUNK].astype(little, copy=False).view(np.uint8)
