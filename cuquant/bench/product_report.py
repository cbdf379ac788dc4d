"""What results of products share: their rates, whether they are right, and the peers' columns.

The JSON of such a run is that of cuquant/bench/report.py; a measurement has beside it

    host_us   microseconds that the host spends in one call with out=
    right     whether the timed calls' results are within the bound of the float64 product
    peers     a list of them
"""

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from cuquant.bench.report import Measured, PeerTiming, Run

FASTER = "faster"  # than the fastest peer


@dataclass(frozen=True)
class Product(Measured):
    """A product of one case; see the schema above."""

    host_us: float
    right: bool
    peers: tuple[PeerTiming, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        raise NotImplementedError

    @property
    def key(self) -> tuple[str, ...]:
        """What a row of the guide's table begins with, below the run's KEYS."""
        raise NotImplementedError

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        rows, columns, depth = self.sizes
        return 2 * rows * columns * depth

    @property
    def tflops(self) -> float:
        """Operations over time, 10^12 a second."""
        return self.flops / self.timing.microseconds / 1e6

    @property
    def case(self) -> str:
        return " ".join(self.cells())

    @property
    def beside(self) -> tuple[PeerTiming, ...]:
        return self.peers

    @property
    def fastest_peer(self) -> float | None:
        """Microseconds of the fastest of the peers; None where none was timed."""
        return min((p.timing.microseconds for p in self.peers if p.timing), default=None)


P = TypeVar("P", bound=Product)


@dataclass(frozen=True)
class ProductRun(Run[P]):
    """All products of one run."""

    KEYS: ClassVar[tuple[str, ...]]

    @property
    def right(self) -> bool:
        """Whether every timed result was right."""
        return all(m.right for m in self.measurements)

    def legend(self) -> list[str]:
        peers = self.peer_names()
        return [*super().legend(), *([f"peers, us: {', '.join(peers)}"] if peers else [])]


# ---- the columns of peers -----------------------------------------------------------------------


def short(name: str) -> str:
    """A peer's name without its version.

    >>> short("bitsandbytes 0.50.2")
    'bitsandbytes'
    """
    return name.partition(" ")[0]


def peer_columns(results: Run[Any]) -> tuple[str, ...]:
    """The peers that were timed at least once."""
    return tuple(dict.fromkeys(map(short, results.peer_names())))


def peer_headings(results: Run[Any]) -> tuple[str, ...]:
    """The last columns of a table: each peer's microseconds, and how many times as fast we are."""
    peers = peer_columns(results)
    return (*peers, FASTER) if peers else ()


def peer_cells(m: Product, results: Run[Any]) -> tuple[str, ...]:
    """A row's cells below `peer_headings`."""
    columns = peer_columns(results)
    if not columns:
        return ()
    times = {short(p.name): f"{p.timing.microseconds:.1f}" if p.timing else "-" for p in m.peers}
    fastest = m.fastest_peer
    faster = "" if fastest is None else f"{fastest / m.timing.microseconds:.2f}x"
    return (*(times.get(name, "") for name in columns), faster)
