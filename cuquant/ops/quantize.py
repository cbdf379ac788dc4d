"""`quantize`: from values to a QuantArray."""

import secrets
from typing import Any

import numpy as np

from cuquant import interop, reference
from cuquant.array import QuantArray
from cuquant.formats import Format, get_format
from cuquant.formats.codecs import Uniform


def quantize(
    x: Any,
    format: str | Format = "nf4",
    *,
    block_size: Any = None,
    axis: int = -1,
    scale: Any = None,
    zero_point: Any = None,
    global_scale: Any = None,
    levels: Any = None,
    double_quant: bool = False,
    stochastic: bool = False,
    seed: int | None = None,
    nonfinite: str = "propagate",
    out: QuantArray | None = None,
    stream: object = None,
) -> QuantArray:
    """Quantize an array.

    Parameters
    ----------
    x
        NumPy, CuPy or torch array of float32, float16 or bfloat16, any shape but 0-d, any strides.
    format
        A name of `list_formats()` or a Format from `get_format`.
    block_size
        Elements that share a scale: a multiple of 8, "row", "tensor" or a pair (rows, columns) for
        the last two axes. None: the format's own.
    axis
        Blocks run along this axis and never leave it.
    scale
        Effective scales found beforehand (static quantization), broadcastable to the shape of the
        scales. None: from the data (dynamic).
    zero_point
        With `scale`, for uint formats: the integer code of 0. None: 0, for data without negatives.
    global_scale
        nvfp4's float32 scale of the whole tensor. None: absmax / (6 * 448).
    levels
        k2..k8: "lloyd", "normal", "linear" or an array of 2 to 2^k ascending values.
    double_quant
        Store float32 scales as 8-bit codes in nested blocks of 256 (QLoRA).
    stochastic
        Round to one of the two neighbouring codes, with probabilities whose mean is x.
    seed
        Of the stochastic rounding, 0 to 2^64 - 1: Philox4x32-10 with the seed as key and the flat
        index in x as counter. None: a fresh one.
    nonfinite
        "propagate": a block with NaN or infinity becomes NaN. "raise": ValueError, also where a
        scale overflows its dtype. "clamp": infinities saturate and NaN becomes 0.
    out
        A QuantArray of the same format, shape, dtype and device, whose arrays are overwritten.
    stream
        For arrays on a GPU.

    Returns
    -------
    QuantArray
        With components of the same kind as x.

    Raises
    ------
    TypeError
        For another dtype or a value that is not an array.
    ValueError
        For arguments that do not fit, before anything is written.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> w = np.random.default_rng(0).standard_normal((256, 512), dtype=np.float32)
    >>> q = cq.quantize(w, "nf4", block_size=64)
    >>> q.bits_per_element
    4.5
    >>> round(cq.error(w, q).sqnr_db)
    21
    """
    fmt = get_format(format, **_options(block_size, levels, double_quant))
    if nonfinite not in reference.NONFINITE:
        raise ValueError(f"nonfinite must be one of {reference.NONFINITE}, got {nonfinite!r}")
    host = interop.to_numpy(x)
    interop.reject_stream(stream)
    dtype = interop.float_dtype(host.dtype, "x")
    axis = _axis(host, axis)
    moved = np.moveaxis(host, axis, -1)
    fmt.check_shape(moved.shape)
    given = _calibration(fmt, moved.shape, scale, zero_point, global_scale)
    if stochastic and fmt.is_blocks:
        raise ValueError(
            f"{fmt.name} keeps ggml's bytes, which leave no room for stochastic rounding"
        )
    key = _seed(seed) if stochastic else 0
    order = [*(i for i in range(host.ndim) if i != axis), axis]
    axes = tuple(int(i) for i in np.argsort(order))
    if out is not None:
        _check_out(out, fmt, host, axes, interop.kind(x))
    parts = reference.quantize(
        host, fmt, axis, given, stochastic=bool(stochastic), seed=key, nonfinite=nonfinite
    )
    if out is not None:
        for name, part in out.numpy().arrays().items():
            part[...] = parts[name]
        return out
    which = interop.kind(x) or "numpy"
    parts = {name: interop.from_numpy(part, which) for name, part in parts.items()}
    return QuantArray(fmt, host.shape, dtype, parts, axes)


def _options(block_size: Any, levels: Any, double_quant: Any) -> dict[str, Any]:
    options = {"block_size": block_size, "levels": levels, "double_quant": double_quant or None}
    return {name: value for name, value in options.items() if value is not None}


def _axis(x: np.ndarray, axis: object) -> int:
    if isinstance(axis, (bool, np.bool_)) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an int, got {axis!r}")
    if x.ndim == 0:
        raise ValueError("x is 0-d; quantization needs at least one axis (x.reshape(1))")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} is outside x of shape {x.shape}")
    return int(axis) % x.ndim


def _seed(seed: object) -> int:
    if seed is None:
        return secrets.randbits(64)
    if isinstance(seed, (bool, np.bool_)) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in 0..2^64 - 1, got {seed}")
    return int(seed)


def _calibration(
    fmt: Format, stored: tuple[int, ...], scale: Any, zero_point: Any, global_scale: Any
) -> reference.Calibration:
    """The given numbers, checked and broadcast to the shape of the format's scales."""
    if global_scale is not None:
        global_scale = _global_scale(fmt, global_scale)
    if scale is None:
        if zero_point is not None:
            raise ValueError("zero_point= needs scale=, or leave both out for dynamic quantization")
        return reference.Calibration(global_scale=global_scale)
    if fmt.scale is None or fmt.is_blocks or fmt.scale.nested == "double":
        raise ValueError(f"{fmt} takes no scale=: it stores none that could be given")
    if fmt.scale.nested == "global" and global_scale is None:
        raise ValueError(f"{fmt}: scale= needs global_scale= beside it")
    values = _broadcast(scale, fmt.scale.shape(stored), "scale").astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("scale= must be finite")
    if fmt.scale.dtype in ("e8m0", "e4m3") and (values < 0).any():
        raise ValueError(f"the scales of {fmt} have no sign; scale= must not be negative")
    if fmt.scale.dtype == "e8m0" and (np.frexp(values)[0] != 0.5).any():
        raise ValueError(f"the scales of {fmt} are powers of two; scale= holds others")
    if zero_point is None:
        points = np.zeros(values.shape, np.uint8)
    else:
        points = _zero_points(fmt, zero_point, values.shape)
    return reference.Calibration(values, points, global_scale)


def _broadcast(values: Any, shape: tuple[int, ...], name: str) -> np.ndarray:
    host = interop.to_numpy(values, name) if interop.kind(values) else np.asarray(values)
    if host.dtype.kind not in "fiu" and host.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be a number or a numeric array, got {host.dtype}")
    try:
        return np.broadcast_to(host, shape)
    except ValueError as error:
        raise ValueError(f"{name} has shape {host.shape}; the scales have shape {shape}") from error


def _zero_points(fmt: Format, zero_point: Any, shape: tuple[int, ...]) -> np.ndarray:
    if fmt.offset != "zero_point" or not isinstance(fmt.codec, Uniform):
        raise ValueError(f"{fmt} has no zero point; uint2..uint8 do")
    values = _broadcast(zero_point, shape, "zero_point")
    if values.dtype.kind not in "iu" and (np.asarray(values, np.float64) % 1 != 0).any():
        raise ValueError("zero_point must be integers")
    if values.size and not (values.min() >= 0 and values.max() <= fmt.codec.high):
        raise ValueError(f"zero_point must be in 0..{fmt.codec.high} for {fmt}")
    return values.astype(np.uint8)


def _global_scale(fmt: Format, value: Any) -> float:
    if fmt.scale is None or fmt.scale.nested != "global":
        raise ValueError(f"{fmt} has no global scale; nvfp4 does")
    number = np.asarray(interop.to_numpy(value, "global_scale") if interop.kind(value) else value)
    if number.size != 1 or number.dtype.kind not in "fiu":
        raise ValueError("global_scale must be one number")
    rounded = np.float32(number.reshape(())[()])
    if not (np.isfinite(rounded) and rounded > 0):
        raise ValueError(f"global_scale must be positive and finite in float32, got {value}")
    return float(rounded)


def _check_out(
    out: QuantArray, fmt: Format, x: np.ndarray, axes: tuple[int, ...], which: str | None
) -> None:
    if not isinstance(out, QuantArray):
        raise TypeError(f"out must be a QuantArray, got {type(out).__name__}")
    wanted = (fmt, x.shape, x.dtype, axes, which)
    came = (out.format, out.shape, out.dtype, out.axes, out.kind)
    for name, want, got in zip(
        ("format", "shape", "dtype", "axes", "kind"), wanted, came, strict=True
    ):
        if want != got:
            raise ValueError(f"out has {name} {got}; this call gives {want}")
    for name, part in out.numpy().arrays().items():
        if not part.flags.writeable:
            raise ValueError(f"out's {name} is read-only")
        if np.may_share_memory(part, x):
            raise ValueError(f"out's {name} overlaps x in memory")
