"""What the commands `bench ...` share: the files they write, what was typed, tables, products."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import typer

from cuquant.cli.options import check_output, split_names
from cuquant.cli.show import console
from cuquant.cli.show import table as screen_table
from cuquant.disk import replace_file
from cuquant.errors import BackendUnavailable, pip_install

SUFFIXES = (".png", ".svg", ".pdf")
OUTPUTS = ("--json", "--output", "-o", "--plot")  # options that name a file to write

R = TypeVar("R", bound=Any)  # a ProductRun, which is imported where it is needed


def check_outputs(json: Path | None, plot: Path | None) -> None:
    """Refuse now what could not be written in some minutes."""
    check_output(plot, "--plot", SUFFIXES)
    check_output(json, "--json")
    if plot is not None and find_spec("matplotlib") is None:
        raise BackendUnavailable(f"--plot needs matplotlib; {pip_install('plot')}")


def typed() -> str:
    """What was typed, without the files to write: they are no part of what was measured."""
    found, words = ["cuquant"], iter(sys.argv[1:])
    for word in words:
        if word in OUTPUTS:
            next(words, None)
        elif word.partition("=")[0] not in OUTPUTS and not word.startswith("-o"):  # -oFILE
            found.append(word)
    return shlex.join(found)


def print_table(
    columns: Sequence[str],
    right: Sequence[str],
    cells_of_rows: Sequence[Sequence[str]],
    above: Sequence[str],
    drop: Sequence[str],
) -> None:
    """Lines and a table below them, whose columns `drop` go where the terminal is narrow."""
    screen = console()
    for line in above:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
    made = screen_table(columns, right=right, drop=drop)
    for cells in cells_of_rows:
        made.add(*cells, style="red" if "WRONG" in cells else "")
    made.print(screen)


# ---- products -----------------------------------------------------------------------------------


def kept(results: R, measured: Iterable[Any], json: Path | None) -> R:
    """The results with all that is measured; a file has what there is if the run is ended."""
    for one in measured:
        results = replace(results, measurements=(*results.measurements, one))
        if json is not None:
            replace_file(json, results.to_json().encode())
    return results


def print_products(
    results: Any,
    columns: Sequence[str],
    numbers: Sequence[str],
    cells: Sequence[Sequence[str]],
    last: Sequence[str],
) -> None:
    """A table of products; `last` are dropped after all other columns."""
    from cuquant.bench.product_report import FASTER, peer_columns

    peers = peer_columns(results)
    rates = [name for name in ("TFLOP/s", "TB/s") if name in columns]
    drop = ("host us", *rates[:-1], *reversed(peers), FASTER, *rates[-1:], *last)
    print_table(columns, (*numbers, *peers, FASTER), cells, results.header(), drop)


def refuse_wrong_products(results: Any) -> None:
    """Exit code 1, and why, where a result is wrong."""
    if not results.right:
        console(stderr=True).print(
            "error: results marked WRONG are off by more than rounding from the float64 product",
            style="red",
        )
        raise typer.Exit(1)


def chosen_peers(names: list[str] | None, known: Any) -> list[str]:
    """The names of peers that were typed, all of a table where none was; none is a name too."""
    from cuquant.bench.matmul_peers import check_peers

    chosen = [] if names == ["none"] else split_names(names or []) or list(known)
    check_peers(chosen, known)
    return chosen
