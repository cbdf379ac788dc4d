"""`quantize` for arrays on a GPU: allocate, refuse what must be refused, run the kernels."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant import reference
from cuquant.array.quant_array import QuantArray
from cuquant.formats import Format
from cuquant.formats.codecs import Minifloat
from cuquant.gpu.arrays import GpuBackend, backend_of
from cuquant.ops.dequantize.ggml import DequantizeBlocks
from cuquant.ops.quantize.call import Known, Parts, Task
from cuquant.ops.quantize.finite import first_nonfinite
from cuquant.ops.quantize.given import on_device
from cuquant.ops.quantize.quantizer import quantizer
from cuquant.ops.quantize.vanished import vanished
from cuquant.reference.refuse import refuse_count, refuse_value, refuse_vanished

U32, F32 = np.dtype(np.uint32), np.dtype(np.float32)


@dataclass(frozen=True)
class EncodeOnGpu:
    """One call of `quantize`, its arguments checked.

    `make` writes the components, where they are made from more than x.
    """

    fmt: Format
    axis: int
    stochastic: bool
    seed: int
    nonfinite: str
    out: QuantArray | None
    make: Callable[[GpuBackend, Any, Task], None] | None = None

    def __call__(
        self,
        x: Any,
        stored: tuple[int, ...],
        scale: Any,
        zero_point: Any,
        global_scale: Any,
        stream: object,
    ) -> Parts:
        """The components of x; those of `out` where it is given."""
        with backend_of(x, stream) as backend:
            known = on_device(self.fmt, stored, scale, zero_point, global_scale, backend)
            parts = self._parts(backend, stored)
            if not math.prod(stored):
                self._empty(backend, x, stored, known, parts)
            else:
                self._run(backend, x, known, parts)
            if self.out is None:
                return parts
            for name, part in self.out.components.items():
                if part is not parts[name]:
                    backend.copy_into(part, parts[name])
            return self.out.arrays()

    def _parts(self, backend: GpuBackend, stored: tuple[int, ...]) -> Parts:
        """Where the components go: straight into `out` if kernels can write to it and nothing
        can still go wrong, else into new arrays."""
        parts = {c.name: backend.empty(c.shape, c.dtype) for c in self._missing(backend, stored)}
        if self.out is None:
            return parts
        return {**self.out.components, **parts}

    def _missing(self, backend: GpuBackend, stored: tuple[int, ...]) -> list:
        components = self.fmt.components(stored)
        if self.out is None or self.nonfinite == "raise":
            return list(components)
        views = {name: backend.view(part) for name, part in self.out.components.items()}
        return [
            c for c in components if views[c.name].pointer % 16 or not views[c.name].is_contiguous
        ]

    def _empty(
        self, backend: GpuBackend, x: Any, stored: tuple[int, ...], known: Known, parts: Parts
    ) -> None:
        """An array without elements has scales at most: the reference's."""
        world = known.global_scale
        resident = world is not None and not isinstance(world, float)
        given = reference.Calibration(global_scale=1.0 if resident else world)
        if known.scale is not None:
            points = None if known.zero_point is None else backend.read(known.zero_point)
            if resident:
                world = float(backend.read(world).reshape(()))
            given = reference.Calibration(backend.read(known.scale), points, world)
        host = reference.quantize(np.empty(stored, backend.view(x).dtype), self.fmt, -1, given)
        for name, part in host.items():
            if name == "global_scale" and resident:  # as it is there: nothing waits
                backend.copy_into(parts[name], backend.broadcast(known.global_scale, (), F32))
                continue
            backend.copy_into(parts[name], backend.array(part).reshape(part.shape))

    def _run(self, backend: GpuBackend, x: Any, known: Known, parts: Parts) -> None:
        view, raising = backend.view(x), self.nonfinite == "raise"
        counter = backend.zeros((1,), U32) if raising else None
        if raising:
            index = first_nonfinite(backend, view)
            if index is not None:
                where = tuple(int(i) for i in np.unravel_index(index, view.shape))
                refuse_value(backend.read(x[where]), index, view.size)
        # Integer codes have no NaN, and a calibrated scale must not change: there NaN clamps.
        clamp = self.nonfinite == "clamp" or not self.fmt.holds_nan
        clamp |= self.fmt.has_integer_codes and known.scale is not None
        overflow = 0 if counter is None else backend.pointer(counter)
        task = Task(view, self.axis, known, parts, clamp, self.stochastic, self.seed, overflow)
        make = self.make or quantizer(self.fmt)
        make(backend, x, task)
        if counter is not None:
            refuse_count(self.fmt, self._overflows(backend, x, counter, parts))
            refuse_vanished(self.fmt, vanished(backend, self.fmt, x, view, self.axis, parts))

    def _overflows(self, backend: GpuBackend, x: Any, counter: Any, parts: Parts) -> int:
        """How many scales (or, without scales, values) do not fit into their type."""
        codec = self.fmt.codec
        if self.fmt.scale is None and isinstance(codec, Minifloat):
            return backend.count_above(x, codec.peak)
        if self.fmt.rule.rule != "search":
            return int(backend.read(counter)[0])
        blocks = parts["blocks"]
        shape = (math.prod(blocks.shape[:-1]), self.fmt.layout.sub_blocks)
        scale = backend.empty(shape, F32)
        minimum = backend.empty(shape, F32) if self.fmt.offset == "min" else None
        DequantizeBlocks(self.fmt).scales(backend, blocks, scale, minimum)
        return int((~np.isfinite(backend.read(scale))).sum())
