"""Where elements lie: strides of an array with its quantized axis last, and its blocks."""

import struct
from functools import lru_cache

from cuquant.formats import Format
from cuquant.gpu.view import View, c_strides
from cuquant.reference.tiles import Tiles

MOST_DIMS = 6  # format/strided.cuh's Strided::most
CHUNK = 8  # elements that a thread works on


@lru_cache(maxsize=1024)
def axis_last(ndim: int, axis: int) -> tuple[int, ...]:
    """The order of axes that `moveaxis(x, axis, -1)` has."""
    return (*(i for i in range(ndim) if i != axis), axis)


def strided(view: View, axis: int, *, with_flat: bool) -> bytes:
    """The Strided struct of an array whose rows run along `axis`.

    `with_flat`: also the strides in the array's own C order, which stochastic rounding and the
    search for NaN count by; without it more dims can be merged.

    Raises
    ------
    ValueError
        Where it has more axes than kernels take.
    """
    order = axis_last(len(view.shape), axis)
    flat = c_strides(view.shape)
    rows: list[tuple[int, int, int]] = []
    for a in order[:-1]:
        size, step, own = view.shape[a], view.strides[a], flat[a]
        if size == 1:
            continue
        if rows and rows[-1][1] == size * step and (rows[-1][2] == size * own or not with_flat):
            rows[-1] = (rows[-1][0] * size, step, own)
        else:
            rows.append((size, step, own))
    if len(rows) > MOST_DIMS:
        raise ValueError(
            f"the array has more than {MOST_DIMS} axes that cannot be merged in memory; "
            "pass a contiguous one"
        )
    rows += [(1, 0, 0)] * (MOST_DIMS - len(rows))
    used = sum(size > 1 for size, _, _ in rows)
    columns = zip(*rows, strict=True)
    numbers = [n for column in columns for n in column]
    return struct.pack(
        "<22q",
        *numbers,
        view.strides[axis],
        flat[axis],
        used,
        _vectors(view, axis, [step for size, step, _ in rows if size > 1]),
    )


def _vectors(view: View, axis: int, steps: list[int]) -> bool:
    """Whether every chunk of a row starts on 16 bytes and is contiguous."""
    return (
        view.strides[axis] == 1
        and view.pointer % 16 == 0
        and all(step * view.dtype.itemsize % 16 == 0 for step in steps)
    )


def tiles_struct(tiles: Tiles) -> bytes:
    """The Tiles struct; `tall` and `wide` are those of a whole block."""
    _, down, across = tiles.grid
    return struct.pack(
        "<6q", tiles.rows, max(tiles.columns, 1), tiles.tall, tiles.wide, down, max(across, 1)
    )


@lru_cache(maxsize=1024)
def tiles_of(fmt: Format, stored: tuple[int, ...]) -> bytes:
    """The Tiles struct of an array stored as [rows..., K]."""
    return tiles_struct(Tiles.of(fmt, stored))
