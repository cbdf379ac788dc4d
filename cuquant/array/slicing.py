"""Slices and concatenations of quantized arrays, on their components, without decoding a value.

Everything here speaks of the stored layout [rows..., K]. Double-quantized scales belong to nested
blocks that a slice would cut: they are replaced by the float32 scales they decode to.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cuquant import interop, reference
from cuquant.array.arranged import ORDER, ends_with_rows
from cuquant.formats import Format, get_format
from cuquant.formats.scales import FLAT

Parts = dict[str, Any]
State = tuple[Format, Parts, tuple[int, ...]]

PER_BLOCK = ("scale", "zero_point", "minimum")


def take(
    fmt: Format, parts: Mapping[str, Any], stored: tuple[int, ...], index: Sequence[Any]
) -> State:
    """The part of an array that `index` names: one int, slice or int array per stored axis."""
    which = _kind(parts)
    _check_matrices(fmt, index)
    if fmt.permuted:
        return _take_permuted(fmt, parts, stored, index)
    if fmt.is_flat:
        return _take_flat(fmt, parts, stored, index)
    fmt, parts = flatten_nested(fmt, _local(parts), stored)
    *rows, columns = index
    start, stop, step = columns.indices(stored[-1])
    if step != 1:
        raise ValueError("the quantized axis can only be sliced with step 1")
    stop = max(start, stop)
    _check_rows(fmt, stored, rows)
    if (start, stop) != (0, stored[-1]):
        parts = _take_columns(fmt, parts, stored, start, stop)
    shape = np.empty((*stored[:-1], 0), np.int8)[tuple(rows)].shape[:-1]  # takes no memory
    taken_as = _format_of_row(fmt) if not shape else fmt
    if fmt.scale is not None and fmt.scale.per_matrix and len(shape) < 2:
        taken_as = get_format(taken_as, per_matrix=False)
    taken = {name: _take_rows(fmt, name, part, stored, tuple(rows)) for name, part in parts.items()}
    return taken_as, _fresh(taken, which), (*shape, stop - start)


def _take_permuted(
    fmt: Format, parts: Mapping[str, Any], stored: tuple[int, ...], index: Sequence[Any]
) -> State:
    """Rows, with the permutation beside them: columns of one slice lie anywhere."""
    if index[-1].indices(stored[-1]) != (0, stored[-1], 1):
        raise ValueError(
            f"the columns of {fmt} are stored in another order and cannot be sliced; slice rows, "
            "or the values of q.dequantize()"
        )
    held = {name: part for name, part in parts.items() if name != ORDER}
    made, taken, shape = take(fmt.plain, held, stored, index)
    return get_format(made, permuted=True), {**taken, ORDER: interop.copied(parts[ORDER])}, shape


def _take_flat(
    fmt: Format, parts: Mapping[str, Any], stored: tuple[int, ...], index: Sequence[Any]
) -> State:
    """Whole blocks of the flattened array; any rows where blocks end with these."""
    if ends_with_rows(fmt, stored):
        held = {c.name: parts[c.name].reshape(c.shape) for c in fmt.plain.components(stored)}
        made, taken, shape = take(fmt.plain, held, stored, index)
        made = _flat(made)
        if not ends_with_rows(made, shape):
            raise ValueError(f"{shape[-1]} codes of {fmt} do not fill whole words")
        return made, {c.name: taken[c.name].reshape(c.shape) for c in made.components(shape)}, shape
    first, *others = index
    whole = all(
        isinstance(entry, slice) and entry.indices(extent) == (0, extent, 1)
        for entry, extent in zip(others, stored[1:], strict=True)
    )
    if isinstance(first, slice):
        start, stop, step = first.indices(stored[0])
        shape = (max(stop - start, 0), *stored[1:])
    else:
        step, whole = 1, whole and not isinstance(first, np.ndarray)
        start = int(first) % stored[0] if whole else 0
        stop, shape = start + 1, stored[1:]
    row, total = math.prod(stored[1:]), math.prod(stored)
    size = fmt.rule.flat or 1
    begin, end = (start * row, stop * row) if stop > start else (0, 0)
    if not whole or step != 1 or begin % size or (end % size and end != total):
        raise ValueError(
            f"blocks of {size} run across rows of {stored[-1]}: {fmt} is sliced along its first "
            f"axis at multiples of {size // math.gcd(size, row)}; or slice q.dequantize()"
        )
    made, taken, _ = take(fmt.plain, parts, (total,), (slice(begin, end),))
    return _flat(made), taken, shape


def _flat(fmt: Format) -> Format:
    """The format with its blocks over the flattened array."""
    block: Any = f"{FLAT}{fmt.rule.block}"
    return get_format(fmt, block_size=block)


def _format_of_row(fmt: Format) -> Format:
    """That of one row alone, which has no blocks of several axes."""
    block = None if fmt.scale is None else fmt.scale.block
    if not isinstance(block, tuple):
        return fmt
    if block[1] % 8:
        raise ValueError(f"one row of {fmt} has no format: slice it, as in q[i : i + 1]")
    return get_format(fmt, block_size=block[1])


def _kind(parts: Mapping[str, Any]) -> str:
    return interop.kind(next(iter(parts.values()))) or "numpy"


def _local(parts: Mapping[str, Any]) -> Parts:
    """Components as arrays that slice like NumPy's: those on the CPU as NumPy views."""
    return {
        name: interop.to_numpy(part, name) if interop.device(part) == "cpu" else part
        for name, part in parts.items()
    }


def _fresh(parts: Mapping[str, Any], which: str) -> Parts:
    """Components in memory of their own, so that writing to them changes no other array."""
    return {
        name: interop.from_numpy(reference.aligned(part, copy=True), which)
        if isinstance(part, np.ndarray)
        else interop.copied(part)
        for name, part in parts.items()
    }


def flatten_nested(
    fmt: Format, parts: Mapping[str, Any], stored: tuple[int, ...]
) -> tuple[Format, Parts]:
    """Double-quantized scales as the float32 ones they stand for; anything else as it is."""
    parts = dict(parts)
    if fmt.scale is None or fmt.scale.nested != "double":
        return fmt, parts
    host = {name: interop.to_host(part, name) for name, part in parts.items()}
    scale = np.asarray(reference.effective(host, fmt, stored).scale)
    kept = {name: part for name, part in parts.items() if not name.startswith("nested_")}
    kept["scale"] = interop.like(scale, parts["packed"])
    return get_format(fmt, double_quant=False), kept


def _check_matrices(fmt: Format, index: Sequence[Any]) -> None:
    """ValueError where rows of several matrices, each with a global scale, would be one."""
    if fmt.scale is None or not fmt.scale.per_matrix or len(index) < 3:
        return
    *matrices, rows, _ = index
    if isinstance(rows, slice) or all(isinstance(entry, int) for entry in matrices):
        return
    if isinstance(rows, int) or any(not isinstance(entry, slice) for entry in matrices):
        raise ValueError(f"{fmt} has a global scale for each matrix: take one first, as in q[0][i]")


def _check_rows(fmt: Format, stored: tuple[int, ...], rows: Sequence[Any]) -> None:
    if fmt.scale is None or not isinstance(fmt.scale.block, tuple):
        return
    tall = fmt.scale.block[0]
    if tall == 1:
        return
    height = rows[-1]
    if not isinstance(height, slice):
        raise ValueError(f"rows share scales in blocks of {tall}; slice them, do not index")
    start, stop, step = height.indices(stored[-2])
    if step != 1 or start % tall or (stop % tall and stop != stored[-2]):
        raise ValueError(f"rows can only be sliced on block boundaries, multiples of {tall}")


def _take_rows(
    fmt: Format, name: str, part: Any, stored: tuple[int, ...], rows: tuple[Any, ...]
) -> Any:
    if name in PER_BLOCK:
        block = fmt.rule.block
        if block == "tensor":
            return part
        if isinstance(block, tuple) and block[0] > 1:
            tall = block[0]
            start, stop, _ = rows[-1].indices(stored[-2])
            rows = (*rows[:-1], slice(start // tall, max(start // tall, -(-stop // tall))))
    elif name == "global_scale":
        if not fmt.rule.per_matrix or not rows[:-1]:
            return part
        rows = rows[:-1]
    return _indexed(part, rows) if interop.kind(part) == "torch" else part[rows]


def _indexed(part: Any, rows: tuple[Any, ...]) -> Any:
    """part[rows] of a torch tensor on a GPU: torch steps forward only and indexes no uint32."""
    dtype, taken, index = interop.dtype_of(part), interop.to_pickle(part), list(rows)
    for axis, entry in enumerate(rows):
        if not isinstance(entry, slice):
            continue
        steps = range(*entry.indices(part.shape[axis]))
        if steps.step < 0:
            forward = slice(steps[-1], steps[0] + 1, -steps.step) if steps else slice(0, 0)
            taken = taken[(slice(None),) * axis + (forward,)].flip(axis)
            index[axis] = slice(None)
    return interop.from_pickle(taken[tuple(index)], dtype)


def _take_columns(
    fmt: Format, parts: Parts, stored: tuple[int, ...], start: int, stop: int
) -> Parts:
    if fmt.is_blocks:
        size = fmt.layout.elements
        _check_boundary(fmt, stored, start, stop, size)
        return {"blocks": parts["blocks"][..., start // size : stop // size, :]}
    parts = dict(parts)
    wide = _block_width(fmt)
    if wide:
        _check_boundary(fmt, stored, start, stop, wide)
        for name in PER_BLOCK:
            if name in parts:
                parts[name] = parts[name][..., start // wide : -(-stop // wide)]
    packing = fmt.row_packing
    if packing.splits_at(start) and (stop == stored[-1] or packing.splits_at(stop)):
        parts["packed"] = parts["packed"][..., packing.words(start) : packing.words(stop)]
    else:
        parts["packed"] = _repack(fmt, [_codes(fmt, parts, stored)[..., start:stop]], parts)
    return parts


def _block_width(fmt: Format) -> int | None:
    """Columns of a block; None where a row or the whole array has one scale, or none."""
    if fmt.scale is None or isinstance(fmt.scale.block, str):
        return None
    return fmt.scale.block[1] if isinstance(fmt.scale.block, tuple) else fmt.scale.block


def _check_boundary(fmt: Format, stored: tuple[int, ...], start: int, stop: int, size: int) -> None:
    if start % size or (stop % size and stop != stored[-1]):
        raise ValueError(
            f"{fmt.name} has blocks of {size} along its quantized axis of {stored[-1]}; "
            f"{start}:{stop} is not on block boundaries"
        )


def _codes(fmt: Format, parts: Parts, stored: tuple[int, ...]) -> np.ndarray:
    host = {"packed": interop.to_host(parts["packed"], "packed")}
    return reference.codes(host, fmt, stored)


def _repack(fmt: Format, codes: Sequence[np.ndarray], parts: Parts) -> Any:
    joined = np.concatenate(codes, axis=-1)
    rows = joined.reshape(math.prod(joined.shape[:-1]), joined.shape[-1])
    packed = fmt.row_packing.pack(np.ascontiguousarray(rows), fmt.zero_code)
    packed = packed.reshape(*joined.shape[:-1], packed.shape[-1])
    return interop.like(np.ascontiguousarray(packed), parts["packed"])


def join(states: Sequence[State], axis: int) -> State:
    """Arrays of one format, one after the other along the stored axis `axis` (not negative)."""
    which = _kind(states[0][1])
    if states[0][0].permuted or states[0][0].is_flat:
        return _join_odd(states, axis)
    states = [(*flatten_nested(f, _local(p), s), s) for f, p, s in states]
    fmt, first, shape = states[0]
    for other, _, stored in states[1:]:
        _check_alike(fmt, shape, other, stored, axis)
    _check_shared(fmt, [parts for _, parts, _ in states], axis, len(shape))
    total = sum(stored[axis] for _, _, stored in states)
    stored = (*shape[:axis], total, *shape[axis + 1 :])
    if axis == len(shape) - 1:
        return fmt, _fresh(_join_columns(fmt, states), which), stored
    if fmt.scale and isinstance(fmt.scale.block, tuple) and axis == len(shape) - 2:
        _check_extents(fmt, [s[axis] for _, _, s in states], fmt.scale.block[0])
    alone = set(_shared(fmt, first, axis, len(shape)))
    joined = {
        name: part if name in alone else _concatenate([p[name] for _, p, _ in states], axis)
        for name, part in first.items()
    }
    return fmt, _fresh(joined, which), stored


def _join_odd(states: Sequence[State], axis: int) -> State:
    """Rows with one permutation; flat arrays end to end where all but the last are whole blocks."""
    fmt, first, shape = states[0]
    for other, _, stored in states[1:]:
        _check_alike(fmt, shape, other, stored, axis)
    if fmt.permuted:
        if axis == len(shape) - 1 or any(_differ(p[ORDER], first[ORDER]) for _, p, _ in states):
            raise ValueError(f"{fmt} joins rows of one permutation; dequantize the arrays first")
        held = [(f.plain, {k: v for k, v in p.items() if k != ORDER}, s) for f, p, s in states]
        made, parts, stored = join(held, axis)
        parts[ORDER] = interop.copied(first[ORDER])
        return get_format(made, permuted=True), parts, stored
    sizes = [math.prod(stored) for _, _, stored in states]
    if axis or any(size % (fmt.rule.flat or 1) for size in sizes[:-1]):
        raise ValueError(
            f"{fmt} is joined along its first axis, of arrays that are whole blocks of "
            f"{fmt.rule.flat}; dequantize the arrays first"
        )
    flat = [(f.plain, p, (size,)) for (f, p, _), size in zip(states, sizes, strict=True)]
    made, parts, _ = join(flat, 0)
    total = sum(stored[0] for _, _, stored in states)
    return _flat(made), parts, (total, *shape[1:])


def _check_alike(
    fmt: Format, shape: tuple[int, ...], other: Format, stored: tuple[int, ...], axis: int
) -> None:
    if other != fmt:
        raise ValueError(f"cannot concatenate {fmt} with {other}; the formats must be equal")
    if stored[:axis] + stored[axis + 1 :] != shape[:axis] + shape[axis + 1 :]:
        raise ValueError(f"cannot concatenate shapes {shape} and {stored} along axis {axis}")


def _shared(fmt: Format, parts: Parts, axis: int, ndim: int) -> list[str]:
    """Components that arrays joined along an axis share: a tensor's or nvfp4's global scale."""
    if fmt.scale is None:
        return []
    is_own = fmt.scale.per_matrix and axis < ndim - 2
    shared = ["global_scale"] if "global_scale" in parts and not is_own else []
    return shared + [n for n in PER_BLOCK if fmt.scale.block == "tensor" and n in parts]


def _check_shared(fmt: Format, parts: Sequence[Parts], axis: int, ndim: int) -> None:
    """What all the arrays share must be equal, such as a row's scale along the row."""
    shared = _shared(fmt, parts[0], axis, ndim)
    if fmt.scale and fmt.scale.block == "row" and axis == ndim - 1:
        shared += [name for name in PER_BLOCK if name in parts[0]]
    for name in shared:
        if any(_differ(part[name], parts[0][name]) for part in parts[1:]):
            raise ValueError(
                f"the arrays have different values of {name}, which {fmt} shares along this axis; "
                f"quantize them with one {name}="
            )


def _differ(a: Any, b: Any) -> bool:
    """Whether any entries differ; a NaN equals a NaN."""
    return bool(((a != b) & ((a == a) | (b == b))).any())


def _check_extents(fmt: Format, extents: Sequence[int], size: int) -> None:
    if any(extent % size for extent in extents[:-1]):
        raise ValueError(
            f"{fmt} has blocks of {size} there; only the last array may end inside one"
        )


def _join_columns(fmt: Format, states: Sequence[State]) -> Parts:
    if fmt.is_blocks:
        return {"blocks": _concatenate([parts["blocks"] for _, parts, _ in states], -2)}
    extents = [stored[-1] for _, _, stored in states]
    wide = _block_width(fmt)
    if wide:
        _check_extents(fmt, extents, wide)
    joined = dict(states[0][1])
    for name in PER_BLOCK:
        if wide and name in joined:
            joined[name] = _concatenate([parts[name] for _, parts, _ in states], -1)
    if all(fmt.row_packing.splits_at(extent) for extent in extents[:-1]):
        joined["packed"] = _concatenate([parts["packed"] for _, parts, _ in states], -1)
    else:
        codes = [_codes(*state) for state in states]
        joined["packed"] = _repack(fmt, codes, joined)
    return joined


def _concatenate(arrays: Sequence[Any], axis: int) -> Any:
    parts = [interop.to_pickle(part) for part in arrays]  # torch joins no uint32 on a GPU
    joined = interop.namespace(parts[0]).concatenate(parts, axis)
    return interop.from_pickle(joined, interop.dtype_of(arrays[0]))
