"""Products with quantized operands, in float32 with one rounding at the end."""

from contextlib import nullcontext
from typing import Any, Literal

import numpy as np

from cuquant import interop
from cuquant.array.components import OPERATIONS, ArrayT, Stored
from cuquant.array.packed_weight import PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.gpu.arrays import backend_of
from cuquant.ops.matmul import on_gpu, prepacked
from cuquant.ops.matmul.arranged import (
    at_hand,
    computed,
    decoded,
    is_computed,
    is_odd,
    product_of,
    rearranged,
)
from cuquant.ops.matmul.check import (
    F32,
    Finish,
    Layer,
    Operand,
    flat_matmul,
    linear_shape,
    product_shape,
    stored,
    weight,
)
from cuquant.ops.matmul.prepared import Call, again
from cuquant.reference import ACTIVATIONS

Activation = Literal["relu", "gelu", "silu"]  # the names of ACTIVATIONS, for type checkers
Weight = QuantArray[Any] | PackedWeight[Any] | Layer


@interop.traced
def matmul(
    a: ArrayT | QuantArray[ArrayT],
    b: ArrayT | QuantArray[ArrayT],
    *,
    bias: Any = None,
    activation: Activation | None = None,
    residual: Any = None,
    out_dtype: object = None,
    out_scale: Any = None,
    batch_invariant: bool = False,
    out: Any = None,
    stream: object = None,
) -> ArrayT:
    """activation(a @ b + bias) + residual with a QuantArray on either or both sides.

    Parameters
    ----------
    a, b
        [..., M, K] and [..., K, N] by NumPy's rules (1-D and broadcast too); arrays of float32,
        float16 or bfloat16, and at least one QuantArray.
    bias
        [N], or None.
    activation
        None, "relu", "gelu" (exact) or "silu".
    residual
        [..., M, N], added last; or None.
    out_dtype
        None: the plain operand's dtype; float32 where both are quantized. "int8" with `out_scale`.
    out_scale
        One number above 2^-128: the result is int8, rint(result / out_scale) in -127..127. One that
        lies on a GPU is not looked at, which would wait.
    batch_invariant
        Whether a row of the result must not depend, to the bit, on how many rows come with it:
        the same tile and order of sums for every number of rows, which takes longer.
    out
        An array to write the result to.
    stream
        For arrays on a GPU, as in `quantize`.

    Returns
    -------
    Array [..., M, N] of the plain operand's kind; sums are float32, rounded once at the end. Two
    arrays of integers with one scale for a row (a column of b) or for all have exact int32 sums,
    which wrap from K = 131072 on at the earliest. Hopper's tensor cores keep about 14 bits of a sum
    of products of fp8 or narrower floats, 256 of which are added up before they meet others in
    float32, or those that share scales: of normal numbers, results are off by 2.1e-4 of their norm
    at any K. Scales of blocks on both sides may meet each other first, so that results have fewer
    bits where their products are below 2^-126.

    Raises
    ------
    TypeError, ValueError
        For operands that do not fit, or are not in one place: on a GPU all arrays must be of one
        library and device.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.ones((3, 64), np.float32)
    >>> w = cq.quantize(np.eye(64, dtype=np.float32), "int8")
    >>> bool(np.allclose(x @ w.T, x)), cq.matmul(x, w.T, activation="relu").shape
    (True, (3, 64))
    """
    call = Call("matmul", a, (b,), bias, residual, out, activation, out_dtype)
    plans = stream is None and out_scale is None and not batch_invariant
    if plans and (made := again(call)) is not None:
        return made
    if interop.wants_gradient(a, b, bias, residual):
        kept = {"residual": residual, "out_scale": out_scale, "out": out, "stream": stream}
        kept |= {"out_dtype": out_dtype, "batch_invariant": batch_invariant}
        return interop.by_operator("matmul")(a, b, bias=bias, activation=activation, **kept)
    left, right = Operand.of(a, "a"), Operand.of(b, "b")
    if left.dtype is not None and right.dtype is not None:
        raise TypeError(
            "matmul needs a QuantArray on one side at least; use a @ b for plain arrays"
        )
    shape = product_shape(left.shape, right.shape)
    finish = _finish(call, [left, right], shape, stream, out_scale, batch_invariant)
    if is_odd(left) or is_odd(right):
        summed = len(left.shape) - 1, max(len(right.shape) - 2, 0)
        if (pair := rearranged(left, right, summed, stream)) is not None:
            kept = {"bias": bias, "activation": activation, "residual": residual, "out": out}
            kept |= {"out_scale": out_scale, "batch_invariant": batch_invariant, "stream": stream}
            return matmul(*pair, out_dtype=finish.dtype, **kept)
        left, right, call = decoded(left, stream), decoded(right, stream), None
    if finish.place.is_gpu:
        return on_gpu.matmul(left, right, finish, stream, call if plans else None)
    return finish(lambda: flat_matmul(left.values(), right.values(), finish.batch_invariant))


@interop.traced
def linear(
    x: ArrayT | QuantArray[ArrayT],
    w: Weight,
    bias: Any = None,
    *,
    activation: Activation | None = None,
    residual: Any = None,
    out_dtype: object = None,
    batch_invariant: bool = False,
    out: Any = None,
    stream: object = None,
) -> ArrayT:
    """activation(x @ w.T + bias) + residual, a linear layer with a quantized weight.

    Parameters
    ----------
    x
        [..., K], an array of float32, float16 or bfloat16, or a QuantArray.
    w
        QuantArray or PackedWeight [N, K], or a QuantLinear or its weight.
    bias
        [N], or None.
    activation
        None, "relu", "gelu" (exact) or "silu".
    residual
        [..., N], added last; or None.
    out_dtype
        None: x's dtype, float32 where x is quantized.
    batch_invariant
        As in `matmul`.
    out
        An array [..., N] to write the result to.
    stream
        For arrays on a GPU, as in `quantize`.

    Returns
    -------
    Array [..., N] of x's kind. Of torch's tensors gradients flow back to x, bias and residual.

    Raises
    ------
    TypeError, ValueError
        For operands that do not fit, or are not in one place: on a GPU all arrays must be of one
        library and device.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> w = cq.quantize(np.ones((4, 64), np.float32), "nf4")
    >>> cq.linear(np.ones((2, 64), np.float32), w, np.zeros(4, np.float32))[0]
    array([64., 64., 64., 64.], dtype=float32)
    """
    call = Call("linear", x, (w := stored(w),), bias, residual, out, activation, out_dtype)
    plans = stream is None and not batch_invariant
    if plans and (made := again(call)) is not None:
        return made
    if plans and isinstance(w, Stored) and (pair := at_hand(x, w)) is not None:
        kept = {"residual": residual, "activation": activation, "out": out}
        return linear(*pair, bias, out_dtype=out_dtype, **kept)
    if interop.wants_gradient(x, bias, residual):
        kept = {"residual": residual, "activation": activation, "out": out, "stream": stream}
        kept |= {"out_dtype": out_dtype, "batch_invariant": batch_invariant}
        return interop.by_operator("linear")(x, w, bias, **kept)
    left, right = Operand.of(x, "x"), weight(w, "w", 2)
    shape = linear_shape(left, right)
    finish = _finish(call, [left, right], shape, stream, batch_invariant=batch_invariant)
    if is_odd(left) or is_odd(right):
        if (pair := rearranged(left, right, (len(left.shape) - 1, 1), stream)) is not None:
            kept = {"residual": residual, "activation": activation, "out": out, "stream": stream}
            kept["batch_invariant"] = batch_invariant
            return linear(*pair, bias, out_dtype=finish.dtype, **kept)
        left, right, call = decoded(left, stream), decoded(right, stream), None
    if finish.place.is_gpu:
        return on_gpu.linear(left, (right,), finish, stream, call if plans else None)
    return finish(lambda: flat_matmul(left.values(), right.values().T, finish.batch_invariant))


@interop.traced
def swiglu(
    x: ArrayT | QuantArray[ArrayT],
    w_gate: Weight,
    w_up: Weight,
    *,
    out: Any = None,
    stream: object = None,
) -> ArrayT:
    """silu(x @ w_gate.T) * (x @ w_up.T): the gated half of a transformer's MLP (Shazeer, 2020).

    Parameters
    ----------
    x
        [..., K], an array of float32, float16 or bfloat16, or a QuantArray.
    w_gate, w_up
        QuantArray or PackedWeight [N, K], or a QuantLinear or its weight.
    out
        An array [..., N] to write the result to.
    stream
        For arrays on a GPU, as in `quantize`.

    Returns
    -------
    Array [..., N] of x's kind, and of its dtype or float32 where x is quantized.

    Raises
    ------
    TypeError, ValueError
        For operands that do not fit, or are not in one place: on a GPU all arrays must be of one
        library and device.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> w = cq.quantize(np.ones((4, 64), np.float32), "int8")
    >>> cq.swiglu(np.ones((1, 64), np.float32), w, w)[0, 0]
    np.float32(4096.0)
    """
    w_gate, w_up = stored(w_gate), stored(w_up)
    call = Call("linear", x, (w_gate, w_up), out=out)
    if stream is None and (made := again(call)) is not None:
        return made
    if interop.wants_gradient(x):
        return interop.by_operator("swiglu")(x, w_gate, w_up, out=out, stream=stream)
    left, gate, up = Operand.of(x, "x"), weight(w_gate, "w_gate", 2), weight(w_up, "w_up", 2)
    shape = linear_shape(left, gate)
    if up.shape != gate.shape:
        raise ValueError(f"w_gate has shape {gate.shape} and w_up {up.shape}; they must be equal")
    finish = _finish(call, [left, gate, up], shape, stream)
    if is_computed(w_gate) and is_computed(w_up):
        with backend_of(left.memory()[0], stream) if finish.place.is_gpu else nullcontext():
            gate_and_up = computed(w_gate), computed(w_up)
        return swiglu(x, *gate_and_up, out=out, stream=stream)
    if any(map(is_odd, (left, gate, up))):
        gated = linear(x, w_gate, activation="silu", out_dtype=F32, stream=stream)
        return product_of(gated, linear(x, w_up, out_dtype=F32, stream=stream), finish, stream)
    if finish.place.is_gpu:
        return on_gpu.linear(left, (gate, up), finish, stream, call)

    def product() -> np.ndarray:
        values = left.values()
        gated = ACTIVATIONS["silu"](flat_matmul(values, gate.values().T))
        return gated * flat_matmul(values, up.values().T)

    return finish(product)


def _finish(
    call: Call,
    operands: list[Operand],
    shape: tuple[int, ...],
    stream: object,
    out_scale: Any = None,
    batch_invariant: bool = False,
) -> Finish:
    """What a call's arguments but its operands ask for, after every check of them."""
    return Finish.check(
        operands,
        shape,
        bias=call.bias,
        activation=call.activation,
        residual=call.residual,
        out_dtype=call.out_dtype,
        out_scale=out_scale,
        batch_invariant=batch_invariant,
        out=call.out,
        stream=stream,
    )


OPERATIONS["matmul"] = matmul
OPERATIONS["linear"] = linear
OPERATIONS["laid_values"] = prepacked.values
