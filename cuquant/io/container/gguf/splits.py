"""Split files: NAME-00001-of-00003.gguf and its like, each with its own header.

The first part has the metadata of all. Source: llama.cpp's tools/gguf-split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cuquant.io.container.gguf.values import Value
from cuquant.io.container.messages import quote

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
KEYS = (NUMBER, COUNT, TENSORS)
MAX_PARTS = 1000

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def part_paths(path: Path, count: int) -> list[Path]:
    """The names of all parts of a file that is written as `path`.

    >>> [part.name for part in part_paths(Path("m.gguf"), 2)]
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    stem = path.name.removesuffix(".gguf")
    return [path.with_name(_part_name(stem, number, count)) for number in range(count)]


def _part_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"


def parts_beside(path: Path, metadata: Mapping[str, Value]) -> list[Path]:
    """The parts of the file that `path` is one of: itself alone where it is whole.

    Names are made of the name of `path`, and not of what the file says: no part is looked for
    outside its folder.

    Raises
    ------
    ValueError
        If what the file says of itself is not what its name says, or a part is missing.
    """
    count = split_number(metadata, COUNT, 0)
    if count < 2:
        return [path]
    number = split_number(metadata, NUMBER, 0)
    if not number < count <= MAX_PARTS:
        raise ValueError(f"says that it is part {number + 1} of {count}; at most {MAX_PARTS} parts")
    found = _NAME.fullmatch(path.name)
    if not found or (int(found["number"]), int(found["count"])) != (number + 1, count):
        raise ValueError(
            f"is part {number + 1} of {count}, and its name is not "
            f"{_part_name('NAME', number, count)}; give all parts such names"
        )
    paths = [path.with_name(_part_name(found["stem"], part, count)) for part in range(count)]
    if missing := [part.name for part in paths if not part.exists()]:
        raise ValueError(
            f"is part {number + 1} of {count}, and {len(missing)} are missing beside it: "
            f"{quote(missing)}; fetch them"
        )
    return paths


def check_part(metadata: Mapping[str, Value], number: int, count: int) -> None:
    """ValueError where a part is not the one that its name says."""
    said = split_number(metadata, NUMBER, 0), split_number(metadata, COUNT, 0)
    if said != (number, count):
        raise ValueError(
            f"says that it is part {said[0] + 1} of {said[1]}, its name says {number + 1} of "
            f"{count}; the files are mixed up"
        )


def check_total(metadata: Mapping[str, Value], found: int) -> None:
    """ValueError where the parts together have not the tensors that the first one tells of."""
    if (said := split_number(metadata, TENSORS, found)) != found:
        raise ValueError(
            f"says that its parts have {said} tensors, and they have {found}; the files are mixed "
            "up"
        )


def split_number(metadata: Mapping[str, Value], key: str, default: int) -> int:
    """What a key of KEYS says."""
    value = metadata.get(key, np.int64(default))
    if not isinstance(value, np.integer) or value < 0:
        raise ValueError(f"{key} is {quote(value)}; a number of parts or tensors is wanted")
    return int(value)


def split_entries(number: int, count: int, tensors: int) -> dict[str, Value]:
    """The metadata that every part has, with the types that llama.cpp reads."""
    return {NUMBER: np.uint16(number), COUNT: np.uint16(count), TENSORS: np.int32(tensors)}
