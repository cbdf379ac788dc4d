"""Commands on model files: `quantize` and `inspect`."""

import math
import time
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from cuquant.cli.options import DeviceOption, parse_block_size, parse_device
from cuquant.cli.show import (
    MAX_ROWS,
    add_row,
    console,
    in_bytes,
    in_seconds,
    printable,
    shape_text,
    table,
)
from cuquant.devices import describe, resolve
from cuquant.formats import Format, get_format
from cuquant.io.quantized import described
from cuquant.io.safetensors import SafetensorsReader
from cuquant.io.streaming import Plan, Report, quantize_file


class Nonfinite(str, Enum):
    """What becomes of NaN and infinity."""

    refuse = "raise"
    propagate = "propagate"
    clamp = "clamp"


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A safetensors file.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="OUT", dir_okay=False, help="May be IN itself."),
    ],
    format: Annotated[
        str, typer.Option("--format", "-f", help="One of `cuquant formats`.")
    ] = "nf4",
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Quantize only tensors of such names."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Keep tensors of such names.")
    ] = None,
    block_size: Annotated[
        str | None,
        typer.Option(
            metavar="N|row|tensor|RxC", help="Elements that share a scale, such as 64 or 128x128."
        ),
    ] = None,
    double_quant: Annotated[
        bool, typer.Option("--double-quant", help="Quantize float32 scales too (QLoRA).")
    ] = False,
    levels: Annotated[
        str | None, typer.Option(metavar="NAME", help="k2..k8: lloyd, normal or linear.")
    ] = None,
    device: DeviceOption = "auto",
    nonfinite: Annotated[
        Nonfinite, typer.Option(help="What becomes of NaN and infinity.")
    ] = Nonfinite.refuse,
) -> None:
    """Quantize the weight matrices of a safetensors file.

    Matrices of float32, float16 and bfloat16 are quantized, everything else is kept byte for byte.
    OUT appears when it is complete, or not at all.
    """
    where = resolve(parse_device(device))
    fmt = get_format(
        format,
        block_size=parse_block_size(block_size),
        double_quant=double_quant or None,
        levels=levels,
    )
    started = time.perf_counter()
    reports = _run(source, output, fmt, include or (), exclude or (), nonfinite.value, where)
    _print_reports(reports, fmt, output, time.perf_counter() - started, where)


def _run(
    source: Path,
    output: Path,
    fmt: Format,
    include: list[str] | tuple[()],
    exclude: list[str] | tuple[()],
    nonfinite: str,
    device: str,
) -> list[Report]:
    """Quantize with a progress bar on stderr, if that is a terminal."""
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    bar = Progress(
        *columns, TimeRemainingColumn(), console=screen, transient=True,
        disable=not screen.is_terminal,
    )  # fmt: skip
    task = bar.add_task(f"quantizing to {fmt.name}", total=None)

    def begin(plans: list[Plan]) -> None:
        bar.update(task, total=sum(plan.info.nbytes for plan in plans))

    steps = quantize_file(
        source, output, fmt, include=include, exclude=exclude, nonfinite=nonfinite, device=device,
        begin=begin,
    )  # fmt: skip
    reports = []
    # Closed at once after an exception, so that no half-written file stays.
    with bar, closing(steps):
        for report in steps:
            reports.append(report)
            bar.advance(task, report.bytes_in)
    return reports


def _print_reports(
    reports: list[Report], fmt: Format, output: Path, seconds: float, device: str
) -> None:
    numbers = ("bits/weight", "SQNR dB", "time")
    made = table(("tensor", "shape", *numbers, "kept because"), right=numbers)
    for report in reports[:MAX_ROWS]:
        shape, spent = shape_text(report.shape), in_seconds(report.seconds)
        if report.reason is not None:
            add_row(made, report.name, shape, "", "", spent, report.reason, style="dim")
        else:
            bits = f"{report.bits_per_weight:.4g}"
            add_row(made, report.name, shape, bits, f"{report.sqnr_db:.2f}", spent, "")
    screen = console()
    screen.print(made)
    _print_hidden(screen, len(reports))
    kept = sum(report.reason is not None for report in reports)
    before = sum(report.bytes_in for report in reports)
    after = sum(report.bytes_out for report in reports)
    lines = (
        f"{len(reports) - kept} tensors quantized to {fmt}, {kept} kept",
        f"{in_bytes(before)} -> {in_bytes(after)}, {before / max(after, 1):.2f} times smaller",
        f"{in_seconds(seconds)}, {before / max(seconds, 1e-9) / 1e9:.3f} GB/s of input",
        f"computed by {describe(device)}",
        printable(str(output), limit=4096),
    )
    for line in lines:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
    if kept == len(reports):
        console(stderr=True).print(
            "warning: nothing was quantized; see the last column", style="yellow", soft_wrap=True
        )


def _print_hidden(screen, rows: int) -> None:
    if rows > MAX_ROWS:
        screen.print(f"... and {rows - MAX_ROWS} more")


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Any safetensors file.")],
) -> None:
    """List what a safetensors file holds; reads its header only."""
    with SafetensorsReader(file) as reader:
        rows = _rows(reader)
        numbers = ("bits/element", "bytes")
        made = table(("name", "format", "shape", "dtype", *numbers), right=numbers)
        for name, kind, shape, dtype, nbytes in rows[:MAX_ROWS]:
            bits = nbytes * 8 / max(math.prod(shape), 1)
            add_row(made, name, kind, shape_text(shape), dtype, f"{bits:.4g}", f"{nbytes:,}")
        screen = console()
        screen.print(made)
        _print_hidden(screen, len(rows))
        stored = sum(row[4] for row in rows)
        elements = sum(math.prod(row[2]) for row in rows)
        lines = [
            f"{len(rows)} arrays, {elements:,} elements, {in_bytes(stored)}, "
            f"{stored * 8 / max(elements, 1):.4g} bits/element"
        ]
        lines += [
            f"metadata {printable(key)}: {printable(value, limit=60)}"
            for key, value in list(reader.metadata.items())[:MAX_ROWS]
        ]
        for line in lines:
            screen.print(line, markup=False, highlight=False, soft_wrap=True)


# name, format and the layout of a PackedWeight, shape, dtype, bytes
Row = tuple[str, str, tuple[int, ...], str, int]


def _rows(reader: SafetensorsReader) -> list[Row]:
    """All arrays of a file that `cuquant.load` would read; FormatError where it would refuse."""
    arrays, plain = described(reader)
    rows = []
    for name, array in arrays.items():
        layout = "" if array.layout is None else f", {array.layout}"
        kind = f"{array.format}{layout}"
        rows.append((name, kind, array.shape, str(array.dtype), array.nbytes))
    infos = (reader.tensors[name] for name in plain)
    return rows + [(i.name, "", i.shape, str(i.numpy_dtype), i.nbytes) for i in infos]
