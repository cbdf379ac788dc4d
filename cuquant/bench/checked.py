"""Products that are timed and checked: what some columns are in float64, and how near is right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuquant.bench.gpu import Gpu
from cuquant.bench.timing import Timing, host_time, measure
from cuquant.interop import float_dtype

CHECKED_COLUMNS = 32  # of y, from the first to the last

# Half a unit in the last place of 1, and half of the smallest number.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}


def some_columns(count: int) -> np.ndarray:
    """The columns of a product of `count` columns that are checked."""
    return np.unique(np.linspace(0, count - 1, CHECKED_COLUMNS).astype(int))


@dataclass(frozen=True)
class Expected:
    """Some columns of a product.

    Attributes
    ----------
    columns
        Which ones.
    wanted, bound
        [M, columns]: what they are in float64, and how far off a right result may be.
    dtype
        Of the result.
    inner
        What factors and sums are rounded to on the way.
    depth
        K.
    """

    columns: np.ndarray
    wanted: np.ndarray
    bound: np.ndarray
    dtype: str
    inner: str
    depth: int

    @classmethod
    def of(cls, x: np.ndarray, w: np.ndarray, dtype: str, inner: str | None = None) -> "Expected":
        """Those of x @ w.T; `x` and `w` are what they decode to, [M, K] and [N, K].

        `inner` None: as the result.
        """
        inner, columns = inner or dtype, some_columns(len(w))
        wanted, bound = bounded_product(x, w[columns], dtype, inner)
        return cls(columns, wanted, bound, dtype, inner, x.shape[1])

    def first(self, count: int) -> "Expected":
        """The same of the first `count` rows of x."""
        return replace(self, wanted=self.wanted[:count], bound=self.bound[:count])

    def holds(self, y: np.ndarray) -> bool:
        """Whether a whole result is right in these columns."""
        gap = np.abs(y[:, self.columns].astype(np.float64) - self.wanted)
        near = bool((gap <= self.bound).all())
        return near and is_near(gap, self.wanted, self.dtype, self.inner, self.depth)


def bounded_product(
    x: np.ndarray, w: np.ndarray, dtype: str, inner: str
) -> tuple[np.ndarray, np.ndarray]:
    """x @ w.T in float64, and how far off a right result in `dtype` may be.

    A weight is rounded to `inner` twice at most, its level and that times the scale; K products
    are summed in float32, where tensor cores cut what lies below (twice float32's rounding); the
    sum is rounded once.
    """
    depth = x.shape[1]
    a, b = x.astype(np.float64), w.astype(np.float64)
    wanted = a @ b.T
    a = np.abs(a, out=a)
    size = a @ np.abs(b).T
    off = 2 * (ROUNDING[inner] + depth * ROUNDING["float32"]) * size
    off += SMALLEST[inner] * a.sum(axis=1, keepdims=True)  # weights that round to a subnormal
    return wanted, off + ROUNDING[dtype] * (np.abs(wanted) + off) + SMALLEST[dtype]


def is_near(gap: np.ndarray, wanted: np.ndarray, dtype: str, inner: str, depth: int) -> bool:
    """Whether errors are, all in all, what roundings make: bounds of each number leave room for a
    few of the K columns to be lost."""
    most = ROUNDING[dtype] + 3 * ROUNDING[inner] + depth * ROUNDING["float32"]
    return bool(np.linalg.norm(gap) <= most * np.linalg.norm(wanted))


def time_checked(
    gpu: Gpu,
    call: Callable[[Any, Any, Any], Any],
    xs: Sequence[Any],
    weights: Sequence[Any],
    columns: int,
    expected: Expected,
    repeats: int,
) -> tuple[Timing, float, bool]:
    """Time `call(x, w, out)` on rotated operands: on the device, on the host, and whether right.

    Each call has its own x, w and y of `columns` columns, which holds no result before.
    """
    shape = len(expected.wanted), columns
    y = gpu.upload(np.empty(shape, float_dtype(expected.dtype)))
    ys = [y, *(gpu.copy(y) for _ in weights[1:])]
    for y in ys:
        gpu.poison(y)
    calls = [lambda x=x, w=w, y=y: call(x, w, y) for x, w, y in zip(xs, weights, ys, strict=True)]
    timing = measure(gpu.engine, calls, repeats)
    host = host_time(gpu.engine, calls, repeats)
    return timing, host, all(expected.holds(gpu.download(y)) for y in ys)
