"""Convolutions of integers and signs, against torch's in float64."""

import numpy as np
import pytest
from functional_inputs import BF16, F32, integers, needs_torch, normal, torch_of
from oracle import bits_equal

import cuquant as cq
import cuquant.functional as F

CASES = [
    ((1, 1, 1, 1), (1, 1, 1, 1), 1, 0),
    ((2, 3, 8, 9), (5, 3, 3, 3), 1, 1),
    ((2, 16, 9, 7), (4, 16, 3, 2), (2, 1), (0, 2)),
    ((1, 33, 5, 5), (3, 33, 5, 5), 1, 4),
    ((3, 20, 12, 6), (7, 20, 1, 1), 3, 0),
    ((2, 5, 3, 4), (3, 5, 1, 2), [2, 3], (3, 1)),
]


def wanted(x, w, stride, padding):
    import torch

    pair = [tuple(n) if isinstance(n, (list, tuple)) else n for n in (stride, padding)]
    given = (torch_of(each.astype(np.float64)) for each in (x, w))
    return torch.nn.functional.conv2d(*given, None, *pair).numpy().astype(np.int64)


@needs_torch
@pytest.mark.parametrize("types", [(np.int8, np.int8), (np.uint8, np.int8), (np.int8, np.uint8)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_integers_are_exact(case, types):
    shape, taps, stride, padding = case
    limits = [np.iinfo(t) for t in types]
    x = integers(limits[0].min, limits[0].max, shape, types[0])
    w = integers(limits[1].min, limits[1].max, taps, types[1], 1)
    found = F.int8_conv2d(x, w, stride, padding)
    exact = wanted(x, w, stride, padding)
    assert bits_equal(found, exact.astype(np.int32))
    scale = np.abs(normal(taps[0], seed=2))
    found = F.int8_conv2d(x, w, stride, padding, scale)
    assert bits_equal(found, exact.astype(F32) * scale[:, None, None])
    assert bits_equal(F.int8_conv2d(x, w, stride, padding, 0.5), exact.astype(F32) * F32(0.5))


@needs_torch
@pytest.mark.parametrize("dtype", [F32, np.float16, BF16, np.int32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_signs_are_exact_and_padding_has_none(case, dtype):
    shape, taps, stride, padding = case
    x, w = ((normal(*s, seed=i) * F32(2)).astype(dtype) for i, s in enumerate((shape, taps)))
    signs = (np.where(each.astype(F32) >= 0, 1, -1) for each in (x, w))
    found = F.binary_conv2d(x, w, stride, padding)
    assert bits_equal(found, wanted(*signs, stride, padding).astype(np.int32))


@needs_torch
def test_scales_of_int1_make_xnor_nets_convolution():
    """The filters that int1 stands for, on the signs of x."""
    x, w = normal(2, 12, 6, 6), normal(5, 12, 3, 3, seed=1)
    q = cq.quantize(w.reshape(5, -1), "int1")
    y = F.binary_conv2d(x, w, padding=1, scale=q.scale)
    whole = wanted(np.where(x >= 0, 1, -1), np.where(w >= 0, 1, -1), 1, 1)
    mean = q.dequantize(dtype="float32").reshape(w.shape)[:, :1, :1, :1]
    np.testing.assert_array_equal(y, whole * np.abs(mean.reshape(1, 5, 1, 1)))


@needs_torch
def test_torch_tensors_come_back():
    x, w = integers(-9, 9, (1, 3, 4, 4), np.int8), integers(-9, 9, (2, 3, 2, 2), np.int8)
    y = F.int8_conv2d(torch_of(x), torch_of(w))
    assert (y.numpy() == F.int8_conv2d(x, w)).all()


def test_empty():
    x, w = np.zeros((2, 3, 4, 4), np.int8), np.ones((5, 3, 2, 2), np.int8)
    assert F.int8_conv2d(x[:0], w).shape == (0, 5, 3, 3)
    assert F.int8_conv2d(x, w[:0]).shape == (2, 0, 3, 3)
    assert (F.int8_conv2d(x[:, :0], w[:, :0]) == np.zeros((2, 5, 3, 3))).all()


IMAGE, FILTER = np.zeros((2, 3, 4, 4), np.int8), np.zeros((5, 3, 2, 2), np.int8)
REFUSED = [
    ((IMAGE[0], FILTER), {}, ValueError, r"x has shape \(3, 4, 4\); it must be \[B, C, H, W\]"),
    ((IMAGE, FILTER[0]), {}, ValueError, r"it must be \[O, C, kH, kW\]"),
    ((IMAGE, FILTER[:, :2]), {}, ValueError, "their channels differ"),
    ((IMAGE[:, :, :1], FILTER), {}, ValueError, "larger than x"),
    ((IMAGE, FILTER[:, :, :0]), {}, ValueError, "without taps"),
    ((IMAGE, FILTER), {"stride": 0}, ValueError, "stride must be 1 or more, got 0"),
    ((IMAGE, FILTER), {"stride": (1, 2, 3)}, ValueError, "stride must be an int or two"),
    ((IMAGE, FILTER), {"padding": -1}, ValueError, "padding must be 0 or more"),
    ((IMAGE, FILTER), {"padding": "same"}, TypeError, "padding must be an int"),
    ((IMAGE, FILTER), {"scale": np.ones(4)}, ValueError, r"scale has shape \(4,\)"),
]


@pytest.mark.parametrize("arguments, options, error, message", REFUSED)
def test_refusals(arguments, options, error, message):
    for function in (F.int8_conv2d, F.binary_conv2d):
        with pytest.raises(error, match=message):
            function(*arguments, **options)


def test_refusals_of_dtypes():
    with pytest.raises(TypeError, match="x must be int8 or uint8, got float32"):
        F.int8_conv2d(IMAGE.astype(F32), FILTER)
    with pytest.raises(TypeError, match="w must be float32, float16 or bfloat16"):
        F.binary_conv2d(IMAGE, FILTER.astype(np.float64))
    with pytest.raises(ValueError, match="x holds NaN, which has no sign"):
        F.binary_conv2d(IMAGE * np.float32(np.nan), FILTER)
