"""Values of arrays whose format is odd: those of what they store, put back in order."""

from typing import Any

import ml_dtypes
import numpy as np

from cuquant import interop, reference
from cuquant.array import arranged
from cuquant.array.quant_array import QuantArray
from cuquant.gpu.arrays import backend_of
from cuquant.ops.dequantize import on_gpu
from cuquant.ops.outputs import writable_out


def values(q: QuantArray, dtype: object, out: Any, stream: object) -> Any:
    """`dequantize` of an odd format; the arguments are the user's."""
    q.check()
    if q.device != "cpu":
        return _on_gpu(q, dtype, out, stream)
    interop.reject_stream(stream)
    if out is None:
        wanted = q.dtype if dtype is None else interop.float_dtype(dtype)
        return interop.from_numpy(_in_order(q.numpy(), wanted), q.kind)
    target = writable_out(out, q.shape, q.kind, dtype, list(q._host.values()))
    target[...] = _in_order(q.numpy(), target.dtype)
    return out


def _on_gpu(q: QuantArray, dtype: object, out: Any, stream: object) -> Any:
    if out is not None:
        on_gpu.check_out_of(q, dtype, out)
    with backend_of(next(iter(q.components.values())), stream) as backend:
        wanted = interop.float_dtype(q.dtype if dtype is None else dtype)
        if out is not None:
            wanted = interop.dtype_of(out)
        made = _in_order(q, wanted)
        if out is None:
            return made
        backend.copy_into(out, made)
        return out


def _in_order(q: QuantArray, dtype: np.dtype) -> Any:
    """Values in q's own library."""
    if q.format.scale is not None and q.format.scale.absmax:
        return arranged.in_axes(q, _saturated(arranged.absmax_values(q), dtype))
    plain = arranged.exact(q)
    if q.device != "cpu":
        return arranged.from_stored(q, on_gpu.values(plain, dtype, None, None))
    host = reference.dequantize(plain._host, plain.format, plain.stored_shape, dtype)
    return arranged.from_stored(q, host.transpose(plain.axes))


def _saturated(values: Any, dtype: np.dtype) -> Any:
    """Values rounded to a dtype; finite ones stay finite, as those of other formats do."""
    if dtype == np.float32:
        return values
    xp = interop.namespace(values)
    top = float(ml_dtypes.finfo(dtype).max)
    return interop.astype(xp.where(xp.isinf(values), values, xp.clip(values, -top, top)), dtype)
