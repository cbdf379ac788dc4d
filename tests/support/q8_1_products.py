"""Products of ggml's blocks with q8_1 activations: operands, and what they are in float64."""

import numpy as np

import cuquant as cq
from cuquant.formats.blocks import BLOCK_LAYOUTS, BlockLayout


def random_blocks(layout: BlockLayout, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, columns // elements, nbytes]: random bits, with scales of moderate sizes."""
    rng = np.random.default_rng([seed, rows, columns])
    count = columns // layout.elements
    blocks = rng.integers(0, 256, (rows, count, layout.nbytes), np.uint8)
    if layout.scale_kind == "half":
        for byte in (layout.scale_byte, layout.minimum_byte, layout.sum_byte):
            if byte is not None:
                halves = rng.standard_normal((rows, count)).astype(np.float16)
                blocks[..., byte : byte + 2] = halves.view(np.uint8).reshape(rows, count, 2)
    else:
        scales = blocks[..., layout.scale_byte : layout.scale_byte + layout.sub_blocks]
        scales[...] = scales % 16 + 112 if layout.scale_kind.endswith("e8m0") else scales % 127
    return blocks


def parts(name: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 [rows, columns]: code values times scales, and minimums."""
    layout = BLOCK_LAYOUTS[name]
    rows = len(blocks)
    fields = layout.unpack(blocks.reshape(-1, layout.nbytes))
    codec = cq.get_format(name).codec
    values = getattr(codec, "values", None)
    if values is None:
        values = np.arange(1 << layout.bits) - (0 if layout.has_min else 1 << (layout.bits - 1))
    numbers = np.asarray(values, np.float64)[fields.codes]
    with np.errstate(invalid="ignore"):
        scaled = numbers * np.repeat(fields.scale.astype(np.float64), layout.sub_block, 1)
    minimum = np.zeros_like(scaled)
    if fields.minimum is not None:
        minimum = np.repeat(fields.minimum.astype(np.float64), layout.sub_block, 1)
    return scaled.reshape(rows, -1), minimum.reshape(rows, -1)


def exact(name: str, weights: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and a bound of the float32 error.

    A term is rounded by its scale's own product, at most 4 times in its 32 columns (two sub-blocks
    with minimums), once with the activations' scale, then once for each 32 columns that follow and
    for each of up to 8 warps.
    """
    scaled, minimum = parts(name, weights)
    active, _ = parts("q8_1", tokens)
    with np.errstate(invalid="ignore"):
        size = (np.abs(scaled) + np.abs(minimum)) @ np.abs(active).T
        return (scaled + minimum) @ active.T, (active.shape[1] / 32 + 16) * 2.0**-24 * size


def operands(name: str, m: int, n: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Random weights of so many blocks a row, and activations."""
    layout = BLOCK_LAYOUTS[name]
    columns = blocks * layout.elements
    return random_blocks(layout, m, columns), random_blocks(BLOCK_LAYOUTS["q8_1"], n, columns, 1)
