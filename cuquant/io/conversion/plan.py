"""What every array of a file becomes in another kind of files, and what would be lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array.packed_weight import PackedWeight, unpack
from cuquant.array.quant_array import QuantArray
from cuquant.errors import FormatError, did_you_mean, shortened
from cuquant.formats import Format, get_format
from cuquant.formats.names import Nonfinite
from cuquant.io.container.gguf.types import GgufType, gguf_type
from cuquant.io.container.messages import quote
from cuquant.io.container.safetensors.tensors import stored_nbytes, tag_of
from cuquant.io.entries import Entry
from cuquant.io.schema import awq, bitsandbytes, compressed_tensors, fp8, gguf, gptq, mlx, own
from cuquant.io.schema.modelopt import PRE_SCALE
from cuquant.io.schema.recipe import Recipe, Source, Specs, Tensors, Writer, refuse_odd_parts
from cuquant.io.selection import Selection, fits
from cuquant.ops.quantize.door import quantize

_MODULES: tuple[Writer, ...] = (
    own, gguf, gptq, awq, compressed_tensors, bitsandbytes, mlx, fp8,
)  # fmt: skip
WRITERS = {module.KIND: module for module in _MODULES}
"""Kinds of files that are written."""

# Weights that loaders of these kinds take for no linear layer.
FOR_LINEAR = {gptq.KIND, awq.KIND, compressed_tensors.KIND, bitsandbytes.KIND, fp8.KIND}
NOT_LINEAR = ("*embed*", "*lm_head*", "*wte*", "*wpe*", "*.gate.weight", "*router*")
ROUTERS = "*.ffn_gate_inp.weight"  # of GGUF, which llama.cpp keeps in float32


@dataclass(frozen=True)
class Step:
    """What becomes of one array.

    Attributes
    ----------
    name, shape, dtype
        Of the array, as it is written; of a quantized one the dtype that it decodes to.
    was, becomes
        Its format or dtype, before and after.
    bytes_in, bytes_out
        That it takes in files.
    rounds
        Whether its numbers are rounded: it is quantized on the way.
    specs
        Of the tensors that are written.
    make
        Reads the array and makes these: arrays, or an iterator of the bytes of one, which comes
        first.
    recipe
        Of a quantized array; None for plain ones.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    was: str
    becomes: str
    bytes_in: int
    bytes_out: int
    rounds: bool
    specs: Specs
    make: Callable[[], Mapping[str, Any]]
    recipe: Recipe | None = None

    @property
    def module(self) -> str | None:
        """Of a plain matrix of floats; None for other arrays."""
        is_weight = self.name.endswith(".weight") and len(self.shape) == 2
        is_plain = self.recipe is None and self.becomes in interop.INPUT_DTYPES
        return self.name.removesuffix(".weight") if is_weight and is_plain else None


def writer_of(kind: object) -> Writer:
    """The writer of a kind; ValueError names those there are."""
    if kind in WRITERS:
        return WRITERS[kind]  # type: ignore[index]
    hint = did_you_mean(str(kind), WRITERS)
    raise ValueError(f"no kind of files is called {quote(kind)}{hint}; known: {', '.join(WRITERS)}")


@dataclass(frozen=True)
class Wish:
    """What a conversion shall change.

    Attributes
    ----------
    formats
        Of plain weights; with `requantize` of quantized ones too. None: they stay as they are.
    requantize
        Whether an array that the kind cannot hold may be rounded to a format that it holds.
    device
        "cpu" or "cuda:N", where arrays are quantized.
    nonfinite
        What becomes of NaN and infinity there.
    """

    formats: Selection | None = None
    requantize: bool = False
    device: str = "cpu"
    nonfinite: Nonfinite = "raise"

    def encoded(self, name: str, values: np.ndarray, fmt: Format) -> QuantArray:
        """Values of an array in a format, as NumPy arrays."""
        where = values if self.device == "cpu" else interop.to_device(values, self.device)
        try:
            return quantize(where, fmt, nonfinite=self.nonfinite).to("cpu")
        except ValueError as error:
            raise ValueError(f"{quote(name)}: {error}") from error


def plan(entries: Mapping[str, Entry], writer: Writer, wish: Wish) -> list[Step]:
    """What every array becomes.

    Parameters
    ----------
    entries
        Of a file, by the names to write; arrays are read where their numbers decide.
    writer
        Of the kind that is written.
    wish
        What shall change.

    Raises
    ------
    FormatError
        For an array that cannot be read.
    ValueError
        For arrays that cannot be written, or lose something.
    """
    if broken := next((entry.error for entry in entries.values() if entry.error), None):
        raise broken
    steps, lost = [], []
    for entry in entries.values():
        try:
            if writer is not own and entry.name.endswith(f".{PRE_SCALE}"):
                raise ValueError(f"x is multiplied by it, which no {writer.KIND} file can say")
            steps.append(_step(entry, writer, wish))
        except FormatError:  # the file is damaged: nothing else matters
            raise
        except (ValueError, TypeError) as why:
            advice = "" if lost else _instead(entry, writer, wish)  # it may read the array
            lost.append(f"{quote(entry.name)}: {shortened(str(why), 400)}{advice}")
    if lost:
        more = f" (and {len(lost) - 1} more arrays)" if len(lost) > 1 else ""
        raise ValueError(f"{lost[0]}{more}")
    return steps


def _step(entry: Entry, writer: Writer, wish: Wish) -> Step:
    if isinstance(entry.format, str):
        return _raw(entry, writer)
    if entry.format is None or (entry.format.scale is None and writer is not own):
        return _plain_or_quantized(entry, writer, wish)
    source = _source(entry)
    fmt = None
    if wish.requantize and wish.formats is not None:
        fmt, _ = wish.formats.decide(names_of(entry), np.dtype(np.float32), entry.shape)
    if fmt is not None and fmt != entry.format:
        rounded = replace(source, format=fmt, read=_rounded(source, fmt, wish), rows=None)
        return _quantized(entry, rounded, writer)
    try:
        return _quantized(entry, source, writer, rounds=False)
    except FormatError:
        raise
    except (ValueError, TypeError) as why:
        if wish.requantize:
            return _nearest(entry, source, writer, wish)
        raise ValueError(
            f"{entry.format} cannot be {writer.KIND} without loss: {why}; "
            "pass requantize=True to round it to a format that can"
        ) from why


def names_of(entry: Entry) -> tuple[str, ...]:
    """What globs may call an array: its name where it goes, and where it comes from."""
    return (entry.name, *entry.tensors)


def _nearest(entry: Entry, source: Source, writer: Writer, wish: Wish) -> Step:
    """An array in the nearest format of a kind; decoded where its shape or name fits none."""
    try:
        near, read = _held(writer, source.format), source.read
        if near != source.format:  # codes stay
            lay: Any = writer
            made = replace(source, format=near, read=lambda: lay.as_held_array(read()), rows=None)
            return _quantized(entry, made, writer)
        near = nearest(writer, source)
        rounded = replace(
            source, format=near, read=_rounded(source, near, wish), axes=None, rows=None
        )
        return _quantized(entry, rounded, writer)
    except (ValueError, TypeError):
        decoded = replace(
            entry, format=None, axes=None, read=lambda: source.read().dequantize(source.dtype)
        )
        step = _plain_or_quantized(decoded, writer, Wish())
        return replace(step, was=str(entry.format), bytes_out=_sum(step.specs), rounds=True)


def nearest(writer: Writer, source: Source) -> Format:
    """The format of a kind that an array it cannot hold may become: of as many bits, or more."""
    bits, held = source.format.bits, writer.NEAREST
    if writer is gguf:
        return get_format(gguf.nearest(bits, source.shape[-1]))
    if not held:
        raise ValueError(f"{writer.KIND} holds no format")
    return get_format(held[min((b for b in held if b >= bits), default=max(held))])


def _source(entry: Entry) -> Source:
    def read() -> QuantArray:
        value = entry.read()
        return unpack(value) if isinstance(value, PackedWeight) else value

    assert isinstance(entry.format, Format)
    return Source(entry.name, entry.format, entry.shape, entry.dtype, read, entry.axes, entry.rows)


def _rounded(source: Source, fmt: Format, wish: Wish) -> Callable[[], QuantArray]:
    def read() -> QuantArray:
        values = source.read().dequantize(np.float32)
        return wish.encoded(source.name, values, fmt).astype(source.dtype)

    return read


def _quantized(entry: Entry, source: Source, writer: Writer, rounds: bool = True) -> Step:
    if source.axes is not None and writer is not own:
        raise ValueError("its blocks do not run along the last axis")
    if 0 in source.shape and writer is not own:
        raise ValueError(f"it has no elements, {source.shape}, which readers take for damage")
    if writer is not own:
        refuse_odd_parts(source, getattr(writer, "ODD", ()))
    made = writer.recipe(source)

    def make() -> Mapping[str, Any]:
        return made.tensors(source)

    was = str(entry.format or entry.dtype)
    return Step(
        source.name, source.shape, source.dtype, was, made.words, entry.nbytes,
        _sum(made.specs), rounds, made.specs, make, made,
    )  # fmt: skip


def _sum(specs: Specs) -> int:
    """Bytes of tensors."""
    return sum(_nbytes(*spec) for spec in specs.values())


def _nbytes(kind: Any, shape: tuple[int, ...]) -> int:
    if isinstance(kind, GgufType):
        return kind.stored_nbytes(shape)
    return stored_nbytes(kind if isinstance(kind, str) else tag_of(kind), shape)


def _plain_or_quantized(entry: Entry, writer: Writer, wish: Wish) -> Step:
    fmt = None if entry.format is not None else _chosen(entry, writer, wish.formats)
    if fmt is not None:
        source = _encoded(entry, fmt, wish)
        try:
            return _quantized(entry, source, writer)
        except ValueError as why:
            raise ValueError(f"as {fmt} it cannot be {writer.KIND}: {why}") from why
    if entry.axes is not None:
        raise ValueError("its axes are in another order")
    dtype = entry.dtype
    if isinstance(entry.format, Format):  # values as they are, which a model's dtype may round
        dtype = entry.format.components(entry.shape)[0].dtype
    is_float32 = len(entry.shape) == 1 or fnmatchcase(entry.name, ROUTERS)
    if writer is gguf and is_float32 and dtype.name in interop.INPUT_DTYPES:
        dtype = np.dtype(np.float32)  # ggml adds and multiplies by vectors of these alone
    kind: Any = gguf_type(dtype) if writer is gguf else tag_of(dtype)
    nbytes = _nbytes(kind, entry.shape)

    def make() -> Tensors:
        value = entry.read()
        if isinstance(value, QuantArray):
            value = value.components["packed"]
        return {entry.name: value.astype(dtype, copy=False)}

    was = str(entry.format or entry.dtype)
    return Step(
        entry.name, entry.shape, dtype, was, str(dtype), entry.nbytes, nbytes, False,
        {entry.name: (kind, entry.shape)}, make,
    )  # fmt: skip


def _encoded(entry: Entry, fmt: Format, wish: Wish) -> Source:
    """A plain array that will be quantized when it is read."""

    def read() -> QuantArray:
        return wish.encoded(entry.name, entry.read(), fmt)

    return Source(entry.name, fmt, entry.shape, entry.dtype, read)


def _instead(entry: Entry, writer: Writer, wish: Wish) -> str:
    """Advice on a plain array: the format that was asked for with float16 scales, or the nearest.

    GPTQ has float16 scales alone, which int4 has by itself, and int8 has not.
    """
    fmt = None if entry.format is not None else _chosen(entry, writer, wish.formats)
    if fmt is None:
        return ""
    source = _encoded(entry, fmt, wish)
    for near in (lambda: get_format(f"{fmt}+float16"), lambda: nearest(writer, source)):
        try:
            found = near()
            _quantized(entry, _encoded(entry, found, wish), writer)
        except (ValueError, TypeError):
            continue
        return f"; as {found} it can"
    return ""


def _chosen(entry: Entry, writer: Writer, formats: Selection | None) -> Format | None:
    """The format of a plain array; a glob of its own makes one of what loaders expect plain."""
    if formats is None:
        return None
    if 0 in entry.shape and writer is not own:
        return None
    names = names_of(entry)
    if writer.KIND in FOR_LINEAR:
        if len(entry.shape) != 2 or not entry.name.endswith("weight"):
            return None
        if formats.rule_of(names)[0] == "*" and any(fits(glob, names) for glob in NOT_LINEAR):
            return None
    if writer is gguf and fits(ROUTERS, names):
        return None
    fmt = formats.decide(names, entry.dtype, entry.shape)[0]
    return fmt and _held(writer, fmt)


def _held(writer: Writer, fmt: Format) -> Format:
    """A format as a kind has it, where it has one of the same codes that is not quite the same."""
    as_held = getattr(writer, "as_held", None)
    return as_held(fmt) if as_held else fmt


def _raw(entry: Entry, writer: Writer) -> Step:
    """A tensor of a type of ggml's that has no codec."""
    if writer is not gguf:
        raise ValueError(f"{entry.format} is a type of ggml's that cuquant does not decode yet")
    kind = gguf_type(entry.format)
    return Step(
        entry.name, entry.shape, entry.dtype, kind.name, kind.name, entry.nbytes, entry.nbytes,
        False, {entry.name: (kind, entry.shape)}, lambda: {entry.name: entry.read().blocks},
    )  # fmt: skip


def refuse_clashes(steps: Sequence[Step]) -> None:
    """ValueError where two arrays would have a tensor of one name."""
    seen: dict[str, str] = {}
    for step in steps:
        for name in step.specs:
            if name in seen:
                raise ValueError(
                    f"{quote(step.name)} and {quote(seen[name])} would both have a tensor "
                    f"{quote(name)}"
                )
            seen[name] = step.name


def configuration(writer: Writer, steps: Sequence[Step]) -> Mapping[str, Any]:
    """What config.json says of these arrays."""
    recipes = [step.recipe for step in steps if step.recipe is not None]
    plain = [step.module for step in steps if step.module]
    return writer.configuration(recipes, plain)


def elements(steps: Sequence[Step]) -> int:
    """Of all arrays."""
    return sum(math.prod(step.shape) for step in steps)
