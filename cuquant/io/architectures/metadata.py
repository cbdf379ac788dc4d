"""Settings of a model: GGUF's keys and transformers' config.json, one table for both directions.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's
convert_hf_to_gguf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cuquant.io.architectures.names import Architecture, of_hf
from cuquant.io.container.messages import quote

ROPE_FACTORS = "rope_freqs.weight"  # a tensor of GGUF: llama 3's stretched frequencies


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
ROPES = ("default", "linear", "yarn", "llama3")  # ways to stretch positions that are written


def _settings(found: Architecture) -> tuple[Setting, ...]:
    if not found.experts:
        return SETTINGS
    return (*SETTINGS, *(s if s.hf else s._replace(hf=found.counted) for s in EXPERTS))


def from_config(config: Mapping[str, Any]) -> tuple[Architecture, dict[str, Any]] | None:
    """The architecture and GGUF's metadata of a config.json; None where it is not known.

    Raises
    ------
    ValueError
        For a setting that is none, or a way to stretch positions that is not written.
    """
    found = of_hf(config.get("model_type"))
    if found is None or not all(key in config for key in NEEDED):
        return None
    told = dict(config)
    rope = rope_of(config)
    told.setdefault("num_key_value_heads", told["num_attention_heads"])
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
            raise ValueError(f"config.json has {source} {quote(value)}; a number is wanted")
        made[f"{found.name}.{key}"] = dtype(value)
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    made[f"{found.name}.rope.dimension_count"] = np.uint32(dim)
    return found, made | _stretched(found.name, rope)


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """How positions are stretched: `rope_parameters`, or `rope_scaling` of older configurations."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if isinstance(found, dict):
            return {**found, "rope_type": found.get("rope_type") or found.get("type", "default")}
    return {"rope_type": "default"}


def _stretched(name: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope["rope_type"]
    if kind not in ROPES:
        raise ValueError(
            f"config.json stretches positions by {quote(kind)}, which is not written yet"
        )
    if kind in ("default", "llama3"):  # llama 3's are a tensor
        return {}
    made: dict[str, Any] = {f"{name}.rope.scaling.type": kind}
    if isinstance(factor := rope.get("factor"), (int, float)):
        made[f"{name}.rope.scaling.factor"] = np.float32(factor)
    if isinstance(length := rope.get("original_max_position_embeddings"), int):
        made[f"{name}.rope.scaling.original_context_length"] = np.uint32(length)
    return made


def rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """What llama 3 divides its frequencies by, float32 [head_dim / 2]; None for other models.

    Source: transformers 5, modeling_rope_utils._compute_llama3_parameters.
    """
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    factor, low, high = (
        float(rope.get(key, usual))
        for key, usual in (("factor", 8), ("low_freq_factor", 1), ("high_freq_factor", 4))
    )
    length = float(rope.get("original_max_position_embeddings", 8192))
    waves = 2 * math.pi * base ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


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
    kind = metadata.get(f"{found.name}.rope.scaling.type")
    factor = metadata.get(f"{found.name}.rope.scaling.factor")
    if kind in ("linear", "yarn") and isinstance(factor, np.floating):
        config["rope_scaling"] = {"rope_type": kind, "factor": float(str(factor))}
        length = metadata.get(f"{found.name}.rope.scaling.original_context_length")
        if isinstance(length, np.integer):
            config["rope_scaling"]["original_max_position_embeddings"] = int(length)
    return config
