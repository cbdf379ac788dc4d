"""Two of four numbers: those that are not zero, and a bit for each place that says where.

compressed [N, K / 2], row by row; bitmask U8 [N, K / 8], the lowest bit first; shape I64 [2, 1];
perhaps the scales of codes. Source: compressed-tensors 0.9 to 0.17, sparse_24_bitmask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.safetensors import TensorInfo
from cuquant.io.schema import fp8
from cuquant.io.schema.columns import CHUNK
from cuquant.io.schema.layer import (
    SCALE_DTYPES,
    Layer,
    Parts,
    Plain,
    model_dtype,
    refuse,
)
from cuquant.io.schema.pieces import extent_of, integers


def layer(c: Checkpoint, stem: str, weights: Mapping[str, Any]) -> Layer | Plain:
    """Codes with scales stay codes; floats become an array of floats. `weights` is what the
    configuration says of a module."""
    name, mask = stem + "weight", stem + "bitmask"
    stored, shape = c.info(stem + "compressed"), _shape(c, stem)
    names = tuple(stem + end for end in ("compressed", "bitmask", "shape") if stem + end in c)
    if stem + "weight_scale" not in c:
        if stored.dtype not in SCALE_DTYPES:
            raise refuse(name, f"numbers of {stored.dtype} have no scales")

        def make() -> np.ndarray:
            return scattered(c.read(stored.name), c.read(mask), 0)

        return Plain(name, shape, stored.numpy_dtype, names, make)
    dense = TensorInfo(stored.name, stored.dtype, shape, stored.offset, stored.nbytes)
    made, zero = _codes(c, stem, dense, weights)

    def parts() -> Parts:
        found = dict(made.parts())
        found["packed"] = scattered(found["packed"], c.read(mask), zero)
        return found

    return replace(made, name=name, tensors=(*names, *made.tensors[1:]), parts=parts)


def _shape(c: Checkpoint, stem: str) -> tuple[int, int]:
    """[N, K], which the three tensors agree on."""
    name, stored, mask = stem + "weight", c.info(stem + "compressed"), c.info(stem + "bitmask")
    if len(stored.shape) != 2:
        raise refuse(name, f"numbers {list(stored.shape)} are not half of a matrix")
    rows, depth = stored.shape[0], 2 * stored.shape[1]
    if mask.dtype != "U8" or mask.shape != (rows, -(-depth // 8)):
        raise refuse(name, f"bits {mask.dtype}{list(mask.shape)} are not those of {rows} x {depth}")
    if stem + "shape" in c:
        info = c.info(stem + "shape")
        told = c.read(info.name).reshape(-1).tolist() if info.nbytes <= 16 else list(info.shape)
        if info.dtype != "I64" or told != [rows, depth]:
            raise refuse(name, f"{list(stored.shape)} numbers are not half of {told}")
    return rows, depth


def _codes(
    c: Checkpoint, stem: str, codes: TensorInfo, weights: Mapping[str, Any]
) -> tuple[Layer, int]:
    """A layer of half of the codes of its shape, and the byte of 0."""
    scales = c.info(stem + "weight_scale")
    if codes.dtype in fp8.FORMATS:
        told = weights.get("block_structure"), weights.get("group_size")
        return fp8.layer(c, codes, scales, *told), 0
    zeros = stem + "weight_zero_point" if stem + "weight_zero_point" in c else None
    said = weights.get("group_size"), weights.get("block_structure")
    extent = extent_of(codes.shape, scales.shape, stem + "weight", *said)
    made = integers(c, stem + "weight", codes, scales, extent, model_dtype(c, scales), zeros)
    return made, 128 if zeros else 0


def scattered(numbers: np.ndarray, bits: np.ndarray, zero: int) -> np.ndarray:
    """`numbers` [rows, K / 2] where `bits` uint8 [rows, K / 8] have ones, the lowest bit first, and
    `zero` elsewhere; ValueError for a row that has another count of ones.

    >>> scattered(np.array([[7, 9]]), np.array([[0b1001]], np.uint8), 0).tolist()
    [[7, 0, 0, 9]]
    """
    rows, depth = numbers.shape[0], 2 * numbers.shape[1]
    dense = np.full((rows, depth), zero, numbers.dtype)
    for at in range(0, rows if depth else 0, step := max(1, CHUNK // max(depth, 1))):
        where = np.unpackbits(bits[at : at + step], axis=1, bitorder="little")
        ones = where[:, :depth].astype(bool)
        if (where.sum(1) * 2 != depth).any() or (ones.sum(1) * 2 != depth).any():
            raise ValueError("a row's bits are not half of its columns")
        dense[at : at + step][ones] = numbers[at : at + step].reshape(-1)
    return dense
