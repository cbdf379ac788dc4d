"""The command `convert`."""

import time
from collections.abc import Callable
from contextlib import closing
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cuquant.cli.options import (
    ByNameOption,
    DeviceOption,
    DryRunFlag,
    JsonFlag,
    ResumeFlag,
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
    print_lines,
    printable,
    shape_text,
    table,
)
from cuquant.io.conversion.door import Conversion
from cuquant.io.conversion.plan import WRITERS, Step, elements

Kind = Enum("Kind", {name: name for name in WRITERS}, type=str)


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A safetensors or GGUF file, or a folder.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="A .gguf or .safetensors file, or a new folder.")
    ],
    to: Annotated[Kind, typer.Option(help="What to write.")],  # type: ignore[valid-type]
    format: ByNameOption = None,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Accept that arrays OUT cannot hold are rounded.")
    ] = False,
    dry_run: DryRunFlag = False,
    resume: ResumeFlag = False,
    device: DeviceOption = "auto",
    json: JsonFlag = False,
) -> None:
    """Write a checkpoint as another kind of files.

    Codes and scales stay as they are. An array that the kind cannot hold is refused by name before
    anything is written. OUT appears when it is complete, or not at all.
    """
    make = partial(
        Conversion, source, target, to.value,  # type: ignore[attr-defined]
        parse_formats(format) if format else None, requantize, resume=resume,
        device=parse_device(device),
    )  # fmt: skip
    carry_out(make, dry_run, json)


def carry_out(make: Callable[[], Conversion], dry_run: bool, json: bool) -> None:
    """Plan a conversion, do it but for a dry run, and say what became of each array."""
    started = time.perf_counter()
    with make() as work:
        if not dry_run:
            _run(work)
    seconds = time.perf_counter() - started
    steps = sorted(work.steps, key=lambda step: natural_key(step.name))
    if json:
        print_json(_as_json(work, steps, seconds, dry_run))
        return
    _print(work, steps, seconds, dry_run)
    screen = console(stderr=True)
    print_lines(screen, (f"warning: {printable(text, 1000)}" for text in work.warnings), "yellow")


def _run(work: Conversion) -> None:
    bar = Bar(f"writing {work.writer.KIND}")
    bar.begin((step.name, step.bytes_out) for step in work.steps)
    # Closed at once after an exception, so that nothing half-written stays.
    try:
        with bar.shown(), closing(work.run()) as done:
            for step in done:
                bar.advance(step.bytes_out)
    except BaseException:
        if work.has_finished:
            print_lines(console(stderr=True), ["finished shards are kept; --resume goes on"])
        raise


def _as_json(work: Conversion, steps: list[Step], seconds: float, dry_run: bool) -> dict[str, Any]:
    keys = ("name", "shape", "was", "becomes", "bytes_in", "bytes_out", "rounds")
    return {
        "source": str(work.file.path),
        "output": str(work.target),
        "from": work.file.kind,
        "to": work.writer.KIND,
        "is_dry_run": dry_run,
        "seconds": seconds,
        "bytes_in": sum(step.bytes_in for step in steps),
        "bytes_out": sum(step.bytes_out for step in steps),
        "rounded": sum(step.rounds for step in steps),
        "warnings": work.warnings,
        "arrays": [{key: getattr(step, key) for key in keys} for step in steps],
    }


def _print(work: Conversion, steps: list[Step], seconds: float, dry_run: bool) -> None:
    made = table(
        ("array", "shape", "was", "becomes", "bytes"), right=("bytes",),
        drop=("shape", "was", "bytes"),
    )  # fmt: skip
    for step in first_rows(steps):
        becomes = f"{step.becomes} (rounded)" if step.rounds else step.becomes
        made.add(step.name, shape_text(step.shape), step.was, becomes, f"{step.bytes_out:,}")
    screen = console()
    made.print(screen)
    print_hidden(screen, len(steps))
    before, after = (sum(getattr(s, key) for s in steps) for key in ("bytes_in", "bytes_out"))
    rounded, count = sum(step.rounds for step in steps), elements(steps)
    rate = f", {before / max(seconds, 1e-9) / 1e9:.3f} GB/s of input"
    print_lines(screen, [
        f"{len(steps)} arrays from {work.file.kind} to {work.writer.KIND}: "
        f"{rounded} rounded, {len(steps) - rounded} with the same numbers",
        f"{in_bytes(before)} -> {in_bytes(after)}, {after * 8 / max(count, 1):.4g} bits/element",
        f"{in_seconds(seconds)}{'' if dry_run else rate}",
        "nothing was written" if dry_run else printable(str(work.target), limit=4096),
    ])  # fmt: skip
