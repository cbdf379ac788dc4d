"""Where tensors lie in the data of a GGUF file, checked against its size."""

from __future__ import annotations

import operator
from dataclasses import replace

import numpy as np

from cuquant.io.container.gguf.header import Entry, Header
from cuquant.io.container.gguf.types import GgufTensor, type_of_id
from cuquant.io.container.gguf.values import Value
from cuquant.io.container.messages import quote

ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32  # bytes


def alignment_of(metadata: dict[str, Value]) -> int:
    """The alignment of a file's data in bytes; ValueError for what cannot be one."""
    value = metadata.get(ALIGNMENT_KEY, np.uint32(DEFAULT_ALIGNMENT))
    if type(value) is not np.uint32 or value == 0 or int(value) & (int(value) - 1):
        raise ValueError(
            f"{ALIGNMENT_KEY} is {quote(value)}; a uint32 that is a power of two is wanted"
        )
    return int(value)


def up(position: int, alignment: int) -> int:
    """The first multiple of the alignment that is not before a position.

    >>> up(33, 32)
    64
    """
    return -(-position // alignment) * alignment


def place(header: Header, alignment: int, size: int, part: int) -> list[GgufTensor]:
    """Where the tensors of a file lie, in the order of their data.

    Holes are no fault: writers differ in what they pad.

    Raises
    ------
    ValueError
        If one is malformed, misaligned, beyond the end of the file, or in another one.
    """
    start = up(header.nbytes, alignment)
    placed = [_placed(entry, start, alignment, part) for entry in header.entries]
    placed.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end, last = start, ""
    for tensor in placed:
        if tensor.offset < end:
            raise ValueError(
                f"tensor {quote(tensor.name)} overlaps tensor {quote(last)}: it starts at byte "
                f"{tensor.offset}, before byte {end} where that ends; the file is corrupt"
            )
        end, last = tensor.offset + tensor.nbytes, tensor.name
        if end > size:
            raise ValueError(
                f"tensor {quote(last)} ends at byte {end}, and the file is {size} bytes long; it "
                "is truncated, fetch it again"
            )
    return _with_room(placed, size)


def _placed(entry: Entry, start: int, alignment: int, part: int) -> GgufTensor:
    kind = type_of_id(entry.type_id)
    try:
        nbytes = kind.stored_nbytes(entry.shape)
    except ValueError as error:
        raise ValueError(f"tensor {quote(entry.name)}: {error}") from None
    if entry.offset % alignment:
        raise ValueError(
            f"tensor {quote(entry.name)} starts at byte {entry.offset} of the data, which is no "
            f"multiple of the alignment, {alignment}; the file is corrupt"
        )
    return GgufTensor(entry.name, kind, entry.shape, start + entry.offset, nbytes, part)


def _with_room(placed: list[GgufTensor], size: int) -> list[GgufTensor]:
    """Give tensors of unknown types the bytes up to the next one."""
    ends = [*(tensor.offset for tensor in placed[1:]), size]
    return [
        tensor if tensor.type.is_known else replace(tensor, nbytes=end - tensor.offset)
        for tensor, end in zip(placed, ends, strict=False)
    ]


def place_part(header: Header, alignment: int, size: int, part: int) -> list[GgufTensor]:
    """Where the tensors of a part lie, by the alignment of the first one, or by its own.

    `gguf.GGUFWriter` aligns all parts alike and says so in the first one alone; llama.cpp's
    gguf-split aligns the others by what they say themselves. Where both are possible, the right
    one is that which explains the file to its end.
    """
    ways, problems = [], []
    for way in dict.fromkeys((alignment, alignment_of(header.metadata))):
        try:
            placed = place(header, way, size, part)
        except ValueError as error:
            problems.append(error)
            continue
        end = placed[-1].offset + placed[-1].nbytes if placed else header.nbytes
        ways.append((abs(size - up(end, way)), placed))
    if not ways:
        raise problems[0]
    return min(ways, key=operator.itemgetter(0))[1]
