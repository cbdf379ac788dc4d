"""Codecs: which numbers a code stands for, and how a number finds its code.

A code is the unsigned number of one element. `encode` and `decode` are exact float32 statements;
`kernels/format.cuh` holds the CUDA structs of the same names.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cuquant.lazy import lazy

F32 = np.float32
TIES = ("lower", "even")
ROUNDINGS = ("half_even", "half_away", "half_up")


@dataclass(frozen=True)
class Codebook:
    """The nearest of `levels`.

    Parameters
    ----------
    levels
        Ascending float32 values, 2 to 256 of them.
    thresholds
        len(levels) - 1 float32 borders; rank i + 1 starts strictly above thresholds[i].
        None: the float32 midpoints.
    code_of_rank
        The code stored for the i-th lowest level; None: i.
    tie
        Where a value equal to a midpoint goes: to the "lower" level or to the one of "even" rank.
    """

    levels: tuple[float, ...]
    thresholds: tuple[float, ...] | None = None
    code_of_rank: tuple[int, ...] | None = None
    tie: str = "lower"

    def __reduce__(self):  # the tables below are quicker made again than carried along
        return Codebook, (self.levels, self.thresholds, self.code_of_rank, self.tie)

    def __hash__(self) -> int:
        return self._hash

    @lazy
    def _hash(self) -> int:  # up to 256 levels: once is enough
        return hash((self.levels, self.thresholds, self.code_of_rank, self.tie))

    @property
    def bits(self) -> int:
        return (len(self.levels) - 1).bit_length()

    @property
    def code_dtype(self) -> np.dtype:
        return np.dtype(np.uint8)

    @lazy
    def signed_zero(self) -> bool:
        return any(v == 0 and np.signbit(v) for v in self.levels)

    @lazy
    def borders(self) -> np.ndarray:
        """float32 [count - 1]: rank = how many borders lie strictly below the value."""
        levels = np.asarray(self.levels, F32)
        if self.thresholds is not None:
            return np.asarray(self.thresholds, F32)
        with np.errstate(over="ignore"):
            borders = (levels[1:] + levels[:-1]) * F32(0.5)
        halves = levels[1:] * F32(0.5) + levels[:-1] * F32(0.5)  # where the sum is too large
        borders = np.where(np.isfinite(borders), borders, halves)
        if self.tie == "even":  # between ranks 1 and 2 a tie goes up: start just below the midpoint
            borders[1::2] = np.nextafter(borders[1::2], F32(-np.inf))
        return borders

    @lazy
    def ranks_to_codes(self) -> np.ndarray:
        """uint8 [count]."""
        codes = self.code_of_rank or range(len(self.levels))
        return np.asarray(list(codes), np.uint8)

    @lazy
    def values(self) -> np.ndarray:
        """float32 [256]: the value of each code; NaN where no code is assigned."""
        values = np.full(256, np.nan, F32)
        values[self.ranks_to_codes] = np.asarray(self.levels, F32)
        return values

    @property
    def numbers(self) -> np.ndarray:
        """float32: all the numbers that codes stand for."""
        return np.asarray(self.levels, F32)

    @lazy
    def _grid(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Rank and border by the upper 16 bits of a float32, where no cell holds two borders.

        Twenty times fewer cache misses than a binary search; equality with it is tested.
        """
        high = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
        ends = np.stack([high, high | np.uint32(0xFFFF)]).view(F32)
        with np.errstate(invalid="ignore"):
            ranks = np.searchsorted(self.borders, ends, side="left")
        ranks[:, ~np.isfinite(ends).all(0)] = 0  # cells of infinities and NaN are looked up below
        for sign, rank in ((0x7F80, len(self.levels) - 1), (0xFF80, 0)):
            ranks[:, sign] = rank
        low, top = ranks.min(0), ranks.max(0)
        if (top - low).max() > 1:
            return None
        border = np.append(self.borders, F32(np.inf))[low]
        border[top == low] = np.inf
        return low.astype(np.uint8), border

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Codes (uint8) of float32 `x`; NaN has no place in a codebook and must not come here."""
        if self._grid is None or not x.flags.c_contiguous:
            rank = np.searchsorted(self.borders, x, side="left").astype(np.uint8)
        else:
            base, border = self._grid
            cell = x.view(np.uint32) >> np.uint32(16)
            rank = base.take(cell)
            rank += x > border.take(cell)
        return rank if self.code_of_rank is None else self.ranks_to_codes.take(rank)

    def encode_stochastic(self, x: np.ndarray, draw: np.ndarray) -> np.ndarray:
        """Codes of one of the two levels around `x`; the upper one where draw < its distance share.

        `draw` is float32 in [0, 1) of x's shape.
        """
        levels = np.asarray(self.levels, F32)
        below = np.searchsorted(levels, x, side="right") - 1
        below = np.clip(below, 0, len(levels) - 2)
        low, high = levels[below], levels[below + 1]
        with np.errstate(over="ignore"):  # far outside the levels: up or down for certain
            rank = below + (draw < (x - low) / (high - low))
        return self.ranks_to_codes[rank]

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """float32 values of `codes`."""
        return self.values.take(codes)


@dataclass(frozen=True)
class Uniform:
    """The integers low..high; the code is the integer plus `offset`.

    `rounding`: "half_even" (ours, ONNX), "half_away" (C's roundf, ggml's q8_0) or
    "half_up" (trunc(x + offset + 0.5), ggml's q4_0..q5_1).
    """

    low: int
    high: int
    rounding: str = "half_even"

    signed_zero = False

    @property
    def bits(self) -> int:
        return (self.high - self.low).bit_length()

    @property
    def code_dtype(self) -> np.dtype:
        return np.dtype(np.uint8)

    @property
    def numbers(self) -> np.ndarray:
        """float32: all the numbers that codes stand for, before a zero point is taken off.

        A code of 0 that nobody encodes, -128 of int8, is one of them.
        """
        return np.arange(min(self.low, -self.offset), self.high + 1, dtype=F32)

    @property
    def offset(self) -> int:
        """What is added to an integer to make it unsigned: 2^(bits - 1) for signed ranges."""
        return 1 << (self.bits - 1) if self.low < 0 else 0

    def encode(self, x: np.ndarray, zero_point: np.ndarray | None = None) -> np.ndarray:
        """Codes (uint8) of float32 `x`, saturating at low and high after `zero_point` is added."""
        if self.rounding == "half_even":
            q = np.rint(x)
        elif self.rounding == "half_away":  # exact: float32 has no bit to lose below 2^23
            whole = np.trunc(x)
            q = whole + np.where(np.abs(x - whole) >= F32(0.5), np.copysign(F32(1), x), F32(0))
        else:
            q = np.floor(x + F32(self.offset + 0.5)) - F32(self.offset)
        return self._code(q, zero_point)

    def encode_stochastic(
        self, x: np.ndarray, draw: np.ndarray, zero_point: np.ndarray | None = None
    ) -> np.ndarray:
        """floor(x), or one more where draw < x - floor(x)."""
        floor = np.floor(x)
        with np.errstate(invalid="ignore"):
            return self._code(floor + (draw < x - floor), zero_point)

    def _code(self, q: np.ndarray, zero_point: np.ndarray | None) -> np.ndarray:
        if zero_point is not None:
            q = q + zero_point
        q = np.clip(q, F32(self.low), F32(self.high))
        q += F32(self.offset)
        return q.astype(np.uint8)

    def decode(self, codes: np.ndarray, zero_point: np.ndarray | None = None) -> np.ndarray:
        """float32 integers of `codes`, less `zero_point`."""
        shift = F32(self.offset) if zero_point is None else zero_point + F32(self.offset)
        return codes.astype(F32) - shift


MINIFLOATS = {
    (4, 3): ml_dtypes.float8_e4m3fn,
    (5, 2): ml_dtypes.float8_e5m2,
    (2, 3): ml_dtypes.float6_e2m3fn,
    (3, 2): ml_dtypes.float6_e3m2fn,
    (2, 1): ml_dtypes.float4_e2m1fn,
    (5, 10): np.float16,
    (8, 7): ml_dtypes.bfloat16,
}


@dataclass(frozen=True)
class Minifloat:
    """A float of `exponent` and `mantissa` bits, its own bits the code; saturating RNE.

    The 4, 6 and 8 bit ones are OCP's (e4m3 is the finite "fn" kind), fp16 and bf16 are (5, 10)
    and (8, 7). The cast is ml_dtypes' and NumPy's.
    """

    exponent: int
    mantissa: int

    signed_zero = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @lazy
    def dtype(self) -> np.dtype:
        return np.dtype(MINIFLOATS[self.exponent, self.mantissa])

    @property
    def code_dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.bits <= 8 else np.uint16)

    @lazy
    def peak(self) -> float:
        """The largest finite value: 448, 57344, 7.5, 28, 6, 65504, 3.39e38."""
        return float(ml_dtypes.finfo(self.dtype).max)

    @lazy
    def emax(self) -> int:
        """floor(log2(peak)), which OCP MX subtracts from a block's exponent."""
        return int(np.frexp(self.peak)[1]) - 1

    @property
    def numbers(self) -> np.ndarray:
        """float32: the largest and smallest number that codes stand for."""
        return np.array([-self.peak, self.peak], F32)

    @lazy
    def values(self) -> np.ndarray:
        """float32 [2^bits]: the value of each code."""
        return np.arange(1 << self.bits, dtype=self.code_dtype).view(self.dtype).astype(F32)

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Codes of float32 `x`; beyond the peak they saturate.

        Infinity and NaN keep their own codes only in fp16 and bf16, which carry no scale.
        """
        clipped = np.clip(x, F32(-self.peak), F32(self.peak))
        if self.bits == 16:
            clipped = np.where(np.isinf(x), x, clipped)
        with np.errstate(invalid="ignore"):
            return clipped.astype(self.dtype).view(self.code_dtype)

    def encode_stochastic(self, x: np.ndarray, draw: np.ndarray) -> np.ndarray:
        """Codes of one of the two neighbours of `x`, away from zero where draw < its share."""
        size = np.minimum(np.abs(x), F32(self.peak)).astype(np.float64)
        lowest = int(np.frexp(float(ml_dtypes.finfo(self.dtype).smallest_normal))[1]) - 1
        exponent = np.maximum(np.frexp(size)[1] - 1, lowest) - self.mantissa
        with np.errstate(invalid="ignore"):
            steps = np.ldexp(size, -exponent)
            floor = np.floor(steps)
            size = np.ldexp(floor + (draw < steps - floor), exponent)
        rounded = np.where(np.isfinite(x), np.copysign(size, x), x).astype(F32)
        return self.encode(rounded)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """float32 values of `codes`."""
        if self.bits == 16:
            return codes.view(self.dtype).astype(F32)
        return self.values.take(codes)


Codec = Codebook | Uniform | Minifloat
