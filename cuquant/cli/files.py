"""The command `quantize`."""

import time
from contextlib import closing
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cuquant.cli.options import (
    DeviceOption,
    JsonFlag,
    complete_format,
    output_file,
    parse_block_size,
    parse_device,
)
from cuquant.cli.progress import Bar
from cuquant.cli.show import (
    console,
    first_rows,
    in_bytes,
    in_seconds,
    natural_key,
    print_hidden,
    print_json,
    printable,
    shape_text,
    table,
)
from cuquant.formats import Format, get_format
from cuquant.gpu.device import describe, resolve
from cuquant.io.streaming import Plan, Report, quantize_file

if TYPE_CHECKING:
    from cuquant.formats.names import Levels
    from cuquant.formats.names import Nonfinite as NonfiniteName


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
            metavar="N|row|tensor|flat|RxC",
            help="Elements that share a scale, such as 64 or 128x128.",
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
    """Quantize with a progress bar."""
    bar = Bar(f"quantizing to {fmt}")

    def begin(plans: list[Plan]) -> None:
        bar.begin((plan.info.name, plan.info.nbytes) for plan in plans)

    steps = quantize_file(
        source, output, fmt, include=include, exclude=exclude, nonfinite=nonfinite, device=device,
        begin=begin,
    )  # fmt: skip
    reports = []
    # Closed at once after an exception, so that no half-written file stays.
    with bar.shown(), closing(steps):
        for report in steps:
            reports.append(report)
            bar.advance(report.bytes_in)
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
    for report in first_rows(reports):
        shape, spent = shape_text(report.shape), in_seconds(report.seconds)
        if report.reason is not None:
            made.add(report.name, shape, sentence=f"kept: {report.reason}", style="dim")
        else:
            bits = f"{report.bits_per_weight:.4g}"
            made.add(report.name, shape, bits, f"{report.sqnr_db:.2f}", spent)
    screen = console()
    made.print(screen)
    print_hidden(screen, len(reports))
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
