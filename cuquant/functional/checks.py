"""Checks at the public door that the plain-array functions share."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuquant import interop

F32 = np.float32


def integer(value: Any, name: str, low: int, high: int | None = None) -> int:
    """`value` as an int of low..high; a 0-d integer array of any kind is one too."""
    if interop.kind(value) and value.ndim == 0:
        value = interop.to_numpy(value, name)[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < low or (high is not None and value > high):
        wanted = f"in {low}..{high}" if high is not None else f"{low} or more"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return int(value)


def number(value: Any, name: str) -> np.float32:
    """`value`, a number or an array of one, as a float32."""
    values = numbers(value, name)
    if values.size != 1:
        raise ValueError(f"{name} must be one number, got an array of shape {values.shape}")
    return values.reshape(-1)[0]


def numbers(value: Any, name: str) -> np.ndarray:
    """float32 of a number or a numeric array of any kind."""
    host = interop.to_numpy(value, name) if interop.kind(value) else np.asarray(value)
    if host.dtype.kind not in "fiu" and host.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be a number or a numeric array, got {value!r}")
    with np.errstate(over="ignore"):
        return np.asarray(host.astype(F32))


def extents(shape: int | Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of ints that are not negative."""
    entries = shape if isinstance(shape, Sequence) else (shape,)
    return tuple(integer(extent, "each extent of shape", 0) for extent in entries)


def flat(x: Any, name: str = "x") -> Any:
    """`x` as one axis in row-major order, of its own kind."""
    if interop.kind(x) is None:
        interop.to_numpy(x, name)  # names the type that came and what to pass
    if x.ndim == 0:
        raise ValueError(f"{name} is 0-d; quantization needs at least one axis ({name}.reshape(1))")
    return x.reshape(-1)


def floats(x: Any, name: str) -> np.ndarray:
    """A float32, float16 or bfloat16 array of any kind as NumPy's, in its own dtype."""
    host = interop.to_numpy(x, name)
    interop.float_dtype(host.dtype, name)
    return host


def integers(x: Any, name: str) -> np.ndarray:
    """An integer array of any kind as NumPy's."""
    host = interop.to_numpy(x, name)
    if host.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {host.dtype}")
    return host


def typed(x: Any, name: str, *dtypes: type) -> np.ndarray:
    """An array of any kind as NumPy's, refused unless it has one of `dtypes`."""
    host = interop.to_numpy(x, name)
    if host.dtype not in [np.dtype(dtype) for dtype in dtypes]:
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {host.dtype}")
    return host


def check_product(a: np.ndarray, b: np.ndarray) -> None:
    """ValueError unless a is [M, K] and b is [K, N]."""
    for operand, name, wanted in ((a, "a", "[M, K]"), (b, "b", "[K, N]")):
        if operand.ndim != 2:
            raise ValueError(f"{name} has shape {operand.shape}; it must be {wanted}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a has shape {a.shape} and b {b.shape}; a's columns must be as many as b's rows "
            "(b is [K, N]: pass w.T for a weight [N, K])"
        )


def like(values: Any, x: Any) -> Any:
    """NumPy `values` as an array of x's kind."""
    return interop.from_numpy(np.asarray(values), interop.kind(x) or "numpy")
