"""Layers of a model without memory, swapped for quantized ones as their weights come to light.

A library that loads models builds them on the meta device and fills them tensor by tensor.
`Placing` takes the float weights of layers one by one, or the descriptions of quantized ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cuquant.array.packed_weight import PackedWeight, unpack
from cuquant.io.container.safetensors import SafetensorsReader
from cuquant.io.state import EXTRA, bytes_shape, is_description, parse_format
from cuquant.torch.holder import Holder
from cuquant.torch.kinds import holders
from cuquant.torch.module import QuantLinear
from cuquant.torch.rules import Layer, Wanted
from cuquant.torch.spec import Weight, WeightSpec, stated
from cuquant.torch.swap import codes_of, made_of, place


class Placing:
    """Layers that are to be quantized, until their weights have come.

    Parameters
    ----------
    layers
        As `decided` tells them; those with a reason stay as they are.
    prepack
        As of `quantize_`.
    compute_dtype
        Of the linear layers; None: x's.
    ties
        Layers with one weight each, which become one quantized array.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        prepack: bool | None = None,
        compute_dtype: torch.dtype | None = None,
        ties: Iterable[Sequence[Layer]] = (),
    ) -> None:
        self._prepack, self._dtype = prepack, compute_dtype
        self._found: dict[str, tuple[Layer, str]] = {}  # by a weight's name in the model
        self._codes: dict[int, dict[str, Weight]] = {}  # of layers that wait for more
        self._twins = {id(layer): pair for pair in ties for layer in pair}
        for layer in layers:
            if layer.reason is None:
                keys = layer.kind.names(layer.module)
                self._found.update({n: (layer, k) for k in keys for n in weight_names(layer, k)})

    def takes(self, name: str) -> bool:
        """Whether a weight of this name is to be quantized."""
        return name in self._found

    def nbytes(self, name: str) -> int:
        """What the weight of this name will take."""
        layer, key = self._found[name]
        assert layer.wanted is not None
        weight = layer.module._parameters[key]
        return layer.wanted.format.nbytes(tuple(layer.kind.rows(layer.module, weight).shape))

    def take(self, name: str, values: torch.Tensor) -> list[str]:
        """Quantize a weight; swap its layer, if that was the last one. Names that are done with.

        Layers that share the weight are swapped too, and share the quantized one.
        """
        layer, key = self._found[name]
        twins = self._twins.get(id(layer), (layer,))
        plain = all(twin.kind.prepacks for twin in twins)
        codes = self._codes.setdefault(id(layer), {})
        codes[key] = codes_of(layer, values.detach(), self._prepack if plain else False)
        keys = layer.kind.names(layer.module)
        if set(keys) != codes.keys():
            return weight_names(layer, key)
        new = self._put(layer, [codes.pop(key) for key in keys])
        for twin in twins:
            if twin is not layer:
                other = self._put(twin, [held.quantized for held in holders(new)])
                for mine, theirs in zip(holders(new), holders(other), strict=True):
                    theirs.weight = mine.weight
        done = [n for twin in twins for k in keys for n in weight_names(twin, k)]
        for each in done:
            del self._found[each]
        return done

    def take_rest(self) -> None:
        """Quantize the weights that came without `take`, or that a library has made up."""
        for name, (layer, key) in [*self._found.items()]:
            weight = layer.module._parameters.get(key)
            if name in self._found and key not in self._codes.get(id(layer), {}):
                self.take(name, weight)

    def describe(self, layer: Layer, specs: Sequence[WeightSpec]) -> None:
        """Swap a layer for one of described weights, on the meta device.

        Its inputs are as is wanted; its format is the described one.
        """
        fmt, wanted = parse_format(specs[0].format), layer.wanted
        if wanted is None:
            layer.wanted = Wanted(fmt)
        else:
            is_llm_int8 = wanted.is_llm_int8 and fmt == wanted.format
            layer.wanted = replace(wanted, format=fmt, is_llm_int8=is_llm_int8)
        self._put(layer, [_without_memory(spec) for spec in specs])

    def _put(self, layer: Layer, weights: Sequence[Weight]) -> nn.Module:
        """Swap a layer; what it holds counts as loaded, where it is not on the meta device."""
        new = made_of(layer, weights)
        if isinstance(new, QuantLinear) and self._dtype is not None:
            new.compute_in_(self._dtype)
        for tensor in new.parameters():
            if not tensor.is_meta:
                tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        place(layer, new)
        return new


def weight_names(layer: Layer, key: str) -> list[str]:
    """The names of a layer's weight in the model."""
    return [f"{name}.{key}" for name in layer.names]


def holder_names(layer: Layer) -> list[list[str]]:
    """Of each weight the names of the module that is to hold it: a layer's, or its projections'."""
    keys = layer.kind.names(layer.module)
    return [[*layer.names] if key == "weight" else weight_names(layer, key) for key in keys]


def described(files: Iterable[str]) -> tuple[dict[str, WeightSpec], set[str]]:
    """What safetensors files say of the quantized weights in them, by the names of modules; and
    the names of all tensors."""
    found, names = {}, set()
    for file in files:
        with SafetensorsReader(file) as reader:
            names |= reader.tensors.keys()
            for name in reader.tensors:
                stem, _, last = name.rpartition(".")
                if last == EXTRA and is_description((stored := reader.read(name)).tobytes()):
                    found[stem] = WeightSpec.from_tensor(torch.from_numpy(stored))
    return found, names


def as_rows(model: nn.Module) -> dict[str, Any]:
    """A model's state_dict with weights as rows: prepacked ones unpacked, on the CPU."""
    state = model.state_dict()
    for path, module in model.named_modules():
        if isinstance(module, Holder) and isinstance(held := module.quantized, PackedWeight):
            prefix = f"{path}." if path else ""
            for name in module._names:
                del state[prefix + name]
            rows = stated(unpack(held), module._AXES)
            state.update({prefix + name: part.cpu() for name, part in rows.items()})
    return state


def _without_memory(spec: WeightSpec) -> Weight:
    made = [
        torch.empty(bytes_shape(c), dtype=torch.uint8, device="meta") for c in spec.components()
    ]
    return spec.weight(made)
