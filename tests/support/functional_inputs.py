"""What the tests of `functional` share: inputs, a call of each function, arrays of torch."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuquant as cq
import cuquant.functional as F
from cuquant.formats import MAPS
from cuquant.formats.blocks import BLOCK_LAYOUTS

try:
    import torch
except ImportError:
    torch = None


needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")

F32 = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(F32), np.dtype(np.float16), BF16]
TYPES = list(BLOCK_LAYOUTS)
WEIGHTS = [name for name in TYPES if name != "q8_1"]
GOLDEN = np.load(Path(__file__).parents[1] / "data" / "bitsandbytes_1.npz")
PACKINGS = ["dense", "word", "planes"]


def numpy_of(x):
    """A torch tensor's values as NumPy's, bfloat16 by its bits; anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.view(torch.int16).numpy().view(BF16) if x.dtype == torch.bfloat16 else x.numpy()


def torch_of(x):
    if isinstance(x, np.ndarray) and x.dtype == BF16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def normal(*shape, seed=0, dtype=F32):
    return np.random.default_rng(seed).standard_normal(shape, F32).astype(dtype)


def integers(low, high, shape, dtype, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape, dtype, endpoint=True)


X = normal(4, 256)
K3, SCALE3 = F.quantize_kbit(X, 3)
NF4, ABSMAX = F.quantize_nf4(X)
NESTED = F.quantize_nf4(X, 64, 256)[1]
A8, B8 = integers(-127, 127, (4, 64), np.int8), integers(-127, 127, (64, 3), np.int8)
SMALL = integers(-4, 4, (2, 3, 20), np.int64).astype(np.float16)  # sums of any order are exact
IMAGES, FILTERS = (
    integers(-127, 127, (2, 20, 7, 9), np.int8),
    integers(-127, 127, (5, 20, 3, 2), np.int8),
)
A4, B4 = F.pack_int4(A8 % 8), F.pack_int4(B8 % 8, axis=0)
BLOCKS = F.quantize_q4_0(X)
CALLS = {
    "quantize_nf4": lambda to: F.quantize_nf4(to(X)),
    "quantize_nf4 double": lambda to: F.quantize_nf4(to(X), 64, 256),
    "quantize_fp4": lambda to: F.quantize_fp4(to(X.astype(BF16))),
    "dequantize_nf4": lambda to: F.dequantize_nf4(to(NF4), to(ABSMAX), (4, 256), dtype="bfloat16"),
    "dequantize_nf4 double": lambda to: F.dequantize_nf4(
        to(NF4), {name: to(part) for name, part in NESTED.items()}
    ),
    "quantize_kbit": lambda to: F.quantize_kbit(to(X), 3, to(np.array([-1, 0, 1], F32))),
    "dequantize_kbit": lambda to: F.dequantize_kbit(to(K3), to(SCALE3), 3, (4, 256)),
    "convert_packing": lambda to: F.convert_packing(to(K3), 3, X.size, "dense", "planes"),
    "compact_codebook": lambda to: F.compact_codebook(to(np.asarray(MAPS["linear"], F32))),
    "quantize_q4_k": lambda to: F.quantize_q4_k(to(X.astype(np.float16))),
    "quantize_q8_1 values": lambda to: F.quantize_q8_1(to(X.astype(BF16)), sum="values"),
    "dequantize_q4_0": lambda to: F.dequantize_q4_0(to(BLOCKS)),
    "gemm": lambda to: F.gemm_q4_0_q8_1(to(BLOCKS), to(F.quantize_q8_1(X[:2])), 4, 2, 256),
    "quantize_tensor": lambda to: F.quantize_tensor(to(X)),
    "dequantize_tensor": lambda to: F.dequantize_tensor(to(A8), to(np.array(0.5, F32))),
    "quantize_llm_int8": lambda to: F.quantize_llm_int8(to(X.astype(BF16)), 2.5),
    "dynamic_quantize": lambda to: F.dynamic_quantize(to(X)),
    "pack_int4": lambda to: F.pack_int4(to(A8 % 8), axis=0),
    "unpack_int4": lambda to: F.unpack_int4(to(A4)),
    "int8_matmul": lambda to: F.int8_matmul(to(A8), to(B8)),
    "int8_matmul scaled": lambda to: F.int8_matmul(
        to(A8), to(B8), to(X[:, :1]), to(np.array(0.5, F32)), zero_point_a=to(np.array(3, np.int8))
    ),
    "int4_matmul": lambda to: F.int4_matmul(to(A4), to(B4), 64),
    "matmul_bias_relu": lambda to: F.matmul_bias_relu(
        to(A8.astype(BF16)), to(B8.astype(BF16)), to(np.ones(3, BF16))
    ),
    "binary_matmul": lambda to: F.binary_matmul(to(A8.astype(F32)), to(B8.astype(F32))),
    "fp16_gemm": lambda to: F.fp16_gemm(
        to(A8.astype(np.float16)), to(B8.astype(np.float16)), out_dtype="bfloat16"
    ),
    "fp16_gemm of all": lambda to: F.fp16_gemm(
        to(SMALL),
        to(SMALL.swapaxes(1, 2).astype(F32)),
        to(SMALL[0, :, :3]),
        to(np.array([0.5], F32)),
        2,
        "float16",
    ),
    "bf16_gemm": lambda to: F.bf16_gemm(
        to(SMALL.astype(BF16)), to(SMALL[0].T.astype(BF16)), alpha=3
    ),
    "int8_conv2d": lambda to: F.int8_conv2d(to(IMAGES), to(FILTERS), (2, 1), (0, 1)),
    "binary_conv2d": lambda to: F.binary_conv2d(
        to(IMAGES.astype(np.float16)), to(FILTERS), padding=2, scale=to(np.arange(5, dtype=F32))
    ),
    "rmsnorm_quantize": lambda to: F.rmsnorm_quantize(to(X.astype(BF16)), to(X[0].astype(BF16))),
    "add_rmsnorm_quantize": lambda to: F.add_rmsnorm_quantize(
        to(X), to(X), to(X[0]), residual_out=to(np.empty_like(X))
    ),
    "layernorm_quantize": lambda to: F.layernorm_quantize(to(X), to(X[0]), to(X[1])),
    "silu_mul_quantize": lambda to: F.silu_mul_quantize(to(X), to(X)),
    "gelu_mul_quantize": lambda to: F.gelu_mul_quantize(to(X), to(X), format="mxfp8"),
    "hadamard_quantize": lambda to: F.hadamard_quantize(to(X.astype(np.float16)), format="nf4"),
}  # fmt: skip


def leaves(result):
    """Every array of a result: of a tuple, a dict or a QuantArray too."""
    if isinstance(result, cq.QuantArray):
        return list(result.arrays().values())
    if isinstance(result, dict):
        return list(result.values())
    if isinstance(result, tuple):
        return [leaf for part in result for leaf in leaves(part)]
    return [result]
