"""Products of rows of x with prepacked experts: cases of every kind of weight and segment."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from fragment_products import TYPES
from products import normal

import cuquant as cq

F32 = np.float32


@dataclass(frozen=True)
class Case:
    """grouped_linear(x, prepack(w), experts) of [rows, K] and [E, N, K]."""

    format: str
    dtype: str = "float16"
    rows: int = 23
    shape: tuple[int, int, int] = (4, 70, 136)
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        size = "x".join(map(str, (self.rows, *self.shape)))
        options = [f"{k}={v}" for k, v in self.options]
        return "-".join([self.format, size, self.dtype, *options]).replace(" ", "_")

    @property
    def weight(self) -> cq.QuantArray:
        return _weight(self.format, self.shape, self.options)

    @property
    def x(self) -> np.ndarray:
        return normal((self.rows, self.shape[2]), self.dtype)

    @property
    def experts(self) -> np.ndarray:
        """Some experts get many rows, some none; in no order."""
        rng = np.random.default_rng(self.rows)
        return np.minimum(rng.geometric(0.4, self.rows) - 1, self.shape[0] - 1)


@cache
def _weight(name: str, shape: tuple[int, int, int], options: tuple) -> cq.QuantArray:
    """Of experts whose numbers are not of one size."""
    sizes = np.resize(np.array([1.0, 3.0, 0.5, 2.0, 0.25], F32), shape[0])[:, None, None]
    return cq.quantize(normal(shape, seed=3) * sizes, cq.get_format(name, **dict(options)))


def _with(name: str, dtype: str, shape: tuple[int, int, int], **options: Any) -> Case:
    return Case(name, dtype, shape=shape, options=tuple(options.items()))


# Every codec, and every way in which scales lie.
KINDS = [
    *(Case(name, TYPES[i % 2]) for i, name in enumerate(("nf4", "int4", "uint4", "k3", "int8"))),
    *(
        Case(name, TYPES[i % 2], shape=(3, 50, 192))
        for i, name in enumerate(("nvfp4", "mxfp4", "fp8_e4m3", "fp6_e3m2"))
    ),
    *(
        Case(name, TYPES[i % 2], shape=(3, 35, 512))
        for i, name in enumerate(("q4_k", "q6_k", "q3_k", "q4_1", "iq4_nl"))
    ),
    _with("nf4", "float16", (4, 37, 200), double_quant=True),  # 256 scales are no whole rows
    _with("int8", "bfloat16", (4, 300, 72), double_quant=True),
    _with("uint4", "float16", (3, 50, 192), offset="min"),
    _with("uint4", "bfloat16", (3, 50, 192), offset="min", block_size=(16, 64)),
    _with("nf4", "float16", (2, 300, 72), double_quant=True, block_size="tensor"),
    _with("int4", "float16", (4, 37, 200), block_size="tensor"),
    _with("uint4", "bfloat16", (3, 37, 200), block_size="tensor"),
    _with("nf4", "float16", (4, 37, 200), block_size=(8, 32)),
    _with("fp8_e4m3", "bfloat16", (3, 150, 200), block_size=(128, 128)),
    _with("uint4", "float16", (3, 37, 200), block_size="row"),
]
# Segments of 16, 32, 64, 128 and 256 rows.
COUNTS = [
    *(Case("nf4", "float16", rows) for rows in (1, 7, 80, 150)),
    *(Case("int4", "bfloat16", rows, (3, 72, 264)) for rows in (90, 200, 430)),
    Case("nvfp4", "float16", 430, (3, 72, 264)),
    Case("q4_k", "float16", 430, (3, 72, 256)),
]
ONE = Case("nf4", "bfloat16", 9, (1, 5, 64))
RAGGED = Case("int4", "float16", 23, (4, 70, 131))  # rows of x that are no whole vectors
CASES = [*KINDS, *COUNTS, ONE, RAGGED]
