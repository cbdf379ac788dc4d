"""Commands on the installation: `formats`, `doctor`, `cache` and `precompile`."""

from contextlib import nullcontext
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cuquant import ahead, diagnosis
from cuquant.cli.options import FormatsOption, JsonFlag, complete_format, split_names
from cuquant.cli.show import console, in_bytes, in_seconds, print_json, shape_text, table
from cuquant.formats import Codebook, Format, get_format, list_formats
from cuquant.formats.table import HEADINGS, SHAPE, format_row, format_rows, format_table

_STYLES = {"ok": "", "missing": "dim", "problem": "red"}


def formats(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            autocompletion=complete_format,
            help="Details of one, such as nf4 or nf4:32+dq.",
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of examples/formats.md.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """List all formats, or say all of one."""
    if markdown and (json or name is not None):
        raise typer.BadParameter(
            "the Markdown table is that of all formats", param_hint="--markdown"
        )
    if name is not None:
        fmt = get_format(name)
        if json:
            print_json(_details(fmt))
        else:
            _print_details(fmt)
    elif json:
        print_json([_facts(get_format(name)) for name in list_formats()])
    elif markdown:
        print(format_table(), end="")
    else:
        drop = ("aliases", "packing", "offset", "codes", "scale")
        made = table(HEADINGS, right=("bits per element",), drop=drop)
        for row in format_rows():
            made.add(*astuple(row))
        made.print(console())


def _facts(fmt: Format) -> dict[str, Any]:
    """What the table says of a format, as JSON has it."""
    row = format_row(fmt)
    return {
        "name": row.name,
        "aliases": row.aliases.split(", ") if row.aliases else [],
        "bits_per_element": fmt.bits_per_element,
        "block": fmt.block_size,
        "scale": row.scale or None,
        "offset": row.offset or None,
        "codes": row.codes,
        "packing": row.packing,
    }


def _details(fmt: Format) -> dict[str, Any]:
    """All that is to be said of one format."""
    return {
        **_facts(fmt),
        "levels": list(fmt.codec.levels) if isinstance(fmt.codec, Codebook) else None,
        "shape": list(SHAPE),
        "components": [
            {"name": part.name, "dtype": str(part.dtype), "shape": list(part.shape)}
            for part in fmt.components(SHAPE)
        ],
    }


def _print_details(fmt: Format) -> None:
    row, details = format_row(fmt), _details(fmt)
    lines = [("name", row.name), ("bits", f"{row.bits} per element of a {shape_text(SHAPE)} array")]
    lines += [(key, value) for key, value in list(asdict(row).items())[1:] if key != "bits"]
    levels = details["levels"] or ()
    lines.append(("levels", " ".join(f"{level:.4g}" for level in levels)))
    lines += [
        ("stored", f"{part['name']}, {part['dtype']} {part['shape']}")
        for part in details["components"]
    ]
    for key, text in lines:
        if text:
            print(f"{key:<9}{text}")


def doctor(json: JsonFlag = False) -> None:
    """Say what is installed, what does not fit together and what to type; exit code 1 if so."""
    found = diagnosis.doctor()
    if json:
        checks = [asdict(check) for check in found.checks]
        print_json({"ok": found.ok, "backend": found.backend, "checks": checks})
    else:
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


def precompile(
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="A quantized safetensors file, or a folder of them: what it needs."
        ),
    ] = None,
    formats: FormatsOption = None,
    operations: Annotated[
        list[str] | None,
        typer.Option(
            "--operation",
            "--operations",
            metavar="A,B",
            help="Of formats: quantize and dequantize (if not given), matmul, prepack; repeatable.",
        ),
    ] = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            "--dtypes",
            metavar="A,B",
            help="float16, bfloat16, float32; all of them, or those of the model; repeatable.",
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(metavar="sm_NN", help="For a GPU that need not be there; else for this one."),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", file_okay=False, help="Copy the kernels there, for CUQUANT_CUBINS."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compile so many at a time; all processors.")
    ] = None,
) -> None:
    """Compile kernels ahead of their first use, for a model or for formats."""
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
    bar = Progress(*columns, TimeRemainingColumn(compact=True), console=screen, transient=True)
    task = bar.add_task("kernels", total=None)

    def report(done: int, total: int, name: str) -> None:
        entry = name.removeprefix("cuquant::").partition("<")[0]
        bar.update(task, completed=done, total=total, description=escape(entry))

    with bar if screen.is_terminal else nullcontext():
        made = ahead.precompile(
            *split_names(formats or ()),
            model=model,
            operations=split_names(operations or ()) or None,
            dtypes=split_names(dtypes or ()) or None,
            arch=arch,
            export=export,
            jobs=jobs,
            progress=report,
        )
    print(
        f"{made.compiled} kernels compiled in {in_seconds(made.seconds)}, {made.found} were there"
    )
