"""Results of the benchmark of products: values, JSON, rows of a table.

The JSON of a run (`ProductResults.to_json`), schema "cuquant.bench.matmul/1":

    schema        "cuquant.bench.matmul/1"
    command       what was typed
    formula       how bytes, operations and the floor are counted
    machine       as in cuquant/bench/report.py
    ceilings      {copy, read, write}: TB/s
    gemm          {dtype: TFLOP/s of cuBLAS}; empty where there is none
    notes         texts, such as why a peer is absent
    measurements  a list of
        format      as it was asked for, "int4+64"
        dtype       of x and y
        shape       [N, K] of the weight
        batch       rows of x
        layout      of the weight: "fragments/1" where it was prepacked, "rows/1" as it is stored
        nbytes      weight with its scales, x and y
        timing      {microseconds, lowest, highest: of one call; graph: whether it was the replay
                    of a CUDA graph; repeats; calls}
        host_us     microseconds that the host spends in one call with out=
        right       whether the timed calls' results are within the bound of the float64 product
        peers       a list of {name, timing: as above or null, problem: why it has none, or null}
        tbps, tflops, floor_us, of_floor   derived
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from cuquant.bench.report import Ceilings, Machine, PeerTiming
from cuquant.bench.timing import Timing

SCHEMA = "cuquant.bench.matmul/1"


@dataclass(frozen=True)
class ProductMeasurement:
    """x @ w.T of one format, dtype, shape and batch; see the schema above."""

    format: str
    dtype: str
    shape: tuple[int, int]
    batch: int
    layout: str
    nbytes: int
    timing: Timing
    host_us: float
    right: bool
    peers: tuple[PeerTiming, ...] = ()

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        rows, depth = self.shape
        return 2 * self.batch * rows * depth

    @property
    def tbps(self) -> float:
        """Bytes by the formula over time, 10^12 a second."""
        return self.nbytes / self.timing.microseconds / 1e6

    @property
    def tflops(self) -> float:
        """Operations over time, 10^12 a second."""
        return self.flops / self.timing.microseconds / 1e6

    @property
    def fastest_peer(self) -> float | None:
        """Microseconds of the fastest of the peers; None where none was timed."""
        return min((p.timing.microseconds for p in self.peers if p.timing), default=None)


@dataclass(frozen=True)
class ProductResults:
    """All of one run."""

    machine: Machine
    ceilings: Ceilings
    formula: str
    measurements: tuple[ProductMeasurement, ...]
    gemm: dict[str, float] = field(default_factory=dict)
    command: str = ""
    notes: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        """Whether every timed result was right."""
        return all(m.right for m in self.measurements)

    def floor(self, m: ProductMeasurement) -> float:
        """Microseconds that no kernel can beat: of the bytes, or of the operations."""
        of_bytes = m.nbytes / self.ceilings.read / 1e6
        rate = self.gemm.get(m.dtype)
        return of_bytes if rate is None else max(of_bytes, m.flops / rate / 1e6)

    def of_floor(self, m: ProductMeasurement) -> float:
        """The floor over the time: 1 is as fast as can be."""
        return self.floor(m) / m.timing.microseconds

    def to_json(self) -> str:
        """The text of a JSON file; the schema stands at the top of this module."""
        described = {"schema": SCHEMA, **asdict(self)}
        for entry, m in zip(described["measurements"], self.measurements, strict=True):
            entry["tbps"], entry["tflops"] = m.tbps, m.tflops
            entry["floor_us"], entry["of_floor"] = self.floor(m), self.of_floor(m)
        return json.dumps(described, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "ProductResults":
        """What `to_json` wrote; ValueError for another schema."""
        described = json.loads(text)
        if not isinstance(described, dict) or described.get("schema") != SCHEMA:
            raise ValueError(f"no results of this benchmark; their schema is {SCHEMA!r}")
        return cls(
            Machine(**described["machine"]),
            Ceilings(**described["ceilings"]),
            described["formula"],
            tuple(_measurement(entry) for entry in described["measurements"]),
            described["gemm"],
            described["command"],
            tuple(described["notes"]),
        )


def _measurement(entry: dict[str, Any]) -> ProductMeasurement:
    found = {name: entry[name] for name in ProductMeasurement.__dataclass_fields__}
    peers = tuple(
        PeerTiming(p["name"], Timing(**p["timing"]) if p["timing"] else None, p["problem"])
        for p in found["peers"]
    )
    timing = Timing(**found["timing"])
    return ProductMeasurement(
        **{**found, "shape": tuple(found["shape"]), "timing": timing, "peers": peers}
    )


# ---- the table ----------------------------------------------------------------------------------

TEXTS = ("format", "dtype", "N x K")
NUMBERS = ("batch", "us", "TB/s", "TFLOP/s", "of floor", "host us")
FASTER = "faster"  # than the fastest peer


def short(name: str) -> str:
    """A peer's name without its version.

    >>> short("bitsandbytes 0.50.2")
    'bitsandbytes'
    """
    return name.partition(" ")[0]


def peer_columns(results: ProductResults) -> tuple[str, ...]:
    """The peers that were timed at least once."""
    found = (p.name for m in results.measurements for p in m.peers if p.timing)
    return tuple(dict.fromkeys(map(short, found)))


def headings(results: ProductResults) -> tuple[str, ...]:
    """The columns of the table; a peer's is its microseconds."""
    peers = peer_columns(results)
    return (*TEXTS, *NUMBERS, "check", *peers, *([FASTER] if peers else []))


def rows(results: ProductResults) -> list[tuple[str, ...]]:
    """The table, as texts: one row a measurement."""
    columns = peer_columns(results)
    made = []
    for m in results.measurements:
        cells = (
            m.format,
            m.dtype,
            "x".join(map(str, m.shape)),
            str(m.batch),
            f"{m.timing.microseconds:.1f}" + ("" if m.timing.graph else " (no graph)"),
            f"{m.tbps:.2f}",
            f"{m.tflops:.1f}",
            f"{results.of_floor(m):.2f}",
            f"{m.host_us:.1f}",
            "right" if m.right else "WRONG",
        )
        made.append((*cells, *_peer_cells(m, columns)))
    return made


def _peer_cells(m: ProductMeasurement, columns: tuple[str, ...]) -> tuple[str, ...]:
    if not columns:
        return ()
    times = {short(p.name): f"{p.timing.microseconds:.1f}" if p.timing else "-" for p in m.peers}
    fastest = m.fastest_peer
    faster = "" if fastest is None else f"{fastest / m.timing.microseconds:.2f}x"
    return (*(times.get(name, "") for name in columns), faster)


def header(results: ProductResults) -> list[str]:
    """The lines above the table."""
    rates = [f"cuBLAS {name} {rate:.0f} TFLOP/s" for name, rate in results.gemm.items()]
    peers = dict.fromkeys(p.name for m in results.measurements for p in m.peers if p.timing)
    lines = [
        str(results.machine),
        f"ceilings measured here: {', '.join([str(results.ceilings), *rates])}",
        results.formula,
        *([f"peers, us: {', '.join(peers)}"] if peers else []),
    ]
    problems = dict.fromkeys(
        f"{p.name} failed at {m.format} {m.dtype} {m.shape[0]}x{m.shape[1]}: {p.problem}"
        for m in results.measurements
        for p in m.peers
        if p.problem
    )
    return [*lines, *results.notes, *problems]
