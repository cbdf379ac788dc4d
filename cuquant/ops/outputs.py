"""`out=`: the checks of an array that a result is written to, the same on the CPU and on a GPU."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from cuquant import interop


def check_out(
    out: Any,
    shape: tuple[int, ...],
    dtype: object,
    sources: Iterable[Any],
    *,
    integers: bool = False,
) -> np.dtype:
    """The dtype of `out`, once it is known that a result of this shape can be written there.

    Parameters
    ----------
    dtype
        What the caller asks for beside `out`, or None: any that floats have.
    sources
        Arrays that are read while the result is written.
    integers
        Whether `dtype` is an integer's, which the result has.

    Raises
    ------
    TypeError
        For a dtype that no result has.
    ValueError
        Where shape or dtype differ, it is read-only, holds an element more than once, is a view
        that torch negates when it is read, or shares memory with a source.
    RuntimeError
        Where torch would expect a gradient to flow through it.
    """
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}; the result has shape {shape}")
    found, of = interop.dtype_of(out), interop.numpy_dtype if integers else interop.float_dtype
    wanted = None if dtype is None else of(dtype)
    found = found if integers else interop.float_dtype(found, "out")
    if wanted is not None and wanted != found:
        raise ValueError(f"out has dtype {found}, but {dtype} is asked for")
    if any(interop.shares_memory(out, source) for source in sources):
        raise ValueError("out overlaps an input in memory")
    if not interop.is_writeable(out):
        raise ValueError("out is read-only")
    if interop.is_negated(out):
        raise ValueError("out is a view that torch negates when it is read; pass another one")
    interop.refuse_gradient(out, "out")
    if interop.overlaps_itself(out):
        raise ValueError("out holds an element more than once; pass one that was not expanded")
    interop.mark_written(out)
    return found


def writable_out(
    out: Any,
    shape: tuple[int, ...],
    kind: str | None,
    dtype: object,
    sources: Iterable[Any],
    *,
    integers: bool = False,
) -> np.ndarray:
    """An `out` on the CPU as a NumPy array, after `check_out`; it must be of this kind."""
    if interop.kind(out) != kind:
        raise TypeError(f"out must be a {kind} array, got {type(out).__name__}")
    target = interop.to_numpy(out, "out")
    check_out(out, shape, dtype, sources, integers=integers)
    return target
