"""Computes every level table of `tables.py`: `python -m cuquant.formats.fit_levels` rewrites it.

Lloyd levels minimise the mean squared error of a normal variable quantized in blocks of B with a
signed-max scale. No samples are drawn: with m = max|x| of a block, the other B - 1 elements are
normal variables truncated to |x| < m, so y = x / (signed max) has the density

    p(y)  ~  integral of f(m) m^2 * m phi(m y) / P(|x| < m) dm,    f(m) = B P^(B-1) 2 phi(m)

weighted with m^2 (the error of x is m times that of y), and a point mass at y = 1: the maximum
itself. Lloyd's iteration on that density converges to the levels.
"""

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np

BLOCKS = (32, 64, 128, 256)
GRID = 20001


def signed_max_density(block: int, grid: int = GRID) -> tuple[np.ndarray, np.ndarray]:
    """Points y in [-1, 1] and their weights, for x / signed max of normal blocks."""
    y = np.linspace(-1, 1, grid)
    m, step = np.linspace(1e-3, 9, 4001, retstep=True)
    inside = np.array([math.erf(v / math.sqrt(2)) for v in m])
    maximum = block * inside ** (block - 1) * 2 * _phi(m)
    weight = np.zeros(grid)
    for m_i, f, p in zip(m, maximum, inside, strict=True):
        if f > 1e-14:
            weight += f * m_i**3 * _phi(y * m_i) / p
    weight *= step * (y[1] - y[0]) * (block - 1) / block
    weight[[0, -1]] *= 0.5
    weight[-1] += (maximum * m**2).sum() * step / block
    return y, weight


def lloyd(
    count: int, density: tuple[np.ndarray, np.ndarray], zero_rank: int | None = None
) -> tuple[np.ndarray, float]:
    """`count` levels and their mean squared error; with `zero_rank`, 0 and 1 stay levels."""
    y, weight = density
    mass, first, second = (
        np.concatenate([[0.0], np.cumsum(weight * y**power)]) for power in range(3)
    )
    levels = _companded(count, y, weight)
    while True:
        cells = np.searchsorted(y, (levels[1:] + levels[:-1]) / 2, side="right")
        cells = np.concatenate([[0], cells, [len(y)]])
        moved = np.diff(first[cells]) / np.maximum(np.diff(mass[cells]), 1e-300)
        if zero_rank is not None:
            moved[zero_rank], moved[-1] = 0.0, 1.0
        change = np.abs(moved - levels).max()
        levels = moved
        if change < 1e-10:
            break
    error = np.diff(second[cells]) - 2 * levels * np.diff(first[cells])
    return levels, float((error + levels**2 * np.diff(mass[cells])).sum())


def _companded(count: int, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Panter and Dite: the density of good levels is the cube root of the variable's."""
    smooth = weight.copy()
    smooth[-1] = smooth[-2]
    share = np.cumsum(np.cbrt(smooth))
    return np.interp((np.arange(count) + 0.5) / count, share / share[-1], y)


def _phi(x: np.ndarray) -> np.ndarray:
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def bof4s(density: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """16 Lloyd levels with 0 and 1 kept, at the better of the two middle ranks for 0."""
    return min((lloyd(16, density, rank) for rank in (7, 8)), key=lambda fit: fit[1])[0]


def normal(bits: int) -> np.ndarray:
    """Quantiles of the normal distribution at (i + 0.5) / 2^bits, over the largest one."""
    count = 2**bits
    levels = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    levels = (levels - levels[::-1]) / 2  # inv_cdf is symmetric only up to rounding
    return levels / levels[-1]


def linear(bits: int) -> np.ndarray:
    """2^bits equal steps from -1 to 1."""
    top = 2**bits - 1
    return (2 * np.arange(top + 1) - top) / top


def dynamic_map(signed: bool) -> np.ndarray:
    """bitsandbytes' dynamic 8-bit map: decades of ever finer linear steps (float32 arithmetic)."""
    values = []
    for i in range(7):
        steps = 2**i if signed else 2 ** (i + 1)
        edges = _linspace32(0.1, 1.0, steps + 1)
        means = (edges[:-1] + edges[1:]) / np.float32(2)
        values += list(means * np.float32(10.0 ** (i - 6)))
    if signed:
        values += [-v for v in values]
    return np.sort(np.array([*values, 0.0, 1.0], np.float32))


def linear_map() -> np.ndarray:
    """bitsandbytes' signed linear 8-bit map: 255 steps and the 0.0 that they miss by 4e-9."""
    steps = _linspace32(-1.0, 1.0, 255)
    return np.sort(np.append(steps, np.float32(0)))


def fp8_map(exponent: int, mantissa: int) -> np.ndarray:
    """bitsandbytes' FP8 map: bias 2^(e-1), exponent field inverted, over the maximum."""
    bias = 2 ** (exponent - 1)
    fractions = np.arange(2**mantissa) / 2**mantissa
    values = [fractions * 2.0**-bias]
    values += [(1 + fractions) * 2.0 ** (bias + 1 - e) for e in range(1, 2**exponent)]
    sizes = np.concatenate(values)
    both = np.stack([sizes, -sizes], axis=1).reshape(-1)
    both = both[np.argsort(both, kind="stable")].astype(np.float32)  # 0.0 stays before -0.0
    return both / both.max()


def _linspace32(start: float, stop: float, count: int) -> np.ndarray:
    """float32 steps from both ends to the middle, one fused multiply-add each, as torch does."""
    step = np.float32((np.float32(stop) - np.float32(start)) / np.float32(count - 1))
    i = np.arange(count, dtype=np.float64)
    up = np.float64(np.float32(start)) + np.float64(step) * i
    down = np.float64(np.float32(stop)) - np.float64(step) * (count - 1 - i)
    return np.where(i < count // 2, up, down).astype(np.float32)


def tables() -> dict[str, np.ndarray]:
    """Every table of `tables.py` by name."""
    densities = {block: signed_max_density(block) for block in BLOCKS}
    found = {
        f"LLOYD_{k}_{block}": lloyd(2**k, density)[0]
        for k in range(2, 9)
        for block, density in densities.items()
    }
    found |= {f"NORMAL_{k}": normal(k) for k in range(2, 9)}
    found |= {f"LINEAR_{k}": linear(k) for k in range(2, 9)}
    found["BOF4S"] = bof4s(densities[64])
    found["DYNAMIC_MAP"] = dynamic_map(signed=True)
    found["DYNAMIC_UNSIGNED_MAP"] = dynamic_map(signed=False)
    found["LINEAR_MAP"] = linear_map()
    found["FP8_E4M3_MAP"] = fp8_map(4, 3)
    found["FP8_E5M2_MAP"] = fp8_map(5, 2)
    return {name: values.astype(np.float32) for name, values in found.items()}


def source(found: dict[str, np.ndarray]) -> str:
    """The text of `tables.py`: each number is the shortest decimal of its float32."""
    lines = [
        '"""Level tables, written by `python -m cuquant.formats.fit_levels`; do not edit."""',
        "",
        "# fmt: off",
    ]
    for name, values in found.items():
        lines.append(f"{name} = (")
        texts = [str(v) for v in values]
        lines += ["    " + ", ".join(texts[i : i + 8]) + "," for i in range(0, len(texts), 8)]
        lines.append(")")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("tables.py").write_text(source(tables()), encoding="utf-8")
