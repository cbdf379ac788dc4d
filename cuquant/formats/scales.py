"""Scale rules: which elements share a scale, what it is made from and how it is stored."""

import math
import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cuquant.errors import clipped

RULES = ("absmax", "signed_max", "range", "mean_abs", "e8m0")
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "e8m0": np.dtype(np.uint8),  # the exponent byte of 2^(byte - 127); 255 is NaN
    "e4m3": np.dtype(np.uint8),  # the bits of a float8_e4m3fn
}
PLAIN = ("float32", "float16", "bfloat16")  # stored as the number that decoding multiplies by
NESTED_BLOCK = 256
LARGEST_BLOCK = 2**31 - 8
FLAT = "flat"  # blocks run over the flattened array: "flat64"
INVERSE_127 = np.float32(1 / 127)  # what LLM.int8() multiplies by, after absmax

Block = int | str | tuple[int, int]


@dataclass(frozen=True)
class Scale:
    """How a block of elements is brought into the codec's range.

    Parameters
    ----------
    rule
        "absmax", "signed_max" (the first element furthest from zero, sign kept), "range"
        (max - min), "mean_abs", or "e8m0" (OCP MX: the power of two 2^(floor(log2 absmax) - emax),
        where 2^emax is the largest power of two that the codec has: 2^(bits - 2) of integers).
    peak
        The number of the codec that the statistic maps to: scale = statistic / peak.
    block
        Elements that share a scale: an int along the last axis, "row", "tensor", (rows, columns) or
        "flatN": N elements of the flattened array, across its rows.
    dtype
        How a scale, and the minimum beside it, is stored: "float32", "float16", "bfloat16", "e8m0"
        or "e4m3". Below the smallest normal number of float16 or e4m3 there are multiples of one
        step (2^-24, 2^-9) alone: of those below and above the one is stored that leaves the smaller
        squared error. The mean of sizes ("mean_abs") and scales that codes do not depend on
        ("exact") are rounded to the nearest, and so are those of bfloat16.
    encode_with
        "stored": codes use the scale as it was rounded to `dtype`; "exact": as it was before.
    nested
        None, "double" (float32 scales become 8-bit codes in nested blocks of 256, QLoRA) or
        "global" (nvfp4: one float32 above the block scales).
    absmax
        Whether the largest size is stored in place of the scale: x' = (code * absmax) / 127, with
        both products rounded (LLM.int8()).
    divisor
        Whether the global scale divides: x' = code * (scale / global_scale).
    per_matrix
        Whether each matrix of the last two axes has a global scale of its own.
    """

    rule: str
    peak: float
    block: Block
    dtype: str = "float32"
    encode_with: str = "stored"
    nested: str | None = None
    absmax: bool = False
    divisor: bool = False
    per_matrix: bool = False

    @property
    def flat(self) -> int | None:
        """Elements of a block that runs over the flattened array; None of other blocks."""
        return int(self.block[len(FLAT) :]) if is_flat(self.block) else None  # type: ignore[index]

    def tile(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of one block in a [rows, columns] matrix; at least 1."""
        if self.flat is not None:
            raise ValueError(f"blocks of {self.block} run across rows, in no tiles of a matrix")
        if isinstance(self.block, tuple):
            return self.block
        if self.block == "tensor":
            return max(rows, 1), max(columns, 1)
        return 1, max(columns, 1) if self.block == "row" else int(self.block)

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of an array stored as [rows..., K]."""
        if self.block == "tensor":
            return ()
        if self.flat is not None:
            return (-(-math.prod(stored) // self.flat),)
        *rows, columns = stored
        if isinstance(self.block, tuple):
            *batch, height = rows
            tall, wide = self.block
            return (*batch, -(-height // tall), -(-columns // wide))
        return (*rows, 1 if isinstance(self.block, str) else -(-columns // self.block))


def is_flat(block: object) -> bool:
    """Whether blocks run over the flattened array."""
    return isinstance(block, str) and block.startswith(FLAT)


def check_block(block: object) -> Block:
    """`block` as an int, "row", "tensor", "flat", "flatN" or a pair of ints.

    ValueError or TypeError otherwise.
    """
    if isinstance(block, str):
        if block == FLAT:
            return block
        if found := re.fullmatch(FLAT + r"(\d{1,10})", block):
            return f"{FLAT}{_extent(int(found[1]), 8)}"
        if block not in ("row", "tensor"):
            raise ValueError(
                f'block_size {clipped(block)} is unknown; pass an int, "row", "tensor", "flat" or '
                "a pair"
            )
        return block
    if isinstance(block, (tuple, list)):
        if len(block) != 2:
            raise ValueError(
                f"block_size {clipped(block)} has {len(block)} entries; a pair has two"
            )
        return (_extent(block[0], 1), _extent(block[1], 8 if block[1] != 1 else 1))
    return _extent(block, 8)


def _extent(value: object, multiple: int) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f'block_size must be an int, "row", "tensor" or a pair, got {clipped(value)}'
        )
    if not 1 <= value <= LARGEST_BLOCK or value % multiple:
        raise ValueError(
            f"block_size {value} must be a positive multiple of {multiple} below 2^31; "
            "a block longer than the row is one partial block"
        )
    return int(value)
