"""CuquantConfig: what transformers is asked to quantize, and what config.json says of it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from cuquant.errors import clipped
from cuquant.formats import Format
from cuquant.formats.names import FormatName, FormatOptions, Unpack
from cuquant.torch.report import entry
from cuquant.torch.rules import Config, Layer, Rules, Wanted
from cuquant.torch.spec import DTYPES

NAME = "cuquant"
_FIELDS = (
    "format", "include", "exclude", "modules_to_not_convert", "activations", "compute_dtype",
    "prepack",
)  # fmt: skip
_log = logging.getLogger("cuquant.integrations")


class CuquantConfig(QuantizationConfigMixin):
    """`quantize_`'s arguments, for `from_pretrained(..., quantization_config=...)`.

    Linear layers and fused experts are quantized. Kept is what transformers keeps by default, the
    lm_head, the last module and weights that are tied, unless `format` or `include` has the exact
    name of the layer. Of two tied layers one name stands for both, which share one array.

    Parameters
    ----------
    format
        A format's name, string or Format, "llm_int8", or a plan {pattern: format, or None to keep}.
    include, exclude
        Patterns, as `quantize_` has them.
    modules_to_not_convert
        Modules to keep, as transformers matches them: names, ends of names or regular expressions.
        They add to those that are kept by default.
    activations
        The format that inputs of linear layers and experts are quantized to.
    compute_dtype
        What x is cast to in linear layers, a dtype or its name, and the result back. None: x's.
    prepack
        As of `quantize_`.
    **format_options
        Of `get_format`, such as block_size=32.

    Raises
    ------
    TypeError, ValueError
        For an unknown format or another wrong argument.

    Examples
    --------
    >>> from cuquant.integrations.transformers import CuquantConfig
    >>> CuquantConfig({"*.mlp.*": "int4", "*": "nf4"}, block_size=32).format
    {'*.mlp.*': 'int4:32', '*': 'nf4:32'}
    """

    def __init__(
        self,
        format: Config = "nf4",
        *,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        activations: FormatName | str | Format | None = None,
        compute_dtype: torch.dtype | str | None = None,
        prepack: bool | None = None,
        **format_options: Unpack[FormatOptions],
    ) -> None:
        rules = Rules.of((), format, format_options, include, exclude, activations)
        plan = {pattern: entry(wanted) for pattern, wanted in rules.formats}
        self.quant_method: Any = NAME
        self.format: Any = plan
        self.activations: str | None = None
        if not isinstance(format, Mapping) and plan.keys() == {"*"} and rules.formats[0][1]:
            weight = replace(rules.formats[0][1], activations=None)
            self.format = entry(weight)
            self.activations = None if activations is None else plan["*"]["activations"]
        self.include = None if rules.include is None else [*rules.include]
        self.exclude = [*rules.exclude]
        self.modules_to_not_convert = [*(modules_to_not_convert or ())]
        self.compute_dtype = _dtype(compute_dtype)
        if prepack not in (None, True, False):
            raise TypeError(f"prepack must be None, True or False, got {clipped(prepack)}")
        self.prepack = prepack

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Of config.json; what a later version has written beside is left out."""
        later = config_dict.keys() - {*_FIELDS, "quant_method"}
        if later:
            _log.info("keys that this version does not know are left out: %s", sorted(later))
        given = {key: config_dict[key] for key in _FIELDS if key in config_dict}
        if isinstance(pairs := given.get("format"), list):
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
                raise ValueError(
                    f"format must be pairs of pattern and format, got {clipped(pairs)}"
                )
            given["format"] = dict(pairs)
        config = cls(**given)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """What config.json gets, JSON alone."""
        said = {key: getattr(self, key) for key in _FIELDS}
        if isinstance(self.format, dict):  # the first pattern counts, and transformers sorts keys
            said["format"] = [[pattern, value] for pattern, value in self.format.items()]
        dtype = self.compute_dtype
        said["compute_dtype"] = None if dtype is None else str(dtype).removeprefix("torch.")
        return {"quant_method": NAME, **said}

    def rules(self, layers: Sequence[Layer]) -> Rules:
        """What it says of layers that are quantized."""
        return Rules.of(layers, self.format, {}, self.include, None, self.activations)

    def describe(self, plan: Mapping[str, Wanted]) -> None:
        """Say of each layer what it is."""
        self.format = {name: entry(wanted) for name, wanted in plan.items()}
        self.activations = self.include = None
        self.exclude = []

    def named(self) -> set[str]:
        """Patterns of formats and of `include`, among them exact names."""
        plan = self.format if isinstance(self.format, dict) else {}
        return {*(self.include or ()), *(p for p, value in plan.items() if value is not None)}


def _dtype(given: Any) -> torch.dtype | None:
    if isinstance(given, str):
        given = DTYPES.get(given.removeprefix("torch."), given)
    if given is None or given in DTYPES.values():
        return given
    known = ", ".join(DTYPES)
    raise ValueError(f"compute_dtype must be None or one of {known}, got {clipped(given)}")
