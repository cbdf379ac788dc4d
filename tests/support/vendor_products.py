"""Products by the vendor's GEMM: the choice of it, and what they are."""

from typing import Any
from unittest import mock

import numpy as np
from emulator import Emulator
from fragment_products import SMALLEST, Expected
from products import ULP, values

import cuquant as cq
from cuquant.ops.matmul import choose as product
from cuquant.ops.matmul import vendor
from cuquant.ops.matmul.problem import Weight

F32 = np.float32


def by_vendor() -> Any:
    """The rule names the vendor's GEMM."""
    return mock.patch.object(product, "choose", lambda _: "vendor")


def unit_of(q: cq.QuantArray | cq.PackedWeight, dtype: str = "float16") -> float:
    """The power of two that weights are multiplied by, as the kernels find it."""
    emulator = Emulator()
    weight = Weight(q.format, q.arrays(), q.shape)
    units = emulator.empty((vendor.UNIT_BYTES // 4,), np.dtype(F32))
    found = vendor._unit_finder(emulator, weight, dtype)(emulator, units.ctypes.data)
    if not found:
        return 1.0
    unit, inverse, zero = units[:3].tolist()
    assert found == units.ctypes.data and unit * inverse == 1 and zero == 0
    return unit


def expect(x: np.ndarray, q: cq.QuantArray) -> Expected:
    """Each weight is rounded once to x's dtype, after a power of two has been multiplied."""
    dtype = np.dtype(x.dtype).name
    a, w = values(x), values(q)
    off: Any = 0.0
    if dtype != "float32":
        unit = unit_of(q, dtype)
        off = np.abs(a) @ (ULP[dtype] * np.abs(w) + SMALLEST[dtype] / unit).T
    return Expected(a @ w.T, np.abs(a) @ np.abs(w).T, off)
