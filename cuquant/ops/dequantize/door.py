"""`dequantize`: from a QuantArray to values."""

from typing import Any

import numpy as np

from cuquant import interop, reference
from cuquant.array.components import OPERATIONS, ArrayT, Stored
from cuquant.array.quant_array import QuantArray
from cuquant.ops.dequantize import arranged, on_gpu
from cuquant.ops.outputs import writable_out


@interop.traced
def dequantize(
    q: QuantArray[ArrayT], dtype: object = None, *, out: Any = None, stream: object = None
) -> ArrayT:
    """The values of a quantized array: decode(code) * scale + min in float32, rounded once.

    Parameters
    ----------
    q
        QuantArray.
    dtype
        float32, float16 or bfloat16. None: out's, or the dtype that was quantized.
    out
        An array of q's shape, kind and device to write to; it must not overlap q's arrays.
    stream
        For a q on a GPU, as in `quantize`.

    Returns
    -------
    Array of q's shape and of the same kind as its components; `out` if given.

    Raises
    ------
    TypeError, ValueError
        Where q is no QuantArray, or out does not fit.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> q = cq.quantize(np.array([[-1.0, 0.0, 0.5, 1.0] * 16], np.float32), "nf4")
    >>> cq.dequantize(q, dtype="float16")[0, :4]
    array([-1.    ,  0.    ,  0.4407,  1.    ], dtype=float16)
    """
    if not isinstance(q, QuantArray):
        hint = "; call p.dequantize()" if isinstance(q, Stored) else ""
        raise TypeError(f"dequantize takes a QuantArray, got {type(q).__name__}{hint}")
    if not q.format.is_plain:
        return arranged.values(q, dtype, out, stream)
    if q.device != "cpu":
        return on_gpu.values(q, dtype, out, stream)
    q.check()
    host = q._host
    interop.reject_stream(stream)
    order = np.argsort(q.axes)  # the inverse permutation: logical to stored
    if out is None:
        wanted = q.dtype if dtype is None else interop.float_dtype(dtype)
        values = reference.dequantize(host, q.format, q.stored_shape, wanted)
        return interop.from_numpy(values.transpose(q.axes), q.kind)
    target = writable_out(out, q.shape, q.kind, dtype, list(host.values()))
    reference.dequantize(host, q.format, q.stored_shape, target.dtype, target.transpose(order))
    return out


OPERATIONS["dequantize"] = dequantize
OPERATIONS["codes"] = on_gpu.codes
OPERATIONS["packed"] = on_gpu.packed
OPERATIONS["effective"] = on_gpu.effective
