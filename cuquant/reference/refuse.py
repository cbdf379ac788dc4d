"""What `quantize` refuses where nonfinite="raise": NaN, what overflows, blocks that vanish."""

from collections.abc import Callable

import numpy as np

from cuquant.formats import Format
from cuquant.formats.blocks import BlockLayout
from cuquant.reference.decode import decode_blocks, dequantize, nested_scales
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
        other = "clamp" if fmt.is_blocks else "propagate"  # ggml's blocks would become infinite
        raise ValueError(
            f"{overflows} {kind} entries of {fmt.name} overflow, and nonfinite='raise'; "
            f"rescale x, choose a format with float32 scales, or pass nonfinite={other!r} to "
            "saturate"
        )


def refuse_vanished(fmt: Format, blocks: int) -> None:
    """ValueError where blocks were stored as zeros that are none."""
    if blocks:
        raise ValueError(
            f"{blocks} blocks of {fmt.name} underflow: all of their numbers are stored as 0, since "
            f"{fmt.rule.dtype} holds no scale so small, and nonfinite='raise'; rescale x, choose "
            "float32 scales, or pass nonfinite='propagate'"
        )


def infinite_blocks(blocks: np.ndarray, layout: BlockLayout) -> int:
    """Of ggml's blocks uint8 [..., nbytes], how many have an infinite scale or minimum."""
    if layout.scale_kind != "half":
        return 0
    places = (layout.scale_byte, layout.minimum_byte)
    halves = (blocks[..., at : at + 2].copy().view(np.float16) for at in places if at is not None)
    return int(np.any([np.isinf(half) for half in halves], axis=0).sum())


def vanished_tiles(read: Read, fmt: Format, tiles: Tiles, parts: Components, stored: tuple) -> int:
    """How many blocks a scale that is 0 or subnormal made zeros of, but hold other numbers."""
    small = _is_small(fmt, parts).reshape(tiles.grid)
    given = small & _any_number(read, tiles, small)
    if not given.any():
        return 0
    values = dequantize(parts, fmt, stored).reshape(tiles.shape)
    return int((given & ~_any_number(lambda piece: values[piece.index], tiles, given)).sum())


def _is_small(fmt: Format, parts: Components) -> np.ndarray:
    """Whether a stored scale is 0 or subnormal: its exponent is 0."""
    scale, dtype = parts["scale"], fmt.rule.dtype
    if fmt.rule.nested == "double":
        scale = nested_scales(parts)
    exponent = {"float16": 0x7C00, "float32": 0x7F800000, "e4m3": 0x78, "e8m0": 0xFF}[dtype]
    return scale.view(f"u{scale.dtype.itemsize}") & exponent == 0


def _any_number(read: Read, tiles: Tiles, wanted: np.ndarray) -> np.ndarray:
    """Whether the wanted blocks hold a number that is not 0, in the grid's shape."""
    found = np.zeros(tiles.grid, bool)
    for piece in tiles.whole_tiles():
        where = tiles.tile_index(piece)
        if wanted[where].any():
            found[where] |= (tiles.gather(read(piece), piece) != 0).any(-1)
    return found


def vanished_blocks(x: np.ndarray, packed: np.ndarray, fmt: Format) -> int:
    """The same of ggml's blocks: x [n, elements] and their bytes."""
    small = packed[:, fmt.layout.scale_byte + 1] & 0x7C == 0
    small[small] = (x[small] != 0).any(-1)
    if not small.any():
        return 0
    fields = fmt.layout.unpack(packed[small])
    with np.errstate(all="ignore"):
        return int((decode_blocks(fields.codes, fmt, fields) == 0).all(-1).sum())
