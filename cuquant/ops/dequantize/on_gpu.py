"""Values, codes and scales of QuantArrays on a GPU."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array.components import Stored
from cuquant.array.quant_array import QuantArray
from cuquant.gpu.arrays import GpuBackend, backend_of, contiguous
from cuquant.ops.dequantize.decoder import decoder
from cuquant.ops.layout.pack import pack
from cuquant.ops.outputs import check_out

F32 = np.dtype(np.float32)


def _first(q: QuantArray) -> Any:
    return next(iter(q.components.values()))


def _order(q: QuantArray) -> tuple[int, ...]:
    """The axes of the array in the order in which it is stored."""
    return tuple(q.axes.index(i) for i in range(q.ndim))


def values(q: QuantArray, dtype: object, out: Any, stream: object) -> Any:
    """`dequantize` on a GPU; the arguments are the user's."""
    if out is not None:
        check_out_of(q, dtype, out)
    with backend_of(_first(q), stream) as backend:
        target = out
        if target is None:
            wanted = q.dtype if dtype is None else interop.float_dtype(dtype)
            stored = backend.empty(q.stored_shape, wanted)
            target = backend.permuted(stored, q.axes)
        parts = contiguous_parts(backend, q)
        view = backend.view(target).moved(_order(q))
        if q.format.is_blocks and (view.pointer % 16 or not view.is_contiguous):
            whole = backend.empty(q.stored_shape, view.dtype)
            decoder(q.format)(backend, parts, q.stored_shape, backend.view(whole))
            backend.copy_into(target, backend.permuted(whole, q.axes))
            return target
        decoder(q.format)(backend, parts, q.stored_shape, view)
        return target


def contiguous_parts(backend: GpuBackend, q: QuantArray) -> dict[str, Any]:
    """The components in C order, which those that a user put in need not have.

    Raises
    ------
    FormatError
        Where they are not what the format says: kernels read as far as that.
    """
    q.check()
    return contiguous(backend, q.components)


def check_out_of(
    q: Stored,
    dtype: object,
    out: Any,
    shape: tuple[int, ...] | None = None,
    sources: Iterable[Any] = (),
) -> None:
    """TypeError or ValueError where `out` cannot take an array's values, or those of another shape
    that are made of it and of other sources."""
    if interop.kind(out) != q.kind:
        raise TypeError(f"out must be a {q.kind} array, got {type(out).__name__}")
    if interop.device(out) != q.device:
        raise ValueError(f"out is on {interop.device(out)}, and the array on {q.device}")
    shape = q.shape if shape is None else shape
    check_out(out, shape, dtype, [*q.components.values(), *sources])


def codes(q: QuantArray) -> Any:
    """The unsigned codes of a QuantArray, of its shape."""
    with backend_of(_first(q)) as backend:
        return backend.permuted(stored_codes(backend, q), q.axes)


def stored_codes(backend: GpuBackend, q: QuantArray) -> Any:
    """The codes as the components lie, [rows..., K]."""
    out = backend.empty(q.stored_shape, q.format.codec.code_dtype)
    decoder(q.format).codes(backend, contiguous_parts(backend, q), q.stored_shape, out)
    return out


def packed(q: QuantArray) -> Any:
    """The codes of ggml's blocks, packed as their format's row_packing says."""
    with backend_of(_first(q)) as backend:
        *rows, columns = q.stored_shape
        packing = q.format.row_packing
        out = backend.empty((*rows, packing.words(columns)), packing.dtype)
        pack(backend, q.format, stored_codes(backend, q), out, q.stored_shape)
        return out


def effective(q: QuantArray, name: str) -> Any:
    """The "scale" or the "minimum" that each block is decoded with, float32; or None."""
    fmt = q.format
    if fmt.scale is None or (name == "minimum" and not (fmt.is_blocks and fmt.offset)):
        return None
    with backend_of(_first(q)) as backend:
        shape = fmt.scale.shape(q.stored_shape)
        scale = backend.empty(shape, F32)
        minimum = backend.empty(shape, F32) if fmt.is_blocks and fmt.offset else None
        if math.prod(shape):
            decoder(fmt).scales(backend, contiguous_parts(backend, q), scale, minimum)
        return scale if name == "scale" else minimum
