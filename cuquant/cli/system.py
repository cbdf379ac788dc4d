"""Commands on the installation: `formats`, `doctor` and `cache`."""

from dataclasses import astuple
from typing import Annotated

import typer

from cuquant import diagnosis
from cuquant.cli.show import add_row, console, in_bytes, table
from cuquant.formats.table import HEADINGS, format_rows, format_table

_STYLES = {"ok": "", "missing": "dim", "problem": "red"}


def formats(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table that README holds.")
    ] = False,
) -> None:
    """List all formats."""
    if markdown:
        print(format_table(), end="")
        return
    made = table(HEADINGS, right=("bits per element",))
    for row in format_rows():
        add_row(made, *astuple(row))
    console().print(made)


def doctor() -> None:
    """Say what is installed, what does not fit together and what to type; exit code 1 if so."""
    found = diagnosis.doctor()
    screen = console()
    for check, line in found.lines():
        screen.print(
            line, style=_STYLES[check.status], markup=False, highlight=False, soft_wrap=True
        )
    if not found.ok:
        raise typer.Exit(1)


def cache(
    size: Annotated[bool, typer.Option("--size", help="Print how much it holds.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove the compiled kernels.")] = False,
) -> None:
    """Show the folder of compiled kernels; only files that cuquant made are counted or removed."""
    if clear:
        files, nbytes = diagnosis.clear_cache()
        print(f"removed {files} files, {in_bytes(nbytes)}")
        return
    if not size:
        print(diagnosis.cache_folder())
        return
    files, nbytes = diagnosis.cache_size()
    print(f"{files} files, {in_bytes(nbytes)}")
