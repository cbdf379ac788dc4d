"""ggml's blocks as plain arrays, against gguf."""

import gguf
import numpy as np
import pytest
from functional_inputs import F32, FLOATS, TYPES, WEIGHTS, integers, normal
from oracle import bits_equal

import cuquant.functional as F
from cuquant.formats.blocks import BLOCK_LAYOUTS


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_blocks_are_ggufs(name, dtype):
    x = normal(3, 4, 256, dtype=dtype)
    x[0, 0, :32] = 0
    x[0, 1, ::2] = -x[0, 1, 1::2]  # ties of |x| with both signs
    found = getattr(F, f"quantize_{name}")(x)
    kind = gguf.GGMLQuantizationType[name.upper().removeprefix("GGML_")]
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
    kind = gguf.GGMLQuantizationType[name.upper().removeprefix("GGML_")]
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(blocks.reshape(2, -1), kind).astype(F32)
    found = getattr(F, f"dequantize_{name}")(blocks, 6 * layout.elements)
    assert found.dtype == F32 and found.shape == (2, 6 * layout.elements)
    if name in ("mxfp4", "nvfp4"):  # ggml's table has no -0.0 where e2m1 has one
        found, wanted = found + F32(0), wanted + F32(0)
    same = found.view(np.uint32) == wanted.view(np.uint32)
    assert (same | (np.isnan(found) & np.isnan(wanted))).all()


# Root mean square error on normal data, in units of its deviation: 1.3 times what is measured.
ERRORS = {
    "q4_0": 0.115, "q4_1": 0.10, "q5_0": 0.057, "q5_1": 0.05, "q8_0": 0.0070, "q8_1": 0.0070,
    "iq4_nl": 0.10, "iq4_xs": 0.105, "q2_k": 0.38, "q3_k": 0.19, "q4_k": 0.10, "q5_k": 0.05,
    "q6_k": 0.026, "mxfp4": 0.155, "nvfp4": 0.125, "ggml_mxfp4": 0.155, "ggml_nvfp4": 0.125,
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


# ---- what is said of differences from ggml ------------------------------------------------------


def gguf_values(name: str, blocks: np.ndarray) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[name.upper().removeprefix("GGML_")]
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks.reshape(len(blocks), -1), kind).astype(F32)


def test_mxfp4_values_differ_in_signs_of_zero_and_from_scale_byte_253_on():
    blocks = np.zeros((256, 1, 17), np.uint8)
    blocks[:, 0, 0] = np.arange(256)
    blocks[:, 0, 1:] = np.arange(16) * 0x11  # each code twice
    ours, theirs = F.dequantize_mxfp4(blocks), gguf_values("mxfp4", blocks)
    codes = np.tile(np.arange(16), 2)
    below = ours[:253].view(np.uint32) == theirs[:253].view(np.uint32)
    assert (below == (codes != 8)).all()
    assert np.signbit(ours[:255, codes == 8]).all() and not np.signbit(theirs[:, codes == 8]).any()
    top = np.finfo(F32).max
    for byte in (253, 254):
        infinite = np.isinf(theirs[byte])
        assert infinite.any() and (ours[byte] == np.clip(theirs[byte], -top, top)).all()
    assert np.isnan(ours[255]).all()
    with np.errstate(over="ignore"):
        assert (theirs[255] == theirs[254] * F32(2)).all()  # 2^128


def test_nvfp4_values_differ_in_signs_of_zero_and_scale_bytes_that_are_nan():
    blocks = np.zeros((256, 1, 36), np.uint8)
    blocks[:, 0, :4] = np.arange(256)[:, None]
    blocks[:, 0, 4:] = np.tile(np.arange(16) * 0x11, 2)
    ours, theirs = F.dequantize_nvfp4(blocks), gguf_values("nvfp4", blocks)
    plain = np.delete(np.arange(256), [0x7F, 0xFF])
    eight = BLOCK_LAYOUTS["nvfp4"].stored(blocks[plain, 0])["codes"] == 8
    same = ours[plain].view(np.uint32) == theirs[plain].view(np.uint32)
    assert (same == ~eight).all() and np.signbit(ours[plain][eight]).all()
    assert not (theirs[plain][eight] != 0).any() and not np.signbit(theirs[plain][eight]).any()
    assert np.isnan(ours[[0x7F, 0xFF]]).all()
    assert (theirs[0x7F] == 0).all() and np.abs(theirs[0xFF]).max() == 6 * 480


def test_mxfp4_ties_go_to_the_even_code_and_in_ggml_to_the_smaller_size():
    x = np.full((1, 32), 6, F32)  # a scale of 1
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], F32)
    x[0, : len(ties)] = ties
    x[0, 8 : 8 + len(ties)] = -ties
    kind = gguf.GGMLQuantizationType.MXFP4
    theirs = gguf.quants.quantize(x, kind).reshape(1, 1, 17)
    ours = F.quantize_mxfp4(x)
    assert ours[0, 0, 0] == theirs[0, 0, 0] == 127
    layout = BLOCK_LAYOUTS["mxfp4"]
    a, b = (layout.stored(blocks.reshape(1, 17))["codes"][0] for blocks in (ours, theirs))
    assert (a[:7] % 2 == 0).all() and b[:7].tolist() == list(range(7))
    assert (a[8:15] == a[:7] + 8).all() and b[8:15].tolist() == [0, *range(9, 15)]


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_blocks_are_ggufs_down_to_scales_of_2_to_the_minus_128(name):
    """Below, ggml's reciprocal is infinite; here codes are those of 0. Scales are 0 in float16."""
    kind, layout = (
        gguf.GGMLQuantizationType[name.upper().removeprefix("GGML_")],
        BLOCK_LAYOUTS[name],
    )
    peak = {"q4_0": 8, "q4_1": 15, "q5_0": 16, "q5_1": 31, "q8_0": 127}[name]
    x = normal(40, 32)
    x /= (x.max(-1) - x.min(-1) if layout.has_min else np.abs(x).max(-1))[:, None]
    above, below = ((x * F32(peak * 2.0**-128) * F32(by)).astype(F32) for by in (1.001, 0.999))
    found = getattr(F, f"quantize_{name}")
    with np.errstate(all="ignore"):
        assert bits_equal(found(above)[:, 0], gguf.quants.quantize(above, kind))
    zero = layout.stored(found(np.zeros((1, 32), F32))[0])["codes"]
    codes = layout.stored(found(below)[:, 0])["codes"]
    assert (codes == zero).all()
    assert not layout.stored(found(below)[:, 0])["scale"].any()


def test_searched_types_say_that_their_error_is_below_ggmls_in_total():
    for name in ("q2_k", "q6_k", "iq4_nl"):
        assert "in total" in getattr(F, f"quantize_{name}").__doc__
    # A block alone may err more: ggml stores 2 and -2 by turns with an error of 9.54e-7.
    x = np.tile(np.array([2, -2], F32), (1, 128))
    error = ((F.dequantize_q6_k(F.quantize_q6_k(x)).astype(np.float64) - x) ** 2).sum()
    assert 9.54e-7 < error < 6.2e-5
