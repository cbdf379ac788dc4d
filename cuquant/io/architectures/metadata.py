"""Settings of a model: GGUF's keys and transformers' config.json, one table for both directions.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's
convert_hf_to_gguf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cuquant.errors import FormatError
from cuquant.io.architectures.names import Architecture, of_hf
from cuquant.io.architectures.positions import head_dim, rope_of, rotated_part, stretched
from cuquant.io.container.messages import quote

MANY_LAYERS = 1 << 12


class Setting(NamedTuple):
    """A setting: GGUF's key behind the architecture's name, config.json's, and GGUF's type."""

    gguf: str
    hf: str
    dtype: Callable[[Any], np.generic]


SETTINGS = (
    Setting("block_count", "num_hidden_layers", np.uint32),
    Setting("context_length", "max_position_embeddings", np.uint32),
    Setting("embedding_length", "hidden_size", np.uint32),
    Setting("feed_forward_length", "intermediate_size", np.uint32),
    Setting("attention.head_count", "num_attention_heads", np.uint32),
    Setting("attention.head_count_kv", "num_key_value_heads", np.uint32),
    Setting("attention.key_length", "head_dim", np.uint32),
    Setting("attention.value_length", "head_dim", np.uint32),
    Setting("attention.layer_norm_rms_epsilon", "rms_norm_eps", np.float32),
    Setting("attention.sliding_window", "sliding_window", np.uint32),
    Setting("rope.freq_base", "rope_theta", np.float32),
    Setting("vocab_size", "vocab_size", np.uint32),
    Setting("attn_logit_softcapping", "attn_logit_softcapping", np.float32),
    Setting("final_logit_softcapping", "final_logit_softcapping", np.float32),
)
EXPERTS = (  # of architectures that have some; `counted` is the first one's key
    Setting("expert_count", "", np.uint32),
    Setting("expert_used_count", "num_experts_per_tok", np.uint32),
    Setting("expert_feed_forward_length", "moe_intermediate_size", np.uint32),
)
NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads")


def _settings(found: Architecture) -> tuple[Setting, ...]:
    if not found.experts:
        return SETTINGS
    return (*SETTINGS, *(s if s.hf else s._replace(hf=found.counted) for s in EXPERTS))


def from_config(config: Mapping[str, Any]) -> tuple[Architecture, dict[str, Any]] | None:
    """The architecture and GGUF's metadata of a config.json; None where it is not known.

    Raises
    ------
    FormatError
        For a setting that is none.
    ValueError
        For one that GGUF has in another way, and a way to stretch positions that is not written.
    """
    found = of_hf(config.get("model_type"))
    if found is None or any(config.get(key) is None for key in NEEDED):
        return None
    for key in NEEDED:
        if type(config[key]) is not int or config[key] < 1:
            raise FormatError(f"config.json has {key} {quote(config[key])}; a number is wanted")
    told = dict(config)
    rope = rope_of(config)
    if told.get("num_key_value_heads") is None:
        told["num_key_value_heads"] = told["num_attention_heads"]
    told.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
    if not told.get("use_sliding_window", True):
        told.pop("sliding_window", None)
    made: dict[str, Any] = {"general.architecture": found.name}
    if isinstance(name := config.get("_name_or_path"), str) and name:
        made["general.name"] = name.rstrip("/").rpartition("/")[2]
    for key, usual in found.fixed.items():
        if config.get(key) != usual:
            raise ValueError(f"config.json has {key} {quote(config.get(key))}; GGUF has {usual}")
    for key, source, dtype in _settings(found):
        value = told.get(source)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**32:
            raise FormatError(f"config.json has {source} {quote(value)}; a number is wanted")
        made[f"{found.name}.{key}"] = dtype(value)
    dim = head_dim(config)
    made[f"{found.name}.rope.dimension_count"] = np.uint32(dim * rotated_part(config))
    if found.name == "gemma3":
        _check_gemma_3(config)
    return found, made | stretched(found.name, config)


def _check_gemma_3(config: Mapping[str, Any]) -> None:
    """ValueError where llama.cpp, which has these numbers in its code, computes another model."""
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    by_heads = config["hidden_size"] // heads
    scalar = by_heads if layers == 62 else config.get("head_dim", 256)  # 62: of 27B
    near = config.get("rope_parameters")
    local = near.get("sliding_attention") if isinstance(near, dict) else None
    base = local.get("rope_theta") if isinstance(local, dict) else None
    kinds = config.get("layer_types")
    if type(layers) is not int or layers > MANY_LAYERS:
        raise FormatError(f"config.json has num_hidden_layers {quote(layers)}")
    want = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
    for key, value, usual in (
        ("query_pre_attn_scalar", config.get("query_pre_attn_scalar", scalar), scalar),
        ("rope_local_base_freq", base or config.get("rope_local_base_freq", 10000.0), 10000.0),
        ("sliding_window_pattern", config.get("sliding_window_pattern", 6), 6),
        ("layer_types", want if kinds is None else kinds, want),
    ):
        if value != usual:
            raise ValueError(f"config.json has {key} {quote(value)}; GGUF's gemma3 has {usual}")


def to_config(found: Architecture, metadata: Mapping[str, Any], is_tied: bool) -> dict[str, Any]:
    """config.json of GGUF's metadata."""
    config: dict[str, Any] = {
        "architectures": [found.model_class],
        "model_type": found.model_types[0],
        "tie_word_embeddings": is_tied,
        **found.fixed,
    }
    for key, name, _ in _settings(found):
        value = metadata.get(f"{found.name}.{key}")
        if isinstance(value, np.integer):
            config[name] = int(value)
        elif isinstance(value, np.floating):
            config[name] = float(str(value))  # 1e-05, not the float32's 9.999999747378752e-06
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config and tokens is not None:
        config["vocab_size"] = len(tokens)
    for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")  # classes have numbers of their own
        config[f"{key}_token_id"] = int(value) if isinstance(value, np.integer) else None
    rotated = metadata.get(f"{found.name}.rope.dimension_count")
    wide = config.get("head_dim") or config.get("hidden_size", 0) // max(
        config.get("num_attention_heads", 1), 1
    )
    if isinstance(rotated, np.integer) and 0 < rotated < wide:
        config["partial_rotary_factor"] = int(rotated) / wide
    kind = metadata.get(f"{found.name}.rope.scaling.type")
    factor = metadata.get(f"{found.name}.rope.scaling.factor")
    if kind in ("linear", "yarn") and isinstance(factor, np.floating):
        config["rope_scaling"] = {"rope_type": kind, "factor": float(str(factor))}
        length = metadata.get(f"{found.name}.rope.scaling.original_context_length")
        if isinstance(length, np.integer):
            config["rope_scaling"]["original_max_position_embeddings"] = int(length)
    return config
