"""Where an array's elements lie: order, addresses, and what they share with others."""

from typing import Any

import numpy as np

from cuquant.interop.arrays import dtype_of, kind

MOST_WORK = 1 << 16  # of NumPy, to find out whether strided arrays meet


def is_contiguous(x: Any) -> bool:
    """Whether an array's elements follow each other in C order."""
    return x.is_contiguous() if kind(x) == "torch" else bool(x.flags.c_contiguous)


def read_only(x: Any) -> Any:
    """A view of a NumPy array that cannot be written to; other libraries have none."""
    if kind(x) != "numpy" or not x.flags.writeable:
        return x
    view = x.view()
    view.flags.writeable = False
    return view


def is_writeable(x: Any) -> bool:
    """Whether an array may be written to; only NumPy's can be read-only."""
    return kind(x) != "numpy" or bool(x.flags.writeable)


def may_share_memory(a: Any, b: Any) -> bool:
    """Whether the memory that two arrays span overlaps; all devices share one address space."""
    (first, end), (other, other_end) = span(a), span(b)
    return first < other_end and other < end


def shares_memory(a: Any, b: Any) -> bool:
    """Whether two arrays have a byte in common; also where that is too hard to find out."""
    if not may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(_places(a), _places(b), MOST_WORK)  # type: ignore[arg-type]
    except RuntimeError:  # NumPy's TooHardError
        return True


class _Places:
    """Where an array's elements lie, in NumPy's protocol; nobody reads them."""

    def __init__(self, x: Any) -> None:
        torch_tensor = kind(x) == "torch"
        size = x.element_size() if torch_tensor else x.itemsize
        strides = tuple(step * size for step in x.stride()) if torch_tensor else x.strides
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(x.shape),
            "strides": strides,
            "typestr": f"|V{size}",
            "data": (x.data_ptr() if torch_tensor else x.data.ptr, False),
        }


def _places(x: Any) -> np.ndarray:
    return x if kind(x) == "numpy" else np.asarray(_Places(x))


def overlaps_itself(x: Any) -> bool:
    """Whether an array may hold an element more than once; no view by slices and axes does."""
    strides = x.stride() if kind(x) == "torch" else x.strides
    if 0 in tuple(x.shape):
        return False
    reach = 1 if kind(x) == "torch" else x.itemsize
    for step, n in sorted((abs(step), n) for step, n in zip(strides, x.shape, strict=True)):
        if n > 1:
            if step < reach:
                return True
            reach += step * (n - 1)
    return False


def refuse_misaligned(x: Any, name: str) -> None:
    """ValueError for an array whose elements lie where a GPU cannot read them."""
    (start, _), size = span(x), dtype_of(x).itemsize
    if start % size:
        raise ValueError(
            f"{name} starts at address {start:#x}, and its elements of {size} bytes must start on "
            f"{size}; copy it to memory of its own"
        )


def span(x: Any) -> tuple[int, int]:
    """Addresses of an array's first byte and of the one behind its last."""
    torch_tensor = kind(x) == "torch"
    if torch_tensor and x.is_contiguous():
        return x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
    if kind(x) == "cupy" and x.flags.c_contiguous:
        return x.data.ptr, x.data.ptr + x.nbytes
    size = x.element_size() if torch_tensor else x.itemsize
    strides = [step * size for step in x.stride()] if torch_tensor else x.strides
    if kind(x) == "numpy":
        start = x.ctypes.data
    else:
        start = x.data_ptr() if torch_tensor else x.data.ptr
    if 0 in tuple(x.shape):
        return start, start
    reach = [step * (n - 1) for step, n in zip(strides, x.shape, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return start + low, start + high + size
