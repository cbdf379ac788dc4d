"""Printing: consoles, tables, JSON, and names that nobody vouches for."""

import json
import math
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console

PIPE_WIDTH = 10_000  # columns: a table that goes to a file or to grep is not folded
MAX_ROWS = 10_000  # of a table; a file may hold a million tensors
MAX_NAME = 200  # columns
MIN_NAME, MIN_SENTENCE = 16, 20  # columns of the terminal: what a name or a sentence may shrink to
LEAST_PART, LEAST_WIDE = 3, 5  # of a name, between dots: two characters, which may be wide, and "…"
GAP = "  "  # between columns


def console(stderr: bool = False) -> Console:
    """A console for stdout or stderr, as wide as the terminal or wide enough for any table."""
    made = Console(stderr=stderr, emoji=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made = Console(stderr=stderr, emoji=False, width=PIPE_WIDTH)
    return made


def printable(text: str, limit: int = 200) -> str:
    r"""`text` without characters that move the cursor, hide others or end the line.

    >>> printable("red\x1b[31m\n")
    'red\\x1b[31m\\n'
    """
    cut = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def abbreviated(text: str, columns: int) -> str:
    """A text in at most so many columns: what is too long loses its middle.

    >>> abbreviated("model.layers.0.mlp.up_proj.weight", 21)
    'model.laye…roj.weight'
    """
    if cell_len(text) <= columns:
        return text
    return f"{_start(text, columns // 2)}…{_end(text, columns - columns // 2 - 1)}"


@dataclass(frozen=True)
class Table:
    """Rows under headings; where it is too wide, columns are left out before a name is cut.

    Attributes
    ----------
    columns
        Headings. The first column holds names, which are never folded, nor made to look alike.
    right
        Columns of numbers.
    drop
        Columns that are left out while the table is too wide, in this order.
    rows
        Cells, a sentence that takes the place of the last ones, and a style.
    """

    columns: tuple[str, ...]
    right: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    rows: list[tuple[tuple[str, ...], str, str]] = field(default_factory=list)

    def add(self, *cells: str, sentence: str = "", style: str = "") -> None:
        """Append a row of cells that are printed as they are, whatever rich would read in them."""
        name = printable(cells[0], limit=len(cells[0]))  # cut when all names are known
        self.rows.append(((name, *map(printable, cells[1:])), printable(sentence), style))

    def print(self, screen: Console) -> None:
        """Print what fits; a last line says what was left out."""
        widths = [cell_len(name) for name in self.columns]
        for cells, _, _ in self.rows:
            widths[: len(cells)] = map(max, widths, map(cell_len, cells))
        widths[0] = min(widths[0], MAX_NAME)
        shown, left_out = list(range(len(widths))), []
        for name in self.drop:
            if _total(widths, shown) < screen.width:
                break
            if name in self.columns:
                shown.remove(self.columns.index(name))
                left_out.append(name)
        over = max(_total(widths, shown) + 1 - screen.width, 0)
        if over and widths[0] - over >= MIN_NAME:
            widths[0] -= over
            left_out.append("the middles of long names")
        names = _fitting((cells[0] for cells, _, _ in self.rows), widths[0])
        lines = [(self._line(self.columns, widths, shown), ""), ("-" * _total(widths, shown), "")]
        for cells, sentence, style in self.rows:
            line = self._line((names[cells[0]], *cells[1:]), widths, shown)
            lines += [(text, style) for text in _beside(line, sentence, screen.width - 1)]
        if left_out:
            lines.append((f"left out at {screen.width} columns: {', '.join(left_out)}", "dim"))
        for line, style in lines:
            screen.print(f" {line}", style=style, markup=False, highlight=False, soft_wrap=True)

    def _line(self, cells: Sequence[str], widths: Sequence[int], shown: Sequence[int]) -> str:
        """The cells that are shown, side by side; a row may have fewer of them than the table."""
        parts = []
        for i in (i for i in shown if i < len(cells)):
            space = " " * (widths[i] - cell_len(cells[i]))
            right = self.columns[i] in self.right
            parts.append(space + cells[i] if right else cells[i] + space)
        return GAP.join(parts).rstrip() if len(cells) == len(self.columns) else GAP.join(parts)


def table(columns: Sequence[str], *, right: Sequence[str] = (), drop: Sequence[str] = ()) -> Table:
    """An empty table; see `Table`."""
    return Table(tuple(columns), tuple(right), tuple(drop))


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + len(GAP) * (len(shown) - 1)


def _fitting(names: Iterable[str], room: int) -> dict[str, str]:
    """Names in `room` columns: parts of long ones lose their middles, first those that all of them
    have; numbers stay whole, and names that differ look different.

    >>> _fitting(["model.layers.10.mlp.up_proj.weight"], 28).popitem()[1]
    'mo…l.la…s.10.mlp.up…oj.we…ht'
    """
    made = {name: name for name in names}
    long = [name for name in made if cell_len(name) > room]
    everywhere = set.intersection(*(set(name.split(".")) for name in long)) if long else set()
    made.update((name, _shortened(name, room, everywhere)) for name in long)
    both = [name for alike in _alike(made) for name in alike]
    for count, name in enumerate(both, 1):
        middle = f"…#{count}…"
        start = room // 4
        end = _end(name, max(room - start - len(middle), 1))
        made[name] = f"{_start(name, start)}{middle}{end}"
    return made


def _shortened(name: str, room: int, everywhere: set[str]) -> str:
    """A name whose parts, between dots, have lost as much of their middles as it takes."""
    parts = name.split(".")
    sizes = [cell_len(part) for part in parts]
    over = sum(sizes) + len(sizes) - 1 - room
    least = [LEAST_PART if part.isascii() else LEAST_WIDE for part in parts]
    able = [i for i, part in enumerate(parts) if not part.isdecimal() and sizes[i] > least[i]]
    while over > 0 and able:
        i = max(able, key=lambda i: (parts[i] in everywhere, sizes[i]))
        sizes[i], over = sizes[i] - 1, over - 1
        if sizes[i] == least[i]:
            able.remove(i)
    if over > 0:
        return abbreviated(name, room)
    return ".".join(abbreviated(part, size) for part, size in zip(parts, sizes, strict=True))


def _alike(made: dict[str, str]) -> list[list[str]]:
    """Names that are shown alike."""
    groups: dict[str, list[str]] = {}
    for name, shown in made.items():
        groups.setdefault(shown, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _start(text: str, columns: int) -> str:
    return set_cell_size(text, min(columns, cell_len(text)))


def _end(text: str, columns: int) -> str:
    return _start(text[::-1], columns)[::-1]


def _beside(line: str, sentence: str, width: int) -> list[str]:
    """A line and a sentence beside it, or below it where little room is left."""
    if not sentence:
        return [line]
    room = width - cell_len(line) - len(GAP)
    if room >= min(MIN_SENTENCE, len(sentence)):
        first, *others = textwrap.wrap(sentence, room)
        indent = " " * (cell_len(line) + len(GAP))
        return [f"{line}{GAP}{first}", *(indent + other for other in others)]
    return [line.rstrip(), *textwrap.wrap(sentence, max(width, 20), initial_indent="    ")]


def first_rows(rows: Sequence[Any]) -> Sequence[Any]:
    """What a table shows of many rows."""
    return rows[:MAX_ROWS]


def print_hidden(screen: Console, rows: int) -> None:
    """How many rows `first_rows` left out."""
    if rows > MAX_ROWS:
        screen.print(f"... and {rows - MAX_ROWS} more")


def print_lines(screen: Console, lines: Iterable[str], style: str = "") -> None:
    """Lines as they are, whatever rich would read in them."""
    for line in lines:
        screen.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def natural_key(name: str) -> list[str | tuple[int, str]]:
    """A key for sorting that has layer.2 before layer.10.

    >>> sorted(["layer.10", "layer.2"], key=natural_key)
    ['layer.2', 'layer.10']
    """
    parts = re.split(r"([0-9]+)", name)  # texts and numbers by turns; a number may have any length
    return [
        (len(part.lstrip("0")), part.lstrip("0")) if i % 2 else part for i, part in enumerate(parts)
    ]


def print_json(document: object) -> None:
    """Print one JSON document, which has null for NaN and infinity."""
    print(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def in_bytes(count: int) -> str:
    """A number of bytes in decimal units.

    >>> in_bytes(999), in_bytes(91_000_000)
    ('999 B', '91.0 MB')
    """
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def in_seconds(seconds: float) -> str:
    """A duration.

    >>> in_seconds(0.0123), in_seconds(3.21)
    ('12 ms', '3.2 s')
    """
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as it is read aloud; "scalar" for none.

    >>> shape_text((30522, 384))
    '30522 x 384'
    """
    return " x ".join(str(size) for size in shape) or "scalar"
