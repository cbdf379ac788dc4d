"""Which tensors lie in one file, where several files hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def by_size(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Items in their order, by files of at most `most` bytes or of one item; at least one file.

    >>> by_size([3, 3, 9, 1], int, 6)
    [[3, 3], [9], [1]]
    """
    files: list[list[T]] = [[]]
    left = most
    for item in items:
        size = nbytes(item)
        if files[-1] and size > left:
            files.append([])
            left = most
        files[-1].append(item)
        left -= size
    return files
