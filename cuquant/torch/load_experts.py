"""Experts of a file for a model that fuses them: E matrices become one array [E, N, K]."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from cuquant.array.packed_weight import PackedWeight, unpack
from cuquant.array.quant_array import QuantArray, concatenate
from cuquant.torch.experts import LAST, first_of, is_transposed
from cuquant.torch.rules import Layer

# What Mixtral's files call its projections, and the module around them.
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_OLD, _NEW = ".block_sparse_moe.", ".mlp."


def fused(found: dict[str, Any], layers: Sequence[Layer]) -> dict[str, Any]:
    """The arrays of a file, those of experts by the names that a model of fused experts has.

    Quantized matrices stay so where their format lets them lie in one array; others are decoded.
    """
    names = {name for layer in layers for name in layer.names}
    if any(_NEW in name for name in names) and not any(_OLD in name for name in names):
        found = {name.replace(_OLD, _NEW): value for name, value in found.items()}
    for layer in layers:
        for name in layer.names:
            _fuse(found, name, layer.module)
    return found


def _fuse(found: dict[str, Any], name: str, module: Any) -> None:
    """Put arrays of all experts in place of those of each."""
    first = first_of(module)
    for key, parts in ((first, _parts(first)), (LAST, (LAST,))):
        if f"{name}.{key}.weight" in found:  # as a QuantExperts' state_dict has it
            found[f"{name}.{key}"] = found.pop(f"{name}.{key}.weight")
        count = module._parameters[key].shape[0]
        taken = [[_name(found, name, i, part) for part in parts] for i in range(count)]
        if not all(each in found for names in taken for each in names):
            continue
        rows = [found.pop(each) for names in taken for each in names]
        made = _stacked(rows, count)
        turned = isinstance(made, torch.Tensor) and is_transposed(module)
        found[f"{name}.{key}"] = made.transpose(1, 2) if turned else made


def _parts(first: str) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if first == "gate_up_proj" else (first,)


def _name(found: Any, name: str, number: int, part: str) -> str:
    mixtral = f"{name}.{number}.{_MIXTRAL[part]}.weight"
    return mixtral if mixtral in found else f"{name}.{number}.{part}.weight"


def _stacked(arrays: Sequence[Any], count: int) -> Any:
    """Matrices one above the other, as one array of `count` such."""
    plain = [unpack(a) if isinstance(a, PackedWeight) else a for a in arrays]
    if all(isinstance(a, QuantArray) and a.axes == (0, 1) for a in plain):
        try:
            one = concatenate(plain)
        except ValueError:  # a scale of all rows, or formats that differ
            one = None
        made = None if one is None else _split(one, count)
        if made is not None:
            return made
    plain = [a.dequantize() if isinstance(a, QuantArray) else a for a in plain]
    rows = torch.cat(plain)
    return rows.view(count, -1, rows.shape[1])


def _split(array: QuantArray, count: int) -> QuantArray | None:
    """[E * N, K] as [E, N, K], on the same memory; None where a component has no rows."""
    shape = (count, array.shape[0] // count, array.shape[1])
    parts = {}
    for component in array.format.components(shape):
        part: Any = array.components.get(component.name)
        if part is None or part.numel() != math.prod(component.shape):
            return None
        parts[component.name] = part.reshape(component.shape)
    if parts.keys() != array.components.keys():
        return None
    return QuantArray(array.format, shape, array.dtype, parts, (0, 1, 2))
