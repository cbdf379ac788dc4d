"""What `dequantize` means, in NumPy: x' = decode(code) * scale + min, in float32."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from cuquant.formats import Codebook, Format, Uniform, get_format
from cuquant.formats.blocks import Fields
from cuquant.formats.scales import NESTED_BLOCK
from cuquant.reference.memory import empty
from cuquant.reference.tiles import Piece, Tiles

F32 = np.float32
FLOAT_MAX = np.finfo(F32).max


@dataclass(frozen=True)
class Blocks:
    """Effective numbers of every block, float32 in the shape of the format's scales; or None."""

    scale: np.ndarray | None
    minimum: np.ndarray | None = None


def effective(parts: Mapping[str, np.ndarray], fmt: Format, stored: tuple[int, ...]) -> Blocks:
    """The scale and minimum each block is decoded with, whatever nested pieces store them.

    `.scale` and `.minimum` are the stored arrays themselves where these are plain numbers.
    """
    if fmt.scale is None:
        return Blocks(None)
    if fmt.is_blocks:
        shape = fmt.scale.shape(stored)
        if not parts["blocks"].size:
            return Blocks(np.zeros(shape, F32), np.zeros(shape, F32) if fmt.offset else None)
        fields = fmt.layout.unpack(_flat_blocks(parts["blocks"]))
        minimum = None if fields.minimum is None else fields.minimum.reshape(shape)
        return Blocks(fields.scale.reshape(shape), minimum)
    scale = parts["scale"]
    if fmt.scale.nested == "double":
        return Blocks(nested_scales(parts).reshape(scale.shape))
    if fmt.scale.dtype == "e8m0":
        return Blocks(scale.view(ml_dtypes.float8_e8m0fnu).astype(F32))
    if fmt.scale.nested == "global":
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            values = scale.view(ml_dtypes.float8_e4m3fn).astype(F32)
            world = parts["global_scale"]
            return Blocks(np.asarray(_kept_finite(values * world, values, world)))
    return Blocks(scale, parts.get("minimum"))


def nested_scales(
    parts: Mapping[str, np.ndarray], levels: tuple[float, ...] | None = None
) -> np.ndarray:
    """float32 [scales]: level of the code * nested_scale[i // 256] + nested_offset (QLoRA).

    `levels` are those of dynamic8 unless given.
    """
    codes = parts["scale"].reshape(-1)
    nested = {"packed": codes, "scale": parts["nested_scale"]}
    fmt = get_format("dynamic8", block_size=NESTED_BLOCK)
    if levels is not None:
        fmt = replace(fmt, codec=Codebook(levels))
    inner = dequantize(nested, fmt, (codes.size,))
    offset = parts["nested_offset"]
    with np.errstate(over="ignore", invalid="ignore"):
        return _kept_finite(inner + offset, inner, offset)


def _kept_finite(result: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`result`, made of a and b: saturated at float32's largest number where both are finite."""
    if not np.isinf(result).any():
        return result
    clipped = np.clip(result, -FLOAT_MAX, FLOAT_MAX)
    return np.where(np.isfinite(a) & np.isfinite(b), clipped, result)


def codes(parts: Mapping[str, np.ndarray], fmt: Format, stored: tuple[int, ...]) -> np.ndarray:
    """Unsigned codes [rows..., K]: uint8, or uint16 for fp16 and bf16."""
    tiles = Tiles.of(fmt, stored)
    out = empty(tiles.shape, fmt.codec.code_dtype)
    for piece, part, _ in _unpacked(parts, fmt, tiles):
        out[piece.index] = part
    return out.reshape(stored)


def dequantize(
    parts: Mapping[str, np.ndarray],
    fmt: Format,
    stored: tuple[int, ...],
    dtype: np.dtype | type = F32,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Values [rows..., K] of the components `parts`, rounded once from float32 to `dtype`.

    A finite scale times a code never becomes infinite: it saturates at the dtype's largest value.
    An infinite scale gives what IEEE arithmetic gives: infinities, and NaN where a code is 0.
    `out`, if given, is overwritten; it has the shape `stored` and any strides.
    """
    tiles = Tiles.of(fmt, stored)
    result = empty(stored, np.dtype(dtype)) if out is None else out
    if not result.size:  # however many scales there are
        return result
    matrices = result.reshape(tiles.shape)
    blocks = Blocks(None) if fmt.is_blocks else effective(parts, fmt, stored)
    own = (blocks.scale, parts.get("zero_point"), blocks.minimum)
    spread = tuple(part if part is None else part.reshape(tiles.grid) for part in own)
    top = F32(ml_dtypes.finfo(result.dtype).max)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        may_overflow = not _reach(fmt, spread[0], spread[2]) <= top
        for piece, part, fields in _unpacked(parts, fmt, tiles):
            near = [None, None, None]
            if fields is not None:
                values = decode_blocks(part, fmt, fields)
            else:
                near = [None if v is None else tiles.spread(v, piece) for v in spread]
                values = _decode(part, fmt, *near)
            if may_overflow:
                values = _saturate(values, part, fmt, near[0], near[2], top)
            matrices[piece.index] = values
    if out is not None and not np.shares_memory(matrices, out):  # reshape had to copy
        out[...] = matrices.reshape(out.shape)
    return result


def _reach(fmt: Format, scale: np.ndarray | None, minimum: np.ndarray | None) -> float:
    """A bound of what finite scales and minimums give; inf where only decoding tells (ggml)."""
    if fmt.is_blocks:
        return float("inf")
    largest = float(np.abs(fmt.codec.numbers).max())
    if scale is None:
        return largest
    reach = largest * _largest_finite(scale)
    return reach if minimum is None else reach + _largest_finite(minimum)


def _largest_finite(values: np.ndarray) -> float:
    size = np.abs(values.astype(F32, copy=False)).reshape(-1)
    return float(size.max(initial=0, where=np.isfinite(size)))


def _saturate(
    values: np.ndarray,
    part: np.ndarray,
    fmt: Format,
    scale: np.ndarray | None,
    minimum: np.ndarray | None,
    top: np.float32,
) -> np.ndarray:
    """Finite values within +-top. Infinities stay where codes or scales stand for them."""
    clipped = np.clip(values, -top, top)
    if scale is None:
        return np.where(np.isinf(values), values, clipped)
    infinite = np.isinf(scale) | np.isinf(fmt.codec.decode(part))  # e5m2 has codes of infinity
    if minimum is not None:
        infinite |= np.isinf(minimum)
    return np.where(infinite, values, clipped)


def _decode(
    part: np.ndarray,
    fmt: Format,
    scale: np.ndarray | None,
    zero_point: np.ndarray | None,
    minimum: np.ndarray | None,
) -> np.ndarray:
    if isinstance(fmt.codec, Uniform) and zero_point is not None:
        values = fmt.codec.decode(part, zero_point.astype(F32))
    else:
        values = fmt.codec.decode(part)
    if scale is None:
        return values
    values *= scale.astype(F32, copy=False)
    if not fmt.codec.signed_zero:
        values += F32(0)  # a codec without -0.0 never decodes to it, whatever the scale's sign
    if minimum is not None:
        values += minimum.astype(F32, copy=False)
    return values


def decode_blocks(part: np.ndarray, fmt: Format, fields: Fields) -> np.ndarray:
    """ggml's arithmetic, which keeps the -0.0 of a negative scale."""
    subs = (-1, fmt.layout.sub_block)
    values = fmt.codec.decode(part).reshape(subs) * fields.scale.reshape(-1, 1)
    if fields.minimum is not None:
        values += fields.minimum.reshape(-1, 1)
    return values.reshape(part.shape)


def _unpacked(
    parts: Mapping[str, np.ndarray], fmt: Format, tiles: Tiles
) -> Iterator[tuple[Piece, np.ndarray, Fields | None]]:
    """Codes piece by piece, [rows, columns], with the other fields of ggml's blocks."""
    if fmt.is_blocks:
        layout = fmt.layout
        blocks = parts["blocks"].reshape(
            tiles.rows, tiles.columns // layout.elements, layout.nbytes
        )
        for piece in tiles.panels(layout.elements):
            rows = slice(piece.row, piece.row_end)
            across = slice(piece.column // layout.elements, piece.column_end // layout.elements)
            fields = layout.unpack(_flat_blocks(blocks[rows, across]))
            yield piece, fields.codes.reshape(piece.shape), fields
        return
    packing = fmt.row_packing
    packed = parts["packed"].reshape(tiles.batch, tiles.rows, packing.words(tiles.columns))
    for piece in tiles.panels(packing.group):
        words = slice(packing.words(piece.column), packing.words(piece.column_end))
        part = packed[piece.batch, piece.row : piece.row_end, words]
        yield piece, packing.unpack(part, piece.shape[1]).view(fmt.codec.code_dtype), None


def _flat_blocks(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).reshape(-1, blocks.shape[-1])
