"""Products with ggml's blocks as they lie: weights of random bytes, cases, bounds."""

import numpy as np
from fragment_products import Case, Expected
from products import ULP, UNIT
from q8_1_products import random_blocks

import cuquant as cq
from cuquant.formats.blocks import BLOCK_LAYOUTS

F32 = np.float32

NAMES = [name for name in BLOCK_LAYOUTS if cq.get_format(name).is_blocks]

LIES = [
    Case("q4_k", "float16", 5, (35, 512), layout)
    for layout in ("rows", "crooked rows", "misaligned", "upside down", "repeated rows")
]

GATED = [("q4_0", "float16"), ("q4_k", "bfloat16"), ("iq4_nl", "float16")]


def of_bytes(name: str, rows: int, columns: int, seed: int = 0) -> cq.QuantArray:
    """A weight of random bytes: every code, and every integer scale."""
    blocks = random_blocks(BLOCK_LAYOUTS[name], rows, columns, seed)
    return with_blocks(name, blocks, columns)


def with_blocks(name: str, blocks: np.ndarray, columns: int) -> cq.QuantArray:
    shape = (len(blocks), columns)
    return cq.QuantArray(cq.get_format(name), shape, np.dtype(F32), {"blocks": blocks}, (0, 1))


def swiglu_bound(x: np.ndarray, gate: cq.QuantArray, up: cq.QuantArray, roundings: int) -> tuple:
    """The exact result and how far off one in x's dtype may be.

    Each sum has so many roundings; |silu'| < 1.1 and |silu(a)| <= |a|.
    """
    a, b = Expected.of(x, gate), Expected.of(x, up)
    with np.errstate(over="ignore"):
        true = a.sums / (1 + np.exp(-a.sums)) * b.sums
    off = UNIT * roundings
    bound = 1.1 * off * a.size * (np.abs(b.sums) + off * b.size) + np.abs(a.sums) * off * b.size
    bound += 8 * UNIT * np.abs(true)
    return true, bound + ULP[np.dtype(x.dtype).name] * (np.abs(true) + bound) + 2.0**-25
