"""The header of a safetensors file that nobody vouches for: read and checked within bounds."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from cuquant.io.container.messages import quote
from cuquant.io.container.safetensors.tensors import (
    METADATA,
    TensorInfo,
    check_text,
    checked_metadata,
    numpy_dtype,
    stored_nbytes,
)

MAX_HEADER_BYTES = 100_000_000  # the official library's limit


MAX_TENSORS = 1_000_000


_FIELDS = ("dtype", "shape", "data_offsets")


MAX_RANK = 64  # NumPy's own limit


MAX_DEPTH = 127  # the official reader's


_WHITESPACE = b" \t\n\r"  # JSON's


_MAX_DIGITS = 20  # of 2**64 - 1: no honest header holds a longer number


def read_header(file: BinaryIO, file_size: int, max_header_bytes: int) -> bytes:
    if file_size < 8:
        raise ValueError(
            f"is {file_size} bytes long, a safetensors file has at least 8 (its "
            "header length); it is truncated or of another format"
        )
    (length,) = struct.unpack("<Q", read_all(file, 8))
    if length > file_size - 8:
        raise ValueError(
            f"its first 8 bytes say that the header is {length} bytes long, but "
            f"{file_size - 8} follow; it is truncated or of another format"
        )
    if length > max_header_bytes:
        raise ValueError(
            f"the header is {length} bytes long, the limit is {max_header_bytes}; "
            "pass max_header_bytes= if you trust the file"
        )
    return read_all(file, length)


def read_all(file: BinaryIO, size: int) -> bytes:
    """`size` bytes of an unbuffered file, which hands out 2 GiB at most and less if it likes."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        if not (count := file.readinto(rest)):  # type: ignore[attr-defined]
            raise ValueError(f"ended {len(rest)} bytes early: it was cut short while it was read")
        rest = rest[count:]
    return bytes(data)


def parse_header(
    header: bytes, data_start: int, max_tensors: int
) -> tuple[dict[str, str], list[TensorInfo]]:
    if not header.lstrip(_WHITESPACE).startswith(b"{"):  # the official reader takes spaces too
        raise ValueError(
            f"the header starts with {quote(header[:8])}, not with a JSON object's "
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
            parse_float=_parse_float,
            parse_constant=_refuse_number,
        )
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the header is not JSON: {error.msg} at its character {error.pos}; the file is corrupt"
        ) from None
    if METADATA in dict(_overridden(entries)):
        raise ValueError(f"the header has {METADATA} twice; the file is corrupt")
    found = entries.pop(METADATA, None)  # null is as good as none to the official reader
    metadata = checked_metadata({} if found is None else found)
    for key, value in _overridden(found):
        checked_metadata({key: value})
    if len(entries) > max_tensors:
        _refuse_count(max_tensors)
    return metadata, _parse_entries(entries, data_start)


class _Repeating(dict[str, Any]):
    """A JSON object with equal keys, of which the last counts; the official reader's rule."""

    overridden: list[tuple[str, Any]]


def _overridden(value: Any) -> list[tuple[str, Any]]:
    """Keys and values that later ones of the same object override; they must be valid too."""
    return value.overridden if isinstance(value, _Repeating) else []


def _object_hook(max_tensors: int) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Make the builder of one JSON object, which refuses too many objects.

    Objects are counted while they are parsed, so that a flood of them is cut off early.
    """
    count = itertools.count(1)

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if next(count) > max_tensors + 2:  # the header itself and __metadata__
            _refuse_count(max_tensors)
        built = dict(pairs)
        if len(built) == len(pairs):
            return built
        last = {key: at for at, (key, _) in enumerate(pairs)}
        repeating = _Repeating(built)
        repeating.overridden = [pair for at, pair in enumerate(pairs) if last[pair[0]] != at]
        return repeating

    return build


def _refuse_count(max_tensors: int) -> NoReturn:
    raise ValueError(
        f"the header has more than {max_tensors} tensors, which no model has; do not use this file"
    )


def _parse_int(digits: str) -> int | float:
    if len(digits) > _MAX_DIGITS or digits == "-0":  # before int(), whose time is quadratic
        return _parse_float(digits)
    return int(digits)


def _parse_float(text: str) -> float:
    if math.isinf(value := float(text)):
        _refuse_number(text)
    return value


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"the header has the number {quote(text)}; the file is corrupt")


def _parse_entries(entries: dict[str, Any], data_start: int) -> list[TensorInfo]:
    infos = []
    overridden = _overridden(entries)
    for at, (name, value) in enumerate((*overridden, *entries.items())):
        try:
            fields = _parse_fields(name, value)
            if at >= len(overridden):
                infos.append(_located(name, *fields, data_start))
        except ValueError as error:
            raise ValueError(f"tensor {quote(name)}: {error}") from None
    return infos


def _located(
    name: str, tag: str, shape: list[int], offsets: list[int], data_start: int
) -> TensorInfo:
    start, end = offsets
    if start > end:
        raise ValueError(f"its data_offsets are {quote(offsets)}; its end lies before its start")
    nbytes = stored_nbytes(tag, shape)
    if nbytes != end - start:
        raise ValueError(
            f"its data_offsets {quote(offsets)} hold {end - start} bytes, but "
            f"{tag} {quote(shape)} takes {nbytes}; the file is corrupt"
        )
    return TensorInfo(name, tag, tuple(shape), data_start + start, nbytes)


def _parse_fields(name: str, value: Any) -> tuple[str, list[int], list[int]]:
    """The dtype, shape and data_offsets of an entry; what else is in it means nothing."""
    check_text(name, "its name")
    for field, _ in _overridden(value):
        if field in _FIELDS:
            raise ValueError(f"its entry has {quote(field)} twice; the file is corrupt")
    if not isinstance(value, dict) or not value.keys() >= set(_FIELDS):
        raise ValueError(
            f"its entry is {quote(value)}; an object with dtype, shape and "
            "data_offsets is wanted, the file is corrupt"
        )
    tag, shape, offsets = (value[field] for field in _FIELDS)
    if len(value) > len(_FIELDS):
        _check_ignored(value)
    numpy_dtype(tag)
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise ValueError(
            f"its shape is {quote(shape)}; a list of at most {MAX_RANK} "
            "non-negative integers is wanted, the file is corrupt"
        )
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(
            f"its data_offsets are {quote(offsets)}; [start, end] with "
            "0 <= start <= end is wanted, the file is corrupt"
        )
    return tag, shape, offsets


def _check_ignored(value: Any, depth: int = 2) -> None:
    """ValueError where the official reader does not read what means nothing to it."""
    if depth > MAX_DEPTH:
        raise ValueError(f"its entry nests too deep, more than {MAX_DEPTH} levels")
    if isinstance(value, str):
        check_text(value, "a field of its entry")
    if isinstance(value, dict):
        value = [part for pair in (*value.items(), *_overridden(value)) for part in pair]
    for part in value if isinstance(value, list) else ():
        _check_ignored(part, depth + 1)


def _are_sizes(value: Any) -> bool:
    # type() and not isinstance(): true is an int to Python, but not a size.
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def check_coverage(infos: list[TensorInfo], data_start: int, file_size: int) -> None:
    """Check that `infos`, sorted by offset, cover the data section: no hole, overlap or rest."""
    position = data_start
    for info in infos:
        if info.offset != position:
            fault = "overlaps the tensor before it" if info.offset < position else "leaves a hole"
            raise ValueError(
                f"tensor {quote(info.name)} {fault}: it starts at byte "
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
