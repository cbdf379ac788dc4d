"""All of `functional`: its names, kinds of array, the seeds' examples, every refusal."""

import inspect
import re

import numpy as np
import pytest
from functional_inputs import (
    A4,
    A8,
    ABSMAX,
    B4,
    B8,
    BLOCKS,
    CALLS,
    F32,
    K3,
    NESTED,
    NF4,
    SCALE3,
    TYPES,
    WEIGHTS,
    X,
    leaves,
    needs_torch,
    numpy_of,
    torch,
    torch_of,
)
from oracle import bits_equal

import cuquant as cq
import cuquant.functional as F
from cuquant.errors import FormatError

# ---- the list of names ------------------------------------------------------------------------


def test_every_ggml_type_has_its_functions():
    named = set(F.__all__)
    assert {f"quantize_{name}" for name in TYPES} <= named
    assert {f"dequantize_{name}" for name in TYPES} <= named
    assert {f"gemm_{name}_q8_1" for name in TYPES} & named == {
        f"gemm_{name}_q8_1" for name in WEIGHTS
    }


def test_every_name_is_documented_and_says_its_own_name():
    assert sorted(F.__all__) == F.__all__
    for name in F.__all__:
        function = getattr(F, name)
        assert function.__name__ == name or function is F.int8_matmul
        text = inspect.getdoc(function)
        for part in ("Parameters", "Returns", "Raises", "Notes", "Examples"):
            assert f"\n{part}\n---" in text, (name, part)
        assert f"functional.{function.__name__}(" in text, name


# ---- kinds of array, views --------------------------------------------------------------------


@needs_torch
@pytest.mark.parametrize("name", CALLS)
def test_torch_in_torch_out_with_the_same_bits(name):
    plain = CALLS[name](lambda x: x)
    found = CALLS[name](torch_of)
    parts, wanted = leaves(found), leaves(plain)
    assert len(parts) == len(wanted)
    for part, want in zip(parts, wanted, strict=True):
        assert isinstance(part, torch.Tensor) and part.device.type == "cpu"
        assert isinstance(want, np.ndarray) and bits_equal(numpy_of(part), want)
    if isinstance(found, cq.QuantArray):
        assert found.kind == "torch" and found.dtype == plain.dtype


def awkward(x):
    """The same values, misaligned and with a step of -2 along the last axis."""
    if not x.ndim:
        return x
    raw = np.zeros(x.nbytes * 2 + x.itemsize + 1, np.uint8)[1 : 1 + x.nbytes * 2]
    wide = raw.view(x.dtype).reshape(*x.shape[:-1], 2 * x.shape[-1])
    view = wide[..., ::-2]
    view[...] = x
    return view


@pytest.mark.parametrize("name", CALLS)
def test_any_strides_and_alignment(name):
    plain, found = (leaves(CALLS[name](to)) for to in (lambda x: x, awkward))
    assert all(bits_equal(a, b) for a, b in zip(plain, found, strict=True))


@needs_torch
def test_the_first_array_decides_the_kind():
    assert isinstance(F.int8_matmul(torch_of(A8), B8), torch.Tensor)
    assert isinstance(F.int8_matmul(A8, torch_of(B8)), np.ndarray)
    assert isinstance(F.dequantize_nf4(torch_of(NF4), ABSMAX), torch.Tensor)


# ---- the seeds' examples ----------------------------------------------------------------------


@needs_torch
def test_seed_000_as_written():
    weight = torch.randn(256, 64, dtype=torch.float32)
    weight_quant, absmax = F.quantize_nf4(
        weight.flatten(),
        block_size_outer=64,
        block_size_inner=1
    )  # fmt: skip
    assert weight_quant.numel() == 8192 and weight_quant.dtype == torch.uint8  # 64 KB to 8 KB
    assert absmax.shape == (256,) and torch.equal(absmax, weight.abs().amax(1))
    restored = F.dequantize_nf4(weight_quant, absmax, weight.shape)
    assert torch.mean((restored - weight) ** 2) < 0.01  # 20.7 dB


@needs_torch
def test_seed_003_as_written():
    M, N, K = 96, 2, 1024
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(M, K, dtype=torch.float32, generator=generator)
    activation = torch.randn(N, K, dtype=torch.float32, generator=generator)
    weight_q = F.quantize_q4_0(weight)  # [M, K] -> [M, K//32, 18]
    activation_q = F.quantize_q8_1(activation)  # [N, K] -> [N, K//32, 36]
    assert weight_q.shape == (M, K // 32, 18) and activation_q.shape == (N, K // 32, 36)
    output = F.gemm_q4_0_q8_1(weight_q, activation_q, M, N, K)
    output_ref = weight @ activation.T
    nmse = torch.mean((output - output_ref) ** 2) / torch.mean(output_ref**2)
    assert 0.003 < nmse < 0.015  # q4_0's own: 0.0076 on normal data
    assert F.dequantize_q4_0(weight_q, K).shape == (M, K)


@needs_torch
def test_seed_004_scaled_once():
    M, K, N = 64, 128, 32
    A = torch.randn(M, K, generator=torch.Generator().manual_seed(0))
    B = torch.randn(K, N, generator=torch.Generator().manual_seed(1))
    A_int8, scale_a = F.quantize_tensor(A)
    B_int8, scale_b = F.quantize_tensor(B)
    C_fp32 = F.int8_matmul(A_int8, B_int8, scale_a=scale_a, scale_b=scale_b, scale_c=1.0)
    error = (C_fp32 - A @ B).abs().max()
    assert error < 0.6 < (A @ B).abs().max()
    C_int32 = F.int8_matmul(A_int8, B_int8)
    assert C_int32.dtype == torch.int32
    torch.testing.assert_close(F.dequantize_tensor(C_int32, scale_a * scale_b), C_fp32)
    with pytest.raises(TypeError, match="scale once"):  # the example as it was written
        F.dequantize_tensor(C_fp32, scale_a * scale_b)


# ---- refusals ---------------------------------------------------------------------------------


HALF, DOUBLE = X.astype(np.float16), X.astype(np.float64)
LONG = np.zeros((2, 2, 2), np.int8)
REFUSED = [
    # blocks of bitsandbytes
    (lambda: F.quantize_nf4([1.0]), TypeError, "must be a NumPy, CuPy or torch array, got list"),
    (lambda: F.quantize_nf4(DOUBLE), TypeError, "x must be float32, float16 or bfloat16"),
    (lambda: F.quantize_nf4(X.astype(">f4")), TypeError, "x must be float32"),
    (lambda: F.quantize_fp4(A8), TypeError, "got int8"),
    (lambda: F.quantize_nf4(np.array(1, F32)), ValueError, "x is 0-d"),
    (lambda: F.quantize_nf4(np.ma.masked_array(X)), TypeError, "masked"),
    (lambda: F.quantize_nf4(X, 0), ValueError, "block_size_outer must be 1 or more, got 0"),
    (lambda: F.quantize_nf4(X, 12), ValueError, "multiple of 8"),
    (lambda: F.quantize_nf4(X, "row"), TypeError, "block_size_outer must be an int, got 'row'"),
    (lambda: F.quantize_nf4(X, 64.0), TypeError, "block_size_outer must be an int"),
    (lambda: F.quantize_nf4(X, 64, 64), ValueError, "block_size_inner is 64; pass 1, or 256"),
    (lambda: F.quantize_nf4(X, 64, True), TypeError, "block_size_inner must be an int"),
    (lambda: F.dequantize_nf4(NF4.astype(np.int8), ABSMAX), TypeError, "packed must be uint8"),
    (lambda: F.dequantize_nf4(NF4, ABSMAX[:-1]), FormatError, "absmax has 15 entries; 16"),
    (lambda: F.dequantize_nf4(NF4, ABSMAX.astype(float)), TypeError, "absmax must be float32"),
    (lambda: F.dequantize_nf4(NF4, 1.0), TypeError, "absmax must be a NumPy"),
    (lambda: F.dequantize_nf4(NF4[:-1], ABSMAX, (4, 256)), FormatError, "511 bytes; 1024 elem"),
    (lambda: F.dequantize_fp4(NF4, ABSMAX, 1022), FormatError, "have 511, two in each"),
    (lambda: F.dequantize_nf4(NF4, ABSMAX, (4, -256)), ValueError, "shape must be 0 or more"),
    (lambda: F.dequantize_nf4(NF4, ABSMAX, block_size=128), FormatError, "16 entries; 8"),
    (lambda: F.dequantize_nf4(NF4, ABSMAX, dtype="float64"), TypeError, "dtype must be float32"),
    (lambda: F.dequantize_nf4(NF4, {"absmax_q": ABSMAX}), FormatError, "lacks nested_absmax"),
    (lambda: F.dequantize_nf4(NF4, {**NESTED, "absmax_q": NF4}), FormatError, "absmax_q has 512"),
    (lambda: F.dequantize_nf4(NF4, {**NESTED, "absmax_q": ABSMAX}), TypeError, "absmax_q must be"),
    (lambda: F.dequantize_nf4(NF4, {**NESTED, "nested_absmax": ABSMAX}), FormatError, "16 entries"),
    (lambda: F.dequantize_nf4(NF4, {**NESTED, "nested_map": X[0, 1:]}), FormatError, "255 entries"),
    (lambda: F.dequantize_nf4(NF4, {**NESTED, "offset": ABSMAX}), ValueError, "offset must be one"),
    # k bits
    (lambda: F.quantize_kbit(X, 1), ValueError, r"k must be in 2..8, got 1"),
    (lambda: F.quantize_kbit(X, 9), ValueError, r"k must be in 2..8, got 9"),
    (lambda: F.quantize_kbit(X, 3.0), TypeError, "k must be an int"),
    (lambda: F.quantize_kbit(X, 3, "log"), ValueError, "'lloyd', 'normal', 'linear' or an array"),
    (lambda: F.quantize_kbit(X, 2, [0, 1, 2, 3, 4]), ValueError, "2 bits hold 2 to 4 levels"),
    (lambda: F.quantize_kbit(X, 2, [1, 0]), ValueError, "ascending"),
    (lambda: F.quantize_kbit(X, 3, block_size=5), ValueError, "multiple of 8"),
    (lambda: F.quantize_kbit(X, 3, packing="low"), ValueError, "'dense', 'word' or 'planes'"),
    (lambda: F.quantize_kbit(DOUBLE, 3), TypeError, "x must be float32"),
    (lambda: F.quantize_kbit(np.array(1, F32), 3), ValueError, "0-d"),
    (lambda: F.dequantize_kbit(K3, SCALE3, 4, 1024), FormatError, "1024 codes of 4 bits"),
    (lambda: F.dequantize_kbit(K3[None], SCALE3, 3, 1024), FormatError, "words in one axis"),
    (lambda: F.dequantize_kbit(K3, SCALE3[1:], 3, 1024), FormatError, "scale has 31 entries"),
    (lambda: F.dequantize_kbit(NF4, SCALE3, 3, 1024), TypeError, "packed must be uint32 or int32"),
    (lambda: F.dequantize_kbit(K3, SCALE3, 3, 1024, [0, 1]), FormatError, "holds code 7, .* 2 lev"),
    (lambda: F.convert_packing(K3, 3, 1025, "dense", "word"), FormatError, "97 words"),
    (lambda: F.convert_packing(K3, 3, -1, "dense", "word"), ValueError, "n must be 0 or more"),
    (lambda: F.convert_packing(K3, 3, 1024, "dense", "high"), ValueError, "'high' is unknown"),
    (lambda: F.convert_packing(K3, 3, 1024, "bits", "word"), ValueError, "'bits' is unknown"),
    (lambda: F.compact_codebook(A8[0]), TypeError, "must hold floats, got int8"),
    (lambda: F.compact_codebook(X), ValueError, r"one axis of 1 to 256 entries"),
    (lambda: F.compact_codebook(np.zeros(257, F32)), ValueError, r"shape \(257,\)"),
    (lambda: F.compact_codebook(np.zeros(0, F32)), ValueError, r"shape \(0,\)"),
    (lambda: F.compact_codebook(np.array([1e39])), ValueError, "finite, in float32"),
    (lambda: F.compact_codebook(np.array([np.nan, 1])), ValueError, "finite, in float32"),
    # ggml
    (lambda: F.quantize_q4_0(X[:, :31]), ValueError, "multiple of 32, got 31"),
    (lambda: F.quantize_q4_k(X[:, :128]), ValueError, "multiple of 256, got 128"),
    (lambda: F.quantize_nvfp4(X[:, :32]), ValueError, "multiple of 64"),
    (lambda: F.quantize_mxfp4(X[:, :33]), ValueError, "multiple of 32"),
    (lambda: F.quantize_q4_0(np.array(1, F32)), ValueError, "0-d"),
    (lambda: F.quantize_q8_0(DOUBLE), TypeError, "x must be float32"),
    (lambda: F.quantize_q8_1(X, "floats"), ValueError, r"sum must be one of \('quants', 'values"),
    (lambda: F.quantize_q8_1(DOUBLE, "values"), TypeError, "x must be float32"),
    (lambda: F.quantize_q8_1(X[:, :31], "values"), ValueError, "multiple of 32"),
    (lambda: F.quantize_q8_1(np.array(1, F32), "values"), ValueError, "0-d"),
    (lambda: F.dequantize_q4_0(BLOCKS.view(np.int8)), TypeError, "q must be uint8"),
    (lambda: F.dequantize_q4_0(BLOCKS[..., :17]), FormatError, r"\[..., K // 32, 18\]"),
    (lambda: F.dequantize_q4_0(BLOCKS[0, 0]), FormatError, r"q has shape \(18,\)"),
    (lambda: F.dequantize_q4_0(BLOCKS, 255), ValueError, "K is 255, but q has 8 blocks of 32"),
    (lambda: F.dequantize_q4_0(BLOCKS, 256.0), TypeError, "K must be an int"),
    (lambda: F.gemm_q4_0_q8_1(BLOCKS, BLOCKS, 4, 4, 256), ValueError, "activation_q has shape"),
    (lambda: F.gemm_q4_0_q8_1(BLOCKS, BLOCKS, 5, 4, 256), ValueError, "weight_q has shape"),
    (lambda: F.gemm_q4_0_q8_1(BLOCKS, BLOCKS, 4, 4, 250), ValueError, "multiple of 32"),
    (lambda: F.gemm_q4_k_q8_1(BLOCKS, BLOCKS, 4, 4, 128), ValueError, "multiple of 256"),
    (lambda: F.gemm_q4_0_q8_1(X, BLOCKS, 4, 4, 256), TypeError, "weight_q must be uint8"),
    (lambda: F.gemm_q4_0_q8_1(BLOCKS, X, 4, 4, 256), TypeError, "activation_q must be uint8"),
    (lambda: F.gemm_q4_0_q8_1(BLOCKS, BLOCKS, -1, 4, 256), ValueError, "M must be 0 or more"),
    # integers
    (lambda: F.quantize_tensor(X, 1), ValueError, r"bits must be in 2..8, got 1"),
    (lambda: F.quantize_tensor(X, 9), ValueError, r"bits must be in 2..8, got 9"),
    (lambda: F.quantize_tensor(DOUBLE), TypeError, "x must be float32"),
    (lambda: F.quantize_tensor(np.array(1, F32)), ValueError, "0-d"),
    (lambda: F.dynamic_quantize(A8), TypeError, "x must be float32"),
    (lambda: F.dynamic_quantize(np.array(1, F32)), ValueError, "0-d"),
    (lambda: F.dequantize_tensor(X, 1.0), TypeError, "scaled already"),
    (lambda: F.dequantize_tensor(A8 > 0, 1.0), TypeError, "q must hold integers, got bool"),
    (lambda: F.dequantize_tensor(A8, np.ones(5, F32)), ValueError, "does not broadcast"),
    (lambda: F.dequantize_tensor(A8, np.ones((2, 4, 64), F32)), ValueError, "does not broadcast"),
    (lambda: F.dequantize_tensor(A8, "1"), TypeError, "scale must be a number"),
    (lambda: F.pack_int4(X), TypeError, "x must hold integers, got float32"),
    (lambda: F.pack_int4(np.array([8])), ValueError, r"x holds 8..8; int4 holds -8..7"),
    (lambda: F.pack_int4(np.array([0, -9])), ValueError, r"x holds -9..0"),
    (lambda: F.pack_int4(np.array(1)), ValueError, "0-d"),
    (lambda: F.pack_int4(A8 % 8, 2), ValueError, r"axis must be in -2..1, got 2"),
    (lambda: F.pack_int4(A8 % 8, None), TypeError, "axis must be an int"),
    (lambda: F.unpack_int4(A8), TypeError, "packed must be uint8"),
    (lambda: F.unpack_int4(A4, 62), FormatError, "32 bytes along axis 1; 62 integers have 31"),
    (lambda: F.unpack_int4(A4, -1), ValueError, "n must be 0 or more"),
    (lambda: F.unpack_int4(np.array(1, np.uint8)), ValueError, "0-d"),
    # products
    (lambda: F.int8_matmul(X, B8), TypeError, "a must be int8 or uint8, got float32"),
    (lambda: F.int8_matmul(A8, B8.astype(np.int16)), TypeError, "b must be int8 or uint8"),
    (lambda: F.int8_matmul(A8, B8.T), ValueError, r"pass w.T for a weight \[N, K\]"),
    (
        lambda: F.int8_matmul(LONG, LONG[0, :1]),
        ValueError,
        r"a has shape \(2, 2, 2\) and b \(1, 2\)",
    ),
    (lambda: F.int8_matmul(LONG, LONG[:, None].repeat(3, 1)), ValueError, "their batches differ"),
    (lambda: F.int8_matmul(LONG, LONG, LONG[:1]), ValueError, r"broadcasts to \(2, 2, 1\)"),
    (lambda: F.int8_matmul(A8, B8[0]), ValueError, r"b has shape \(3,\); it must be \[..., K, N\]"),
    (lambda: F.int8_matmul(A8, B8, ABSMAX), ValueError, r"a number, \(4,\) or \(4, 1\)"),
    (lambda: F.int8_matmul(A8, B8, scale_b=ABSMAX[:4]), ValueError, r"number, \(3,\) or \(1, 3\)"),
    (lambda: F.int8_matmul(A8, B8, scale_b=X[:3, :1]), ValueError, r"scale_b has shape \(3, 1\)"),
    (lambda: F.int8_matmul(A8, B8, scale_c=ABSMAX), ValueError, "scale_c must be one number"),
    (lambda: F.int8_matmul(A8, B8, "1"), TypeError, "scale_a must be a number"),
    (lambda: F.int8_matmul(A8, B8, zero_point_a=128), ValueError, r"in -128..127, got 128"),
    (lambda: F.int8_matmul(A8, B8, zero_point_b=1.5), TypeError, "zero_point_b must be an int"),
    (lambda: F.int4_matmul(A8, B4), TypeError, "a must be uint8, got int8"),
    (lambda: F.int4_matmul(A4, B8), TypeError, "b must be uint8, got int8"),
    (lambda: F.int4_matmul(A4, A4), ValueError, "a's columns must be as many"),
    (lambda: F.int4_matmul(A4, B4, 65), FormatError, "65 integers have 33"),
    (lambda: F.int4_matmul(A4, B4, 64, ABSMAX), ValueError, "scale_a has shape"),
    (lambda: F.matmul_bias_relu(A8, X, X[0]), TypeError, "two integers or two floats"),
    (lambda: F.matmul_bias_relu(DOUBLE, DOUBLE, X[0]), TypeError, "a must be float32"),
    (lambda: F.matmul_bias_relu(A8, B8, X[0]), ValueError, r"bias has shape \(256,\)"),
    (lambda: F.matmul_bias_relu(A8, B8, A8[0, :3]), TypeError, "bias must be float32"),
    (lambda: F.matmul_bias_relu(A8, B8, None), TypeError, "bias must be a NumPy"),
    (lambda: F.matmul_bias_relu(X, X, X[0]), ValueError, "a's columns"),
    (
        lambda: F.matmul_bias_relu(A8, B8, X[0, :3], out_dtype="int8"),
        TypeError,
        "out_dtype must be float32",
    ),
    (lambda: F.binary_matmul(X, X), ValueError, "a's columns"),
    (lambda: F.binary_matmul(X * np.nan, X.T), ValueError, "a holds NaN, which has no sign"),
    (lambda: F.binary_matmul(DOUBLE, DOUBLE.T), TypeError, "a must be float32"),
    (lambda: F.fp16_gemm(HALF, HALF), ValueError, "a's columns"),
    (lambda: F.fp16_gemm(A8, B8), TypeError, "a must be float32"),
    (lambda: F.fp16_gemm(HALF, HALF.T, beta=1), ValueError, "beta is 1.0 without a c"),
    (lambda: F.fp16_gemm(HALF, HALF.T, HALF), ValueError, r"c has shape \(4, 256\)"),
    (lambda: F.fp16_gemm(HALF, HALF.T, X[:, :4], alpha="1"), TypeError, "alpha must be a number"),
    (lambda: F.fp16_gemm(HALF, HALF.T, out_dtype="int8"), TypeError, "out_dtype must be"),
    # rows
    (lambda: F.rmsnorm_quantize(DOUBLE, X[0]), TypeError, "x must be float32"),
    (lambda: F.rmsnorm_quantize(X, DOUBLE[0]), TypeError, "weight must be float32"),
    (lambda: F.rmsnorm_quantize(X, X), ValueError, "weight has shape .* x has 256 columns"),
    (lambda: F.rmsnorm_quantize(X, X[0], eps=-1), ValueError, "eps must be finite and not neg"),
    (lambda: F.rmsnorm_quantize(X, X[0], eps=np.nan), ValueError, "eps must be finite"),
    (lambda: F.rmsnorm_quantize(np.array(1, F32), X[0]), ValueError, "x is 0-d"),
    (lambda: F.rmsnorm_quantize(X, X[0], format="int9"), ValueError, "unknown format 'int9'"),
    (lambda: F.rmsnorm_quantize(X, X[0], block=32), TypeError, "block"),
    (
        lambda: F.rmsnorm_quantize(HALF, HALF[0], out=cq.quantize(X, "int8")),
        ValueError,
        "out has dtype float32; this call gives float16",
    ),
    (lambda: F.rmsnorm_quantize(X, X[0], out=X), TypeError, "out must be a QuantArray"),
    (lambda: F.add_rmsnorm_quantize(X, X[:2], X[0]), ValueError, "residual has shape"),
    (lambda: F.add_rmsnorm_quantize(X, None, X[0]), TypeError, "residual must be a NumPy"),
    (
        lambda: F.add_rmsnorm_quantize(X, X, X[0], residual_out=np.zeros((2, 2), F32)),
        ValueError,
        "out has shape",
    ),
    (
        lambda: F.add_rmsnorm_quantize(X, X, X[0], residual_out=HALF.copy()),
        ValueError,
        "out has dtype float16",
    ),
    (lambda: F.silu_mul_quantize(X, X[:2]), ValueError, r"up has shape .* gate \(4, 256\)"),
    (lambda: F.silu_mul_quantize(DOUBLE, X), TypeError, "gate must be float32"),
    (lambda: F.hadamard_quantize(X, group=3), ValueError, "group must be a power of two, got 3"),
    (lambda: F.hadamard_quantize(X, group=512), ValueError, "does not divide x's 256"),
    (lambda: F.hadamard_quantize(X[:, :96]), ValueError, "got 96; pass group=, such as 32"),
    (lambda: F.hadamard_quantize(X, group=0), ValueError, "group must be 1 or more"),
    (lambda: F.hadamard_quantize(A8), TypeError, "x must be float32"),
]


def call_text(call):
    """What stands between "lambda:" and the expected exception, as a test id."""
    constants = [c for c in call.__code__.co_consts if isinstance(c, (str, int, float))]
    return "-".join([*call.__code__.co_names[1:2], *map(str, constants)])


@pytest.mark.parametrize("call, error, message", REFUSED, ids=[call_text(r[0]) for r in REFUSED])
def test_refusals_say_what_came_and_what_is_wanted(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert re.search(message, str(caught.value)), str(caught.value)
    assert type(caught.value) is error
