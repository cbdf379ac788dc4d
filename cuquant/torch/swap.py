"""`quantize_`: the linear layers of a model, swapped for quantized ones in place."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from cuquant.errors import clipped, shortened
from cuquant.formats import Format, get_format
from cuquant.formats.names import FormatName, FormatOptions, Unpack
from cuquant.torch.holder import quantized_weight
from cuquant.torch.module import QuantLinear

_log = logging.getLogger("cuquant.torch")

# What a module keeps its forward hooks in; their handles remove them from these very dicts.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)

Config = FormatName | str | Format | Mapping[str, FormatName | str | Format | None]
M = TypeVar("M", bound=nn.Module)


def quantize_(
    model: M,
    format: Config = "nf4",
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    prepack: bool | None = None,
    **format_options: Unpack[FormatOptions],
) -> M:
    """Swap the nn.Linear layers of a model for `QuantLinear`, in place.

    A pattern is the exact name of a layer, the exact name of a module (which stands for the layers
    inside), or a glob of layer names as in fnmatch ("*.mlp.*"; a star crosses dots).

    Every nn.Linear is a candidate, the lm_head too (`exclude="lm_head"` keeps it). Kept are layers
    - that the patterns do not select;
    - whose rows do not divide into the format's blocks, or whose weight is not float32, float16 or
      bfloat16, or is no plain parameter (parametrized, lazy, a tensor subclass);
    - that would not become smaller, or whose rows are so short that the format takes half as many
      bits again as for long ones;
    - with a forward of their own, and the out_proj of nn.MultiheadAttention, which reads its
      weight itself;
    - whose weight is also that of a module that stays, such as an embedding (a tied lm_head),
      unless a pattern other than "*" in `include` or `format` selects them.

    Layers that are one module stay one, and layers that share a weight share the quantized one.
    Forward hooks move to the new layers. What became of each layer is logged (logger
    "cuquant.torch", level INFO), and a warning names the weights of linear layers that were asked
    for and stay float: those that cannot be swapped, the projections of nn.MultiheadAttention, and
    fused experts, [E, N, K].

    Parameters
    ----------
    model
        Weights are quantized where they lie; on the meta device too, for a
        `load_state_dict(..., assign=True)` of a quantized state afterwards.
    format
        A format's name or string (`"nf4:32+dq"`), a Format, or {pattern: format, or None to keep}:
        a layer's exact name goes first, then the first pattern that selects it; layers that none
        selects are kept.
    include, exclude
        A pattern or several. `exclude` goes first.
    prepack
        Whether to lay weights out for the GPU kernels (`cuquant.prepack`), which makes them
        faster. None: those on a GPU.
    **format_options
        Of `get_format`, such as block_size=32 or double_quant=True, for each format that is named.

    Returns
    -------
    The model. Nothing is swapped before everything is quantized: after an error it is what it was.

    Raises
    ------
    TypeError, ValueError
        For a model that is itself an nn.Linear, an unknown format, or a pattern of `include` or
        `format` that selects no layer.

    Warns
    -----
    UserWarning
        Where no layer was swapped, or weights of linear layers stay float against what was asked.

    Examples
    --------
    >>> import torch
    >>> import cuquant as cq
    >>> import cuquant.torch
    >>> linear = torch.nn.Linear
    >>> model = torch.nn.Sequential(linear(64, 64), torch.nn.GELU(), linear(64, 8))
    >>> cuquant.torch.quantize_(model, {"2": cq.get_format("int8"), "*": "nf4:32+dq"})
    Sequential(
      (0): QuantLinear(in_features=64, out_features=64, bias=True, format=nf4:32+dq)
      (1): GELU(approximate='none')
      (2): QuantLinear(in_features=64, out_features=8, bias=True, format=int8)
    )
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, QuantLinear):
        raise ValueError(f"model is quantized already: {model}")
    if isinstance(model, nn.Linear):
        raise ValueError(
            "model is itself an nn.Linear, which cannot be swapped inside a model; "
            "cuquant.torch.QuantLinear.from_linear(model, format) makes the quantized layer"
        )
    rules = _Rules.of(format, format_options, include, exclude)
    layers = layers_of(model)
    rules.check_used(layers)
    _decide(model, layers, rules)
    made = list(_quantized(layers, prepack))  # all, before anything is swapped
    for layer, new in made:
        for parent, key in layer.places:
            parent._modules[key] = new
    _report(layers)
    _warn_of_others(model, rules)
    return model


@dataclass
class Layer:
    """An nn.Linear of the model: where it is, and what becomes of it."""

    module: Any  # nn.Linear
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    format: Format | None = None
    reason: str | None = None  # why it is kept
    named: bool = False  # by a pattern other than "*"


def layers_of(model: nn.Module) -> list[Layer]:
    """The float nn.Linear layers inside a model."""
    found: dict[nn.Module, Layer] = {}
    for path, parent in model.named_modules(remove_duplicate=False):
        for key, module in parent._modules.items():
            if not isinstance(module, nn.Linear) or isinstance(module, QuantLinear):
                continue
            layer = found.setdefault(module, Layer(module))
            layer.names.append(f"{path}.{key}" if path else key)
            if not any(p is parent and k == key for p, k in layer.places):
                layer.places.append((parent, key))
    return list(found.values())


# ---- which layers -------------------------------------------------------------------------------


def _selects(pattern: str, name: str) -> bool:
    return pattern == name or name.startswith(pattern + ".") or fnmatchcase(name, pattern)


@dataclass(frozen=True)
class _Rules:
    """What the caller asked for."""

    formats: tuple[tuple[str, Format | None], ...]
    include: tuple[str, ...] | None
    exclude: tuple[str, ...]

    @classmethod
    def of(cls, format: Any, options: Any, include: Any, exclude: Any) -> "_Rules":
        if isinstance(format, Mapping):
            config = format
        else:
            config, options = {"*": get_format(format, **options)}, {}
        formats = []
        for pattern, value in config.items():
            if not isinstance(pattern, str):
                raise TypeError(f"patterns are strings, got {clipped(pattern)}")
            formats.append((pattern, None if value is None else get_format(value, **options)))
        included = None if include is None else _patterns(include, "include")
        return cls(
            tuple(formats), included, () if exclude is None else _patterns(exclude, "exclude")
        )

    def check_used(self, layers: Sequence[Layer]) -> None:
        """ValueError for a pattern that was to select something and does not."""
        wanted = [*(self.include or ()), *(p for p, fmt in self.formats if fmt is not None)]
        names = [name for layer in layers for name in layer.names]
        for pattern in wanted:
            if pattern != "*" and not any(_selects(pattern, name) for name in names):
                shown = [shortened(name, 100) for name in names[:8]]
                some = ", ".join(shown) + (", ..." if len(names) > 8 else "")
                raise ValueError(
                    f"{clipped(pattern, 200)} selects no nn.Linear of the model; it has: {some}"
                )

    def choose(self, layer: Layer) -> None:
        """Set the layer's format, or the reason to keep it."""
        if _matching(self.exclude, layer) is not None:
            layer.reason = "excluded"
            return
        if self.include is not None and _matching(self.include, layer) is None:
            layer.reason = "not included"
            return
        formats = dict(self.formats)
        exact = next((name for name in layer.names if name in formats), None)
        chosen = exact if exact is not None else _matching(formats, layer)
        if chosen is None:
            layer.reason = "no pattern selects it"
            return
        layer.format = formats[chosen]
        named = [pattern for pattern in self.include or () if pattern != "*"]
        layer.named = chosen != "*" or _matching(named, layer) is not None
        layer.reason = f"{chosen!r}: None" if layer.format is None else None


def _patterns(given: object, what: str) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, (list, tuple, set, frozenset)):
        raise TypeError(f"{what} must be a pattern or a list of them, got {clipped(given)}")
    if wrong := [p for p in patterns if not isinstance(p, str)]:
        raise TypeError(f"{what} holds {clipped(wrong[0])}; patterns are strings")
    return tuple(patterns)


def _matching(patterns: Any, layer: Layer) -> str | None:
    """The first of the patterns that selects the layer."""
    return next((p for p in patterns if any(_selects(p, name) for name in layer.names)), None)


def _decide(model: nn.Module, layers: Sequence[Layer], rules: _Rules) -> None:
    for layer in layers:
        rules.choose(layer)
        if layer.reason is None and layer.format is not None:
            layer.reason = obstacle(layer.module, layer.format) or _loss(layer.module, layer.format)
    swapped = {layer.module for layer in layers if layer.reason is None}
    owners: dict[torch.Tensor, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append((name, module))
    for layer in layers:
        if layer.reason is None and not layer.named:
            stay = [name for name, m in owners[layer.module.weight] if m not in swapped]
            layer.reason = f"its weight is also that of {stay[0]!r}, which stays" if stay else None


def obstacle(module: nn.Linear, fmt: Format) -> str | None:
    """Why a layer cannot be swapped, whatever was asked for."""
    weight = module._parameters.get("weight")
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        return f"a {type(module).__name__} has a forward of its own"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight itself"
    if weight is None or type(weight) is not nn.Parameter:
        return "its weight is no plain parameter"
    if module.bias is not module._parameters.get("bias"):
        return "its bias is no plain parameter"
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{str(weight.dtype).removeprefix('torch.')} values"
    try:
        fmt.check_shape(tuple(weight.shape))
    except ValueError:
        return f"{weight.shape[1]} columns do not divide into blocks of {fmt}"
    return None


def _loss(module: nn.Linear, fmt: Format) -> str | None:
    """Why a layer should not be swapped, though it could be."""
    weight = module.weight
    return fmt.why_keep(tuple(weight.shape), weight.numel() * weight.element_size())


# ---- what becomes of them -----------------------------------------------------------------------


def _quantized(
    layers: Sequence[Layer], prepack: bool | None
) -> Iterator[tuple[Layer, QuantLinear]]:
    weights: dict[tuple[torch.Tensor, Format], QuantLinear] = {}
    for layer in layers:
        linear, fmt = layer.module, layer.format
        if fmt is None or layer.reason is not None:
            continue
        key = (linear.weight, fmt)
        try:
            if (first := weights.get(key)) is None:
                weight = quantized_weight(linear.weight.detach(), fmt, prepack)
                new = weights[key] = QuantLinear(weight, linear.bias)
            else:
                new = QuantLinear(first.quantized, linear.bias)
                new.weight = first.weight  # whose parameters are then those of both
        except (TypeError, ValueError) as error:
            raise type(error)(f"{shortened(layer.names[0])}: {error}") from error
        yield layer, follow(new, layer)


def follow(new: QuantLinear, layer: Layer) -> QuantLinear:
    """Let a new layer have the mode and the hooks of the one it replaces."""
    new.train(layer.module.training)
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(layer.module, hooks))
    return new


def _report(layers: Sequence[Layer]) -> None:
    kept = [layer for layer in layers if layer.reason is not None]
    for layer in layers:
        said = str(layer.format) if layer.reason is None else f"kept, {layer.reason}"
        _log.info("%s: %s", layer.names[0], said)
    _log.info("%d of %d nn.Linear layers quantized", len(layers) - len(kept), len(layers))
    if len(kept) == len(layers):
        why = "; ".join(f"{shortened(layer.names[0])}: {layer.reason}" for layer in kept[:4])
        warnings.warn(
            f"quantize_ swapped no layer ({why or 'the model has no nn.Linear'})", stacklevel=3
        )


def _warn_of_others(model: nn.Module, rules: _Rules) -> None:
    """Warn of weights of linear layers that are no nn.Linear's, where the rules ask for them."""
    left, count = [], 0
    for name, why, weights in _others(model):
        asked = Layer(None, [name])
        rules.choose(asked)
        if asked.reason is None:
            left.append(f"{shortened(name, 100) or type(model).__name__}: {why}")
            count += sum(weight.numel() for weight in weights)
    if left:
        more = f"; and {len(left) - 8} more" if len(left) > 8 else ""
        warnings.warn(
            f"quantize_ swaps nn.Linear only; {count:,} weights of other linear layers stay float "
            f"({'; '.join(left[:8])}{more}). exclude= takes their names, if that is meant",
            stacklevel=3,
        )


def _others(model: nn.Module) -> Iterator[tuple[str, str, list[torch.Tensor]]]:
    """Names of float weights of linear layers that are no nn.Linear's, and what they are."""
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            why = "nn.MultiheadAttention reads its projections itself"
            yield path, why, [p for p in module.parameters() if p.ndim == 2]
            continue
        for key, weight in module._parameters.items():
            if weight is None or weight.ndim != 3 or not weight.is_floating_point():
                continue
            experts, rows, columns = weight.shape
            # Filters are no linear layers, and [1, T, C] is a table of positions.
            if experts > 1 and min(rows, columns) >= 16 and not isinstance(module, _ConvNd):
                why = f"a parameter {list(weight.shape)}, as of fused experts"
                yield f"{path}.{key}" if path else key, why, [weight]
