"""What products are made of, checked: operands, and what happens to a product at its end.

The checks are the same wherever the arrays are; NumPy's and torch's on the CPU are also multiplied
here, by BLAS. `cuquant.ops.matmul.on_gpu` has the GPU's part.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from cuquant import interop
from cuquant.array.packed_weight import PackedWeight, unpack
from cuquant.array.quant_array import QuantArray
from cuquant.errors import clipped
from cuquant.lazy import lazy
from cuquant.ops.outputs import check_out, writable_out
from cuquant.reference import ACTIVATIONS
from cuquant.reference.memory import empty

F32 = np.float32
INVARIANT_ROWS = 64  # that BLAS multiplies at a time where rows must not depend on how many come


@dataclass(frozen=True)
class Place:
    """A library and a device: "numpy", "cupy" or "torch", and "cpu", "cuda:0", ..."""

    kind: str
    device: str

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    def __str__(self) -> str:
        return f"a {self.kind} array on {self.device}"

    def check(self, other: "Place", name: str, own: str) -> None:
        """TypeError or ValueError where `other`, that of `name`, cannot be worked on with this.

        Arrays of NumPy and of torch on the CPU can: they share memory.
        """
        if self == other or not (self.is_gpu or other.is_gpu):
            return
        error = TypeError if self.kind != other.kind else ValueError
        raise error(f"{name} is {other}, and {own} {self}; move one to where the other is")


def place_of(value: Any, name: str) -> Place:
    """Where an array lies.

    Raises
    ------
    TypeError
        For anything that is no array.
    ValueError
        For one on a GPU whose elements do not start on their own size.
    BackendUnavailable
        For a device that is neither the CPU nor a CUDA one.
    """
    if interop.is_on_gpu(value):
        interop.refuse_misaligned(value, name)
        return Place(str(interop.kind(value)), interop.device(value))
    interop.to_numpy(value, name)
    return Place(str(interop.kind(value)), "cpu")


@dataclass(frozen=True)
class Operand:
    """One side of a product: what it came as, and how to get its float32 values."""

    name: str
    source: Any
    shape: tuple[int, ...]
    place: Place
    dtype: np.dtype | None  # of a plain array; None for a quantized one

    @classmethod
    def of(cls, value: Any, name: str) -> "Operand":
        if isinstance(value, (QuantArray, PackedWeight)):
            value.check()
            first = next(iter(value.components.values()))
            if not interop.is_on_gpu(first):
                interop.refuse_gpu(first, name)
            place = Place(interop.kind(first) or "numpy", interop.device(first))
            return cls(name, value, tuple(value.shape), place, None)
        interop.refuse_gradient(value, name)
        place = place_of(value, name)
        dtype = interop.float_dtype(interop.dtype_of(value), name)
        return cls(name, value, tuple(value.shape), place, dtype)

    @lazy
    def quantized(self) -> QuantArray:
        """A quantized operand, unpacked where it is a PackedWeight."""
        return unpack(self.source) if isinstance(self.source, PackedWeight) else self.source

    def values(self) -> np.ndarray:
        """The float32 values, on the CPU."""
        if self.dtype is None:
            return self.quantized.numpy().dequantize(dtype=F32)
        return interop.to_numpy(self.source).astype(F32, copy=False)

    def memory(self) -> list[Any]:
        """The arrays that an `out` must not overlap."""
        return [self.source] if self.dtype is not None else list(self.source.components.values())


class Layer(Protocol):
    """What holds a quantized weight: QuantLinear, and what its `weight` gives."""

    @property
    def quantized(self) -> Any: ...


def stored(value: Any) -> Any:
    """The QuantArray or PackedWeight behind a layer or its `weight`; else the value itself."""
    known = isinstance(value, (QuantArray, PackedWeight))
    return value if known else getattr(value, "quantized", value)


def weight(value: Any, name: str, ndim: int) -> Operand:
    """The operand of a weight, [N, K] or [E, N, K]; TypeError or ValueError for anything else."""
    if not isinstance(value, (QuantArray, PackedWeight)):
        raise TypeError(
            f"{name} must be a QuantArray or PackedWeight, got {type(value).__name__}; "
            "cuquant.quantize makes one"
        )
    if len(value.shape) != ndim:
        wanted = "[N, K]" if ndim == 2 else "[E, N, K]"
        raise ValueError(f"{name} has shape {value.shape}; it must be {wanted}")
    return Operand.of(value, name)


def linear_shape(x: Operand, w: Operand) -> tuple[int, ...]:
    """Of x @ w.T."""
    if not x.shape or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"x has shape {x.shape}; with w {w.shape} its last axis must be {w.shape[1]}"
        )
    return (*x.shape[:-1], w.shape[0])


def product_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Of a @ b by NumPy's rules."""
    if not a or not b or a[-1] != b[-2 if len(b) > 1 else 0]:
        turned = len(b) == 2 and a[-1:] == b[1:]
        raise ValueError(
            f"shapes {a} and {b} do not multiply: a's last axis must equal b's last but one"
            + "; of a weight [N, K] pass w.T, or use linear" * turned
        )
    try:
        batch = np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError as error:
        raise ValueError(f"the leading axes of {a} and {b} do not broadcast") from error
    return (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


@dataclass(frozen=True)
class Finish:
    """What happens to a product: bias, activation and residual in float32, then one rounding.

    Attributes
    ----------
    place
        Of all arrays, on a GPU; of the result, on the CPU.
    shape, dtype
        Of the result.
    bias, residual
        [N] and of the result's shape, or None; NumPy's or on the GPU.
    out
        What the caller gave, or None.
    out_scale
        One number: the result is int8, of what it would have been / out_scale.
    batch_invariant
        Whether a row must not depend on how many rows come with it.
    """

    place: Place
    shape: tuple[int, ...]
    dtype: np.dtype
    bias: Any = None
    activation: str | None = None
    residual: Any = None
    out: Any = None
    out_scale: Any = None
    batch_invariant: bool = False

    @classmethod
    def check(
        cls,
        operands: list[Operand],
        shape: tuple[int, ...],
        *,
        bias: Any = None,
        activation: str | None = None,
        residual: Any = None,
        out_dtype: object = None,
        out_scale: Any = None,
        batch_invariant: bool = False,
        out: Any = None,
        stream: object = None,
    ) -> "Finish":
        """Every check of a product's other arguments, before anything is computed."""
        first = operands[0]
        for other in operands[1:]:
            first.place.check(other.place, other.name, first.name)
        if not first.place.is_gpu:
            interop.reject_stream(stream)
        named = isinstance(activation, str) and activation in ACTIVATIONS
        if activation is not None and not named:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(
                f"activation must be None or one of {known}, got {clipped(activation)}"
            )
        added = _addend(bias, "bias", shape[-1:], first)
        carried = _addend(residual, "residual", shape, first)
        factor = _out_scale(out_scale, out_dtype, first)
        if not isinstance(batch_invariant, (bool, np.bool_)):
            raise TypeError(f"batch_invariant must be a bool, got {clipped(batch_invariant)}")
        dtype = np.dtype(np.int8) if factor is not None else _result_dtype(operands, out_dtype)
        if out is not None:
            memory = [part for operand in operands for part in operand.memory()]
            memory += [part for part in (added, carried) if part is not None]
            wanted = dtype if factor is not None else out_dtype
            dtype = _check_out(out, shape, wanted, memory, first)
        plain = next((o for o in operands if o.dtype is not None), first)
        invariant = bool(batch_invariant)
        return cls(plain.place, shape, dtype, added, activation, carried, out, factor, invariant)

    @property
    def as_float32(self) -> "Finish":
        """The same up to the last rounding."""
        return replace(self, dtype=np.dtype(F32), out=None, out_scale=None)

    def __call__(self, product: Callable[[], np.ndarray]) -> Any:
        """The result on the CPU, of a function that multiplies there."""
        with np.errstate(all="ignore"):  # NaN and infinity go through, as they do in BLAS
            return self._finish(np.asarray(product()))

    def _finish(self, result: np.ndarray) -> Any:
        if self.bias is not None:
            result = result + self.bias.astype(F32)
        if self.activation is not None:
            result = ACTIVATIONS[self.activation](result)
        if self.residual is not None:
            result = result + self.residual.astype(F32)
        if self.out_scale is not None:
            result = int8_of(result, F32(self.out_scale))
        if self.out is None:
            made = empty(result.shape, self.dtype)
            made[...] = result
            return interop.from_numpy(made, self.place.kind)
        interop.to_numpy(self.out)[...] = result
        return self.out


def int8_of(values: np.ndarray, scale: np.float32) -> np.ndarray:
    """int8 of values / scale, as `quantize` has it with a given scale for the whole array."""
    with np.errstate(all="ignore"):
        inverse = F32(1) / scale
        usable = np.isfinite(inverse) and inverse != 0
        codes = np.rint(np.clip(values.astype(F32) * inverse, F32(-127), F32(127)))
    return np.where(np.isnan(codes) | (not usable), F32(0), codes).astype(np.int8)


def _out_scale(value: Any, out_dtype: object, near: Operand) -> Any:
    """The scale of an int8 result: a float32 of the host, or an array beside the operands."""
    wants_int8 = out_dtype is not None and interop.numpy_dtype(out_dtype) == np.int8
    if value is None:
        if wants_int8:
            raise TypeError(
                "out_dtype must be float32, float16 or bfloat16; int8 is matmul's, with out_scale="
            )
        return None
    if not wants_int8:
        raise ValueError(f'out_scale is for out_dtype="int8", and out_dtype is {out_dtype}')
    interop.refuse_gradient(value, "out_scale")
    if interop.is_on_gpu(value):
        near.place.check(place_of(value, "out_scale"), "out_scale", near.name)
        interop.float_dtype(interop.dtype_of(value), "out_scale")
        if math.prod(value.shape) != 1:
            raise ValueError(f"out_scale has shape {tuple(value.shape)}; it must be one number")
        return value
    number = interop.to_numpy(value, "out_scale") if interop.kind(value) else np.asarray(value)
    if number.dtype.kind not in "fiu" or number.size != 1:
        raise TypeError(f"out_scale must be one number, got {clipped(value)}")
    found = F32(number.reshape(-1)[0])
    if not (np.isfinite(found) and found > 0):
        raise ValueError(f"out_scale must be finite and above 0, got {found}")
    with np.errstate(over="ignore"):
        usable = np.isfinite(F32(1) / found)  # it is multiplied with
    if not usable:
        raise ValueError(
            f"out_scale is {found}, and 1 / out_scale is beyond float32; pass more than 2^-128"
        )
    return found


def _addend(value: Any, name: str, shape: tuple[int, ...], near: Operand) -> Any:
    """bias or residual, as it is on a GPU and as NumPy's on the CPU."""
    if value is None:
        return None
    interop.refuse_gradient(value, name)
    near.place.check(place_of(value, name), name, near.name)
    interop.float_dtype(interop.dtype_of(value), name)
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {shape}")
    return value if near.place.is_gpu else interop.to_numpy(value, name)


def _check_out(
    out: Any, shape: tuple[int, ...], dtype: object, memory: list[Any], near: Operand
) -> np.dtype:
    """The dtype of `out`, after every check of it."""
    interop.refuse_other(out, "out")
    near.place.check(place_of(out, "out"), "out", near.name)
    whole = isinstance(dtype, np.dtype) and dtype == np.int8
    if not near.place.is_gpu:
        kind = interop.kind(out)
        return writable_out(out, shape, kind, dtype, memory, integers=whole).dtype
    return check_out(out, shape, dtype, memory, integers=whole)


def _result_dtype(operands: list[Operand], out_dtype: object) -> np.dtype:
    if out_dtype is not None:
        return interop.float_dtype(out_dtype, "out_dtype")
    plain = [operand.dtype for operand in operands if operand.dtype is not None]
    return plain[0] if plain else np.dtype(F32)


def flat_matmul(a: np.ndarray, b: np.ndarray, batch_invariant: bool = False) -> np.ndarray:
    """np.matmul; leading axes of `a` become rows, or NumPy calls BLAS once for each of them.

    `batch_invariant`: always of as many rows, for BLAS has other orders of sums for others.
    """
    if batch_invariant:
        if a.ndim > 1:
            return _by_invariant_parts(a, b)
        made = _by_invariant_parts(a[None], b)
        return made[..., 0] if b.ndim == 1 else made[..., 0, :]
    if b.ndim != 2 or a.ndim < 3:
        return np.matmul(a, b)
    made = np.matmul(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b)
    return made.reshape(*a.shape[:-1], b.shape[-1])


def _by_invariant_parts(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """np.matmul of INVARIANT_ROWS rows of `a` at a time, the last of them padded."""
    rows = a.shape[-2]
    padded = np.pad(a, [*[(0, 0)] * (a.ndim - 2), (0, -rows % INVARIANT_ROWS), (0, 0)])
    parts = [
        np.matmul(padded[..., i : i + INVARIANT_ROWS, :], b)
        for i in range(0, max(rows, 1), INVARIANT_ROWS)
    ]
    axis = -1 if b.ndim == 1 else -2
    made = np.concatenate(parts, axis=axis)
    return made[..., :rows] if b.ndim == 1 else made[..., :rows, :]
