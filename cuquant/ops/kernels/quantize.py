"""Quantization by the CUDA kernels: which of them, on what, in which order."""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from cuquant.formats import Format, get_format
from cuquant.formats.scales import NESTED_BLOCK
from cuquant.jit import Launch, Program
from cuquant.ops.backend import Backend
from cuquant.ops.kernels import facts as words
from cuquant.ops.kernels import geometry
from cuquant.ops.kernels.blocks import QuantizeBlocks
from cuquant.ops.kernels.geometry import CHUNK, View
from cuquant.ops.kernels.pack import pack
from cuquant.ops.kernels.search import Search
from cuquant.reference.tiles import Tiles

F32 = np.dtype(np.float32)
CLAMP, STOCHASTIC, GIVEN = 1, 2, 4
WARP = 32
STATE_BYTES = {"AbsMax": 4, "PowerOfTwo": 4, "SignedMax": 8, "Range": 8, "MeanAbs": 16}
E4M3_PEAK = 448.0

# By the size of an element: neighbouring chunks of a thread (16-bit kernels are bound by
# instructions, and share those of a scale), threads, and units of each. Measured on an H100.
TILE = {2: (128, 64), 4: (128, 32)}  # of quantize_axis
PER, FLAT = {2: 2, 4: 1}, {2: (256, 2), 4: (256, 1)}

Parts = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """Numbers that were found beforehand, on the device, or None.

    `scale` float32 and `zero_point` uint8 have the shape of the format's scales; `global_scale`
    is nvfp4's, a number of the host or one on the device.
    """

    scale: Any = None
    zero_point: Any = None
    global_scale: Any = None


class Unit(NamedTuple):
    """What a thread holds of a block: `per` neighbouring chunks; `lanes` threads hold a block."""

    per: int
    lanes: int


@dataclass(frozen=True)
class Task:
    """One call: the array, how to treat it and where its components go."""

    view: View
    axis: int
    known: Known
    parts: Parts
    clamp: bool
    stochastic: bool
    seed: int
    overflow: int = 0  # address of a counter, or 0

    @cached_property
    def stored(self) -> tuple[int, ...]:
        order = geometry.axis_last(len(self.view.shape), self.axis)
        return tuple(self.view.shape[a] for a in order)

    @property
    def flags(self) -> int:
        given = GIVEN if self.known.scale is not None else 0
        return (CLAMP if self.clamp else 0) | (STOCHASTIC if self.stochastic else 0) | given


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
            self._set_global(backend, task)
        self._quantize(backend, x, task)

    def _blocks(self, backend: Backend, x: Any, task: Task) -> None:
        """ggml's types: contiguous rows, blocks along another axis, or a copy of anything else."""
        view, out = task.view, backend.pointer(task.parts["blocks"])
        searches = self.fmt.rule.rule == "search"
        width = math.prod(view.shape[task.axis + 1 :])
        aligned = view.pointer % 16 == 0 and width * view.dtype.itemsize % 16 == 0
        if not searches and width > 1 and aligned and view.is_contiguous:
            shape = (math.prod(view.shape[: task.axis]), view.shape[task.axis], width)
            along = QuantizeBlocks(self.fmt).along_axis
            how = {"clamp": task.clamp, "overflow": task.overflow}
            along(backend, view.pointer, view.dtype, shape, out, **how)
            return
        rows = backend.contiguous(x, task.axis)
        run = Search(self.fmt) if searches else QuantizeBlocks(self.fmt)
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
        plain = Quantize(words.with_plain_codes(self.fmt))
        plain(backend, x, replace(task, parts={**task.parts, "packed": codes}))
        pack(backend, self.fmt, codes, task.parts["packed"], task.stored)

    def _double(self, backend: Backend, x: Any, task: Task) -> None:
        """QLoRA: float32 scales first; less their mean they are quantized themselves."""
        single = Quantize(_single(self.fmt))
        scales = backend.empty(task.parts["scale"].shape, F32)
        if self.fmt.rule.encode_with == "exact":
            single._quantize(backend, x, replace(task, parts={**task.parts, "scale": scales}))
            self._nest(backend, scales, task.parts)
            return
        # Codes are made with the scale that decoding will see.
        tiles = Tiles.of(self.fmt, task.stored)
        source = _source(backend, x, task)
        single._scales(backend, source, tiles, replace(task, parts={"scale": scales}), None)
        self._nest(backend, scales, task.parts)
        count = math.prod(tiles.grid)
        encoding = backend.empty((count, 2), F32)
        arrays = scale_arrays(backend, self.fmt, task.parts)
        launch = _elementwise("nested.cu", "encoding", count)
        backend.launch(launch, arrays, backend.pointer(encoding), count)
        single._encode(backend, source, tiles, task, encoding)

    def _nest(self, backend: Backend, scales: Any, parts: Parts) -> None:
        """The components of nested scales, from float32 ones."""
        count = math.prod(scales.shape)
        threads, sums = 256, min(256 * 64, -(-count // 256) * 256)
        found = backend.empty((sums, 4), np.dtype(np.float64))
        mean = backend.pointer(parts["nested_offset"])
        program = Program("nested.cu", "offset_parts", (threads,))
        grid = (-(-sums // threads), 1, 1)
        at = backend.pointer(found), backend.pointer(scales)
        backend.launch(Launch(program, grid, threads), at[1], at[0], count, sums)
        program = Program("nested.cu", "offset", (WARP,))
        backend.launch(Launch(program, (1, 1, 1), WARP), at[1], at[0], mean, count, sums)
        shifted = backend.empty((count,), F32)
        launch = _elementwise("nested.cu", "shift", count)
        backend.launch(launch, at[1], mean, backend.pointer(shifted), count)
        inner = {"packed": parts["scale"], "scale": parts["nested_scale"]}
        view = View(backend.pointer(shifted), (count,), (1,), F32)
        nested = Quantize(get_format("dynamic8", block_size=NESTED_BLOCK))
        nested(backend, shifted, Task(view, 0, Known(), inner, False, False, 0))

    def _set_global(self, backend: Backend, task: Task) -> None:
        """nvfp4's global scale: the given number, or from the largest finite element."""
        at = backend.pointer(task.parts["global_scale"])
        given = task.known.global_scale
        if given is not None and not isinstance(given, float):
            backend.copy_into(task.parts["global_scale"], backend.broadcast(given, (), F32))
            return
        if given is not None:
            program = Program("finite.cu", "set", (1,))
            backend.launch(Launch(program, (1, 1, 1), 1), at, given)
            return
        top = backend.zeros((1,), np.dtype(np.uint32))
        source = geometry.strided(task.view, len(task.view.shape) - 1, with_flat=False)
        *rows, columns = task.view.shape  # in any order: the largest is the largest
        threads = 256
        items = math.prod(rows) * -(-columns // CHUNK)
        grid = min(-(-items // threads), 16 * backend.multiprocessors)
        element = words.ELEMENTS[task.view.dtype.name]
        program = Program("finite.cu", "largest_finite", (element, task.flags & CLAMP))
        launch = Launch(program, (grid, 1, 1), threads)
        step = grid * threads
        backend.launch(
            launch,
            task.view.pointer,
            backend.pointer(top),
            _strides(source),
            math.prod(rows),
            columns,
            step,
        )
        peak = float(np.float32(self.fmt.rule.peak * E4M3_PEAK))
        program = Program("finite.cu", "global_scale_of", (1,))
        backend.launch(Launch(program, (1, 1, 1), 1), backend.pointer(top), at, peak)

    # ---- the fast kernels -------------------------------------------------------------------

    def _quantize(self, backend: Backend, x: Any, task: Task) -> None:
        if self.fmt.scale is None:
            tiles = Tiles.of(self.fmt, task.stored)
            self._encode(backend, _source(backend, x, task), tiles, task, None)
            return
        fast = self._fast(backend, task)
        if fast is not None:
            fast(self._scales_struct(backend, task, None), self._given(backend, task))
            return
        tiles = Tiles.of(self.fmt, task.stored)
        source = _source(backend, x, task)
        encoding = backend.empty((math.prod(tiles.grid), 2), F32)
        self._scales(backend, source, tiles, task, encoding)
        self._encode(backend, source, tiles, task, encoding)

    def _fast(self, backend: Backend, task: Task) -> Callable[[bytes, bytes], None] | None:
        """The call of the fastest kernel that takes this array; None where none does."""
        fmt, view = self.fmt, task.view
        columns = task.stored[-1]
        packed = backend.pointer(task.parts["packed"])
        packing = fmt.row_packing
        aligned = view.pointer % 16 == 0 and packed % 8 == 0 and view.is_contiguous
        if not aligned or columns % CHUNK or columns * packing.bits % (8 * packing.dtype.itemsize):
            return None
        lookup = words.lookup(fmt.codec, backend)
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

    @cached_property
    def facts(self) -> words.Facts:
        return words.facts(self.fmt)

    # Orchestrators are kept themselves, so nothing leaks.
    @lru_cache(maxsize=1024)  # noqa: B019
    def flat_launch(self, dtype: np.dtype, unit: Unit, units: int, flags: int) -> Launch:
        """Of quantize: blocks one after the other."""
        threads, each = FLAT[dtype.itemsize]
        element = words.ELEMENTS[dtype.name]
        arguments = (self.facts.type, element, *unit, threads, each, flags)
        program = Program("quantize.cu", "quantize", arguments, self.facts.text)
        return Launch(program, (-(-units // (threads * each)), 1, 1), threads)

    def axis_launch(
        self, dtype: np.dtype, unit: Unit, batch: int, depth: int, width: int, flags: int
    ) -> tuple[Launch, int, int]:
        """Of quantize_axis, with its tiles down and across."""
        tile = TILE[dtype.itemsize]
        tile = max(tile[0], unit.per * unit.lanes * CHUNK), tile[1]
        threads = min(256, tile[0] * tile[1] // (unit.per * CHUNK))
        down, across = -(-depth // tile[0]), -(-width // tile[1])
        element = words.ELEMENTS[dtype.name]
        arguments = (self.facts.type, element, *unit, threads, *tile, flags)
        program = Program("quantize.cu", "quantize_axis", arguments, self.facts.text)
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
        arguments = (self.facts.type, words.ELEMENTS[dtype.name], threads, each, flags)
        program = Program("quantize_tiles.cu", "quantize_tiles", arguments, self.facts.text)
        return Launch(program, (math.prod(tiles.grid), 1, 1), threads)

    # ---- the plain kernels ------------------------------------------------------------------

    def _scales(
        self, backend: Backend, source: tuple[int, bytes], tiles: Tiles, task: Task, encoding: Any
    ) -> None:
        """Statistics of every block, then its numbers."""
        blocks = math.prod(tiles.grid)
        splits, per_split = self.splits(tiles, backend.multiprocessors)
        state = STATE_BYTES[words.RULES[self.fmt.rule.rule]]
        found = backend.empty((blocks * splits * state,), np.dtype(np.uint8))
        pointer, strides = source
        struct_ = geometry.tiles_struct(tiles)
        arguments = (self.facts.type, words.ELEMENTS[task.view.dtype.name], task.flags)
        launch = self._warps("statistics", arguments, blocks * splits)
        at = backend.pointer(found)
        backend.launch(launch, pointer, at, strides, struct_, blocks, splits, per_split)
        launch = self._warps("scales", arguments, blocks)
        scales, given = self._scales_struct(backend, task, encoding), self._given(backend, task)
        backend.launch(launch, pointer, at, strides, struct_, scales, given, blocks, splits)

    def splits(self, tiles: Tiles, multiprocessors: int) -> tuple[int, int]:
        """Parts that a block is looked at in, and the chunks of each: enough to fill the GPU."""
        tall, wide = min(tiles.tall, tiles.rows), min(tiles.wide, tiles.columns)
        chunks = max(tall * -(-wide // CHUNK), 1)
        wanted = max(1, multiprocessors * 64 // math.prod(tiles.grid))
        splits = min(wanted, -(-chunks // (4 * WARP)))
        per_split = -(-chunks // splits)
        return -(-chunks // per_split), per_split

    def _warps(self, entry: str, arguments: tuple, warps: int) -> Launch:
        threads = 256
        program = Program("plain.cu", entry, arguments, self.facts.text)
        return Launch(program, (-(-warps * WARP // threads), 1, 1), threads)

    def _encode(
        self, backend: Backend, source: tuple[int, bytes], tiles: Tiles, task: Task, encoding: Any
    ) -> None:
        """Codes of every element, packed, made with the numbers of its block."""
        packing = self.fmt.row_packing
        row_bytes = packing.words(tiles.columns) * packing.dtype.itemsize
        rows = tiles.batch * tiles.rows
        per_row = -(-row_bytes // packing.bits) if packing.bits < 16 else -(-tiles.columns // CHUNK)
        packed = backend.pointer(task.parts["packed"])
        step = {16: tiles.columns * 2, 8: row_bytes, 4: row_bytes}.get(packing.bits, 1)
        aligned = packed % 16 == 0 and step % {16: 16, 8: 8, 4: 4}.get(packing.bits, 2) == 0
        threads = 256
        flags = task.flags & ~GIVEN
        arguments = (self.facts.type, words.ELEMENTS[task.view.dtype.name], flags)
        program = Program("plain.cu", "encode", arguments, self.facts.text)
        grid = (-(-rows * per_row // threads), 1, 1)
        pointer, strides = source
        backend.launch(
            Launch(program, grid, threads),
            pointer,
            0 if encoding is None else backend.pointer(encoding),
            packed,
            strides,
            geometry.tiles_struct(tiles),
            words.lookup(self.fmt.codec, backend),
            task.seed,
            rows,
            per_row,
            row_bytes,
            int(aligned),
        )

    # ---- structs ----------------------------------------------------------------------------

    def _scales_struct(self, backend: Backend, task: Task, encoding: Any) -> bytes:
        zero_point = task.parts.get("zero_point")
        return struct.pack(
            "<4Q",
            backend.pointer(task.parts["scale"]),
            0 if zero_point is None else backend.pointer(zero_point),
            0 if encoding is None else backend.pointer(encoding),
            task.overflow,
        )

    def _given(self, backend: Backend, task: Task) -> bytes:
        arrays = (task.known.scale, task.known.zero_point, task.parts.get("global_scale"))
        pointers = [0 if array is None else backend.pointer(array) for array in arrays]
        from_data = task.known.global_scale is None and pointers[2] != 0
        return struct.pack("<4Q", *pointers, from_data)


def _power(least: float) -> int:
    """The smallest power of two that is not below."""
    return 1 << math.ceil(math.log2(max(least, 1)))


def _single(fmt: Format) -> Format:
    """A double-quantized format with its float32 scales plain."""
    assert fmt.scale is not None
    return replace(fmt, scale=replace(fmt.scale, nested=None))


def _source(backend: Backend, x: Any, task: Task) -> tuple[int, bytes]:
    """The address and the Strided struct of the input."""
    source = geometry.strided(task.view, task.axis, with_flat=task.stochastic)
    return task.view.pointer, _strides(source)


def _strides(source: bytes | None) -> bytes:
    if source is None:
        raise ValueError(
            f"x has more than {geometry.MOST_DIMS} axes that cannot be merged; pass a contiguous x"
        )
    return source


def _elementwise(file: str, entry: str, count: int) -> Launch:
    threads = 256
    program = Program(file, entry, (threads,))
    return Launch(program, (-(-count // threads), 1, 1), threads)


def scale_arrays(backend: Backend, fmt: Format, parts: Parts) -> bytes:
    """The ScaleArrays struct of dequantize.cu."""
    names = ("scale", "zero_point", "global_scale", "nested_scale", "nested_offset")
    pointers = [backend.pointer(parts[name]) if name in parts else 0 for name in names]
    nested = fmt.scale is not None and fmt.scale.nested == "double"
    table = 0
    if nested:
        values = get_format("dynamic8").codec.values  # type: ignore[union-attr]
        table = backend.pointer(backend.upload(values))
    return struct.pack("<6Q", *pointers, table)


@lru_cache(maxsize=256)
def quantizer(fmt: Format) -> Quantize:
    """The orchestrator of a format, kept: its facts are made once."""
    return Quantize(fmt)
