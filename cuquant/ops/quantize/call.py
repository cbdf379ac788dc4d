"""One call of a quantizer: the array, what is known, where its components go; and C structs."""

import struct
from dataclasses import dataclass
from typing import Any

from cuquant.gpu.backend import Backend
from cuquant.gpu.view import View
from cuquant.lazy import lazy
from cuquant.ops import geometry

CLAMP, STOCHASTIC, GIVEN = 1, 2, 4  # kFlags of the kernels

Parts = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """Numbers that were found beforehand, on the device, or None.

    `scale` float32 and `zero_point` uint8 have the shape of the format's scales; `global_scale`
    is nvfp4's, a number of the host or one on the device.
    """

    scale: Any = None
    zero_point: Any = None
    global_scale: Any = None


@dataclass(frozen=True)
class Task:
    """One call: the array, how to treat it and where its components go."""

    view: View
    axis: int
    known: Known
    parts: Parts
    clamp: bool
    stochastic: bool
    seed: int
    overflow: int = 0  # address of a counter, or 0

    @lazy
    def stored(self) -> tuple[int, ...]:
        order = geometry.axis_last(len(self.view.shape), self.axis)
        return tuple(self.view.shape[a] for a in order)

    @property
    def flags(self) -> int:
        given = GIVEN if self.known.scale is not None else 0
        return (CLAMP if self.clamp else 0) | (STOCHASTIC if self.stochastic else 0) | given

    def scales(self, backend: Backend, encoding: Any = None) -> bytes:
        """The Scales struct; `encoding` is an array for what codes are made with, or None."""
        arrays = (self.parts["scale"], *map(self.parts.get, ("zero_point", "minimum")), encoding)
        pointers = (0 if array is None else backend.pointer(array) for array in arrays)
        return struct.pack("<5Q", *pointers, self.overflow)

    def given(self, backend: Backend) -> bytes:
        """The Given struct."""
        arrays = (self.known.scale, self.known.zero_point, self.parts.get("global_scale"))
        pointers = [0 if array is None else backend.pointer(array) for array in arrays]
        from_data = self.known.global_scale is None and pointers[2] != 0
        return struct.pack("<4Q", *pointers, from_data)

    def source(self) -> bytes:
        """The Strided struct of the array.

        Raises
        ------
        ValueError
            Where it has too many axes that cannot be merged.
        """
        return geometry.strided(self.view, self.axis, with_flat=self.stochastic)
