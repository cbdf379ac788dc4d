"""Tokens of tokenizer.json as GGUF's metadata: of bytes ("gpt2"), or of pieces ("llama").

llama.cpp joins the two neighbouring pieces whose whole has the best score; minus the rank of a
merge gives the order of tokenizer.json. Source: llama.cpp, llama-vocab.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from cuquant.io.architectures.names import Architecture

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_TOKENS = 1 << 21
SPECIAL = ("bos", "eos", "unk", "pad")
CALLED = {"unk": "unknown", "pad": "padding"}  # in GGUF


def from_json(
    tokenizer: Mapping[str, Any],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    found: Architecture,
) -> tuple[dict[str, Any], str | None]:
    """GGUF's metadata of tokens, and a warning.

    Parameters
    ----------
    tokenizer, settings, config
        tokenizer.json, tokenizer_config.json and config.json.
    found
        The architecture.

    Returns
    -------
    ({}, why) for a tokenizer that is none of bytes or pieces.
    """
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        return {}, "tokenizer.json is none of BPE: the file has no tokens"
    tokens = _tokens(model.get("vocab"), tokenizer.get("added_tokens"), config.get("vocab_size"))
    if tokens is None:
        return {}, "tokenizer.json is damaged: the file has no tokens"
    texts, kinds = tokens
    merges = [" ".join(m) if isinstance(m, list) else str(m) for m in model.get("merges") or ()]
    made: dict[str, Any] = {}
    warning = None
    if model.get("byte_fallback"):
        made["tokenizer.ggml.model"] = "llama"
        made["tokenizer.ggml.pre"] = "default"
        made["tokenizer.ggml.scores"] = _scores(texts, kinds, merges)
    else:
        made["tokenizer.ggml.model"] = "gpt2"
        made["tokenizer.ggml.pre"] = found.pre
        made["tokenizer.ggml.merges"] = merges or [""]
        if found.pre == "default":
            warning = "how the tokenizer splits words is not known: tokenizer.ggml.pre is default"
    made["tokenizer.ggml.tokens"] = texts
    made["tokenizer.ggml.token_type"] = np.array(kinds, np.int32)
    index = {text: i for i, text in reversed(list(enumerate(texts)))}
    for name in SPECIAL:
        number = _special(name, settings, config, index)
        if number is not None:
            made[f"tokenizer.ggml.{CALLED.get(name, name)}_token_id"] = np.uint32(number)
    for name in ("bos", "eos"):
        if isinstance(flag := settings.get(f"add_{name}_token"), bool):
            made[f"tokenizer.ggml.add_{name}_token"] = flag
    if isinstance(template := settings.get("chat_template"), str):
        made["tokenizer.chat_template"] = template
    return made, warning


def _tokens(vocab: object, added: object, size: object) -> tuple[list[str], list[int]] | None:
    """Texts and kinds by number, without a token unused; None for what is no vocabulary."""
    if not isinstance(vocab, dict) or not vocab:
        return None
    found: dict[int, tuple[str, int]] = {}
    for text, number in vocab.items():
        if type(number) is not int or not 0 <= number < MAX_TOKENS:
            return None
        is_byte = re.fullmatch(r"<0x[0-9A-F]{2}>", text) is not None
        found[number] = text, BYTE if is_byte else NORMAL
    for token in added if isinstance(added, list) else ():
        number, text = (
            (token.get("id"), token.get("content")) if isinstance(token, dict) else (0, 0)
        )
        if type(number) is not int or not isinstance(text, str) or not 0 <= number < MAX_TOKENS:
            return None
        kind = CONTROL if token.get("special") else USER_DEFINED
        found[number] = text, UNKNOWN if text == "<unk>" else kind
    count = max(found) + 1
    if type(size) is int and count < size <= MAX_TOKENS:
        count = size  # rows of the embedding that no token has
    spare = [found.get(i, (f"[PAD{i}]", UNUSED)) for i in range(count)]
    return [text for text, _ in spare], [kind for _, kind in spare]


def _scores(texts: list[str], kinds: list[int], merges: list[str]) -> np.ndarray:
    """Of a piece minus the rank of the merge that makes it; of one that none makes the least."""
    rank = {}
    for i, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), i)
    least = len(merges)
    return np.array(
        [-rank.get(t, least) if k == NORMAL else 0 for t, k in zip(texts, kinds, strict=True)],
        np.float32,
    )


def _special(
    name: str, settings: Mapping[str, Any], config: Mapping[str, Any], index: Mapping[str, int]
) -> int | None:
    """The number of a special token: config.json's, or that of tokenizer_config.json's text."""
    number = config.get(f"{name}_token_id")
    if isinstance(number, list) and number:
        number = number[0]
    if type(number) is int and 0 <= number < MAX_TOKENS:
        return number
    text = settings.get(f"{name}_token")
    if isinstance(text, dict):
        text = text.get("content")
    return index.get(text) if isinstance(text, str) else None
