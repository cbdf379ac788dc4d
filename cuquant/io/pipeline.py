"""Tensors through a few slots: one is read while another computes and a third comes back.

A slot is a piece of staging memory and whatever computes on it. A thread fills slots from the file;
the caller's thread starts them and takes what they made, in the order of the jobs.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np

from cuquant.errors import clipped
from cuquant.formats import Format


@dataclass(frozen=True)
class Job:
    """A tensor to quantize.

    Attributes
    ----------
    name, shape, dtype, nbytes
        Of the tensor.
    format
        Of the result.
    read
        Fills uint8 [nbytes] with its bytes; called on the reading thread.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int
    format: Format
    read: Callable[[np.ndarray], None]


class Made(NamedTuple):
    """What a slot made: the components, which it overwrites with the next job, and their SQNR."""

    parts: dict[str, np.ndarray]
    sqnr_db: float


class Slot(Protocol):
    """Memory for one tensor and what computes on it."""

    staging: np.ndarray  # uint8, as long as the largest tensor and its components

    def start(self, job: Job) -> None:
        """Begin to quantize what lies in `staging`; may return before that is done."""
        ...

    def finish(self) -> Made:
        """Wait for what was started."""
        ...

    def close(self) -> None:
        """Wait until nothing touches `staging`; does not raise."""
        ...


class Pipeline:
    """Jobs through slots.

    At most len(slots) tensors are in memory. With three slots, job i + 1 is read while i computes
    and i - 1 is with the caller.

    Parameters
    ----------
    slots
        At least one; closed when `run` ends, however it ends.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._depth = max(1, len(slots) - 1)  # jobs that are started; the last slot is being read
        self._free: SimpleQueue[Slot | None] = SimpleQueue()
        self._ready: SimpleQueue[tuple[Job, Slot] | BaseException | None] = SimpleQueue()
        self._stopped = threading.Event()

    def run(self, jobs: Iterable[Job]) -> Generator[tuple[Job, Made], None, None]:
        """Yield what became of each job, in order; once only.

        What is yielded is valid until the next one is asked for. An error comes after the results
        of the jobs before it; a ValueError of a slot names the tensor.
        """
        for slot in self._slots:
            self._free.put(slot)
        reader = threading.Thread(target=self._read, args=(jobs,), name="cuquant reader")
        reader.daemon = True  # an exit that nothing else stops shall not wait for a slow disk
        reader.start()
        try:
            yield from self._compute()
        finally:
            self._stopped.set()
            self._free.put(None)
            reader.join()
            for slot in self._slots:
                slot.close()

    def _read(self, jobs: Iterable[Job]) -> None:
        try:
            for job in jobs:
                slot = self._free.get()
                if slot is None or self._stopped.is_set():
                    return
                job.read(slot.staging[: job.nbytes])
                self._ready.put((job, slot))
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)

    def _compute(self) -> Generator[tuple[Job, Made], None, None]:
        started: deque[tuple[Job, Slot]] = deque()
        failure: BaseException | None = None
        while (arrived := self._ready.get()) is not None:
            if isinstance(arrived, BaseException):
                failure = arrived
                break
            job, slot = arrived
            try:
                slot.start(job)
            except ValueError as problem:
                failure = ValueError(f"{clipped(job.name, 200)}: {problem}")
                failure.__cause__ = problem
                break
            started.append(arrived)
            if len(started) >= self._depth:
                yield from self._finish(started)
        while started:
            yield from self._finish(started)
        if failure is not None:
            raise failure

    def _finish(self, started: deque[tuple[Job, Slot]]) -> Generator[tuple[Job, Made], None, None]:
        job, slot = started.popleft()
        yield job, slot.finish()
        self._free.put(slot)
