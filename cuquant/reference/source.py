"""The values to quantize, read piece by piece in float32, and statistics of their blocks."""

import ml_dtypes
import numpy as np

from cuquant.formats import Format
from cuquant.reference.tiles import Piece, Tiles

F32 = np.float32


class Source:
    """The values to quantize as [batch, rows, columns], read piece by piece in float32."""

    def __init__(self, x: np.ndarray, axis: int, tiles: Tiles, clamp: bool) -> None:
        self.moved = np.moveaxis(x, axis, -1)
        self.matrices = self.moved.reshape(tiles.shape)
        self.logical_shape, self.axis = x.shape, axis
        self.rows = tiles.rows
        self.clamp = clamp

    def __getitem__(self, piece: Piece) -> np.ndarray:
        """float32, C-contiguous, infinities saturated and NaN zeroed where the policy clamps."""
        part = self.matrices[piece.index]
        values = np.ascontiguousarray(part, dtype=F32)
        if self.clamp and not np.isfinite(values).all():
            top = float(ml_dtypes.finfo(part.dtype).max)
            values = np.nan_to_num(values, nan=0.0, posinf=top, neginf=-top)
        return values

    def flat_index(self, piece: Piece) -> np.ndarray:
        """uint64: where each element of a piece stands in the array as it was given, flattened."""
        shape = self.logical_shape
        strides = np.cumprod(np.array([1, *shape[:0:-1]], np.uint64))[::-1]
        step = strides[self.axis]
        row = piece.batch * self.rows + np.arange(piece.row, piece.row_end)
        start = np.zeros(len(row), np.uint64)
        others = [i for i in range(len(shape)) if i != self.axis % len(shape)]
        for i in reversed(others):
            row, digit = np.divmod(row, shape[i])
            start += digit.astype(np.uint64) * strides[i]
        column = np.arange(piece.column, piece.column_end, dtype=np.uint64)
        return start[:, None] + column * step


def statistics(source: Source, fmt: Format, tiles: Tiles) -> dict[str, np.ndarray]:
    """What the scale rule needs of every block, in arrays of the grid's shape.

    "top" (float32: max |x|, or the signed furthest), "low" and "high" (float32), or "sum"
    (float64, added one by one in index order).
    """
    names = {"range": ("low", "high"), "mean_abs": ("sum",)}.get(fmt.rule.rule, ("top",))
    found = {name: np.zeros(tiles.grid, np.float64 if name == "sum" else F32) for name in names}
    seen = np.zeros(tiles.grid, bool)
    for piece in tiles.whole_tiles():
        # Blocks that need not hold 0 must not find the zeros of a partial one.
        blocks = tiles.gather(source[piece], piece, "edge" if fmt.offset == "min" else "zero")
        where = tiles.tile_index(piece)
        fresh = not seen[where].any()
        _gather_statistics(found, fmt, blocks, where, fresh)
        seen[where] = True
    return found


def _gather_statistics(
    found: dict[str, np.ndarray], fmt: Format, blocks: np.ndarray, where: tuple, fresh: bool
) -> None:
    rule = fmt.rule.rule
    if rule == "range":
        low, high = blocks.min(-1), blocks.max(-1)
        # Of zeros of both signs NumPy takes any; here -0 is below 0.
        negative = ((blocks == 0) & np.signbit(blocks)).any(-1)
        low = np.where((low == 0) & negative, F32(-0.0), low)
        if fmt.offset == "zero_point":  # zero must have a code
            low, high = np.minimum(low, 0), np.maximum(high, 0)
        found["low"][where] = low if fresh else np.minimum(found["low"][where], low)
        found["high"][where] = high if fresh else np.maximum(found["high"][where], high)
    elif rule == "mean_abs":
        carried = np.concatenate([found["sum"][where][..., None], np.abs(blocks)], axis=-1)
        found["sum"][where] = np.cumsum(carried, axis=-1, dtype=np.float64)[..., -1]
    elif rule == "signed_max":
        first = np.abs(blocks).argmax(-1)  # the lowest index of a tie; NaN before all
        top = np.take_along_axis(blocks, first[..., None], -1)[..., 0]
        old = found["top"][where]
        farther = (np.abs(top) > np.abs(old)) | (np.isnan(top) & ~np.isnan(old))
        found["top"][where] = top if fresh else np.where(farther, top, old)
    else:
        top = np.abs(blocks).max(-1)
        found["top"][where] = top if fresh else np.maximum(found["top"][where], top)
