"""What a quantized model holds, and what one would: `report`, and the plan of a `quantize_`."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cuquant.disk import replace_file
from cuquant.errors import shortened
from cuquant.formats import Format, get_format
from cuquant.io.state import format_text
from cuquant.torch.holder import Holder
from cuquant.torch.inputs import InputQuantizing
from cuquant.torch.kinds import KINDS, Kind, holders, kind_of, shapes
from cuquant.torch.llm_int8_linear import NAME, THRESHOLD, LLMInt8Linear
from cuquant.torch.module import QuantLinear
from cuquant.torch.rules import Layer, Wanted, by_name

# Why `quantize_` kept a module; copies of the module are told the reason of its structure.
KEPT: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

# Ends of reasons that are the caller's own words.
_CHOSEN = ("excluded", "not included", ": None")


@dataclass(frozen=True)
class Row:
    """A weight of a model, quantized or not.

    Attributes
    ----------
    name
        As `named_parameters` has it; of a quantized weight, its module's and "weight".
    what
        The format, or the dtype of what is kept.
    shape
        Of the weight.
    count
        Its elements.
    nbytes
        What they take, scales and all.
    reason
        Why it is kept; None where it is quantized.
    """

    name: str
    what: str
    shape: tuple[int, ...]
    count: int
    nbytes: int
    reason: str | None = None

    @property
    def is_chosen(self) -> bool:
        """Whether it is kept because the caller said so."""
        return self.reason is not None and self.reason.endswith(_CHOSEN)


@dataclass(frozen=True)
class Report:
    """The weights of a model; str() is a table.

    Attributes
    ----------
    rows
        One of each quantized weight and of each parameter that is kept.
    """

    rows: tuple[Row, ...]

    @property
    def kept(self) -> tuple[Row, ...]:
        """The parameters that stay float, with their reasons."""
        return tuple(row for row in self.rows if row.reason is not None)

    @property
    def kept_share(self) -> float:
        """How much of all elements the kept ones are."""
        total = sum(row.count for row in self.rows)
        return sum(row.count for row in self.kept) / total if total else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(row.nbytes for row in self.rows)

    def __str__(self) -> str:
        lines = [
            (row.name, row.what, "x".join(map(str, row.shape)), f"{row.nbytes:,}", row.reason or "")
            for row in self.rows
        ]
        told = (
            f"{self.nbytes:,} bytes; {self.kept_share:.1%} of {sum(r.count for r in self.rows):,} "
            "parameters stay float"
        )
        return table(("weight", "format", "shape", "bytes", "why it is kept"), lines, told)


def report(model: nn.Module) -> Report:
    """List what a model's weights are, and why each that is not quantized is not.

    Parameters
    ----------
    model
        After `quantize_`, `load_`, or before either.

    Returns
    -------
    Report
        `.rows`, `.kept`, `.kept_share`, `.nbytes`; str() is a table.

    Examples
    --------
    >>> import torch
    >>> import cuquant.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    >>> print(cuquant.torch.report(cuquant.torch.quantize_(model, "int4")))
    weight    format   shape  bytes  why it is kept
    0.weight  int4     64x64  2,176
    0.bias    float32  64       256  a vector, as biases and norms are
    1.weight  float32  64       256  a vector, as biases and norms are
    1.bias    float32  64       256  a vector, as biases and norms are
    2,944 bytes; 4.5% of 4,288 parameters stay float
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    return Report(tuple(_rows(model)))


def _rows(model: nn.Module) -> Iterator[Row]:
    seen: set[int] = set()
    heads = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    read = {id(p) for m in heads for p in m.parameters() if p.ndim > 1}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, Holder) and id(module._parts()[0]) not in seen:
            seen.update(id(part) for part in module._parts())
            shape = tuple(module.weight.shape)
            size = sum(part.numel() for part in module._parts())
            count = torch.Size(shape).numel()
            yield Row(f"{prefix}weight", str(module.format), shape, count, size)
        for key, p in module._parameters.items():
            if p is None or id(p) in seen or is_lazy(p):
                continue
            seen.add(id(p))
            if isinstance(module, Holder) and key in module._names:
                continue
            reason = "nn.MultiheadAttention reads its projections itself"
            reason = reason if id(p) in read else _reason(module, key, p)
            dtype, size = str(p.dtype).removeprefix("torch."), p.numel() * p.element_size()
            yield Row(f"{prefix}{key}", dtype, tuple(p.shape), p.numel(), size, reason)


def _reason(module: nn.Module, key: str, parameter: torch.Tensor) -> str:
    """Why a parameter stays float, as far as can be told from the model."""
    if not parameter.is_floating_point():
        return "no floats"
    kind = kind_of(module)
    if kind is not None and key in kind.names(module):
        known = KEPT.get(module)
        if known is None and kind.by_name:
            known = by_name(kind)
        return known or f"an {kind.what} that was not swapped"
    if parameter.ndim < 2:
        return "a vector, as biases and norms are"
    if parameter.ndim == 2 and key.endswith("bias"):
        return "the biases of experts"
    return f"a parameter of {type(module).__name__}, which is no kind of layer that is swapped"


@dataclass(frozen=True)
class Planned:
    """What a layer is to become; it does not hold the layer, whose memory is to be free.

    Attributes
    ----------
    name
        The first of its names.
    kind
        Of layer, in words.
    said
        The format in words, or "kept".
    entry
        The same as `quantize_` takes it; None for what is kept.
    before, after
        Bytes of its weights.
    reason
        Why it is kept; None where it is not.
    """

    name: str
    kind: str
    said: str
    entry: Any
    before: int
    after: int
    reason: str | None

    @classmethod
    def of(cls, layer: Layer) -> "Planned":
        """Of a layer that `quantize_` has decided on."""
        weights = [getattr(layer.module, name) for name in layer.kind.names(layer.module)]
        before = after = sum(0 if is_lazy(p) else p.numel() * p.element_size() for p in weights)
        if layer.reason is None and layer.wanted is not None:
            fmt = layer.wanted.format
            after = sum(fmt.nbytes(shape) for shape in shapes(layer.module, layer.kind))
        said = str(layer.wanted) if layer.reason is None else "kept"
        what = layer.names[0], layer.kind.what
        return cls(*what, said, _entry(layer), before, after, layer.reason)


@dataclass(frozen=True)
class Plan(Mapping[str, Any]):
    """What `quantize_` would make of each layer of a model; `quantize_` takes it as its format.

    A mapping of the layers' names to formats, None for what is kept; str() is a table, and `save`
    writes JSON, whose path `quantize_` takes too.
    """

    layers: tuple[Planned, ...]

    def __getitem__(self, name: str) -> Any:
        for layer in self.layers:
            if layer.name == name:
                return layer.entry
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, to be read, changed and given to `quantize_`."""
        replace_file(path, (json.dumps(dict(self), indent=2) + "\n").encode())

    def __str__(self) -> str:
        lines = [
            (x.name, x.kind, x.said, f"{x.before:,}", f"{x.after:,}", x.reason or "")
            for x in self.layers
        ]
        before, after = sum(x.before for x in self.layers), sum(x.after for x in self.layers)
        heads = ("layer", "kind", "format", "bytes", "then", "why it is kept")
        return table(heads, lines, f"{before:,} bytes -> {after:,}")


def _entry(layer: Layer) -> Any:
    """What is said of a layer in JSON."""
    return None if layer.reason is not None else entry(layer.wanted)


def entry(wanted: Wanted | None) -> Any:
    """What a layer is to become in JSON, as `quantize_` takes it for a pattern."""
    if wanted is None:
        return None
    if wanted.is_llm_int8:
        return NAME
    if wanted.activations is None:
        return _text(wanted.format)
    said = {"format": _text(wanted.format), "activations": _text(wanted.activations)}
    return said if wanted.input_scale is None else {**said, "input_scale": wanted.input_scale}


def made_as(model: nn.Module) -> dict[str, tuple[Kind, Wanted]]:
    """What the layers of a model were made as, by name.

    Raises
    ------
    ValueError
        For a layer that no plan makes: one with an activation, for example.
    """
    found = {}
    for path, module in model.named_modules():
        kind = next((kind for kind in KINDS if isinstance(module, kind.quantized)), None)
        if kind is not None:
            try:
                found[path] = kind, _made_as(module)
            except ValueError as error:
                raise ValueError(f"{shortened(path, 100)}: no plan says {error}") from error
    return found


def _made_as(module: nn.Module) -> Wanted:
    first, *more = holders(module)
    if not isinstance(first, InputQuantizing):
        return Wanted(first.format)
    scales: list[Any] = [holder.input_scale for holder in (first, *more)]
    if more and (any(s is not None for s in scales) or more[0].activations != first.activations):
        raise ValueError("how its projections quantize their inputs, each in its own way")
    if isinstance(module, QuantLinear) and module.activation is not None:
        raise ValueError(f"activation={module.activation!r}")
    is_llm_int8 = isinstance(first, LLMInt8Linear)
    if isinstance(first, LLMInt8Linear) and first.threshold != THRESHOLD:
        raise ValueError(f"threshold={first.threshold}")
    if scales[0] is not None and scales[0].numel() != 1:
        raise ValueError(f"input_scale of shape {tuple(scales[0].shape)}")
    scale = None if scales[0] is None else scales[0].item()
    return Wanted(first.format, first.activations, scale, is_llm_int8)


def _text(fmt: Format) -> str:
    """A Format as `get_format` reads it; JSON of its options where that is not enough."""
    try:
        same = get_format(str(fmt)) == fmt
    except ValueError:  # learned levels, which no string holds
        same = False
    return str(fmt) if same else format_text(fmt)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], last: str) -> str:
    """Columns of text, numbers to the right, and a line below."""
    all_rows = [heads, *([shortened(cell, 100) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in all_rows) for i in range(len(heads))]

    def cell(text: str, width: int, head: str) -> str:
        return text.rjust(width) if head in ("bytes", "then") else text.ljust(width)

    lines = [
        "  ".join(cell(t, w, h) for t, w, h in zip(row, widths, heads, strict=True)).rstrip()
        for row in all_rows
    ]
    return "\n".join([*lines, last])
