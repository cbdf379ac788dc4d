"""cuquant's own files: each component of an array is a tensor; the header says what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuquant.io.quantized import component_specs, entry, stored_shape
from cuquant.io.schema.recipe import Recipe, Source, Tensors

KIND = "cuquant"
NEAREST: dict[int, str] = {}  # every format is held


def recipe(source: Source) -> Recipe:
    """Any array; `said` is its entry in the header."""
    axes = source.axes or tuple(range(len(source.shape)))
    specs = component_specs(source.name, source.format, stored_shape(source.shape, axes))

    def encode(q: Any) -> Tensors:
        return {f"{source.name}.{key}": part for key, part in q.arrays().items()}

    said = entry(source.format, source.shape, source.dtype, axes)
    return Recipe(specs, encode, str(source.format), said)


def configuration(recipes: Sequence[Recipe], plain: Sequence[str]) -> dict[str, Any]:
    """Nothing: the header tells all."""
    return {}
