"""Quantization to odd formats: what `quantize` makes of the plain one, and what lies beside it."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array import arranged
from cuquant.array.quant_array import QuantArray
from cuquant.formats import Format
from cuquant.formats.format import Component
from cuquant.gpu.arrays import backend_of
from cuquant.ops import geometry

Quantize = Callable[..., QuantArray]


def formats_of(fmt: Format) -> tuple[Format, ...]:
    """The plain formats that `quantize` makes arrays of, for an array of this one."""
    if fmt.scale is None or not fmt.scale.absmax:
        return (fmt.usual if fmt.usual is not fmt else fmt.plain,)
    return fmt.plain, replace(fmt.plain, scale=replace(fmt.plain.rule, peak=1.0))


def quantized(
    quantize: Quantize, x: Any, fmt: Format, axis: int, out: QuantArray | None, given: dict
) -> QuantArray:
    """`quantize` of an array, whose `out` was checked; `given`: its other arguments."""
    if fmt.rule.absmax:
        return _with_absmax(quantize, x, fmt, axis, out, given)
    if fmt.usual is not fmt:
        return _with_global_scales(quantize, x, fmt, axis, out, given)
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


def _with_global_scales(
    quantize: Quantize, x: Any, fmt: Format, axis: int, out: QuantArray | None, given: dict
) -> QuantArray:
    """Matrices one by one, each with its number; of all, unless `per_matrix`, there is one."""
    with backend_of(x, given["stream"]) if interop.is_on_gpu(x) else nullcontext():
        moved = _moved(x, axis)
        stored = tuple(moved.shape)
        leading = stored[:-2] if fmt.rule.per_matrix else ()
        if leading and given["scale"] is not None:
            raise ValueError(f"{fmt} takes no scale=; pass it to {fmt.usual}, matrix by matrix")
        matrices = moved.reshape(math.prod(leading), *stored[-2:]) if leading else [moved]
        numbers = _numbers(given["global_scale"], leading, moved)
        made = [
            _with_global_scale(quantize, matrix, fmt, {**given, "global_scale": number})
            for matrix, number in zip(matrices, numbers, strict=True)
        ]
        parts = _stacked(made, fmt.components(stored), moved)
    if out is None:
        order = geometry.axis_last(x.ndim, axis)
        axes = tuple(order.index(i) for i in range(x.ndim))
        dtype = made[0].dtype if made else interop.dtype_of(x)
        return QuantArray(fmt, tuple(x.shape), dtype, parts, axes)
    for name, values in parts.items():
        _write(out, name, values, given)
    return out


def _numbers(given: Any, leading: tuple[int, ...], x: Any) -> list[Any]:
    """What was given as the global scale, for each matrix."""
    count = math.prod(leading)
    if given is None or not leading:
        return [given] * count
    if not interop.kind(given):
        given = np.asarray(given, np.float32)
    shape = tuple(given.shape)
    if shape not in ((), leading):
        raise ValueError(f"global_scale has shape {shape}; one number, or {leading}, is wanted")
    return [given] * count if not shape else list(given.reshape(-1))


def _with_global_scale(quantize: Quantize, matrix: Any, fmt: Format, given: dict) -> QuantArray:
    """One array with one number; codes are those of the number that values have."""
    own = fmt.usual
    if not fmt.rule.divisor:
        return quantize(matrix, own, **given)
    divisor = given["global_scale"]
    if divisor is None:
        found = quantize(matrix, own, **given).components["global_scale"]
        divisor = _within(arranged.reciprocal(found))
    elif interop.kind(divisor):
        divisor = interop.astype(divisor, np.float32)
    else:
        divisor = np.asarray(divisor, np.float32)
    made = quantize(matrix, own, **{**given, "global_scale": arranged.reciprocal(divisor)})
    near = made.components["global_scale"]
    if not interop.is_on_gpu(divisor):
        divisor = interop.like(interop.to_numpy(divisor, "global_scale"), near)
    parts = {**made.components, "global_scale": divisor.reshape(())}
    return made._with(components=parts)


def _within(divisor: Any) -> Any:
    """A divisor below infinity, which that of numbers below 1e-35 would be."""
    return interop.namespace(divisor).clip(divisor, None, float(np.finfo(np.float32).max))


def _stacked(made: list[QuantArray], wanted: tuple[Component, ...], like: Any) -> dict[str, Any]:
    """The components of all matrices, in the shapes that they have together."""
    if not made:
        return {c.name: interop.like(np.zeros(c.shape, c.dtype), like) for c in wanted}
    parts = {}
    for part in wanted:
        each = [q.components[part.name] for q in made]
        stacked = each[0] if len(each) == 1 else interop.namespace(each[0]).stack(each)
        parts[part.name] = stacked.reshape(part.shape)
    return parts


def _write(out: QuantArray, name: str, values: Any, given: dict) -> None:
    target = out.components[name]
    if out.device == "cpu":
        interop.to_numpy(target, name)[...] = interop.to_numpy(values, name)
        return
    with backend_of(target, given["stream"]) as backend:
        backend.copy_into(target, values)
    interop.mark_written(target)
