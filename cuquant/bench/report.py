"""What the results of all benchmarks share: values, JSON, the lines above a table.

The JSON of a run (`Run.to_json`), to which each benchmark adds what its own module tells:

    schema        names the benchmark and its version
    command       what was typed, without the files to write
    formula       how bytes are counted
    machine       {device, driver, cuda, cupy, nvrtc, cuquant: texts; l2_bytes}
    ceilings      {copy, read, write}: TB/s; a copy counts bytes read and bytes written
    notes         texts, such as why a peer is absent
    measurements  a list of
        format      as it was asked for, "nf4+dq"
        dtype       of the values
        shape       of the matrix
        nbytes      moved, by the formula
        timing      {microseconds, lowest, highest: of one call; graph: whether it was the replay
                    of a CUDA graph; repeats; calls}
        tbps        derived: TB/s

A peer is {name, timing: as above or null, problem: why it has none, or null}.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from cuquant.bench.timing import Timing


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
class Measured:
    """One measurement; see the schema above."""

    format: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    timing: Timing

    @property
    def tbps(self) -> float:
        """Bytes by the formula over time, 10^12 a second."""
        return self.nbytes / self.timing.microseconds / 1e6

    @property
    def case(self) -> str:
        """What was measured, in a few words."""
        return f"{self.format} {self.dtype}"

    @property
    def beside(self) -> tuple[PeerTiming, ...]:
        """The peers that were asked for it."""
        return ()

    def cells(self) -> tuple[str, ...]:
        """What a row of a table begins with: format, dtype and shape."""
        return self.format, self.dtype, "x".join(map(str, self.shape))

    def time_cell(self) -> str:
        """Microseconds, and whether the host's time is in them."""
        return f"{self.timing.microseconds:.1f}" + ("" if self.timing.graph else " (no graph)")


@dataclass(frozen=True)
class Comparison:
    """What runs share whose rows are read side by side: `rows`, and their JSON.

    schema and command are as above; device says what ran, with versions, and notes what was timed.
    """

    SCHEMA: ClassVar[str]

    command: str
    device: str
    notes: tuple[str, ...]

    def header(self) -> list[str]:
        """The lines above the table."""
        return [self.device, *self.notes]

    def to_json(self) -> str:
        """The text of a JSON file; the schema stands at the top of the run's module."""
        return json.dumps({"schema": self.SCHEMA, **asdict(self)}, indent=1) + "\n"


M = TypeVar("M", bound=Measured)
R = TypeVar("R", bound="Run[Any]")
T = TypeVar("T")


@dataclass(frozen=True)
class Run(Generic[M]):
    """All measurements of one run of a benchmark."""

    SCHEMA: ClassVar[str]
    MEASURED: ClassVar[type[Measured]]

    machine: Machine
    ceilings: Ceilings
    formula: str
    measurements: tuple[M, ...]
    command: str = ""
    notes: tuple[str, ...] = ()

    def derived(self, m: M) -> dict[str, float]:
        """What the JSON has of a measurement beside its fields."""
        return {"tbps": m.tbps}

    def to_json(self) -> str:
        """The text of a JSON file; the schema stands at the top of this module."""
        described = {"schema": self.SCHEMA, **asdict(self)}
        for entry, m in zip(described["measurements"], self.measurements, strict=True):
            entry |= self.derived(m)
        return json.dumps(described, indent=1) + "\n"

    @classmethod
    def from_json(cls: type[R], text: str) -> R:
        """What `to_json` wrote; ValueError for another schema."""
        described = json.loads(text)
        if not isinstance(described, dict) or described.get("schema") != cls.SCHEMA:
            raise ValueError(f"no results of this benchmark; their schema is {cls.SCHEMA!r}")
        measured = tuple(_made(cls.MEASURED, entry) for entry in described["measurements"])
        return _made(cls, {**described, "measurements": measured})

    def peer_names(self) -> list[str]:
        """The peers that were timed at least once."""
        timed = (p.name for m in self.measurements for p in m.beside if p.timing)
        return list(dict.fromkeys(timed))

    def rates(self) -> list[str]:
        """The ceilings, as texts."""
        return [str(self.ceilings)]

    def legend(self) -> list[str]:
        """What explains the table's numbers."""
        return [self.formula]

    def header(self) -> list[str]:
        """The lines above the table."""
        problems = dict.fromkeys(
            f"{p.name} failed at {m.case}: {p.problem}"
            for m in self.measurements
            for p in m.beside
            if p.problem
        )
        return [
            str(self.machine),
            f"ceilings measured here: {', '.join(self.rates())}",
            *self.legend(),
            *self.notes,
            *problems,
        ]


def _made(kind: type[T], entry: dict[str, Any]) -> T:
    """A value from its entry in a JSON file, which may hold more."""
    found = {field.name: entry[field.name] for field in fields(kind)}  # type: ignore[arg-type]
    for name in found.keys() & _READ.keys():
        found[name] = _READ[name](found[name])
    return kind(**found)


def _peer(entry: dict[str, Any] | None) -> PeerTiming | None:
    return _made(PeerTiming, entry) if entry else None


# What JSON does not give back as it was, by the name of the field.
_READ: dict[str, Callable[[Any], Any]] = {
    "machine": lambda entry: _made(Machine, entry),
    "ceilings": lambda entry: _made(Ceilings, entry),
    "notes": tuple,
    "shape": tuple,
    "timing": lambda entry: _made(Timing, entry) if entry else None,
    "peer": _peer,
    "peers": lambda entries: tuple(map(_peer, entries)),
}
