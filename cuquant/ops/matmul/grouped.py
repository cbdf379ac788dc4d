"""Rows of x through the weights of their experts."""

from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array.components import ArrayT
from cuquant.array.quant_array import QuantArray
from cuquant.ops.matmul import on_gpu
from cuquant.ops.matmul.arranged import decoded, is_odd, rearranged
from cuquant.ops.matmul.check import F32, Finish, Operand, stored, weight
from cuquant.ops.matmul.door import Weight
from cuquant.ops.matmul.experts import Rows, integers_of


@interop.traced
def grouped_linear(
    x: ArrayT | QuantArray[ArrayT],
    w: Weight,
    experts: Any = None,
    *,
    offsets: Any = None,
    counts: Any = None,
    out: Any = None,
    stream: object = None,
) -> ArrayT:
    """Each row of x through its own expert's weight: y[i] = x[i] @ w[expert of i].T.

    Parameters
    ----------
    x
        [T, K], or [E, M, K] with `counts`: an array of float32, float16 or bfloat16, or a
        QuantArray.
    w
        QuantArray or PackedWeight [E, N, K], or what holds one as `quantized`.
    experts
        T integers in 0..E - 1: the expert of each row.
    offsets
        E + 1 integers: rows offsets[e] .. offsets[e + 1] - 1 of x, which is sorted by expert, are
        those of expert e; an expert may have none.
    counts
        E integers: of the M rows of x that expert e has, the first counts[e] are multiplied.
    out
        An array of the result's shape to write it to.
    stream
        For arrays on a GPU, as in `quantize`.

    Returns
    -------
    Array [T, N] or [E, M, N] of x's kind, and of its dtype or float32 where x is quantized. Rows
    that no expert has, by offsets or counts, are 0.

    Raises
    ------
    TypeError, ValueError
        For operands that do not fit, integers on the host that name no expert or no row, or
        another number of `experts`, `offsets` and `counts` than one.

    Notes
    -----
    The integers are of the host or on x's device. On a GPU they are not looked at beforehand, which
    would mean to wait for it: a row whose expert does not exist becomes NaN, and offsets and counts
    end where x does. A CUDA graph may be replayed with other integers in the same array.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> w = cq.quantize(np.stack([np.zeros((2, 64)), np.ones((2, 64))]).astype(np.float32), "int8")
    >>> x = np.ones((3, 64), np.float32)
    >>> cq.grouped_linear(x, w, np.array([0, 1, 0]))[:, 0]
    array([ 0., 64.,  0.], dtype=float32)
    >>> cq.grouped_linear(x, w, offsets=np.array([0, 2, 3]))[:, 0]
    array([ 0.,  0., 64.], dtype=float32)
    """
    given = {"experts": experts, "offsets": offsets, "counts": counts}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise ValueError(f"pass one of experts, offsets and counts; got {named or 'none of them'}")
    (name,) = named
    if interop.wants_gradient(x):
        return interop.by_operator("grouped_linear")(x, w, **given, out=out, stream=stream)
    left, right = Operand.of(x, "x"), weight(stored(w), "w", 3)
    known, width, depth = right.shape
    lead = (known, *left.shape[1:2]) if name == "counts" else left.shape[:1]
    if left.shape != (*lead, depth) or len(lead) != 1 + (name == "counts"):
        wanted = f"[{known}, M, {depth}]" if name == "counts" else f"[T, {depth}]"
        raise ValueError(
            f"x has shape {left.shape}; with {name} and w {right.shape} it must be {wanted}"
        )
    finish = Finish.check([left, right], (*lead, width), out=out, stream=stream)
    rows = Rows(name, integers_of(given[name], name, left, known), lead, known)
    if is_odd(left) or is_odd(right):
        axes = len(left.shape) - 1, 2
        if (pair := rearranged(left, right, axes, stream)) is not None:
            return grouped_linear(*pair, **{name: given[name]}, out=out, stream=stream)
        left, right = decoded(left, stream), decoded(right, stream)
    if finish.place.is_gpu:
        return on_gpu.grouped_linear(left, right, rows, finish, stream)

    def product() -> np.ndarray:
        chosen = rows.experts()
        values = left.values().reshape(len(chosen), depth)
        result = np.zeros((len(chosen), width), F32)
        stored = right.quantized.numpy()
        # Else an expert has no components of its own.
        stacked = stored.axes == (0, 1, 2) and stored.format.is_plain
        whole = None if stacked else stored.dequantize(dtype=F32)
        for expert in np.unique(chosen[chosen >= 0]):
            part = stored[int(expert)].dequantize(dtype=F32) if whole is None else whole[expert]
            result[chosen == expert] = np.matmul(values[chosen == expert], part.T)
        return result.reshape(finish.shape)

    return finish(product)
