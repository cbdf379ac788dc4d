"""What a layer does to rows before they are quantized, in float32, rounded to the rows' dtype.

kernels/quantize/rows.cu does the same steps in the same order, so a GPU has the same bits.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from cuquant.reference import elementary

F32, F64 = np.float32, np.float64
UNIT = 16  # neighbouring elements that one thread adds up
PARTIALS = 256
PIECE = 1 << 17  # elements that are worked on at a time
# Means of squares that float32 sums hold well; rows with others are taken in other units.
LEAST, MOST = F32(2.0**-80), F32(2.0**126)
SMALL, LARGE = F32(2.0**-100), F32(2.0**100)
LEAST_EPS = F32(2.0**-126)


def least_eps(eps: np.float32) -> np.float32:
    """What eps is at the least in other units: only a constant row can tell it from 0."""
    return LEAST_EPS if eps else F32(0)


def row_sums(values: np.ndarray) -> np.ndarray:
    """float64 [rows, 1]: the sums of float32 [rows, K], in the one order that all backends have.

    Eight neighbours are added in index order and the two halves of 16 neighbours then, in float32.
    Sixteen m belongs to partial sum m % 256, which adds in index order in float64; the partial
    sums are added by a tree, p and p + 128 first, p and p + 1 last.
    """
    rows, columns = values.shape
    units = -(-columns // UNIT)
    laps = max(1, -(-units // PARTIALS))
    with np.errstate(all="ignore"):
        if columns % UNIT:
            values = np.pad(values, ((0, 0), (0, units * UNIT - columns)))
        eights = values.reshape(rows, units, 2, 8)
        total = eights[..., 0]
        for i in range(1, 8):
            total = total + eights[..., i]
        sixteens = np.zeros((rows, laps * PARTIALS))
        sixteens[:, :units] = total[..., 0] + total[..., 1]
        partial = np.zeros((rows, PARTIALS))
        for lap in range(laps):
            partial += sixteens[:, lap * PARTIALS : (lap + 1) * PARTIALS]
        while (half := partial.shape[1] // 2) > 0:
            partial = partial[:, :half] + partial[:, half:]
    return partial


def rmsnorm(
    x: np.ndarray, weight: np.ndarray, eps: np.float32, residual: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """x / sqrt(mean(x^2) + eps) * weight, and x, which is the rounded sum with `residual`."""
    if residual is not None:
        x = added(x, residual)
    normed = _by_rows(lambda rows: _normed(rows, eps) * weight, x)
    return normed, x


def added(x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """x + residual in float32, rounded to x's dtype."""
    with np.errstate(all="ignore"):
        return (x.astype(F32) + residual.astype(F32)).astype(x.dtype)


def layernorm(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: np.float32
) -> np.ndarray:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias.

    Of float32 the mean is taken off twice: of what its rounding left, too, which is all that a
    constant row leaves. 16-bit numbers are much further apart, and sums of equal ones are exact.
    """
    means = 2 if x.dtype == F32 else 1

    def values(rows: np.ndarray) -> np.ndarray:
        scaled = _normed(rows, eps, means) * weight
        return scaled if bias is None else scaled + bias

    return _by_rows(values, x)


def _normed(x: np.ndarray, eps: np.float32, means: int = 0) -> np.ndarray:
    """float32 [rows, K] over the root of its mean square + eps, after `means` means are taken off.

    Rows whose squares float32 does not hold well are taken in other units, and so are those whose
    sums overflow in both directions, to NaN. But a row that varies so little around a mean of 1 or
    more is constant, and in larger units its mean might overflow.
    """
    rest, mean, square = _statistics(x, eps, means)
    values = rest * (F32(1) / np.sqrt(square))
    within = (square <= MOST) & ((square >= LEAST) | (np.abs(mean) >= 1))
    others = np.flatnonzero(~within)
    for unit in (SMALL, LARGE):
        chosen = others[(square[others, 0] <= 1) == (unit == LARGE)]
        if len(chosen):
            own = np.maximum(eps * unit * unit, least_eps(eps))
            rest, _, other = _statistics(x[chosen] * unit, own, means)
            values[chosen] = rest * (F32(1) / np.sqrt(other))
    return values


def _statistics(
    x: np.ndarray, eps: np.float32, means: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x without `means` means, the first of these or 0, and the mean square + eps, all float32."""
    share = F64(1) / max(x.shape[1], 1)
    mean = np.zeros((len(x), 1), F32)
    for turn in range(means):
        taken = (row_sums(x) * share).astype(F32)
        x = x - taken
        mean = mean if turn else taken
    return x, mean, (row_sums(x * x) * share).astype(F32) + eps


def silu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up."""
    return _by_rows(lambda g, u: elementary.silu(g) * u, gate, up)


def gelu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gelu(gate) * up, the exact GELU."""
    return _by_rows(lambda g, u: elementary.gelu(g) * u, gate, up)


def hadamard(x: np.ndarray, group: int, signs: np.ndarray | None = None) -> np.ndarray:
    """The orthonormal Walsh-Hadamard transform of x * signs, in groups along the last axis."""

    def values(rows: np.ndarray) -> np.ndarray:
        given = (rows if signs is None else rows * signs).reshape(-1, group)
        sums = walsh_hadamard(given)
        scale = F32(1 / math.sqrt(group))
        result = sums * scale
        lost = np.flatnonzero(~np.isfinite(sums).all(axis=-1))
        if len(lost):  # sums may be beyond float32; in units of 1 / group they are not
            result[lost] = walsh_hadamard(given[lost] * F32(1 / group)) * scale * F32(group)
        return result.reshape(rows.shape)

    return _by_rows(values, x)


def walsh_hadamard(rows: np.ndarray) -> np.ndarray:
    """H x of float32 [n, group], not scaled: neighbours at distance 1, then 2, 4, ..."""
    count, size = rows.shape
    distance = 1
    while distance < size:
        pairs = rows.reshape(count, size // (2 * distance), 2, distance)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        rows = np.stack([first + second, first - second], axis=2).reshape(count, size)
        distance *= 2
    return rows


def _by_rows(values: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """`values` of float32 rows of arrays [..., K], rounded to the first one's dtype."""
    first = arrays[0]
    out = np.empty(first.shape, first.dtype)
    if not first.size:
        return out
    flat = [a.reshape(-1, first.shape[-1]) for a in arrays]
    with np.errstate(all="ignore"):
        for piece in _pieces(*flat[0].shape):
            rows = values(*(a[piece].astype(F32) for a in flat))
            out.reshape(flat[0].shape)[piece] = rows.astype(first.dtype)
    return out


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, PIECE // columns)
    return (slice(start, start + step) for start in range(0, rows, step))
