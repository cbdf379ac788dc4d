"""Memory on a GPU that calls have for as long as they run: decoded weights, sums, sorted rows of x.

A device has at most MOST pieces for each library, which grow to what the largest calls wanted and
are kept, so that calls do not allocate; `release` gives all of them back. A call takes the piece
that its stream had last, or the one that was not used for longest, and waits on the device for the
call that had it before: streams come and go, and their handles come again.

torch's graphs have memory of their own, which ends with them. What a graph of CuPy's may use stays
that stream's until `release`, which is to be called when none of them will be launched again; those
of one stream must not run at the same time on several.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cuquant.gpu import jit
from cuquant.gpu.backend import Backend

BYTES = np.dtype(np.uint8)
PER_THREAD = 2  # the handle of a stream that each thread has of its own
MOST = 4  # pieces of a library on a device, beside those that graphs use


class Place(Backend, Protocol):
    """A Backend of a library on a GPU."""

    kind: str
    device: int
    stream: int

    def mark(self, event: Any) -> Any:
        """An event at the end of the stream's work until now: `event` itself, or a new one."""
        ...

    def wait_for(self, event: Any) -> None:
        """Let what the stream is given from now on wait for an event."""
        ...


@dataclass
class _Piece:
    made_on: tuple[int, int]  # the stream and thread that its memory came from
    owner: tuple[int, int]  # those that had it last
    array: Any
    nbytes: int
    event: Any = None  # the end of the call that had it last
    captured: bool = False  # whether a graph may use it


# By library and device, from the one that was not used for longest to the last one.
_kept: dict[tuple[str, int], list[_Piece]] = {}
_of_graphs: list[_Piece] = []  # those that were too small later
_ending: list[_Piece] = []  # that are given back once the last call that had them is done
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
        capturing = jit.is_capturing(backend.stream)
        if capturing and backend.kind == "torch":
            yield backend.pointer(backend.empty((nbytes,), BYTES))
            return
        piece = _piece(backend, nbytes, capturing)
        try:
            yield backend.pointer(piece.array)
        finally:
            if not capturing:
                piece.event = backend.mark(piece.event)


def _piece(backend: Place, nbytes: int, capturing: bool) -> _Piece:
    _ending[:] = [piece for piece in _ending if not piece.event.done]
    pieces = _kept.setdefault((backend.kind, backend.device), [])
    thread = threading.get_ident() if backend.stream == PER_THREAD else 0
    owner = backend.stream, thread
    found = next((piece for piece in pieces if piece.owner == owner), None)
    if found is None and not capturing:
        found = _another(pieces, nbytes)
    if found is None or found.nbytes < nbytes:
        jit.refuse_capture(backend.stream, f"a workspace of {nbytes} bytes")
        if found is not None:
            pieces.remove(found)
            if found.captured:
                _of_graphs.append(found)
            elif found.owner != found.made_on and found.event is not None:
                _ending.append(found)  # its library knows nothing of the stream that had it last
        found = None  # its memory can be the new one's
        found = _Piece(owner, owner, backend.empty((nbytes,), BYTES), nbytes)
    else:
        pieces.remove(found)
        if found.event is not None and not capturing:
            backend.wait_for(found.event)
    found.owner, found.captured = owner, found.captured or capturing
    pieces.append(found)
    return found


def _another(pieces: list[_Piece], nbytes: int) -> _Piece | None:
    """Another stream's piece, where there may be no more: one that is large enough, if any is."""
    free = [piece for piece in pieces if not piece.captured]
    if len(free) < MOST:
        return None
    return next((piece for piece in free if piece.nbytes >= nbytes), free[0])


def release() -> None:
    """Give the memory of all workspaces back to the libraries that it came from.

    It waits for the calls that have it.
    """
    with _lock:
        for piece in [piece for pieces in _kept.values() for piece in pieces] + _ending:
            if piece.event is not None:
                piece.event.synchronize()
        for known in (_kept, _of_graphs, _ending):
            known.clear()


def _after_fork() -> None:
    """In the child: the lock may be held for ever."""
    global _lock
    _lock = threading.RLock()


with suppress(AttributeError):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)
