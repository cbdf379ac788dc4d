"""Pieces of the messages about files: what a file says of itself is never repeated at length."""

import itertools
from collections.abc import Mapping
from typing import Any

from cuquant.errors import clipped


def quote(value: object) -> str:
    """What a header says, as a message repeats it: never at full length.

    >>> len(quote("a" * 1000))
    200
    """
    return clipped(value, 200)


def known(tensors: Mapping[str, Any]) -> str:
    """The first names of the tensors that a file has.

    >>> known({"w": 0})
    "it has 1: ['w']"
    """
    first = list(itertools.islice(tensors, 5))
    return f"it has {len(tensors)}: {quote(first)}" + (" and more" if len(tensors) > 5 else "")
