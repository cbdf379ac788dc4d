"""The command `demo`: formats compared on a real sentence encoder."""

from pathlib import Path
from typing import Annotated

import typer

from cuquant.cli.options import DeviceOption, check_output, parse_device
from cuquant.cli.show import add_row, console, table
from cuquant.devices import describe


def demo(
    passages: Annotated[int, typer.Option(min=2, help="Passages of text to embed.")] = 128,
    formats: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Formats, such as int4,nf4,nf4+double_quant."),
    ] = None,
    output: Annotated[
        Path, typer.Option(dir_okay=False, help="Where the picture goes: png, svg or pdf.")
    ] = Path("cuquant-demo.png"),
    device: DeviceOption = "auto",
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw no picture.")] = False,
) -> None:
    """Compare formats on all-MiniLM-L6-v2: bits, size, embeddings and retrieval; takes a minute."""
    from cuquant.demo import run  # reads the Python documentation: only this command needs it

    if (command := run.missing(plot=not no_plot)) is not None:
        print(f"the demo needs a package that is not installed:\n  {command}")
        return
    model = run.find_model()
    assert model is not None  # for the type checker: `missing` has looked
    chosen = run.parse_formats(run.names_of(formats))
    where, reason = run.pick_device(parse_device(device))
    if not no_plot:
        from cuquant.demo.plot import SUFFIXES

        check_output(output, "--output", SUFFIXES)
    print(f"encoder: {describe(where)}{reason}")
    screen = console(stderr=True)
    with screen.status("reading the model") as status:
        rows = run.compare(
            model, chosen, count=passages, device=where,
            begin=lambda name: status.update(f"encoding with {name}"),
        )  # fmt: skip
    _print_rows(rows)
    if wrapped := run.wrapped(chosen, model.config["hidden_size"]):
        print(f"{', '.join(wrapped)}: blocks of 256 cross the ends of the model's shorter rows")
    if no_plot:
        return
    from cuquant.demo import plot

    plot.write(rows, passages, output)
    print(f"picture: {output}")


def _print_rows(rows: list) -> None:
    numbers = (
        "bits/weight", "MB", "SQNR dB", "cosine", "top-10", "quantize s", "encode s"
    )  # fmt: skip
    made = table(("format", *numbers), right=numbers)
    for row in rows:
        add_row(
            made,
            row.name,
            f"{row.bits_per_weight:.3f}",
            f"{row.megabytes:.1f}",
            f"{row.sqnr_db:.2f}",
            f"{row.cosine:.5f}",
            f"{row.overlap:.1%}",
            f"{row.quantize_seconds:.2f}",
            f"{row.encode_seconds:.2f}",
        )
    console().print(made)
