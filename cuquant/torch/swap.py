"""`quantize_`: the layers of a model, swapped for quantized ones in place; and back."""

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from cuquant.errors import shortened
from cuquant.formats import Format
from cuquant.formats.names import FormatName, FormatOptions, Unpack
from cuquant.interop import float_dtype
from cuquant.torch.experts import is_experts, without_parameters
from cuquant.torch.holder import Holder, quantized_weight
from cuquant.torch.inputs import InputQuantizing
from cuquant.torch.kinds import HOLDERS, KINDS, follow, holders, loss, obstacle
from cuquant.torch.llm_int8_linear import LLMInt8Linear, rows_of
from cuquant.torch.module import QuantLinear
from cuquant.torch.report import KEPT, Plan, Planned, report
from cuquant.torch.rules import Config, Layer, Rules, asked_for, check_inputs, layers_of
from cuquant.torch.spec import Weight

_log = logging.getLogger("cuquant.torch")

MOST_KEPT = 0.05  # of all parameters may stay float without a warning

M = TypeVar("M", bound=nn.Module)


def quantize_(
    model: M,
    format: Config = "nf4",
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    prepack: bool | None = None,
    activations: FormatName | str | Format | None = None,
    compute_dtype: torch.dtype | None = None,
    **format_options: Unpack[FormatOptions],
) -> M:
    """Swap the linear layers of a model for quantized ones, in place.

    An nn.Linear becomes a `QuantLinear`, and so does GPT-2's Conv1D; fused experts become
    `QuantExperts`. An nn.Embedding or nn.Conv2d becomes a `QuantEmbedding` or `QuantConv2d` where
    a pattern means it: its name, or one that selects no linear layer.

    A pattern is the exact name of a layer, the exact name of a module (which stands for the layers
    inside), or a glob of layer names as in fnmatch ("*.mlp.*"; a star crosses dots).

    Every nn.Linear is a candidate, the lm_head too (`exclude="lm_head"` keeps it). Kept are layers
    - that the patterns do not select;
    - whose rows do not divide into the format's blocks, or whose weight is not float32, float16 or
      bfloat16, or is no plain parameter (parametrized, lazy, a tensor subclass);
    - that would not become smaller, or whose rows are so short that the format takes half as many
      bits again as for long ones;
    - with a forward, a parameter, buffer or module of their own, or hooks of their state_dict, and
      the out_proj of nn.MultiheadAttention, which reads its weight itself;
    - whose weight is also that of a module that stays, such as an embedding (a tied lm_head),
      unless a pattern other than "*" in `include` or `format` selects them.

    Layers that are one module stay one, and layers that share a weight share the quantized one, a
    table and its head too. A bias that others hold too stays theirs as well. Hooks of forward and
    backward, and attributes that others set, move to the new layers. What became of each layer is
    logged (logger "cuquant.torch", level INFO), `report(model)` lists what stays float and why,
    `plan(...)`, with the same arguments, what would be done, and `dequantize_` undoes it.

    Parameters
    ----------
    model
        Weights are quantized where they lie; on the meta device too, for a
        `load_state_dict(..., assign=True)` of a quantized state afterwards.
    format
        A format's name or string (`"nf4:32+dq"`), "llm_int8" (`LLMInt8Linear`), a Format, or
        {pattern: format, or None to keep}: a layer's exact name goes first, then the first pattern
        that selects it; layers that none selects are kept. In place of a format, of all or of one
        pattern, can be {"format": ..., "activations": ..., "input_scale": ...}. A `Plan` is such a
        mapping, and a path (a str that ends in ".json") is that of its JSON.
    include, exclude
        A pattern or several. `exclude` goes first.
    prepack
        Whether to lay weights out for the GPU kernels (`cuquant.prepack`), which makes them
        faster. None: those on a GPU.
    activations
        The format that inputs of linear layers and experts are quantized to, row by row as they
        come: "int8" or "fp8_e4m3" for example. `input_scale` of a layer's entry is a scale found
        beforehand.
    compute_dtype
        Of linear layers: what x is cast to, and the result back. None: x's dtype.
    **format_options
        Of `get_format`, such as block_size=32 or double_quant=True, for each format that is named.

    Returns
    -------
    The model. Layers are swapped one by one, and the memory of each is free before the next. What
    can be known beforehand is checked before; after an error on the way, such as one of memory,
    the layers up to there are quantized, and another call goes on with the others.

    Raises
    ------
    TypeError, ValueError
        For a model that is itself an nn.Linear, an unknown format, or a pattern of `include` or
        `format` that selects no layer.

    Warns
    -----
    UserWarning
        Where no layer was swapped, weights of linear layers stay float against what was asked, or
        more than 5 % of all parameters do that nobody told to.

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
    layers, rules = decided(model, format, format_options, include, exclude, activations)
    stays = {layer.module: layer.reason for layer in layers if layer.reason is not None}
    if compute_dtype is not None:
        float_dtype(compute_dtype, "compute_dtype")
    _swap(model, layers, prepack, compute_dtype)
    KEPT.update(stays)
    tell(model, layers, rules)
    return model


def plan(
    model: nn.Module,
    format: Config = "nf4",
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    activations: FormatName | str | Format | None = None,
    **format_options: Unpack[FormatOptions],
) -> Plan:
    """Say what `quantize_` would do with the same arguments, and do nothing.

    Returns
    -------
    Plan
        print() shows a table; `quantize_(model, plan)` carries it out; `plan.save(path)` writes it
        as JSON, to be changed and read by `quantize_(model, path)`.

    Raises
    ------
    TypeError, ValueError
        As `quantize_`.

    Examples
    --------
    >>> import torch
    >>> import cuquant.torch
    >>> linear = torch.nn.Linear
    >>> model = torch.nn.Sequential(linear(64, 64), torch.nn.GELU(), linear(64, 8), linear(8, 1))
    >>> found = cuquant.torch.plan(model, {"2": "int8", "*": "q4_0"})
    >>> print(found)
    layer  kind       format   bytes   then  why it is kept
    0      nn.Linear  q4_0    16,384  2,304
    2      nn.Linear  int8     2,048    544
    3      nn.Linear  kept        32     32  8 columns do not divide into blocks of q4_0
    18,464 bytes -> 2,880
    >>> dict(found)
    {'0': 'q4_0', '2': 'int8', '3': None}
    """
    layers, _ = decided(model, format, format_options, include, exclude, activations)
    return Plan(tuple(map(Planned.of, layers)))


# ---- which layers -------------------------------------------------------------------------------


def decided(
    model: nn.Module, format: Any, options: Any, include: Any, exclude: Any, activations: Any
) -> tuple[list[Layer], Rules]:
    """The layers of a model, each with what it is to become or the reason to keep it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, HOLDERS):
        raise ValueError(f"model is quantized already: {model}")
    if isinstance(model, nn.Linear):
        raise ValueError(
            "model is itself an nn.Linear, which cannot be swapped inside a model; "
            "cuquant.torch.QuantLinear.from_linear(model, format) makes the quantized layer"
        )
    layers = layers_of(model)
    rules = Rules.of(layers, format, options, include, exclude, activations)
    modules = model.named_modules(remove_duplicate=False)
    rules.check_used({name: module for name, module in modules if isinstance(module, HOLDERS)})
    for layer in layers:
        rules.choose(layer)
        if layer.reason is None and layer.wanted is not None:
            fmt = layer.wanted.format
            layer.reason = obstacle(layer.module, layer.kind, fmt)
            layer.reason = layer.reason or loss(layer.module, layer.kind, fmt)
            if layer.reason is None:
                check_inputs(layer)
    swapped = {layer.module for layer in layers if layer.reason is None}
    owners: dict[torch.Tensor, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append((name, module))
    for layer in layers:
        if layer.reason is None and not layer.named:
            own = [owners[weight] for weight in _weights(layer)]
            stay = [name for found in own for name, m in found if m not in swapped]
            layer.reason = f"its weight is also that of {stay[0]!r}, which stays" if stay else None
    return layers, rules


def _weights(layer: Layer) -> list[torch.Tensor]:
    return [layer.module._parameters[name] for name in layer.kind.names(layer.module)]


# ---- what becomes of them -----------------------------------------------------------------------


def _swap(model: nn.Module, layers: Sequence[Layer], prepack: bool | None, dtype: Any) -> None:
    """Swap layer after layer; each is let go of once it is."""
    held = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    chosen = [layer for layer in layers if layer.reason is None]
    ids = [[id(weight) for weight in _weights(layer)] for layer in chosen]
    users: dict[int, list[Layer]] = {}
    for layer, weights in zip(chosen, ids, strict=True):
        for weight in weights:
            users.setdefault(weight, []).append(layer)
    made: dict[tuple[int, Any], Holder] = {}
    for layer, weights in zip(chosen, ids, strict=True):
        shared = [users[weight] for weight in weights]
        by_rows = any(not user.kind.prepacks for found in shared for user in found)
        try:
            new = _quantized(layer, weights, False if by_rows else prepack, made)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{shortened(layer.names[0])}: {error}") from error
        for weight, holder, found in zip(weights, holders(new), shared, strict=True):
            if len(found) > 1:
                made.setdefault((weight, holder.format), holder)
        if isinstance(new, QuantLinear) and dtype is not None:
            new.compute_in_(dtype)
        bias = layer.module._parameters.get("bias")
        if isinstance(new, Holder) and bias is not None and held[id(bias)] > 1:  # and stays one
            new.bias = bias
        place(layer, new)
        layer.module = None


def place(layer: Layer, new: nn.Module) -> None:
    """Put a new layer wherever the old one is."""
    for parent, key in layer.places:
        parent._modules[key] = new


def _quantized(
    layer: Layer, ids: Sequence[int], prepack: bool | None, made: dict[tuple[int, Any], Holder]
) -> nn.Module:
    """The layer's quantized one, with the parameters of those that were made of its weights."""
    assert layer.wanted is not None
    first = [made.get((weight, layer.wanted.format)) for weight in ids]
    new = made_of(
        layer,
        [
            codes_of(layer, weight, prepack) if holder is None else holder.quantized
            for weight, holder in zip(_weights(layer), first, strict=True)
        ],
    )
    for mine, other in zip(holders(new), first, strict=True):
        if other is not None:
            mine.weight = other.weight
    return new


def made_of(layer: Layer, weights: Sequence[Weight]) -> nn.Module:
    """The layer's quantized one of weights of the wanted format; its inputs as is wanted."""
    module, wanted = layer.module, layer.wanted
    assert wanted is not None
    new = layer.kind.make(module, weights)
    if isinstance(new, QuantLinear) and wanted.is_llm_int8:
        new = LLMInt8Linear(new.quantized, module.bias)
    if isinstance(new, QuantLinear) and not isinstance(module, nn.Linear):
        vars(new)["_like"] = without_parameters(module)  # no submodule
    for holder in holders(new) if wanted.activations is not None else ():
        if isinstance(holder, InputQuantizing):
            holder.quantize_input_(wanted.activations, wanted.input_scale)
    return follow(new, module)


def codes_of(layer: Layer, weight: torch.Tensor, prepack: bool | None) -> Weight:
    """A weight of a layer, quantized as is wanted."""
    values, wanted = layer.kind.rows(layer.module, weight.detach()), layer.wanted
    assert wanted is not None
    if wanted.is_llm_int8 and values.ndim == 2:
        return rows_of(values)
    return quantized_weight(values, wanted.format, prepack)


# ---- what is told -------------------------------------------------------------------------------


def tell(
    model: nn.Module, layers: Sequence[Layer], rules: Rules, *, warns_of_kept: bool = True
) -> None:
    """Log what became of each layer, and warn of what was not to be expected."""
    linear = [layer for layer in layers if not layer.kind.by_name or layer.reason is None]
    kept = [layer for layer in linear if layer.reason is not None]
    for layer in linear:
        said = str(layer.wanted) if layer.reason is None else f"kept, {layer.reason}"
        _log.info("%s: %s", layer.names[0], said)
    _log.info("%d of %d layers quantized", len(linear) - len(kept), len(linear))
    if len(kept) == len(linear):
        why = "; ".join(f"{shortened(layer.names[0])}: {layer.reason}" for layer in kept[:4])
        is_done = any(isinstance(module, HOLDERS) for module in model.modules())
        none = "all are quantized already" if is_done else "the model has no nn.Linear"
        warnings.warn(f"quantize_ swapped no layer ({why or none})", stacklevel=4)
    elif not _warn_of_others(model, rules) and warns_of_kept:
        _warn_of_kept(model)


def _warn_of_kept(model: nn.Module) -> None:
    found = report(model)
    kept = sorted((row for row in found.kept if not row.is_chosen), key=lambda row: -row.count)
    total, count = sum(row.count for row in found.rows), sum(row.count for row in kept)
    if count > MOST_KEPT * total:
        some = "; ".join(f"{shortened(row.name, 100)}: {row.reason}" for row in kept[:4])
        more = f"; and {len(kept) - 4} more" if len(kept) > 4 else ""
        warnings.warn(
            f"{count / total:.0%} of the parameters stay float ({some}{more}); "
            "cuquant.torch.report(model) lists all",
            stacklevel=4,
        )


def _warn_of_others(model: nn.Module, rules: Rules) -> bool:
    """Warn of weights of linear layers that are no layers, where the rules ask for them."""
    left, count = [], 0
    for name, why, weights in _others(model):
        if asked_for(rules, [name], KINDS[0]):
            left.append(f"{shortened(name, 100) or type(model).__name__}: {why}")
            count += sum(weight.numel() for weight in weights)
    if left:
        more = f"; and {len(left) - 8} more" if len(left) > 8 else ""
        warnings.warn(
            f"{count:,} weights of linear layers of other kinds stay float "
            f"({'; '.join(left[:8])}{more}). exclude= takes their names, if that is meant",
            stacklevel=4,
        )
    return bool(left)


def _others(model: nn.Module) -> Iterator[tuple[str, str, list[torch.Tensor]]]:
    """Names of float weights of linear layers that are no nn.Linear's, and what they are."""
    for path, module in model.named_modules():
        if isinstance(module, HOLDERS) or is_experts(module):
            continue
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
