"""Results of the benchmark of products: values, JSON, rows of a table.

The JSON of a run, schema "cuquant.bench.matmul/1": that of cuquant/bench/product_report.py, where
shape is [N, K] of the weight, dtype that of x and y, nbytes those of the weight with its scales, of
x and of y; beside it there are

    gemm          {dtype: TFLOP/s of cuBLAS}; empty where there is none

and of a measurement

    batch       rows of x
    layout      of the weight: "fragments/1" where it was prepacked, "rows/1" as it is stored
    tflops, floor_us, of_floor   derived
"""

from dataclasses import dataclass, field

from cuquant.bench.product_report import Product, ProductRun, peer_cells, peer_headings


@dataclass(frozen=True)
class ProductMeasurement(Product):
    """x @ w.T of one format, dtype, shape and batch; see the schema above."""

    batch: int
    layout: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        rows, depth = self.shape
        return self.batch, rows, depth

    @property
    def key(self) -> tuple[str, ...]:
        return " x ".join(map(str, self.shape)), str(self.batch)


@dataclass(frozen=True)
class ProductResults(ProductRun[ProductMeasurement]):
    """All of one run."""

    SCHEMA = "cuquant.bench.matmul/1"
    MEASURED = ProductMeasurement
    KEYS = ("N x K", "M")

    gemm: dict[str, float] = field(default_factory=dict)

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


# ---- the table ----------------------------------------------------------------------------------

TEXTS = ("format", "dtype", "N x K")
NUMBERS = ("batch", "us", "TB/s", "TFLOP/s", "of floor", "host us")


def headings(results: ProductResults) -> tuple[str, ...]:
    """The columns of the table; a peer's is its microseconds."""
    return (*TEXTS, *NUMBERS, "check", *peer_headings(results))


def rows(results: ProductResults) -> list[tuple[str, ...]]:
    """The table, as texts: one row a measurement."""
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
        made.append((*cells, *peer_cells(m, results)))
    return made
