"""The demo's picture: error against bits per weight, a labelled dot for each format.

Where dots crowd, as those of 4 bits do, an inset shows them larger and holds their labels.
"""

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
_CROWD, _CROWDED = 22, 4  # dots that are nearer than so many points; so many of them get an inset
_INSET = (0.45, 0.43)  # its width and height, in parts of the picture's
_CORNERS = ((0.07, 0.08), (0.52, 0.08), (0.30, 0.53), (0.07, 0.53))  # where it may begin
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
    _scatter(axes, shown)
    _dress(axes, shown, count)
    figure.canvas.draw()  # the layout is known from here on
    crowd = _crowd(axes, shown)
    inset = _inset(axes, crowd, [row for row in shown if row not in crowd])
    if inset is not None:
        figure.canvas.draw()
        _label(inset, crowd, crowd, [])
        shown = [row for row in shown if row not in crowd]
    _label(axes, shown, [*shown, *crowd], [] if inset is None else [_outside(inset)])
    return figure


def _scatter(axes: Axes, rows: Sequence[Row], fill: float = 1.0) -> None:
    """A dot for each row; with `fill` below 1 a dot below another one is seen through it."""
    for kind, (colour, marker) in FAMILIES.items():
        members = [row for row in rows if family(row.name) == kind]
        if members:
            bits, errors = zip(*((r.bits_per_weight, r.distance) for r in members), strict=True)
            edge = "white" if fill == 1 else colour
            axes.scatter(
                bits, errors, s=44, color=(colour, fill), marker=marker, edgecolors=edge,
                linewidths=0.6 if fill == 1 else 1.4, label=kind, zorder=3,
            )  # fmt: skip


def _pixels(axes: Axes, rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Where the dots of rows lie on the picture."""
    found = (axes.transData.transform((row.bits_per_weight, row.distance)) for row in rows)
    return [(float(x), float(y)) for x, y in found]


def _crowd(axes: Axes, rows: Sequence[Row]) -> list[Row]:
    """The most dots that lie near to one another; none where they are few."""
    reach = _CROWD * axes.figure.dpi / 72
    left, largest = dict(enumerate(_pixels(axes, rows))), []
    while left:
        found = [left.popitem()]
        for _, (x, y) in found:  # grows while it is walked
            near = [i for i, (u, v) in left.items() if math.hypot(x - u, y - v) <= reach]
            found += [(i, left.pop(i)) for i in near]
        largest = max(largest, sorted(i for i, _ in found), key=len)
    return [rows[i] for i in largest] if len(largest) >= _CROWDED else []


def _inset(axes: Axes, crowd: Sequence[Row], others: Sequence[Row]) -> Axes | None:
    """Axes inside the others for crowded dots, in a corner without dots; None where none is."""
    if not crowd:
        return None
    taken = _pixels(axes, [*crowd, *others])
    legend = axes.get_legend()
    boxes = [legend.get_window_extent()] if legend else []
    for corner in _CORNERS:
        frame = Bbox.from_bounds(*corner, *_INSET)
        outside = Bbox.from_extents(frame.x0 - 0.07, frame.y0 - 0.08, frame.x1, frame.y1)
        page = outside.transformed(axes.transAxes).padded(8)
        if not any(page.contains(*dot) for dot in taken) and not any(map(page.overlaps, boxes)):
            break
    else:
        return None
    inset = axes.inset_axes(frame.bounds)
    _scatter(inset, crowd, 0.25)
    for limits, values, least in (
        (inset.set_xlim, [row.bits_per_weight for row in crowd], 0.1),
        (inset.set_ylim, [row.distance for row in crowd], 0.0),
    ):
        room = max(0.2 * (max(values) - min(values)), least)
        limits(min(values) - room, max(values) + room)
    inset.tick_params(labelsize=7, length=2)
    inset.grid(color="0.92", zorder=0)
    axes.indicate_inset_zoom(inset, edgecolor="0.5", alpha=0.6)
    return inset


def _outside(axes: Axes) -> Bbox:
    """The frame of an inset and the numbers beside it, in pixels."""
    return axes.get_tightbbox(axes.figure.canvas.get_renderer())  # type: ignore[union-attr]


def _dress(axes: Axes, rows: Sequence[Row], count: int) -> None:
    axes.set_yscale("log")
    axes.set_title(f"{MODEL}: what each format costs its sentence embeddings", fontsize=13)
    axes.set_xlabel("bits per weight, scales included")
    axes.set_ylabel(f"1 - cosine to the fp32 embedding, mean of {count} passages")
    axes.grid(which="major", color="0.88", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.text(
        0.99, 0.015, "better: further left and down", transform=axes.transAxes, ha="right",
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


def _label(axes: Axes, rows: Sequence[Row], all_rows: Sequence[Row], taken: Sequence[Bbox]) -> None:
    """Name the dots of `rows`: each label takes the nearest place where it covers and crosses
    nothing of what is `taken` and of the dots of `all_rows`.
    """
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[union-attr]
    scale = axes.figure.dpi / 72  # pixels per point
    points = _pixels(axes, rows)
    dots = [_box(x, y, 4.5 * scale, 4.5 * scale) for x, y in _pixels(axes, all_rows)]
    page = _Page(axes.get_window_extent(renderer), scale, dots, [*taken])
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
