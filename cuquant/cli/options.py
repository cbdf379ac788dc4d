"""Options that several commands share, and how their texts become values."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cuquant.interop import device_name

DeviceOption = Annotated[
    str, typer.Option(metavar="auto|cpu|cuda[:N]", help="Where it runs; auto: a GPU if usable.")
]


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
            f"{text!r} is no device; pass auto, cpu, cuda or cuda:N", param_hint="--device"
        ) from error


def parse_block_size(text: str | None) -> int | str | tuple[int, int] | None:
    """A block size as it is typed: 64, row, tensor or 128x128.

    >>> parse_block_size("128x128")
    (128, 128)
    """
    if text is None or text in ("row", "tensor"):
        return text
    rows, cross, columns = text.partition("x")
    if not rows.isdecimal() or (cross and not columns.isdecimal()):
        raise typer.BadParameter(
            f"{text!r} is no block size; pass a number, row, tensor or a pair such as 128x128",
            param_hint="--block-size",
        )
    return (int(rows), int(columns)) if cross else int(rows)


def parse_shape(text: str, option: str = "--shape") -> tuple[int, int]:
    """The shape of a matrix as it is typed.

    >>> parse_shape("4096x14336")
    (4096, 14336)
    """
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise typer.BadParameter(
            f"{text!r} is no shape; pass rows and columns, such as 4096x14336", param_hint=option
        )
    return int(rows), int(columns)


def check_output(path: Path | None, option: str, suffixes: Sequence[str] = ()) -> None:
    """Refuse now what could not be written in some minutes."""
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise typer.BadParameter(f"{path} must end in {', '.join(suffixes)}", param_hint=option)
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is no folder", param_hint=option)


def split_names(texts: Sequence[str]) -> list[str]:
    """Names out of options that were repeated, or given as lists with commas.

    >>> split_names(["nf4,int8", "fp4"])
    ['nf4', 'int8', 'fp4']
    """
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]
