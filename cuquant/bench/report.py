"""Results of a benchmark: values, JSON, rows of a table.

The JSON of a run (`Results.to_json`), schema "cuquant.bench/1":

    schema        "cuquant.bench/1"
    command       what was typed
    formula       how bytes are counted
    machine       {device, driver, cuda, cupy, nvrtc, cuquant: texts; l2_bytes}
    ceilings      {copy, read, write}: TB/s; a copy counts bytes read and bytes written
    notes         texts, such as why a peer is absent
    measurements  a list of
        operation   "quantize" or "dequantize"
        format      as it was asked for, "nf4+double_quant"
        dtype       of the values that go in or come out
        shape       of these values
        nbytes      moved, by the formula
        timing      {microseconds, lowest, highest: of one call; graph: whether it was the replay
                    of a CUDA graph; repeats; calls}
        exact       whether the result of the timed calls equals the NumPy reference bit for bit
        peer        null, or {name, timing: as above or null, problem: why it has none, or null}
        tbps, of_copy, of_read   derived: TB/s, and its fractions of two ceilings
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from cuquant.bench.timing import Timing

SCHEMA = "cuquant.bench/1"


@dataclass(frozen=True)
class Machine:
    """What was measured on: names and versions, and the bytes of the last cache."""

    device: str
    driver: str
    cuda: str
    cupy: str
    nvrtc: str
    cuquant: str
    l2_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.device}, driver {self.driver}, CUDA {self.cuda}, CuPy {self.cupy}, "
            f"NVRTC {self.nvrtc}, cuquant {self.cuquant}"
        )


@dataclass(frozen=True)
class Ceilings:
    """TB/s of a device copy (bytes read and written), of reading alone and of writing alone."""

    copy: float
    read: float
    write: float

    def __str__(self) -> str:
        return f"copy {self.copy:.2f} TB/s, read {self.read:.2f}, write {self.write:.2f}"


@dataclass(frozen=True)
class PeerTiming:
    """Another library at the same work; `problem` says why there is no timing."""

    name: str
    timing: Timing | None
    problem: str | None = None


@dataclass(frozen=True)
class Measurement:
    """One operation on one format, dtype and shape; see the schema above."""

    operation: str
    format: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    timing: Timing
    exact: bool
    peer: PeerTiming | None = None

    @property
    def tbps(self) -> float:
        """Bytes by the formula over time, 10^12 a second."""
        return self.nbytes / self.timing.microseconds / 1e6


@dataclass(frozen=True)
class Results:
    """All of one run."""

    machine: Machine
    ceilings: Ceilings
    formula: str
    measurements: tuple[Measurement, ...]
    command: str = ""
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether every timed result was right."""
        return all(m.exact for m in self.measurements)

    def to_json(self) -> str:
        """The text of a JSON file; the schema stands at the top of this module."""
        described = {"schema": SCHEMA, **asdict(self)}
        for entry, m in zip(described["measurements"], self.measurements, strict=True):
            entry["tbps"] = m.tbps
            entry["of_copy"] = m.tbps / self.ceilings.copy
            entry["of_read"] = m.tbps / self.ceilings.read
        return json.dumps(described, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Results":
        """What `to_json` wrote; ValueError for another schema."""
        described = json.loads(text)
        if not isinstance(described, dict) or described.get("schema") != SCHEMA:
            raise ValueError(f"no results of a benchmark; their schema is {SCHEMA!r}")
        return cls(
            Machine(**described["machine"]),
            Ceilings(**described["ceilings"]),
            described["formula"],
            tuple(_measurement(entry) for entry in described["measurements"]),
            described["command"],
            tuple(described["notes"]),
        )


def _measurement(entry: dict[str, Any]) -> Measurement:
    found = {name: entry[name] for name in Measurement.__dataclass_fields__}
    if peer := found["peer"]:
        timing = Timing(**peer["timing"]) if peer["timing"] else None
        found["peer"] = PeerTiming(peer["name"], timing, peer["problem"])
    return Measurement(
        **{**found, "shape": tuple(found["shape"]), "timing": Timing(**found["timing"])}
    )


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
        cells = (
            m.format,
            m.dtype,
            "x".join(map(str, m.shape)),
            m.operation,
            f"{m.timing.microseconds:.1f}" + ("" if m.timing.graph else " (no graph)"),
            f"{m.tbps:.2f}",
            f"{m.tbps / results.ceilings.copy:.2f}",
            f"{m.tbps / results.ceilings.read:.2f}",
            "exact" if m.exact else "WRONG",
        )
        made.append((*cells, *_peer_cells(m), "", "", "")[:width])
    return made


def _peer_cells(m: Measurement) -> tuple[str, ...]:
    if m.peer is None:
        return ()
    if m.peer.timing is None:
        return m.peer.name, "failed", ""
    peer = m.peer.timing.microseconds
    return m.peer.name, f"{peer:.1f}", f"{peer / m.timing.microseconds:.2f}x"


def header(results: Results) -> list[str]:
    """The lines above the table."""
    lines = [
        str(results.machine),
        f"ceilings measured here: {results.ceilings}",
        results.formula,
    ]
    problems = dict.fromkeys(
        f"{m.peer.name} failed at {m.operation} {m.format} {m.dtype}: {m.peer.problem}"
        for m in results.measurements
        if m.peer and m.peer.problem
    )
    return [*lines, *results.notes, *problems]
