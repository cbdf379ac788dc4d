"""ggml's blocks of 32 from values, on the GPU."""

import numpy as np

from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch
from cuquant.ops import cpp
from cuquant.ops.cpp import element_of
from cuquant.ops.dequantize.ggml import THREADS, GgmlKernels
from cuquant.ops.quantize.call import CLAMP

TILE = {2: (256, 32), 4: (128, 64)}  # of quantize_blocks_axis, by the size of an element
LANES = 2  # that hold a block of 32 when it is quantized
ELEMENTS = 16  # of a lane of quantize_float_blocks


class QuantizeBlocks(GgmlKernels):
    """Quantization to ggml's blocks of 32: everything but the types that search."""

    def launch(self, dtype: np.dtype, blocks: int, clamp: bool) -> Launch:
        """Of quantize_blocks."""
        flags = CLAMP if clamp else 0
        element = element_of(dtype)
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
        lookup = cpp.lookup(self.fmt.codec, backend)
        launch = self.launch(dtype, blocks, clamp)
        backend.launch(launch, x, out, lookup, blocks, int(out % 16 == 0), int(saturate), overflow)

    def axis_launch(
        self, dtype: np.dtype, batch: int, depth: int, width: int, clamp: bool
    ) -> tuple[Launch, int, int]:
        """Of quantize_blocks_axis, with its tiles down and across."""
        tile = TILE[dtype.itemsize]
        down, across = -(-depth // tile[0]), -(-width // tile[1])
        arguments = (element_of(dtype), THREADS, *tile, CLAMP if clamp else 0)
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
        lookup = cpp.lookup(self.fmt.codec, backend)
        launch, down, across = self.axis_launch(dtype, *shape, clamp)
        _, depth, width = shape
        row_bytes = depth // self.fmt.layout.elements * self.fmt.layout.nbytes
        by_words = int(out % 4 == 0 and row_bytes % 4 == 0)
        backend.launch(
            launch, x, out, lookup, depth, width, down, across, by_words, int(clamp), overflow
        )


class QuantizeFloatBlocks(GgmlKernels):
    """Quantization to ggml's mxfp4 and nvfp4."""

    def launch(self, dtype: np.dtype, blocks: int) -> Launch:
        """Of quantize_float_blocks."""
        program = self._program(
            "quantize/ggml_floats.cu", "quantize_float_blocks", element_of(dtype), THREADS, CLAMP
        )
        lanes = blocks * self.fmt.layout.elements // ELEMENTS
        return Launch(program, (-(-lanes // THREADS), 1, 1), THREADS)

    def __call__(
        self,
        backend: Backend,
        x: int,
        dtype: np.dtype,
        blocks: int,
        out: int,
        *,
        overflow: int = 0,
        **_: bool,
    ) -> None:
        """The bytes of `blocks` blocks of contiguous elements at address `x`, to address `out`."""
        if blocks:
            backend.launch(self.launch(dtype, blocks), x, out, blocks, overflow)
