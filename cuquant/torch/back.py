"""Back from quantized layers to float ones, and to another layout: `dequantize_`, `prepack_`."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from cuquant.errors import clipped
from cuquant.torch.holder import Holder
from cuquant.torch.kinds import HOLDERS, KINDS, follow, holders
from cuquant.torch.rules import patterns_of, selects

M = TypeVar("M", bound=nn.Module)


def dequantize_(
    model: M, *, include: str | Sequence[str] | None = None, dtype: torch.dtype | None = None
) -> M:
    """Swap quantized layers back for float ones, with the values that they decode to, in place.

    Parameters
    ----------
    model
        Its `QuantLinear`, `QuantEmbedding`, `QuantConv2d` and `QuantExperts` become what they were
        made of; below an adapter, which took a Conv1D for an nn.Linear, that is one. A layer with
        an activation becomes an nn.Sequential. Weights that were shared are, and hooks move.
    include
        Patterns, as of `quantize_`. None: all.
    dtype
        Of the weights, and of the biases beside them. None: that which was quantized.

    Returns
    -------
    The model.

    Raises
    ------
    TypeError, ValueError
        For a model that is itself a quantized layer, a dtype that is none of floats, or a pattern
        that selects no quantized layer; nothing is swapped then.

    Examples
    --------
    >>> import torch
    >>> import cuquant.torch
    >>> model = cuquant.torch.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 8)), "int4")
    >>> cuquant.torch.dequantize_(model)
    Sequential(
      (0): Linear(in_features=64, out_features=8, bias=True)
    )
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, HOLDERS):
        raise ValueError(
            "model is itself a quantized layer, which cannot be swapped inside a model; "
            "layer.weight.dequantize() is what its weight decodes to"
        )
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be one of floats, got {dtype}")
    layers = [
        (f"{path}.{key}" if path else key, parent, key, module)
        for path, parent in model.named_modules(remove_duplicate=False)
        if not isinstance(parent, HOLDERS)
        for key, module in parent._modules.items()
        if module is not None and holders(module)
    ]
    patterns = None if include is None else patterns_of(include, "include")
    for pattern in patterns or ():
        if pattern != "*" and not any(selects(pattern, name) for name, *_ in layers):
            raise ValueError(f"{clipped(pattern, 200)} selects no quantized layer of the model")
    with torch.inference_mode(False):  # for float layers are there to be trained
        _back(layers, patterns, dtype)
    return model


def _back(layers: Any, patterns: Any, dtype: Any) -> None:
    """Swap layers, each given by its name, its place and itself."""
    kept: dict[int, nn.Parameter] = {}
    made: dict[nn.Module, nn.Module] = {}
    for name, parent, key, module in layers:
        if patterns is None or any(selects(pattern, name) for pattern in patterns):
            if module not in made:
                if getattr(parent, "base_layer", None) is module:
                    vars(module).pop("_like", None)
                made[module] = follow(_float(module, dtype, kept), module)
            parent._modules[key] = made[module]


def prepack_(model: M) -> M:
    """Lay the weights of a model's quantized layers out for GPU kernels, in place.

    Weights that a table shares stay as they are, for rows are read from it.

    Examples
    --------
    >>> import torch
    >>> import cuquant.torch
    >>> model = cuquant.torch.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 8)), "int4")
    >>> cuquant.torch.prepack_(model)
    Sequential(
      (0): QuantLinear(in_features=64, out_features=8, bias=True, format=int4, layout=fragments/1)
    )
    """
    found = [module for module in model.modules() if isinstance(module, Holder)]
    by_rows = {id(h._parts()[0]) for h in found if isinstance(h, (nn.Embedding, nn.Conv2d))}
    packed: dict[int, Holder] = {}
    for holder in found:
        first = id(holder._parts()[0])
        if first in by_rows or holder.is_prepacked:
            continue
        if first in packed:
            holder.weight = packed[first].weight
        else:
            packed[first] = holder.prepack_()
            packed[id(holder._parts()[0])] = holder
    return model


def _float(module: nn.Module, dtype: Any, made: dict[int, nn.Parameter]) -> nn.Module:
    """The float layer of a quantized one."""
    weights = []
    for holder in holders(module):
        first = id(holder._parts()[0])
        if first not in made:
            values = holder._decoded()
            made[first] = nn.Parameter(values if dtype is None else values.to(dtype))
        weights.append(made[first])
    kind = next(kind for kind in KINDS if isinstance(module, kind.quantized))
    return kind.back(module, weights)
