"""What a caller of `quantize_` asked for: which layers, by patterns, and each one's format."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from cuquant.errors import clipped, did_you_mean, shortened
from cuquant.formats import Format, get_format
from cuquant.formats.names import FormatName, FormatOptions
from cuquant.io.state import parse_format
from cuquant.torch.kinds import Kind, kind_of, shapes
from cuquant.torch.llm_int8_linear import FORMAT, NAME

Config = (
    FormatName
    | str
    | Format
    | os.PathLike[str]
    | Mapping[str, FormatName | str | Format | Mapping[str, Any] | float | None]
)

ENTRY = {"format", "activations", "input_scale"}  # the keys of a layer's own
ARGUMENTS = ("include", "exclude", "activations", "compute_dtype", "prepack")  # of `quantize_`


@dataclass(frozen=True)
class Wanted:
    """What a layer is to become.

    Attributes
    ----------
    format
        Of the weight.
    activations
        Of the input of linear layers; None: it is not quantized.
    input_scale
        The input's scale, found beforehand; None: from the data, call by call.
    is_llm_int8
        Whether a linear layer multiplies as bitsandbytes' does.
    """

    format: Format
    activations: Format | None = None
    input_scale: float | None = None
    is_llm_int8: bool = False

    def __str__(self) -> str:
        if self.is_llm_int8:
            return NAME
        said = "" if self.activations is None else f", input {self.activations}"
        return f"{self.format}{said}" + ("" if self.input_scale is None else " (static)")


@dataclass
class Layer:
    """A layer of the model: where it is, and what becomes of it."""

    module: Any
    kind: Kind
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    wanted: Wanted | None = None
    reason: str | None = None  # why it is kept
    named: bool = False  # by a pattern other than "*"


def layers_of(model: nn.Module) -> list[Layer]:
    """The float layers inside a model that could be swapped."""
    found: dict[nn.Module, Layer] = {}
    for path, parent in model.named_modules(remove_duplicate=False):
        for key, module in parent._modules.items():
            kind = None if module is None else kind_of(module)
            if kind is None or module is None:
                continue
            layer = found.setdefault(module, Layer(module, kind))
            layer.names.append(f"{path}.{key}" if path else key)
            if not any(p is parent and k == key for p, k in layer.places):
                layer.places.append((parent, key))
    return list(found.values())


@dataclass(frozen=True)
class Rules:
    """What the caller asked for."""

    formats: tuple[tuple[str, Wanted | None], ...]
    include: tuple[str, ...] | None
    exclude: tuple[str, ...]
    layers: tuple[Layer, ...]

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        format: Any,
        options: Any,
        include: Any,
        exclude: Any,
        activations: Any = None,
    ) -> "Rules":
        """Of the arguments of `quantize_`; TypeError and ValueError for wrong ones."""
        if isinstance(format, os.PathLike) or (
            isinstance(format, str) and format.endswith(".json")
        ):
            format = _read(Path(format))
        _check_arguments(options)
        if not isinstance(format, Mapping) and format != NAME:
            format, options = get_format(format, **options), {}
        names = [name for layer in layers for name in layer.names]
        if isinstance(format, Mapping) and not _is_entry(format, names):
            config: Mapping[Any, Any] = format
        else:
            config = {"*": format}
        formats = []
        for pattern, value in config.items():
            if not isinstance(pattern, str):
                raise TypeError(f"patterns are strings, got {clipped(pattern)}")
            wanted = None if value is None else _wanted(value, options, activations)
            formats.append((pattern, wanted))
        included = None if include is None else patterns_of(include, "include")
        excluded = () if exclude is None else patterns_of(exclude, "exclude")
        return cls(tuple(formats), included, excluded, tuple(layers))

    def check_used(self, done: Mapping[str, nn.Module] = MappingProxyType({})) -> None:
        """ValueError for a pattern that was to select something and does not.

        `done` are the layers that are quantized already, by name: another call goes on with the
        others, and none changes a format.
        """
        for pattern, format in self.formats:
            held = getattr(done.get(pattern), "format", None)
            if format is not None and held not in (None, format.format):
                raise ValueError(
                    f"{clipped(pattern, 200)} is quantized already, to {held} and not to "
                    f"{format.format}; cuquant.torch.dequantize_(model, include=...) goes back"
                )
        wanted = [*(self.include or ()), *(p for p, w in self.formats if w is not None)]
        names = [*done, *(name for layer in self.layers for name in layer.names)]
        plain = [n for layer in self.layers if not layer.kind.by_name for n in layer.names]
        plain = plain or list(done)
        for pattern in wanted:
            if pattern != "*" and not any(selects(pattern, name) for name in names):
                shown = [shortened(name, 100) for name in plain[:8]]
                some = ", ".join(shown) + (", ..." if len(plain) > 8 else "")
                raise ValueError(
                    f"{clipped(pattern, 200)} selects no nn.Linear of the model; it has: {some}"
                )

    def choose(self, layer: Layer) -> None:
        """Set what the layer is to become, or the reason to keep it."""
        if self._matching(self.exclude, layer, True) is not None:
            layer.reason = "excluded"
            return
        include = self.include
        if include is not None and self._matching(include, layer) is None:
            layer.reason = f"{by_name(layer.kind)}; " * layer.kind.by_name + "not included"
            return
        formats = dict(self.formats)
        exact = next((name for name in layer.names if name in formats), None)
        chosen = exact if exact is not None else self._matching(formats, layer, include is not None)
        if chosen is None:
            layer.reason = by_name(layer.kind) if layer.kind.by_name else "no pattern selects it"
            return
        layer.wanted = formats[chosen]
        named = [pattern for pattern in include or () if pattern != "*"]
        layer.named = chosen != "*" or self._matching(named, layer) is not None
        layer.reason = f"{chosen!r}: None" if layer.wanted is None else None

    def _matching(self, patterns: Any, layer: Layer, any_kind: bool = False) -> str | None:
        """The first of the patterns that selects the layer."""
        for pattern in patterns:
            if not any(selects(pattern, name) for name in layer.names):
                continue
            if any_kind or not layer.kind.by_name or not self._means_others(pattern, layer):
                return pattern
        return None

    def _means_others(self, pattern: str, layer: Layer) -> bool:
        """Whether a pattern is meant for linear layers, and selects this layer in passing."""
        if pattern in layer.names:
            return False
        plain = (other.names for other in self.layers if not other.kind.by_name)
        return pattern == "*" or any(selects(pattern, n) for names in plain for n in names)


def selects(pattern: str, name: str) -> bool:
    """Whether a pattern is a name, a module around it, or a glob of it."""
    return pattern == name or name.startswith(pattern + ".") or fnmatchcase(name, pattern)


def by_name(kind: Kind) -> str:
    """What a pattern of such layers must be."""
    return f"an {kind.what} is swapped by its name, or a pattern that selects no nn.Linear"


def _check_arguments(given: Mapping[str, Any]) -> None:
    """TypeError for what neither a format nor `quantize_` takes."""
    unknown = sorted(given.keys() - FormatOptions.__annotations__.keys())
    if not unknown:
        return
    name, others = unknown[0], ", ".join(FormatOptions.__annotations__)
    if name in ARGUMENTS:
        raise TypeError(f"{name} is no part of a plan; pass it to quantize_")
    if re.match("load_in_|bnb_|llm_int8_", name):
        hint = "; in place of bitsandbytes' options stands a format, such as nf4+dq or llm_int8"
    else:
        hint = did_you_mean(name, [*ARGUMENTS, *FormatOptions.__annotations__])
    raise TypeError(
        f"unknown argument {clipped(name)}{hint}; beside {', '.join(ARGUMENTS)} there are the "
        f"options of formats: {others}"
    )


def _is_entry(config: Mapping[Any, Any], names: Sequence[str]) -> bool:
    """Whether a mapping is one layer's entry, meant for all, and no plan of patterns."""
    if "format" not in config or any(selects("format", name) for name in names):
        return False
    return bool(names) or config.keys() <= ENTRY  # without a model it may be a layer's name


def _wanted(value: Any, options: Any, activations: Any) -> Wanted:
    """Of a format, or of {"format": ..., "activations": ..., "input_scale": ...}."""
    given = dict(value) if isinstance(value, Mapping) else {"format": value}
    if "format" not in given or given.keys() - ENTRY:
        raise ValueError(
            f"a layer's entry has a format and may have activations and input_scale, got "
            f"{clipped(sorted(given, key=str))}"
        )
    own = given.get("activations", activations)
    if given["format"] == NAME:
        if options or own is not None:
            raise ValueError(
                f"{NAME!r} quantizes its input itself and has no options; leave out activations "
                "and options, or give other layers theirs in entries of their own"
            )
        return Wanted(FORMAT, is_llm_int8=True)
    scale = given.get("input_scale")
    if scale is not None and own is None:
        raise ValueError("input_scale is that of quantized activations; pass activations beside it")
    scale = None if scale is None else _scale(scale)
    of_input = None if own is None else _format(own, {})
    return Wanted(_format(given["format"], options), of_input, scale)


def _scale(value: Any) -> float:
    if isinstance(value, (str, bool)) or not hasattr(value, "__float__"):
        raise TypeError(f"input_scale must be a number, got {clipped(value)}")
    found = float(value)
    if not 0 < found < float("inf"):
        raise ValueError(f"input_scale must be finite and above 0, got {found}")
    return found


def _format(value: Any, options: Any) -> Format:
    if isinstance(value, str) and value.startswith("{") and not options:
        return parse_format(value)
    return get_format(value, **options)


def _read(path: Path) -> Any:
    """A plan that `Plan.save` wrote."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no plan: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no plan, which is a JSON object of patterns and formats")
    return found


def patterns_of(given: object, what: str) -> tuple[str, ...]:
    """One pattern or several, as a caller gives them."""
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, (list, tuple, set, frozenset)):
        raise TypeError(f"{what} must be a pattern or a list of them, got {clipped(given)}")
    if wrong := [p for p in patterns if not isinstance(p, str)]:
        raise TypeError(f"{what} holds {clipped(wrong[0])}; patterns are strings")
    return tuple(patterns)


def asked_for(rules: Rules, names: Sequence[str], kind: Kind) -> bool:
    """Whether the rules ask for a weight of a linear layer that is no layer of its own."""
    layer = Layer(None, kind, list(names))
    rules.choose(layer)
    return layer.reason is None


def check_inputs(layer: Layer) -> None:
    """Leave out quantized inputs where a kind has none; ValueError for a scale that is of two."""
    wanted = layer.wanted
    if wanted is None or wanted.activations is None:
        return
    if layer.kind.by_name:  # rows that are looked up, filters
        layer.wanted = replace(wanted, activations=None, input_scale=None)
        return
    for shape in shapes(layer.module, layer.kind):
        try:
            wanted.activations.check_shape((1, shape[-1]))
        except ValueError as error:
            raise ValueError(f"{shortened(layer.names[0])}, its input: {error}") from error
    if wanted.input_scale is not None and len(layer.kind.names(layer.module)) > 1:
        raise ValueError(
            f"{shortened(layer.names[0])}: its projections have inputs of their own, and "
            "input_scale is one; leave it out, and call quantize_input_ of each projection"
        )
