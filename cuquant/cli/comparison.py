"""The command `compare`, and its page with a plot."""

from contextlib import closing
from dataclasses import asdict
from html import escape
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from cuquant.cli.options import JsonFlag, check_output
from cuquant.cli.progress import Bar
from cuquant.cli.show import (
    console,
    first_rows,
    natural_key,
    print_hidden,
    print_json,
    print_lines,
    printable,
    shape_text,
    table,
)
from cuquant.disk import replace_file
from cuquant.io.comparison import Comparing, Comparison, Difference

COLUMNS = ("array", "shape", "a", "b", "bits a", "bits b", "SQNR dB", "max error", "cosine")
WIDTH, HEIGHT, LEFT, BOTTOM = 900, 320, 50, 24  # of the plot, px
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2", "#b58900", "#2aa198", "#6c757d")


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The true values.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What is compared with them.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with a plot, too.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Compare the arrays of two checkpoints of any kinds: error and bits, the worst first.

    Names and rows of a GGUF file are those of transformers where the other one is no GGUF file.
    """
    check_output(html, "--html", (".html", ".htm"))
    bar = Bar("comparing")
    with Comparing(a, b) as work:
        bar.begin(work.pairs)
        with bar.shown(), closing(work.run()) as done:  # type: ignore[type-var]
            for nbytes in done:
                bar.advance(nbytes)
        found = work.result()
    if html is not None:
        replace_file(html, page(found, str(a), str(b)).encode())
    if json:
        print_json({"a": str(a), "b": str(b), "is_equal": found.is_equal, **asdict(found)})
        return
    _print(found)


def _cells(found: Difference) -> tuple[str, ...]:
    return (
        found.name, shape_text(found.shape), found.format_a, found.format_b,
        f"{found.bits_a:.4g}", f"{found.bits_b:.4g}", f"{found.sqnr_db:.2f}",
        f"{found.max_error:.3g}", f"{found.cosine:.6f}",
    )  # fmt: skip


def _print(found: Comparison) -> None:
    made = table(
        COLUMNS, right=COLUMNS[4:], drop=("shape", "cosine", "bits a", "bits b", "a", "max error")
    )
    for row in first_rows(found.arrays):
        made.add(*_cells(row))
    screen = console()
    made.print(screen)
    print_hidden(screen, len(found.arrays))
    lines = [f"{printable(name)}: only in {side}" for side, names in
             (("A", found.only_a), ("B", found.only_b)) for name in first_rows(names)]  # fmt: skip
    lines += [f"{printable(name)}: {printable(why)}" for name, why in found.left_out.items()]
    equal = sum(row.max_error == 0 for row in found.arrays)
    lines.append(f"{len(found.arrays)} arrays compared, {equal} of them equal")
    print_lines(screen, lines)


# ---- the page -----------------------------------------------------------------------------------


def page(found: Comparison, a: str, b: str) -> str:
    """A comparison as one HTML file that needs no other."""
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(printable(cell))}</td>' for cell in _cells(row))}</tr>\n"
        for row in found.arrays
    )
    lists = [("Only in A", found.only_a), ("Only in B", found.only_b),
             ("Left out", tuple(f"{k}: {v}" for k, v in found.left_out.items()))]  # fmt: skip
    others = "".join(f"<h2>{title}</h2>{_list(names)}" for title, names in lists if names)
    title = f"{printable(a)} and {printable(b)}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: 2px 10px; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
</style></head><body>
<h1>{escape(title)}</h1>
<p>SQNR in dB of each array of B against that of A, in the order of their names; 6 dB more halve the
error. Arrays that are equal are not drawn.</p>
{plot(found.arrays)}
<table><thead><tr>{head}</tr></thead><tbody>
{rows}</tbody></table>
{others}
</body></html>
"""


def _list(names: tuple[str, ...]) -> str:
    items = (f"<li>{escape(printable(name, 500))}</li>" for name in names)
    return f"<ul>{''.join(items)}</ul>"


def plot(arrays: tuple[Difference, ...]) -> str:
    """A dot for each array, coloured by b's format, as SVG."""
    drawn = [row for row in arrays if isfinite(row.sqnr_db)]
    drawn.sort(key=lambda row: natural_key(row.name))
    low = min((row.sqnr_db for row in drawn), default=0.0)
    high = max((row.sqnr_db for row in drawn), default=1.0)
    span = max(high - low, 1.0)
    colours = {kind: COLOURS[i % len(COLOURS)]
               for i, kind in enumerate(dict.fromkeys(row.format_b for row in drawn))}  # fmt: skip

    def y(value: float) -> float:
        return (HEIGHT - BOTTOM) - (value - low) / span * (HEIGHT - BOTTOM - 20)

    parts = []
    for i in range(5):
        value = low + span * i / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="#ddd"/><text x="{LEFT - 6}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{value:.1f}</text>'
        )
    for i, row in enumerate(drawn):
        x = LEFT + 8 + (WIDTH - LEFT - 16) * (i + 0.5) / len(drawn)
        label = escape(f"{printable(row.name)}: {row.sqnr_db:.2f} dB, {row.format_b}")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y(row.sqnr_db):.1f}" r="3.5" '
            f'fill="{colours[row.format_b]}"><title>{label}</title></circle>'
        )
    for i, (kind, colour) in enumerate(colours.items()):
        at = LEFT + 10 + 120 * i
        parts.append(f'<text x="{at}" y="{HEIGHT - 4}" fill="{colour}">{escape(kind)}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" font-size="12" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
