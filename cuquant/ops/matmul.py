"""Products with quantized operands: decode to float32, multiply with BLAS, round once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array import OPERATIONS, QuantArray
from cuquant.ops.dequantize import writable_out
from cuquant.packed import PackedWeight, unpack
from cuquant.reference import ACTIVATIONS

F32 = np.float32


@dataclass(frozen=True)
class Operand:
    """One side of a product: what it came as, and how to get its float32 values."""

    source: Any
    shape: tuple[int, ...]
    kind: str
    dtype: np.dtype | None  # of a plain array; None for a quantized one

    @classmethod
    def of(cls, value: Any, name: str) -> "Operand":
        if isinstance(value, PackedWeight):
            value = unpack(value)
        if isinstance(value, QuantArray):
            interop.refuse_gpu(value, name)
            return cls(value, value.shape, value.kind, None)
        interop.refuse_gradient(value, name)
        host = interop.to_numpy(value, name)
        dtype = interop.float_dtype(host.dtype, name)
        return cls(value, host.shape, interop.kind(value) or "numpy", dtype)

    def values(self) -> np.ndarray:
        if self.dtype is None:
            return self.source.numpy().dequantize(dtype=F32)
        return interop.to_numpy(self.source).astype(F32, copy=False)

    def memory(self) -> list[np.ndarray]:
        """The host arrays that an `out` must not overlap."""
        if self.dtype is None:
            return list(self.source.numpy().arrays().values())
        return [interop.to_numpy(self.source)]


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    out_dtype: object = None,
    out: Any = None,
    stream: object = None,
) -> Any:
    """activation(a @ b + bias) with a QuantArray on either or both sides.

    Parameters
    ----------
    a, b
        [..., M, K] and [..., K, N] by NumPy's rules (1-D and broadcast too); arrays of float32,
        float16 or bfloat16, and at least one QuantArray.
    bias
        [N], or None.
    activation
        None, "relu", "gelu" (exact) or "silu".
    out_dtype
        None: the plain operand's dtype; float32 where both are quantized.
    out
        An array to write the result to.
    stream
        For arrays on a GPU.

    Returns
    -------
    Array [..., M, N] of the plain operand's kind; sums are float32, rounded once at the end.

    Raises
    ------
    TypeError, ValueError
        For operands that do not fit.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.ones((3, 64), np.float32)
    >>> w = cq.quantize(np.eye(64, dtype=np.float32), "int8")
    >>> bool(np.allclose(x @ w.T, x)), cq.matmul(x, w.T, activation="relu").shape
    (True, (3, 64))
    """
    left, right = Operand.of(a, "a"), Operand.of(b, "b")
    if left.dtype is not None and right.dtype is not None:
        raise TypeError(
            "matmul needs a QuantArray on one side at least; use a @ b for plain arrays"
        )
    shape = _product_shape(left.shape, right.shape)
    finish = Finish.check([left, right], shape, bias, activation, None, out_dtype, out, stream)
    return finish(lambda: _flat_matmul(left.values(), right.values()))


def linear(
    x: Any,
    w: QuantArray | PackedWeight,
    bias: Any = None,
    *,
    activation: str | None = None,
    residual: Any = None,
    out_dtype: object = None,
    out: Any = None,
    stream: object = None,
) -> Any:
    """activation(x @ w.T + bias) + residual, a linear layer with a quantized weight.

    Parameters
    ----------
    x
        [..., K], an array of float32, float16 or bfloat16, or a QuantArray.
    w
        QuantArray or PackedWeight [N, K].
    bias
        [N], or None.
    activation
        None, "relu", "gelu" (exact) or "silu".
    residual
        [..., N], added last; or None.
    out_dtype
        None: x's dtype, float32 where x is quantized.
    out
        An array [..., N] to write the result to.
    stream
        For arrays on a GPU.

    Returns
    -------
    Array [..., N] of x's kind.

    Raises
    ------
    TypeError, ValueError
        For operands that do not fit.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> w = cq.quantize(np.ones((4, 64), np.float32), "nf4")
    >>> cq.linear(np.ones((2, 64), np.float32), w, np.zeros(4, np.float32))[0]
    array([64., 64., 64., 64.], dtype=float32)
    """
    left, right = Operand.of(x, "x"), _weight(w, "w", 2)
    shape = _linear_shape(left, right)
    finish = Finish.check([left, right], shape, bias, activation, residual, out_dtype, out, stream)
    return finish(lambda: _flat_matmul(left.values(), right.values().T))


def swiglu(x: Any, w_gate: Any, w_up: Any, *, out: Any = None) -> Any:
    """silu(x @ w_gate.T) * (x @ w_up.T): the gated half of a transformer's MLP (Shazeer, 2020).

    Parameters
    ----------
    x
        [..., K].
    w_gate, w_up
        QuantArray or PackedWeight [N, K].
    out
        An array [..., N] to write the result to.

    Returns
    -------
    Array [..., N] of x's kind and dtype.

    Raises
    ------
    TypeError, ValueError
        For operands that do not fit.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> w = cq.quantize(np.ones((4, 64), np.float32), "int8")
    >>> cq.swiglu(np.ones((1, 64), np.float32), w, w)[0, 0]
    np.float32(4096.0)
    """
    left, gate, up = Operand.of(x, "x"), _weight(w_gate, "w_gate", 2), _weight(w_up, "w_up", 2)
    shape = _linear_shape(left, gate)
    if up.shape != gate.shape:
        raise ValueError(f"w_gate has shape {gate.shape} and w_up {up.shape}; they must be equal")
    finish = Finish.check([left, gate, up], shape, None, None, None, None, out, None)

    def product() -> np.ndarray:
        values = left.values()
        gated = ACTIVATIONS["silu"](_flat_matmul(values, gate.values().T))
        return gated * _flat_matmul(values, up.values().T)

    return finish(product)


def grouped_linear(x: Any, w: Any, experts: Any, *, out: Any = None) -> Any:
    """Each row of x through its own expert's weight: y[i] = x[i] @ w[experts[i]].T.

    Parameters
    ----------
    x
        [T, K].
    w
        QuantArray or PackedWeight [E, N, K].
    experts
        T integers in 0..E - 1.
    out
        An array [T, N] to write the result to.

    Returns
    -------
    Array [T, N] of x's kind and dtype.

    Raises
    ------
    TypeError, ValueError
        For operands that do not fit or an expert that does not exist.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> w = cq.quantize(np.stack([np.zeros((2, 64)), np.ones((2, 64))]).astype(np.float32), "int8")
    >>> cq.grouped_linear(np.ones((3, 64), np.float32), w, np.array([0, 1, 0]))[:, 0]
    array([ 0., 64.,  0.], dtype=float32)
    """
    left, right = Operand.of(x, "x"), _weight(w, "w", 3)
    known, width, depth = right.shape
    if len(left.shape) != 2 or left.shape[1] != depth:
        raise ValueError(f"x has shape {left.shape}; with w {right.shape} it must be [T, {depth}]")
    chosen = _experts(experts, left.shape[0], known)
    finish = Finish.check([left, right], (left.shape[0], width), None, None, None, None, out, None)

    def product() -> np.ndarray:
        values = left.values()
        result = np.zeros((len(chosen), width), F32)
        weight = right.source.numpy()
        stacked = weight.axes == (0, 1, 2)  # else an expert has no components of its own
        whole = None if stacked else weight.dequantize(dtype=F32)
        for expert in np.unique(chosen):
            part = weight[int(expert)].dequantize(dtype=F32) if whole is None else whole[expert]
            result[chosen == expert] = np.matmul(values[chosen == expert], part.T)
        return result

    return finish(product)


def _experts(experts: Any, count: int, known: int) -> np.ndarray:
    chosen = interop.to_numpy(experts, "experts") if interop.kind(experts) else np.asarray(experts)
    if not chosen.size:
        chosen = chosen.astype(np.int64)
    if chosen.dtype.kind not in "iu":
        raise TypeError(f"experts must be integers, got {chosen.dtype}")
    if chosen.shape != (count,):
        raise ValueError(f"experts has shape {chosen.shape}; x has {count} rows")
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < known):
        raise ValueError(f"experts must be in 0..{known - 1}, got {chosen.min()}..{chosen.max()}")
    return chosen.astype(np.int64)


def _weight(value: Any, name: str, ndim: int) -> Operand:
    if not isinstance(value, (QuantArray, PackedWeight)):
        raise TypeError(f"{name} must be a QuantArray or PackedWeight, got {type(value).__name__}")
    if len(value.shape) != ndim:
        wanted = "[N, K]" if ndim == 2 else "[E, N, K]"
        raise ValueError(f"{name} has shape {value.shape}; it must be {wanted}")
    return Operand.of(value, name)


def _flat_matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """np.matmul; leading axes of `a` become rows, or NumPy calls BLAS once for each of them."""
    if b.ndim != 2 or a.ndim < 3:
        return np.matmul(a, b)
    rows = int(np.prod(a.shape[:-1]))
    return np.matmul(a.reshape(rows, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])


def _linear_shape(x: Operand, w: Operand) -> tuple[int, ...]:
    if not x.shape or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"x has shape {x.shape}; with w {w.shape} its last axis must be {w.shape[1]}"
        )
    return (*x.shape[:-1], w.shape[0])


def _product_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Of a @ b by NumPy's rules."""
    if not a or not b or a[-1] != b[-2 if len(b) > 1 else 0]:
        raise ValueError(
            f"shapes {a} and {b} do not multiply: a's last axis must equal b's last but one"
        )
    try:
        batch = np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError as error:
        raise ValueError(f"the leading axes of {a} and {b} do not broadcast") from error
    return (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


@dataclass(frozen=True)
class Finish:
    """What happens to a product: bias, activation and residual in float32, then one rounding."""

    kind: str
    dtype: np.dtype
    bias: np.ndarray | None
    activation: str | None
    residual: np.ndarray | None
    out: Any
    target: np.ndarray | None

    @classmethod
    def check(
        cls,
        operands: list[Operand],
        shape: tuple[int, ...],
        bias: Any,
        activation: str | None,
        residual: Any,
        out_dtype: object,
        out: Any,
        stream: object,
    ) -> "Finish":
        """Every check of a product's other arguments, before anything is computed."""
        interop.reject_stream(stream)
        kind = next((o.kind for o in operands if o.dtype is not None), operands[0].kind)
        if activation is not None and activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation must be None or one of {known}, got {activation!r}")
        added = _addend(bias, "bias", shape[-1:])
        carried = _addend(residual, "residual", shape)
        dtype = _result_dtype(operands, out_dtype)
        target = None
        if out is not None:
            memory = [part for operand in operands for part in operand.memory()]
            memory += [part for part in (added, carried) if part is not None]
            target = writable_out(out, shape, interop.kind(out), out_dtype, memory)
            dtype = target.dtype
        return cls(kind, dtype, added, activation, carried, out, target)

    def __call__(self, product: Callable[[], np.ndarray]) -> Any:
        with np.errstate(all="ignore"):  # NaN and infinity go through, as they do in BLAS
            return self._finish(np.asarray(product()))

    def _finish(self, result: np.ndarray) -> Any:
        if self.bias is not None:
            result = result + self.bias.astype(F32)
        if self.activation is not None:
            result = ACTIVATIONS[self.activation](result)
        if self.residual is not None:
            result = result + self.residual.astype(F32)
        if self.target is None:
            return interop.from_numpy(result.astype(self.dtype, copy=False), self.kind)
        self.target[...] = result
        return self.out


def _addend(value: Any, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
    if value is None:
        return None
    host = interop.to_numpy(value, name)
    interop.float_dtype(host.dtype, name)
    if host.shape != shape:
        raise ValueError(f"{name} has shape {host.shape}; it must be {shape}")
    return host


def _result_dtype(operands: list[Operand], out_dtype: object) -> np.dtype:
    if out_dtype is not None:
        return interop.float_dtype(out_dtype, "out_dtype")
    plain = [operand.dtype for operand in operands if operand.dtype is not None]
    return plain[0] if plain else np.dtype(F32)


OPERATIONS["matmul"] = matmul
OPERATIONS["linear"] = linear
