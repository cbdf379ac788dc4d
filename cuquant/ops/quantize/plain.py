"""Quantization of any array by the plain kernels: strides, odd blocks, blocks of any size."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant.formats import Format
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.lazy import lazy
from cuquant.ops import cpp, geometry
from cuquant.ops.geometry import CHUNK
from cuquant.ops.quantize.call import GIVEN, Task
from cuquant.reference.tiles import Tiles

THREADS, WARP = 256, 32
STATE_BYTES = {"AbsMax": 4, "PowerOfTwo": 4, "SignedMax": 8, "Range": 8, "MeanAbs": 16}


@dataclass(frozen=True)
class Plain:
    """The three steps of quantize/plain.cu for one format, whose scales are not nested."""

    fmt: Format

    @lazy
    def facts(self) -> cpp.Facts:
        return cpp.facts(self.fmt)

    def __call__(self, backend: Backend, task: Task) -> None:
        """Write all components."""
        if self.fmt.scale is None:
            self.encode(backend, task, None)
            return
        tiles = Tiles.of(self.fmt, task.stored)
        encoding = backend.empty((math.prod(tiles.grid), 2), np.dtype(np.float32))
        self.scales(backend, task, encoding)
        self.encode(backend, task, encoding)

    def scales(self, backend: Backend, task: Task, encoding: Any = None) -> None:
        """Statistics of every block, then its numbers: those to store, and those to encode with."""
        tiles = Tiles.of(self.fmt, task.stored)
        blocks = math.prod(tiles.grid)
        splits, per_split = self.splits(tiles, backend.multiprocessors)
        state = STATE_BYTES[cpp.RULES[self.fmt.rule.rule]]
        found = backend.empty((blocks * splits * state,), np.dtype(np.uint8))
        where = (task.view.pointer, backend.pointer(found), task.source())
        struct_ = geometry.tiles_struct(tiles)
        element = cpp.element_of(task.view.dtype)
        launch = self._warps("statistics", element, task.flags, blocks * splits)
        backend.launch(launch, *where, struct_, blocks, splits, per_split)
        launch = self._warps("scales", element, task.flags, blocks)
        scales, given = task.scales(backend, encoding), task.given(backend)
        lookup = cpp.lookup(self.fmt.codec, backend)
        backend.launch(launch, *where, struct_, scales, given, lookup, blocks, splits)

    def splits(self, tiles: Tiles, multiprocessors: int) -> tuple[int, int]:
        """Parts that a block is looked at in, and the chunks of each: enough to fill the GPU."""
        tall, wide = min(tiles.tall, tiles.rows), min(tiles.wide, tiles.columns)
        chunks = max(tall * -(-wide // CHUNK), 1)
        wanted = max(1, multiprocessors * 64 // math.prod(tiles.grid))
        splits = min(wanted, -(-chunks // (4 * WARP)))
        per_split = -(-chunks // splits)
        return -(-chunks // per_split), per_split

    def _warps(self, entry: str, element: str, flags: int, warps: int) -> Launch:
        program = Program(
            "quantize/plain.cu", entry, (self.facts.type, element, flags), self.facts.text
        )
        return Launch(program, (-(-warps * WARP // THREADS), 1, 1), THREADS)

    def encode(self, backend: Backend, task: Task, encoding: Any) -> None:
        """Codes of every element, packed, made with the numbers of its block."""
        tiles, packing = Tiles.of(self.fmt, task.stored), self.fmt.row_packing
        row_bytes = packing.words(tiles.columns) * packing.dtype.itemsize
        rows = tiles.batch * tiles.rows
        per_row = -(-row_bytes // packing.bits) if packing.bits < 16 else -(-tiles.columns // CHUNK)
        packed = backend.pointer(task.parts["packed"])
        word = {16: 16, 8: 8, 4: 4}.get(packing.bits, 1)  # bytes that a whole chunk is stored by
        aligned = packed % 16 == 0 and row_bytes % word == 0
        arguments = (self.facts.type, cpp.element_of(task.view.dtype), task.flags & ~GIVEN)
        program = Program("quantize/plain.cu", "encode", arguments, self.facts.text)
        backend.launch(
            Launch(program, (-(-rows * per_row // THREADS), 1, 1), THREADS),
            task.view.pointer,
            0 if encoding is None else backend.pointer(encoding),
            packed,
            task.source(),
            geometry.tiles_struct(tiles),
            cpp.lookup(self.fmt.codec, backend),
            task.seed,
            rows,
            per_row,
            row_bytes,
            int(aligned),
        )
