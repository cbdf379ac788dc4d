"""ggml's interleaved blocks on the GPU: decoded, and what kernels for them are told."""

import math
from dataclasses import dataclass
from typing import Any

from cuquant.formats import Format
from cuquant.formats.blocks import BlockLayout
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.lazy import lazy
from cuquant.ops import cpp

GROUP = 256  # elements that a warp works on together
WARP, THREADS = 32, 256


def groups_of(layout: BlockLayout, least: int) -> int:
    """Groups that a warp takes at once, so that their bytes are whole vectors of 16."""
    nbytes = GROUP // layout.elements * layout.nbytes
    return max(least, 16 // math.gcd(16, nbytes))


@dataclass(frozen=True)
class GgmlKernels:
    """Kernels for the blocks of a format."""

    fmt: Format

    @lazy
    def facts(self) -> cpp.Facts:
        return cpp.facts(self.fmt)

    def _program(self, file: str, entry: str, *arguments: str | int) -> Program:
        return Program(file, entry, (self.facts.type, *arguments), self.facts.text)

    def _warps(self, program: Program, blocks: int, groups: int) -> Launch:
        elements = blocks * self.fmt.layout.elements
        grid = -(-elements // (THREADS // WARP * groups * GROUP))
        return Launch(program, (grid, 1, 1), THREADS)


class DequantizeBlocks(GgmlKernels):
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
            cpp.lookup(self.fmt.codec, backend),
            count,
            int(at % 16 == 0),
            cpp.largest_value(self.fmt),
        )

    def scales(self, backend: Backend, blocks: Any, scale: Any, minimum: Any) -> None:
        """The effective float32 scales, and minimums where the type has them."""
        count = math.prod(blocks.shape[:-1])
        items = count * self.fmt.layout.sub_blocks
        program = self._program("dequantize/ggml.cu", "block_scales")
        launch = Launch(program, (-(-items // THREADS), 1, 1), THREADS)
        at = 0 if minimum is None else backend.pointer(minimum)
        backend.launch(launch, backend.pointer(blocks), backend.pointer(scale), at, count)
