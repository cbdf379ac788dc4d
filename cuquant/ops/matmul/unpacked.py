"""Rows of prepacked weights on a GPU, for kernels that read no others.

A weight has memory for its rows as long as it lives, and each product fills it anew: what the
weight holds may have been overwritten since. Products on several streams write the same bytes.
"""

from typing import Any

import numpy as np

from cuquant.array.fragments import Fragments
from cuquant.array.packed_weight import PackedWeight
from cuquant.gpu.arrays import GpuBackend, contiguous
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch
from cuquant.ops.layout.prepack import Prepack
from cuquant.ops.matmul.problem import Weight
from cuquant.ops.remember import Remembered

_rows: Remembered[dict[str, Any]] = Remembered()  # by the weight's components


class Filling:
    """What writes a weight's rows. It holds addresses, and none of the weight's arrays."""

    def __init__(self, backend: GpuBackend) -> None:
        self._backend: GpuBackend | None = backend
        self._launches: list[tuple[Launch, tuple[int | float | bytes, ...]]] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        assert self._backend is not None
        return self._backend.empty(shape, dtype)

    def pointer(self, array: Any) -> int:
        assert self._backend is not None
        return self._backend.pointer(array)

    def launch(self, launch: Launch, *arguments: int | float | bytes) -> None:
        self._launches.append((launch, arguments))

    def done(self) -> "Filling":
        """Without the backend, which is that of one call."""
        self._backend = None
        return self

    def run(self, backend: Backend) -> None:
        """Fill the rows, on the backend's stream."""
        for launch, arguments in self._launches:
            backend.launch(launch, *arguments)


def rows_of(backend: GpuBackend, packed: PackedWeight) -> tuple[Weight, Filling, bool]:
    """A weight [N, K] as rows, what fills them, and whether that reads the weight's own arrays."""
    given, filling = packed.arrays(), Filling(backend)
    parts = contiguous(backend, given)
    layout = Fragments(packed.format, packed.shape)
    known = _rows.get(given.values())
    made = Prepack(layout).rows(filling, parts, known)
    if known is None:
        kept = {part.name for part in layout.kept}
        rows = {name: part for name, part in made.items() if name not in kept}
        _rows.put(given.values(), rows)
    is_own = all(part is given[name] for name, part in parts.items())
    return Weight(packed.format, made, packed.shape, 1), filling.done(), is_own
