"""How ggml quantizes to mxfp4 and nvfp4: bytes of scales, and the nearest levels by comparisons.

Source: quantize_row_mxfp4_ref, quantize_row_nvfp4_ref and ggml_fp32_to_ue4m3 of ggml, which gguf's
quants.py has in NumPy. Levels are e2m1's twice, and scales half of what the bytes stand for.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from cuquant.formats import Format
from cuquant.formats.blocks import FLOAT_LEVELS, BlockLayout
from cuquant.reference.memory import empty
from cuquant.reference.refuse import Components, refuse_count, refuse_vanished, vanished_blocks
from cuquant.reference.source import Source
from cuquant.reference.tiles import Tiles

F32 = np.float32
# Of sizes, in units of the scale: above the i-th the code is i + 1, as the nearest level's, ties to
# the smaller one. Times a scale they are exact: nothing depends on how x / scale is rounded.
BORDERS = np.array([(a + b) / 2 for a, b in pairwise(FLOAT_LEVELS)], F32)
E8M0_LESS = 2  # floor(log2 6): what OCP MX takes off an exponent
PEAK = F32(6)
TOP_E4M3, FROM_E4M3, LARGEST_E4M3 = 0x7E, 0x78, F32(448)  # codes of 448 and of 256, and 448
HALF_AN_EIGHTH = np.uint32(1 << 19)  # of a mantissa


def float_blocks(
    source: Source,
    fmt: Format,
    stored: tuple,
    nonfinite: str,
    saturates: Callable[[int], object] | None,
) -> Components:
    """ggml's mxfp4 and nvfp4: a byte for the scale of each sub-block, and the nearest levels."""
    layout = fmt.layout
    blocks = empty(fmt.components(stored)[0].shape, np.dtype(np.uint8))
    flat = blocks.reshape(blocks.size // layout.nbytes, layout.nbytes)
    done = large = vanished = 0
    for piece in Tiles.of(fmt, stored).panels(layout.elements):
        values = source[piece].reshape(-1, layout.elements)
        scales, beyond = scale_bytes(values.reshape(-1, layout.sub_block), layout)
        packed = layout.pack(float_codes(values, scales, layout), scales)
        large += beyond
        if nonfinite == "raise":
            refuse_count(fmt, large)
            vanished += vanished_blocks(values, packed, fmt)
        flat[done : done + len(packed)] = packed
        done += len(packed)
    if large and saturates:
        saturates(large)
    refuse_vanished(fmt, vanished)
    return {"blocks": blocks}


def scale_bytes(values: np.ndarray, layout: BlockLayout) -> tuple[np.ndarray, int]:
    """uint8 [n], of finite `values` [n, sub_block]; and how many are beyond the largest one."""
    size = np.abs(values).max(-1, initial=0)
    if layout.scale_kind == "half_e8m0":
        return _e8m0(size), 0
    with np.errstate(under="ignore"):
        wanted = size / PEAK
    return _unsigned_e4m3(wanted), int((wanted > LARGEST_E4M3).sum())


def _e8m0(size: np.ndarray) -> np.ndarray:
    """floorf(log2f(size)) - 2 + 127 as C has it, but from 0 on: below 2^-125 C's is undefined."""
    exponent = floor_log2(size) - E8M0_LESS + 127
    return np.where(size > 0, np.clip(exponent, 0, 255), 0).astype(np.uint8)


def floor_log2(size: np.ndarray) -> np.ndarray:
    """int32 floor of the float32 nearest to log2(size), which may be the integer above.

    A size 2^k (1 - j 2^-24) has the logarithm k - j 2^-24 / ln 2. That is rounded to k where it is
    within half a step of the float32 numbers below k.
    """
    mantissa, above = np.frexp(size)
    below = np.ldexp(F32(1) - mantissa, 24).astype(np.int32)  # j; mantissas are from 1/2 on
    reach = np.abs(above)
    power = np.frexp(reach.astype(F32))[1] - 1
    power = power - ((above > 0) & (reach == np.left_shift(1, np.maximum(power, 0))))
    most = np.floor(np.ldexp(np.log(2.0), power)).astype(np.int32)
    rounds = (above != 0) & (below <= most)
    return (above - 1 + rounds).astype(np.int32)


def _unsigned_e4m3(x: np.ndarray) -> np.ndarray:
    """ggml_fp32_to_ue4m3: ties away from zero, and 448 for all that is rounded to 256 or more."""
    x = np.minimum(x, LARGEST_E4M3)
    bits = x.view(np.uint32) + HALF_AN_EIGHTH
    normal = (bits >> np.uint32(20)).astype(np.int32) - (120 << 3)
    small = np.minimum((x * F32(512) + F32(0.5)).astype(np.int32), 7)
    normal = np.where(normal >= FROM_E4M3, TOP_E4M3, normal)
    return np.where(x < F32(2.0**-6), small, normal).astype(np.uint8)


def float_codes(values: np.ndarray, scales: np.ndarray, layout: BlockLayout) -> np.ndarray:
    """uint8 [n, elements] of `values`, with the bytes of their scales."""
    scale = layout.decoded_scale(scales).reshape(-1, 1)
    subs = values.reshape(len(scale), -1)
    size = np.abs(subs)
    codes = np.zeros(subs.shape, np.uint8)
    with np.errstate(over="ignore"):
        for border in BORDERS:
            codes += size > border * scale
    codes[scale[:, 0] == 0] = 0
    codes += np.where((subs < 0) & (codes > 0), np.uint8(8), np.uint8(0))
    return codes.reshape(values.shape)
