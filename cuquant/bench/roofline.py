"""The ceilings of a machine, and the pictures of results beside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from cuquant.bench.gpu import Gpu
from cuquant.bench.matmul_peers import CupyCublas, TorchCublas
from cuquant.bench.matmul_report import ProductMeasurement, ProductResults
from cuquant.bench.product_report import peer_columns, short
from cuquant.bench.quantize import random_values
from cuquant.bench.quantize_report import Measurement, Results
from cuquant.bench.report import Ceilings
from cuquant.bench.timing import measure
from cuquant.disk import replace_picture
from cuquant.gpu.rates import Rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CEILING_BYTES = 1 << 30  # of each array: 20 times the largest cache
COLOURS = {"float32": "#4c72b0", "float16": "#dd8452", "bfloat16": "#55a868"}
STYLES = {"copy": "--", "read": "-", "write": ":"}
PANELS = ("quantize", "dequantize")
GEMM_SIZE = 8192  # of the square matrices whose product gives cuBLAS's rate
PEER_MARKERS = "sD^vP"


def measure_ceilings(gpu: Gpu, repeats: int, nbytes: int = CEILING_BYTES) -> Ceilings:
    """TB/s of copying, reading and writing `nbytes`, each in the fastest way that is known."""
    moved = {"copy": 2 * nbytes, "read": nbytes, "write": nbytes}
    rates = {}
    for name, ways in gpu.memory_calls(nbytes).items():
        fastest = min(measure(gpu.engine, [way], repeats).microseconds for way in ways)
        rates[name] = moved[name] / fastest / 1e6
    return Ceilings(**rates)


def measure_gemm(cublas: TorchCublas | CupyCublas, gpu: Gpu, dtype: str, repeats: int) -> float:
    """TFLOP/s of cuBLAS at square matrices of random numbers."""
    x = gpu.upload(random_values((GEMM_SIZE, GEMM_SIZE), dtype))
    timing = measure(cublas.engine, cublas.products([x], [gpu.copy(x)]), repeats)
    return 2 * GEMM_SIZE**3 / timing.microseconds / 1e6


def measure_rates(gpu: Gpu, cublas: TorchCublas | CupyCublas, repeats: int) -> Rates:
    """What a product's time is reckoned from."""
    read = measure_ceilings(gpu, repeats).read
    gpu.release()
    tensor, float32 = (
        measure_gemm(cublas, gpu, dtype, repeats) for dtype in ("float16", "float32")
    )
    return Rates(read * 1e6, tensor * 1e6, float32 * 1e6)


def new_figure(width: float, height: float) -> Figure:
    """An empty picture, sizes in inches, that no window shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, lines: Literal["x", "y", "both"]) -> None:
    """A pale grid behind what is drawn, and no frame above it and on its right."""
    axes.grid(axis=lines, color="0.9", zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# ---- quantize and dequantize --------------------------------------------------------------------


def plot(results: Results, path: Path) -> None:
    """Draw TB/s per format beside the ceilings: quantize on the left, dequantize on the right.

    Where several shapes were measured, the picture shows the largest.

    Parameters
    ----------
    path
        png, svg or pdf.
    """
    shown = _largest(results.measurements)
    formats = list(dict.fromkeys(m.format for m in shown))
    figure = new_figure(11, 1.8 + 0.34 * len(formats))
    for axes, operation in zip(figure.subplots(1, 2, sharey=True), PANELS, strict=True):
        _panel(axes, [m for m in shown if m.operation == operation], formats, results)
        axes.set_title(operation)
    figure.suptitle(f"{results.machine.device}: memory rate of each format")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8,
        frameon=False,
    )  # fmt: skip
    replace_picture(path, figure)


def _largest(measurements: tuple[Measurement, ...]) -> list[Measurement]:
    """Of each operation, format and dtype, the measurement that moves the most bytes."""
    found: dict[tuple[str, str, str], Measurement] = {}
    for m in measurements:
        key = m.operation, m.format, m.dtype
        if key not in found or m.nbytes > found[key].nbytes:
            found[key] = m
    return list(found.values())


def _panel(axes: Axes, shown: list[Measurement], formats: list[str], results: Results) -> None:
    dtypes = list(dict.fromkeys(m.dtype for m in results.measurements))
    height = 0.8 / max(len(dtypes), 1)
    for i, dtype in enumerate(dtypes):
        members = [m for m in shown if m.dtype == dtype]
        places = [formats.index(m.format) + (i + 0.5) * height - 0.4 for m in members]
        axes.barh(
            places, [m.tbps for m in members], height, color=COLOURS.get(dtype, "0.5"), label=dtype
        )
        peers = [
            (place, m.nbytes / m.peer.timing.microseconds / 1e6)
            for place, m in zip(places, members, strict=True)
            if m.peer and m.peer.timing
        ]
        for place, rate in peers:
            axes.plot(rate, place, marker="D", markersize=4, color="black", linestyle="")
    for name, style in STYLES.items():
        rate = getattr(results.ceilings, name)
        axes.axvline(rate, color="0.25", linestyle=style, linewidth=1, label=name)
    if any(m.peer and m.peer.timing for m in results.measurements):
        axes.plot([], [], marker="D", markersize=4, color="black", linestyle="", label="peer")
    axes.set_yticks(range(len(formats)), formats)
    axes.set_ylim(len(formats) - 0.5, -0.5)
    axes.set_xlabel("TB/s")
    tidy(axes, "x")


# ---- products -----------------------------------------------------------------------------------


def plot_products(results: ProductResults, path: Path) -> None:
    """Draw TFLOP/s over operations a byte, one panel a format and dtype, beneath the roof.

    Parameters
    ----------
    path
        png, svg or pdf.
    """
    kinds = list(dict.fromkeys((m.format, m.dtype) for m in results.measurements))
    columns = min(3, len(kinds))
    lines = -(-len(kinds) // columns)
    figure = new_figure(5.2 * columns, 0.8 + 4.2 * lines)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).reshape(-1)
    for axes, (name, dtype) in zip(panels, kinds, strict=False):
        shown = [m for m in results.measurements if (m.format, m.dtype) == (name, dtype)]
        _product_panel(axes, shown, results)
        axes.set_title(f"{name}, {dtype}")
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    figure.suptitle(f"{results.machine.device}: x @ w.T")
    handles = {  # by label: a peer need not be in every panel
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=6, frameon=False
    )
    replace_picture(path, figure)


def _product_panel(axes: Axes, shown: list[ProductMeasurement], results: ProductResults) -> None:
    peers = peer_columns(results)
    shapes = list(dict.fromkeys(m.shape for m in results.measurements))
    for shape in dict.fromkeys(m.shape for m in shown):
        points = [(m.flops / m.nbytes, m) for m in shown if m.shape == shape]
        points.sort(key=lambda point: point[0])
        label = "x".join(map(str, shape))
        axes.plot(
            [i for i, _ in points],
            [m.tflops for _, m in points],
            "o-",
            ms=4,
            label=label,
            color=f"C{shapes.index(shape) % 10}",
        )
        for intensity, m in points:
            for peer in m.peers:
                if peer.timing is None:
                    continue
                marker = PEER_MARKERS[peers.index(short(peer.name)) % len(PEER_MARKERS)]
                rate = m.flops / peer.timing.microseconds / 1e6
                axes.plot(intensity, rate, marker, ms=3.5, mfc="none", mec="0.35", mew=0.7)
    for i, name in enumerate(peers):
        marker = PEER_MARKERS[i % len(PEER_MARKERS)]
        axes.plot([], [], marker, ms=3.5, mfc="none", mec="0.35", mew=0.7, label=name)
    intensities = [m.flops / m.nbytes for m in shown]
    span = np.geomspace(min(intensities) / 2, max(intensities) * 2, 200)
    roof = span * results.ceilings.read
    rate = results.gemm.get(shown[0].dtype)
    axes.plot(
        span, roof if rate is None else np.minimum(roof, rate), color="0.2", lw=1, label="roof"
    )
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    tidy(axes, "both")
