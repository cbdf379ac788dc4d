"""Plain arrays in and out: owners' bytes, exact integers, the seeds' examples, every refusal."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuquant as cq
import cuquant.functional as F
from cuquant.errors import BackendUnavailable, FormatError
from cuquant.formats import MAPS, get_format
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
GOLDEN = np.load(Path(__file__).parent / "data" / "bitsandbytes_1.npz")
PACKINGS = ["dense", "word", "planes"]


def bits_equal(a, b):
    """Same dtype, shape and bytes."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


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


# ---- the list of names ----------------------------------------------------------------------


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


# ---- bitsandbytes' 4-bit blocks -------------------------------------------------------------


def golden(key, dtype):
    values = GOLDEN[key]
    return values.view(BF16) if dtype == "bfloat16" and values.dtype == np.uint16 else values


def nibbles(packed):
    """Codes of bitsandbytes' order: the first element in the high nibble."""
    return np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)


def ulps_to_nearest(value, thresholds):
    """Distance of a float32 to the nearest threshold, in units of that one's last place."""
    nearest = thresholds[np.abs(thresholds.astype(np.float64) - float(value)).argmin()]
    return abs(float(value) - float(nearest)) / float(np.spacing(np.abs(nearest)))


@pytest.mark.parametrize("block", [32, 64, 128, 256, 4096])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_codes_are_bitsandbytes(dtype, name, block):
    x = golden(f"{dtype}/x", dtype)
    packed, absmax = getattr(F, f"quantize_{name}")(x, block)
    assert bits_equal(absmax, GOLDEN[f"{dtype}/{name}/{block}/absmax"])
    ours, theirs = nibbles(packed), nibbles(GOLDEN[f"{dtype}/{name}/{block}/codes"])
    assert len(ours) == len(theirs) == len(x) + 1
    assert ours[-1] == theirs[-1] == {"nf4": 7, "fp4": 0}[name]  # the unused nibble
    ours, theirs = ours[:-1], theirs[:-1]
    top = np.repeat(absmax, block)[: len(x)]

    # A block of zeros: ours is the code of 0, theirs what comes of 0 * (1 / 0).
    dead = top == 0
    assert dead.sum() == 4096
    assert (ours[dead] == {"nf4": 7, "fp4": 0}[name]).all()
    assert (theirs[dead] == 0).all()

    # Elsewhere only their approximate reciprocal tells the two apart, at a threshold.
    apart = np.flatnonzero((ours != theirs) & ~dead)
    thresholds = get_format(name).codec.borders
    for i in apart:
        scaled = x[i].astype(F32) * (F32(1) / top[i])
        assert ulps_to_nearest(scaled, thresholds) <= 2
    assert len(apart) <= 5  # of 20225; 13 in all 30 cases, none of them nf4
    assert name == "fp4" or not len(apart)


@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_double_quantization_is_bitsandbytes(dtype, name):
    prefix = f"{dtype}/{name}/double"
    x = golden(f"{dtype}/x", dtype)
    packed, absmax = getattr(F, f"quantize_{name}")(x, block_size_inner=256)
    assert list(absmax) == ["absmax_q", "nested_absmax", "nested_map", "offset"]
    assert bits_equal(packed, getattr(F, f"quantize_{name}")(x)[0])
    assert bits_equal(absmax["nested_map"], GOLDEN[f"{prefix}/nested_map"])
    # Their offset is a float32 sum in an order of its own; what is subtracted moves the rest.
    step = np.spacing(GOLDEN[f"{prefix}/offset"])
    assert absmax["offset"].shape == () and absmax["offset"].dtype == F32
    assert abs(absmax["offset"] - GOLDEN[f"{prefix}/offset"]) <= 2 * step
    assert (np.abs(absmax["nested_absmax"] - GOLDEN[f"{prefix}/nested_absmax"]) <= 2 * step).all()
    assert bits_equal(absmax["absmax_q"], GOLDEN[f"{prefix}/absmax_q"])


@pytest.mark.parametrize("case", ["64", "256", "double"])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_of_bitsandbytes_arrays(dtype, name, case):
    prefix = f"{dtype}/{name}/{case}"
    wanted = golden(f"{prefix}/dequantized", dtype)
    if case == "double":
        absmax = {
            part: GOLDEN[f"{prefix}/{part}"]
            for part in ("absmax_q", "nested_absmax", "nested_map", "offset")
        }
    else:
        absmax = GOLDEN[f"{prefix}/absmax"]
    block = 64 if case == "double" else int(case)
    codes = GOLDEN[f"{prefix}/codes"].reshape(-1, 1)  # the shape they have in bitsandbytes
    found = getattr(F, f"dequantize_{name}")(codes, absmax, wanted.shape, block, dtype)
    # The one difference: -1 * 0 is -0.0 there; our nf4 has no negative zero.
    negative_zero = (wanted == 0) & np.signbit(wanted)
    assert name == "nf4" or not (negative_zero & ~np.signbit(found)).any()
    wanted = np.where(negative_zero & ~np.signbit(found), wanted.dtype.type(0), wanted)
    assert bits_equal(found, wanted)


@pytest.mark.parametrize("inner", [1, 256])
@pytest.mark.parametrize("shape", [(1,), (7, 11), (3, 64), (65, 129), (0,), (4, 0)])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_four_bit_round_trip_is_the_formats(name, shape, inner):
    x = normal(*shape)
    n = x.size
    packed, absmax = getattr(F, f"quantize_{name}")(x, 64, inner)
    assert packed.shape == ((n + 1) // 2,)
    assert (absmax if inner == 1 else absmax["absmax_q"]).shape == (-(-n // 64),)
    found = getattr(F, f"dequantize_{name}")(packed, absmax, shape)
    wanted = cq.quantize(x.reshape(-1), name, double_quant=inner == 256).dequantize()
    assert bits_equal(found, wanted.reshape(shape))
    flat = getattr(F, f"dequantize_{name}")(packed, absmax)
    assert flat.shape == (2 * len(packed),)
    assert bits_equal(flat[:n], wanted)


def test_the_map_of_a_file_is_the_one_its_codes_mean():
    packed, absmax = F.quantize_nf4(normal(640), 64, 256)
    doubled = {**absmax, "nested_map": absmax["nested_map"] * F32(2)}
    rebuilt = doubled["nested_map"][absmax["absmax_q"]] * absmax["nested_absmax"][0]
    found = F.dequantize_nf4(packed, doubled)
    assert bits_equal(found, F.dequantize_nf4(packed, rebuilt + absmax["offset"]))
    assert not bits_equal(found, F.dequantize_nf4(packed, absmax))


def test_nan_and_infinity_reach_the_values():
    x = normal(256)
    x[70], x[130] = np.nan, np.inf
    for inner in (1, 256):
        values = F.dequantize_nf4(*F.quantize_nf4(x, 64, inner))
        assert np.isnan(values[64:192]).all()
    x = normal(256)
    x[70] = np.nan
    clean = F.dequantize_fp4(*F.quantize_fp4(x))
    assert np.isnan(clean[64:128]).all() and np.isfinite(np.delete(clean, range(64, 128))).all()


# ---- k bits ---------------------------------------------------------------------------------


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


# ---- ggml -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_blocks_are_ggufs(name, dtype):
    x = normal(3, 4, 256, dtype=dtype)
    x[0, 0, :32] = 0
    x[0, 1, ::2] = -x[0, 1, 1::2]  # ties of |x| with both signs
    found = getattr(F, f"quantize_{name}")(x)
    kind = gguf.GGMLQuantizationType[name.upper()]
    wanted = gguf.quants.quantize(x.astype(F32).reshape(12, 256), kind)
    layout = BLOCK_LAYOUTS[name]
    assert bits_equal(found, wanted.reshape(3, 4, 8, layout.nbytes))


def test_mxfp4_blocks_are_ggufs_but_for_negative_zeros():
    """ggml never writes -0.0 (code 8); OCP's e2m1 keeps the sign of what rounds to zero."""
    x = normal(8, 256)
    found = F.quantize_mxfp4(x)
    kind = gguf.GGMLQuantizationType.MXFP4
    wanted = gguf.quants.quantize(x, kind).reshape(found.shape)
    layout = BLOCK_LAYOUTS["mxfp4"]
    ours, theirs = (layout.stored(blocks.reshape(-1, 17)) for blocks in (found, wanted))
    assert bits_equal(ours["scale"], theirs["scale"])
    apart = ours["codes"] != theirs["codes"]
    assert apart.any() and (ours["codes"][apart] == 8).all() and (theirs["codes"][apart] == 0).all()


@pytest.mark.parametrize("name", WEIGHTS)
def test_values_are_ggufs(name):
    """Random bytes, so that every code and scale is met; float16 scales may be infinite or NaN."""
    layout = BLOCK_LAYOUTS[name]
    blocks = integers(0, 255, (2, 6, layout.nbytes), np.uint8)
    if name == "nvfp4":  # the scales' sign is no part of it, and the last code is NaN here
        blocks[..., :4] %= 127
    kind = gguf.GGMLQuantizationType[name.upper()]
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(blocks.reshape(2, -1), kind).astype(F32)
    found = getattr(F, f"dequantize_{name}")(blocks, 6 * layout.elements)
    assert found.dtype == F32 and found.shape == (2, 6 * layout.elements)
    if layout.scale_kind != "half":  # ggml's table has no -0.0 where e2m1 has one
        found, wanted = found + F32(0), wanted + F32(0)
    same = found.view(np.uint32) == wanted.view(np.uint32)
    assert (same | (np.isnan(found) & np.isnan(wanted))).all()


# Root mean square error on normal data, in units of its deviation: 1.3 times what is measured.
ERRORS = {
    "q4_0": 0.115, "q4_1": 0.10, "q5_0": 0.057, "q5_1": 0.05, "q8_0": 0.0070, "q8_1": 0.0070,
    "iq4_nl": 0.10, "iq4_xs": 0.105, "q2_k": 0.38, "q3_k": 0.19, "q4_k": 0.10, "q5_k": 0.05,
    "q6_k": 0.026, "mxfp4": 0.155, "nvfp4": 0.125,
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_every_type_quantizes_and_multiplies(name):
    layout = BLOCK_LAYOUTS[name]
    m, n, k = 5, 3, 512
    w, a = normal(m, k), normal(n, k, seed=1)
    quantize, dequantize = getattr(F, f"quantize_{name}"), getattr(F, f"dequantize_{name}")
    blocks = quantize(w)
    assert blocks.dtype == np.uint8 and blocks.shape == (m, k // layout.elements, layout.nbytes)
    values = dequantize(blocks)
    error = np.sqrt(np.mean((values - w) ** 2))
    assert ERRORS[name] / 2 < error < ERRORS[name]
    assert bits_equal(quantize(w[None])[0], blocks)
    assert quantize(w[:0]).shape == (0, *blocks.shape[1:])
    assert dequantize(quantize(w[:, :0]), 0).shape == (m, 0)
    if name == "q8_1":
        return
    active = F.quantize_q8_1(a)
    product = getattr(F, f"gemm_{name}_q8_1")(blocks, active, m, n, k)
    decoded = F.dequantize_q8_1(active).astype(np.float64)
    exact = values.astype(np.float64) @ decoded.T
    # k products and k sums in float32, each off by half an ulp at most.
    bound = k * 2.0**-24 * (np.abs(values).astype(np.float64) @ np.abs(decoded).T)
    assert product.dtype == F32 and product.shape == (m, n)
    assert (np.abs(product - exact) <= bound).all()
    assert np.abs(exact).max() > 100 * bound.max()  # the bound is a tight one
    transposed = getattr(F, f"gemm_{name}_q8_1")(blocks[:1], active[:1], 1, 1, np.int64(k))
    assert transposed.shape == (1, 1)


def q8_1_block(values):
    """quantize_q8_1 of ggml-cuda, lane by lane."""
    values = [F32(v) for v in values]
    top = max(abs(v) for v in values)
    d = top / F32(127)
    codes = []
    for value in values:
        quotient = float(value / d) if top else 0.0
        codes.append(int(np.copysign(np.floor(abs(quotient) + 0.5), quotient)))
    lanes = list(values)
    for offset in (16, 8, 4, 2, 1):
        lanes = [lanes[i] + lanes[i ^ offset] for i in range(32)]
    head = np.array([d, lanes[0]], F32).astype("<f2").tobytes()
    return head + np.array(codes, np.int8).tobytes()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_q8_1_of_values_is_the_cuda_kernels(dtype):
    x = normal(40, 32, dtype=dtype)
    x[1] = 0
    x[2, :16] = -x[2, 16:]  # cancels in the first exchange, and ties for the maximum
    x[3] = dtype.type(0.5)
    x[3, 0] = dtype.type(127)  # halves: away from zero
    x[3, 1::2] = dtype.type(-1.5)
    x[4] *= dtype.type(1e4)
    x[5] *= dtype.type(1e-3)  # what is left where these two cancel first, and lost if they do not
    x[5, [3, 19]] = dtype.type(6e4), dtype.type(-6e4)
    found = F.quantize_q8_1(x, sum="values")
    assert found.shape == (40, 1, 36) and not found[1].any()
    with np.errstate(over="ignore"):
        wanted = [q8_1_block(row) for row in x.astype(F32)]
    for row, block in zip(found, wanted, strict=True):
        assert row.tobytes() == block


def test_q8_1_sums_differ_by_what_they_sum():
    x = normal(64, 320)
    quants, values = (F.quantize_q8_1(x, sum=kind) for kind in ("quants", "values"))
    assert bits_equal(quants, F.quantize_q8_1(x))
    decoded = F.dequantize_q8_1(quants).reshape(64, 10, 32).astype(np.float64).sum(-1)
    true = x.reshape(64, 10, 32).astype(np.float64).sum(-1)
    halves = [q[..., 2:4].copy().view(np.float16)[..., 0] for q in (quants, values)]
    halves = [half.astype(np.float64) for half in halves]
    # Half an ulp of a float16 up to 32, and d rounded to half against the float32 d of the sum.
    assert np.abs(halves[0] - decoded).max() <= 0.5 * 2.0**-6 + 2.0**-11 * np.abs(decoded).max()
    assert np.abs(halves[1] - true).max() <= 0.5 * 2.0**-6 + 32 * 2.0**-24 * 128
    assert (halves[0] != halves[1]).mean() > 0.9


def test_q8_1_of_values_with_nan_infinity_and_vanishing_scales():
    x = normal(5, 32)
    x[0, 3], x[1, 4], x[2, 5:7] = np.nan, np.inf, (np.inf, -np.inf)
    x[3] = 0
    x[3, 0] = 1e-45  # its scale underflows to zero
    found = F.quantize_q8_1(x, sum="values")
    values = F.dequantize_q8_1(found)
    assert np.isnan(values[:3]).all() and (values[3] == 0).all() and np.isfinite(values[4]).all()
    sums = found[..., 2:4].copy().view(np.float16)[:, 0, 0]
    assert np.isnan(sums[:3]).all() and np.isfinite(sums[3:]).all()
    assert np.isnan(F.dequantize_q8_1(F.quantize_q8_1(x))[:3]).all()


# ---- integers with one scale ----------------------------------------------------------------


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
    wanted = np.clip(np.rint(wide * (F32(1) / scale)) + F32(zero_point), 0, 255)
    assert (q == wanted).all()


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


# ---- products -------------------------------------------------------------------------------

SHAPES = [(1, 1, 1), (3, 33, 5), (4, 2048, 3), (2, 0, 3), (0, 4, 2)]


@pytest.mark.parametrize("b_type", [np.int8, np.uint8])
@pytest.mark.parametrize("a_type", [np.int8, np.uint8])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_matmul_is_exact(shape, a_type, b_type):
    m, k, n = shape
    limits = {t: np.iinfo(t) for t in (a_type, b_type)}
    a = integers(limits[a_type].min, limits[a_type].max, (m, k), a_type)
    b = integers(limits[b_type].min, limits[b_type].max, (k, n), b_type, 1)
    found = F.int8_matmul(a, b)
    wanted = a.astype(np.int64) @ b.astype(np.int64)
    assert bits_equal(found, wanted.astype(np.int32))
    za, zb = int(limits[a_type].max), int(limits[b_type].min)
    found = F.int8_gemm(a, b, zero_point_a=za, zero_point_b=np.asarray(zb, b_type))
    wanted = (a.astype(np.int64) - za) @ (b.astype(np.int64) - zb)
    assert bits_equal(found, wanted.astype(np.int32))


def test_int8_matmul_is_exact_at_its_largest_sums():
    """2048 products of 255 * 255 are 1.3e8, far above float32's 2^24."""
    a = np.full((2, 2049), 255, np.uint8)
    a[1, 7] = 254
    found = F.int8_matmul(a, a.T)
    assert found[0, 0] == 2049 * 255 * 255 and found[0, 1] == found[0, 0] - 255


def test_int8_matmul_wraps_like_an_int32_accumulator():
    k = 40_000
    a = np.full((1, k), 255, np.uint8)
    wanted = k * 255 * 255
    assert wanted > 2**31
    assert F.int8_matmul(a, a.T)[0, 0] == wanted - 2**32


@pytest.mark.parametrize("make_b", [lambda s: s, lambda s: s[None]], ids=["N", "1xN"])
@pytest.mark.parametrize("make_a", [lambda s: s, lambda s: s[:, None]], ids=["M", "Mx1"])
def test_int8_matmul_scales_rows_and_columns(make_a, make_b):
    a, b = integers(-127, 127, (5, 64), np.int8), integers(-127, 127, (64, 7), np.int8, 1)
    scale_a, scale_b = np.abs(normal(5)), np.abs(normal(7, seed=1))
    exact = (a.astype(np.int64) @ b.astype(np.int64)).astype(F32)
    found = F.int8_matmul(a, b, make_a(scale_a), make_b(scale_b), 0.25)
    assert bits_equal(found, exact * scale_a[:, None] * scale_b * F32(0.25))
    assert bits_equal(F.int8_matmul(a, b, scale_b=make_b(scale_b)), exact * scale_b)
    assert bits_equal(F.int8_matmul(a, b, scale_a=2), exact * F32(2))
    assert bits_equal(F.int8_matmul(a, b, scale_c=0.5), exact * F32(0.5))


def test_dynamic_quantization_multiplies():
    x, w = normal(8, 64) + F32(1), normal(64, 6, seed=1)
    a, scale_a, zero_a = F.dynamic_quantize(x)
    b, scale_b = F.quantize_tensor(w)
    found = F.int8_matmul(a, b, scale_a, scale_b, zero_point_a=zero_a)
    wide = [(a.astype(F32) - F32(zero_a)) * scale_a, b.astype(F32) * scale_b]
    # 64 products of up to 5 * 4; float32 keeps them to 2^-24 each.
    assert np.abs(found - wide[0] @ wide[1]).max() < 64 * 20 * 2.0**-22
    # Half a step of either side times the other, added at random over 64 products.
    assert np.abs(found - x @ w).max() < 8 * 5 * (float(scale_a) / 2 * 4 + float(scale_b) / 2 * 5)


@pytest.mark.parametrize("k", [0, 1, 2, 7, 64, 1001])
def test_int4_matmul_is_exact(k):
    a, b = integers(-8, 7, (3, k), np.int8), integers(-8, 7, (k, 4), np.int8, 1)
    packed = F.pack_int4(a), F.pack_int4(b, axis=0)
    wanted = (a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)
    assert bits_equal(F.int4_matmul(*packed, k), wanted)
    assert bits_equal(F.int4_matmul(*packed), wanted)
    scales = np.array([1, 2, 3], F32), np.array([0.5, 1, 2, 4], F32)
    found = F.int4_matmul(*packed, k, *scales, scale_c=0.1)
    assert bits_equal(found, wanted.astype(F32) * scales[0][:, None] * scales[1] * F32(0.1))
    if k % 2:  # what is in the unused nibble does not count once K is given
        dirty = packed[0] | np.where(np.arange(packed[0].shape[1]) == k // 2, 0x50, 0).astype("u1")
        assert bits_equal(F.int4_matmul(dirty, packed[1] | np.uint8(0), k), wanted)


@pytest.mark.parametrize("a_type", [np.int8, np.uint8])
def test_matmul_bias_relu_of_integers(a_type):
    a, b = integers(0, 127, (5, 300), a_type), integers(-127, 127, (300, 6), np.int8, 1)
    bias = normal(6) * F32(1e5)
    exact = (a.astype(np.int64) @ b.astype(np.int64)).astype(F32)
    found = F.matmul_bias_relu(a, b, bias)
    assert bits_equal(found, np.maximum(exact + bias, F32(0)))
    assert (found == 0).any() and (found > 0).any()
    scale = np.abs(normal(5))
    found = F.matmul_bias_relu(a, b, bias[None], scale, 0.5, 2, out_dtype="float16")
    with np.errstate(over="ignore"):
        wanted = np.maximum(exact * scale[:, None] * F32(0.5) * F32(2) + bias, F32(0))
        assert bits_equal(found, wanted.astype(np.float16))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matmul_bias_relu_of_floats(dtype):
    # Small integers: every product and sum is exact in float32, so its order does not matter.
    a = integers(-4, 4, (5, 900), np.int64).astype(dtype)
    b = integers(-4, 4, (900, 6), np.int64, 1).astype(dtype)
    bias = (normal(6) * F32(50)).astype(dtype)
    exact, added = a.astype(np.float64) @ b.astype(np.float64), bias.astype(np.float64)
    found = F.matmul_bias_relu(a, b, bias)
    assert bits_equal(found, np.maximum(exact + added, 0).astype(F32).astype(dtype))
    scaled = F.matmul_bias_relu(a, b, bias, 0.5, out_dtype="float32")
    assert bits_equal(scaled, np.maximum(exact / 2 + added, 0).astype(F32))


def test_products_of_halves_sum_in_float32():
    """4096 ones end at 2048 where the sum is a float16."""
    ones = np.ones((1, 4096), np.float16)
    assert F.fp16_gemm(ones, ones.T)[0, 0] == 4096
    assert F.matmul_bias_relu(ones, ones.T, np.ones(1, np.float16))[0, 0] == np.float16(4097)
    assert F.fp16_gemm(ones.astype(BF16), ones.T.astype(BF16))[0, 0] == 4096


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fp16_gemm_is_gemm(dtype, out_dtype):
    a = integers(-4, 4, (5, 60), np.int64).astype(dtype)
    b = integers(-4, 4, (60, 6), np.int64, 1).astype(dtype)
    c = normal(5, 6, dtype=dtype)
    exact = a.astype(F32) @ b.astype(F32)
    wide = BF16 if out_dtype == "bfloat16" else np.dtype(out_dtype)
    assert bits_equal(F.fp16_gemm(a, b, out_dtype=out_dtype), exact.astype(wide))
    found = F.fp16_gemm(a, b, c, 0.3, -0.7, out_dtype)
    wanted = F32(0.3) * exact + F32(-0.7) * c.astype(F32)
    assert bits_equal(found, wanted.astype(wide))


def test_fp16_gemm_does_not_read_c_without_beta():
    a = np.ones((2, 3), np.float16)
    c = np.full((2, 2), np.nan, np.float16)
    assert (F.fp16_gemm(a, a.T, c) == 3).all()
    assert np.isnan(F.fp16_gemm(a, a.T, c, beta=1)).all()
    row = np.array([1, 2], np.float16)
    assert F.fp16_gemm(a, a.T, row, beta=1).tolist() == [[4, 5], [4, 5]]


@pytest.mark.parametrize("dtype", [*FLOATS, np.dtype(np.int8), np.dtype(np.int32)], ids=str)
def test_binary_matmul_multiplies_signs(dtype):
    a, b = ((normal(4, 100, seed=i) * F32(3)).astype(dtype) for i in range(2))
    a[0, :3] = 0
    if dtype.kind != "i":
        a[1, :3] = [-0.0, np.inf, -np.inf]
        b[0, 0] = ml_dtypes.finfo(dtype).smallest_subnormal * dtype.type(-1)
    signs = [np.where(x.astype(F32) >= 0, 1, -1).astype(np.int64) for x in (a, b)]
    found = F.binary_matmul(a, b.T)
    assert bits_equal(found, (signs[0] @ signs[1].T).astype(np.int32))


# ---- rows -----------------------------------------------------------------------------------


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
    large = np.full((1, 4), 1e25, F32)  # squares beyond float32: the row vanishes, as its norm says
    assert (F.rmsnorm_quantize(large, ones[:4]).dequantize() == 0).all()


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


# ---- kinds of array, views ------------------------------------------------------------------

X = normal(4, 256)
K3, SCALE3 = F.quantize_kbit(X, 3)
NF4, ABSMAX = F.quantize_nf4(X)
NESTED = F.quantize_nf4(X, 64, 256)[1]
A8, B8 = integers(-127, 127, (4, 64), np.int8), integers(-127, 127, (64, 3), np.int8)
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
    "rmsnorm_quantize": lambda to: F.rmsnorm_quantize(to(X.astype(BF16)), to(X[0].astype(BF16))),
    "add_rmsnorm_quantize": lambda to: F.add_rmsnorm_quantize(
        to(X), to(X), to(X[0]), residual_out=to(np.empty_like(X))
    ),
    "silu_mul_quantize": lambda to: F.silu_mul_quantize(to(X), to(X)),
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


@pytest.mark.parametrize("name", CALLS)
def test_arrays_on_a_gpu_name_what_is_missing(name, monkeypatch):
    class Array:
        """As much of cupy.ndarray as one can have without a GPU."""

        def __init__(self, x):
            self.shape, self.ndim, self.dtype = x.shape, x.ndim, x.dtype

        def reshape(self, *_):
            return self

        device = type("Device", (), {"id": 0})

    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    sys.modules["cupy"].ndarray = Array
    with pytest.raises(BackendUnavailable, match=r"cuda:0"):
        CALLS[name](Array)


@needs_torch
def test_the_first_array_decides_the_kind():
    assert isinstance(F.int8_matmul(torch_of(A8), B8), torch.Tensor)
    assert isinstance(F.int8_matmul(A8, torch_of(B8)), np.ndarray)
    assert isinstance(F.dequantize_nf4(torch_of(NF4), ABSMAX), torch.Tensor)


# ---- the seeds' examples --------------------------------------------------------------------


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


# ---- refusals -------------------------------------------------------------------------------

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
    (lambda: F.int8_matmul(LONG, B8), ValueError, r"a has shape \(2, 2, 2\); it must be \[M, K\]"),
    (lambda: F.int8_matmul(A8, B8[0]), ValueError, r"b has shape \(3,\); it must be \[K, N\]"),
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
