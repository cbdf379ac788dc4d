"""transformers: models that are quantized while they load, saved, and loaded again.

    import cuquant.integrations.transformers as cq_hf

    config = cq_hf.CuquantConfig("nf4")
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config)
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)

Importing this module registers "cuquant" with transformers. A saved model needs that too: without
it transformers warns of an unknown quantization type, and makes up random weights.
"""

import os
from pathlib import Path
from typing import Any, TypeVar

from cuquant.errors import pip_install

try:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights
    from transformers.quantizers.auto import register_quantization_config, register_quantizer

    from cuquant.integrations.configuration import NAME, CuquantConfig
    from cuquant.integrations.quantizer import CuquantHfQuantizer, retie
except ImportError as error:
    raise ImportError(
        "cuquant.integrations.transformers needs torch and transformers 5.8 or newer: "
        f"{pip_install('transformers')}"
    ) from error

from cuquant.torch import load_
from cuquant.torch.report import entry, made_as

__all__ = ["CuquantConfig", "CuquantHfQuantizer", "load_pretrained", "mark_quantized"]

M = TypeVar("M")

register_quantization_config(NAME)(CuquantConfig)
register_quantizer(NAME)(CuquantHfQuantizer)


def load_pretrained(
    path: str | os.PathLike[str],
    model_class: Any = AutoModelForCausalLM,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> Any:
    """Load what `cuquant.torch.load_` reads as a model of transformers, without other libraries.

    A folder of GPTQ, AWQ, compressed-tensors, bitsandbytes and others, of `cuquant quantize`, or a
    GGUF file. Linear layers and experts compute with the codes and scales that lie in the file;
    embeddings are decoded. The model can be saved (`save_pretrained`) and trained as any of ours. A
    file of plain floats makes a plain model.

    Parameters
    ----------
    path
        A folder with config.json, or a GGUF file.
    model_class
        An auto class or a model class of transformers.
    dtype
        Of what is not quantized. None: that of config.json.
    device
        Where to move the model. None: the CPU.

    Raises
    ------
    FileNotFoundError, ValueError
        Where there is no such path, or it is another file; names on the Hub are not looked for.
    FormatError, RuntimeError
        As `load_`.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(2, "no such folder or file; download it first", str(path))
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(f"{path}: is a file; name the folder, in which config.json is too")
    folder, gguf = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
    config = AutoConfig.from_pretrained(folder, gguf_file=gguf)
    vars(config).pop("quantization_config", None)  # that of the library that wrote the file
    if dtype is not None or config.dtype is None:
        config.dtype = dtype or torch.float32
    make = getattr(model_class, "from_config", None) or model_class._from_config
    with no_init_weights():  # and so no page of the float weights is ever touched
        model = make(config, dtype=config.dtype)
    load_(model, path)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model = model.eval()
    return (mark_quantized(model) if made_as(model) else model).to(device or "cpu")


def mark_quantized(model: M) -> M:
    """Let transformers know that a model is quantized, which `quantize_` or `load_` made so.

    `save_pretrained` then writes what `from_pretrained` reads. A model that was quantized while
    it was loaded is marked already.

    Parameters
    ----------
    model
        A PreTrainedModel with quantized layers.

    Returns
    -------
    The model.

    Raises
    ------
    ValueError
        For a model without quantized layers, or one whose layers config.json cannot describe, such
        as those with an activation.

    Examples
    --------
    >>> import cuquant.torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, vocab_size=64)
    >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    >>> model = cuquant.torch.quantize_(model, "nf4", exclude="lm_head")
    >>> mark_quantized(model).config.quantization_config.format
    'nf4'
    """
    given: Any = model
    plan = made_as(given)
    if not plan:
        raise ValueError("model has no quantized layer; cuquant.torch.quantize_ makes them")
    entries = {name: entry(wanted) for name, (_, wanted) in plan.items()}
    first = next(iter(entries.values()))
    is_one = isinstance(first, str) and all(value == first for value in entries.values())
    config = CuquantConfig(first if is_one else entries)
    quantizer = CuquantHfQuantizer(config, pre_quantized=True)
    quantizer.describe(given)
    given.is_quantized, given.quantization_method, given.hf_quantizer = True, NAME, quantizer
    retie(given)
    quantizer.postprocess_model(given)
    return model
