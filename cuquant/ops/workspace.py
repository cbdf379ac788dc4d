"""Memory on a GPU that calls have for as long as they run: decoded weights, sums, sorted rows of x.

A device has one piece for each library and stream that asked, which grows to what the largest call
wanted and is kept, so that calls do not allocate; `release` gives all of it back. Calls on one
stream follow each other, and so may share it. Graphs do too: those of one stream must not run at
the same time on several.

torch's graphs have memory of their own, which ends with them. What a graph of CuPy's may use stays
until `release`, which is to be called when none of them will be launched again.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cuquant import jit
from cuquant.ops.backend import Backend

BYTES = np.dtype(np.uint8)
PER_THREAD = 2  # the handle of a stream that each thread has of its own


class Place(Backend, Protocol):
    """A Backend of a library on a GPU."""

    kind: str
    device: int
    stream: int


@dataclass
class _Piece:
    array: Any
    nbytes: int
    captured: bool = False  # whether a graph may use it


_kept: dict[tuple[str, int, int, int], _Piece] = {}
_of_graphs: list[_Piece] = []  # those that were too small later
_lock = threading.RLock()


@contextmanager
def workspace(backend: Place, nbytes: int) -> Iterator[int]:
    """The address of at least so many bytes on the backend's stream, on 256 bytes.

    Meanwhile no other thread has it, or what both launch on a stream would mix.

    Raises
    ------
    RuntimeError
        Where it would have to grow while the stream is captured into a graph of CuPy's.
    """
    with _lock:
        array = _array(backend, nbytes)
        yield backend.pointer(array)


def _array(backend: Place, nbytes: int) -> Any:
    capturing = jit.is_capturing(backend.stream)
    if capturing and backend.kind == "torch":
        return backend.empty((nbytes,), BYTES)
    thread = threading.get_ident() if backend.stream == PER_THREAD else 0
    key = (backend.kind, backend.device, backend.stream, thread)
    found = _kept.get(key)
    if found is None or found.nbytes < nbytes:
        jit.refuse_capture(backend.stream, f"a workspace of {nbytes} bytes")
        if found is not None and found.captured:
            _of_graphs.append(found)
        found = None
        _kept.pop(key, None)  # its memory can be the new one's
        found = _kept[key] = _Piece(backend.empty((nbytes,), BYTES), nbytes)
    found.captured |= capturing
    return found.array


def release() -> None:
    """Give the memory of all workspaces back to the libraries that it came from."""
    with _lock:
        _kept.clear()
        _of_graphs.clear()


def _after_fork() -> None:
    """In the child: the lock may be held for ever."""
    global _lock
    _lock = threading.RLock()


with suppress(AttributeError):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)
