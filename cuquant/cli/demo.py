"""The command `demo`: formats compared on a real sentence encoder."""

from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from cuquant.cli.options import (
    DeviceOption,
    FormatsOption,
    check_output,
    parse_device,
)
from cuquant.cli.show import console, in_bytes, shape_text, table
from cuquant.gpu.device import describe, resolve


def demo(
    passages: Annotated[int, typer.Option(min=2, help="Passages of text to embed.")] = 128,
    formats: FormatsOption = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            dir_okay=False,
            help="Where the picture goes: png, svg or pdf.",
        ),
    ] = Path("cuquant-demo.png"),
    device: DeviceOption = "auto",
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw no picture.")] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Multiply with the matrices of a GGUF file or any checkpoint, as they lie.",
        ),
    ] = None,
) -> None:
    """Compare formats on all-MiniLM-L6-v2: bits, size, embeddings and retrieval; takes a minute.

    With --from, compare the products of the matrices of a file instead.
    """
    if source is not None:
        if formats:
            raise typer.BadParameter(
                "--from shows the formats that the file has; leave out one of the two",
                param_hint="--format",
            )
        _show_products(source, resolve(parse_device(device)))
        return
    from cuquant.demo import run  # reads the Python documentation: few commands need it

    model = find_model(plot=not no_plot)
    chosen = run.parse_formats(run.names_of(",".join(formats) if formats else None))
    where, reason = run.pick_device(parse_device(device))
    if not no_plot:
        from cuquant.demo.plot import SUFFIXES

        check_output(output, "--output", SUFFIXES)
    print(f"encoder: {describe(where)}{reason}")
    screen = console(stderr=True)
    done = count()  # the model as it is, before the formats
    with screen.status("reading the model") as status:

        def begin(name: str) -> None:
            line = f"encoding with {name}"
            if number := next(done):
                line = f"{number} of {len(chosen)}: {line}"
            if screen.is_terminal:
                status.update(line)
            else:  # it takes a minute: a log shall say what it does
                screen.print(line, markup=False, highlight=False)

        rows = run.compare(model, chosen, count=passages, device=where, begin=begin)
    _print_rows(rows)
    if wrapped := run.wrapped(chosen, model.config["hidden_size"]):
        print(f"{', '.join(wrapped)}: blocks of 256 cross the ends of the model's shorter rows")
    if no_plot:
        return
    from cuquant.demo import plot

    plot.write(rows, passages, output)
    print(f"picture: {output}")


def find_model(plot: bool) -> Any:
    """The demo's model; exit code 1, and what installs it, where a package is missing."""
    from cuquant.demo import run

    if (command := run.missing(plot=plot)) is not None:
        typer.echo(f"the demo needs a package that is not installed:\n  {command}", err=True)
        raise typer.Exit(1)
    return run.find_model()


def _print_rows(rows: list) -> None:
    numbers = (
        "bits/weight", "MB", "SQNR dB", "cosine", "top-10", "quantize s", "encode s"
    )  # fmt: skip
    made = table(
        ("format", *numbers), right=numbers, drop=("encode s", "quantize s", "cosine", "MB")
    )
    for row in rows:
        made.add(
            row.name,
            f"{row.bits_per_weight:.3f}",
            f"{row.megabytes:.1f}",
            f"{row.sqnr_db:.2f}",
            f"{row.cosine:.5f}",
            f"{row.overlap:.1%}",
            f"{row.quantize_seconds:.2f}",
            f"{row.encode_seconds:.2f}",
        )
    made.print(console())


def _show_products(source: Path, device: str) -> None:
    """A product with a matrix of each format and shape of a file."""
    from cuquant.demo.products import products

    print(f"products by {describe(device)}")
    numbers = ("count", "bits/weight", "MB", "SQNR dB", "as it lies", "decoded")
    made = table(("format", "shape", *numbers), right=numbers, drop=("decoded", "MB", "shape"))
    screen, total = console(stderr=True), 0
    with screen.status("reading the file") as status:
        for row in products(source, device=device, begin=status.update):
            total += row.nbytes
            made.add(
                str(row.format),
                shape_text(row.shape),
                str(row.count),
                f"{row.bits_per_weight:.4g}",
                f"{row.nbytes / 1e6:.1f}",
                f"{row.sqnr_db:.1f}",
                f"{row.seconds * 1e6:,.0f} us",
                f"{row.decoded_seconds * 1e6:,.0f} us",
            )
    made.print(console())
    print(f"{in_bytes(total)} of quantized matrices; times of x @ w.T with one row of x")
    if device == "cpu":
        print("the CPU decodes w for each product, and has no error; kernels of a GPU have one")
