"""Numbers that were calibrated beforehand: `quantize`'s scale=, zero_point= and global_scale=."""

import math
from typing import Any

import ml_dtypes
import numpy as np

from cuquant import interop, reference
from cuquant.formats import Format
from cuquant.formats.codecs import Uniform
from cuquant.formats.scales import DTYPES
from cuquant.gpu.arrays import GpuBackend
from cuquant.ops.quantize.call import Known

LEAST_E8M0 = np.float32(2.0**-127)


def calibration(
    fmt: Format, stored: tuple[int, ...], scale: Any, zero_point: Any, global_scale: Any
) -> reference.Calibration:
    """The given numbers, checked and broadcast to the shape of the format's scales."""
    _check_use(fmt, scale, zero_point, global_scale)
    if global_scale is not None:
        global_scale = _global_scale(global_scale)
    if scale is None:
        return reference.Calibration(global_scale=global_scale)
    rule = fmt.rule
    with np.errstate(over="ignore"):
        values = _broadcast(scale, rule.shape(stored), "scale").astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("scale= must be finite, also as float32")
    if rule.rule != "signed_max" and (values < 0).any():
        raise ValueError(f"the scales of {fmt} have no sign; scale= must not be negative")
    if values.size and not _stored(values, rule.dtype, global_scale).any():
        raise ValueError(
            f"scale= is 0 in {rule.dtype}, which leaves nothing of x; pass a larger number"
        )
    if rule.dtype == "e8m0" and ((np.frexp(values)[0] != 0.5) | (values < LEAST_E8M0)).any():
        raise ValueError(
            f"the scales of {fmt} are powers of two from 2^-127 on; scale= holds others"
        )
    if zero_point is None:
        points = np.zeros(values.shape, np.uint8)
    else:
        points = _zero_points(fmt, zero_point, values.shape)
    return reference.Calibration(values, points, global_scale)


def on_device(
    fmt: Format,
    stored: tuple[int, ...],
    scale: Any,
    zero_point: Any,
    global_scale: Any,
    backend: GpuBackend,
) -> Known:
    """The same for an array on a GPU.

    Numbers that are on the GPU themselves stay there: their shape and dtype are checked, their
    values are not, because that would wait for the device.
    """
    if scale is None and zero_point is None and global_scale is None:
        return Known()
    _check_use(fmt, scale, zero_point, global_scale)
    given = {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}
    resident = {name for name, value in given.items() if interop.is_on_gpu(value)}
    for name in resident:
        _check_resident(given[name], name, backend)
    host = {name: None if name in resident else value for name, value in given.items()}
    if "scale" in resident:  # a stand-in, so that the zero points beside it are checked
        host["scale"] = np.ones((), np.float32)
    if "global_scale" in resident:
        host["global_scale"] = 1.0
    checked = calibration(fmt, stored, host["scale"], host["zero_point"], host["global_scale"])
    if scale is None:
        return Known(global_scale=_found(global_scale, checked.global_scale))
    shape = fmt.rule.shape(stored)
    arrays = {"scale": checked.scale, "zero_point": checked.zero_point}
    dtypes = {"scale": np.dtype(np.float32), "zero_point": np.dtype(np.uint8)}
    for name, values in arrays.items():
        if name in resident:
            arrays[name] = _spread(given[name], shape, dtypes[name], name, backend)
        else:
            arrays[name] = _sent(given[name], values, backend)
    return Known(**arrays, global_scale=_found(global_scale, checked.global_scale))


def _found(given: Any, checked: float | None) -> Any:
    return given.reshape(()) if interop.is_on_gpu(given) else checked


def _check_resident(value: Any, name: str, backend: GpuBackend) -> None:
    kind, place = interop.kind(value), interop.device(value)
    if (kind, place) != (backend.kind, f"cuda:{backend.device}"):
        raise ValueError(
            f"{name} is a {kind} array on {place}; x is a {backend.kind} one on "
            f"cuda:{backend.device}"
        )
    dtype = interop.dtype_of(value)
    if dtype.kind not in "fiu" and dtype.name != "bfloat16":
        raise TypeError(f"{name} must be a numeric array, got {dtype}")
    if name == "zero_point" and dtype.kind not in "iu":
        raise ValueError("a zero_point on the GPU must be of an integer dtype")
    if name == "global_scale" and math.prod(value.shape) != 1:
        raise ValueError("global_scale must be one number")


def _spread(
    value: Any, shape: tuple[int, ...], dtype: np.dtype, name: str, backend: GpuBackend
) -> Any:
    try:
        fits = np.broadcast_shapes(tuple(value.shape), shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; the scales have shape {shape}")
    return backend.broadcast(value, shape, dtype)


def _sent(value: Any, checked: Any, backend: GpuBackend) -> Any:
    """Numbers of the host on the device, where one for all of them, or none, is written: a copy
    waits for the device, and breaks a CUDA graph's capture."""
    if math.prod(np.shape(value)) != 1:
        return backend.array(np.ascontiguousarray(checked))
    number = checked.reshape(-1)[0].item() if checked.size else 0
    return backend.broadcast(number, checked.shape, checked.dtype)


def _check_use(fmt: Format, scale: Any, zero_point: Any, global_scale: Any) -> None:
    """ValueError for numbers that the format does not have."""
    if global_scale is not None and (fmt.scale is None or fmt.scale.nested != "global"):
        raise ValueError(f"{fmt} has no global scale; nvfp4 does")
    if scale is None:
        if zero_point is not None:
            raise ValueError("zero_point= needs scale=, or leave both out for dynamic quantization")
        return
    if fmt.scale is None or fmt.is_blocks or fmt.scale.nested == "double":
        raise ValueError(f"{fmt} takes no scale=: it stores none that could be given")
    if fmt.offset == "min":
        raise ValueError(
            f"{fmt} takes no scale=, which says nothing of its minimums; leave it out, or pass a "
            "format with zero points"
        )
    if fmt.scale.nested == "global" and global_scale is None:
        raise ValueError(f"{fmt}: scale= needs global_scale= beside it")
    if zero_point is not None and fmt.offset != "zero_point":
        raise ValueError(f"{fmt} has no zero point; uint2..uint8 do")


def _stored(values: np.ndarray, dtype: str, global_scale: float | None) -> np.ndarray:
    """Scales as the dtype that stores them holds them; infinite where it cannot."""
    with np.errstate(over="ignore"):
        if dtype == "e4m3":
            return (values / np.float32(global_scale)).astype(ml_dtypes.float8_e4m3fn)
        return values.astype({**DTYPES, "e8m0": np.float32}[dtype])


def _broadcast(values: Any, shape: tuple[int, ...], name: str) -> np.ndarray:
    host = interop.to_numpy(values, name) if interop.kind(values) else np.asarray(values)
    if host.dtype.kind not in "fiu" and host.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be a number or a numeric array, got {host.dtype}")
    try:
        return np.broadcast_to(host, shape)
    except ValueError as error:
        raise ValueError(f"{name} has shape {host.shape}; the scales have shape {shape}") from error


def _zero_points(fmt: Format, zero_point: Any, shape: tuple[int, ...]) -> np.ndarray:
    assert isinstance(fmt.codec, Uniform)
    values = _broadcast(zero_point, shape, "zero_point")
    if values.dtype.kind not in "iu" and (np.asarray(values, np.float64) % 1 != 0).any():
        raise ValueError("zero_point must be integers")
    if values.size and not (values.min() >= 0 and values.max() <= fmt.codec.high):
        raise ValueError(f"zero_point must be in 0..{fmt.codec.high} for {fmt}")
    return values.astype(np.uint8)


def _global_scale(value: Any) -> float:
    number = np.asarray(interop.to_numpy(value, "global_scale") if interop.kind(value) else value)
    if number.size != 1 or number.dtype.kind not in "fiu":
        raise ValueError("global_scale must be one number")
    with np.errstate(over="ignore"):
        rounded = np.float32(number.reshape(())[()])
    if not (np.isfinite(rounded) and rounded > 0):
        raise ValueError(f"global_scale must be positive and finite in float32, got {value}")
    return float(rounded)
