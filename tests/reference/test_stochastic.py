"""Stochastic rounding: Philox bits, unbiased, reproducible."""

import numpy as np
import pytest
from oracle import bits_equal, single_scale_formats

import cuquant as cq
from cuquant.reference import philox
from cuquant.reference.philox import uniform

PLAIN = [n for n in cq.list_formats() if not cq.get_format(n).is_blocks]


def philox_scalar(seed: int, counter: int) -> int:
    """Philox4x32-10 in Python integers."""
    mask = 0xFFFFFFFF
    c = [counter & mask, counter >> 32, 0, 0]
    k = [seed & mask, seed >> 32]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & mask, first >> 32 ^ c[3] ^ k[1], first & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c[0]


def test_known_answers_of_random123():
    """kat_vectors of Random123 for philox4x32-10: key and counter zero, and all ones."""
    assert philox(0, np.zeros(1, np.uint64)).tolist() == [0x6627E8D5]
    assert philox_scalar(0, 0) == 0x6627E8D5


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**64 - 1])
def test_philox_equals_scalar_arithmetic(seed):
    index = np.array([0, 1, 2, 2**31, 2**32 - 1, 2**32, 2**40 + 7, 2**63], np.uint64)
    assert philox(seed, index).tolist() == [philox_scalar(seed, int(i)) for i in index]


def test_uniform_is_in_the_half_open_unit_interval():
    draw = uniform(3, np.arange(100_000, dtype=np.uint64))
    assert draw.dtype == np.float32 and draw.min() >= 0 and draw.max() < 1
    # The mean of n uniform draws has a standard deviation of 1 / sqrt(12 n).
    assert abs(draw.mean(dtype=np.float64) - 0.5) < 5 / np.sqrt(12 * 100_000)


def values_of(fmt: cq.Format, options: dict) -> np.ndarray:
    """float64, ascending: every value that a code can stand for at the scale of `options`."""
    numbers = fmt.codec.decode(np.arange(1 << fmt.bits, dtype=fmt.codec.code_dtype))
    numbers = numbers[np.isfinite(numbers)] - np.float32(options.get("zero_point", 0))
    return np.unique(numbers * np.float32(options.get("scale", 1))).astype(np.float64)


@pytest.mark.parametrize("name", PLAIN)
def test_the_mean_of_4096_draws_is_x(name, rng):
    """Within 5 sigma of what the codec can reach; sigma is that of the two codes around x."""
    fmt = cq.get_format(name)
    options = {}
    if fmt.scale is not None:
        scale = 0.25 if name.startswith("mx") else float(np.float16(0.2))
        options: dict = {"scale": scale}
        if name == "nvfp4":
            options["global_scale"] = 1.0
            options["scale"] = 0.25
        if fmt.offset == "zero_point":
            options["zero_point"] = fmt.codec.high // 2
        fmt = cq.get_format(fmt, block_size="tensor")
    numbers = values_of(fmt, options)
    low, high = max(0.9 * numbers[0], -0.17), min(0.9 * numbers[-1], 0.17)
    row = np.linspace(low, high, 16, dtype=np.float32)
    draws = 4096
    x = np.broadcast_to(row, (draws, 16))
    q = cq.quantize(x, fmt, stochastic=True, seed=11, **options)
    values = q.dequantize().astype(np.float64)
    for i, true in enumerate(row):
        above = np.clip(np.searchsorted(numbers, true), 1, len(numbers) - 1)
        below, above = numbers[above - 1], numbers[above]
        assert np.isin(values[:, i], (below, above)).all()
        share = (true - below) / (above - below)
        sigma = (above - below) * np.sqrt(share * (1 - share) / draws)
        # The reciprocal, the product and the share are float32: three roundings of x / scale.
        slack = 3 * 2.0**-24 * abs(true) + 2.0**-24 * (above - below)
        assert abs(values[:, i].mean() - true) <= 5 * sigma + slack


@pytest.mark.parametrize("name", PLAIN)
def test_exact_values_stay(name):
    """A value that is one of the codec's numbers is never moved."""
    fmt = cq.get_format(name)
    if fmt.scale is None:
        x = np.float32([[0.0, 1.0, -1.5, 0.25]])
        assert (cq.quantize(x, fmt, stochastic=True, seed=1).dequantize() == x).all()
        return
    fmt = cq.get_format(fmt, block_size="tensor")
    codes = np.arange(1 << fmt.bits, dtype=fmt.codec.code_dtype)
    numbers = fmt.codec.decode(codes)
    numbers = numbers[np.isfinite(numbers)]
    if not (numbers == 0).any() and name == "int1":
        numbers = np.float32([-1, 1])
    x = np.tile(numbers, (64, 1)).astype(np.float32)
    options = {"scale": 1.0}
    if name == "nvfp4":
        options["global_scale"] = 1.0
    q = cq.quantize(x, fmt, stochastic=True, seed=5, **options)
    inside = np.clip(x, getattr(fmt.codec, "low", -np.inf), getattr(fmt.codec, "high", np.inf))
    assert (q.dequantize() == inside).all()


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8_e4m3", "bf16", "k3", "uint4"])
def test_same_seed_same_bytes(name, rng):
    x = rng.standard_normal((64, 512), dtype=np.float32)
    first, again, other = (
        cq.quantize(x, name, stochastic=True, seed=seed).codes() for seed in (1, 1, 2)
    )
    assert bits_equal(first, again)
    assert not bits_equal(first, other)
    fresh = [cq.quantize(x, name, stochastic=True).codes() for _ in range(2)]
    assert not bits_equal(*fresh)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_counter_is_the_flat_index_of_the_array_as_given(axis, rng):
    """Whatever axis is quantized, element i draws the bits of counter i."""
    x = rng.uniform(0, 3, (5, 6, 7)).astype(np.float32)
    q = cq.quantize(
        x, "uint2", axis=axis, block_size="tensor", scale=1.0, zero_point=0, stochastic=True, seed=9
    )
    draw = uniform(9, np.arange(x.size, dtype=np.uint64)).reshape(x.shape)
    floor = np.floor(x)
    assert (q.codes() == np.clip(floor + (draw < x - floor), 0, 3)).all()


def test_a_large_array_uses_every_counter_once(rng):
    """Pieces of the work do not repeat or skip counters."""
    x = rng.uniform(0, 3, (3, 70_001)).astype(np.float32)
    q = cq.quantize(x, "uint2", block_size="tensor", scale=1.0, stochastic=True, seed=1)
    draw = uniform(1, np.arange(x.size, dtype=np.uint64)).reshape(x.shape)
    floor = np.floor(x)
    assert (q.codes() == np.clip(floor + (draw < x - floor), 0, 3)).all()


@pytest.mark.parametrize("name", single_scale_formats())
def test_stochastic_keeps_the_scales(name, rng):
    x = rng.standard_normal((4, 300), dtype=np.float32)
    plain, random = cq.quantize(x, name), cq.quantize(x, name, stochastic=True, seed=0)
    assert bits_equal(plain.scale, random.scale)
