"""ggml's bytes of mxfp4 and nvfp4 on a GPU, whose components are separate arrays elsewhere."""

import math
from typing import Any

import numpy as np

from cuquant.array.components import OPERATIONS
from cuquant.array.quant_array import QuantArray, check_global_scale
from cuquant.formats import Format
from cuquant.formats.blocks import BlockLayout
from cuquant.gpu.arrays import backend_of
from cuquant.ops.dequantize import on_gpu
from cuquant.ops.plain_arrays import pack_codes

U8, F32 = np.dtype(np.uint8), np.dtype(np.float32)


def _scale_bytes(layout: BlockLayout) -> slice:
    return slice(layout.scale_byte, layout.scale_byte + layout.sub_blocks)


def interleave(q: QuantArray, layout: BlockLayout) -> Any:
    """uint8 [rows..., K // block, bytes]; what a global scale other than 1 means is lost."""
    parts = q.arrays()
    *rows, columns = q.stored_shape
    shape = (*rows, columns // layout.elements, layout.nbytes)
    count = math.prod(shape[:-1])
    with backend_of(parts["packed"]) as backend:
        codes = on_gpu.stored_codes(backend, q).reshape(count, layout.elements)
        blocks = backend.zeros((count, layout.nbytes), U8)
        for run in layout.code_runs:
            part = codes[:, run.fields] >> run.shift & run.mask
            blocks[:, run.bytes] |= part << run.low
        blocks[:, _scale_bytes(layout)] = parts["scale"].reshape(count, layout.sub_blocks)
        return blocks.reshape(shape)


def to_blocks(q: QuantArray, layout: BlockLayout) -> Any:
    """`interleave`, refused for a global scale other than 1, which waits for the GPU."""
    parts = q.arrays()
    if "global_scale" in parts:
        with backend_of(parts["packed"]) as backend:
            check_global_scale(backend.read(parts["global_scale"]))
    return interleave(q, layout)


def from_blocks(
    blocks: Any, fmt: Format, layout: BlockLayout, shape: tuple[int, ...]
) -> dict[str, Any]:
    """The components of an array [rows..., K] from its blocks [rows..., K // block, bytes]."""
    flat = blocks.reshape(math.prod(blocks.shape[:-1]), layout.nbytes)
    with backend_of(blocks) as backend:
        codes = backend.zeros((flat.shape[0], layout.elements), U8)
        for run in layout.code_runs:
            part = flat[:, run.bytes] >> run.low & run.mask
            codes[:, run.fields] |= part << run.shift
        scale = flat[:, _scale_bytes(layout)]
        found = {"packed": pack_codes(codes.reshape(shape), fmt.row_packing, fmt.zero_code)}
        if "global_scale" in {part.name for part in fmt.components(shape)}:
            scale = scale & 0x7F  # ggml's are unsigned: it ignores the bit
            found["global_scale"] = backend.broadcast(1.0, (), F32)
        found["scale"] = backend.contiguous(scale, -1)
        return {c.name: found[c.name].reshape(c.shape) for c in fmt.components(shape)}


OPERATIONS["to_blocks"] = to_blocks
OPERATIONS["from_blocks"] = from_blocks
