"""What formats cost and give on the demo's model: memory, speed, error and retrieval, one row each.

The JSON of a run, schema "cuquant.bench.formats/1":

    schema, command   as in cuquant/bench/report.py
    device            what ran, with versions
    notes             texts: what was timed, and how
    rows              a list, fp32 and fp16 first, of
        format           as it was asked for
        bits_per_weight  of the quantized matrices, scales and all
        megabytes        10^6 bytes of the whole model
        sqnr_db          over all quantized matrices; null where nothing changed
        cosine           mean, of a passage's embedding to that of fp32
        overlap          mean share of a passage's nearest passages in common with fp32
        speeds           a list of {rows: of x; microseconds: of the products of all layers}
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuquant.array.packed_weight import prepack
from cuquant.bench import matmul_peers
from cuquant.bench.gpu import Gpu
from cuquant.bench.quantize import random_values
from cuquant.bench.report import Comparison
from cuquant.bench.timing import MIN_REPEATS, measure
from cuquant.demo import run as demo
from cuquant.demo.encoder import ModelFiles, linear_weights, load_weights
from cuquant.demo.products import seconds
from cuquant.diagnosis.facts import gather
from cuquant.formats import Format
from cuquant.interop import float_dtype
from cuquant.ops.matmul.door import linear
from cuquant.ops.quantize.door import quantize

FORMATS = ("bf16", "fp8_e4m3", "int8", "int4", "int1")  # beside fp32 and fp16
ROWS = (1, 2048)  # of x: a token, and what the encoder takes at once
DENSE = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # by cuBLAS on a GPU
ON_GPU = (
    "times: of the products of all the encoder's layers, one behind the other as a CUDA graph; "
    "fp32, fp16 and bf16 by cuBLAS, other weights prepacked and with x of float16; weights that "
    "fit the L2 cache stay there, as they do in the model"
)
ON_CPU = (
    "times: of the products of all the encoder's layers on the CPU, which decodes a weight for "
    "each product and multiplies in float32: it is the reference, and what formats gain is seen "
    "on a GPU"
)

COLUMNS = (
    "memory: of the whole model, in parts of fp32's; fp32, M=1: times as fast as fp32 with one row "
    "of x; top-10: nearest passages in common with fp32"
)


@dataclass(frozen=True)
class Speed:
    """Microseconds of the products of all layers with so many rows of x."""

    rows: int
    microseconds: float


@dataclass(frozen=True)
class FormatRow:
    """One format; see the schema above."""

    format: str
    bits_per_weight: float
    megabytes: float
    sqnr_db: float | None
    cosine: float
    overlap: float
    speeds: tuple[Speed, ...]


@dataclass(frozen=True)
class FormatResults(Comparison):
    """All of one run; the first row is fp32, the second fp16."""

    SCHEMA = "cuquant.bench.formats/1"

    rows: tuple[FormatRow, ...]

    @classmethod
    def from_json(cls, text: str) -> "FormatResults":
        """What `to_json` wrote."""
        told = json.loads(text)
        rows = (
            FormatRow(**{**row, "speeds": tuple(Speed(**speed) for speed in row["speeds"])})
            for row in told["rows"]
        )
        return cls(told["command"], told["device"], tuple(told["notes"]), tuple(rows))


def compare(
    model: ModelFiles,
    formats: Mapping[str, Format],
    *,
    gpu: Gpu | None,
    device: str = "cpu",
    rows: Sequence[int] = ROWS,
    count: int = 128,
    repeats: int = 2 * MIN_REPEATS,
    begin: Callable[[str], None] = lambda text: None,
) -> list[FormatRow]:
    """Time the layers in fp32 and each format, and embed passages as the demo does.

    Parameters
    ----------
    model, formats, count, device, begin
        As of `cuquant.demo.run.compare`; fp16 is the first format.
    gpu
        What is timed there; None: the CPU.
    rows
        Of x.
    repeats
        Rounds of each timing on a GPU.
    """
    made = demo.compare(model, formats, count=count, device=device, begin=begin)
    weights = load_weights(model.weights)
    layers = [weights[name] for name in linear_weights(model.config)]
    found = []
    for row, fmt in zip(made, (None, *formats.values()), strict=True):
        begin(f"{row.name}: products")
        speeds = tuple(Speed(m, layers_time(gpu, layers, fmt, m, repeats)) for m in rows)
        noise = row.sqnr_db if math.isfinite(row.sqnr_db) else None
        found.append(
            FormatRow(
                row.name, row.bits_per_weight, row.megabytes, noise, row.cosine, row.overlap, speeds
            )
        )
    return found


def layers_time(
    gpu: Gpu | None, layers: Sequence[np.ndarray], fmt: Format | None, rows: int, repeats: int
) -> float:
    """Microseconds of x @ w.T with each of the matrices [N, K]; `fmt` None is fp32."""
    dense = DENSE.get("fp32" if fmt is None else fmt.name)
    dtype = "float32" if gpu is None else dense or "float16"
    xs = {depth: random_values((rows, depth), dtype) for depth in {w.shape[1] for w in layers}}
    if gpu is None:
        weights = [w if fmt is None else quantize(w, fmt) for w in layers]
        return 1e6 * seconds(lambda: [xs[w.shape[1]] @ w.T for w in weights], "cpu")
    there = {depth: gpu.upload(x) for depth, x in xs.items()}
    inputs = [there[w.shape[1]] for w in layers]
    if dense is not None:
        vendor = matmul_peers.cublas()
        calls = vendor.products([gpu.upload(w.astype(float_dtype(dtype))) for w in layers], inputs)
        timing = measure(vendor.engine, [lambda: [call() for call in calls]], repeats)
    else:
        assert fmt is not None  # for the type checker: fp32 is dense
        packed = [prepack(quantize(gpu.upload(w), fmt)) for w in layers]
        outs = [gpu.upload(np.empty((rows, len(w)), dtype)) for w in layers]
        operands = list(zip(inputs, packed, outs, strict=True))
        layers_of = [lambda: [linear(x, w, out=y) for x, w, y in operands]]
        timing = measure(gpu.engine, layers_of, repeats)
    gpu.release()
    return timing.microseconds


def describe_cpu() -> str:
    """The CPU as results name it."""
    own = gather(Path(__file__).parent.parent).cuquant
    return f"the CPU, {os.cpu_count()} cores, NumPy {np.__version__}, cuquant {own}"


# ---- the table ----------------------------------------------------------------------------------


MEMORY = ("format", "bits", "MB", "memory")
ERROR = ("SQNR dB", "cosine", "top-10")


def headings(results: FormatResults) -> tuple[str, ...]:
    """The columns of the table."""
    return (*MEMORY, *(name for names in speed_headings(results) for name in names), *ERROR)


def speed_headings(results: FormatResults) -> list[tuple[str, str, str]]:
    """For each number of rows its time, and how many times as fast as fp32 and as fp16 that is."""
    each = (f"M={speed.rows}" for speed in results.rows[0].speeds)
    return [(f"us, {m}", f"fp32, {m}", f"fp16, {m}") for m in each]


def rows(results: FormatResults) -> list[tuple[str, ...]]:
    """The table, as texts: one row a format."""
    whole, half, *_ = results.rows
    return [
        (
            row.format,
            f"{row.bits_per_weight:.4g}",
            f"{row.megabytes:.1f}",
            f"{row.megabytes / whole.megabytes:.1%}",
            *_speed_cells(row, whole, half),
            "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
            f"{row.cosine:.5f}",
            f"{row.overlap:.1%}",
        )
        for row in results.rows
    ]


def _speed_cells(row: FormatRow, whole: FormatRow, half: FormatRow) -> list[str]:
    cells: list[str] = []
    for own, first, second in zip(row.speeds, whole.speeds, half.speeds, strict=True):
        cells.append(f"{own.microseconds:.0f}")
        cells += [f"{other.microseconds / own.microseconds:.2f}x" for other in (first, second)]
    return cells


def chosen(names: Sequence[str]) -> dict[str, Format]:
    """fp16, and then the formats that were asked for."""
    return demo.parse_formats(dict.fromkeys(("fp16", *(names or FORMATS))))
