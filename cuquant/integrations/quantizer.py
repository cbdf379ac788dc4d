"""CuquantHfQuantizer: what transformers calls while it loads, saves and trains a model."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from cuquant.errors import FormatError
from cuquant.integrations.configuration import CuquantConfig
from cuquant.integrations.placing import Placing, as_rows, described, holder_names
from cuquant.io.state import EXTRA
from cuquant.torch import dequantize_, prepack_
from cuquant.torch.holder import Holder
from cuquant.torch.kinds import HOLDERS, obstacle
from cuquant.torch.module import QuantLinear
from cuquant.torch.report import KEPT, made_as
from cuquant.torch.rules import Layer, Rules, Wanted, layers_of
from cuquant.torch.spec import WeightSpec
from cuquant.torch.swap import decided, tell


class CuquantHfQuantizer(HfQuantizer):
    """Quantizes weights one by one as they are read, and loads what a model of ours was saved as.

    Which layers of a saved model are quantized, and how, its files say; config.json adds what is
    no part of a weight: formats of inputs, compute_dtype.
    """

    requires_calibration = False
    quantization_config: CuquantConfig

    # ---- what transformers asks ------------------------------------------------------------

    def is_serializable(self) -> Any:
        """Whether `save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> Any:
        """Whether adapters can be trained on top."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the model."""
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """ValueError for weights that were to be quantized and to lie on the disk."""
        on_disk = isinstance(device_map, dict) and "disk" in device_map.values()
        if on_disk and not self.pre_quantized:
            raise ValueError(
                "device_map sends modules to the disk, and weights that are quantized while they "
                "are loaded stay in memory; quantize on the CPU, save_pretrained, and load that"
            )

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a weight of the file is to be quantized."""
        return not self.pre_quantized and self._placing.takes(param_name)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element, for device_map="auto"."""
        if self.param_needs_quantization(model, param_name):
            return self._placing.nbytes(param_name) / max(param.numel(), 1)
        return super().param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> "Quantize":
        """What each weight goes through that `param_needs_quantization` names."""
        return Quantize(self)

    # ---- loading -----------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        config = self.quantization_config
        files = [f for f in checkpoint_files or () if str(f).endswith(".safetensors")]
        self._loaded = model
        found, names = described(files) if self.pre_quantized else ({}, set())
        if found:
            self._place_described(model, found, names)
            return
        self._layers, self._rules, ties = self._decided(model)
        self._placing = Placing(self._layers, config.prepack, config.compute_dtype, ties)
        if self.pre_quantized:
            self._placing.take_rest()
            retie(model)

    def _decided(self, model: Any) -> tuple[list[Layer], Rules, list[list[Layer]]]:
        """The layers, each with what it is to become or the reason to keep it, and tied ones."""
        config, named = self.quantization_config, self.quantization_config.named()
        tied = [names for names in _tied(model) if named & {*names}]
        keep = self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        keep = [*({*keep} - named.union(*tied)), *config.modules_to_not_convert]
        kept = [n for n, _ in model.named_modules() if n and not should_convert_module(n, keep)]
        exclude = [*kept, *config.exclude]
        layers, rules = decided(
            model, config.format, {}, config.include, exclude, config.activations
        )
        by_name = {name: layer for layer in layers for name in layer.names}
        return layers, rules, [_united(names, by_name, named) for names in tied]

    def _place_described(self, model: Any, found: dict[str, WeightSpec], stored: set[str]) -> None:
        """Swap the layers whose weights are quantized in the file, which stores these names."""
        config, layers = self.quantization_config, layers_of(model)
        origins = _renamed(found, model, layers)
        for names in _tied(model):  # of which a file may have one
            if origin := next((origins[name] for name in names if name in origins), None):
                origins.update({name: origins.get(name, origin) for name in names})
        rules, prefix, taken = config.rules(layers), f"{model.base_model_prefix}.", {}
        placing = Placing((), config.prepack, config.compute_dtype)
        for layer in layers:
            parts = holder_names(layer)
            mine = {name: origins[name] for names in parts for name in names[:1] if name in origins}
            if len(mine) == len(parts):
                named = replace(layer, names=_under(layer.names, prefix))
                rules.choose(named)
                layer.wanted = named.wanted
                placing.describe(layer, [found[origin] for origin in mine.values()])
                taken.update(mine)
        retie(model)
        for name, origin in taken.items():
            for part in (component.name for component in found[origin].components()):
                is_tied = f"{name}.{part}" in model.all_tied_weights_keys
                if f"{origin}.{part}" not in stored and not is_tied:
                    raise FormatError(f"{origin}.{part} is missing in the file, a part of a weight")

    def update_weight_conversions(self, weight_conversions: Any, model: Any = None) -> Any:
        """Leave the bytes of quantized weights as they lie, where floats would be rearranged.

        Older releases of transformers do not tell the model.
        """
        told = () if model is None else (model,)
        found = super().update_weight_conversions(weight_conversions, *told)
        return spared(found, self._loaded) if self.pre_quantized else found

    def quantize(self, model: Any, name: str, values: torch.Tensor) -> list[str]:
        """Take a weight as it comes; the names that nothing is missing of any more."""
        done = self._placing.take(name, values)
        if len(done) > 1:
            retie(model)
        return done

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if getattr(model, "_tp_size", None) is not None:
            raise ValueError(
                "a model of quantized weights cannot be loaded with a plan of tensor parallelism; "
                "device_map= spreads its layers"
            )
        self._loaded = None
        if not self.pre_quantized:
            self._placing.take_rest()
            KEPT.update({x.module: x.reason for x in self._layers if x.reason is not None})
            tell(model, self._layers, self._rules, warns_of_kept=False)
        found = [module for module in model.modules() if isinstance(module, HOLDERS)]
        for module in found:
            module.requires_grad_(False)
            if isinstance(module, Holder):
                module._decode_to(model.dtype)
        wanted, parts = self.quantization_config.prepack, [p for m in found for p in m.parameters()]
        if parts and (wanted or (wanted is None and all(part.is_cuda for part in parts))):
            prepack_(model)
        model._weight_conversions = spared_on_saving(model)
        return model

    # ---- saving, and back ----------------------------------------------------------------------

    def describe(self, model: Any) -> None:
        """Have config.json say what its layers are, where it says something else.

        Raises
        ------
        ValueError
            For what it cannot say.
        """
        config, made = self.quantization_config, made_as(model)
        layers = [Layer(None, kind, [name]) for name, (kind, _) in made.items()]
        rules = config.rules(layers)
        for layer, (kind, wanted) in zip(layers, made.values(), strict=True):
            rules.choose(layer)
            if not kind.by_name and not _same_inputs(layer.wanted or Wanted(wanted.format), wanted):
                config.describe({name: wanted for name, (_, wanted) in made.items()})
                break
        dtypes = {m._compute for m in model.modules() if isinstance(m, QuantLinear)}
        if len(dtypes) > 1:
            raise ValueError("config.json says one compute_dtype, and linear layers have several")
        if dtypes:
            (config.compute_dtype,) = dtypes
        model.config.quantization_config = config

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, Any]]:
        """Prepacked weights as rows, which any device reads; None: the model's own state_dict."""
        if not getattr(model, "_hf_peft_config_loaded", False):  # which saves adapters alone
            self.describe(model)
        found = [module for module in model.modules() if isinstance(module, Holder)]
        on_meta = any(part.is_meta for module in found for part in module._parts())
        if on_meta or not any(module.is_prepacked for module in found):
            return None, {}
        return as_rows(model), {}

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        # Saving a model makes a string of config.dtype, which `dequantize` passes on.
        dequantize_(model, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        if vars(model).pop("_tied_weights_keys", None) is not None:
            model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
        return model


class Quantize(ConversionOps):
    """Weights of a file on their way into the model: what is to be quantized stops here."""

    def __init__(self, quantizer: CuquantHfQuantizer) -> None:
        self.quantizer = quantizer

    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_dict: dict[str, Any], *, model: Any, missing_keys: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The tensors by their names in the model, without those that are quantized now."""
        others = {}
        for name, value in input_dict.items():
            if not self.quantizer.param_needs_quantization(model, name):
                others[name] = value
                continue
            values = value[0] if isinstance(value, list) else value
            for done in self.quantizer.quantize(model, name, values):
                if missing_keys is not None:
                    missing_keys.discard(done)
        return others


def _same_inputs(a: Wanted, b: Wanted) -> bool:
    """Whether layers treat inputs alike; what weights are, and a scale's value, files say."""
    first, second = ((x.activations, x.input_scale is None, x.is_llm_int8) for x in (a, b))
    return first == second


def _under(names: Sequence[str], prefix: str) -> list[str]:
    """Names of layers in a model that is a part of others, and in those others."""
    return [each for n in names for each in dict.fromkeys((n, prefix + n, n.removeprefix(prefix)))]


def _renamed(found: dict[str, WeightSpec], model: Any, layers: Sequence[Layer]) -> dict[str, str]:
    """A file's names of weights by those of this model, which may be a part of that one."""
    keys = {f"{n}.{EXTRA}": True for x in layers for names in holder_names(x) for n in names}
    conversions = get_model_conversion_mapping(model, None, None)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    prefix = model.base_model_prefix
    named = {}
    for name in found:
        key, _ = rename_source_key(f"{name}.{EXTRA}", renamings, [], prefix, keys)
        named[key.removesuffix(f".{EXTRA}")] = name
    return named


# ---- weights that are tied -----------------------------------------------------------------------


def _tied(model: Any) -> list[list[str]]:
    """The modules that share a weight."""
    found: dict[str, list[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        names = found.setdefault(source, [source.rpartition(".")[0]])
        names.append(target.rpartition(".")[0])
    return [*found.values()]


def _united(names: Sequence[str], by_name: dict[str, Layer], named: set[str]) -> list[Layer]:
    """Tied layers, which become one array in the format of the one that is named."""
    first = next(name for name in names if name in named)
    one = by_name.get(first)
    if one is None or one.wanted is None or one.reason is not None:
        why = "is no layer" if one is None else one.reason
        raise ValueError(f"{first} cannot be quantized: {why}")
    layers = []
    for name in names:
        layer = by_name.get(name)
        why = "it is no layer" if layer is None else None
        if layer is not None:
            is_excluded = layer.reason == "excluded"
            why = obstacle(layer.module, layer.kind, one.wanted.format)
            why = "exclude both or none" if is_excluded else why
        if layer is None or why is not None:
            raise ValueError(f"{first} shares its weight with {name}: {why}")
        layer.wanted, layer.reason = one.wanted, None
        layers.append(layer)
    return layers


def retie(model: Any) -> None:
    """Tie the components of tied weights that are quantized, where transformers ties weights."""
    ties = {}
    for target, source in model.all_tied_weights_keys.items():
        (to, _, _), (of, _, _) = target.rpartition("."), source.rpartition(".")
        mine, other = model.get_submodule(to), model.get_submodule(of)
        if not (isinstance(mine, Holder) and isinstance(other, Holder)):
            ties[target] = source
            continue
        ties.update({f"{to}.{name}": f"{of}.{name}" for name in other._names})
    if ties != model.all_tied_weights_keys:
        for module in model.modules():
            if hasattr(type(module), "_tied_weights_keys"):
                module._tied_weights_keys = None
        model._tied_weights_keys = model.all_tied_weights_keys = ties


# ---- rearranged weights --------------------------------------------------------------------------


def spared(conversions: Iterable[Any], model: Any) -> list[Any]:
    """The conversions of a model's weights without those that would rearrange quantized ones."""
    keys = _keys(model)
    return [c for c in conversions if not (isinstance(c, WeightConverter) and _meets(c, keys))]


def spared_on_saving(model: Any) -> list[Any]:
    """The same of conversions that `save_pretrained` reverts."""
    keys, found = _keys(model), getattr(model, "_weight_conversions", None)
    if found is None:
        found = get_model_conversion_mapping(model, add_legacy=False)
        found = [c for c in found if type(c) is not PrefixChange]
    return [
        c
        for c in found
        if not (isinstance(c, WeightConverter) and _meets(c.reverse_transform(), keys))
    ]


def _keys(model: Any) -> list[str]:
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Holder)
        for name in (*module._names, EXTRA)
    ]


def _meets(conversion: Any, keys: Sequence[str]) -> bool:
    asked = copy.copy(conversion)  # it remembers what it met
    return any(asked.rename_source_key(key)[1] is not None for key in keys)
