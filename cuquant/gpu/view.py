"""Where an array lies in memory, as kernels are told it."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class View(NamedTuple):
    """An array in memory: its address, and strides in elements."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether it lies in C order."""
        wanted = c_strides(self.shape)
        return self.strides == wanted or all(
            n == 1 or step == right
            for n, step, right in zip(self.shape, self.strides, wanted, strict=True)
        )

    def moved(self, axes: tuple[int, ...]) -> "View":
        """The view with its axes in this order."""
        return View(
            self.pointer,
            tuple(self.shape[a] for a in axes),
            tuple(self.strides[a] for a in axes),
            self.dtype,
        )


@lru_cache(maxsize=1024)
def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of an array in C order."""
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= n
    return tuple(reversed(steps))
