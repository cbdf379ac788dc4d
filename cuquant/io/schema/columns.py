"""Columns in an order of their own: what g_idx of GPTQ and compressed-tensors says of them."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cuquant.formats import Packing
from cuquant.io.schema.layer import refuse

CHUNK = 1 << 19  # elements whose codes are unpacked at a time


class Unpacks(Protocol):
    """A Packing, or another way in which codes lie in words."""

    def unpack(self, words: np.ndarray, count: int) -> np.ndarray:
        """uint8 codes [rows, count] of words [rows, words]."""
        ...


def column_order(
    g_idx: np.ndarray, depth: int, size: int, groups: int, name: str
) -> np.ndarray | None:
    """int32 [K]: columns sorted by the group that g_idx gives each; None where they are.

    Columns of a group keep their order.

    Raises
    ------
    FormatError
        Where g_idx is no group of each column, or a group has not `size` columns: only the last
        one may have fewer.
    """
    if g_idx.shape != (depth,) or g_idx.dtype.kind not in "iu":
        raise refuse(
            name, f"g_idx is {g_idx.dtype}{list(g_idx.shape)}; {depth} columns have a group each"
        )
    sorted_groups = np.arange(depth) // size
    if np.array_equal(g_idx, sorted_groups):
        return None
    if g_idx.size and (g_idx.min() < 0 or g_idx.max() >= groups):
        raise refuse(name, f"g_idx holds {g_idx.min()}..{g_idx.max()}; groups are 0..{groups - 1}")
    order = np.argsort(g_idx, kind="stable")
    if not np.array_equal(g_idx[order], sorted_groups):
        counts = np.bincount(g_idx, minlength=groups)
        odd = int(np.argmax(counts != np.bincount(sorted_groups, minlength=groups)))
        raise refuse(
            name,
            f"g_idx gives group {odd} {counts[odd]} columns, and groups have {size}; "
            "groups of unequal size have no block size",
        )
    return order.astype(np.int32)


def permuted_rows(
    rows: np.ndarray, stored: Unpacks, columns: int, wanted: Packing, order: np.ndarray, pad: int
) -> np.ndarray:
    """Packed rows [N, words] with their codes in another order, as `wanted` packs them."""
    out = np.empty((len(rows), wanted.words(columns)), wanted.dtype)
    step = max(CHUNK // max(columns, 1), 1)
    for start in range(0, len(rows), step):
        codes = stored.unpack(np.ascontiguousarray(rows[start : start + step]), columns)
        out[start : start + step] = wanted.pack(codes[:, order], pad)
    return out
