"""Printing: consoles, tables, and names that nobody vouches for."""

import os
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 10_000  # columns: a table that goes to a file or to grep is not folded
MAX_ROWS = 10_000  # of a table; a file may hold a million tensors


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


def table(columns: Sequence[str], *, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns in `right` hold numbers."""
    made = Table(box=box.SIMPLE, pad_edge=False, highlight=False)
    for name in columns:
        if name in right:
            made.add_column(Text(name), justify="right", no_wrap=True)
        else:
            made.add_column(Text(name), overflow="fold")
    return made


def add_row(made: Table, *cells: str, style: str = "") -> None:
    """Append a row of cells that are printed as they are, whatever rich would read in them."""
    made.add_row(*(Text(printable(cell), style=style) for cell in cells))


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
