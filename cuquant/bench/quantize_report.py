"""Results of the benchmark of quantize and dequantize: values, JSON, rows of a table.

The JSON of a run, schema "cuquant.bench/1": that of cuquant/bench/report.py, where shape is that
of the values that go in or come out, dtype theirs, and a measurement has beside it

    operation          "quantize" or "dequantize"
    exact              whether the result of the timed calls equals the NumPy reference bit for bit
    peer               null, or a peer
    of_copy, of_read   derived: TB/s as fractions of two ceilings
"""

from dataclasses import dataclass

from cuquant.bench.report import Measured, PeerTiming, Run


@dataclass(frozen=True)
class Measurement(Measured):
    """One operation on one format, dtype and shape; see the schema above."""

    operation: str
    exact: bool
    peer: PeerTiming | None = None

    @property
    def case(self) -> str:
        return f"{self.operation} {super().case}"

    @property
    def beside(self) -> tuple[PeerTiming, ...]:
        return () if self.peer is None else (self.peer,)


@dataclass(frozen=True)
class Results(Run[Measurement]):
    """All of one run."""

    SCHEMA = "cuquant.bench/1"
    MEASURED = Measurement

    @property
    def exact(self) -> bool:
        """Whether every timed result was right."""
        return all(m.exact for m in self.measurements)

    def derived(self, m: Measurement) -> dict[str, float]:
        of_copy, of_read = m.tbps / self.ceilings.copy, m.tbps / self.ceilings.read
        return {**super().derived(m), "of_copy": of_copy, "of_read": of_read}


HEADINGS = ("format", "dtype", "shape", "operation", "us", "TB/s", "of copy", "of read", "check")
PEER_HEADINGS = ("peer", "peer us", "faster")  # added where a peer was measured
NUMBERS = ("us", "TB/s", "of copy", "of read", "peer us", "faster")


def headings(results: Results) -> tuple[str, ...]:
    """The columns of the table."""
    return HEADINGS + (PEER_HEADINGS if any(m.peer for m in results.measurements) else ())


def rows(results: Results) -> list[tuple[str, ...]]:
    """The table, as texts: one row a measurement."""
    width = len(headings(results))
    made = []
    for m in results.measurements:
        numbers = (f"{value:.2f}" for value in results.derived(m).values())
        check = "exact" if m.exact else "WRONG"
        cells = (*m.cells(), m.operation, m.time_cell(), *numbers, check, *_peer_cells(m))
        made.append((*cells, "", "", "")[:width])
    return made


def _peer_cells(m: Measurement) -> tuple[str, ...]:
    if m.peer is None:
        return ()
    if m.peer.timing is None:
        return m.peer.name, "failed", ""
    peer = m.peer.timing.microseconds
    return m.peer.name, f"{peer:.1f}", f"{peer / m.timing.microseconds:.2f}x"
