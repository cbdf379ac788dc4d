"""What layers do to rows, against float64; and that sums have the order that is promised."""

import math

import numpy as np
import pytest
from functional_inputs import BF16, F32, FLOATS, normal
from oracle import bits_equal

from cuquant.reference import elementary, rows

F64 = np.float64
STEP = 2.0**-24
BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
POINTS = np.concatenate(
    [np.linspace(-86, 87, 40001), np.random.default_rng(0).standard_normal(40000)]
).astype(F32)


def half_steps(values, dtype):
    """What rounding to a dtype may change."""
    least = {"float16": 2.0**-25}.get(np.dtype(dtype).name, 2.0**-134)
    return np.maximum(np.abs(values) * 2.0 ** -BITS[np.dtype(dtype).name], least)


def serial_sums(values):
    """row_sums, one addition after the other."""
    totals = []
    for row in values:
        partial = [0.0] * 256
        for unit in range(-(-len(row) // 16)):
            own = np.zeros(16, F32)
            part = row[16 * unit : 16 * unit + 16]
            own[: len(part)] = part
            low, high = own[0], own[8]
            for i in range(1, 8):
                low, high = F32(low + own[i]), F32(high + own[8 + i])
            partial[unit % 256] += float(F32(low + high))
        distance = 128
        while distance:
            partial = [a + b for a, b in zip(partial[:distance], partial[distance:], strict=True)]
            distance //= 2
        totals.append(partial)
    return np.array(totals)


@pytest.mark.parametrize("columns", [1, 8, 15, 16, 17, 100, 4096, 4112, 10000])
def test_the_order_of_sums(columns):
    values = normal(3, columns) * F32(100)
    assert bits_equal(rows.row_sums(values), serial_sums(values))


def test_order_matters():
    """Another order has other bits: the test above can fail."""
    values = normal(50, 4096)
    assert (values.astype(F64).sum(axis=-1, keepdims=True) != rows.row_sums(values)).any()


def test_exp():
    true = np.exp(np.clip(POINTS, -80, 87).astype(F64))
    assert (np.abs(elementary.exp(POINTS) - true) <= 1.5 * np.spacing(true.astype(F32))).all()


def test_silu():
    x = POINTS.astype(F64)
    true = x / (1 + np.exp(-x))
    assert (np.abs(elementary.silu(POINTS) - true) <= 3 * np.spacing(np.abs(true, dtype=F32))).all()


def test_gelu():
    x = POINTS.astype(F64)
    true = x / 2 * np.vectorize(math.erfc)(-x / math.sqrt(2))
    found = elementary.gelu(POINTS)
    assert (np.abs(found - true) <= 5 * STEP * np.abs(x)).all()
    assert (found[POINTS < 0] <= 0).all()


@pytest.mark.parametrize("function", [elementary.silu, elementary.gelu])
def test_ends_of_gates(function):
    x = F32([np.inf, -np.inf, np.nan, 3e38, -3e38, 200, -200, 0.0, -0.0, 1e-40])
    found = function(x)
    assert np.isnan(found[1:3]).all()
    assert found[[0, 3, 5]].tolist() == x[[0, 3, 5]].tolist()
    assert (found[[4, 6, 7, 8]] == 0).all()
    assert np.signbit(found[[4, 6, 7, 8]]).tolist() == [True, True, False, True]
    assert abs(found[9] - x[9] / 2) <= 2.0**-149


@pytest.mark.parametrize("columns", [16, 100, 4096])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rmsnorm(dtype, columns):
    x, weight = (normal(6, columns) * F32(3)).astype(dtype), normal(columns, seed=1)
    wide = x.astype(F64)
    true = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * weight
    found, same = rows.rmsnorm(x, weight, F32(1e-5))
    # 9 roundings of sum and square, halved by the root; mean, eps, root, inverse, products.
    bound = 10 * STEP * np.abs(true) + half_steps(true, dtype) * 1.001
    assert found.dtype == dtype and same is x and (np.abs(found - true) <= bound).all()


@pytest.mark.parametrize("offset", [0, 5, 300])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layernorm(dtype, offset):
    x = (normal(6, 1000) + F32(offset)).astype(dtype)
    weight, bias = normal(1000, seed=1), normal(1000, seed=2)
    wide = x.astype(F64)
    rest = wide - wide.mean(axis=-1, keepdims=True)
    root = np.sqrt((rest**2).mean(axis=-1, keepdims=True) + 1e-5)
    true = rest / root * weight + bias
    # The mean is off by some steps of the largest x.
    away = 10 * STEP * np.abs(wide).max(axis=-1, keepdims=True) / root * np.abs(weight)
    bound = away + 12 * STEP * (np.abs(true) + np.abs(bias)) + half_steps(true, dtype) * 1.001
    found = rows.layernorm(x, weight, bias, F32(1e-5))
    assert found.dtype == dtype and (np.abs(found - true) <= bound).all()


CONSTANTS = F32([1 / 3, 123.456, -0.1, 1e9, 2e37, 3e38, -3e38, 1e-20, 1e-40, 3e-45, 0, -0.0])


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 100, 4096, 10001])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_constant_row_is_its_mean(dtype, columns):
    """What the rounding of a mean leaves is no signal; a scale of the row would make it one."""
    random = normal(50, seed=2) * 10.0 ** np.linspace(-38, 37, 50)
    with np.errstate(over="ignore"):
        levels = np.concatenate([CONSTANTS, random.astype(F32)]).astype(dtype)
    x = np.repeat(levels[np.isfinite(levels.astype(F32))][:, None], columns, axis=1)
    weight, bias = normal(columns, seed=1), normal(columns, seed=2)
    for eps in (F32(1e-5), F32(1e-30)):
        assert not rows.layernorm(x, weight, None, eps).any()
        assert (rows.layernorm(x, weight, bias, eps) == bias.astype(dtype)).all()


def exact_norm(x, eps=0.0):
    wide = x.astype(F64)
    rest = wide - wide.mean(axis=-1, keepdims=True)
    return rest / np.sqrt((rest**2).mean(axis=-1, keepdims=True) + eps)


@pytest.mark.parametrize("offset", [0, 0.3, 1e3, -1e6, 1e7])
def test_layernorm_does_not_depend_on_what_all_elements_share(offset):
    """Far from 0 float32's numbers are the only thing that is lost."""
    x = normal(6, 1000) + F32(offset)
    true = exact_norm(x, 1e-5)
    # 9 roundings of sums of what the first mean leaves; two subtractions, root, inverse, product.
    bound = 10 * STEP * np.abs(true).max(axis=-1, keepdims=True) + 12 * STEP * np.abs(true)
    assert (np.abs(rows.layernorm(x, np.ones(1000, F32), None, F32(1e-5)) - true) <= bound).all()


@pytest.mark.parametrize("place", [0, 17, 999])
def test_an_outlier_leaves_layernorm_what_it_leaves_float32(place):
    x = normal(6, 1000)
    x[:, place] = 1e6
    true = exact_norm(x)
    found = rows.layernorm(x, np.ones(1000, F32), None, F32(0))
    assert (np.abs(found - true) <= 12 * STEP * np.abs(true) + 2.0**-149).all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_layernorm_of_sums_that_overflow_in_both_directions(dtype):
    x = np.full((4, 64), 3e38, F32)
    x[0, ::2], x[1, 16:32], x[2, 0] = -3e38, -3e38, -3e38
    x[3] = np.where(np.arange(64) % 32 < 16, 3e38, -3e38)
    x = x.astype(dtype)
    found = rows.layernorm(x, np.ones(64, F32), None, F32(1e-5))
    true = exact_norm(x)
    assert (np.abs(found - true) <= 12 * STEP * np.abs(true) + half_steps(true, dtype)).all()


def test_rows_of_all_sizes_are_normed_alike():
    x = normal(1, 64)
    weight, eps = np.ones(64, F32), F32(0)
    sizes = F32(2.0) ** np.arange(-110, 120, 5, dtype=F32)[:, None]
    for found in (
        rows.rmsnorm(x * sizes, weight, eps)[0],
        rows.layernorm(x * sizes, weight, None, eps),
    ):
        assert (np.abs(found - found[22]) <= 4 * 2.0**-23 * np.abs(found[22])).all()


def test_norms_of_what_is_not_finite():
    x = normal(3, 32).astype(BF16)
    x[0, 3], x[1, 5] = np.nan, np.inf
    weight = np.ones(32, F32)
    found = rows.rmsnorm(x, weight, F32(1e-6))[0].astype(F32)
    assert np.isnan(found[0]).all() and np.isnan(found[1, 5]) and np.isfinite(found[2]).all()
    x[2, 0] = -np.inf
    for given in (x, x.astype(F32)):
        found = rows.layernorm(np.vstack([given, normal(1, 32)]), weight, None, F32(1e-6))
        assert np.isnan(found[:3]).all() and np.isfinite(found[3]).all()


@pytest.mark.parametrize("group", [1, 2, 16, 128, 1024])
def test_hadamard(group):
    x, signs = normal(3, 2048), np.where(normal(2048, seed=1) > 0, F32(1), F32(-1))
    matrix = np.ones((1, 1))
    while len(matrix) < group:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    true = ((x * signs).astype(F64).reshape(-1, group) @ matrix).reshape(x.shape) / math.sqrt(group)
    size = np.abs(x).astype(F64).reshape(-1, group).sum(axis=-1).repeat(group).reshape(x.shape)
    stages = math.log2(group) + 2
    found = rows.hadamard(x, group, signs)
    assert (np.abs(found - true) <= stages * STEP * size / math.sqrt(group)).all()


def test_pieces_do_not_matter(monkeypatch):
    x, weight = normal(70, 48), normal(48, seed=1)
    found = rows.rmsnorm(x, weight, F32(0))[0], rows.silu_mul(x, x)
    monkeypatch.setattr(rows, "PIECE", 100)
    again = rows.rmsnorm(x, weight, F32(0))[0], rows.silu_mul(x, x)
    assert all(bits_equal(a, b) for a, b in zip(found, again, strict=True))
