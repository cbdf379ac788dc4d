"""ggml's path on a GPU: q8_1 activations from values, and their products with blocks of weights."""

from typing import Any

from cuquant import interop
from cuquant.gpu.arrays import backend_of
from cuquant.ops.matmul import q8_1


def gemm(name: str, weights: Any, activations: Any, shape: tuple[int, int, int]) -> Any:
    """float32 [M, N] of uint8 blocks [M, K // elements, bytes] and [N, K // 32, 36], on a GPU."""
    with backend_of(weights) as backend:
        left, right = backend.contiguous(weights, -1), backend.contiguous(activations, -1)
        return q8_1.gemm(backend, name, left, right, shape)


def quantize_values(x: Any) -> Any:
    """uint8 [..., K // 32, 36] of floats [..., K] on a GPU, as llama.cpp's CUDA kernel does it."""
    with backend_of(x) as backend:
        given = backend.contiguous(x, -1)
        return q8_1.quantize_values(backend, given, interop.dtype_of(x), tuple(x.shape))
