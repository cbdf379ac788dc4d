"""Matrices whose rows are looked up, and numbers of rows; for the emulator and for a GPU."""

from dataclasses import dataclass
from typing import Any

import kernel_cases as cases
import numpy as np
from kernel_cases import Case, normal
from oracle import DTYPES

import cuquant as cq

INT64 = np.dtype(np.int64)
BEYOND = (-1, 1 << 31, 1 << 62, -(1 << 63), (1 << 63) - 1)  # beside V: no numbers of rows


# Every format and dtype; blocks along the first axis; rows that end within a block, a word or a
# chunk; blocks of all sizes and of two axes; nested scales, minimums, learned levels, packings.
MATRICES = [
    case
    for case in dict.fromkeys([*cases.BASICS, *cases.DECODED, *cases.AXES])
    if len(case.shape) == 2
]
ODD = (
    "int8+absmax",
    "int4:32+permuted",
    "uint3:32+permuted",
    "nf4:flat",
    "nf4:flat32+dq",
    "k3:flat32",
    "k3:flat+word",
    "k5:flat32+planes",
    "int8:flat32",
    "nvfp4+divisor",
    "nvfp4+per_matrix",
    "nvfp4+divisor+per_matrix",
)


@dataclass(frozen=True)
class OddCase:
    """An array of an odd format; `permuted` ones are stored in a random order."""

    format: str
    dtype: str
    shape: tuple[int, int]
    axis: int

    def __str__(self) -> str:
        return f"{self.format}-{self.dtype}-{self.shape[0]}x{self.shape[1]}-{self.axis}"

    def expected(self) -> cq.QuantArray:
        x = normal(self.shape, DTYPES[self.dtype])
        q = cq.quantize(x, self.format, axis=self.axis)
        if not q.format.permuted:
            return q
        order = np.random.default_rng(5).permutation(self.shape[self.axis]).astype(np.int32)
        return q._with(components={**q.components, "permutation": order})


ODDS = [
    OddCase(name, dtype, shape, axis)
    for name in ODD
    for dtype in DTYPES
    for shape, axis in (((12, 256), -1), ((7, 96), 0), ((5, 131), -1))
]


def numbers(known: int) -> np.ndarray:
    """int64 [3, n]: some rows, each at its place and elsewhere, and numbers of none."""
    rng = np.random.default_rng(known)
    some = rng.permutation(known)[:20]
    outside = [known, *BEYOND]
    lost = np.resize(np.array(outside, INT64), len(some))
    return np.stack([some, rng.integers(0, known, len(some)), np.where(some % 3, some, lost)])


def looked_up(q: cq.QuantArray, ids: np.ndarray, dtype: Any = None) -> np.ndarray:
    """What a GPU gives: values of the whole array by rows, NaN where there is none."""
    values, known = q.dequantize(dtype=dtype), q.shape[0]
    there = (ids >= 0) & (ids < known)
    rows = np.full((*ids.shape, q.shape[1]), np.nan, values.dtype)
    rows[there] = values[ids[there].astype(INT64)]
    return rows


def of_every_scale(name: str, dtype: str) -> cq.QuantArray:
    """Scales beside which values overflow, vanish or are not finite."""
    fmt = cq.get_format(name, block_size=8)
    q = cq.quantize(normal((16, 64), DTYPES[dtype]), fmt)
    scale = np.array(q.components["scale"])
    info = np.finfo(scale.dtype)
    special = [1, -0.7, 0, info.tiny / 4, info.max, np.inf, np.nan, -np.inf]
    scale[...] = np.resize(np.array(special, scale.dtype), scale.shape[::-1]).T
    return q._with(components={**q.components, "scale": scale})


SCALED = [name for name in cases.OWN if cases.FORMATS[name].scale]
SCALED = [name for name in SCALED if cases.FORMATS[name].scale_is_plain]
BLOCKED = [name for name in cases.NAMES if name not in cases.OWN]


def random_blocks(name: str, dtype: str) -> cq.QuantArray:
    """ggml's blocks of random bytes: every code, scale and minimum, also NaN and infinite ones."""
    layout, rng = cases.FORMATS[name].layout, np.random.default_rng(17)
    raw = rng.integers(0, 256, (9, 512 // layout.elements, layout.nbytes), np.uint8)
    return cq.QuantArray.from_blocks(raw, name, (9, 512), dtype)


def one(name: str, shape: tuple[int, int] = (24, 256)) -> cq.QuantArray:
    """A matrix of a format by name, of one dtype for each format."""
    base = name.partition(":")[0].partition("+")[0]
    if base != name:
        return OddCase(name, cases.dtype_of(base), shape, -1).expected()
    return Case(name, cases.dtype_of(name), shape).expected()
