"""Arrays for kernels: numbers that have paths of their own, and every way in which they can lie."""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

F32 = np.float32


# ---- numbers ------------------------------------------------------------------------------------


def nasty(shape: tuple[int, ...], dtype: np.dtype, *, finite: bool = False) -> np.ndarray:
    """Stretches of numbers that each have their own path: zeros of both signs, ties, subnormals,
    numbers whose scale overflows or vanishes, NaN and infinity."""
    x = np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(F32)
    flat, most = x.reshape(-1), 13
    size = max(1, min(256, flat.size // (most + 3)))
    part = [flat[i * size : (i + 1) * size] for i in range(most)]
    part[0][...] = 0
    if not finite:
        part[2][size // 3 :: 37], part[2][size // 2 :: 53] = np.inf, -np.inf
        part[3][5 % size :][:1] = np.nan
    part[4][...] *= F32(1e-7)
    part[5][...] = np.round(part[5] * 4) / 4
    part[6][...] = -0.0
    part[7][...] = 1
    part[7][5 % size :][:1] = -1
    part[8][...] *= F32(1e-4)
    part[9][...] *= F32(1e-38)
    part[9][size // 3 :][:1] = 3e-39
    part[10][...] *= F32(1e-42)
    part[11][...] *= F32(1e37)
    part[12][...] = np.abs(part[12])
    with np.errstate(over="ignore", under="ignore"):
        x = x.astype(dtype)
    if finite:
        top = ml_dtypes.finfo(dtype).max
        x = np.where(np.isfinite(x), x, top).astype(dtype)
    return x


def small(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Normal numbers of 1e-11 to 1e-3, by stretches of 32: scales of float16's subnormals; beside
    one of 1, those of e4m3's."""
    rng = np.random.default_rng(23 + sum(shape))
    x = rng.standard_normal(shape)
    size = 10 ** rng.uniform(-11, -3, -(-x.size // 32))
    x *= np.repeat(size, 32)[: x.size].reshape(shape)
    x.reshape(-1)[-1] = 1
    return x.astype(dtype)


def normal(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.random.default_rng(7 + sum(shape)).standard_normal(shape).astype(F32).astype(dtype)


DATA: dict[str, Callable[[tuple[int, ...], np.dtype], np.ndarray]] = {
    "nasty": nasty,
    "finite": lambda shape, dtype: nasty(shape, dtype, finite=True),
    "normal": normal,
    "small": small,
    # Of both ends of the dtype: ranges of float32 and bfloat16 are beyond float32.
    "ends": lambda shape, dtype: (
        (normal(shape, F32) / 5).clip(-1, 1) * F32(0.93 * float(ml_dtypes.finfo(dtype).max))
    ).astype(dtype),
    # The first element is negative, and larger by a power of two than all others.
    "outliers": lambda shape, dtype: np.where(
        np.arange(shape[-1]) % 64 == 3, -64, normal(shape, dtype)
    ).astype(dtype),
}


def _crowded(count: int, spacing: float) -> np.ndarray:
    """Ascending: the ends of the range, and all others `spacing` apart around 0.3."""
    inner = 0.3 + spacing * np.arange(count - 2)
    return np.concatenate([[-1], inner, [1]]).astype(F32)


LEVELS: dict[str, np.ndarray] = {
    "2": F32([-1, 1]),
    "3": F32([-1, 0.25, 1]),
    "5": F32([-1, -0.3, 0, 0.2, 1]),
    "16 close": _crowded(16, 1e-6),
    "17": np.linspace(-1, 1, 17, dtype=F32) ** 3,
    "33 close": _crowded(33, 2.0**-24),
    "200": np.unique(np.random.default_rng(3).standard_normal(200).astype(F32)),
    "200 close": _crowded(200, 1e-7),
    "huge": F32([-3e38, -1e38, -5, 0, 1e-30, 7e37, 2e38]),
    "tiny": F32([-1e-40, -1e-44, 0, 3e-45, 2e-42, 1e-38]),
    "all sizes": F32([s * 10.0**e for s in (-1, 1) for e in range(-36, 36, 2)]),
}
LEVELS = {name: np.sort(values) for name, values in LEVELS.items()}


# ---- where an array lies ------------------------------------------------------------------------


class Layout(NamedTuple):
    """An array as a view of a larger one: the shape of that one, and the view."""

    base: Callable[[tuple[int, ...]], tuple[int, ...]]
    view: Callable[[Any, tuple[int, ...]], Any]


def _wider(more: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    return lambda shape: (*shape[:-1], shape[-1] + more)


def _expanded(base: Any, shape: tuple[int, ...]) -> Any:
    if hasattr(base, "expand"):  # torch's
        return base.expand(shape)
    return np.broadcast_to(base, shape)  # CuPy's too, by its __array_function__


LAYOUTS = {
    "whole": Layout(lambda s: s, lambda b, _: b),
    "rows": Layout(_wider(8), lambda b, s: b[..., : s[-1]]),
    "crooked rows": Layout(_wider(3), lambda b, s: b[..., 1 : s[-1] + 1]),
    "steps": Layout(lambda s: (*s[:-1], 2 * s[-1]), lambda b, _: b[..., ::2]),
    "misaligned": Layout(lambda s: (int(np.prod(s)) + 1,), lambda b, s: b[1:].reshape(s)),
    "transposed": Layout(lambda s: s[::-1], lambda b, _: b.T),
    "reversed": Layout(lambda s: s, lambda b, _: b[..., ::-1]),
    "upside down": Layout(lambda s: s, lambda b, _: b[::-1]),
    "repeated rows": Layout(lambda s: (1, *s[1:]), _expanded),
    "repeated columns": Layout(lambda s: (*s[:-1], 1), _expanded),
}
VIEWS = [name for name in LAYOUTS if name != "whole"]
WRITABLE = [name for name in VIEWS if not name.startswith("repeated")]


def placed(values: np.ndarray, layout: str) -> np.ndarray:
    """The base of an array that lies so and holds `values`; what is beside it is NaN."""
    where = LAYOUTS[layout]
    base = np.full(where.base(values.shape), np.nan, values.dtype)
    if layout.startswith("repeated"):
        base[...] = values[tuple(slice(0, n) for n in base.shape)]
    else:
        where.view(base, values.shape)[...] = values
    return base
