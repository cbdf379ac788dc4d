"""Results of the benchmark of products: values, JSON, rows of a table.

The JSON of a run, schema "cuquant.bench.matmul/1": that of cuquant/bench/report.py, where shape is
[N, K] of the weight, dtype that of x and y, nbytes those of the weight with its scales, of x and of
y; beside it there are

    gemm          {dtype: TFLOP/s of cuBLAS}; empty where there is none

and of a measurement

    batch       rows of x
    layout      of the weight: "fragments/1" where it was prepacked, "rows/1" as it is stored
    host_us     microseconds that the host spends in one call with out=
    right       whether the timed calls' results are within the bound of the float64 product
    peers       a list of them
    tflops, floor_us, of_floor   derived
"""

from dataclasses import dataclass, field

from cuquant.bench.report import Measured, PeerTiming, Run


@dataclass(frozen=True)
class ProductMeasurement(Measured):
    """x @ w.T of one format, dtype, shape and batch; see the schema above."""

    shape: tuple[int, int]
    batch: int
    layout: str
    host_us: float
    right: bool
    peers: tuple[PeerTiming, ...] = ()

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        rows, depth = self.shape
        return 2 * self.batch * rows * depth

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


@dataclass(frozen=True)
class ProductResults(Run[ProductMeasurement]):
    """All of one run."""

    SCHEMA = "cuquant.bench.matmul/1"
    MEASURED = ProductMeasurement

    gemm: dict[str, float] = field(default_factory=dict)

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

    def derived(self, m: ProductMeasurement) -> dict[str, float]:
        floor, fraction = self.floor(m), self.of_floor(m)
        return {**super().derived(m), "tflops": m.tflops, "floor_us": floor, "of_floor": fraction}

    def rates(self) -> list[str]:
        vendor = [f"cuBLAS {name} {rate:.0f} TFLOP/s" for name, rate in self.gemm.items()]
        return [*super().rates(), *vendor]

    def legend(self) -> list[str]:
        peers = self.peer_names()
        return [*super().legend(), *([f"peers, us: {', '.join(peers)}"] if peers else [])]


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
    return tuple(dict.fromkeys(map(short, results.peer_names())))


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
            *m.cells(),
            str(m.batch),
            m.time_cell(),
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
