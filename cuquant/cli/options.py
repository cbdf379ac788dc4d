"""Options that several commands share, and how their texts become values."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from cuquant.errors import clipped, did_you_mean
from cuquant.formats import Format, get_format, list_formats
from cuquant.formats.names import Span
from cuquant.interop import device_name
from cuquant.io.quantized import OTHER_KINDS


def complete_format(incomplete: str) -> list[str]:
    """Formats that a shell offers behind what was typed of one, or of the last of a list.

    >>> complete_format("nf4,mxf")
    ['nf4,mxfp8', 'nf4,mxfp8_e5m2', 'nf4,mxfp6', 'nf4,mxfp6_e3m2', 'nf4,mxfp4']
    >>> complete_format("int8@nf")
    ['int8@nf4']
    """
    start = max(incomplete.rfind(mark) for mark in ",=@") + 1
    before, last = incomplete[:start], incomplete[start:]
    return [before + name for name in list_formats() if name.startswith(last)]


DeviceOption = Annotated[
    str, typer.Option(metavar="auto|cpu|cuda[:N]", help="Where it runs; auto: a GPU if usable.")
]
FormatsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        "--formats",
        "-f",
        metavar="A,B",
        autocompletion=complete_format,
        help="Formats, such as nf4, nf4:32+dq or int8:tensor; repeatable.",
    ),
]
ShapesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        "--shapes",
        metavar="NxK,...",
        help="Shapes of matrices, such as 4096x14336; repeatable.",
    ),
]
ByNameOption = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        "-f",
        metavar="[GLOB=]FORMAT",
        autocompletion=complete_format,
        help="One of `cuquant formats`, with options such as nf4:32+dq or int8:row; with a glob "
        "for tensors of such names, where GLOB=keep leaves them; repeatable.",
    ),
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Quantize only such tensors; repeatable."),
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="GLOB", help="Keep tensors of such names; repeatable."),
]
DryRunFlag = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be written, and its size.")
]
ResumeFlag = Annotated[
    bool,
    typer.Option("--resume", help="Keep the shards that a run which was stopped has finished."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")]


class Commands(TyperGroup):
    """A group of commands that says which one an unknown one is near to."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = self.list_commands(ctx)
            ctx.fail(
                f"no such command {clipped(name)}{did_you_mean(name, known)}; "
                f"known are {', '.join(known)}"
            )
        return super().resolve_command(ctx, args)


def parse_device(text: str) -> str | None:
    """A device as it is typed: None for "auto", else "cpu", "cuda" or "cuda:N".

    >>> parse_device("auto"), parse_device("cuda:1")
    (None, 'cuda:1')
    """
    if text == "auto":
        return None
    try:
        return device_name(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"{clipped(text)} is no device; pass auto, cpu, cuda or cuda:N", param_hint="--device"
        ) from error


def parse_block_size(text: str | None) -> int | Span | tuple[int, int] | None:
    """A block size as it is typed: 64, row, tensor, flat, flat64 or 128x128.

    >>> parse_block_size("128x128")
    (128, 128)
    """
    if text is None or text in ("row", "tensor") or re.fullmatch(r"flat\d{0,10}", text):
        return cast(Span | None, text)
    rows, cross, columns = text.partition("x")
    numbers = (rows, columns) if cross else (rows,)
    if not all(number.isdecimal() and len(number) <= 10 for number in numbers):  # below 2^31
        raise typer.BadParameter(
            f"{clipped(text)} is no block size; pass a number, row, tensor, flat or a pair such as "
            "128x128",
            param_hint="--block-size",
        )
    return (int(rows), int(columns)) if cross else int(rows)


def parse_formats(texts: Sequence[str], **options: Any) -> dict[str, Format | None]:
    """Formats by globs of names, as typed: FORMAT for all, or GLOB=FORMAT, of which the first that
    fits decides; GLOB=keep quantizes nothing. `options` as `get_format`'s, of all of them.

    >>> parse_formats(["nf4", "*.down_proj=int8", "lm_head=keep"])
    {'*.down_proj': Format('int8'), 'lm_head': None, '*': Format('nf4')}
    """
    found: dict[str, Format | None] = {}
    for text in sorted(texts, key=lambda text: "=" not in text):
        glob, _, name = text.rpartition("=") if "=" in text else ("*", "", text)
        if glob in found:
            what = "two formats are for all tensors" if glob == "*" else f"{clipped(glob)} has two"
            raise typer.BadParameter(
                f"{what}; GLOB=FORMAT gives one to some of them", param_hint="--format"
            )
        found[glob] = None if name == "keep" else get_format(name, **options)
    return found


def parse_shapes(texts: Sequence[str] | None) -> tuple[tuple[int, int], ...]:
    """Shapes of matrices as they are typed.

    >>> parse_shapes(["4096x14336,8x64"])
    ((4096, 14336), (8, 64))
    """
    found = _parse_sizes(texts, 2, "rows and columns, such as 4096x14336")
    return cast(tuple[tuple[int, int], ...], found)


def parse_products(texts: Sequence[str] | None) -> tuple[tuple[int, int, int], ...]:
    """Sizes of products as they are typed.

    >>> parse_products(["64x14336x4096"])
    ((64, 14336, 4096),)
    """
    found = _parse_sizes(texts, 3, "M, N and K, such as 64x14336x4096")
    return cast(tuple[tuple[int, int, int], ...], found)


def _parse_sizes(
    texts: Sequence[str] | None, count: int, wanted: str
) -> tuple[tuple[int, ...], ...]:
    found = []
    for text in split_names(texts or ()):
        sizes = text.split("x")
        if len(sizes) != count or not all(s.isdecimal() and int(s) for s in sizes):
            raise typer.BadParameter(
                f"{clipped(text)} is no shape; pass {wanted}", param_hint="--shape"
            )
        found.append(tuple(map(int, sizes)))
    return tuple(found)


def check_output(path: Path | None, option: str, suffixes: Sequence[str] = ()) -> None:
    """Refuse now what could not be written in some minutes."""
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise typer.BadParameter(f"{path} must end in {', '.join(suffixes)}", param_hint=option)
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is no folder", param_hint=option)


def output_file(text: str, source: Path) -> Path:
    """The file that `quantize` writes; refuses now another kind of file, stdout or a folder."""
    path = Path(text)
    if text == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
        raise ValueError(
            f"{text}: the output cannot be stdout or a device: pass a file, such as "
            "-o out.safetensors"
        )
    if path.is_dir() or text.endswith(("/", os.sep)):
        inside = path / f"{source.stem}-quantized.safetensors"
        if path.exists() and not path.is_dir():
            raise ValueError(f"{text}: is a file; leave out the {text[-1]!r} at its end")
        raise ValueError(f"{text or '.'}: names a directory; name a file, such as {inside}")
    kind = OTHER_KINDS.get(path.suffix.lower())
    if kind is not None:
        other = "pass --to gguf, or " if kind == "GGUF" else ""
        raise ValueError(
            f"{path}: quantize writes safetensors, not {kind}; {other}call the output "
            f"{path.with_suffix('.safetensors').name}"
        )
    return path


def split_names(texts: Sequence[str]) -> list[str]:
    """Names out of options that were repeated, or given as lists with commas.

    >>> split_names(["nf4,int8", "fp4"])
    ['nf4', 'int8', 'fp4']
    """
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]
