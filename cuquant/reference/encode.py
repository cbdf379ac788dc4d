"""What `quantize` means, in NumPy: the scale of each block, its codes, its bytes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cuquant.formats import Format, Minifloat, get_format
from cuquant.formats.search import search
from cuquant.reference.decode import nested_scales
from cuquant.reference.float_blocks import float_blocks
from cuquant.reference.memory import empty
from cuquant.reference.philox import uniform
from cuquant.reference.refuse import (
    Components,
    infinite_blocks,
    refuse_count,
    refuse_nonfinite,
    refuse_vanished,
    vanished_blocks,
    vanished_tiles,
)
from cuquant.reference.source import Source, statistics
from cuquant.reference.tiles import Piece, Tiles

F32 = np.float32
EMPTY_ROWS = 1 << 20  # without elements: more share one scale's memory
NONFINITE = ("propagate", "raise", "clamp")
E8M0_NAN, E4M3_NAN, E4M3_PEAK = 255, 0x7F, 448
# The smallest number of a scale dtype and how many of them are its smallest normal one.
STEPS = {"float16": (F32(2.0**-24), 1024), "e4m3": (F32(2.0**-9), 8)}
CAST = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
}
HALF_NAN = np.array([0x00, 0x7E], np.uint8)  # the canonical float16 NaN, little-endian


@dataclass(frozen=True)
class Calibration:
    """Numbers that were found beforehand; None where the data decides.

    `scale` is the effective scale and `zero_point` the integer code of 0, both of the shape of
    the format's scales; `global_scale` is nvfp4's.
    """

    scale: np.ndarray | None = None
    zero_point: np.ndarray | None = None
    global_scale: float | None = None


def quantize(
    x: np.ndarray,
    fmt: Format,
    axis: int = -1,
    given: Calibration | None = None,
    *,
    stochastic: bool = False,
    seed: int = 0,
    nonfinite: str = "propagate",
    saturates: Callable[[int], object] | None = None,
) -> Components:
    """The components of `x` (float32, float16 or bfloat16, any shape) in format `fmt`.

    Their shapes are those of `moveaxis(x, axis, -1)`; see `Format.components`. `saturates` is
    called with the number of scales that were found and that float16 cannot hold; of ggml's blocks,
    which keep ggml's bytes, with the number of those that become infinite; of a format without
    scales, with the number of finite values beyond its largest.

    Raises
    ------
    ValueError
        With nonfinite="raise": a NaN or an infinity (its flat index is named), a scale that its
        dtype cannot hold, or a block that underflows.
    """
    if nonfinite == "raise":
        refuse_nonfinite(x)
    given = given or Calibration()
    stored = np.moveaxis(x, axis, -1).shape
    if not x.size and math.prod(stored[:-1]) > EMPTY_ROWS and given.scale is None:
        return _of_nothing(fmt, stored, given)
    tiles = Tiles.of(fmt, stored)
    # Integer codes have no NaN, and a calibrated scale must not change: there NaN clamps.
    clamp = nonfinite == "clamp" or (fmt.has_integer_codes and given.scale is not None)
    clamp |= not fmt.holds_nan
    source = Source(x, axis % x.ndim, tiles, clamp)
    if fmt.scale is not None and fmt.rule.rule == "search":
        return _told(_search_blocks(source, fmt, stored, nonfinite), fmt, saturates)
    if fmt.is_blocks and not fmt.layout.has_half_scale:
        return float_blocks(source, fmt, stored, nonfinite, saturates)
    scales = _scales(source, fmt, tiles, given, nonfinite, stochastic)
    _report_saturation(fmt, scales, saturates)
    if fmt.is_blocks:
        parts = _interleave(source, fmt, tiles, scales, stored, nonfinite)
        return _told(parts, fmt, saturates)
    parts = {c.name: empty(c.shape, c.dtype) for c in fmt.components(stored)}
    for name, values in scales.stored.items():
        parts[name][...] = values.reshape(parts[name].shape)
    packed = parts["packed"].reshape(tiles.batch, tiles.rows, fmt.row_packing.words(tiles.columns))
    for piece in tiles.panels(fmt.row_packing.group):
        values = source[piece]
        told = saturates is not None or nonfinite == "raise"
        if told and isinstance(fmt.codec, Minifloat) and fmt.scale is None:
            large = int(((np.abs(values) > F32(fmt.codec.peak)) & np.isfinite(values)).sum())
            if nonfinite == "raise":
                refuse_count(fmt, large)
            elif large and saturates:
                saturates(large)
        draw = uniform(seed, source.flat_index(piece)) if stochastic else None
        codes = _encode(values, fmt, tiles, scales, piece, draw)
        words = fmt.row_packing.pack(codes, fmt.zero_code).view(packed.dtype)
        first = fmt.row_packing.words(piece.column)
        packed[piece.batch, piece.row : piece.row_end, first : first + words.shape[1]] = words
    if nonfinite == "raise":
        refuse_vanished(fmt, vanished_tiles(source.__getitem__, fmt, tiles, parts, stored))
    return parts


def _of_nothing(fmt: Format, stored: tuple[int, ...], given: Calibration) -> Components:
    """Those of an array without elements, by one row: others have the same scales, in no memory."""
    row = np.empty([*(min(n, 1) for n in stored[:-1]), stored[-1]], F32)
    one = quantize(row, fmt, -1, given)
    parts = {}
    for c in fmt.components(stored):
        own = one[c.name] if math.prod(c.shape) else empty(c.shape, c.dtype)
        parts[c.name] = own if own.shape == c.shape else np.broadcast_to(own, c.shape)
    return parts


# ---- scales ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scales:
    """What encoding needs, in arrays of the grid's shape, and the components to store.

    `exact` is the scale before it was rounded to its dtype (nvfp4: relative to the global one).
    `saturated` counts finite scales and minimums that their dtype cannot hold.
    """

    stored: Components
    exact: np.ndarray | None = None
    inverse: np.ndarray | None = None
    minimum: np.ndarray | None = None
    zero_point: np.ndarray | None = None
    saturated: int = 0


def _scales(
    source: Source,
    fmt: Format,
    tiles: Tiles,
    given: Calibration,
    nonfinite: str,
    stochastic: bool,
) -> Scales:
    if fmt.scale is None:
        return Scales({})
    with np.errstate(all="ignore"):
        known = given.scale is not None and source.clamp  # nothing is left to find
        found = {} if known else statistics(source, fmt, tiles)
        bad = np.zeros(tiles.grid, bool)
        for values in found.values():
            bad |= ~np.isfinite(values)
        world = _global_scale(source, fmt, tiles, given)
        if given.scale is not None:
            exact = given.scale.reshape(tiles.grid).astype(F32)
            exact = exact if world is None else exact / world
        else:
            exact = _exact(found, fmt, tiles, world)
            if world is not None and given.global_scale is None:
                # A subnormal global scale has few bits: block scales may round above the largest.
                exact = np.minimum(exact, F32(E4M3_PEAK))
            exact = _settled(source, fmt, tiles, found, exact, world)
        exact[bad] = np.nan
        minimum, saturated = None, int(_cast(exact, fmt)[1].sum())
        if fmt.offset == "min":
            minimum = np.where(bad, F32(np.nan), found["low"])
            if not fmt.is_blocks:
                saturated += int(_cast(minimum, fmt)[1].sum())
        if nonfinite == "raise":
            refuse_count(fmt, saturated)
        if fmt.is_blocks:  # ggml rounds when it packs, and keeps what overflows
            return Scales({}, exact, _inverse(exact), minimum)
        stored, effective = _store(exact, fmt, world)
        if minimum is not None:
            stored["minimum"], _ = _cast(minimum, fmt)
            minimum = stored["minimum"].astype(F32)
        zero_point = None
        if fmt.offset == "zero_point":
            zero_point = _zero_point(found, fmt, tiles, effective, given)
            stored["zero_point"] = zero_point
        encoding = exact if fmt.rule.encode_with == "exact" else effective
        inverse = _inverse(encoding)
        if fmt.rule.rule == "mean_abs" and not stochastic:  # codes are signs, whatever the scale
            inverse = (inverse != 0).astype(F32)
        return Scales(stored, exact, inverse, minimum, zero_point, saturated)


def _exact(found: Components, fmt: Format, tiles: Tiles, world: np.float32 | None) -> np.ndarray:
    """The scale of each block before rounding: statistic / peak, float32."""
    rule, peak = fmt.rule.rule, F32(fmt.rule.peak)
    if rule == "range":
        low, high = found["low"], found["high"]
        exact = (high - low) / peak
        if fmt.offset == "zero_point":  # a difference beyond float32 is that of halves, twice
            halves = (high * F32(0.5) - low * F32(0.5)) / peak
            exact = np.where(np.isinf(exact), halves * F32(2), exact)
        return exact
    if rule == "mean_abs":  # float64: rounded once, to the stored dtype
        return found["sum"] / np.maximum(_elements(tiles), 1)
    if rule == "e8m0":
        emax = int(np.frexp(fmt.rule.peak)[1]) - 1
        exponent = np.frexp(found["top"])[1] - 1 - emax
        power = np.ldexp(F32(1), np.clip(exponent, -127, 127))
        return np.where(found["top"] == 0, F32(0), power).astype(F32)
    if world is None:
        return found["top"] / peak
    return found["top"] / (peak * world)


@dataclass(frozen=True)
class Candidate:
    """Scales that blocks might have, in arrays of the grid's shape; see `_settled`.

    `share` is a scale in units of the one above, whose inverse is `above`.
    """

    effective: np.ndarray
    share: np.ndarray
    above: np.ndarray


def _settled(
    source: Source,
    fmt: Format,
    tiles: Tiles,
    found: Components,
    exact: np.ndarray,
    world: np.float32 | None,
) -> np.ndarray:
    """`exact`, rounded where it is below the smallest normal number of its dtype.

    There are multiples of one step alone, and the nearest one may be far off, or 0. Of those below
    and above, the one with the smaller squared error is taken, the one below where they tie.
    """
    rule = fmt.rule
    if rule.dtype not in STEPS or rule.encode_with == "exact" or fmt.is_blocks:
        return exact
    if rule.rule == "mean_abs":  # of the signs' scales the nearest to the mean is the best
        return exact
    step, normal = STEPS[rule.dtype]
    unit = step if world is None else step * world
    steps = np.abs(exact) / step
    below = np.floor(steps)
    top = below + F32(1)
    above = _inverse(np.copysign(top * unit, exact))
    contested = (steps < normal) & (below != steps) & (above != 0)
    if not contested.any():
        return exact
    tried = (Candidate(np.copysign(n * unit, exact), n / top, above) for n in (below, top))
    least, most = (_losses(source, fmt, tiles, found, each, contested) for each in tried)
    best = np.where(most < least, top, below)
    return np.where(contested, np.copysign(best * step, exact), exact)


def _losses(
    source: Source,
    fmt: Format,
    tiles: Tiles,
    found: Components,
    tried: Candidate,
    contested: np.ndarray,
) -> np.ndarray:
    """uint64 of the grid's shape: squared errors of contested blocks, whole in any order.

    Errors are rounded to 2^-15 of the codec's peak times the scale above.
    """
    sums = np.zeros(tiles.grid, np.uint64)
    inverse, point, minimum = _inverse(tried.effective), None, None
    if fmt.offset == "min":
        minimum = _cast(found["low"], fmt)[0].astype(F32)
    if fmt.offset == "zero_point":
        point = _zero_point(found, fmt, tiles, tried.effective, Calibration()).astype(F32)
    fine = F32(2**15) / np.abs(F32(fmt.rule.peak))
    for piece in tiles.whole_tiles():
        where = tiles.tile_index(piece)
        chosen = contested[where]
        if not chosen.any():
            continue
        x = tiles.gather(source[piece], piece)[chosen]
        if minimum is not None:
            x = x - minimum[where][chosen][:, None]
        here = [part[where][chosen][:, None] for part in (inverse, tried.above, tried.share)]
        points = () if point is None else (point[where][chosen][:, None],)
        level = fmt.codec.decode(fmt.codec.encode(x * here[0], *points), *points)
        rest = np.abs(x * here[1] - level * here[2]) * fine
        rest = np.rint(np.minimum(rest, F32(2**16 - 1))).astype(np.uint64)
        rest *= tiles.gather(np.ones(piece.shape, np.uint64), piece)[chosen]  # 0 beyond the edge
        sums[where][chosen] += (rest * rest).sum(-1, dtype=np.uint64)
    return sums


def _elements(tiles: Tiles) -> np.ndarray:
    """How many elements each block has: fewer where the last one is partial."""
    if tiles.is_empty:
        return np.zeros((1, 1), np.int64)
    _, down, across = tiles.grid
    tall = np.minimum(tiles.tall, tiles.rows - np.arange(down) * tiles.tall)
    wide = np.minimum(tiles.wide, tiles.columns - np.arange(across) * tiles.wide)
    return np.multiply.outer(tall, wide)


def _global_scale(
    source: Source, fmt: Format, tiles: Tiles, given: Calibration
) -> np.float32 | None:
    """nvfp4's float32: absmax / (6 * 448) of the finite elements; 1 where that vanishes."""
    if fmt.rule.nested != "global":
        return None
    if given.global_scale is not None:
        return F32(given.global_scale)
    top = F32(0)
    for piece in tiles.panels(fmt.row_packing.group):
        size = np.abs(source[piece])
        top = max(top, size.max(initial=0, where=np.isfinite(size)))
    return top / F32(fmt.rule.peak * E4M3_PEAK) or F32(1)


def _cast(exact: np.ndarray, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """Scales rounded to the dtype they are stored in, and which finite ones it cannot hold.

    Those saturate. NaN stays. A zero is a positive one.
    """
    dtype = CAST.get(fmt.rule.dtype, F32)
    rounded = exact.astype(dtype)
    over = ~np.isfinite(rounded) & ~np.isnan(exact)
    top = np.asarray(ml_dtypes.finfo(dtype).max, F32)
    rounded = np.where(over, np.copysign(top, exact), rounded.astype(F32)).astype(dtype)
    return rounded + dtype(0), over


def _store(
    exact: np.ndarray, fmt: Format, world: np.float32 | None
) -> tuple[Components, np.ndarray]:
    """The scale components, and the effective float32 scale that decoding will see."""
    if fmt.rule.nested == "double":
        return _double_quantize(exact)
    if fmt.rule.dtype == "e8m0":
        exponent = np.where(exact == 0, -127, np.frexp(exact)[1] - 1)
        byte = np.where(np.isnan(exact), E8M0_NAN, exponent + 127).astype(np.uint8)
        return {"scale": byte}, exact
    rounded, _ = _cast(exact, fmt)
    if world is None:
        return {"scale": rounded}, rounded.astype(F32)
    byte = np.where(np.isnan(exact), np.uint8(E4M3_NAN), rounded.view(np.uint8))
    return {"scale": byte, "global_scale": np.asarray(world)}, rounded.astype(F32) * world


def _double_quantize(exact: np.ndarray) -> tuple[Components, np.ndarray]:
    """QLoRA: scales less their mean, as 8-bit dynamic codes in nested blocks of 256.

    The mean is a float64 sum of the finite scales in index order, rounded once.
    """
    flat = exact.reshape(-1).astype(F32)
    finite = flat[np.isfinite(flat)].astype(np.float64)
    offset = F32(np.cumsum(finite)[-1] / len(finite)) if len(finite) else F32(0)
    nested = quantize(flat - offset, get_format("dynamic8"))
    parts = {"scale": nested["packed"], "nested_scale": nested["scale"]}
    parts["nested_offset"] = np.asarray(offset)
    return parts, nested_scales(parts).reshape(exact.shape)


def _zero_point(
    found: Components, fmt: Format, tiles: Tiles, effective: np.ndarray, given: Calibration
) -> np.ndarray:
    """uint8 of the grid's shape: the code of 0, rint(-min / scale)."""
    if given.scale is not None:
        points = np.zeros(tiles.grid) if given.zero_point is None else given.zero_point
        return points.reshape(tiles.grid).astype(np.uint8)
    usable = _inverse(effective) != 0
    ratio = np.where(usable, -found["low"] / np.where(usable, effective, F32(1)), F32(0))
    return np.clip(np.rint(ratio), 0, fmt.rule.peak).astype(np.uint8)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale where that is finite, else 0: zero, vanishing and non-finite blocks alike."""
    inverse = F32(1) / scale.astype(F32)
    return np.where(np.isfinite(inverse), inverse, F32(0))


# ---- codes ----------------------------------------------------------------------------------


def _encode(
    values: np.ndarray,
    fmt: Format,
    tiles: Tiles,
    scales: Scales,
    piece: Piece,
    draw: np.ndarray | None,
) -> np.ndarray:
    """Codes of one piece, [rows, columns]."""
    extra = {}
    if scales.inverse is not None:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            inverse = tiles.spread(scales.inverse, piece)
            if scales.minimum is not None:
                values = values - tiles.spread(scales.minimum, piece)
            values = values * inverse
        if (inverse == 0).any():
            values = np.where(inverse == 0, F32(0), values)
        if scales.zero_point is not None:
            extra["zero_point"] = tiles.spread(scales.zero_point, piece).astype(F32)
    if draw is None:
        return fmt.codec.encode(values, **extra)
    return fmt.codec.encode_stochastic(values, draw, **extra)


def _interleave(
    source: Source, fmt: Format, tiles: Tiles, scales: Scales, stored: tuple, nonfinite: str
) -> Components:
    """ggml's blocks: codes and half-rounded scales together."""
    layout, exact, vanished = fmt.layout, np.asarray(scales.exact), 0
    blocks = empty(fmt.components(stored)[0].shape, np.dtype(np.uint8))
    flat = blocks.reshape(tiles.rows, -(-tiles.columns // layout.elements), layout.nbytes)
    for piece in tiles.panels(layout.elements):
        values = source[piece]
        codes = _encode(values, fmt, tiles, scales, piece, None)
        where = tiles.tile_index(piece)
        codes = codes.reshape(-1, layout.elements)
        fields = {"scale": exact[where].reshape(len(codes), -1)}
        if scales.minimum is not None:
            fields["minimum"] = scales.minimum[where].reshape(len(codes), -1)
        if layout.sum_byte is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # as its scale, it may not fit
                total = fmt.codec.decode(codes).sum(-1, dtype=F32)
                fields["sum"] = fields["scale"][:, 0] * total
        packed = layout.pack(codes, **fields, saturate=nonfinite == "clamp")
        if nonfinite == "raise":
            vanished += vanished_blocks(values.reshape(codes.shape), packed, fmt)
        _, rows, across = where
        flat[rows, across] = packed.reshape(piece.shape[0], -1, layout.nbytes)
    refuse_vanished(fmt, vanished)
    return {"blocks": blocks}


def _search_blocks(source: Source, fmt: Format, stored: tuple, nonfinite: str) -> Components:
    """K-quants and IQ4: their quantizers look for the scales that err least."""
    layout = fmt.layout
    blocks = empty(fmt.components(stored)[0].shape, np.dtype(np.uint8))
    tiles = Tiles.of(fmt, stored)
    flat = blocks.reshape(blocks.size // layout.nbytes, layout.nbytes)
    done = vanished = 0
    for piece in tiles.panels(layout.elements):
        values = source[piece].reshape(-1, layout.elements)
        bad = np.logical_not(np.isfinite(values).all(axis=-1))
        values = np.where(bad[:, None], F32(0), values)
        packed = search(fmt.name, values, saturate=nonfinite == "clamp")
        packed[bad, layout.scale_byte : layout.scale_byte + 2] = HALF_NAN
        if nonfinite == "raise":
            refuse_count(fmt, int((~np.isfinite(layout.unpack(packed).scale)).sum()))
            vanished += vanished_blocks(values, packed, fmt)
        flat[done : done + len(packed)] = packed
        done += len(packed)
    refuse_vanished(fmt, vanished)
    return {"blocks": blocks}


# ---- what is told and refused -------------------------------------------------------------------


def _told(parts: Components, fmt: Format, saturates: Callable[[int], object] | None) -> Components:
    """ggml's blocks, after it was reported how many of them became infinite."""
    infinite = infinite_blocks(parts["blocks"], fmt.layout) if saturates else 0
    if infinite and saturates:
        saturates(infinite)
    return parts


def _report_saturation(
    fmt: Format, scales: Scales, saturates: Callable[[int], object] | None
) -> None:
    if saturates is not None and scales.saturated and fmt.rule.dtype in CAST:
        saturates(scales.saturated)
