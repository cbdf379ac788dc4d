"""Decoding by the CUDA kernels: values, codes and effective scales of a format's components."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from cuquant.formats import Format
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.view import View
from cuquant.lazy import lazy
from cuquant.ops import cpp, geometry
from cuquant.ops.cpp import scale_arrays
from cuquant.ops.dequantize.ggml import DequantizeBlocks
from cuquant.ops.geometry import CHUNK
from cuquant.ops.layout.pack import unpack

THREADS, CHUNKS = 256, 4
FLOAT_MAX = float(np.finfo(np.float32).max)


@lru_cache(maxsize=256)
def limit(fmt: Format, dtype: np.dtype) -> float:
    """Scales, and minimums, up to this never take a value beyond the dtype's largest."""
    top = float(ml_dtypes.finfo(dtype).max)
    if fmt.offset == "min":  # a half for each, of codes of 1 or more
        top /= 2
    return min(top / cpp.largest_value(fmt) * (1 - 1e-6), FLOAT_MAX)


@dataclass(frozen=True)
class Dequantize:
    """The orchestrator of one format's decoding."""

    fmt: Format

    @lazy
    def facts(self) -> cpp.Facts:
        return cpp.facts(self.fmt, decoding=True)

    def __call__(
        self, backend: Backend, parts: Mapping[str, Any], stored: tuple[int, ...], target: View
    ) -> None:
        """Write the values [rows..., K] to `target`, whose shape is `stored`.

        ggml's blocks want a contiguous target on 16 bytes.
        """
        if not target.size:
            return
        element = cpp.element_of(target.dtype)
        if self.fmt.is_blocks:
            decoder = DequantizeBlocks(self.fmt)
            decoder.values(backend, parts["blocks"], target.pointer, element)
            return
        arrays = scale_arrays(backend, self.fmt, dict(parts))
        lookup = cpp.lookup(self.fmt.codec, backend)
        packed = backend.pointer(parts["packed"])
        packing, (*rows, columns) = self.fmt.row_packing, stored
        per_row = -(-columns // CHUNK)
        chunks = math.prod(rows) * per_row
        struct_ = geometry.tiles_of(self.fmt, stored)
        if self.is_values(packed, stored, target):
            arguments = (self.facts.type, element)
            program = Program(
                "dequantize/dequantize.cu", "dequantize_values", arguments, self.facts.text
            )
            whole = math.prod(stored) // CHUNK
            launch = Launch(program, (-(-whole // THREADS), 1, 1), THREADS)
            backend.launch(launch, packed, target.pointer, whole)
            return
        if self.is_fast(packed, stored, target):
            shift = self.flat_shift(columns)
            launch = self.launch(target.dtype, chunks, shift is not None)
            last = math.prod(stored) * packing.bits // 32 - 1
            backend.launch(
                launch,
                packed,
                arrays,
                target.pointer,
                lookup,
                struct_,
                chunks,
                per_row,
                last,
                shift or 0,
                limit(self.fmt, target.dtype),
            )
            return
        source = geometry.strided(target, len(stored) - 1, with_flat=False)
        backend.launch(
            self.plain_launch(target.dtype, chunks),
            packed,
            arrays,
            target.pointer,
            lookup,
            source,
            struct_,
            math.prod(rows),
            per_row,
            packing.words(columns),
        )

    def is_values(self, packed: int, stored: tuple[int, ...], target: View) -> bool:
        """Whether `dequantize_values` takes these arrays of fp16 or bf16."""
        aligned = packed % 16 == 0 and target.pointer % 16 == 0 and target.is_contiguous
        return self.fmt.scale is None and aligned and math.prod(stored) % CHUNK == 0

    def is_fast(self, packed: int, stored: tuple[int, ...], target: View) -> bool:
        """Whether `dequantize` takes these arrays; `dequantize_plain` takes all."""
        packing, columns = self.fmt.row_packing, stored[-1]
        scale = self.fmt.scale
        whole = columns % CHUNK == 0 and columns * packing.bits % (8 * packing.dtype.itemsize) == 0
        return (
            whole
            and packing.bits < 16
            and packing.order in ("low", "high", "dense")
            and packed % 8 == 0
            and target.pointer % 16 == 0
            and target.is_contiguous
            and scale is not None
            and not (isinstance(scale.block, tuple) and scale.block[1] % CHUNK)
        )

    def flat_shift(self, columns: int) -> int | None:
        """log2 of the chunks of a block, where blocks follow each other in memory; else None."""
        block = self.fmt.rule.block
        if isinstance(block, tuple) and block[0] == 1:
            block = block[1]
        if block == "row":
            block = columns
        if not isinstance(block, int) or columns % block:
            return None
        chunks = block // CHUNK
        return chunks.bit_length() - 1 if chunks & (chunks - 1) == 0 else None

    # Orchestrators are kept themselves, so nothing leaks.
    @lru_cache(maxsize=1024)  # noqa: B019
    def launch(self, dtype: np.dtype, chunks: int, flat: bool) -> Launch:
        """Of dequantize."""
        arguments = (self.facts.type, cpp.element_of(dtype), THREADS, CHUNKS, int(flat))
        program = Program("dequantize/dequantize.cu", "dequantize", arguments, self.facts.text)
        return Launch(program, (-(-chunks // (THREADS * CHUNKS)), 1, 1), THREADS)

    def plain_launch(self, dtype: np.dtype, chunks: int) -> Launch:
        """Of dequantize_plain."""
        word = cpp.WORDS[self.fmt.row_packing.dtype.itemsize]
        arguments = (self.facts.type, cpp.element_of(dtype), word)
        program = Program(
            "dequantize/dequantize.cu", "dequantize_plain", arguments, self.facts.text
        )
        return Launch(program, (-(-chunks // THREADS), 1, 1), THREADS)

    def codes(
        self, backend: Backend, parts: Mapping[str, Any], stored: tuple[int, ...], out: Any
    ) -> None:
        """Write the unsigned codes [rows..., K] to the contiguous array `out`."""
        if not math.prod(stored):
            return
        if self.fmt.is_blocks:
            at = backend.pointer(out)
            DequantizeBlocks(self.fmt).values(backend, parts["blocks"], at, "u8")
            return
        unpack(backend, self.fmt, parts["packed"], out, stored)

    def scales(
        self, backend: Backend, parts: Mapping[str, Any], scale: Any, minimum: Any = None
    ) -> None:
        """Write the effective float32 scale of each block (and the minimum of ggml's)."""
        count = math.prod(scale.shape)
        if not count:
            return
        if self.fmt.is_blocks:
            DequantizeBlocks(self.fmt).scales(backend, parts["blocks"], scale, minimum)
            return
        program = Program(
            "dequantize/dequantize.cu", "effective", (self.facts.type,), self.facts.text
        )
        launch = Launch(program, (-(-count // THREADS), 1, 1), THREADS)
        arrays = scale_arrays(backend, self.fmt, dict(parts))
        backend.launch(launch, arrays, backend.pointer(scale), count)


@lru_cache(maxsize=256)
def decoder(fmt: Format) -> Dequantize:
    """The orchestrator of a format, kept: its facts are made once."""
    return Dequantize(fmt)
