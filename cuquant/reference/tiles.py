"""Geometry: which elements share a scale, and pieces of an array small enough for the cache."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cuquant.formats import Format

PIECE = 1 << 16  # elements worked on at a time: 256 KiB of float32, and a few temporaries


@dataclass(frozen=True)
class Piece:
    """Elements [row : row_end, column : column_end] of matrix `batch`."""

    batch: int
    row: int
    row_end: int
    column: int
    column_end: int

    @property
    def index(self) -> tuple[int, slice, slice]:
        return self.batch, slice(self.row, self.row_end), slice(self.column, self.column_end)

    @property
    def shape(self) -> tuple[int, int]:
        return self.row_end - self.row, self.column_end - self.column


@dataclass(frozen=True)
class Tiles:
    """An array stored as [rows..., K], seen as [batch, rows, columns] in tiles of [tall, wide]."""

    batch: int
    rows: int
    columns: int
    tall: int
    wide: int
    grid: tuple[int, int, int]  # tiles in each direction; an empty row or tensor has its one scale

    @classmethod
    def of(cls, fmt: Format, stored: tuple[int, ...]) -> "Tiles":
        *rows, columns = stored
        batch = 1
        if fmt.scale and isinstance(fmt.scale.block, tuple):
            batch = math.prod(rows[:-1])
            rows = rows[-1:]
        height = math.prod(rows)
        if batch > 1 and height % fmt.rule.tile(height, columns)[0] == 0:
            batch, height = 1, batch * height  # no tile crosses from one matrix to the next
        if fmt.scale is None:
            return cls(batch, height, columns, 1, max(columns, 1), (1, height, 1))
        tall, wide = fmt.scale.tile(height, columns)
        *_, across = 1, *fmt.scale.shape(stored)
        down = 1 if fmt.scale.block == "tensor" else -(-height // tall)
        return cls(batch, height, columns, tall, wide, (batch, down, across))

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.rows, self.columns

    @property
    def is_empty(self) -> bool:
        """Whether there are no elements; there may still be 2^60 rows, which nobody must walk."""
        return 0 in self.shape

    def panels(self, multiple: int) -> Iterator[Piece]:
        """Pieces whose columns start at multiples of `multiple`, in row-major order."""
        if self.is_empty:
            return
        width = self.columns
        if width > PIECE:
            width = max(PIECE // multiple, 1) * multiple
        height = max(1, PIECE // max(width, 1))
        for batch in range(self.batch):
            yield from self._cover(batch, 0, self.rows, 0, self.columns, height, width)

    def whole_tiles(self) -> Iterator[Piece]:
        """Pieces made of whole tiles; a tile larger than a piece comes as several, in order."""
        if self.is_empty:
            return
        height, width = self.tall, self.columns
        if self.tall * self.columns <= PIECE:
            height *= max(1, PIECE // max(self.tall * self.columns, 1))
        elif self.tall * self.wide <= PIECE:
            width = max(1, PIECE // (self.tall * self.wide)) * self.wide
        else:
            yield from self._split_tiles()
            return
        for batch in range(self.batch):
            yield from self._cover(batch, 0, self.rows, 0, self.columns, height, width)

    def _split_tiles(self) -> Iterator[Piece]:
        for batch, i, j in np.ndindex(*self.grid):
            row, column = i * self.tall, j * self.wide
            row_end = min(row + self.tall, self.rows)
            column_end = min(column + self.wide, self.columns)
            width = min(column_end - column, PIECE)
            height = max(1, PIECE // max(width, 1))
            yield from self._cover(batch, row, row_end, column, column_end, height, width)

    @staticmethod
    def _cover(
        batch: int, row: int, row_end: int, column: int, column_end: int, height: int, width: int
    ) -> Iterator[Piece]:
        for r in range(row, row_end, max(height, 1)):
            for c in range(column, column_end, max(width, 1)):
                yield Piece(batch, r, min(r + height, row_end), c, min(c + width, column_end))

    def tile_index(self, piece: Piece) -> tuple[int, slice, slice]:
        """Where the tiles that a piece touches stand in the grid."""
        return (
            piece.batch,
            slice(piece.row // self.tall, -(-piece.row_end // self.tall)),
            slice(piece.column // self.wide, -(-piece.column_end // self.wide)),
        )

    def gather(self, x: np.ndarray, piece: Piece, missing_as: str = "zero") -> np.ndarray:
        """Elements of a piece by tile: [tile rows, tile columns, elements].

        Those that the last tiles miss are 0, or `missing_as`="edge": equal to ones that they have.
        The piece consists of whole tiles, or is a part of one.
        """
        rows, columns = x.shape
        tall, wide = min(self.tall, rows), min(self.wide, columns)
        missing = (-rows % tall, -columns % wide)
        mode = "edge" if missing_as == "edge" else "constant"
        grown = np.pad(x, ((0, missing[0]), (0, missing[1])), mode) if any(missing) else x
        if tall == 1:
            return grown.reshape(rows, -1, wide)
        tiles = grown.reshape(len(grown) // tall, tall, -1, wide).swapaxes(1, 2)
        return tiles.reshape(tiles.shape[0], tiles.shape[1], tall * wide)

    def spread(self, values: np.ndarray, piece: Piece) -> np.ndarray:
        """The tile values `values` (of `grid`'s shape) of a piece's elements, broadcastable."""
        batch, rows, columns = self.tile_index(piece)
        tiles = values[batch, rows, columns]
        if self.tall > 1:
            skipped = piece.row % self.tall
            tall = min(self.tall, self.rows)  # a block may be taller than the array, by any factor
            tiles = np.repeat(tiles, tall, axis=0)[skipped : skipped + piece.shape[0]]
        if tiles.shape[1] == 1:
            return tiles
        skipped = piece.column % self.wide
        return np.repeat(tiles, self.wide, axis=1)[:, skipped : skipped + piece.shape[1]]
