"""Quantization to odd formats: what `quantize` makes of the plain one, and what lies beside it."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array import arranged
from cuquant.array.quant_array import QuantArray
from cuquant.formats import Format
from cuquant.gpu.arrays import backend_of
from cuquant.ops import geometry

Quantize = Callable[..., QuantArray]


def formats_of(fmt: Format) -> tuple[Format, ...]:
    """The plain formats that `quantize` makes arrays of, for an array of this one."""
    if fmt.scale is None or not fmt.scale.absmax:
        return (fmt.plain,)
    return fmt.plain, replace(fmt.plain, scale=replace(fmt.plain.rule, peak=1.0))


def quantized(
    quantize: Quantize, x: Any, fmt: Format, axis: int, out: QuantArray | None, given: dict
) -> QuantArray:
    """`quantize` of an array, whose `out` was checked; `given`: its other arguments."""
    if fmt.rule.absmax:
        return _with_absmax(quantize, x, fmt, axis, out, given)
    if fmt.permuted:
        return _in_order(quantize, x, fmt, axis, out, given)
    with backend_of(x, given["stream"]) if interop.is_on_gpu(x) else nullcontext():
        flat = _moved(x, axis).reshape(-1)
    made = quantize(flat, fmt.plain, out=None if out is None else arranged.plain(out), **given)
    if out is not None:
        return out
    order = geometry.axis_last(x.ndim, axis)
    axes = tuple(order.index(i) for i in range(x.ndim))
    return made._with(format=fmt, shape=tuple(x.shape), axes=axes)


def _moved(x: Any, axis: int) -> Any:
    if interop.kind(x) == "torch":
        return x.movedim(axis, -1)
    return interop.namespace(x).moveaxis(x, axis, -1)


def _in_order(
    quantize: Quantize, x: Any, fmt: Format, axis: int, out: QuantArray | None, given: dict
) -> QuantArray:
    """Columns stay where they are: the permutation is 0, 1, ..., K - 1."""
    inner = None
    if out is not None:
        parts = {k: v for k, v in out.components.items() if k != arranged.ORDER}
        inner = out._with(format=fmt.plain, components=parts)
    made = quantize(x, fmt.plain, axis=axis, out=inner, **given)
    order = np.arange(made.stored_shape[-1], dtype=np.int32)
    if out is None:
        kept = interop.like(order, next(iter(made.components.values())))
        return made._with(format=fmt, components={**made.components, arranged.ORDER: kept})
    _write(out, arranged.ORDER, interop.like(order, out.components[arranged.ORDER]), given)
    return out


def _with_absmax(
    quantize: Quantize, x: Any, fmt: Format, axis: int, out: QuantArray | None, given: dict
) -> QuantArray:
    """Codes by the scale absmax / 127; a scale to the peak 1 is absmax itself."""
    if given["scale"] is not None:
        raise ValueError("int8+absmax takes no scale=; pass it to int8")
    own, peak = formats_of(fmt)
    made = quantize(x, own, axis=axis, **given)
    policy = "clamp" if given["nonfinite"] == "clamp" else "propagate"
    absmax = quantize(x, peak, axis=axis, **{**given, "nonfinite": policy}).components["scale"]
    if out is None:
        return made._with(format=fmt, components={**made.components, "scale": absmax})
    _write(out, "packed", made.components["packed"], given)
    _write(out, "scale", absmax, given)
    return out


def _write(out: QuantArray, name: str, values: Any, given: dict) -> None:
    target = out.components[name]
    if out.device == "cpu":
        interop.to_numpy(target, name)[...] = interop.to_numpy(values, name)
        return
    with backend_of(target, given["stream"]) as backend:
        backend.copy_into(target, values)
    interop.mark_written(target)
