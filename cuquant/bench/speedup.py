"""The picture of products beside the float product: how many times faster, by rows of x."""

from collections.abc import Sequence
from pathlib import Path

from cuquant.bench.markdown import DENSE, Row
from cuquant.bench.roofline import new_figure, tidy
from cuquant.disk import replace_picture

COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7")  # Okabe and Ito
ACROSS = 3  # panels side by side; README shows the picture some 800 pixels wide


def plot_speedups(table: Sequence[Row], device: str, path: Path) -> None:
    """Draw the time of cuBLAS over the time of each column, a panel for each shape.

    Parameters
    ----------
    table
        Of `cuquant.bench.markdown.product_table`, with a column of cuBLAS.
    device
        What was measured on, for the title.
    path
        png, svg or pdf.

    Raises
    ------
    ValueError
        Where there is no column of cuBLAS.
    """
    (_, _, *names), *rows = table
    dense = next((name for name in names if name.startswith(DENSE)), None)
    if dense is None:
        raise ValueError(f"the picture is of times beside {DENSE}'s, and none was measured")
    shapes = list(dict.fromkeys(row[0] for row in rows))
    shown = [name for name in names if not name.startswith(DENSE)]
    across = min(ACROSS, len(shapes))
    down = -(-len(shapes) // across)
    figure = new_figure(1 + 3.9 * across, 0.8 + 2.8 * down)
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    panels = grid.flat[: len(shapes)]
    for axes in grid.flat[len(shapes) :]:
        axes.set_axis_off()
    width = 0.8 / len(shown)
    for axes, shape in zip(panels, shapes, strict=True):
        batches = [row for row in rows if row[0] == shape]
        for i, name in enumerate(shown):
            at, times = 2 + names.index(name), 2 + names.index(dense)
            bars = [
                (place + (i + 0.5) * width - 0.4, _number(row[times]) / _number(row[at]))
                for place, row in enumerate(batches)
                if row[at] and row[times]
            ]
            colour = COLOURS[i % len(COLOURS)]
            axes.bar([x for x, _ in bars], [y for _, y in bars], width, label=name, color=colour)
        axes.axhline(1, color="0.25", linewidth=1)
        axes.set_xticks(range(len(batches)), [row[1] for row in batches], fontsize=8)
        axes.set_xlabel("rows of x")
        axes.set_title(f"weight {shape}")
        tidy(axes, "y")
    for axes in grid[:, 0]:
        axes.set_ylabel(f"times as fast as {dense}")
    figure.suptitle(device)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    replace_picture(path, figure)


def _number(cell: str) -> float:
    """The time in a cell, which may also say that there was no graph."""
    return float(cell.partition(" ")[0])
