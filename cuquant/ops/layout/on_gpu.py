"""`prepack` and `unpack` on a GPU; cuquant/array/packed_weight.py has the operations."""

from collections.abc import Mapping
from typing import Any

from cuquant.array.components import OPERATIONS
from cuquant.array.fragments import Fragments
from cuquant.gpu.arrays import backend_of, contiguous
from cuquant.ops.layout.prepack import Prepack

ALIGNMENT = 16  # bytes: kernels read whole words of arrays that may be of single bytes


def lay_out(layout: Fragments, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The components of a PackedWeight, of those of a QuantArray."""
    with backend_of(next(iter(parts.values()))) as backend:
        return Prepack(layout).lay_out(backend, contiguous(backend, parts, ALIGNMENT))


def rows(layout: Fragments, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The components of a QuantArray, of those of a PackedWeight."""
    with backend_of(parts["codes"]) as backend:
        return Prepack(layout).rows(backend, contiguous(backend, parts, ALIGNMENT))


OPERATIONS["lay_out"] = lay_out
OPERATIONS["rows"] = rows
