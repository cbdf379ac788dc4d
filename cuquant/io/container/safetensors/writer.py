"""SafetensorsWriter: tensor by tensor, whole or not at all."""

from __future__ import annotations

import itertools
import json
import operator
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from cuquant.disk import Replacement
from cuquant.io.container.messages import quote
from cuquant.io.container.once import Once
from cuquant.io.container.safetensors.header import MAX_HEADER_BYTES, MAX_RANK
from cuquant.io.container.safetensors.tensors import (
    CHUNK,
    HIGHEST_BYTE,
    METADATA,
    SUB_BYTE_BITS,
    TAGS,
    TensorInfo,
    check_text,
    checked_metadata,
    numpy_dtype,
    pack,
    refuse_big_endian,
    stored_nbytes,
    tag_of,
)

DATA_ALIGNMENT = 256  # bytes; where the data section of a file that we write starts


class SafetensorsWriter(Once[TensorInfo]):
    """Write a safetensors file tensor by tensor; it appears whole under its name, or not at all.

    As a `cuquant.disk.Replacement`. Names, dtypes and shapes come first because the header does.
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
    >>> import tempfile, ml_dtypes
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
        self._header, self.tensors = _lay_out(infos, checked_metadata(metadata or {}))
        self._new = Replacement(self.path)

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return len(self._header) + sum(info.nbytes for info in self.tensors.values())

    def __enter__(self) -> SafetensorsWriter:
        self._new.__enter__()
        try:
            self._new.write(self._header)
        except BaseException as problem:
            self._new.discard()
            if isinstance(problem, OSError):
                problem.filename = str(self.path)  # the name that the caller knows
            raise
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
        except BaseException:
            self._new.discard()
            raise
        finally:
            self._pending = None
        self._new.__exit__(kind, error, traceback)

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
        refuse_big_endian(array.dtype)
        if array.dtype != info.numpy_dtype or array.shape != info.shape:
            raise ValueError(
                f"tensor {quote(name)} came as {array.dtype} {array.shape}; specs said "
                f"{info.numpy_dtype} {info.shape}: convert the array or correct specs"
            )
        self._store(info, _stored_chunks(array, info))

    def _place(self, info: TensorInfo) -> tuple[BinaryIO, Path]:
        assert self._new.file is not None  # for the type checker: it is open
        return self._new.file, self.path


def _plan(name: str, dtype: Any, shape: Iterable[int]) -> TensorInfo:
    """Check one entry of `specs`; its offset is not known yet."""
    check_text(name, "a tensor name")
    if name in ("", METADATA):
        raise ValueError(f"a tensor cannot be named {quote(name)}; choose another name")
    tag = TAGS[numpy_dtype(dtype)] if isinstance(dtype, str) else tag_of(dtype)
    sizes = tuple(int(operator.index(size)) for size in shape)  # int(): True is written 1
    if len(sizes) > MAX_RANK or any(size < 0 for size in sizes):
        raise ValueError(
            f"tensor {quote(name)} has the shape {sizes}; at most {MAX_RANK} "
            "non-negative sizes are wanted"
        )
    try:
        nbytes = stored_nbytes(tag, sizes)
    except ValueError as error:
        raise ValueError(f"tensor {quote(name)}: {error}; store it as U8") from None
    return TensorInfo(name, tag, sizes, 0, nbytes)


def _alignment(info: TensorInfo) -> float:
    """Return the bytes of an element in the file; bit-packed tensors (below 1) come last."""
    return SUB_BYTE_BITS.get(info.dtype, 8 * info.numpy_dtype.itemsize) / 8


def _lay_out(
    infos: list[TensorInfo], metadata: dict[str, str]
) -> tuple[bytes, dict[str, TensorInfo]]:
    """Return the first bytes of the file, up to the data section, and the placed tensors."""
    entries: dict[str, Any] = {METADATA: metadata} if metadata else {}
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


def _stored_chunks(array: np.ndarray, info: TensorInfo) -> Iterator[np.ndarray]:
    """Yield the bytes of `array` as the file holds them, uint8, in row-major order."""
    # .flat walks any strides and copies only the slice that is asked for.
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    highest = HIGHEST_BYTE.get(info.dtype, 255)
    for start in range(0, array.size, CHUNK):
        chunk = flat[start : start + CHUNK].view(np.uint8)
        if highest < 255 and chunk.max() > highest:
            raise ValueError(
                f"tensor {quote(info.name)} ({info.numpy_dtype}) holds the byte {chunk.max()}, "
                f"its codes end at {highest}; it was viewed from bytes that are not codes"
            )
        yield pack(chunk, SUB_BYTE_BITS[info.dtype]) if info.dtype in SUB_BYTE_BITS else chunk
