"""Entries of a GGUF file: a tensor is an array, and NVFP4 has its scale in a tensor beside it.

llama.cpp multiplies the product with blk.N.ffn_up.weight by blk.N.ffn_up.scale, F32 [1], or [E] of
experts. blk.N.ffn_up.input_scale is that of activations, and stays a tensor.
"""

from __future__ import annotations

import math

import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.array.raw_blocks import RawBlocks
from cuquant.errors import FormatError
from cuquant.formats import get_format
from cuquant.io.container.gguf import GgufReader
from cuquant.io.container.gguf.types import GgufTensor
from cuquant.io.container.messages import quote
from cuquant.io.entries import Entry
from cuquant.io.schema.pieces import is_of_matrices

SCALE = "scale"  # beside NAME.weight
NVFP4 = "nvfp4"
BLOCK, SCALES = 36, 4  # bytes of a block of NVFP4, of which the first are scales
NAN, NO_E4M3 = 0x7F, 0xFF  # bytes of NaN in OCP's e4m3: in ggml's 0 and, as it reads it, 480


def entries(reader: GgufReader) -> dict[str, Entry]:
    """The arrays of a file by name."""
    found: dict[str, Entry] = {}
    used = set()
    for name, info in reader.tensors.items():
        scale = _scale_of(reader, name)
        if scale is not None and info.type.name == NVFP4.upper():
            found[name] = _scaled(reader, info, scale)
            used.update(found[name].tensors[1:])
        else:
            found[name] = _alone(reader, info, scale)
    return {name: entry for name, entry in found.items() if name not in used}


def _scale_of(reader: GgufReader, name: str) -> GgufTensor | None:
    stem = name.removesuffix("weight")
    return reader.tensors.get(stem + SCALE) if stem != name else None


def _alone(reader: GgufReader, info: GgufTensor, scale: GgufTensor | None) -> Entry:
    kind, name = info.type, info.name
    fmt = None if kind.format is None else get_format(kind.format)

    def read() -> QuantArray | np.ndarray | RawBlocks:
        if fmt is not None:
            return QuantArray.from_blocks(reader.read(name), fmt, info.shape)
        return (
            reader.read(name)
            if kind.is_plain
            else RawBlocks(kind.name, info.shape, reader.read(name))
        )

    def rows(start: int, stop: int) -> QuantArray:
        assert fmt is not None  # below
        shape = (stop - start, info.shape[1])
        return QuantArray.from_blocks(_rows(reader, info, start, stop), fmt, shape)

    shown = fmt if fmt is not None else None if kind.is_plain else kind.name
    dtype = kind.dtype if kind.is_plain else np.dtype(np.float32)
    nbytes = kind.stored_nbytes(info.shape)
    has_rows = fmt is not None and len(info.shape) == 2 and info.shape[0] > 0
    notes = ()
    if scale is not None and not kind.is_plain:
        notes = (f"llama.cpp multiplies the product with it by {quote(scale.name)}",)
    unknown = FormatError(f"{reader.path}: {quote(name)} is of {kind.name}, which is unknown")
    return Entry(
        name,
        shown,
        info.shape,
        dtype,
        nbytes,
        (name,),
        notes,
        read,
        error=None if kind.is_known else unknown,
        rows=rows if has_rows else None,
    )


def _rows(reader: GgufReader, info: GgufTensor, start: int, stop: int) -> np.ndarray:
    """Blocks of rows of a matrix."""
    row = info.type.stored_nbytes(info.shape) // info.shape[0]
    stored = np.empty((stop - start) * row, np.uint8)
    reader.read_into(info.name, stored, start * row)
    return stored.reshape(stop - start, row)


def _scaled(reader: GgufReader, info: GgufTensor, scale: GgufTensor) -> Entry:
    """NVFP4 with its scale: of the whole array, or one for each matrix."""
    name, shape = info.name, info.shape
    one = math.prod(scale.shape) == 1
    dtype = np.dtype(np.float32)
    if scale.type.name != "F32" or not (one or is_of_matrices(shape, scale.shape)):
        why = f"{quote(scale.name)} {scale.type.name}{list(scale.shape)} is no scale of {shape}"
        error = FormatError(f"{reader.path}: {quote(name)}: {why}")

        def refused() -> QuantArray:
            raise error

        return Entry(name, None, (), dtype, 0, (), (str(error),), refused, error=error)
    fmt = get_format(NVFP4, per_matrix=not one)

    def made(blocks: np.ndarray, shape: tuple[int, ...]) -> QuantArray:
        _refuse_scales(blocks, f"{reader.path}: {quote(name)}")
        q = QuantArray.from_blocks(blocks, NVFP4, shape)
        stored = q.components["scale"]
        number = reader.read(scale.name).astype(np.float32).reshape(() if one else shape[:-2])
        stored = np.where(stored == NAN, np.uint8(0), stored)
        parts = {**q.components, "scale": stored, "global_scale": number}
        return q._with(format=fmt, components=parts)

    def rows(start: int, stop: int) -> QuantArray:
        return made(_rows(reader, info, start, stop), (stop - start, shape[1]))

    return Entry(
        name,
        fmt,
        shape,
        dtype,
        info.nbytes + scale.nbytes,
        (name, scale.name),
        (),
        lambda: made(reader.read(name), shape),
        rows=rows if len(shape) == 2 and shape[0] > 0 else None,
    )


def _refuse_scales(blocks: np.ndarray, where: str) -> None:
    """FormatError where ggml's scale of a block is no number of OCP's e4m3."""
    scales = blocks.reshape(-1, BLOCK)[:, :SCALES]
    if count := int((scales == NO_E4M3).sum()):
        raise FormatError(
            f"{where}: {count} scales of blocks are {NO_E4M3:#x}, which ggml reads as 480 and "
            "nvfp4, whose largest is 448, cannot hold"
        )
