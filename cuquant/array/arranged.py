"""Arrays of odd formats, as the plain arrays that they store, and what must be done around these.

- permuted: column j of what is stored is column permutation[j] of the array.
- flat: blocks run over the flattened array; where they end with its rows, the bytes are those of a
  plain array of its shape.
- absmax: scales are absmax / 127; values are (code * absmax) / 127, in this order.
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

    Also of a PackedWeight, whose components but the permutation and absmax are a plain one's.
    """
    fmt, parts = q.format, dict(q.components)
    if fmt.is_plain:
        return q
    if fmt.is_flat:
        return q._with(format=fmt.plain, shape=(math.prod(q.shape),), axes=(0,))
    check_permutation(parts)
    parts.pop(ORDER, None)
    if fmt.rule.absmax:
        parts["scale"] = parts["scale"] * INVERSE_127.item()
    return q._with(format=fmt.plain, components=parts)


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
