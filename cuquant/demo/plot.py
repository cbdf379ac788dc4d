"""The demo's picture: error against bits per weight, a labelled dot for each format."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from matplotlib.transforms import Bbox

from cuquant.demo.run import MODEL, Row
from cuquant.disk import replace_picture
from cuquant.formats import Codebook, Minifloat, get_format

SUFFIXES = (".png", ".svg", ".pdf")
FAMILIES = {  # colours that colour-blind readers can tell apart (Okabe and Ito), and shapes
    "integers": ("#0072B2", "o"),
    "codebooks": ("#D55E00", "s"),
    "small floats": ("#009E73", "^"),
    "ggml": ("#CC79A7", "D"),
}
_DISTANCES = (7, 16, 26, 38, 52, 68, 90, 120)  # points from a dot to the edge of its label
_DIRECTIONS = 24
_ALONG = tuple(i / 24 for i in range(2, 24))  # spots on the line from a dot to its label


def family(name: str) -> str:
    """The key of FAMILIES that a format belongs to."""
    fmt = get_format(name)
    if fmt.is_blocks:
        return "ggml"
    if isinstance(fmt.codec, Minifloat):
        return "small floats"
    return "codebooks" if isinstance(fmt.codec, Codebook) else "integers"


def write(rows: Sequence[Row], count: int, path: Path) -> None:
    """Draw `rows`, from `count` passages, and write the picture to `path`."""
    replace_picture(path, draw(rows, count))


def draw(rows: Sequence[Row], count: int) -> Figure:
    """The picture of all rows but fp32, which has no error to show."""
    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [row for row in rows if row.name != "fp32" and row.distance > 0]
    for kind, (colour, marker) in FAMILIES.items():
        members = [row for row in shown if family(row.name) == kind]
        if members:
            bits, errors = zip(*((r.bits_per_weight, r.distance) for r in members), strict=True)
            axes.scatter(
                bits, errors, s=44, color=colour, marker=marker, edgecolors="white",
                linewidths=0.6, label=kind, zorder=3,
            )  # fmt: skip
    _dress(axes, shown, count)
    figure.canvas.draw()  # the layout is known from here on
    _label(axes, shown)
    return figure


def _dress(axes: Axes, rows: Sequence[Row], count: int) -> None:
    axes.set_yscale("log")
    axes.set_title(f"{MODEL}: what each format costs its sentence embeddings", fontsize=13)
    axes.set_xlabel("bits per weight, scales included")
    axes.set_ylabel(f"1 - cosine to the fp32 embedding, mean of {count} passages")
    axes.grid(which="major", color="0.88", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.text(
        0.01, 0.015, "towards this corner: fewer bits, smaller error", transform=axes.transAxes,
        fontsize=9, color="0.45",
    )  # fmt: skip
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
    """Name the dots: each label takes the nearest place where it covers and crosses nothing."""
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[union-attr]
    scale = axes.figure.dpi / 72  # pixels per point
    points = [axes.transData.transform((row.bits_per_weight, row.distance)) for row in rows]
    dots = [_box(x, y, 4.5 * scale, 4.5 * scale) for x, y in points]
    page = _Page(axes.get_window_extent(renderer), scale, dots)
    if legend := axes.get_legend():
        page.labels.append(legend.get_window_extent(renderer))
    for row, (x, y) in zip(rows, points, strict=True):
        at = (row.bits_per_weight, row.distance)
        text = axes.annotate(
            row.name, at, (0, 0), textcoords="offset points", fontsize=9, ha="center",
            va="center", zorder=4,
        )  # fmt: skip
        extent = text.get_window_extent(renderer)
        width, height = extent.width / 2 + 2 * scale, extent.height / 2 + scale
        dx, dy, far = page.place(x, y, width, height)
        text.set_position((dx / scale, dy / scale))
        if far:
            line = {"arrowstyle": "-", "color": "0.55", "lw": 0.7, "shrinkA": 0, "shrinkB": 3}
            axes.annotate(
                "", at, (dx / scale, dy / scale), textcoords="offset points", arrowprops=line,
                zorder=2,
            )  # fmt: skip
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})


@dataclass
class _Page:
    """What is taken on the picture, in pixels."""

    inside: Bbox
    scale: float  # pixels per point
    dots: list[Bbox]
    labels: list[Bbox] = field(default_factory=list)
    lines: list[Bbox] = field(default_factory=list)  # spots on them

    def place(self, x: float, y: float, width: float, height: float) -> tuple[float, float, bool]:
        """Where the label of the dot at (x, y) goes, seen from it; does it need a line?

        `width` and `height` are half of the label's. Where every place has a line across another,
        that is allowed; where none is free at all, the label lies beside its dot.
        """
        found = width + _DISTANCES[0] * self.scale, 0.0, False
        steps = itertools.product((False, True), range(len(_DISTANCES)), range(_DIRECTIONS))
        for crossing, i, step in steps:
            angle = 2 * math.pi * step / _DIRECTIONS
            # An ellipse around the label: beside a dot it must move further than above it.
            dx = math.cos(angle) * (width + _DISTANCES[i] * self.scale)
            dy = math.sin(angle) * (height + _DISTANCES[i] * self.scale)
            is_free = self._is_free(_box(x + dx, y + dy, width, height))
            if is_free and (crossing or self._is_clear(x, y, dx, dy)):
                found = dx, dy, i > 0
                break
        dx, dy, _ = found
        self.labels.append(_box(x + dx, y + dy, width, height))
        self.lines += _line(x, y, dx, dy)
        return found

    def _is_free(self, box: Bbox) -> bool:
        """Whether a label may lie here: inside, and on no dot, label or line."""
        if box.x0 < self.inside.x0 or box.x1 > self.inside.x1:
            return False
        if box.y0 < self.inside.y0 or box.y1 > self.inside.y1:
            return False
        return not any(box.overlaps(other) for other in (*self.dots, *self.labels, *self.lines))

    def _is_clear(self, x: float, y: float, dx: float, dy: float) -> bool:
        """Whether the line from a dot to its label meets no other dot, label or line."""
        others = [dot for dot in self.dots if not dot.contains(x, y)]
        others += [*self.labels, *self.lines]
        return not any(spot.overlaps(other) for spot in _line(x, y, dx, dy) for other in others)


def _line(x: float, y: float, dx: float, dy: float) -> list[Bbox]:
    return [_box(x + dx * t, y + dy * t, 1, 1) for t in _ALONG]


def _box(x: float, y: float, width: float, height: float) -> Bbox:
    return Bbox.from_extents(x - width, y - height, x + width, y + height)
