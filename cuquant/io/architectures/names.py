"""What a tensor is called in GGUF and in transformers, and rows that the two have in another order.

ggml rotates neighbouring pairs of a head's rows in llama's attention, transformers its two halves:
`row_order` is what llama.cpp's converter makes of q_proj and k_proj. Source: gguf-py's
tensor_mapping and llama.cpp's convert_hf_to_gguf.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ENDINGS = ("weight", "bias")


@dataclass(frozen=True)
class Architecture:
    """A family of models.

    Attributes
    ----------
    name
        GGUF's general.architecture.
    model_types
        transformers' names; the first is written.
    model_class
        transformers' class of causal language models.
    block
        Names that differ from BLOCK.
    is_permuted
        Whether rows of q_proj and k_proj lie in another order.
    adds_one
        Whether GGUF's weights of norms are one more than transformers'.
    pre
        GGUF's name of how bytes are split into words, for tokens of bytes.
    experts
        Names of arrays of experts in GGUF, and of their matrices, with {} for the number.
    counted
        config.json's key of how many experts there are.
    fixed
        What config.json says where GGUF has no key for it.
    """

    name: str
    model_types: tuple[str, ...]
    model_class: str
    block: Mapping[str, str] = field(default_factory=dict)
    is_permuted: bool = False
    adds_one: bool = False
    pre: str = "default"
    experts: Mapping[str, str] = field(default_factory=dict)
    counted: str = "num_experts"
    fixed: Mapping[str, object] = field(default_factory=dict)

    def in_hf(self, name: str) -> str | None:
        """transformers' name of a tensor of GGUF, with {} for the number of an expert; None for one
        that has none."""
        stem, _, ending = name.rpartition(".")
        if ending not in ENDINGS:
            return None
        if stem in TOP:
            return f"{TOP[stem]}.{ending}"
        found = re.fullmatch(r"blk\.(\d{1,4})\.(\w+)", stem)
        inner = {**self._names, **self.experts}.get(found[2]) if found else None
        return f"model.layers.{found[1]}.{inner}.{ending}" if found and inner else None

    def in_gguf(self, name: str) -> str | None:
        """GGUF's name of a tensor of transformers; None for one that has none."""
        stem, _, ending = name.rpartition(".")
        if ending not in ENDINGS:
            return None
        for ours, theirs in TOP.items():
            if stem == theirs:
                return f"{ours}.{ending}"
        found = re.fullmatch(r"model\.layers\.(\d{1,4})\.([\w.]+)", stem)
        for ours, theirs in self._names.items() if found else ():
            if found and found[2] == theirs:
                return f"blk.{found[1]}.{ours}.{ending}"
        return None

    def expert_in_gguf(self, name: str) -> tuple[str, int] | None:
        """GGUF's name of the array of experts that has a tensor of transformers, and which of it
        that is; None for other tensors."""
        found = re.fullmatch(r"model\.layers\.(\d{1,4})\.(.+)\.(\d{1,4})\.(\w+)\.weight", name)
        for ours, theirs in self.experts.items() if found else ():
            if found and theirs == f"{found[2]}.{{}}.{found[4]}":
                return f"blk.{found[1]}.{ours}.weight", int(found[3])
        return None

    @property
    def _names(self) -> dict[str, str]:
        return {**BLOCK, **self.block}

    def heads_of(self, name: str) -> str | None:
        """The heads of a tensor of GGUF whose rows lie in another order: "head_count" or
        "head_count_kv"; None for other tensors."""
        if not self.is_permuted:
            return None
        part = name.rpartition(".")[0].rpartition(".")[2]
        return {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(part)

    def has_one_more(self, name: str) -> bool:
        """Whether a tensor of GGUF is one more than transformers'."""
        return self.adds_one and name.endswith("norm.weight")


GEMMA_2 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


def _experts(stem: str, gate: str, down: str, up: str) -> dict[str, str]:
    parts = {"ffn_gate_exps": gate, "ffn_down_exps": down, "ffn_up_exps": up}
    return {ours: f"{stem}.{{}}.{theirs}" for ours, theirs in parts.items()}


ARCHITECTURES = (
    Architecture(
        "llama", ("llama", "mistral"), "LlamaForCausalLM", is_permuted=True, pre="llama-bpe"
    ),
    Architecture(
        "llama", ("mixtral",), "MixtralForCausalLM", {"ffn_gate_inp": "block_sparse_moe.gate"},
        is_permuted=True, pre="llama-bpe", counted="num_local_experts",
        experts=_experts("block_sparse_moe.experts", "w1", "w2", "w3"),
    ),
    Architecture("qwen2", ("qwen2",), "Qwen2ForCausalLM", pre="qwen2"),
    Architecture("qwen3", ("qwen3",), "Qwen3ForCausalLM", pre="qwen2"),
    Architecture(
        "qwen3moe", ("qwen3_moe",), "Qwen3MoeForCausalLM", {"ffn_gate_inp": "mlp.gate"},
        pre="qwen2", fixed={"norm_topk_prob": True},
        experts=_experts("mlp.experts", "gate_proj", "down_proj", "up_proj"),
    ),
    Architecture("gemma", ("gemma",), "GemmaForCausalLM", adds_one=True),
    Architecture("gemma2", ("gemma2",), "Gemma2ForCausalLM", GEMMA_2, adds_one=True),
    Architecture("gemma3", ("gemma3_text",), "Gemma3ForCausalLM", GEMMA_2, adds_one=True),
    Architecture("phi3", ("phi3",), "Phi3ForCausalLM", PHI),
)  # fmt: skip


def of_gguf(metadata: Mapping[str, Any]) -> Architecture | None:
    """The architecture that GGUF's metadata tells: of one name the one with experts, or without."""
    name = metadata.get("general.architecture")
    count = metadata.get(f"{name}.expert_count", 0)
    found = [a for a in ARCHITECTURES if a.name == name]
    same = (a for a in found if bool(a.experts) == (isinstance(count, np.integer) and count > 0))
    return next(same, None)


def of_hf(model_type: object) -> Architecture | None:
    """The architecture that transformers calls so."""
    return next((a for a in ARCHITECTURES if model_type in a.model_types), None)


def row_order(rows: int, heads: int) -> np.ndarray:
    """Rows of transformers in the order of GGUF: of each head one of the first half, then one of
    the second.

    >>> row_order(8, 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    if heads < 1 or rows % (2 * heads):
        raise ValueError(f"{rows} rows are not those of {heads} heads")
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
