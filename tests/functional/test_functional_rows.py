"""Fused row quantization: RMSNorm, SiLU, Hadamard."""

import numpy as np
import pytest
from functional_inputs import F32, FLOATS, integers, normal
from oracle import bits_equal

import cuquant as cq
import cuquant.functional as F


def rmsnorm(x, weight, eps):
    """One row after the other, one square after the other."""
    rows = []
    for row in x.astype(F32).reshape(-1, x.shape[-1]):
        total = 0.0
        for value in row:
            total += float(value) ** 2
        inverse = F32(1) / np.sqrt(F32(total / len(row)) + F32(eps))
        rows.append((row * inverse) * weight.astype(F32))
    return np.stack(rows).reshape(x.shape)


def arrays_equal(found, wanted):
    assert found.format == wanted.format and found.shape == wanted.shape
    parts, others = found.arrays(), wanted.arrays()
    return parts.keys() == others.keys() and all(bits_equal(parts[k], others[k]) for k in parts)


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "nf4", "mxfp8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rmsnorm_quantize_by_its_formula(dtype, format):
    x, weight = (normal(2, 5, 96) * F32(3)).astype(dtype), normal(96, seed=1, dtype=dtype)
    found = F.rmsnorm_quantize(x, weight, eps=1e-5, format=format)
    assert found.dtype == dtype and found.dequantize().dtype == dtype
    y = rmsnorm(x, weight, 1e-5)
    assert arrays_equal(found, cq.quantize(y, format))


def test_rmsnorm_is_not_rounded_before_it_is_quantized():
    x, weight = normal(8, 256, dtype=np.float16), normal(256, seed=1, dtype=np.float16)
    found = F.rmsnorm_quantize(x, weight)
    y = rmsnorm(x, weight, 1e-6)
    assert arrays_equal(found, cq.quantize(y, "int8"))
    assert not arrays_equal(found, cq.quantize(y.astype(np.float16), "int8"))


def test_mean_of_squares_is_summed_in_order_across_pieces():
    """200 rows of 1000 are several pieces; a pairwise float32 sum would end elsewhere."""
    x = normal(200, 1000)
    ones = np.ones(1000, F32)
    assert arrays_equal(F.rmsnorm_quantize(x, ones), cq.quantize(rmsnorm(x, ones, 1e-6), "int8"))


@pytest.mark.parametrize("exponent", [-148, -100, -64, 62, 64, 100, 124])
def test_squares_beyond_float32_do_not_erase_a_row(exponent):
    """Squares of 1e20 overflow float32 and those of 1e-20 vanish; the norm of a row does not."""
    x, weight = (integers(-8, 8, (6, 32), np.int64) | 1).astype(F32), normal(32, seed=1)
    wanted = F.rmsnorm_quantize(x, weight, eps=0, format="fp16").dequantize()
    found = F.rmsnorm_quantize(x * F32(2.0**exponent), weight, eps=0, format="fp16")
    assert wanted.any() and bits_equal(found.dequantize(), wanted)
    largest = np.full((1, 4), np.finfo(F32).max)
    assert (F.rmsnorm_quantize(largest, np.ones(4, F32), format="fp16").dequantize() == 1).all()


def test_rmsnorm_options_are_those_of_quantize():
    x, weight = normal(4, 64, dtype=np.float16), np.ones(64, np.float16)
    y = rmsnorm(x, weight, 1e-6)
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
    # Half a float16 step, and a few float32 roundings (exp, sum, quotient, product).
    step = np.maximum(np.spacing(np.abs(true).astype(np.float16)).astype(np.float64), 2.0**-24)
    values = found.dequantize(dtype="float32")
    assert (np.abs(values - true) <= step / 2 + 6 * 2.0**-24 * np.abs(true)).all()
    far = F.silu_mul_quantize(np.array([[-200, 200]], F32), np.ones((1, 2), F32), format="fp16")
    assert far.dequantize().tolist() == [[0, 200]]


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
    y = exact.astype(F32) * F32(1 / np.sqrt(size))
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
        F.silu_mul_quantize(x, x),
        F.hadamard_quantize(x),
    ):
        assert found.shape == shape and found.dequantize().shape == shape
