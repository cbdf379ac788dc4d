"""A bar on stderr while a command works: the tensor, bytes done, rate and time left."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cuquant.cli.show import console, printable

NAME = 32  # columns for the name of the tensor beside the bar


class Bar:
    """Progress over tensors in the order of the work; shown where stderr is a terminal."""

    def __init__(self, doing: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(20), DownloadColumn())
        rate = (TransferSpeedColumn(), TimeRemainingColumn(compact=True))
        self._screen = console(stderr=True)
        self._bar = Progress(*columns, *rate, console=self._screen, transient=True)
        self._task = self._bar.add_task(doing, total=None)
        self._names: list[str] = []
        self._done = 0

    def begin(self, tensors: Iterable[tuple[str, int]]) -> None:
        """Names and bytes of the tensors."""
        listed = list(tensors)
        self._names = [name for name, _ in listed]
        self._bar.update(self._task, total=sum(nbytes for _, nbytes in listed))
        self._describe()
        self._bar.refresh()

    def advance(self, nbytes: int) -> None:
        """One tensor is done."""
        self._done += 1
        self._bar.advance(self._task, nbytes)
        self._describe()

    def _describe(self) -> None:
        if self._done < len(self._names):
            name = printable(self._names[self._done])
            self._bar.update(self._task, description=escape(name[-NAME:]))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While the work runs."""
        if not self._screen.is_terminal:
            yield
            return
        with self._bar:
            yield
