"""How positions are stretched: GGUF's keys and tensors, and transformers' configuration.

Source: transformers 5, modeling_rope_utils; llama.cpp's convert_hf_to_gguf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cuquant.errors import FormatError
from cuquant.io.architectures.names import Architecture
from cuquant.io.container.messages import quote

ROPE_FACTORS = "rope_freqs.weight"  # a tensor of GGUF: llama 3's stretched frequencies
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # of "longrope"
MOST_FACTORS = 1 << 16
LENGTH = "original_max_position_embeddings"
ROPES = ("default", "linear", "yarn", "llama3")  # ways to stretch positions that are written
LONGROPE = ("longrope", "su")  # of phi3


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """How positions are stretched: `rope_parameters`, or `rope_scaling` of older configurations."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if isinstance(found, dict):
            whole = found.get("full_attention")  # of models with a window in other layers
            found = whole if isinstance(whole, dict) else found
            return {**found, "rope_type": found.get("rope_type") or found.get("type", "default")}
    return {"rope_type": "default"}


def head_dim(config: Mapping[str, Any]) -> int:
    """Columns of a head; FormatError where they are no number."""
    own, size = config.get("head_dim"), config.get("hidden_size")
    heads = config.get("num_attention_heads")
    if not own and type(size) is int and type(heads) is int and heads > 0:
        own = size // heads
    if type(own) is not int or not 0 < own <= 2 * MOST_FACTORS:
        raise FormatError(
            f"config.json has head_dim {quote(own)}, hidden_size {quote(size)} and "
            f"num_attention_heads {quote(heads)}; numbers are wanted"
        )
    return own


def _number(rope: Mapping[str, Any], key: str, usual: float) -> float:
    """A number of the settings, above 0; FormatError for anything else."""
    value = rope.get(key, usual)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**32:
        raise FormatError(f"config.json stretches positions by {key} {quote(value)}")
    return value


def rotated_part(config: Mapping[str, Any]) -> float:
    """The part of a head that positions rotate."""
    value = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise FormatError(f"config.json has partial_rotary_factor {quote(value)}; 0 to 1 is wanted")
    return float(value)


def stretched(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF's keys of an architecture.

    Raises
    ------
    ValueError
        For a way to stretch positions that is not written.
    """
    rope = rope_of(config)
    kind = rope["rope_type"]
    if name == "phi3" and kind in LONGROPE:
        return _longrope(name, config, rope)
    if kind not in ROPES:
        raise ValueError(
            f"config.json stretches positions by {quote(kind)}, which is not written yet"
        )
    if kind in ("default", "llama3"):  # llama 3's are a tensor
        return {}
    made: dict[str, Any] = {f"{name}.rope.scaling.type": kind}
    if "factor" in rope:
        made[f"{name}.rope.scaling.factor"] = np.float32(_number(rope, "factor", 1))
    if rope.get(LENGTH) is not None:
        made[f"{name}.rope.scaling.original_context_length"] = np.uint32(_number(rope, LENGTH, 1))
    return made


def _longrope(
    name: str, config: Mapping[str, Any], rope: Mapping[str, Any]
) -> dict[str, np.generic]:
    """What longrope needs beside its factors. Source: transformers 5, modeling_rope_utils."""
    length, own = config.get("max_position_embeddings"), _own_length(config, rope)
    if type(length) is not int or not 1 < own <= length:
        raise ValueError(f"config.json stretches {quote(own)} positions to {quote(length)}")
    factor = rope.get("attention_factor")
    if factor is None:
        factor = math.sqrt(1 + math.log(length / own) / math.log(own))
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise FormatError(f"config.json has attention_factor {quote(factor)}; a number is wanted")
    return {
        f"{name}.rope.scaling.attn_factor": np.float32(factor),
        f"{name}.rope.scaling.original_context_length": np.uint32(own),
    }


def _own_length(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    value = rope.get(LENGTH, config.get(LENGTH))
    return value if type(value) is int else 0


def rope_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tensors of GGUF that hold what positions are stretched by; {} for most models."""
    rope = rope_of(config)
    if rope["rope_type"] not in LONGROPE:
        factors = rope_factors(config)
        return {} if factors is None else {ROPE_FACTORS: factors}
    dim = head_dim(config)
    made = {}
    for tensor, key in ((LONG, "long_factor"), (SHORT, "short_factor")):
        found = rope.get(key)
        if not isinstance(found, list) or len(found) != int(dim * rotated_part(config)) // 2:
            raise FormatError(f"config.json has no {key} for each pair of {dim} columns")
        if not all(type(value) in (int, float) for value in found):
            raise FormatError(f"config.json has a {key} that is no number")
        made[tensor] = np.array(found, np.float32)
    return made


def to_longrope(
    found: Architecture, metadata: Mapping[str, Any], long: np.ndarray, short: np.ndarray
) -> dict[str, Any]:
    """What config.json says of a model of GGUF's with these factors.

    Raises
    ------
    FormatError
        For factors that are none.
    """
    for factors in (long, short):
        if factors.dtype != np.float32 or factors.ndim != 1 or factors.size > MOST_FACTORS:
            raise FormatError(
                f"factors of {factors.dtype}{list(factors.shape)} are none of longrope"
            )
    rope = {
        "rope_type": "longrope",
        "long_factor": [float(str(value)) for value in long],
        "short_factor": [float(str(value)) for value in short],
    }
    made: dict[str, Any] = {"rope_scaling": rope}
    own = metadata.get(f"{found.name}.rope.scaling.original_context_length")
    if isinstance(own, np.integer):
        made["original_max_position_embeddings"] = int(own)
    factor = metadata.get(f"{found.name}.rope.scaling.attn_factor")
    if isinstance(factor, np.floating):
        rope["attention_factor"] = float(str(factor))
    return made


def rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """What llama 3 divides its frequencies by, float32 [head_dim / 2]; None for other models.

    Source: transformers 5, modeling_rope_utils._compute_llama3_parameters.
    """
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return None
    dim = head_dim(config)
    base = _number(rope if "rope_theta" in rope else config, "rope_theta", 10000.0)
    factor, low, high = (
        _number(rope, key, usual)
        for key, usual in (("factor", 8), ("low_freq_factor", 1), ("high_freq_factor", 4))
    )
    length = _number(rope, LENGTH, 8192)
    if low >= high:
        raise FormatError(f"config.json stretches positions by factors from {low} to {high}")
    waves = 2 * math.pi * base ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
