"""The ceilings of a machine's memory, and the picture of results beside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cuquant.bench.gpu import Gpu
from cuquant.bench.report import Ceilings, Measurement, Results
from cuquant.bench.timing import measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CEILING_BYTES = 1 << 30  # of each array: 20 times the largest cache
COLOURS = {"float32": "#4c72b0", "float16": "#dd8452", "bfloat16": "#55a868"}
STYLES = {"copy": "--", "read": "-", "write": ":"}
PANELS = ("quantize", "dequantize")


def measure_ceilings(gpu: Gpu, repeats: int, nbytes: int = CEILING_BYTES) -> Ceilings:
    """TB/s of copying, reading and writing `nbytes`, each in the fastest way that is known."""
    moved = {"copy": 2 * nbytes, "read": nbytes, "write": nbytes}
    rates = {}
    for name, ways in gpu.memory_calls(nbytes).items():
        fastest = min(measure(gpu.engine, [way], repeats).microseconds for way in ways)
        rates[name] = moved[name] / fastest / 1e6
    return Ceilings(**rates)


def plot(results: Results, path: Path) -> None:
    """Draw TB/s per format beside the ceilings: quantize on the left, dequantize on the right.

    Where several shapes were measured, the picture shows the largest.

    Parameters
    ----------
    path
        png, svg or pdf.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = _largest(results.measurements)
    formats = list(dict.fromkeys(m.format for m in shown))
    figure = Figure(figsize=(11, 1.8 + 0.34 * len(formats)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, operation in zip(figure.subplots(1, 2, sharey=True), PANELS, strict=True):
        _panel(axes, [m for m in shown if m.operation == operation], formats, results)
        axes.set_title(operation)
    figure.suptitle(f"{results.machine.device}: memory rate of each format")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8,
        frameon=False,
    )  # fmt: skip
    figure.savefig(path)


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
    axes.grid(axis="x", color="0.9", zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
