"""Results of the benchmark of products of two quantized arrays: values, JSON, rows of a table.

The JSON of a run, schema "cuquant.bench.gemm/1": that of cuquant/bench/product_report.py, where
format is the pair, "int8@int4", shape [M, N, K], dtype that of y, nbytes those of all components of
both sides and of y; of a measurement there is beside it

    tops   derived: TOP/s
"""

from dataclasses import dataclass

from cuquant.bench.product_report import Product, ProductRun, peer_cells, peer_headings


@dataclass(frozen=True)
class GemmMeasurement(Product):
    """x @ w.T of one pair of formats and one shape; see the schema above."""

    shape: tuple[int, int, int]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.shape

    @property
    def key(self) -> tuple[str, ...]:
        return (" x ".join(map(str, self.shape)),)


@dataclass(frozen=True)
class GemmResults(ProductRun[GemmMeasurement]):
    """All of one run."""

    SCHEMA = "cuquant.bench.gemm/1"
    MEASURED = GemmMeasurement
    KEYS = ("M x N x K",)

    def derived(self, m: GemmMeasurement) -> dict[str, float]:
        return {**super().derived(m), "tops": m.tflops}


NUMBERS = ("us", "TOP/s", "TB/s", "host us")


def headings(results: GemmResults) -> tuple[str, ...]:
    """The columns of the table; a peer's is its microseconds."""
    return ("x@w", "y", "M x N x K", *NUMBERS, "check", *peer_headings(results))


def rows(results: GemmResults) -> list[tuple[str, ...]]:
    """The table, as texts: one row a measurement."""
    made = []
    for m in results.measurements:
        cells = (
            *m.cells(),
            m.time_cell(),
            f"{m.tflops:.1f}",
            f"{m.tbps:.2f}",
            f"{m.host_us:.1f}",
            "right" if m.right else "WRONG",
        )
        made.append((*cells, *peer_cells(m, results)))
    return made
