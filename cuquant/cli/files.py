"""The command `quantize`."""

import time
from contextlib import closing
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from cuquant.cli.conversion import Kind, carry_out
from cuquant.cli.options import (
    ByNameOption,
    DeviceOption,
    DryRunFlag,
    ExcludeOption,
    IncludeOption,
    JsonFlag,
    ResumeFlag,
    output_file,
    parse_block_size,
    parse_device,
    parse_formats,
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
from cuquant.gpu.device import describe, resolve
from cuquant.io.container.safetensors import SafetensorsReader
from cuquant.io.conversion.door import Conversion
from cuquant.io.schema import own
from cuquant.io.selection import Selection
from cuquant.io.streaming import Plan, Report, plan, quantize_file

if TYPE_CHECKING:
    from cuquant.formats.names import Nonfinite as NonfiniteName


class Nonfinite(str, Enum):
    """What becomes of NaN and infinity."""

    refuse = "raise"
    propagate = "propagate"
    clamp = "clamp"


def quantize(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN", help="A safetensors file; with --to also GGUF or a folder."),
    ],
    output: Annotated[  # not a Path, which forgets a slash at the end
        str,
        typer.Option("--output", "-o", metavar="OUT", path_type=str, help="May be IN itself."),
    ],
    format: ByNameOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
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
    to: Annotated[
        Kind | None,  # type: ignore[valid-type]
        typer.Option(help="Write a checkpoint of that kind; of a folder: cuquant."),
    ] = None,
    device: DeviceOption = "auto",
    nonfinite: Annotated[
        Nonfinite, typer.Option(help="What becomes of NaN and infinity.")
    ] = Nonfinite.refuse,
    dry_run: DryRunFlag = False,
    resume: ResumeFlag = False,
    json: JsonFlag = False,
) -> None:
    """Quantize the weight matrices of a safetensors file, or of a whole checkpoint.

    Matrices of float32, float16 and bfloat16 are quantized where that saves bytes, to nf4 unless
    --format says otherwise; everything else is kept byte for byte. OUT appears when it is complete,
    or not at all.
    """
    options = {
        "block_size": parse_block_size(block_size),
        "double_quant": double_quant or None,
        "levels": levels,
    }
    formats = parse_formats(format or ["nf4"], **options)
    globs = {"include": include or (), "exclude": exclude or ()}
    where = parse_device(device)
    if to is not None or source.is_dir():
        make = partial(
            Conversion, source, output, to.value if to else own.KIND, formats, **globs,
            nonfinite=nonfinite.value, resume=resume, device=where,
        )  # fmt: skip
        carry_out(make, dry_run, json)
        return
    _quantize_file(
        source, output_file(output, source), Selection.of(formats, **globs), nonfinite.value,
        resolve(where), dry_run, json,
    )  # fmt: skip


def _quantize_file(
    source: Path,
    target: Path,
    chosen: Selection,
    nonfinite: "NonfiniteName",
    device: str,
    dry_run: bool,
    json: bool,
) -> None:
    started = time.perf_counter()
    if dry_run:
        with SafetensorsReader(source) as reader:
            reports = [_expected(step) for step in plan(reader, chosen)]
    else:
        reports = _run(source, target, chosen, nonfinite, device)
    seconds = time.perf_counter() - started
    reports.sort(key=lambda report: natural_key(report.name))
    told = Told(reports, chosen, source, target, seconds, device, dry_run)
    if json:
        print_json(_as_json(told))
    else:
        _print_reports(told)
    if reports and all(report.reason is not None for report in reports):
        console(stderr=True).print(
            "warning: nothing was quantized; see why each tensor was kept", style="yellow",
            soft_wrap=True,
        )  # fmt: skip


def _expected(step: Plan) -> Report:
    info = step.info
    return Report(info.name, info.shape, step.reason, info.nbytes, step.bytes_out, None, 0)


class Told(NamedTuple):
    """What is said of a file."""

    reports: list[Report]
    chosen: Selection
    source: Path
    target: Path
    seconds: float
    device: str
    is_dry_run: bool

    @property
    def kept(self) -> int:
        """Tensors that are not quantized."""
        return sum(report.reason is not None for report in self.reports)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Before and after."""
        return (
            sum(report.bytes_in for report in self.reports),
            sum(report.bytes_out for report in self.reports),
        )


def _run(
    source: Path, output: Path, chosen: Selection, nonfinite: "NonfiniteName", device: str
) -> list[Report]:
    """Quantize with a progress bar."""
    bar = Bar(f"quantizing to {chosen}")

    def begin(plans: list[Plan]) -> None:
        bar.begin((plan.info.name, plan.info.nbytes) for plan in plans)

    steps = quantize_file(source, output, chosen, nonfinite=nonfinite, device=device, begin=begin)
    reports = []
    # Closed at once after an exception, so that no half-written file stays.
    with bar.shown(), closing(steps):
        for report in steps:
            reports.append(report)
            bar.advance(report.bytes_in)
    return reports


def _as_json(told: Told) -> dict[str, Any]:
    before, after = told.nbytes
    return {
        "source": str(told.source),
        "output": str(told.target),
        "format": str(told.chosen),
        "device": told.device,
        "is_dry_run": told.is_dry_run,
        "seconds": told.seconds,
        "quantized": len(told.reports) - told.kept,
        "kept": told.kept,
        "bytes_in": before,
        "bytes_out": after,
        "tensors": [{**asdict(r), "bits_per_weight": r.bits_per_weight} for r in told.reports],
    }


def _print_reports(told: Told) -> None:
    numbers = ("bits/weight", "SQNR dB", "time")
    made = table(
        ("tensor", "shape", *numbers), right=numbers, drop=("time", "shape", "bits/weight")
    )
    for report in first_rows(told.reports):
        shape, spent = shape_text(report.shape), in_seconds(report.seconds)
        if report.reason is not None:
            made.add(report.name, shape, sentence=f"kept: {report.reason}", style="dim")
            continue
        bits = f"{report.bits_per_weight:.4g}"
        sqnr = "" if report.sqnr_db is None else f"{report.sqnr_db:.2f}"
        made.add(report.name, shape, bits, sqnr, "" if told.is_dry_run else spent)
    screen = console()
    made.print(screen)
    print_hidden(screen, len(told.reports))
    changed, (before, after) = len(told.reports) - told.kept, told.nbytes
    rate = f"{before / max(told.seconds, 1e-9) / 1e9:.3f} GB/s of input"
    done = (
        f"{in_seconds(told.seconds)}, {rate}",
        f"computed by {describe(told.device)}",
        printable(str(told.target), limit=4096),
    )
    lines = (
        f"{changed} tensor{'' if changed == 1 else 's'} quantized to {told.chosen}, "
        f"{told.kept} kept",
        f"{in_bytes(before)} -> {in_bytes(after)}, {before / max(after, 1):.2f} times smaller",
        *(("nothing was written",) if told.is_dry_run else done),
    )
    for line in lines:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
