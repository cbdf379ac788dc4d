"""ggml's interleaved blocks on the GPU: quantized, decoded, and what lies in them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant.formats import Format
from cuquant.formats.blocks import BlockLayout
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.lazy import lazy
from cuquant.ops.kernels import facts as words
from cuquant.ops.kernels.facts import ELEMENTS

GROUP = 256  # elements that a warp works on together
WARP, THREADS = 32, 256
TILE = {2: (256, 32), 4: (128, 64)}  # of quantize_blocks_axis, by the size of an element
LANES = 2  # that hold a block of 32 when it is quantized
CLAMP = 1


def groups_of(layout: BlockLayout, least: int) -> int:
    """Groups that a warp takes at once, so that their bytes are whole vectors of 16."""
    nbytes = GROUP // layout.elements * layout.nbytes
    return max(least, 16 // math.gcd(16, nbytes))


@dataclass(frozen=True)
class _Blocks:
    fmt: Format

    @lazy
    def facts(self) -> words.Facts:
        return words.facts(self.fmt)

    def _program(self, file: str, entry: str, *arguments: str | int) -> Program:
        return Program(file, entry, (self.facts.type, *arguments), self.facts.text)

    def _warps(self, program: Program, blocks: int, groups: int) -> Launch:
        elements = blocks * self.fmt.layout.elements
        grid = -(-elements // (THREADS // WARP * groups * GROUP))
        return Launch(program, (grid, 1, 1), THREADS)


class QuantizeBlocks(_Blocks):
    """Quantization to ggml's blocks of 32: everything but the types that search."""

    def launch(self, dtype: np.dtype, blocks: int, clamp: bool) -> Launch:
        """Of quantize_blocks."""
        flags = CLAMP if clamp else 0
        element = ELEMENTS[dtype.name]
        program = self._program("quantize/ggml.cu", "quantize_blocks", element, THREADS, flags)
        return Launch(program, (-(-blocks // (THREADS // LANES)), 1, 1), THREADS)

    def __call__(
        self,
        backend: Backend,
        x: int,
        dtype: np.dtype,
        blocks: int,
        out: int,
        *,
        saturate: bool,
        clamp: bool,
        overflow: int = 0,
    ) -> None:
        """The bytes of `blocks` blocks of contiguous elements at address `x`, to address `out`."""
        lookup = words.lookup(self.fmt.codec, backend)
        launch = self.launch(dtype, blocks, clamp)
        backend.launch(launch, x, out, lookup, blocks, int(out % 16 == 0), int(saturate), overflow)

    def axis_launch(
        self, dtype: np.dtype, batch: int, depth: int, width: int, clamp: bool
    ) -> tuple[Launch, int, int]:
        """Of quantize_blocks_axis, with its tiles down and across."""
        tile = TILE[dtype.itemsize]
        down, across = -(-depth // tile[0]), -(-width // tile[1])
        arguments = (ELEMENTS[dtype.name], THREADS, *tile, CLAMP if clamp else 0)
        program = self._program("quantize/ggml.cu", "quantize_blocks_axis", *arguments)
        return Launch(program, (batch * down * across, 1, 1), THREADS), down, across

    def along_axis(
        self,
        backend: Backend,
        x: int,
        dtype: np.dtype,
        shape: tuple[int, int, int],
        out: int,
        *,
        clamp: bool,
        overflow: int = 0,
    ) -> None:
        """The blocks along the middle axis of a contiguous [batch, depth, width] at `x`."""
        lookup = words.lookup(self.fmt.codec, backend)
        launch, down, across = self.axis_launch(dtype, *shape, clamp)
        _, depth, width = shape
        row_bytes = depth // self.fmt.layout.elements * self.fmt.layout.nbytes
        by_words = int(out % 4 == 0 and row_bytes % 4 == 0)
        backend.launch(
            launch, x, out, lookup, depth, width, down, across, by_words, int(clamp), overflow
        )


class DequantizeBlocks(_Blocks):
    """Values, codes and scales of ggml's blocks."""

    def launch(self, element: str, blocks: int) -> Launch:
        """Of dequantize_blocks, to an element type, or to u8: the codes."""
        groups = groups_of(self.fmt.layout, 4)
        program = self._program("dequantize/ggml.cu", "dequantize_blocks", element, THREADS, groups)
        return self._warps(program, blocks, groups)

    def values(self, backend: Backend, blocks: Any, out: int, element: str) -> None:
        """Decode all of `blocks` to a contiguous array at the address `out`, on 16 bytes."""
        count = math.prod(blocks.shape[:-1])
        at = backend.pointer(blocks)
        backend.launch(
            self.launch(element, count),
            at,
            out,
            words.lookup(self.fmt.codec, backend),
            count,
            int(at % 16 == 0),
            words.largest_value(self.fmt),
        )

    def scales(self, backend: Backend, blocks: Any, scale: Any, minimum: Any) -> None:
        """The effective float32 scales, and minimums where the type has them."""
        count = math.prod(blocks.shape[:-1])
        items = count * self.fmt.layout.sub_blocks
        program = self._program("dequantize/ggml.cu", "block_scales")
        launch = Launch(program, (-(-items // THREADS), 1, 1), THREADS)
        at = 0 if minimum is None else backend.pointer(minimum)
        backend.launch(launch, backend.pointer(blocks), backend.pointer(scale), at, count)
