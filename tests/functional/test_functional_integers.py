"""Integers with one scale, and packed int4."""

import numpy as np
import pytest
from functional_inputs import BF16, F32, FLOATS, integers, normal
from hypothesis import given
from hypothesis import strategies as st
from oracle import bits_equal

import cuquant.functional as F


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", range(2, 9))
def test_quantize_tensor_by_its_formula(bits, dtype):
    x = normal(3, 5, 7, dtype=dtype)
    q, scale = F.quantize_tensor(x, bits)
    top = 2 ** (bits - 1) - 1
    wide = x.astype(F32)
    assert q.dtype == np.int8 and q.shape == x.shape
    assert bits_equal(scale, np.asarray(np.abs(wide).max() / F32(top)))
    assert (q == np.rint(wide * (F32(1) / scale))).all()
    assert np.abs(q).max() == top
    assert bits_equal(F.dequantize_tensor(q, scale), q.astype(F32) * scale)


def test_quantize_tensor_rounds_half_to_even_and_survives_the_edges():
    q, _ = F.quantize_tensor(np.array([127, 0.5, 1.5, -2.5, -0.0], F32))
    assert q.tolist() == [127, 0, 2, -2, 0]
    for shape in [(0,), (3, 0), (4, 4)]:
        q, scale = F.quantize_tensor(np.zeros(shape, F32))
        assert q.shape == shape and not q.any() and scale.shape == () and scale == 0
    for bad in (np.nan, np.inf, -np.inf):
        q, scale = F.quantize_tensor(np.array([1, bad, 2], F32))
        assert np.isnan(scale) and q.tolist() == [0, 0, 0]
        assert np.isnan(F.dequantize_tensor(q, scale)).all()
    q, scale = F.quantize_tensor(np.array([3e-45, -1e-45], F32))
    assert q.tolist() == [0, 0] and np.isfinite(scale)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shift", [-9, -0.5, 0, 0.5, 9])
def test_dynamic_quantize_by_its_formula(shift, dtype):
    x = (normal(6, 9) + F32(shift)).astype(dtype)
    q, scale, zero_point = F.dynamic_quantize(x)
    wide = x.astype(F32)
    low, high = min(wide.min(), F32(0)), max(wide.max(), F32(0))
    assert bits_equal(scale, np.asarray((high - low) / F32(255)))
    assert zero_point.shape == () and zero_point.dtype == np.uint8
    assert zero_point == np.clip(np.rint(-low / scale), 0, 255)
    assert q.dtype == np.uint8 and q.shape == x.shape
    wanted = np.clip(np.rint(wide / scale) + F32(zero_point), 0, 255)
    assert (q == wanted).all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("low", "high"), [(-3e38, 3e38), (-1e38, 3.3e38), (-2e38, 1.5e38)])
def test_dynamic_quantize_of_a_range_beyond_float32(low, high, dtype):
    x = np.append(np.linspace(low, high, 300, dtype=F32), F32([0, 1, -0.0])).astype(dtype)
    q, scale, zero_point = F.dynamic_quantize(x)
    wide = x.astype(np.float64)
    width = float(F32(wide.max() / 2 - wide.min() / 2)) * 2  # of 24 bits
    assert np.isfinite(scale) and bits_equal(scale, np.asarray(F32(width / 255)))
    assert zero_point == np.rint(F32(-wide.min()) / scale)
    assert q.min() == 0 and q.max() == 255
    assert (q == np.clip(np.rint(x.astype(F32) / scale) + F32(zero_point), 0, 255)).all()


def test_dynamic_quantize_of_zeros_nothing_and_nan():
    for shape in [(0,), (2, 0), (3, 3)]:
        q, scale, zero_point = F.dynamic_quantize(np.zeros(shape, np.float16))
        assert q.shape == shape and not q.any() and scale == 0 and zero_point == 0
        assert scale.shape == zero_point.shape == () and scale.dtype == F32
    q, scale, zero_point = F.dynamic_quantize(np.array([-1, np.nan, np.inf], F32))
    assert np.isnan(scale) and not q.any() and zero_point == 0


def test_dequantize_tensor_takes_every_integer_and_scale():
    q = integers(-100, 100, (3, 4), np.int64)
    for dtype in (np.int8, np.int16, np.int32, np.int64):
        for scale in (0.5, F32(0.5), np.full((3, 1), 0.5, F32), np.array([0.5] * 4, BF16)):
            assert bits_equal(F.dequantize_tensor(q.astype(dtype), scale), q.astype(F32) / F32(2))
    single = F.dequantize_tensor(np.array(-3, np.int32), 2)
    assert bits_equal(single, np.array(-6, F32))


@given(st.integers(1, 9), st.integers(0, 9), st.sampled_from([0, 1, -1]), st.integers(0, 99))
def test_int4_packs_and_unpacks(rows, columns, axis, seed):
    x = integers(-8, 7, (rows, columns), np.int8, seed)
    packed = F.pack_int4(x, axis)
    length = x.shape[axis]
    assert packed.dtype == np.uint8 and packed.shape[axis] == (length + 1) // 2
    along, moved = np.moveaxis(packed, axis, -1), np.moveaxis(x, axis, -1)
    for i in range(length):
        byte = along[..., i // 2]
        nibble = byte >> 4 if i % 2 else byte & 15
        assert (nibble == moved[..., i] % 16).all()
    if length % 2:
        assert not (along[..., -1] >> 4).any()
    assert bits_equal(F.unpack_int4(packed, length, axis), x)
    assert F.unpack_int4(packed, axis=axis).shape[axis] == 2 * packed.shape[axis]
