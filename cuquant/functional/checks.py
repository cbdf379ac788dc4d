"""Checks at the public door that the plain-array functions share.

Arrays become NumPy's, without a copy; those on a GPU stay there in functions that compute there,
which pass the array that decides it as `near`, and are refused in the others.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.errors import clipped

F32 = np.float32


def integer(value: Any, name: str, low: int, high: int | None = None) -> int:
    """`value` as an int of low..high; a 0-d integer array of any kind is one too."""
    if interop.kind(value) and value.ndim == 0:
        value = interop.to_numpy(value, name)[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {clipped(value)}")
    if value < low or (high is not None and value > high):
        wanted = f"in {low}..{high}" if high is not None else f"{low} or more"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return int(value)


def number(value: Any, name: str, near: Any = None) -> Any:
    """`value`, a number or an array of one, as a float32; on a GPU an array of one axis."""
    values = numbers(value, name, near)
    if math.prod(values.shape) != 1:
        raise ValueError(f"{name} must be one number, got an array of shape {tuple(values.shape)}")
    return values.reshape(-1) if interop.is_on_gpu(values) else values.reshape(-1)[0]


def numbers(value: Any, name: str, near: Any = None) -> Any:
    """float32 of a number or a numeric array, where `near` is."""
    given = value if interop.kind(value) else np.asarray(value)
    dtype = interop.dtype_of(given)
    if dtype.kind not in "fiu" and dtype.name != "bfloat16":
        raise TypeError(f"{name} must be a number or a numeric array, got {clipped(value)}")
    with np.errstate(over="ignore"):
        if interop.is_on_gpu(given):
            return interop.astype(interop.beside(given, near, name), F32)
        return interop.beside(interop.astype(given, F32), near, name)  # CuPy flushes subnormals


def extents(shape: int | Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of ints that are not negative."""
    entries = shape if isinstance(shape, Sequence) else (shape,)
    return tuple(integer(extent, "each extent of shape", 0) for extent in entries)


def real(x: Any, name: str = "x") -> Any:
    """`x` itself, an array of float32, float16 or bfloat16: plain functions convert nothing."""
    if interop.kind(x) is None:
        interop.to_numpy(x, name)  # names the type that came and what to pass
    interop.float_dtype(interop.dtype_of(x), name)
    return x


def flat(x: Any, name: str = "x") -> Any:
    """`real(x)` as one axis in row-major order, of its own kind."""
    real(x, name)
    if x.ndim == 0:
        raise ValueError(f"{name} is 0-d; quantization needs at least one axis ({name}.reshape(1))")
    return x.reshape(-1)


def floats(x: Any, name: str, near: Any = None) -> Any:
    """A float32, float16 or bfloat16 array in its own dtype, where `near` is."""
    found = interop.beside(x, near, name)
    interop.float_dtype(interop.dtype_of(found), name)
    return found


def integers(x: Any, name: str, near: Any = None) -> Any:
    """An integer array where `near` is."""
    interop.refuse_other(x, name, "int32")
    found = interop.beside(x, near, name)
    dtype = interop.dtype_of(found)
    if dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {dtype}")
    return found


def typed(x: Any, name: str, *dtypes: type, near: Any = None) -> Any:
    """An array where `near` is, refused unless it has one of `dtypes`."""
    interop.refuse_other(x, name, np.dtype(dtypes[0]).name)
    found = interop.beside(x, near, name)
    dtype = interop.dtype_of(found)
    if dtype not in [np.dtype(each) for each in dtypes]:
        wanted = " or ".join(np.dtype(each).name for each in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {dtype}")
    return found


def check_product(a: Any, b: Any) -> tuple[int, ...]:
    """The product's shape; ValueError unless a is [..., M, K] and b [..., K, N]."""
    first, second = tuple(a.shape), tuple(b.shape)
    for shape, name, wanted in ((first, "a", "[..., M, K]"), (second, "b", "[..., K, N]")):
        if len(shape) < 2:
            raise ValueError(f"{name} has shape {shape}; it must be {wanted}")
    if first[-1] != second[-2]:
        raise ValueError(
            f"a has shape {first} and b {second}; a's columns must be as many as b's rows "
            "(b is [K, N]: pass w.T for a weight [N, K])"
        )
    try:
        batch = np.broadcast_shapes(first[:-2], second[:-2])
    except ValueError as error:
        raise ValueError(f"a has shape {first} and b {second}; their batches differ") from error
    return (*batch, first[-2], second[-1])


def like(values: Any, x: Any) -> Any:
    """NumPy `values` as an array of x's kind and device; anything else as it is."""
    if not isinstance(values, (np.ndarray, np.generic)):
        return values
    return interop.like(np.asarray(values), x)
