"""What `quantize` refuses where nonfinite="raise": NaN, what overflows, blocks that underflow."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from cuquant.formats import Format
from cuquant.formats.blocks import BlockLayout
from cuquant.formats.codecs import Minifloat
from cuquant.reference.decode import decode_blocks, dequantize, effective
from cuquant.reference.tiles import Piece, Tiles

Components = dict[str, np.ndarray]
Read = Callable[[Piece], np.ndarray]


def refuse_nonfinite(x: np.ndarray) -> None:
    finite = np.isfinite(x)
    if not finite.all():
        first = int(np.argmin(finite.reshape(-1)))
        refuse_value(x.reshape(-1)[first], first, x.size)


def refuse_value(value: object, index: int, size: int) -> None:
    """ValueError for a NaN or an infinity."""
    raise ValueError(
        f"x holds {value} at flat index {index} of {size}, and nonfinite='raise'; "
        "repair it, or pass nonfinite='clamp' or 'propagate'"
    )


def refuse_count(fmt: Format, overflows: int) -> None:
    """ValueError where scales (or values, where there are none) do not fit into their dtype."""
    if overflows:
        kind = fmt.rule.dtype if fmt.scale else "value"
        infinite = fmt.is_blocks and fmt.layout.has_half_scale  # as ggml's blocks would become
        other = "clamp" if infinite else "propagate"
        raise ValueError(
            f"{overflows} {kind} entries of {fmt.name} overflow, and nonfinite='raise'; "
            f"rescale x, choose a format with float32 scales, or pass nonfinite={other!r} to "
            "saturate"
        )


def refuse_vanished(fmt: Format, blocks: int) -> None:
    """ValueError where blocks (rows, where there are no scales) underflowed."""
    if blocks:
        what, number, other = "rows", f"{fmt.name} value", "choose another format"
        if fmt.scale is not None:
            what, number, other = "blocks", f"{fmt.rule.dtype} scale", "choose float32 scales"
        raise ValueError(
            f"{blocks} {what} of {fmt.name} underflow: their numbers are lost, since no {number} "
            f"is so small, and nonfinite='raise'; rescale x, {other}, or pass nonfinite='propagate'"
        )


def infinite_blocks(blocks: np.ndarray, layout: BlockLayout) -> int:
    """Of ggml's blocks uint8 [..., nbytes], how many have an infinite scale or minimum."""
    if not layout.has_half_scale:
        return 0
    places = (layout.scale_byte, layout.minimum_byte)
    halves = (blocks[..., at : at + 2].copy().view(np.float16) for at in places if at is not None)
    return int(np.any([np.isinf(half) for half in halves], axis=0).sum())


# A block has underflowed where its scale is 0 or subnormal, and a number is wrong by as much as the
# largest of them: all are stored as 0, or as others. Where the scale is 0 codes say nothing, and an
# eighth is enough: a minimum may be left, and be right.
SMALLEST_NORMAL = {"half_e8m0": 2.0**-126, "half_e4m3": 2.0**-7}  # of ggml's scales of a byte
LOST_OF_ZERO = np.float32(0.125)


def vanished_tiles(read: Read, fmt: Format, tiles: Tiles, parts: Components, stored: tuple) -> int:
    """How many blocks underflowed; of a format without scales, how many rows."""
    scale = effective(parts, fmt, stored).scale
    if scale is None:
        scale, small = np.broadcast_to(np.float32(1), tiles.grid), np.broadcast_to(True, tiles.grid)
    else:
        scale = scale.reshape(tiles.grid)
        small = _is_subnormal(scale) | _is_stored_small(fmt, parts["scale"]).reshape(tiles.grid)
    largest = _largest(read, tiles, small)
    if isinstance(fmt.codec, Minifloat) and fmt.scale is None:  # what is not below it is kept
        largest[largest >= float(ml_dtypes.finfo(fmt.codec.dtype).smallest_subnormal)] = 0
    given = largest > 0
    if not given.any():
        return 0
    values = dequantize(parts, fmt, stored).reshape(tiles.shape)
    return _count(
        scale, largest, _largest(lambda piece: read(piece) - values[piece.index], tiles, given)
    )


def _count(scale: np.ndarray, largest: np.ndarray, error: np.ndarray) -> int:
    limit = np.where(scale == 0, LOST_OF_ZERO * largest, largest)
    return int(((largest > 0) & (error >= limit)).sum())


def _is_subnormal(scale: np.ndarray) -> np.ndarray:
    """Whether the exponent is 0, of float16, bfloat16 or float32."""
    exponent = {"float16": 0x7C00, "bfloat16": 0x7F80}.get(scale.dtype.name, 0x7F800000)
    return scale.view(f"u{scale.dtype.itemsize}") & exponent == 0


def _is_stored_small(fmt: Format, scale: np.ndarray) -> np.ndarray:
    """Whether the byte that is stored for a scale is 0 or subnormal."""
    exponent = {"e4m3": 0x78, "e8m0": 0xFF}.get(fmt.rule.dtype)
    return np.zeros(scale.shape, bool) if exponent is None else scale.view(np.uint8) & exponent == 0


def _largest(read: Read, tiles: Tiles, wanted: np.ndarray) -> np.ndarray:
    """The largest magnitude of each of the wanted blocks, and 0 elsewhere, in the grid's shape."""
    found = np.zeros(tiles.grid, np.float32)
    for piece in tiles.whole_tiles():
        where = tiles.tile_index(piece)
        if wanted[where].any():
            own = np.abs(tiles.gather(read(piece), piece)).max(-1)
            found[where] = np.maximum(found[where], np.where(wanted[where], own, 0))
    return found


def vanished_blocks(x: np.ndarray, packed: np.ndarray, fmt: Format) -> int:
    """The same of ggml's blocks: x [n, elements] and their bytes.

    Those with a byte for the scale of each sub-block are counted by these.
    """
    if not fmt.layout.has_half_scale:
        return _vanished_sub_blocks(x, packed, fmt)
    small = packed[:, fmt.layout.scale_byte + 1] & 0x7C == 0
    if not small.any():
        return 0
    x, fields = x[small], fmt.layout.unpack(packed[small])
    zero = packed[small, fmt.layout.scale_byte :][:, :2].copy().view(np.float16)[:, 0]
    with np.errstate(all="ignore"):
        error = np.abs(x - decode_blocks(fields.codes, fmt, fields)).max(-1)
    return _count(zero, np.abs(x).max(-1), error)


def _vanished_sub_blocks(x: np.ndarray, packed: np.ndarray, fmt: Format) -> int:
    fields = fmt.layout.unpack(packed)
    subs, scale = x.reshape(fields.scale.size, -1), fields.scale.reshape(-1)
    small = scale < SMALLEST_NORMAL[fmt.layout.scale_kind]
    if not small.any():
        return 0
    error = np.abs(subs - decode_blocks(fields.codes, fmt, fields).reshape(subs.shape)).max(-1)
    return _count(scale[small], np.abs(subs).max(-1)[small], error[small])
