"""`quantize`: from values to a QuantArray."""

import secrets
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from cuquant import interop, reference
from cuquant.array.components import ArrayT
from cuquant.array.quant_array import QuantArray
from cuquant.errors import clipped
from cuquant.formats import Format, get_format
from cuquant.formats.names import FormatName, Nonfinite
from cuquant.gpu.arrays import backend_of
from cuquant.ops import geometry
from cuquant.ops.quantize import arranged
from cuquant.ops.quantize.given import calibration
from cuquant.ops.quantize.on_gpu import EncodeOnGpu


@interop.traced
def quantize(
    x: ArrayT | Sequence[Any],
    format: FormatName | str | Format = "nf4",
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
    nonfinite: Nonfinite = "propagate",
    out: QuantArray[ArrayT] | None = None,
    stream: object = None,
) -> QuantArray[ArrayT]:
    """Quantize an array.

    Parameters
    ----------
    x
        NumPy, CuPy or torch array of float32, float16 or bfloat16, any shape but 0-d, any strides.
        One on a GPU is quantized there, to the bytes that the CPU would make, without waiting.
        float64, integers, bools and lists of numbers are computed as float32, which is then the
        result's dtype; what is beyond its range is infinite, and `nonfinite` says what follows.
    format
        What `get_format` takes: a name, a string with options such as "nf4:32+dq", a Format.
    block_size
        Elements that share a scale: a multiple of 8, "row", "tensor" or a pair (rows, columns) for
        the last two axes; "flat" or "flat128": blocks over the flattened array, across rows. None:
        the format's own.
    axis
        Blocks run along this axis and never leave it.
    scale
        Effective scales found beforehand (static quantization), broadcastable to the shape of the
        scales. None: from the data (dynamic). Not 0 everywhere; negative only where scales carry
        a sign (int2..int7, k2..k8, bof4s). Values on a GPU, like those of `zero_point` and
        `global_scale`, are not checked, which would wait for them.
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
        index in x as counter. None: a fresh one. Without `stochastic` it is an error.
    nonfinite
        "propagate": a block with NaN or infinity becomes NaN; ggml_mxfp4 and ggml_nvfp4, which have
        no NaN, clamp. "raise": ValueError, also where a
        scale overflows its dtype, or is so small that a block's numbers are lost: one is wrong by
        as much as the largest of them; this waits for a GPU. "clamp": infinities saturate and NaN
        becomes 0.
    out
        A QuantArray of the same format, shape, dtype and device, whose arrays are overwritten.
    stream
        For an x on a GPU, where the kernels run: a CuPy or torch stream, or any object with
        `__cuda_stream__`. None: the current one of x's library.

    Returns
    -------
    QuantArray
        With components of the same kind as x.

    Raises
    ------
    TypeError
        For complex numbers, 8-bit floats and what is no array or list of numbers.
    ValueError
        For arguments that do not fit, before anything is written.
    BackendUnavailable, CompileError
        For an x on a GPU without CuPy or NVRTC, or where NVRTC rejects a kernel.
    RuntimeWarning
        For an x on the CPU with scales, found or given, that float16 (of nvfp4, e4m3) cannot hold:
        they saturate, and values do; ggml's blocks keep ggml's bytes and become infinite. Also for
        values that a format without scales cannot hold.
    RuntimeError
        For a kernel's first use while a CUDA graph is captured; `precompile` it.

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
    fmt = get_format(format, **format_options(block_size, levels, double_quant))
    if nonfinite not in reference.NONFINITE:
        raise ValueError(
            f"nonfinite must be one of {reference.NONFINITE}, got {clipped(nonfinite)}"
        )
    if stochastic and fmt.is_blocks:
        raise ValueError(
            f"{fmt.name} keeps ggml's bytes, which leave no room for stochastic rounding"
        )
    if seed is not None and not stochastic:
        raise ValueError("seed= is that of stochastic rounding; pass stochastic=True beside it")
    key = _seed(seed) if stochastic else 0
    given: Any = interop.as_array(x)
    on_gpu = interop.is_on_gpu(given)
    if not on_gpu:
        source = interop.as_float(interop.to_numpy(given))
    elif interop.dtype_of(given).name in interop.INPUT_DTYPES:
        source = given
    else:
        with backend_of(given, stream):
            given = source = interop.as_float(given)
    dtype = interop.dtype_of(source)
    axis = checked_axis(source, axis)
    order = geometry.axis_last(source.ndim, axis)
    shape = tuple(source.shape)
    stored = tuple(shape[i] for i in order)
    fmt.check_shape(stored)
    axes = tuple(order.index(i) for i in range(len(order)))
    result = partial(QuantArray, fmt, shape, dtype, axes=axes)
    if out is not None:
        check_out(out, fmt, shape, dtype, axes, given)
    if not fmt.is_plain:
        others = {
            "scale": scale,
            "zero_point": zero_point,
            "global_scale": global_scale,
            "stochastic": stochastic,
            "seed": seed,
            "nonfinite": nonfinite,
            "stream": stream,
        }
        return arranged.quantized(quantize, given, fmt, axis, out, others)
    if on_gpu:
        run = EncodeOnGpu(fmt, axis, bool(stochastic), key, nonfinite, out)
        parts = run(given, stored, scale, zero_point, global_scale, stream)
        if out is None:
            return result(components=parts)
        for part in out.components.values():
            interop.mark_written(part)
        return out
    interop.reject_stream(stream)
    known = calibration(fmt, stored, scale, zero_point, global_scale)
    saturated: list[int] = []
    how = {"stochastic": bool(stochastic), "seed": key, "nonfinite": nonfinite}
    parts = reference.quantize(source, fmt, axis, known, **how, saturates=saturated.append)
    if saturated:
        text = f"{sum(saturated)} {_saturation(fmt)}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)  # behind `untraced`
    if out is not None:
        for name, part in out.numpy().components.items():
            part[...] = parts[name]
        return out
    which = interop.kind(given) or "numpy"
    return result(components={n: interop.from_numpy(p, which) for n, p in parts.items()})


def _saturation(fmt: Format) -> str:
    """What is told of scales, or of values, that a format cannot hold."""
    wider = "rescale x, or pass a format with float32 scales, such as 'int4+float32'"
    if fmt.scale is None:
        return f"values of {fmt} are beyond its largest and saturate; rescale x"
    if fmt.is_blocks and fmt.layout.has_half_scale:
        return f"scales of {fmt} are beyond float16: blocks become infinite, as ggml's; {wider}"
    if fmt.scale.nested == "global":
        return f"scales of {fmt} are beyond e4m3: values saturate; pass a larger global_scale"
    what = "scales or minimums" if fmt.offset == "min" else "scales"
    return f"{what} of {fmt} are beyond {fmt.scale.dtype}: values saturate; {wider}"


def format_options(block_size: Any, levels: Any, double_quant: Any) -> dict[str, Any]:
    """The options of `get_format` that `quantize` was given."""
    dq = None if double_quant is False else double_quant  # a tensor is neither true nor false
    options = {"block_size": block_size, "levels": levels, "double_quant": dq}
    return {name: value for name, value in options.items() if value is not None}


def checked_axis(x: Any, axis: object) -> int:
    """`axis` counted from the first one."""
    if isinstance(axis, (bool, np.bool_)) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an int, got {clipped(axis)}")
    if x.ndim == 0:
        raise ValueError("x is 0-d; quantization needs at least one axis (x.reshape(1))")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} is outside x of shape {x.shape}")
    return int(axis) % x.ndim


def _seed(seed: object) -> int:
    if seed is None:
        return secrets.randbits(64)
    if isinstance(seed, (bool, np.bool_)) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an int, got {clipped(seed)}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in 0..2^64 - 1, got {seed}")
    return int(seed)


def check_out(
    out: QuantArray,
    fmt: Format,
    shape: tuple[int, ...],
    dtype: np.dtype,
    axes: tuple[int, ...],
    x: Any,
) -> None:
    """ValueError unless `out` is what this call makes, and lies beside x."""
    if not isinstance(out, QuantArray):
        raise TypeError(f"out must be a QuantArray, got {type(out).__name__}")
    wanted = (fmt, shape, dtype, axes, interop.kind(x), interop.device(x))
    came = (out.format, out.shape, out.dtype, out.axes, out.kind, out.device)
    names = ("format", "shape", "dtype", "axes", "kind", "device")
    for name, want, got in zip(names, wanted, came, strict=True):
        if want != got:
            raise ValueError(f"out has {name} {got}; this call gives {want}")
    for name, part in out.components.items():
        if not interop.is_writeable(part):
            raise ValueError(f"out's {name} is read-only")
        if interop.may_share_memory(part, x):
            raise ValueError(f"out's {name} overlaps x in memory")
