"""An independent statement of each format, one block at a time in plain scalar arithmetic.

It shares no code with cuquant.reference: levels come from the catalogue, everything else is
written out from the formulas, so that a slip in the vectorised code shows.
"""

import functools
import itertools

import ml_dtypes
import numpy as np

import cuquant as cq
from cuquant.formats import Codebook, Format, Minifloat, Uniform

F = np.float32
ROUND = {"float16": np.float16, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
ONE = F(1)
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def bits_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Same dtype, shape and bytes: NaN equals NaN, and -0.0 is not 0.0."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def block_scale(block: np.ndarray, fmt: Format, world: np.float32 = ONE):
    """(scale that codes use, value that is stored as scale, zero point, minimum) of one block."""
    size = np.abs(block)
    rule, codec = fmt.scale.rule, fmt.codec
    if not np.isfinite(block).all():
        return F(np.nan), F(np.nan), 0, F(np.nan)
    if rule == "e8m0":
        top = size.max()
        if top == 0:
            return F(0), 0, 0, F(0)
        emax = codec.bits - 2 if isinstance(codec, Uniform) else codec.emax
        exponent = int(np.floor(np.log2(float(top)))) - emax
        exponent = max(-127, min(127, exponent))
        return F(2.0**exponent), exponent + 127, 0, F(0)
    if rule == "mean_abs":
        total = 0.0
        for value in size:
            total += float(value)
        stored = min(ROUND[fmt.scale.dtype](total / len(block)), np.float16(65504))
        return F(stored), stored, 0, F(0)
    low = high = F(0)
    if fmt.offset == "min":
        low, high = block.min(), block.max()
        exact = (high - low) / F(codec.high)
        low = held(low, fmt)
    elif rule == "range":
        low, high = min(F(0), block.min()), max(F(0), block.max())
        with np.errstate(over="ignore"):
            exact = (high - low) / F(codec.high)
        if np.isinf(exact):  # the difference is beyond float32, its half is not
            exact = (high / F(2) - low / F(2)) / F(codec.high) * F(2)
    elif rule == "signed_max":
        top = next(v for v in block if abs(v) == size.max())
        exact = top / F(fmt.scale.peak)
    elif fmt.scale.nested == "global":
        exact = size.max() / (F(fmt.scale.peak) * world)
        stored = min(exact, F(448)).astype(ml_dtypes.float8_e4m3fn)
        return F(stored) * world, stored, 0, F(0)
    else:
        exact = size.max() / F(fmt.scale.peak)
    stored = held(exact, fmt)
    used = exact if fmt.scale.encode_with == "exact" else F(stored)
    point = 0
    if fmt.offset == "zero_point" and used != 0 and np.isfinite(F(1) / used):
        point = int(np.clip(np.rint(-low / used), 0, codec.high))
    return used, stored, point, low


def held(value: np.float32, fmt: Format):
    """A scale or a minimum as it is stored; what is too large saturates."""
    dtype = ROUND[fmt.scale.dtype]
    stored = dtype(value)
    if np.isinf(stored):
        stored = dtype(np.copysign(F(ml_dtypes.finfo(dtype).max), value))
    return stored + dtype(0)


def encode_one(value: np.float32, codec) -> int:
    """The unsigned code of one number in the codec's range."""
    if isinstance(codec, Codebook):
        if codec.thresholds is None and codec.code_of_rank is None:
            return nearest(value, codec.levels, codec.tie)
        rank = sum(float(t) < float(value) for t in codec.thresholds)
        return rank if codec.code_of_rank is None else codec.code_of_rank[rank]
    if isinstance(codec, Uniform):
        return int(min(max(np.rint(value), codec.low), codec.high)) + codec.offset
    assert isinstance(codec, Minifloat)
    top = F(codec.peak)
    return int(min(max(value, -top), top).astype(codec.dtype).view(codec.code_dtype))


@functools.cache
def midpoints(levels: tuple[float, ...]) -> list[float]:
    """Between neighbours, in float32."""
    return [float((F(low) + F(high)) * F(0.5)) for low, high in itertools.pairwise(levels)]


def nearest(value: np.float32, levels: tuple[float, ...], tie: str) -> int:
    """By float32 midpoints, one after the other."""
    number = float(value)
    for rank, middle in enumerate(midpoints(levels)):
        if number < middle or (number == middle and (tie == "lower" or rank % 2 == 0)):
            return rank
    return len(levels) - 1


def quantize_row(row: np.ndarray, fmt: Format, world: np.float32 = ONE):
    """Codes, stored scales, zero points, minimums and float32 values of one row of blocks."""
    width = len(row) if fmt.scale.block in ("row", "tensor") else int(fmt.scale.block)
    codes, scales, points, minimums, values = [], [], [], [], []
    with np.errstate(all="ignore"):
        for start in range(0, len(row), width):
            block = row[start : start + width]
            used, stored, point, low = block_scale(block, fmt, world)
            minimum = F(low) if fmt.offset == "min" else F(0)
            inverse = F(1) / used
            dead = not np.isfinite(inverse) or inverse == 0
            decoded_scale = (
                F(2.0 ** (int(stored) - 127)) if fmt.scale.dtype == "e8m0" else F(stored)
            )
            decoded_scale = F(np.nan) if np.isnan(used) else decoded_scale * world
            for value in block:
                scaled = F(0) if dead else (value - minimum) * inverse
                if fmt.scale.rule == "mean_abs" and not dead:
                    scaled = value
                if fmt.offset == "zero_point":
                    code = int(np.clip(np.rint(scaled) + point, 0, fmt.codec.high))
                    number = F(code) - F(point)
                else:
                    code = encode_one(scaled, fmt.codec)
                    number = fmt.codec.decode(np.array([code], fmt.codec.code_dtype))[0]
                codes.append(code)
                value = number * decoded_scale
                values.append(value + minimum if fmt.offset == "min" else value)
            scales.append(stored)
            points.append(point)
            minimums.append(low)
    return codes, scales, points, minimums, values


def single_scale_formats() -> list[str]:
    """Formats of our own and bitsandbytes', whose blocks each have one scale."""
    return [
        name
        for name in cq.list_formats()
        if not cq.get_format(name).is_blocks and cq.get_format(name).scale is not None
    ]
