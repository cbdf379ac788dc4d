"""Quantization by the CUDA kernels: which of them, on what, in which order."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cuquant.formats import Format, get_format
from cuquant.formats.scales import NESTED_BLOCK
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.lazy import lazy
from cuquant.ops import cpp, geometry
from cuquant.ops.geometry import CHUNK
from cuquant.ops.layout.pack import pack
from cuquant.ops.quantize.call import Task
from cuquant.ops.quantize.ggml import QuantizeBlocks, QuantizeFloatBlocks
from cuquant.ops.quantize.nested import nest, nested_encoding, set_global_scale
from cuquant.ops.quantize.plain import Plain
from cuquant.ops.quantize.search import Search
from cuquant.reference.tiles import Tiles

WARP = 32

# By the size of an element, as measured on an H100: neighbouring chunks of a thread (16-bit kernels
# are bound by instructions, and share those of a scale); threads, and units of each.
PER, FLAT = {2: 2, 4: 1}, {2: (256, 2), 4: (256, 1)}
# Elements down and across of quantize_axis' tiles; dense codes of a column want longer runs.
TILE, DENSE_TILE, TILE_BYTES = {2: (64, 64), 4: (128, 64)}, (128, 64), 1 << 15


class Unit(NamedTuple):
    """What a thread holds of a block: `per` neighbouring chunks; `lanes` threads hold a block."""

    per: int
    lanes: int


@dataclass(frozen=True)
class Quantize:
    """The orchestrator of one format's quantization."""

    fmt: Format

    def __call__(self, backend: Backend, x: Any, task: Task) -> None:
        """Write the components of `x` into task.parts; nothing is read back."""
        fmt = self.fmt
        if fmt.is_blocks:
            self._blocks(backend, x, task)
            return
        if fmt.row_packing.order in ("word", "planes"):
            self._by_codes(backend, x, task)
            return
        if fmt.scale is not None and fmt.scale.nested == "double":
            self._double(backend, x, task)
            return
        if fmt.scale is not None and fmt.scale.nested == "global":
            set_global_scale(backend, fmt, task)
        self._quantize(backend, task)

    def _blocks(self, backend: Backend, x: Any, task: Task) -> None:
        """ggml's types: contiguous rows, blocks along another axis, or a copy of anything else."""
        view, out = task.view, backend.pointer(task.parts["blocks"])
        searches = self.fmt.rule.rule == "search"
        half = self.fmt.layout.has_half_scale
        width = math.prod(view.shape[task.axis + 1 :])
        aligned = view.pointer % 16 == 0 and width * view.dtype.itemsize % 16 == 0
        if half and not searches and width > 1 and aligned and view.is_contiguous:
            shape = (math.prod(view.shape[: task.axis]), view.shape[task.axis], width)
            along = QuantizeBlocks(self.fmt).along_axis
            how = {"clamp": task.clamp, "overflow": task.overflow}
            along(backend, view.pointer, view.dtype, shape, out, **how)
            return
        rows = backend.contiguous(x, task.axis)
        kind = Search if searches else QuantizeBlocks if half else QuantizeFloatBlocks
        run = kind(self.fmt)
        run(
            backend,
            backend.pointer(rows),
            view.dtype,
            math.prod(task.stored) // self.fmt.layout.elements,
            out,
            saturate=task.clamp,
            clamp=task.clamp,
            overflow=task.overflow,
        )

    # ---- formats that take more than one step -----------------------------------------------

    def _by_codes(self, backend: Backend, x: Any, task: Task) -> None:
        """A byte a code first, then the packing's words of them."""
        codes = backend.empty(task.stored, np.dtype(np.uint8))
        plain = Quantize(cpp.with_plain_codes(self.fmt))
        plain(backend, x, replace(task, parts={**task.parts, "packed": codes}))
        pack(backend, self.fmt, codes, task.parts["packed"], task.stored)

    def _double(self, backend: Backend, x: Any, task: Task) -> None:
        """QLoRA: float32 scales first; less their mean they are quantized themselves."""
        assert self.fmt.scale is not None
        single = replace(self.fmt, scale=replace(self.fmt.scale, nested=None))
        inner = quantizer(get_format("dynamic8", block_size=NESTED_BLOCK))
        scales = backend.empty(task.parts["scale"].shape, np.dtype(np.float32))
        if self.fmt.rule.encode_with == "exact":
            quantizer(single)(backend, x, replace(task, parts={**task.parts, "scale": scales}))
            nest(backend, scales, task.parts, inner)
            return
        # Codes are made with the scale that decoding will see.
        Plain(single).scales(backend, replace(task, parts={"scale": scales}))
        nest(backend, scales, task.parts, inner)
        encoding = nested_encoding(backend, self.fmt, task.parts)
        Plain(single).encode(backend, task, encoding)

    # ---- the fast kernels -------------------------------------------------------------------

    def _quantize(self, backend: Backend, task: Task) -> None:
        fast = self._fast(backend, task) if self.fmt.scale is not None else None
        if fast is None:
            Plain(self.fmt)(backend, task)
        else:
            fast(task.scales(backend), task.given(backend))

    def _fast(self, backend: Backend, task: Task) -> Callable[[bytes, bytes], None] | None:
        """The call of the fastest kernel that takes this array; None where none does."""
        fmt, view = self.fmt, task.view
        columns = task.stored[-1]
        packed = backend.pointer(task.parts["packed"])
        packing = fmt.row_packing
        aligned = view.pointer % 16 == 0 and packed % 8 == 0 and view.is_contiguous
        if not aligned or columns % CHUNK or columns * packing.bits % (8 * packing.dtype.itemsize):
            return None
        lookup = cpp.lookup(fmt.codec, backend)
        unit = self.unit(columns, view.dtype.itemsize)
        last = task.axis == len(view.shape) - 1
        if last and unit and packed % 16 == 0:
            count = math.prod(task.stored) // (unit.per * CHUNK)
            launch = self.flat_launch(view.dtype, unit, count, task.flags)
            return lambda scales, given: backend.launch(
                launch, view.pointer, packed, scales, given, lookup, task.seed, count
            )
        if last:
            tiles = Tiles.of(fmt, task.stored)
            launch = self.tiles_launch(view.dtype, tiles, task.flags)
            if launch is None:
                return None
            row_bytes = columns * packing.bits // 8
            struct_ = geometry.tiles_struct(tiles)
            return lambda scales, given: backend.launch(
                launch, view.pointer, packed, scales, given, lookup, task.seed, struct_, row_bytes
            )
        width = math.prod(view.shape[task.axis + 1 :])
        row_bytes = columns * packing.bits // 8
        whole = packed % 16 == 0 and row_bytes % {8: 16, 4: 8}.get(packing.bits, 4) == 0
        if not unit or not whole or width * view.dtype.itemsize % 16:
            return None
        batch = math.prod(view.shape[: task.axis])
        launch, down, across = self.axis_launch(view.dtype, unit, batch, columns, width, task.flags)
        return lambda scales, given: backend.launch(
            launch,
            view.pointer,
            packed,
            scales,
            given,
            lookup,
            task.seed,
            columns,
            width,
            row_bytes,
            down,
            across,
        )

    @lru_cache(maxsize=1024)  # noqa: B019
    def unit(self, columns: int, itemsize: int) -> Unit | None:
        """How lanes share a block, where whole blocks fit into a warp and into rows."""
        block = self.fmt.rule.block
        if isinstance(block, tuple) and block[0] == 1:
            block = block[1]
        if block == "row":
            block = columns
        if not isinstance(block, int) or columns % block or block % CHUNK:
            return None
        per = 1 if block == CHUNK else 2 if block > WARP * CHUNK else PER[itemsize]
        lanes = block // (per * CHUNK)
        if lanes > WARP or lanes & (lanes - 1) or block % (per * CHUNK):
            return None
        return Unit(per, lanes)

    @lazy
    def facts(self) -> cpp.Facts:
        return cpp.facts(self.fmt)

    # Orchestrators are kept themselves, so nothing leaks.
    @lru_cache(maxsize=1024)  # noqa: B019
    def flat_launch(self, dtype: np.dtype, unit: Unit, units: int, flags: int) -> Launch:
        """Of quantize: blocks one after the other."""
        threads, each = FLAT[dtype.itemsize]
        element = cpp.element_of(dtype)
        work = cpp.numbers("Work", **unit._asdict(), threads=threads, units=each)
        arguments, text = (self.facts.type, element, work.type, flags), self.facts.text + work.text
        program = Program("quantize/quantize.cu", "quantize", arguments, text)
        return Launch(program, (-(-units // (threads * each)), 1, 1), threads)

    def axis_launch(
        self, dtype: np.dtype, unit: Unit, batch: int, depth: int, width: int, flags: int
    ) -> tuple[Launch, int, int]:
        """Of quantize_axis, with its tiles down and across."""
        dense = self.fmt.row_packing.order == "dense"
        high, wide = DENSE_TILE if dense else TILE[dtype.itemsize]
        high = max(high, unit.per * unit.lanes * CHUNK)
        while high * wide * dtype.itemsize > TILE_BYTES:
            wide //= 2
        tile = (high, wide)
        threads = min(256, tile[0] * tile[1] // (unit.per * CHUNK))
        down, across = -(-depth // tile[0]), -(-width // tile[1])
        element = cpp.element_of(dtype)
        work = cpp.numbers("Work", **unit._asdict(), threads=threads, depth=high, width=wide)
        arguments, text = (self.facts.type, element, work.type, flags), self.facts.text + work.text
        program = Program("quantize/quantize.cu", "quantize_axis", arguments, text)
        return Launch(program, (batch * down * across, 1, 1), threads), down, across

    def tiles_launch(self, dtype: np.dtype, tiles: Tiles, flags: int) -> Launch | None:
        """Of quantize_tiles; None where a block is too large for a thread block's registers."""
        tall, wide = min(tiles.tall, tiles.rows), min(tiles.wide, tiles.columns)
        if wide % CHUNK:
            return None
        chunks = tall * wide // CHUNK
        most = 8
        threads = max(64, min(512 if dtype.itemsize == 4 else 1024, _power(chunks / 4)))
        each = _power(chunks / threads)
        if each > most:
            return None
        arguments = (self.facts.type, cpp.element_of(dtype), threads, each, flags)
        program = Program("quantize/tiles.cu", "quantize_tiles", arguments, self.facts.text)
        return Launch(program, (math.prod(tiles.grid), 1, 1), threads)


def _power(least: float) -> int:
    """The smallest power of two that is not below."""
    return 1 << math.ceil(math.log2(max(least, 1)))


@lru_cache(maxsize=256)
def quantizer(fmt: Format) -> Quantize:
    """The orchestrator of a format, kept: its facts are made once."""
    return Quantize(fmt)
