"""The header of a GGUF file that nobody vouches for: read and checked within bounds.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from cuquant.errors import FormatError
from cuquant.io.container import downloads
from cuquant.io.container.gguf.cursor import Cursor
from cuquant.io.container.gguf.types import MAX_DIMS
from cuquant.io.container.gguf.values import Value, read_value
from cuquant.io.container.messages import quote
from cuquant.io.container.positions import PositionedFile

MAGIC = b"GGUF"
VERSION = 3  # that we write
VERSIONS = (2, 3)  # that we read: they differ in what is said of big-endian files alone

MAX_HEADER_BYTES = 100_000_000  # 250,000 tokens take about 10 MB
MAX_TENSORS = 65_536  # the largest models have some thousands
MAX_ENTRIES = 65_536  # of the metadata; real files have some dozens
MAX_NAME_BYTES = 65_535  # of a key, says the format; llama.cpp wants 63 of a tensor's

# The magics of what llama.cpp wrote before GGUF, as they lie in the file.
OLDER = (b"lmgg", b"fmgg", b"tjgg", b"algg", b"GGML", b"GGMF", b"GGJT", b"GGLA")


class Entry(NamedTuple):
    """A tensor as the header describes it: not checked yet against the file."""

    name: str
    shape: tuple[int, ...]  # slowest first
    type_id: int
    offset: int  # bytes from the start of the data


@dataclass(frozen=True)
class Header:
    """What a file says before its data.

    Parameters
    ----------
    version
        Of the format.
    order
        ``"<"`` or ``">"``, as in NumPy.
    metadata
        Values by key, in the order of the file.
    entries
        Tensors, in the order of the file.
    nbytes
        From the start of the file; the data follow at a multiple of the alignment.
    """

    version: int
    order: Literal["<", ">"]
    metadata: dict[str, Value]
    entries: list[Entry]
    nbytes: int


def read_header(file: PositionedFile, max_header_bytes: int, max_tensors: int) -> Header:
    """Read the header of an open file; ValueError says what is wrong with it."""
    cursor = Cursor(file, max_header_bytes)
    version = _read_version(cursor, file.size)
    tensors, entries = cursor.number("Q"), cursor.number("Q")
    _check_count(tensors, "tensors", 24, max_tensors, file.size)
    _check_count(entries, "metadata entries", 13, MAX_ENTRIES, file.size)
    metadata: dict[str, Value] = {}
    for number in range(entries):
        key = _read_name(cursor, f"key {number}")
        if key in metadata:
            raise ValueError(f"has the key {quote(key)} twice; the file is corrupt")
        try:
            metadata[key] = read_value(cursor)
        except FormatError:
            raise  # cut short while it was read
        except ValueError as error:
            raise ValueError(f"metadata {quote(key)}: {error}") from error
    listed = [_read_entry(cursor, number) for number in range(tensors)]
    return Header(version, cursor.order, metadata, listed, cursor.at)


def _read_version(cursor: Cursor, size: int) -> int:
    """The version, after the magic; sets the cursor's byte order."""
    magic = bytes(cursor.take(min(4, size)))
    if magic != MAGIC:
        _refuse_other(magic + cursor.take(min(downloads.HEAD, size - len(magic))))
    stored = bytes(cursor.take(4))
    # Both byte orders have the same magic: the small number of the version tells them apart.
    if int.from_bytes(stored, "little") & 0xFFFF == 0:
        cursor.order = ">"
    version = int.from_bytes(stored, "little" if cursor.order == "<" else "big")
    if version not in VERSIONS:
        advice = "convert it again with a current llama.cpp" if version == 1 else "it is not known"
        raise ValueError(f"is GGUF version {version}; versions 2 and 3 can be read, {advice}")
    return version


def _refuse_other(head: bytes) -> NoReturn:
    """Say what a file is that is no GGUF file, by its first bytes."""
    if head[:4] in OLDER:
        raise ValueError(
            "is a file of llama.cpp from before GGUF; convert the model again with a current one"
        )
    if head[8:9] == b"{":
        raise ValueError("is a safetensors file; give a .gguf file")
    for magic, text in downloads.MAGICS:
        if head.startswith(magic):
            raise ValueError(text)
    raise ValueError(
        f"starts with {quote(head[:4])}, not with {MAGIC}; it is truncated or of another format"
    )


def _check_count(count: int, what: str, least: int, most: int, size: int) -> None:
    """Refuse what cannot be true before a loop counts as far."""
    if count * least > size:
        raise ValueError(
            f"says that it has {count} {what}, of at least {least} bytes each, and is {size} bytes "
            "long; it is truncated or corrupt"
        )
    if count > most:
        raise ValueError(f"has {count} {what}, the limit is {most}; no model has so many")


def _read_name(cursor: Cursor, what: str) -> str:
    """A key or a tensor's name: text, since programs compare and print it."""
    length = cursor.number("Q")
    if length > MAX_NAME_BYTES:
        raise ValueError(f"{what} is {length} bytes long, the limit is {MAX_NAME_BYTES}")
    stored = cursor.take(length)
    try:
        return stored.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{what} is {quote(bytes(stored))}, which is not UTF-8") from None


def _read_entry(cursor: Cursor, number: int) -> Entry:
    name = _read_name(cursor, f"the name of tensor {number}")
    try:
        axes = cursor.number("I")
        if axes > MAX_DIMS:
            raise ValueError(f"it has {axes} axes; GGUF has at most {MAX_DIMS}")
        *shape, kind, offset = cursor.fields(f"{axes}QIQ")
        return Entry(name, tuple(shape[::-1]), kind, offset)
    except FormatError:
        raise  # cut short while it was read
    except ValueError as error:
        raise ValueError(f"tensor {quote(name)}: {error}") from error
