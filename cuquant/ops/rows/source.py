"""Which operation makes the values that are quantized, as quantize/sources.cuh is told it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant.lazy import lazy
from cuquant.ops import cpp
from cuquant.reference.rows import UNIT

RMS, LAYER = 1, 2  # of `norm`
SILU, GELU = 1, 2  # of `gate`


def check_group(size: int, columns: int, hint: str = "") -> int:
    """`size` itself; ValueError unless a transform of rows can take so many elements together."""
    if size & (size - 1):
        raise ValueError(f"group must be a power of two, got {size}{hint}")
    if columns % size:
        raise ValueError(f"group is {size}, which does not divide x's {columns} columns")
    return size


@dataclass(frozen=True)
class Source:
    """An operation on rows.

    Attributes
    ----------
    adds
        Whether a residual is added first.
    norm, gate
        One of the numbers above, or 0. A gate is multiplied with another array.
    group
        Elements that a Walsh-Hadamard transform takes together, or 0.
    weight, bias
        Whether there are these vectors along a row; a transform's weights are signs.
    wide
        Whether they are float32, whatever the rows are.
    """

    adds: bool = False
    norm: int = 0
    gate: int = 0
    group: int = 0
    weight: bool = False
    bias: bool = False
    wide: bool = False

    @lazy
    def facts(self) -> cpp.Facts:
        return cpp.numbers("Source", **{name: getattr(self, name) for name in self.__match_args__})

    @property
    def has_rows(self) -> bool:
        """Whether an element's value depends on where in a row it is."""
        return bool(self.norm or self.weight)

    @property
    def least_lanes(self) -> int:
        """Neighbouring threads that work together, whatever the row."""
        return max(1, self.group // UNIT)

    @property
    def scale(self) -> float:
        """What the sums of a transform are multiplied with."""
        return float(np.float32(1 / math.sqrt(self.group))) if self.group else 1.0


@dataclass(frozen=True)
class Rows:
    """An operation and its arrays, on a GPU: contiguous, aligned to 16 bytes and of x's dtype.

    Attributes
    ----------
    x, other
        [..., K]; `other` is the residual or what a gate is multiplied with, or None.
    weight, bias
        [K] of x's dtype, or float32 where `source.wide`, or None.
    eps
        A float32.
    """

    source: Source
    x: Any
    other: Any = None
    weight: Any = None
    bias: Any = None
    eps: Any = 0.0
