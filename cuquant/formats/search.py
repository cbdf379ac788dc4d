"""Quantizers of the ggml types that search for their scales: K-quants and iq4.

Each sub-block tries a few scales, rounds to levels and solves for the least-squares scale (and
minimum). What it finds becomes a small integer times a float16 that the block shares. With that
float16 as it is stored the integers around are tried too; then it is refitted, and once more.

The bytes are a promise that a CUDA kernel can keep: decisions are float32 operations without FMA,
sums run over the elements of a sub-block, or the sub-blocks of a block, in order, and of equal
candidates the first one wins. Arrays are therefore [elements, sub_blocks, blocks].
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from cuquant.formats.blocks import BLOCK_LAYOUTS, HALF_MAX, IQ4_LEVELS, BlockLayout

F32 = np.float32
CHUNK = 1 << 16  # elements in work at a time; smaller and larger ones were slower
# What is added to the integers on the first and on the second try, the likeliest first.
STEPS = (0, -1, 1, -2, 2), (0, -1, 1)


@dataclass(frozen=True)
class Search:
    """The candidates of a type.

    Attributes
    ----------
    layout
        Of the type's blocks.
    anchor_step
        Between `anchors`. Those below are the best of a few tried on normal and Student-t5
        numbers. Half or twice a step costs at most 0.08 dB, but 0.2 dB in q6_k, where a step of 2
        puts the extreme value on every whole level from 25 to 38.
    sub_scales
        The range of the integer scales of sub-blocks, whose minimums share its upper end; (1, 1):
        there are none.
    """

    layout: BlockLayout
    anchor_step: float
    sub_scales: tuple[int, int]

    @property
    def nonuniform(self) -> bool:
        """Whether the levels are IQ4_LEVELS instead of all integers from low to high."""
        return self.layout.name.startswith("iq4")

    @property
    def low(self) -> int:
        if self.nonuniform:
            return IQ4_LEVELS[0]
        return 0 if self.layout.has_min else -(1 << (self.layout.bits - 1))

    @property
    def high(self) -> int:
        return IQ4_LEVELS[-1] if self.nonuniform else self.low + (1 << self.layout.bits) - 1

    @property
    def anchors(self) -> tuple[float, ...]:
        """Levels on which to place a sub-block's extreme value, a candidate scale for each: the
        value of the largest magnitude, or in a type with minimums the largest above the smallest.
        """
        centers = (self.high,) if self.layout.has_min else (self.low, self.high)
        return tuple(center + self.anchor_step * i for center in centers for i in range(-3, 4))


SEARCHES = {
    name: Search(BLOCK_LAYOUTS[name], anchor_step, sub_scales)
    for name, anchor_step, sub_scales in (
        ("q2_k", 0.15, (0, 15)),
        ("q3_k", 0.2, (-32, 31)),
        ("q4_k", 0.3, (0, 63)),
        ("q5_k", 0.35, (0, 63)),
        ("q6_k", 2.0, (-128, 127)),
        ("iq4_nl", 6.0, (1, 1)),
        ("iq4_xs", 6.0, (-32, 31)),
    )
}


def search(name: str, x: np.ndarray, saturate: bool = False) -> np.ndarray:
    """The bytes of the blocks `x` in the ggml type `name`, found by their squared error.

    Parameters
    ----------
    name
        A key of SEARCHES.
    x
        float32 [n, elements], finite.
    saturate
        Store 65504 where a block's float16 scale would be infinite; its codes saturate.

    Returns
    -------
    uint8 [n, nbytes]. A block's bytes do not depend on the blocks beside it.

    Examples
    --------
    >>> search("q4_k", np.zeros((2, 256), np.float32)).shape
    (2, 144)
    """
    candidates = SEARCHES[name]
    layout = candidates.layout
    find = _scale_fields if candidates.sub_scales == (1, 1) else _block_fields
    blocks = np.empty((len(x), layout.nbytes), np.uint8)
    step = CHUNK // layout.elements
    with np.errstate(all="ignore"):  # `_divide` and float16 decide what becomes of extremes
        for start in range(0, len(x), step):
            fields = find(_Chunk(x[start : start + step], candidates))
            blocks[start : start + step] = layout.pack(**fields, saturate=saturate)
    return blocks


def serial_sum(x: np.ndarray) -> np.ndarray:
    """Sums of float32 `x` over its first axis, in order: ((x[0] + x[1]) + x[2]) + ...

    np.add.reduce adds whole rows, but where a row is one number it adds those in pairs.
    """
    if x[0].size == 1:
        return np.add.accumulate(x, axis=0)[-1]
    return np.add.reduce(x, axis=0)


def _divide(a: np.ndarray | float, b: np.ndarray) -> np.ndarray:
    """float32 a / b where that is finite, else 0."""
    quotient = np.asarray(F32(a) / b)
    quotient[~np.isfinite(quotient)] = 0
    return quotient


def _furthest(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """Whichever is further from zero; the positive one of two that are equally far."""
    return np.where(top >= -bottom, top, bottom)


@cache
def _iq4_table() -> tuple[np.ndarray, np.ndarray]:
    """float32 [512] levels and uint8 [512] codes of the numbers in ((i - 257) / 2, (i - 256) / 2].

    Midpoints between levels are halves, so they end cells; a tie goes to the lower level.
    """
    levels = np.array(IQ4_LEVELS)
    codes = np.searchsorted(levels[1:] + levels[:-1], np.arange(-256, 256), side="left")
    return levels[codes].astype(F32), codes.astype(np.uint8)


class _Fit(NamedTuple):
    """x' = level * sc * d - m * dmin; m and dmin are 0 where the type has no minimums."""

    d: np.ndarray  # float32 [blocks], not in units, to be rounded to float16
    dmin: np.ndarray  # the same
    sc: np.ndarray  # float32 [sub_blocks, blocks], integers
    m: np.ndarray  # the same


class _Chunk:
    """Some blocks, each divided by a power of two of its own so that squares keep their bits.

    Attributes
    ----------
    search
        The candidates of the type.
    x
        float32 [sub_block, sub_blocks, blocks], in units.
    unit
        float32 [blocks]: that power of two. The largest magnitude of a block of x is then in
        [1, 4), or less where the block's was below 2^-126.
    top, bottom
        float32 [sub_blocks, blocks]: the largest and the smallest x.
    """

    def __init__(self, blocks: np.ndarray, candidates: Search):
        self.search = candidates
        columns = blocks.reshape(len(blocks), -1, candidates.layout.sub_block).transpose(2, 1, 0)
        self.x = np.array(columns, F32, order="C")
        top, bottom = np.maximum.reduce(self.x), np.minimum.reduce(self.x)
        largest = np.maximum.reduce(np.maximum(top, -bottom))
        exponent = np.clip(largest.view(np.uint32) >> 23, 1, 253)  # unit and 1 / unit are normal
        self.unit = (exponent << 23).view(F32)
        self.per_unit = ((254 - exponent) << 23).view(F32)
        self.x *= self.per_unit
        self.top, self.bottom = top * self.per_unit, bottom * self.per_unit
        self._levels, self._work, self._raised = (np.empty_like(self.x) for _ in range(3))

    def levels(self, x: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        """The levels nearest to x * inverse, in a buffer that the next call overwrites."""
        if self.search.nonuniform:
            levels, _ = _iq4_table()
            return np.take(levels, self._iq4_cells(x, inverse), out=self._levels, mode="clip")
        levels = np.multiply(x, inverse, out=self._levels)
        np.rint(levels, out=levels)
        return np.clip(levels, F32(self.search.low), F32(self.search.high), out=levels)

    def codes(self, x: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        """uint8 [blocks, elements]: the codes of levels(x, inverse)."""
        if self.search.nonuniform:
            _, codes = _iq4_table()
            found = np.take(codes, self._iq4_cells(x, inverse), mode="clip")
        else:
            found = (self.levels(x, inverse) - F32(self.search.low)).astype(np.uint8)
        return found.transpose(2, 1, 0).reshape(found.shape[2], -1)

    def _iq4_cells(self, x: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        """intp like x: where _iq4_table has x * inverse."""
        cells = np.multiply(x, F32(2) * inverse, out=self._levels)
        np.ceil(cells, out=cells)
        np.clip(cells, F32(-256), F32(255), out=cells)
        cells += F32(256)
        return cells.astype(np.intp)

    def raised(self, by: np.ndarray) -> np.ndarray:
        """x + by [sub_blocks, blocks], in a buffer that the next call overwrites."""
        return np.add(self.x, by, out=self._raised)

    def dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """float32 [sub_blocks, blocks]: the sums of a * b over the elements."""
        return serial_sum(np.multiply(a, b, out=self._work))

    def squared_error(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """float32 [sub_blocks, blocks]: what is left of x when it is rounded with `scale`."""
        rest = self.levels(x, _divide(1, scale))
        rest *= scale
        rest -= x
        return self.dot(rest, rest)

    def range_half(self, scale: np.ndarray) -> np.ndarray:
        """`scale` [blocks], in units, as numbers for float16; subnormals go away from zero.

        These scales span the range of an integer. Rounded to the nearest step of 2^-24, 1.4 steps
        would lose a third of that range and 0.4 steps all of it (q6_k of weights about 1e-5).
        """
        scale = scale * self.unit
        size = np.abs(scale)
        steps = np.copysign(np.ceil(size * F32(2**24)) * F32(2**-24), scale)
        return np.where(size < F32(2**-14), steps, scale) + F32(0)  # never -0

    def stored(self, number: np.ndarray) -> np.ndarray:
        """What float16 makes of numbers [blocks], in units; it saturates."""
        number = np.clip(number, F32(-HALF_MAX), F32(HALF_MAX))
        return number.astype(np.float16).astype(F32) * self.per_unit

    def effective(self, fit: _Fit) -> tuple[np.ndarray, np.ndarray]:
        """float32 [sub_blocks, blocks], in units: scales, and minimums to subtract, as stored."""
        return fit.sc * self.stored(fit.d), fit.m * self.stored(fit.dmin)


def _scale_fields(chunk: _Chunk) -> dict[str, np.ndarray]:
    """The fields of iq4_nl blocks: x' = level * scale.

    Of float16's subnormals the one below or above the best scale is taken that errs less.
    """
    scale = _best_scales(chunk)[0] * chunk.unit
    steps = np.abs(scale) * F32(2**24)
    below, above = (
        np.copysign((np.floor(steps) + F32(up)) * F32(2**-24), scale) + F32(0) for up in (0, 1)
    )
    errors = (chunk.squared_error(chunk.x, chunk.stored(one)[None])[0] for one in (below, above))
    nearest = np.where(np.greater(*errors), above, below)
    scale = np.where((steps < 1024) & (steps != np.floor(steps)), nearest, scale)
    return {"codes": chunk.codes(chunk.x, _divide(1, chunk.stored(scale))), "scale": scale}


def _block_fields(chunk: _Chunk) -> dict[str, np.ndarray]:
    """The fields of K-quant and iq4_xs blocks.

    Where float16's subnormals round d or dmin of the least-squares fit, it may be worse than the
    fit before, whose ones were rounded away from zero: the better of the two is taken.
    """
    first = _nearby(chunk, _first_fit(chunk), STEPS[0])
    fit = _refit(chunk, first)
    coarse = _is_subnormal(fit.d) | _is_subnormal(fit.dmin)
    fit = _nearby(chunk, fit, STEPS[1])
    if coarse.any():
        worse = coarse & (_total_error(chunk, first) < _total_error(chunk, fit))
        fit = _Fit(*(np.where(worse, a, b) for a, b in zip(first, fit, strict=True)))
    scale, minimum = chunk.effective(fit)
    codes = chunk.codes(chunk.raised(minimum), _divide(1, scale))
    fields = {"codes": codes, "scale": fit.d, "sc": fit.sc.T}
    return fields | {"minimum": fit.dmin, "m": fit.m.T} if chunk.search.layout.has_min else fields


def _is_subnormal(number: np.ndarray) -> np.ndarray:
    """Whether float16 makes a subnormal of a number, or 0 of one that is not 0."""
    return (np.abs(number) < F32(2**-14)) & (number != 0)


def _total_error(chunk: _Chunk, fit: _Fit) -> np.ndarray:
    """float32 [blocks]: the squared error of a fit, in units."""
    scale, minimum = chunk.effective(fit)
    return serial_sum(chunk.squared_error(chunk.raised(minimum), scale))


def _first_fit(chunk: _Chunk) -> _Fit:
    """The integers nearest to each sub-block's own scale and minimum."""
    low, high = chunk.search.sub_scales
    if chunk.search.layout.has_min:
        scale, minimum = _best_minimums(chunk)
    else:
        scale = _best_scales(chunk)
        minimum = np.zeros_like(scale)
    furthest = _furthest(np.maximum.reduce(scale), np.minimum.reduce(scale))
    d = chunk.range_half(furthest / F32(low or high))
    dmin = chunk.range_half(np.maximum.reduce(minimum) / F32(high))
    sc = np.rint(scale * _divide(1, chunk.stored(d)))
    m = np.rint(minimum * _divide(1, chunk.stored(dmin)))
    return _Fit(d, dmin, np.clip(sc, F32(low), F32(high)), np.clip(m, F32(0), F32(high)))


def _nearby(chunk: _Chunk, fit: _Fit, steps: tuple[int, ...]) -> _Fit:
    """`fit` with those integers, `steps` away at most, that leave the least squared error."""
    low, high = chunk.search.sub_scales
    d, dmin = chunk.stored(fit.d), chunk.stored(fit.dmin)
    sc, m, least = fit.sc.copy(), fit.m.copy(), np.full_like(fit.sc, np.inf)
    for step_m in steps if chunk.search.layout.has_min else (0,):
        try_m = np.clip(fit.m + F32(step_m), F32(0), F32(high))
        raised = chunk.raised(try_m * dmin)
        for step_sc in steps:
            try_sc = np.clip(fit.sc + F32(step_sc), F32(low), F32(high))
            error = chunk.squared_error(raised, try_sc * d)
            better = error < least
            np.copyto(sc, try_sc, where=better)
            np.copyto(m, try_m, where=better)
            np.copyto(least, error, where=better)
    return fit._replace(sc=sc, m=m)


def _refit(chunk: _Chunk, fit: _Fit) -> _Fit:
    """`fit` with the least-squares d and dmin of its integers and levels.

    x is about d * a - dmin * m with a = sc * level: two normal equations. Where they have no
    positive solution (all m may be 0) dmin stays and d alone is solved for.
    """
    x = chunk.x
    scale, minimum = chunk.effective(fit)
    levels = chunk.levels(chunk.raised(minimum), _divide(1, scale))
    aa = serial_sum(fit.sc * fit.sc * chunk.dot(levels, levels))
    am = serial_sum(fit.sc * fit.m * serial_sum(levels))
    mm = serial_sum(fit.m * fit.m) * F32(len(x))
    ax = serial_sum(fit.sc * chunk.dot(levels, x))
    mx = serial_sum(fit.m * serial_sum(x))
    spread = aa * mm - am * am
    d = _divide(ax * mm - mx * am, spread)
    dmin = _divide(ax * am - mx * aa, spread)
    both = (spread > 0) & (d > 0) & (dmin > 0)
    d_alone = _divide(ax + chunk.stored(fit.dmin) * am, aa)
    return fit._replace(
        d=np.where(both, d, d_alone) * chunk.unit,
        dmin=np.where(both, dmin * chunk.unit, fit.dmin),
    )


def _best_scales(chunk: _Chunk) -> np.ndarray:
    """float32 [sub_blocks, blocks]: scales of little squared error, before any is stored.

    With levels l the best scale is sum(l x) / sum(l l), and it takes sum(l x)^2 / sum(l l) off the
    sum of squares.
    """
    x = chunk.x
    furthest = _furthest(chunk.top, chunk.bottom)
    best, most = np.zeros_like(furthest), np.zeros_like(furthest)
    for anchor in chunk.search.anchors:
        levels = chunk.levels(x, _divide(anchor, furthest))
        product = chunk.dot(levels, x)
        scale = _divide(product, chunk.dot(levels, levels))
        gain = scale * product
        better = gain > most
        np.copyto(best, scale, where=better)
        np.copyto(most, gain, where=better)
    return best


def _best_minimums(chunk: _Chunk) -> tuple[np.ndarray, np.ndarray]:
    """float32 [sub_blocks, blocks]: scales, and minimums to subtract, of little squared error.

    With levels l, (scale, -minimum) is the least-squares line through (l, x); where it would need
    a negative minimum, or all l are equal, the line through 0.
    """
    x, count = chunk.x, F32(len(chunk.x))
    total = serial_sum(x)
    scale, minimum = np.zeros_like(total), np.maximum(-total / count, F32(0))
    most = -minimum * total  # a scale of 0 and the mean, which suits constant sub-blocks
    floor = np.minimum(chunk.bottom, F32(0))
    raised = chunk.raised(-floor)
    for anchor in chunk.search.anchors:
        levels = chunk.levels(raised, _divide(anchor, chunk.top - floor))
        linear, square = serial_sum(levels), chunk.dot(levels, levels)
        product = chunk.dot(levels, x)
        spread = count * square - linear * linear
        slope = _divide(count * product - linear * total, spread)
        below = _divide(linear * product - square * total, spread)
        through_zero = (below < 0) | (spread <= 0)
        np.copyto(slope, _divide(product, square), where=through_zero)
        np.copyto(below, F32(0), where=through_zero)
        gain = slope * product - below * total
        better = gain > most
        np.copyto(scale, slope, where=better)
        np.copyto(minimum, below, where=better)
        np.copyto(most, gain, where=better)
    return scale, minimum
