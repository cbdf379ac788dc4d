"""Memory that calls have for as long as they run."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuquant.gpu import jit, workspace


class Stream:
    """A backend that gives memory."""

    def __init__(self, stream: int, kind: str = "cupy", device: int = 0) -> None:
        self.stream, self.kind, self.device = stream, kind, device
        self.made: list[int] = []
        self.waited: list[Any] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        self.made.append(shape[0])
        return np.empty(shape, dtype)

    def pointer(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def mark(self, event: Any) -> Any:
        event = event or SimpleNamespace(done=True, synchronize=lambda: None)
        event.stream = self.stream
        return event

    def wait_for(self, event: Any) -> None:
        self.waited.append(event.stream)


@pytest.fixture
def capturing(monkeypatch) -> set[int]:
    """The streams that are captured."""
    streams: set[int] = set()
    monkeypatch.setattr(jit, "is_capturing", lambda stream: stream in streams)
    monkeypatch.setattr(workspace, "_kept", {})
    monkeypatch.setattr(workspace, "_of_graphs", [])
    monkeypatch.setattr(workspace, "_ending", [])
    return streams


def at(backend: Any, nbytes: int) -> int:
    with workspace.workspace(backend, nbytes) as address:
        return address


def test_calls_on_a_stream_share_one_workspace_that_grows(capturing):
    own, other = Stream(1), Stream(2)
    first = at(own, 100)
    assert at(own, 60) == at(own, 100) == first and own.made == [100]
    assert at(other, 60) != first and at(Stream(1, "torch"), 60) != first
    assert at(Stream(1, device=1), 60) != first
    at(own, 300)
    assert own.made == [100, 300] and sum(map(len, workspace._kept.values())) == 4
    workspace.release()
    assert not workspace._kept
    at(own, 100)
    assert own.made == [100, 300, 100]


def test_graphs_of_cupy_keep_their_workspace(capturing):
    """It cannot grow while one is captured, and what one may use stays."""
    own = Stream(1)
    first = at(own, 100)
    capturing.add(1)
    assert at(own, 100) == first
    with pytest.raises(RuntimeError, match="workspace of 200 bytes is used for the first time"):
        at(own, 200)
    capturing.add(2)
    with pytest.raises(RuntimeError, match="workspace of 1 bytes is used for the first time"):
        at(Stream(2), 1)
    capturing.clear()
    at(own, 200)
    (kept,) = workspace._of_graphs
    assert kept.array.ctypes.data == first
    at(own, 300)  # no graph has the one of 200 bytes
    assert workspace._of_graphs == [kept]
    workspace.release()
    assert not workspace._of_graphs


def test_graphs_of_torch_have_memory_of_their_own(capturing):
    own = Stream(1, "torch")
    at(own, 100)
    capturing.add(1)
    at(own, 60), at(own, 200)
    assert own.made == [100, 60, 200] and workspace._kept["torch", 0][0].nbytes == 100


def test_streams_that_come_and_go_share_few_pieces(capturing):
    """A stream waits for the call that had a piece before, on the device; also one whose handle is
    that of a stream that has gone."""
    streams = [Stream(n) for n in range(40, 80)]
    places = {at(stream, 100) for stream in streams}
    made = [nbytes for stream in streams for nbytes in stream.made]
    assert made == [100] * workspace.MOST and len(places) == workspace.MOST
    for n, stream in enumerate(streams[workspace.MOST :]):
        assert stream.waited == [streams[n].stream]
    again = Stream(79)
    assert at(again, 100) in places and again.waited == [79]


def test_a_piece_of_a_graph_is_no_other_streams(capturing):
    own = Stream(1)
    place = at(own, 100)
    capturing.add(1)
    assert at(own, 100) == place
    capturing.clear()
    assert place not in {at(Stream(n), 100) for n in range(2, 20)}


def test_memory_of_another_stream_goes_back_when_its_last_call_is_done(capturing):
    """The library that it goes back to gives it to the stream that it came from."""
    for n in range(workspace.MOST):
        at(Stream(n), 100)
    at(Stream(9), 100)  # has that of stream 0
    (event,) = [p.event for p in workspace._kept["cupy", 0] if p.owner == (9, 0)]
    event.done = False
    at(Stream(9), 200)
    assert [piece.event for piece in workspace._ending] == [event]
    at(Stream(9), 100)
    assert workspace._ending
    event.done = True
    at(Stream(9), 100)
    assert not workspace._ending


def test_a_thread_has_a_workspace_alone(capturing):
    """Until its call has launched everything; the same thread may nest."""
    inside, done = threading.Event(), []
    with workspace.workspace(Stream(1), 10):  # type: ignore[arg-type]
        other = threading.Thread(target=lambda: (inside.set(), at(Stream(1), 10), done.append(1)))
        other.start()
        inside.wait()
        other.join(0.05)
        assert not done
    other.join()
    assert done
