"""What was made for arrays, by their identity, for as long as all of them live.

Nothing that is remembered may depend on the numbers in the arrays: these are overwritten in place,
by means that nobody is told of.
"""

import weakref
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

Ids = tuple[int, ...]
T = TypeVar("T")


class Remembered(Generic[T]):
    """A dict by arrays: an entry goes with the first of its arrays that does.

    An array has one weak reference, however many entries it is part of.
    """

    def __init__(self) -> None:
        self._entries: dict[Ids, T] = {}
        self._of: dict[int, tuple[weakref.ref, set[Ids]]] = {}  # the entries of each array

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, arrays: Iterable[Any]) -> T | None:
        return self._entries.get(tuple(map(id, arrays)))

    def put(self, arrays: Iterable[Any], value: T) -> T:
        """Remember `value`, which must not hold the arrays; what is there already stays."""
        parts = list(arrays)
        ids = tuple(map(id, parts))
        for part in parts:
            known = self._of.get(id(part)) or self._of.setdefault(id(part), self._watched(part))
            known[1].add(ids)
        return self._entries.setdefault(ids, value)

    def _watched(self, part: Any) -> tuple[weakref.ref, set[Ids]]:
        key = id(part)
        return weakref.ref(part, lambda _: self._forget(key)), set()

    def _forget(self, key: int) -> None:
        """Called once an array is gone, in any thread and at any time."""
        _, entries = self._of.pop(key, (None, ()))
        for ids in tuple(entries):
            self._entries.pop(ids, None)
            for other in ids:
                known = self._of.get(other)
                if known is None:
                    continue
                known[1].discard(ids)
                if not known[1]:
                    self._of.pop(other, None)
