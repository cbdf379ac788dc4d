"""nf4 and fp4 as plain arrays, against bitsandbytes' bytes."""

import numpy as np
import pytest
from functional_inputs import BF16, F32, GOLDEN, normal
from oracle import bits_equal

import cuquant as cq
import cuquant.functional as F
from cuquant.formats import get_format


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


# ---- scales that are not finite ---------------------------------------------------------------


def test_an_infinite_absmax_decodes_to_infinities_and_nan():
    """It gave the largest float: 0xF7 is 1 and 0, 0x08 is -1 and the level above 0."""
    infinite = np.array([np.inf], F32)
    found = F.dequantize_nf4(np.array([0xF7, 0x08], np.uint8), infinite)
    np.testing.assert_array_equal(found, F32([np.inf, np.nan, -np.inf, np.inf]))
    found = F.dequantize_fp4(np.array([0x10, 0x98], np.uint8), -infinite)
    np.testing.assert_array_equal(found, F32([-np.inf, np.nan, np.inf, np.nan]))


@pytest.mark.parametrize("part", ["nested_absmax", "offset", "nested_map"])
def test_an_infinite_nested_absmax_decodes_to_nothing_finite(part):
    nested = F.quantize_nf4(np.ones(64, F32), 64, 256)[1]
    nested = {**nested, "absmax_q": np.array([200], np.uint8), "offset": F32(1)}
    nested["nested_absmax"] = np.array([1], F32)
    nested[part] = np.full_like(nested[part], np.inf)
    assert not np.isfinite(F.dequantize_nf4(np.array([0xFF], np.uint8), nested)).any()


def test_a_signalling_nan_makes_no_other_block_overflow():
    q = cq.quantize(np.ones((1, 24), F32), "int8", block_size=8)
    scale = np.array([[1e10, 0, 1e-30]], F32)
    scale.view(np.uint32)[0, 1] = 0x7F800001
    q = cq.QuantArray(q.format, q.shape, q.dtype, {**q.arrays(), "scale": scale}, q.axes)
    np.testing.assert_array_equal(q.dequantize(dtype="float16")[0, ::8], [65504, np.nan, 0])
    scale[0, 0] = 3e38
    assert q.dequantize()[0, 0] == np.finfo(F32).max
