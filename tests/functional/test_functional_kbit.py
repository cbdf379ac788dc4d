"""k-bit codebooks as plain arrays: packings, levels, compacted maps."""

import numpy as np
import pytest
from functional_inputs import F32, PACKINGS, normal
from hypothesis import given
from hypothesis import strategies as st
from oracle import bits_equal

import cuquant as cq
import cuquant.functional as F
from cuquant.formats import MAPS


def code_at(words, k, i, packing):
    """Code i of packed words, one bit formula for each packing."""
    stream = int.from_bytes(np.asarray(words, "<u4").tobytes(), "little")
    if packing == "dense":
        return stream >> (i * k) & ((1 << k) - 1)
    if packing == "word":
        word, place = divmod(i, 32 // k)
        return int(words[word]) >> (place * k) & ((1 << k) - 1)
    group, bit = divmod(i, 32)
    return sum((int(words[group * k + b]) >> bit & 1) << b for b in range(k))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("k", range(2, 9))
def test_kbit_codes_stand_where_the_formula_says(k, packing):
    """Codes of neighbouring blocks follow without a gap, whatever the packing."""
    levels = np.linspace(-1, 1, 2**k, dtype=F32)
    x = normal(77)
    packed, scale = F.quantize_kbit(x, k, levels, 32, packing)
    assert packed.dtype == np.uint32 and packed.ndim == 1
    assert scale.dtype == np.float16 and scale.shape == (3,)
    words = {"dense": -(-77 * k // 32), "word": -(-77 // (32 // k)), "planes": 3 * k}[packing]
    assert len(packed) == words
    for i, value in enumerate(x):
        top = F32(np.float16(np.abs(x[i // 32 * 32 : i // 32 * 32 + 32]).max()))
        distance = np.abs(levels - value * (F32(1) / top))
        assert code_at(packed, k, i, packing) == distance.argmin()
    values = F.dequantize_kbit(packed, scale, k, (7, 11), levels, 32, packing)
    wanted = [levels[code_at(packed, k, i, packing)] * F32(scale[i // 32]) for i in range(len(x))]
    assert bits_equal(values, np.asarray(wanted, F32).reshape(7, 11))


@pytest.mark.parametrize("levels", ["lloyd", "normal", "linear"])
def test_kbit_named_levels_are_the_formats(levels):
    x = normal(5, 50)
    packed, scale = F.quantize_kbit(x, 3, levels)
    q = cq.quantize(x.reshape(-1), cq.get_format("k3", levels=levels, block_size=32))
    assert bits_equal(packed, q.packed) and bits_equal(scale, q.scale)
    found = F.dequantize_kbit(packed, scale, 3, (5, 50), levels, dtype="float16")
    assert bits_equal(found, q.dequantize(dtype="float16").reshape(5, 50))


@given(
    st.integers(2, 8),
    st.integers(0, 130),
    st.sampled_from(PACKINGS),
    st.sampled_from(PACKINGS),
    st.sampled_from(["lloyd", "normal"]),
)
def test_packings_convert_without_loss(k, n, source, target, levels):
    x = normal(n, seed=n)
    packed = {p: F.quantize_kbit(x, k, levels, packing=p)[0] for p in (source, target)}
    found = F.convert_packing(packed[source], k, n, source, target, levels)
    assert bits_equal(found, packed[target])
    again = F.convert_packing(found.view(np.int32), k, n, target, source, levels)
    assert bits_equal(again, packed[source])


# The middle of torch.linspace(-1, 1, 2^bits - 1) in torch 2.13.
MIDDLES = {2: 0.0, 3: -2.9802322e-8, 4: -4.4703484e-8, 5: -5.2154064e-8, 6: 2.9802322e-8}


def linear_map(bits):
    """What bitsandbytes' create_linear_map makes: 2^bits - 1 steps, split around zeros."""
    steps = np.linspace(-1, 1, 2**bits - 1, dtype=F32)
    half = len(steps) // 2
    steps[half] = MIDDLES[bits]
    return np.concatenate([steps[:half], np.zeros(256 - len(steps), F32), steps[half:]])


@pytest.mark.parametrize("bits", MIDDLES)
def test_compact_linear_map_keeps_one_zero(bits):
    map256 = linear_map(bits)
    levels, index = F.compact_codebook(map256)
    assert levels.dtype == F32 and index.dtype == np.int64
    count = 2**bits - 1
    assert len(levels) == len(index) == count
    assert (levels[1:] > levels[:-1]).all()
    middle = count // 2
    assert levels[middle] == 0 and map256[index[middle]] == 0 and index[middle] == middle
    others = np.delete(np.arange(count), middle)
    assert bits_equal(map256[index[others]], levels[others])


def test_compact_seven_levels_in_spite_of_the_residue():
    map256 = linear_map(3)
    assert map256[252] == F32(-2.9802322e-8)
    levels, index = F.compact_codebook(map256)
    assert index.tolist() == [0, 1, 2, 3, 253, 254, 255]
    packed, scale = F.quantize_kbit(normal(64), 3, levels)
    thirds = F.dequantize_kbit(packed, scale, 3, 64, levels) / np.repeat(scale, 32) * 3
    assert np.abs(thirds - np.rint(thirds)).max() < 1e-6


@pytest.mark.parametrize(
    "name, count",
    [("dynamic", 256), ("linear", 256), ("fp8_e4m3", 255), ("fp8_e5m2", 255), ("nf4", 16)],
)
def test_compact_keeps_every_true_level(name, count):
    """fp8_e5m2 has 70 levels below 2^-23 of its largest, beside two zeros."""
    map256 = np.random.default_rng(0).permutation(np.asarray(MAPS[name], F32))
    levels, index = F.compact_codebook(map256)
    assert bits_equal(levels, np.unique(map256 + F32(0))) and len(levels) == count
    assert (map256[index] == levels).all()
    assert all(
        i == np.flatnonzero(map256 == level)[0] for i, level in zip(index, levels, strict=True)
    )


def test_compact_small_cases():
    levels, index = F.compact_codebook(np.array([1e-9, 0.5, -0.0, 0.0], np.float64))
    assert bits_equal(levels, np.array([0, 0.5], F32)) and index.tolist() == [2, 1]
    levels, index = F.compact_codebook(np.array([1e-9, 0.5, 0.0], F32))  # one zero is no padding
    assert len(levels) == 3 and index.tolist() == [2, 0, 1]
    levels, index = F.compact_codebook(np.zeros(256, np.float16))
    assert levels.tolist() == [0] and index.tolist() == [0]


def test_an_infinite_scale_decodes_to_infinities():
    words, infinite = np.array([0b11100100], np.uint32), np.array([np.inf], F32)
    found = F.dequantize_kbit(words, infinite, 2, (4,), levels=[-1, -0.5, 0.5, 1])
    assert found.tolist() == [-np.inf, -np.inf, np.inf, np.inf]
