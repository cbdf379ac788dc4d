"""The demo's picture: error against bits per weight, a labelled dot for each format."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from matplotlib.transforms import Bbox

from cuquant.demo.run import MODEL, Row
from cuquant.formats import Codebook, Minifloat, get_format

SUFFIXES = (".png", ".svg", ".pdf")
FAMILIES = {  # colours that stay apart for colour-blind readers (Okabe and Ito)
    "integers": "#0072B2",
    "codebooks": "#D55E00",
    "small floats": "#009E73",
    "ggml": "#CC79A7",
}
_DISTANCES = (9, 20, 32, 46, 62, 80)  # points from a dot to its label
_DIRECTIONS = 16


def family(name: str) -> str:
    """The key of FAMILIES that a format belongs to."""
    fmt = get_format(name.partition("+")[0])
    if fmt.is_blocks:
        return "ggml"
    if isinstance(fmt.codec, Minifloat):
        return "small floats"
    return "codebooks" if isinstance(fmt.codec, Codebook) else "integers"


def draw(rows: Sequence[Row], count: int, path: Path) -> None:
    """Write the picture of `rows` (without fp32) from `count` passages to `path`."""
    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [row for row in rows if row.name != "fp32" and row.distance > 0]
    for kind, colour in FAMILIES.items():
        members = [row for row in shown if family(row.name) == kind]
        if members:
            bits, errors = zip(*((r.bits_per_weight, r.distance) for r in members), strict=True)
            axes.scatter(bits, errors, s=42, color=colour, label=kind, zorder=3)
    _dress(axes, shown, count)
    figure.canvas.draw()  # the layout is known from here on
    _label(axes, shown)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lower().lstrip("."))
    path.write_bytes(buffer.getvalue())


def _dress(axes: Axes, rows: Sequence[Row], count: int) -> None:
    axes.set_yscale("log")
    axes.set_title(f"{MODEL}: what each format costs its sentence embeddings", fontsize=13)
    axes.set_xlabel("bits per weight, scales included")
    axes.set_ylabel(f"1 - cosine to the fp32 embedding, mean of {count} passages")
    axes.grid(which="major", color="0.88", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    if not rows:
        return
    bits = [row.bits_per_weight for row in rows]
    errors = [row.distance for row in rows]
    axes.set_xlim(math.floor(min(bits)) - 0.4, max(bits) + 1.0)
    axes.set_ylim(min(errors) / 2.5, max(errors) * 2.5)
    if max(bits) < 17:
        axes.xaxis.set_major_locator(MultipleLocator(1))
    axes.legend(frameon=False, loc="upper right")


def _label(axes: Axes, rows: Sequence[Row]) -> None:
    """Name the dots: each label takes the nearest place where it covers nothing."""
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[union-attr]
    scale = axes.figure.dpi / 72  # pixels per point
    points = [axes.transData.transform((row.bits_per_weight, row.distance)) for row in rows]
    taken = [_box(x, y, 5 * scale, 5 * scale) for x, y in points]
    if legend := axes.get_legend():
        taken.append(legend.get_window_extent(renderer))
    for row, (x, y) in sorted(zip(rows, points, strict=True), key=lambda pair: -pair[1][1]):
        text = axes.annotate(
            row.name, (row.bits_per_weight, row.distance), (0, 0), textcoords="offset points",
            fontsize=9, ha="center", va="center", zorder=4,
        )  # fmt: skip
        extent = text.get_window_extent(renderer)
        width, height = extent.width / 2 + 2 * scale, extent.height / 2 + scale
        dx, dy, far = _place(x, y, width, height, scale, taken, axes.get_window_extent(renderer))
        text.set_position((dx / scale, dy / scale))
        taken.append(_box(x + dx, y + dy, width, height))
        if far:
            line = {"arrowstyle": "-", "color": "0.6", "lw": 0.7, "shrinkA": 0, "shrinkB": 4}
            axes.annotate(
                "", (row.bits_per_weight, row.distance), (dx / scale, dy / scale),
                textcoords="offset points", arrowprops=line, zorder=2,
            )  # fmt: skip
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})


def _place(
    x: float,
    y: float,
    width: float,
    height: float,
    scale: float,
    taken: Sequence[Bbox],
    inside: Bbox,
) -> tuple[float, float, bool]:
    """Where a label of half-size (width, height) goes, from its dot, in pixels; is it far away?"""
    for i, distance in enumerate(_DISTANCES):
        for step in range(_DIRECTIONS):
            angle = 2 * math.pi * step / _DIRECTIONS
            # An ellipse around the label's size: beside a dot it must move further than above it.
            dx = math.cos(angle) * (width + distance * scale * 0.7)
            dy = math.sin(angle) * (height + distance * scale * 0.7)
            box = _box(x + dx, y + dy, width, height)
            within = box.x0 >= inside.x0 and box.x1 <= inside.x1
            within = within and box.y0 >= inside.y0 and box.y1 <= inside.y1
            if within and not any(box.overlaps(other) for other in taken):
                return dx, dy, i > 0
    return width + _DISTANCES[0] * scale, 0.0, False


def _box(x: float, y: float, width: float, height: float) -> Bbox:
    return Bbox.from_extents(x - width, y - height, x + width, y + height)
