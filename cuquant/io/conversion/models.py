"""What a conversion takes along of a model beside its arrays: names, settings, tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cuquant.io.architectures.metadata import from_config, to_config
from cuquant.io.architectures.names import ARCHITECTURES, of_gguf
from cuquant.io.architectures.positions import (
    LONG,
    ROPE_FACTORS,
    SHORT,
    rope_tensors,
    to_longrope,
)
from cuquant.io.architectures.tokenizer import from_json
from cuquant.io.checkpoint import read_json
from cuquant.io.entries import Entry, Opened
from cuquant.io.experts import in_mlx, joined, of_mlx, split
from cuquant.io.renaming import changed, in_hf, tells_heads

GGUF, MLX, HF = "gguf", "mlx", "transformers"


@dataclass(frozen=True)
class Model:
    """A file's arrays under the names that the target has, and what the target says of the model.

    Attributes
    ----------
    entries
        By name.
    metadata
        Of a GGUF file; config.json of others.
    warnings
        What is not known.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, Any]
    warnings: list[str] = field(default_factory=list)


def model_for(file: Opened, kind: str) -> Model:
    """What a kind of files holds of a model.

    Raises
    ------
    ValueError
        For settings that cannot be written, and rows that cannot be taken apart.
    """
    if kind == GGUF:
        return Model(file, file.metadata) if file.kind == GGUF else _to_gguf(file)
    if kind == "cuquant":  # arrays as they are, by the file's own names
        return Model(file, {} if file.kind == GGUF else file.metadata)
    made = _from_gguf(file) if file.kind == GGUF else Model(file, file.metadata)
    return replace(made, entries=_with_experts(made.entries, kind))


def _with_experts(entries: Mapping[str, Entry], kind: str) -> Mapping[str, Entry]:
    """Experts as a kind has them: in one array for MLX, by themselves where linear layers are.

    Arrays whose matrices have no names that are known stay as they are.
    """
    if kind == MLX:
        return joined(entries.items(), in_mlx)
    made: dict[str, Entry] = {}
    for name, entry in entries.items():
        own = of_mlx(name)
        parts = [entry] if own is None or len(entry.shape) != 3 else split(entry, own)
        made |= {name if own is None else part.name: part for part in parts}
    return made


def _to_gguf(file: Opened) -> Model:
    told = from_config(file.metadata)
    if told is None:
        advice = (
            f"known are {', '.join(found.name for found in ARCHITECTURES)}"
            if file.metadata
            else "the model's config.json belongs beside the weights"
        )
        return Model(file, {}, ["the architecture is not known: tensors keep their names, and the "
                                f"file says nothing of the model; {advice}"])  # fmt: skip
    found, metadata = told
    config, folder = file.metadata, file.path if file.path.is_dir() else file.path.parent
    heads = {
        key: int(metadata[f"{found.name}.attention.{key}"])
        for key in ("head_count", "head_count_kv")
    }
    entries: dict[str, Entry] = {}
    unknown = []
    apart = _with_experts(file, HF)
    for name, entry in joined(apart.items(), found.expert_in_gguf).items():
        new = found.in_gguf(name) if name in apart else name  # GGUF's, of an array of experts
        if new is None:
            unknown.append(name)
        new = new or name
        if new in entries:
            raise ValueError(f"two arrays are {new} in GGUF")
        entries[new] = changed(entry, new, new, found, heads, to_gguf=True)
    entries |= {name: _made(name, factors) for name, factors in rope_tensors(config).items()}
    tokens, warning = _tokens(folder, config, found)
    warnings = [warning] if warning else []
    if unknown:
        warnings.append(
            f"{len(unknown)} tensors have no name in GGUF and keep theirs: {unknown[0]}"
        )
    return Model(entries, {**metadata, **tokens}, warnings)


def _made(name: str, value: np.ndarray) -> Entry:
    return Entry(name, None, value.shape, value.dtype, value.nbytes, (), (), lambda: value)


def _tokens(
    folder: Path, config: Mapping[str, Any], found: Any
) -> tuple[dict[str, Any], str | None]:
    tokenizer = read_json(folder / "tokenizer.json")
    if not tokenizer:
        return {}, "there is no tokenizer.json: the file has no tokens"
    settings = read_json(folder / "tokenizer_config.json")
    return from_json(tokenizer, settings, config, found)


def _from_gguf(file: Opened) -> Model:
    found = of_gguf(file.metadata)
    if found is None:
        return Model(file, {}, ["the architecture is not known: tensors keep GGUF's names, and "
                                "config.json says nothing of the model"])  # fmt: skip
    if not tells_heads(file, found):
        why = "it does not say how many heads there are: tensors keep GGUF's names and rows, and "
        return Model(file, {}, [f"{why}config.json says nothing of the model"])
    entries = in_hf(file)
    config = to_config(found, file.metadata, "output.weight" not in file)
    warnings = ["tokens stay behind: take tokenizer.json from the original"]
    if ROPE_FACTORS in file:
        entries.pop(ROPE_FACTORS)
        warnings.append(
            "rope_freqs.weight stays behind: config.json needs the original's rope_scaling"
        )
    if LONG in file and SHORT in file:
        config |= to_longrope(found, file.metadata, *(entries.pop(n).read() for n in (LONG, SHORT)))
    held = (ROPE_FACTORS, LONG, SHORT)
    if unknown := [name for name in file if found.in_hf(name) is None and name not in held]:
        warnings.append(f"{len(unknown)} tensors have no name in transformers: {unknown[0]}")
    return Model(entries, config, warnings)
