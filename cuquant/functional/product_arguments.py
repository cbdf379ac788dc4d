"""What else products are told: scales, zero points, biases and signs, checked at the door.

One number of the host stays there until kernels' memory is filled with it; what is on a GPU is not
looked at.
"""

import math
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.formats import get_format
from cuquant.functional.checks import floats, integer, numbers
from cuquant.ops.plain_products import Scales

F32 = np.float32
EXACT_FLOAT32 = 1 << 24  # integers up to here, and their sums, are exact in float32


def scales_of(
    scale_a: Any, scale_b: Any, scale_c: Any, shape: tuple[int, ...], near: Any
) -> Scales | None:
    """The given scales, beside `near`; None if the product stays as it is."""
    last = number_of(scale_c, "scale_c", near)
    if scale_a is None and scale_b is None and not differs(last, 1):
        return None
    *batch, rows, columns = shape
    return Scales(
        along(scale_a, "scale_a", rows, (*batch, rows, 1), near),
        along(scale_b, "scale_b", columns, (*batch, 1, columns), near),
        last if differs(last, 1) else None,
    )


def number_of(value: Any, name: str, near: Any) -> Any:
    """One float32 number: 0-d on the host, where it stays until it is used, or of a GPU."""
    interop.refuse_gradient(value, name)
    found = numbers(value, name, near if interop.is_on_gpu(value) else None)
    if math.prod(found.shape) != 1:
        raise ValueError(f"{name} must be one number, got an array of shape {tuple(found.shape)}")
    return found.reshape(())


def along(scale: Any, name: str, count: int, shape: tuple[int, ...], near: Any) -> Any:
    """A number, or an array that broadcasts to `shape`, which is `count` numbers for a matrix."""
    if scale is None:
        return None
    interop.refuse_gradient(scale, name)
    on_gpu = interop.is_on_gpu(scale)
    values = numbers(scale, name, near if on_gpu else None)
    given = tuple(values.shape)
    if math.prod(given) == 1:
        return values.reshape(())
    own = shape[-2:]
    if given == (count,):
        values = values.reshape(own)
    elif given != own and not (len(shape) > 2 and _broadcasts(given, shape, own)):
        batch = f", or what broadcasts to {shape}" if len(shape) > 2 else ""
        raise ValueError(
            f"{name} has shape {given}; it must be a number, ({count},) or {own}{batch}"
        )
    return values if on_gpu else numbers(values, name, near)


def _broadcasts(given: tuple[int, ...], shape: tuple[int, ...], own: tuple[int, ...]) -> bool:
    try:
        return given[-2:] == own and np.broadcast_shapes(given, shape) == shape
    except ValueError:
        return False


def scaled(product: np.ndarray, scales: Scales | None) -> np.ndarray:
    values = product.astype(F32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for scale in scales or ():
            if scale is not None:
                values *= scale
    return values


def zero_point_of(value: Any, name: str, operand: Any) -> Any:
    """An int, None for 0; or one integer on the operand's GPU."""
    if interop.is_on_gpu(value) and interop.is_on_gpu(operand):
        point = interop.beside(value, operand, name)
        if interop.dtype_of(point).kind not in "iu" or math.prod(point.shape) != 1:
            raise TypeError(
                f"{name} must be one integer, got {interop.dtype_of(point)} {tuple(point.shape)}"
            )
        return point
    limits = np.iinfo(interop.dtype_of(operand))
    return integer(value, name, int(limits.min), int(limits.max)) or None


def bias_of(bias: Any, columns: int, near: Any) -> Any:
    values = factor(bias, "bias", near)
    if tuple(values.shape) not in ((columns,), (1, columns)):
        raise ValueError(
            f"bias has shape {tuple(values.shape)}; it must be ({columns},), one a column"
        )
    return values


def addend_of(values: Any, shape: tuple[int, ...], name: str) -> Any:
    given = tuple(values.shape)
    try:
        fits = np.broadcast_shapes(given, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} has shape {given}; the product has {shape}")
    return values


def differs(value: Any, wanted: int) -> bool:
    """Whether a number differs, or may: one on a GPU is not looked at."""
    return interop.is_on_gpu(value) or bool(value != wanted)


def factor(x: Any, name: str, near: Any) -> Any:
    """`floats` of a product, through which no gradient flows: RuntimeError where one should."""
    interop.refuse_gradient(x, name)
    return floats(x, name, near=near)


def signed(x: Any, name: str, near: Any) -> Any:
    """An array whose numbers have signs: integers or floats."""
    found = interop.beside(x, near, name)
    return found if interop.dtype_of(found).kind in "iu" else factor(x, name, near)


def signs_of_host(x: np.ndarray, name: str) -> np.ndarray:
    """int16 -1 or +1, as the format int1 has them."""
    values = np.ascontiguousarray(x, dtype=F32)
    if np.isnan(values).any():
        raise ValueError(f"{name} holds NaN, which has no sign; np.nan_to_num(x) makes it 0")
    codec = get_format("int1").codec
    return codec.decode(codec.encode(values)).astype(np.int16)


def exact_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """int64 of int16 matrices, by the BLAS of a float that holds every partial sum."""
    peaks = [int(np.abs(x).max(initial=0)) for x in (a, b)]
    wide = F32 if a.shape[-1] * peaks[0] * peaks[1] <= EXACT_FLOAT32 else np.float64
    return (a.astype(wide) @ b.astype(wide)).astype(np.int64)
