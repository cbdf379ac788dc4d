"""`embedding`: rows of a quantized matrix by their numbers."""

from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array import arranged
from cuquant.array.components import ArrayT, Stored
from cuquant.array.quant_array import QuantArray
from cuquant.gpu.arrays import GpuBackend, backend_of, contiguous
from cuquant.ops.dequantize.on_gpu import check_out_of
from cuquant.ops.dequantize.rows import Matrix, row_decoder
from cuquant.ops.outputs import writable_out

INT64, INT32 = np.dtype(np.int64), np.dtype(np.int32)


@interop.traced
def embedding(ids: Any, q: QuantArray[ArrayT], *, dtype: object = None, out: Any = None) -> ArrayT:
    """Rows of a quantized matrix by their numbers, decoded: the values of `q.dequantize()[ids]`.

    Parameters
    ----------
    ids
        Integers in 0..V - 1 of any shape and dtype: on the host, or on q's device as an array of
        q's library.
    q
        QuantArray [V, D] of any format, quantized along either axis.
    dtype
        float32, float16 or bfloat16. None: out's, or the dtype that was quantized.
    out
        An array [*ids.shape, D] of q's kind and device to write to, with any strides.

    Returns
    -------
    Array [*ids.shape, D] of the same kind as q's components; `out` if given.

    Raises
    ------
    IndexError
        For ids on the host that are not in 0..V - 1. Negative ones do not count from the end: they
        are an error, as in torch.nn.functional.embedding.
    TypeError, ValueError
        Where ids are no integers, q is no quantized matrix, or out does not fit.

    Notes
    -----
    Ids on a GPU are not looked at beforehand, which would mean to wait for it: rows whose number is
    not in 0..V - 1 become NaN. A CUDA graph may be replayed with other ids in the same array.

    On a GPU one kernel reads and decodes the rows that are asked for, on the array library's
    current stream. On the CPU so it is where rows have scales of their own; a matrix in blocks
    of several rows, across rows or along the first axis is decoded whole.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> table = np.repeat(np.arange(5, dtype=np.float32)[:, None], 64, axis=1)
    >>> rows = cq.embedding([[4, 0], [1, 4]], cq.quantize(table, "int8"))
    >>> rows.shape, rows[:, :, 0].tolist()
    ((2, 2, 64), [[4.0, 0.0], [1.0, 4.0]])
    """
    if not isinstance(q, QuantArray):
        hint = "; pass cuquant.unpack(p)" if isinstance(q, Stored) else ""
        raise TypeError(f"embedding takes rows of a QuantArray, got {type(q).__name__}{hint}")
    if q.ndim != 2:
        raise ValueError(f"embedding takes rows of a matrix [V, D], got shape {q.shape}")
    q.check()
    given = _integers(ids, q)
    shape = (*given.shape, q.shape[1])
    if q.device != "cpu":
        return _on_gpu(given, q, shape, dtype, out)
    wanted = q.dtype if dtype is None else interop.float_dtype(dtype)
    if out is None:
        return interop.from_numpy(_on_host(given, q, wanted), q.kind)
    sources = [ids] if interop.kind(ids) else []
    target = writable_out(out, shape, q.kind, dtype, [*q._host.values(), *sources])
    target[...] = _on_host(given, q, target.dtype)
    return out


def _integers(ids: Any, q: QuantArray) -> Any:
    """NumPy int64 within 0..V - 1, or what is on q's GPU, which is not looked at."""
    if interop.is_on_gpu(ids):
        if (interop.kind(ids), interop.device(ids)) != (q.kind, q.device):
            error = TypeError if q.device != "cpu" and interop.kind(ids) != q.kind else ValueError
            raise error(
                f"ids is a {interop.kind(ids)} array on {interop.device(ids)}, and q a {q.kind} "
                f"one on {q.device}; move one to where the other is"
            )
        interop.refuse_misaligned(ids, "ids")
        _check_dtype(interop.dtype_of(ids))
        return ids
    found = interop.to_numpy(ids, "ids") if interop.kind(ids) else interop.as_array(ids, "ids")
    if not found.size and not interop.kind(ids):  # [], of which NumPy makes floats
        found = found.astype(INT64)
    _check_dtype(found.dtype)
    known = q.shape[0]
    if (wrong := found[(found < 0) | (found >= known)]).size:
        which = f"in 0..{known - 1}" if known else "none, as q has no rows"
        raise IndexError(f"ids must be {which}, got {wrong[0]}")
    return found.astype(INT64)


def _check_dtype(dtype: np.dtype) -> None:
    if dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {dtype}")


# ---- on the CPU ---------------------------------------------------------------------------------


def _on_host(ids: np.ndarray, q: QuantArray, dtype: np.dtype) -> np.ndarray:
    stored = q.numpy()
    if not ids.size:
        return np.empty((*ids.shape, q.shape[1]), dtype)
    if not _has_rows(stored):
        return stored.dequantize(dtype=dtype)[ids]
    return stored[ids.reshape(-1)].dequantize(dtype=dtype).reshape(*ids.shape, q.shape[1])


def _has_rows(q: QuantArray) -> bool:
    """Whether `q[ids]` can be taken: each row has its own codes, and scales beside them."""
    block = None if q.format.scale is None else q.format.scale.block
    tall = isinstance(block, tuple) and block[0] > 1
    return q.axes == (0, 1) and not tall and not q.format.is_flat


# ---- on a GPU -----------------------------------------------------------------------------------


def _on_gpu(ids: Any, q: QuantArray, shape: tuple[int, ...], dtype: object, out: Any) -> Any:
    if out is not None:
        check_out_of(q, dtype, out, shape, [ids] if interop.is_on_gpu(ids) else [])
    with backend_of(next(iter(q.components.values()))) as backend:
        target = out
        if target is None:
            wanted = q.dtype if dtype is None else interop.float_dtype(dtype)
            target = backend.empty(shape, wanted)
        view = backend.view(target)
        if not view.size:
            return target
        integers = _on_device(backend, ids)
        stored = _stored(q)
        parts = contiguous(backend, stored.components)
        order = _order(q)
        matrix = Matrix(
            (q.shape[0], q.shape[1]),
            stored.stored_shape,
            q.axes == (0, 1),
            0 if order is None else backend.pointer(order),
        )
        decode = row_decoder(stored.format, _has_absmax(q))
        decode(backend, parts, matrix, backend.view(integers), view)
        return target


def _on_device(backend: GpuBackend, ids: Any) -> Any:
    """Contiguous int32 or int64 on the device."""
    if not interop.is_on_gpu(ids):
        return backend.array(ids)
    if interop.dtype_of(ids) not in (INT32, INT64):
        ids = interop.astype(ids, INT64)  # what is beyond 2^63 becomes negative
    return contiguous(backend, {"ids": ids})["ids"]


def _stored(q: QuantArray) -> QuantArray:
    """The plain array that q stores, with q's own absmax where these are not scales."""
    return q._with(format=q.format.plain) if _has_absmax(q) else arranged.exact(q)


def _has_absmax(q: QuantArray) -> bool:
    return "absmax" in q.format.odd


def _order(q: QuantArray) -> Any:
    """int64 on q's device: where each column of what is stored lies; None where in order.

    Made by sorting, so that no permutation leads out of the array.
    """
    return q.components[arranged.ORDER].argsort() if q.format.permuted else None
