"""Which rows of x are whose expert's: as they are given, checked, and as kernels ask."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.ops.matmul.check import Operand, place_of

INT64 = np.dtype(np.int64)


@dataclass(frozen=True)
class Rows:
    """Which rows of x are whose.

    Attributes
    ----------
    name
        "experts", "offsets" or "counts".
    integers
        What was given under this name: NumPy int64, or as it is on the GPU.
    lead
        The shape of x but for its columns.
    known
        How many experts there are.
    """

    name: str
    integers: Any
    lead: tuple[int, ...]
    known: int

    @property
    def count(self) -> int:
        return math.prod(self.lead)

    @property
    def on_host(self) -> bool:
        return isinstance(self.integers, np.ndarray)

    def experts(self, xp: Any, integers: Any = None) -> Any:
        """The expert of each row [count], -1 where it has none.

        `integers` are those on a device, and `xp` their library, where the rows' own are not there.
        """
        own = self.integers if integers is None else integers
        if self.name == "experts":
            return own
        device = {} if xp is np or xp.__name__ == "cupy" else {"device": own.device}
        if self.name == "counts":
            place = xp.arange(self.lead[1], **device)[None, :]
            ids = xp.arange(self.known, **device)[:, None]
            return xp.where(place < own[:, None], ids, -1).reshape(-1)
        right = {"right": True} if device else {"side": "right"}
        ids = xp.searchsorted(own, xp.arange(self.count, **device), **right) - 1
        return xp.where(ids < self.known, ids, -1)


def integers_of(value: Any, name: str, x: Operand, known: int) -> Any:
    """NumPy int64, or as they are on the GPU where x is; after all checks that need no waiting."""
    length = {"experts": x.shape[0], "offsets": known + 1, "counts": known}[name]
    if interop.is_on_gpu(value):
        x.place.check(place_of(value, name), name, x.name)
        _check(interop.dtype_of(value), tuple(value.shape), name, length)
        return value
    found = interop.to_numpy(value, name) if interop.kind(value) else np.asarray(value)
    if not found.size:
        found = found.astype(INT64)
    _check(found.dtype, found.shape, name, length)
    found = found.astype(INT64)
    if name == "experts" and found.size and not (found.min() >= 0 and found.max() < known):
        which = f"in 0..{known - 1}" if known else "none, as w has none"
        raise ValueError(f"experts must be {which}, got {found.min()}..{found.max()}")
    if name == "counts" and found.size and not (found.min() >= 0 and found.max() <= x.shape[1]):
        raise ValueError(f"counts must be in 0..{x.shape[1]}, got {found.min()}..{found.max()}")
    if name == "offsets":
        rows, ends = x.shape[0], (int(found[0]), int(found[-1]))
        if (np.diff(found) < 0).any() or ends[0] < 0 or ends[1] > rows:
            raise ValueError(f"offsets must ascend within 0..{rows}, got {found.tolist()[:8]}")
    return found


def _check(dtype: np.dtype, shape: tuple[int, ...], name: str, length: int) -> None:
    if dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {dtype}")
    if shape != (length,):
        what = f"x has {length} rows" if name == "experts" else f"it must be ({length},)"
        raise ValueError(f"{name} has shape {shape}; {what}")
