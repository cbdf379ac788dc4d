"""Arrays of odd formats, as the plain arrays that they store, and what must be done around these.

- permuted: column j of what is stored is column permutation[j] of the array.
- flat: blocks run over the flattened array; where they end with its rows, the bytes are those of a
  plain array of its shape.
- absmax: scales are absmax / 127; values are (code * absmax) / 127, in this order.
- divisor: values are code * (scale / divisor), which products take as scale * (1 / divisor).
- per_matrix: a global scale for each matrix, which becomes one with the scales of its blocks.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cuquant import interop
from cuquant.errors import FormatError
from cuquant.formats import Format
from cuquant.formats.scales import INVERSE_127

if TYPE_CHECKING:
    from cuquant.array.packed_weight import PackedWeight
    from cuquant.array.quant_array import QuantArray

    S = TypeVar("S", bound=QuantArray | PackedWeight)

ORDER = "permutation"


def check_permutation(parts: Mapping[str, Any]) -> None:
    """FormatError where a permutation on the CPU does not name each column once."""
    found = parts.get(ORDER)
    if found is None or interop.is_on_gpu(found):  # which would be waited for
        return
    order = interop.to_numpy(found, ORDER)
    if not order.size:
        return
    if order.min() < 0 or order.max() >= order.size:
        raise FormatError(
            f"{ORDER} holds {order.min()}..{order.max()}; columns are 0..{order.size - 1}"
        )
    seen = np.zeros(order.size, bool)
    seen[order] = True
    if not seen.all():
        raise FormatError(f"{ORDER} does not name column {int(np.argmin(seen))}, and another twice")


def plain(q: "S") -> "S":
    """The plain array that an odd one stores: columns as they lie; one axis where it is flat.

    Also of a PackedWeight, whose components but those of its options are a plain one's; it is never
    `per_matrix` in another layout than rows. Of a divisor it has the reciprocal, which is rounded:
    products stay those of nvfp4, and one global scale in ten is off by one unit in the last place.
    """
    fmt, parts = q.format, dict(q.components)
    if fmt.is_plain:
        return q
    if fmt.rule.per_matrix:
        return exact(q)  # type: ignore[arg-type, return-value]
    if fmt.is_flat:
        return q._with(format=fmt.plain, shape=(math.prod(q.shape),), axes=(0,))
    check_permutation(parts)
    parts.pop(ORDER, None)
    if fmt.rule.absmax:
        parts["scale"] = scales_of(parts["scale"])
    if fmt.rule.divisor:
        parts["global_scale"] = reciprocal(parts["global_scale"])
    return q._with(format=fmt.plain, components=parts)


def exact(q: "QuantArray[Any]") -> "QuantArray[Any]":
    """The plain array that has the values of an odd one bit for bit, but for absmax: with a divisor
    or per_matrix, codes with the float32 scales of blocks."""
    fmt = q.format
    if fmt.usual is fmt:
        return plain(q)
    world = q.components["global_scale"]
    xp = interop.namespace(world)
    one = xp.prod(xp.ones_like(world))  # where the scales are, without a copy from the host
    parts = {**q.components, "global_scale": np.asarray(one) if xp is np else one}
    scale = q._with(format=fmt.usual, components=parts).scale
    spread = world.reshape(*world.shape, 1, 1) if len(q.shape) > 1 else world
    with np.errstate(all="ignore"):
        made = scale / spread if fmt.rule.divisor else _product(scale, spread)
    return q._with(format=fmt.exact, components={"packed": parts["packed"], "scale": made})


def _product(scale: Any, world: Any) -> Any:
    """Finite scales times finite global ones, which are finite, as those of nvfp4 are."""
    xp = interop.namespace(scale)
    made, top = scale * world, float(np.finfo(np.float32).max)
    finite = xp.isfinite(scale) & xp.isfinite(world)
    return xp.where(finite, xp.clip(made, -top, top), made)


def reciprocal(number: Any, out: Any = None) -> Any:
    """1 / number in float32, of a global scale or a divisor: one is infinite where the other is 0.

    >>> reciprocal(np.array(4, np.float32))
    array(0.25, dtype=float32)
    """
    xp = interop.namespace(number)
    with np.errstate(all="ignore"):
        made = xp.reciprocal(number, out=out)
    return np.asarray(made) if xp is np else made


def scales_of(absmax: Any, out: Any = None) -> Any:
    """absmax / 127 in float32, as LLM.int8() has it: times 1 / 127.

    >>> scales_of(np.array([127], np.float32))
    array([1.], dtype=float32)
    """
    return interop.namespace(absmax).multiply(absmax, INVERSE_127.item(), out=out)


def ends_with_rows(fmt: Format, stored: tuple[int, ...]) -> bool:
    """Whether the bytes of a flat array are those of a plain one of its shape."""
    columns, size = stored[-1], fmt.rule.flat
    rows = math.prod(stored[:-1])
    if size is None or rows <= 1:
        return size is not None
    return bool(columns) and columns % size == 0 and fmt.plain.row_packing.splits_at(columns)


def in_rows(q: "QuantArray[Any]") -> "QuantArray[Any] | None":
    """The plain array of q's own shape with the same components; None where there is none."""
    if not q.format.is_flat:
        return plain(q)
    if not ends_with_rows(q.format, q.stored_shape):
        return None
    return q._with(format=q.format.plain, components=reshaped(q, q.format.plain))


def reshaped(q: "QuantArray[Any]", fmt: Format) -> dict[str, Any]:
    """Components in the shapes that another format of the same bytes has."""
    wanted = fmt.components(q.stored_shape)
    return {part.name: q.components[part.name].reshape(part.shape) for part in wanted}


def gathered(array: Any, order: Any, axis: int) -> Any:
    """array[..., order, ...] along an axis, in the array's library."""
    kind = interop.kind(array)
    if kind == "torch":
        order = order if interop.kind(order) == "torch" else interop.like(order, array)
        return array.index_select(axis, order)
    if kind == "numpy":
        return np.take(array, interop.to_numpy(order, ORDER), axis)
    bits = np.dtype(f"u{array.dtype.itemsize}")  # CuPy gathers no bfloat16
    return interop.namespace(array).take(array.view(bits), order, axis).view(array.dtype)


def from_stored(q: "QuantArray[Any]", values: Any) -> Any:
    """Values, or codes, of `plain(q)` as those of q."""
    if q.format.is_flat:
        return in_axes(q, values.reshape(q.stored_shape))
    if not q.format.permuted:
        return values
    return gathered(values, q.components[ORDER].argsort(), q.axis)


def in_axes(q: "QuantArray[Any]", stored: Any) -> Any:
    """An array that lies as q is stored, [rows..., K], with q's axes."""
    return stored.permute(q.axes) if interop.kind(stored) == "torch" else stored.transpose(q.axes)


def absmax_values(q: "QuantArray[Any]") -> Any:
    """float32 values of an array with absmax, as it is stored: (code * absmax) / 127.

    Where the first product is beyond float32 the second comes first: values stay finite.
    """
    codes = interop.astype(q.components["packed"], np.float32)
    absmax, xp = q.components["scale"], interop.namespace(codes)
    with np.errstate(all="ignore"):
        product = codes * absmax
        near = codes * (absmax * INVERSE_127.item())
        values = xp.where(xp.isinf(product), near, product * INVERSE_127.item())
        return values + 0.0  # no -0.0, which integers do not have
