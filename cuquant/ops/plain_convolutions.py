"""Convolutions of integers on a GPU: pixels as rows of bytes, whose patches kernels gather.

Signs are bytes too: padded places add 0, which no bit stands for.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant.gpu.arrays import backend_of
from cuquant.ops.matmul import dense_warps
from cuquant.ops.matmul.byte_rows import ByteRows
from cuquant.ops.matmul.coded import Coded, Groups, Scaling
from cuquant.ops.matmul.epilogue import Epilogue
from cuquant.ops.matmul.operands import resolved
from cuquant.ops.matmul.patches import Patches, Window
from cuquant.ops.plain_products import F32, memory, one_number

INT32 = np.dtype(np.int32)
MOST_ROWS = 2**31 - 1  # patches and columns that a kernel counts


@dataclass(frozen=True)
class Image:
    """Images [B, C, H, W] or filters [O, C, kH, kW], whose channels become rows of bytes.

    Attributes
    ----------
    array
        On a GPU.
    element
        What bytes are made of, as `ByteRows` has it.
    dtype
        int8 or uint8: what the bytes are then.
    """

    array: Any
    element: str
    dtype: np.dtype


def convolve(
    x: Image, w: Image, window: Window, shape: tuple[int, int, int, int], scale: Any
) -> Any:
    """A new array of `shape`, [B, O, oH, oW]: int32, or with a number or [O, 1] float32."""
    images, filters, *out_size = shape
    places, taps = math.prod(out_size), math.prod(window.taps)
    with backend_of(x.array) as backend:
        out = backend.empty(shape, INT32 if scale is None else F32)
        if not math.prod(shape):
            return out
        arrays = [resolved(backend, side.array) for side in (x, w)]
        pixels, rows = (
            ByteRows.along(backend.view(array), 1, side.element, dense=side is w)
            for array, side in zip(arrays, (x, w), strict=True)
        )
        depth = taps * pixels.width
        if images * places > MOST_ROWS or depth > MOST_ROWS:
            raise ValueError(
                f"the result has shape {shape}, of {images * places} patches of {depth} bytes; "
                f"kernels count {MOST_ROWS}: convolve fewer images at a time"
            )
        scaling, kept = Scaling(), None
        if scale is not None:
            single = math.prod(scale.shape) == 1
            kept = (
                one_number(backend, scale, F32)
                if single
                else backend.contiguous(scale.reshape(filters), -1)
            )
            scaling = Scaling(backend.pointer(kept), across=0 if single else 1)
        kind = "int32" if scale is None else "float32"
        results = Epilogue(out, kind, filters * places, places).pack(backend)
        results += struct.pack("<2Q", 0, 0)
        with memory(backend, pixels.nbytes + rows.nbytes) as at:
            codes = pixels.make(backend, at), rows.make(backend, at + pixels.nbytes)
            side = Coded(x.dtype.name, codes[0], pixels.stride, images * places, Scaling())
            patches = Patches(side, window, pixels.width)
            weights = Coded(w.dtype.name, codes[1], depth, filters, scaling)
            product, groups = (images * places, filters, depth), Groups(1, images * places)
            run = dense_warps.prepare(patches, weights, product, groups, max(depth, 1))
            run(backend, patches, results)
        return out
