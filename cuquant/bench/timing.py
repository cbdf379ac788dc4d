"""Time of one call: rounds of calls over rotated operands, replayed as a CUDA graph."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MIN_REPEATS = 10
MIN_CALLS = 8  # in a round: what starts and ends a graph is shared by so many
HOST_CALLS = 32  # in a round of `host_time`

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call.

    Attributes
    ----------
    microseconds
        Median over rounds of a round's time, divided by its calls.
    lowest, highest
        Of the rounds.
    graph
        Whether a round was the replay of a CUDA graph; else the calls were made one by one, and
        the host's time is in them where it is longer.
    repeats, calls
        Rounds, and calls in each.
    """

    microseconds: float
    lowest: float
    highest: float
    graph: bool
    repeats: int
    calls: int


class Engine(Protocol):
    """A library's stream: what timing needs of it."""

    def capture(self, run: Call) -> Call:
        """`run` as a graph: what replays it; RuntimeError where it cannot be captured."""
        ...

    def elapsed(self, run: Call) -> float:
        """Microseconds that the device takes for what `run` gives it."""
        ...


def measure(engine: Engine, calls: Sequence[Call], repeats: int) -> Timing:
    """Time calls that do the same work on different operands.

    Parameters
    ----------
    engine
        Where they run.
    calls
        One for each copy of the operands; together these exceed the cache.
    repeats
        Rounds, at least MIN_REPEATS of them are made.
    """
    calls = list(calls) * -(-MIN_CALLS // len(calls))
    held: list[Any] = []

    def run() -> None:
        held[:] = [call() for call in calls]  # results stay, or the next call gets their memory

    engine.elapsed(run)  # compiles, and fills the memory pools
    try:
        replay, graph = engine.capture(run), True
    except RuntimeError:
        replay, graph = run, False
    engine.elapsed(replay)
    rounds = [engine.elapsed(replay) / len(calls) for _ in range(max(repeats, MIN_REPEATS))]
    return Timing(
        statistics.median(rounds), min(rounds), max(rounds), graph, len(rounds), len(calls)
    )


def host_time(engine: Engine, calls: Sequence[Call], repeats: int) -> float:
    """Microseconds that the host spends in one call, which does not wait for the device.

    The median over rounds of HOST_CALLS calls, between which the device catches up: one that is
    too far behind would make the host wait.
    """
    calls = [calls[i % len(calls)] for i in range(HOST_CALLS)]
    took: list[float] = []

    def run() -> None:
        start = time.perf_counter()
        for call in calls:
            call()
        took.append((time.perf_counter() - start) * 1e6 / len(calls))

    for _ in range(max(repeats, MIN_REPEATS)):
        engine.elapsed(run)
    return statistics.median(took)


def copies(l2_bytes: int, nbytes: int) -> int:
    """Copies of operands of `nbytes` that together exceed three times the cache; two at least.

    >>> copies(50_000_000, 40_000_000), copies(50_000_000, 10**9)
    (4, 2)
    """
    return max(2, 3 * l2_bytes // max(nbytes, 1) + 1)
