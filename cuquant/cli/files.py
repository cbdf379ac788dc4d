"""Commands on model files: `quantize` and `inspect`."""

import math
import time
from contextlib import closing, nullcontext
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from cuquant.cli.options import (
    DeviceOption,
    JsonFlag,
    complete_format,
    output_file,
    parse_block_size,
    parse_device,
)
from cuquant.cli.show import (
    MAX_ROWS,
    console,
    in_bytes,
    in_seconds,
    natural_key,
    print_json,
    printable,
    shape_text,
    table,
)
from cuquant.formats import Format, get_format
from cuquant.gpu.device import describe, resolve
from cuquant.io.container.safetensors import SafetensorsReader
from cuquant.io.quantized import described
from cuquant.io.streaming import Plan, Report, quantize_file

if TYPE_CHECKING:
    from cuquant.formats.names import Levels
    from cuquant.formats.names import Nonfinite as NonfiniteName

PROGRESS_NAME = 32  # columns for the name of the tensor beside the bar


class Nonfinite(str, Enum):
    """What becomes of NaN and infinity."""

    refuse = "raise"
    propagate = "propagate"
    clamp = "clamp"


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A safetensors file.")],
    output: Annotated[  # not a Path, which forgets a slash at the end
        str,
        typer.Option("--output", "-o", metavar="OUT", path_type=str, help="May be IN itself."),
    ],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            autocompletion=complete_format,
            help="One of `cuquant formats`, with options such as nf4:32+dq or int8:row.",
        ),
    ] = "nf4",
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Quantize only tensors of such names; repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Keep tensors of such names; repeatable."),
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
    json: JsonFlag = False,
) -> None:
    """Quantize the weight matrices of a safetensors file.

    Matrices of float32, float16 and bfloat16 are quantized where that saves bytes; everything else
    is kept byte for byte.
    OUT appears when it is complete, or not at all.
    """
    target = output_file(output, source)
    where = resolve(parse_device(device))
    fmt = get_format(
        format,
        block_size=parse_block_size(block_size),
        double_quant=double_quant or None,
        levels=cast("Levels | None", levels),  # which get_format checks
    )
    started = time.perf_counter()
    reports = _run(source, target, fmt, include or (), exclude or (), nonfinite.value, where)
    seconds = time.perf_counter() - started
    reports.sort(key=lambda report: natural_key(report.name))
    if json:
        print_json(_as_json(reports, fmt, source, target, seconds, where))
    else:
        _print_reports(reports, fmt, target, seconds, where)
    if reports and all(report.reason is not None for report in reports):
        console(stderr=True).print(
            "warning: nothing was quantized; see why each tensor was kept", style="yellow",
            soft_wrap=True,
        )  # fmt: skip


def _run(
    source: Path,
    output: Path,
    fmt: Format,
    include: list[str] | tuple[()],
    exclude: list[str] | tuple[()],
    nonfinite: "NonfiniteName",
    device: str,
) -> list[Report]:
    """Quantize with a progress bar on stderr, if that is a terminal: tensor, bytes, time left."""
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(20), DownloadColumn())
    bar = Progress(*columns, TimeRemainingColumn(compact=True), console=screen, transient=True)
    task = bar.add_task(f"quantizing to {fmt}", total=None)
    names: list[str] = []  # of the tensors, in the order of the work

    def begin(plans: list[Plan]) -> None:
        names.extend(plan.info.name for plan in plans)
        bar.update(task, total=sum(plan.info.nbytes for plan in plans))
        describe_next(0)

    def describe_next(done: int) -> None:
        if done < len(names):
            name = printable(names[done])
            bar.update(task, description=escape(name[-PROGRESS_NAME:]))

    steps = quantize_file(
        source, output, fmt, include=include, exclude=exclude, nonfinite=nonfinite, device=device,
        begin=begin,
    )  # fmt: skip
    reports = []
    # Closed at once after an exception, so that no half-written file stays.
    with bar if screen.is_terminal else nullcontext(), closing(steps):
        for report in steps:
            reports.append(report)
            bar.advance(task, report.bytes_in)
            describe_next(len(reports))
    return reports


def _as_json(
    reports: list[Report], fmt: Format, source: Path, output: Path, seconds: float, device: str
) -> dict[str, Any]:
    tensors = [{**asdict(r), "bits_per_weight": r.bits_per_weight} for r in reports]
    kept = sum(report.reason is not None for report in reports)
    return {
        "source": str(source),
        "output": str(output),
        "format": str(fmt),
        "device": device,
        "seconds": seconds,
        "quantized": len(reports) - kept,
        "kept": kept,
        "bytes_in": sum(report.bytes_in for report in reports),
        "bytes_out": sum(report.bytes_out for report in reports),
        "tensors": tensors,
    }


def _print_reports(
    reports: list[Report], fmt: Format, output: Path, seconds: float, device: str
) -> None:
    numbers = ("bits/weight", "SQNR dB", "time")
    made = table(
        ("tensor", "shape", *numbers), right=numbers, drop=("time", "shape", "bits/weight")
    )
    for report in reports[:MAX_ROWS]:
        shape, spent = shape_text(report.shape), in_seconds(report.seconds)
        if report.reason is not None:
            made.add(report.name, shape, sentence=f"kept: {report.reason}", style="dim")
        else:
            bits = f"{report.bits_per_weight:.4g}"
            made.add(report.name, shape, bits, f"{report.sqnr_db:.2f}", spent)
    screen = console()
    made.print(screen)
    _print_hidden(screen, len(reports))
    kept = sum(report.reason is not None for report in reports)
    changed = len(reports) - kept
    before = sum(report.bytes_in for report in reports)
    after = sum(report.bytes_out for report in reports)
    lines = (
        f"{changed} tensor{'' if changed == 1 else 's'} quantized to {fmt}, {kept} kept",
        f"{in_bytes(before)} -> {in_bytes(after)}, {before / max(after, 1):.2f} times smaller",
        f"{in_seconds(seconds)}, {before / max(seconds, 1e-9) / 1e9:.3f} GB/s of input",
        f"computed by {describe(device)}",
        printable(str(output), limit=4096),
    )
    for line in lines:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_hidden(screen, rows: int) -> None:
    if rows > MAX_ROWS:
        screen.print(f"... and {rows - MAX_ROWS} more")


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Any safetensors file.")],
    json: JsonFlag = False,
) -> None:
    """List what a safetensors file holds; reads its header only."""
    with SafetensorsReader(file) as reader:
        rows = _rows(reader)
        metadata = reader.metadata
    rows.sort(key=lambda row: natural_key(row.name))
    stored = sum(row.nbytes for row in rows)
    elements = sum(math.prod(row.shape) for row in rows)
    total = stored * 8 / max(elements, 1)
    if json:
        arrays = [{**row._asdict(), "bits_per_element": row.bits_per_element} for row in rows]
        print_json(
            {
                "file": str(file),
                "elements": elements,
                "nbytes": stored,
                "bits_per_element": total,
                "arrays": arrays,
                "metadata": metadata,
            }
        )
        return
    numbers = ("bits/element", "bytes")
    made = table(
        ("name", "format", "shape", "dtype", *numbers), right=numbers,
        drop=("bits/element", "bytes", "dtype", "shape"),
    )  # fmt: skip
    for row in rows[:MAX_ROWS]:
        kind = ", ".join(filter(None, (row.format, row.layout)))
        bits, nbytes = f"{row.bits_per_element:.4g}", f"{row.nbytes:,}"
        made.add(row.name, kind, shape_text(row.shape), row.dtype, bits, nbytes)
    screen = console()
    made.print(screen)
    _print_hidden(screen, len(rows))
    lines = [
        f"{len(rows)} arrays, {elements:,} elements, {in_bytes(stored)}, {total:.4g} bits/element"
    ]
    lines += [
        f"metadata {printable(key)}: {printable(value, limit=60)}"
        for key, value in list(metadata.items())[:MAX_ROWS]
    ]
    for line in lines:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)


class Row(NamedTuple):
    """An array of a file; `format` is None where it is a plain one."""

    name: str
    format: str | None
    layout: str | None  # of a PackedWeight
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def bits_per_element(self) -> float:
        return self.nbytes * 8 / max(math.prod(self.shape), 1)


def _rows(reader: SafetensorsReader) -> list[Row]:
    """All arrays of a file that `cuquant.load` would read; FormatError where it would refuse."""
    arrays, plain = described(reader)
    rows = []
    for name, array in arrays.items():
        kind, dtype = str(array.format), str(array.dtype)
        rows.append(Row(name, kind, array.layout, array.shape, dtype, array.nbytes))
    infos = (reader.tensors[name] for name in plain)
    return rows + [Row(i.name, None, None, i.shape, str(i.numpy_dtype), i.nbytes) for i in infos]
