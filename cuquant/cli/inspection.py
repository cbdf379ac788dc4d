"""The command `inspect`."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from cuquant.cli.options import JsonFlag
from cuquant.cli.show import (
    console,
    first_rows,
    in_bytes,
    natural_key,
    print_hidden,
    print_json,
    print_lines,
    printable,
    shape_text,
    table,
)
from cuquant.io.entries import Entry, Opened
from cuquant.io.files import GGUF, listed


class Row(NamedTuple):
    """An array of a file; `format` is None where it is a plain one, `error` where it is read."""

    name: str
    format: str | None
    layout: str | None  # of a PackedWeight
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    error: str | None = None

    @property
    def bits_per_element(self) -> float:
        return self.nbytes * 8 / max(math.prod(self.shape), 1)


def inspect(
    file: Annotated[
        Path, typer.Argument(metavar="PATH", help="A safetensors or GGUF file, or a folder.")
    ],
    json: JsonFlag = False,
) -> None:
    """List what a file or folder of weights holds, whoever wrote it; reads headers only."""
    with listed(file) as opened:
        rows = [_row(entry) for entry in opened.values()]
        warnings = _warnings(opened)
        metadata = _metadata(opened)
    rows.sort(key=lambda row: natural_key(row.name))
    if json:
        print_json(_as_json(opened, rows, warnings, metadata))
    else:
        _print(opened, rows, warnings, metadata)


def _row(entry: Entry) -> Row:
    kind = None if entry.format is None else str(entry.format)
    error = None if entry.error is None else str(entry.error)
    dtype = str(entry.dtype)
    return Row(entry.name, kind, entry.layout, entry.shape, dtype, entry.nbytes, error)


def _warnings(opened: Opened) -> list[str]:
    """What a reader of the file should know, each once, with the array it is said of."""
    found: dict[str, list[str]] = {}
    for entry in opened.values():
        for note in entry.notes:
            found.setdefault(note, []).append(entry.name)
    made = [opened.unread] if opened.unread else []
    for note, names in found.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        of = "" if names[0] in note else f"{names[0]}{more}: "
        made.append(f"{of}{note}")
    return made


def _metadata(opened: Opened) -> dict[str, Any]:
    """Of a GGUF file, or of the headers of others: short values as they are."""
    if opened.kind != GGUF:
        return dict(opened.header)
    return {key: _value(value) for key, value in opened.metadata.items()}


def _value(value: Any) -> Any:
    if isinstance(value, (str, bool)):
        return value
    if hasattr(value, "dtype") and not getattr(value, "shape", ()):
        return value.item()
    return f"{len(value)} values"


def _total(rows: list[Row]) -> tuple[int, int, float]:
    """Elements, bytes, and bits an element."""
    elements = sum(math.prod(row.shape) for row in rows if row.error is None)
    stored = sum(row.nbytes for row in rows)
    return elements, stored, stored * 8 / max(elements, 1)


def _as_json(
    opened: Opened, rows: list[Row], warnings: list[str], metadata: Mapping[str, Any]
) -> dict[str, Any]:
    elements, stored, bits = _total(rows)
    return {
        "file": str(opened.path),
        "kind": opened.kind,
        "architecture": opened.architecture,
        "elements": elements,
        "nbytes": stored,
        "bits_per_element": bits,
        "formats": dict(_formats(rows)),
        "arrays": [{**row._asdict(), "bits_per_element": row.bits_per_element} for row in rows],
        "warnings": warnings,
        "metadata": metadata,
    }


def _formats(rows: list[Row]) -> Counter[str]:
    """How many arrays have each format, or dtype where they are plain."""
    return Counter(row.format or row.dtype for row in rows if row.error is None)


def _print(
    opened: Opened, rows: list[Row], warnings: list[str], metadata: Mapping[str, Any]
) -> None:
    numbers = ("bits/element", "bytes")
    made = table(
        ("name", "format", "shape", "dtype", *numbers), right=numbers,
        drop=("bits/element", "bytes", "dtype", "shape"),
    )  # fmt: skip
    for row in first_rows(rows):
        if row.error is not None:
            made.add(row.name, sentence="cannot be read, see below", style="yellow")
            continue
        kind = ", ".join(filter(None, (row.format, row.layout)))
        bits, nbytes = f"{row.bits_per_element:.4g}", f"{row.nbytes:,}"
        made.add(row.name, kind, shape_text(row.shape), row.dtype, bits, nbytes)
    screen = console()
    made.print(screen)
    print_hidden(screen, len(rows))
    elements, stored, bits = _total(rows)
    what = ", ".join(filter(None, (opened.kind, opened.architecture)))
    formats = ", ".join(f"{count} {name}" for name, count in _formats(rows).most_common())
    print_lines(screen, [
        f"{len(rows)} arrays, {elements:,} elements, {in_bytes(stored)}, {bits:.4g} bits/element",
        printable(f"{what}: {formats}", limit=1000),
    ])  # fmt: skip
    shown = first_rows(list(metadata.items()))
    print_lines(
        screen, (f"metadata {printable(k)}: {printable(str(v), limit=60)}" for k, v in shown)
    )
    print_lines(
        screen, (f"warning: {printable(text, 1000)}" for text in first_rows(warnings)), "yellow"
    )
