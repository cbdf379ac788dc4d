"""All values of a prepacked weight, without rows of codes on the way: `PackedWeight.dequantize`."""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cuquant import interop
from cuquant.array.fragments import STRIP, Fragments
from cuquant.array.packed_weight import PackedWeight
from cuquant.formats import Format
from cuquant.gpu.arrays import backend_of, contiguous, current_backend
from cuquant.gpu.backend import Backend
from cuquant.gpu.view import View
from cuquant.ops.dequantize.on_gpu import check_out_of
from cuquant.ops.geometry import CHUNK
from cuquant.ops.layout.on_gpu import ALIGNMENT
from cuquant.ops.matmul.decoded import of_fragments
from cuquant.ops.matmul.prepared import ADDRESS
from cuquant.ops.remember import Remembered


@lru_cache(maxsize=1024)
def _matrix_of(fmt: Format, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The one weight [N, K] whose components and values lie as those of a weight of this shape;
    None where there is none, or its rows of values do not start on 16 bytes."""
    *experts, rows, depth = shape
    if not math.prod(shape) or depth % CHUNK or not fmt.is_plain:
        return None
    if not experts:
        return rows, depth
    whole = (experts[0] * rows, depth)
    block = fmt.rule.block
    tall = block[0] if isinstance(block, tuple) else 1
    same = [[math.prod(c.shape) for c in Fragments(fmt, s).components] for s in (shape, whole)]
    return whole if rows % math.lcm(STRIP, tall) == 0 and same[0] == same[1] else None


# Writes all values of a weight to an address.
Whole = Callable[[Backend, int], None]


def decode_to(
    backend: Backend, fmt: Format, parts: Mapping[str, Any], shape: tuple[int, ...], out: View
) -> Whole | None:
    """What wrote all values of a weight to `out`; None where nothing did: see `_matrix_of`."""
    matrix = _matrix_of(fmt, shape)
    if matrix is None or out.pointer % ALIGNMENT or not out.is_contiguous:
        return None
    decode, columns = of_fragments(backend, fmt, parts, matrix, out.dtype.name), matrix[0]

    def whole(backend: Backend, to: int) -> None:
        decode(backend, to, 0, 0, columns)

    whole(backend, out.pointer)
    return whole


class _Plan(NamedTuple):
    """How values were decoded; `run` holds addresses of the components, `places`.

    `format` must live as long, which a key names by identity.
    """

    format: Format
    places: tuple[int, ...]
    kind: str
    device: int
    run: Whole


_known: Remembered[dict[Any, _Plan]] = Remembered()  # by the components, then by `_key`


def _key(p: PackedWeight, dtype: np.dtype) -> Any:
    return id(p.format), p.shape, dtype


def _places(p: PackedWeight, kind: str) -> tuple[int, ...]:
    return tuple(map(ADDRESS[kind], p.components.values()))


def _again(p: PackedWeight, dtype: np.dtype) -> Any:
    """The values, as they were decoded before; None where they were not, or lay elsewhere."""
    plans = _known.get(p.components.values())
    plan = None if plans is None else plans.get(_key(p, dtype))
    if plan is None or plan.places != _places(p, plan.kind):
        return None
    backend = current_backend(plan.kind, plan.device)
    if backend is None:
        return None
    out = backend.empty(p.shape, dtype)
    plan.run(backend, ADDRESS[plan.kind](out))
    return out


@interop.untraced
def values(p: PackedWeight, dtype: object, out: Any) -> Any:
    """`p.dequantize(dtype, out=out)` on a GPU; None where its rows must be made first."""
    wanted = interop.float_dtype(p.dtype if dtype is None else dtype) if out is None else None
    made = None if wanted is None else _again(p, wanted)
    if made is not None:
        return made
    p.check()
    if out is not None:
        check_out_of(p, dtype, out)
    if _matrix_of(p.format, p.shape) is None:
        return None
    with backend_of(p.components["codes"]) as backend:
        target = out if wanted is None else backend.empty(p.shape, wanted)
        parts, view = contiguous(backend, p.components, ALIGNMENT), backend.view(target)
        run = decode_to(backend, p.format, parts, p.shape, view)
        if run is not None and all(part is p.components[name] for name, part in parts.items()):
            own = p.components.values()
            plans = _known.get(own) or _known.put(own, {})
            places = _places(p, backend.kind)
            plans[_key(p, view.dtype)] = _Plan(p.format, places, backend.kind, backend.device, run)
        return None if run is None else target
