"""quantize and dequantize as on a GPU, with the emulator (or a Recorder) in the GPU's place."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
from emulator import Emulator, Recorder
from kernel_cases import Case

import cuquant as cq
from cuquant import interop
from cuquant.ops import geometry
from cuquant.ops.dequantize import gathered
from cuquant.ops.dequantize import on_gpu as decode
from cuquant.ops.quantize import on_gpu as encode


class OnEmulator:
    """The GPU's half of the operations on NumPy arrays."""

    def __init__(self, backend: Emulator | Recorder) -> None:
        self.backend = backend

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        def backend_of(*_: Any) -> Any:
            return nullcontext(self.backend)

        with (
            mock.patch.object(encode, "backend_of", backend_of),
            mock.patch.object(decode, "backend_of", backend_of),
            mock.patch.object(gathered, "backend_of", backend_of),
        ):
            yield

    def quantize(
        self,
        x: np.ndarray,
        fmt: cq.Format,
        *,
        axis: int = -1,
        scale: Any = None,
        zero_point: Any = None,
        global_scale: Any = None,
        stochastic: bool = False,
        seed: int = 0,
        nonfinite: str = "propagate",
        out: cq.QuantArray | None = None,
    ) -> cq.QuantArray:
        """As `cuquant.quantize`, whose checks are not repeated here."""
        axis %= x.ndim
        order = geometry.axis_last(x.ndim, axis)
        stored = tuple(x.shape[i] for i in order)
        axes = tuple(order.index(i) for i in range(x.ndim))
        run = encode.EncodeOnGpu(fmt, axis, stochastic, seed, nonfinite, out)
        with self._in_place():
            parts = run(x, stored, scale, zero_point, global_scale, None)
        return cq.QuantArray(fmt, x.shape, interop.float_dtype(x.dtype), parts, axes)

    def case(self, case: Case) -> cq.QuantArray:
        """A case of the matrix, its array in guarded memory."""
        x = case.view(self.backend.array(case.base))
        return self.quantize(x, case.fmt, **case.arguments)

    def copy(self, q: cq.QuantArray) -> cq.QuantArray:
        """A QuantArray with its components in guarded memory."""
        parts = {name: self.backend.array(part) for name, part in q.arrays().items()}
        return cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)

    def dequantize(self, q: cq.QuantArray, dtype: object = None, out: Any = None) -> np.ndarray:
        with self._in_place():
            return decode.values(q, dtype, out, None)

    def embedding(
        self, ids: np.ndarray, q: cq.QuantArray, dtype: object = None, out: Any = None
    ) -> np.ndarray:
        """As `cuquant.embedding` of ids on a GPU, whose checks are not repeated here."""
        shape = (*ids.shape, q.shape[1])
        with self._in_place(), mock.patch.object(interop, "is_on_gpu", lambda x: True):
            return gathered._on_gpu(ids, q, shape, dtype, out)

    def codes(self, q: cq.QuantArray) -> np.ndarray:
        with self._in_place():
            return decode.codes(q)

    def packed(self, q: cq.QuantArray) -> np.ndarray:
        with self._in_place():
            return decode.packed(q)

    def effective(self, q: cq.QuantArray, name: str) -> np.ndarray | None:
        with self._in_place():
            return decode.effective(q, name)
