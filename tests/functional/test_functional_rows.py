"""Fused row quantization on the CPU: the bytes of the layer and `quantize` after it."""

import numpy as np
import pytest
from functional_inputs import F32, FLOATS, integers, normal
from oracle import bits_equal

import cuquant as cq
import cuquant.functional as F
from cuquant.reference import rows


def arrays_equal(found, wanted):
    assert found.format == wanted.format and found.shape == wanted.shape
    parts, others = found.arrays(), wanted.arrays()
    return parts.keys() == others.keys() and all(bits_equal(parts[k], others[k]) for k in parts)


FORMATS = {
    "int8": {}, "int8 tensor": {"block_size": "tensor"}, "fp8_e4m3": {"block_size": "row"},
    "fp8_e5m2": {"block_size": 32}, "mxfp8": {}, "mxfp4": {}, "nvfp4": {}, "int4": {}, "nf4": {},
    "q8_0": {}, "k3": {"block_size": 16},
}  # fmt: skip


def operations(x, other, weight, bias, signs):
    """Each operation fused, and its values as the reference has them."""
    wide, shift = weight.astype(F32), bias.astype(F32)
    eps = F32(1e-5)
    return {
        "rmsnorm": (
            lambda **how: F.rmsnorm_quantize(x, weight, eps=1e-5, **how),
            rows.rmsnorm(x, wide, eps)[0],
        ),
        "add_rmsnorm": (
            lambda **how: F.add_rmsnorm_quantize(x, other, weight, eps=1e-5, **how),
            rows.rmsnorm(rows.added(x, other), wide, eps)[0],
        ),
        "layernorm": (
            lambda **how: F.layernorm_quantize(x, weight, bias, **how),
            rows.layernorm(x, wide, shift, eps),
        ),
        "layernorm without bias": (
            lambda **how: F.layernorm_quantize(x, weight, **how),
            rows.layernorm(x, wide, None, eps),
        ),
        "silu_mul": (lambda **how: F.silu_mul_quantize(x, other, **how), rows.silu_mul(x, other)),
        "gelu_mul": (lambda **how: F.gelu_mul_quantize(x, other, **how), rows.gelu_mul(x, other)),
        "hadamard": (
            lambda **how: F.hadamard_quantize(x, group=32, signs=signs, **how),
            rows.hadamard(x, 32, signs),
        ),
    }


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fused_is_unfused(dtype, format):
    shape = (2, 5, 96)
    signs = np.where(normal(96, seed=4) > 0, F32(1), F32(-1))
    arrays = ((normal(*shape, seed=i) * F32(3)).astype(dtype) for i in range(2))
    vectors = (normal(96, seed=i, dtype=dtype) for i in (2, 3))
    how = {"format": format.split()[0], **FORMATS[format]}
    for name, (fused, values) in operations(*arrays, *vectors, signs).items():
        found = fused(**how)
        assert values.dtype == found.dtype == dtype and found.shape == shape, name
        assert arrays_equal(found, cq.quantize(values, **how)), name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_other_dtypes_of_weights(dtype):
    x, weight, bias = normal(3, 64, dtype=dtype), normal(64, seed=1), normal(64, seed=2)
    found = F.layernorm_quantize(x, weight.astype(np.float16), bias)
    half = weight.astype(np.float16).astype(F32)
    assert arrays_equal(found, cq.quantize(rows.layernorm(x, half, bias, F32(1e-5)), "int8"))


@pytest.mark.parametrize("exponent", [-148, -100, -64, 62, 64, 100, 124])
def test_squares_beyond_float32_do_not_erase_a_row(exponent):
    """Squares of 1e20 overflow float32 and those of 1e-20 vanish; the norm of a row does not."""
    x, weight = (integers(-8, 8, (6, 32), np.int64) | 1).astype(F32), normal(32, seed=1)
    wanted = F.rmsnorm_quantize(x, weight, eps=0, format="fp16").dequantize()
    found = F.rmsnorm_quantize(x * F32(2.0**exponent), weight, eps=0, format="fp16")
    assert wanted.any() and bits_equal(found.dequantize(), wanted)
    largest = np.full((1, 4), np.finfo(F32).max)
    assert (F.rmsnorm_quantize(largest, np.ones(4, F32), format="fp16").dequantize() == 1).all()


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "mxfp4", "uint4"])
@pytest.mark.parametrize("columns", [1, 17, 4096])
def test_codes_of_a_constant_row_are_those_of_zero(columns, format):
    x = np.repeat(F32([[1 / 3], [123.456], [3e38]]), columns, axis=1)
    found = F.layernorm_quantize(x, np.ones(columns, F32), format=format)
    assert arrays_equal(found, cq.quantize(np.zeros_like(x), format))


def test_rmsnorm_options_are_those_of_quantize():
    x, weight = normal(4, 64, dtype=np.float16), np.ones(64, np.float16)
    y = rows.rmsnorm(x, weight.astype(F32), F32(1e-6))[0]
    found = F.rmsnorm_quantize(x, weight, format="int4", block_size=16)
    assert arrays_equal(found, cq.quantize(y, "int4", block_size=16))
    static = F.rmsnorm_quantize(x, weight, block_size="tensor", scale=0.05)
    assert arrays_equal(static, cq.quantize(y, "int8", block_size="tensor", scale=0.05))
    target = cq.quantize(np.zeros_like(x), "int8")
    assert F.rmsnorm_quantize(x, weight, out=target) is target
    assert arrays_equal(target, cq.quantize(y, "int8"))
    y[0, 0] = x[0, 0] = np.nan
    assert np.isnan(F.rmsnorm_quantize(x, weight).dequantize()[0]).all()
    with pytest.raises(ValueError, match="nonfinite='raise'"):
        F.rmsnorm_quantize(x, weight, nonfinite="raise")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_add_rmsnorm_quantize_normalizes_the_rounded_sum(dtype):
    x, residual = normal(6, 80, dtype=dtype), normal(6, 80, seed=1, dtype=dtype)
    weight = normal(80, seed=2, dtype=dtype)
    total = (x.astype(F32) + residual.astype(F32)).astype(dtype)
    out = np.empty_like(x)
    before = x.copy(), residual.copy()
    found = F.add_rmsnorm_quantize(x, residual, weight, residual_out=out)
    assert bits_equal(out, total)
    assert bits_equal(x, before[0]) and bits_equal(residual, before[1])
    assert found.dtype == dtype
    assert arrays_equal(found, F.rmsnorm_quantize(total, weight))
    again = F.add_rmsnorm_quantize(x, residual, weight, residual_out=residual)
    assert arrays_equal(again, found) and bits_equal(residual, total)


def test_add_rmsnorm_writes_nothing_where_it_refuses():
    x, residual = normal(2, 64), np.zeros((2, 64), F32)
    with pytest.raises(ValueError, match="unknown format"):
        F.add_rmsnorm_quantize(x, x, np.ones(64, F32), format="int9", residual_out=residual)
    assert not residual.any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_silu_mul_quantize(dtype):
    gate, up = (normal(40, 64) * F32(4)).astype(dtype), normal(40, 64, seed=1, dtype=dtype)
    found = F.silu_mul_quantize(gate, up, format="fp16")
    assert found.dtype == dtype and found.shape == gate.shape
    g, u = gate.astype(np.float64), up.astype(np.float64)
    true = g / (1 + np.exp(-g)) * u
    # Half a step of float16 and of the dtype, and a few float32 roundings.
    step = np.spacing(np.abs(true).astype(dtype)).astype(np.float64)
    step += np.maximum(np.spacing(np.abs(true).astype(np.float16)).astype(np.float64), 2.0**-24)
    values = found.dequantize(dtype="float32")
    assert (np.abs(values - true) <= step * (0.5 + 2.0**-8) + 4 * 2.0**-24 * np.abs(true)).all()
    far = F.silu_mul_quantize(np.array([[-200, 200]], F32), np.ones((1, 2), F32), format="fp16")
    assert far.dequantize().tolist() == [[0, 200]]
    farthest = np.array([[-np.inf, np.inf]], dtype)
    found = F.silu_mul_quantize(farthest, np.ones((1, 2), dtype), format="fp16").dequantize()
    assert np.isnan(found[0, 0]) and found[0, 1] == np.inf


def sylvester(size):
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@pytest.mark.parametrize("group", [None, 1, 2, 16, 128])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_hadamard_quantize_multiplies_by_sylvesters_matrix(dtype, group):
    x = integers(-8, 8, (3, 2, 128), np.int64).astype(dtype)  # sums are exact
    size = group or 128
    exact = (x.astype(np.float64).reshape(-1, size) @ sylvester(size).T).reshape(x.shape)
    y = (exact.astype(F32) * F32(1 / np.sqrt(size))).astype(dtype)
    found = F.hadamard_quantize(x, group=group, block_size=32)
    assert found.dtype == dtype and arrays_equal(found, cq.quantize(y, "int8", block_size=32))


def test_sums_beyond_float32_do_not_spoil_a_hadamard_transform():
    x = normal(4, 64)
    x /= np.abs(x).max()
    wanted = F.hadamard_quantize(x, format="fp8_e4m3")
    found = F.hadamard_quantize(x * F32(2.0**125), format="fp8_e4m3")
    assert bits_equal(found.packed, wanted.packed)
    assert bits_equal(found.scale, wanted.scale * F32(2.0**125))


def test_hadamard_spreads_an_outlier():
    x = normal(4, 256) * F32(0.01)
    x[:, 7] = 10
    plain = cq.quantize(x, "int4", block_size=256).dequantize()
    turned = F.hadamard_quantize(x, format="fp16").dequantize()
    back = F.hadamard_quantize(turned, format="fp16").dequantize()
    assert np.abs(back - x).max() < 0.01  # its own inverse
    spread = cq.quantize(turned, "int4", block_size=256).dequantize()
    wrong = [np.abs(q - t).max() / np.abs(t).max() for q, t in ((plain, x), (spread, turned))]
    assert np.abs(turned).max() < 1 and wrong[0] < 0.01 and wrong[1] < 0.2
    assert (plain[:, :7] == 0).all() and (spread != 0).all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)])
def test_rows_of_nothing(shape):
    x, weight = np.zeros(shape, F32), np.zeros(shape[-1:], F32)
    for found in (
        F.rmsnorm_quantize(x, weight),
        F.add_rmsnorm_quantize(x, x, weight, residual_out=x.copy()),
        F.layernorm_quantize(x, weight, weight),
        F.silu_mul_quantize(x, x),
        F.gelu_mul_quantize(x, x),
        F.hadamard_quantize(x, signs=np.ones(shape[-1:], F32)),
    ):
        assert found.shape == shape and found.dequantize().shape == shape


def test_operands_that_do_not_fit():
    x, weight = normal(2, 64), np.ones(64, F32)
    for call, error, message in (
        (lambda: F.layernorm_quantize(x, weight[:3]), ValueError, r"weight has shape \(3,\)"),
        (lambda: F.layernorm_quantize(x, weight, x), ValueError, r"bias has shape \(2, 64\)"),
        (lambda: F.gelu_mul_quantize(x, x[:1]), ValueError, r"up has shape \(1, 64\) and gate"),
        (lambda: F.silu_mul_quantize(x, x.astype(np.float16)), TypeError, "up is float16 and gate"),
        (lambda: F.add_rmsnorm_quantize(x, weight, weight), ValueError, "residual has shape"),
        (lambda: F.hadamard_quantize(x, signs=weight * 2), ValueError, "must be 1 and -1"),
        (lambda: F.hadamard_quantize(x, signs=weight[1:]), ValueError, "signs has shape"),
        (lambda: F.hadamard_quantize(x, group=24), ValueError, "power of two"),
        (lambda: F.rmsnorm_quantize(x, weight, eps=-1), ValueError, "not negative"),
    ):
        with pytest.raises(error, match=message):
            call()
