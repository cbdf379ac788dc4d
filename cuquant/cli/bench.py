"""The commands `bench ...`: how fast operations are on this GPU."""

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from cuquant.cli.options import check_output, parse_shape, split_names
from cuquant.cli.show import add_row, console, table
from cuquant.errors import BackendUnavailable

SUFFIXES = (".png", ".svg", ".pdf")

bench = typer.Typer(
    name="bench", no_args_is_help=True, help="Measure operations on this machine's GPU."
)


@bench.callback()
def _group() -> None:
    """Without it, typer would make the only command the group."""


@bench.command()
def quantize(
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--formats",
            "-f",
            metavar="A,B",
            help="Formats, such as nf4, nf4+double_quant, int8+tensor; or all.",
        ),
    ] = None,
    dtypes: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help="float16, bfloat16, float32.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="ROWSxK", help="Matrices; 4096x14336 and 16384x16384 if not given."),
    ] = None,
    size: Annotated[
        float | None, typer.Option(metavar="MB", min=0.001, help="Instead: 10^6 bytes of values.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write the results.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Draw them: png, svg or pdf."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=10, help="Rounds of which the median counts.")] = 20,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Time bitsandbytes beside it.")
    ] = True,
) -> None:
    """Time quantize and dequantize, and check what was timed; exit code 1 if it is wrong."""
    from cuquant.bench import quantize as cases
    from cuquant.bench import roofline
    from cuquant.bench.gpu import CupyGpu
    from cuquant.bench.peers import find_peers
    from cuquant.bench.report import Results

    if shape and size is not None:
        raise typer.BadParameter("pass --shape or --size, not both", param_hint="--size")
    check_output(plot, "--plot", SUFFIXES)
    check_output(json, "--json")
    if plot is not None and find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs matplotlib; pip install 'cuquant[plot]'")
    shapes = (
        int(size * 1e6) if size is not None else tuple(map(parse_shape, split_names(shape or [])))
    )
    settings = cases.Settings(
        cases.parse_formats(split_names(formats or []) or cases.FORMATS),
        cases.check_dtypes(split_names(dtypes or []) or cases.DTYPES),
        shapes or cases.SHAPES,
        repeats,
    )
    gpu = CupyGpu()
    beside, notes = find_peers() if peers else ([], [])
    with console(stderr=True).status("measuring the memory") as status:
        ceilings = roofline.measure_ceilings(gpu, repeats)
        gpu.release()
        measured = tuple(cases.run(gpu, settings, beside, status.update))
    results = Results(
        gpu.machine, ceilings, cases.FORMULA, measured, shlex.join(["cuquant", *sys.argv[1:]]),
        tuple(notes),
    )  # fmt: skip
    _print(results)
    if json is not None:
        json.write_text(results.to_json(), encoding="utf-8")
    if plot is not None:
        roofline.plot(results, plot)
    if not results.exact:
        console(stderr=True).print(
            "error: results marked WRONG differ from the NumPy reference", style="red"
        )
        raise typer.Exit(1)


def _print(results) -> None:
    from cuquant.bench.report import NUMBERS, header, headings, rows

    screen = console()
    for line in header(results):
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
    made = table(headings(results), right=NUMBERS)
    for cells in rows(results):
        add_row(made, *cells, style="red" if "WRONG" in cells else "")
    screen.print(made)
