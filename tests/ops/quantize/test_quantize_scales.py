"""What shares a scale, and scales that are given, nested or global."""

import time
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from in_turn import in_turn
from oracle import bits_equal, single_scale_formats
from samples import sampled

import cuquant as cq

OWN = single_scale_formats()


@pytest.mark.parametrize("name", OWN)
@in_turn("block", [8, 24, 40, 4096, "row", "tensor"])
def test_block_sizes(name, block, rng):
    """Each block stands alone: quantizing it by itself gives the same codes."""
    x = rng.standard_normal((3, 100), dtype=np.float32)
    options = {"global_scale": 0.01} if name == "nvfp4" else {}
    q = cq.quantize(x, name, block_size=block, **options)
    width = {"row": 100, "tensor": 100}.get(block, block)
    if block == "tensor":
        assert q.scale.shape == ()
        flat = cq.quantize(x.reshape(1, 300), name, block_size="row", **options)
        assert bits_equal(q.codes().reshape(1, 300), flat.codes())
        return
    codes, scale = q.codes(), q.scale
    for start in range(0, 100, width):
        part = cq.quantize(x[:, start : start + width], name, block_size=block, **options)
        assert bits_equal(codes[:, start : start + width], part.codes())
        assert (scale[:, start // width] == part.scale[:, 0]).all()


@pytest.mark.parametrize(
    ("name", "tile"),
    sampled(
        product(OWN, [(1, 32), (16, 16), (8, 40), (128, 128), (3, 8)]),
        lambda name, _: name,
        lambda _, tile: tile,
    ),
)
def test_two_dimensional_blocks(name, tile, rng):
    x = rng.standard_normal((2, 19, 50), dtype=np.float32)
    options = {"global_scale": 0.01} if name == "nvfp4" else {}
    q = cq.quantize(x, name, block_size=tile, **options)
    tall, wide = tile
    codes, scale = q.codes(), q.scale
    assert scale.shape == (2, -(-19 // tall), -(-50 // wide))
    for b in range(2):
        for i in range(0, 19, tall):
            for j in range(0, 50, wide):
                part = x[b, i : i + tall, j : j + wide]
                alone = cq.quantize(
                    np.ascontiguousarray(part), name, block_size="tensor", **options
                )
                assert scale[b, i // tall, j // wide] == alone.scale
                assert bits_equal(codes[b, i : i + tall, j : j + wide], alone.codes())


@pytest.mark.parametrize("name", ["nf4", "int4", "int8", "int1", "uint4", "k3"])
@pytest.mark.parametrize("block", ["row", "tensor", (70, 70000)])
def test_blocks_larger_than_a_piece(name, block, rng):
    """Statistics are combined over pieces, in index order; ties of |x| keep the first."""
    x = np.round(rng.standard_normal((3, 150_000)) * 4).astype(np.float32)
    q = cq.quantize(x, name, block_size=block)
    parts = {
        "row": [x[i] for i in range(3)],
        "tensor": [x],
        (70, 70000): [x[:, j : j + 70000] for j in range(0, 150_000, 70000)],
    }[block]
    for part, scale in zip(parts, q.scale.reshape(-1), strict=True):
        flat = part.reshape(-1)
        fmt = q.format
        first = flat[np.argmax(np.abs(flat))]
        exact = {
            "absmax": np.abs(first) / np.float32(fmt.scale.peak),
            "signed_max": first / np.float32(fmt.scale.peak),
            "range": (flat.max() - flat.min()) / np.float32(fmt.scale.peak),
            "mean_abs": np.float64(np.abs(flat).sum(dtype=np.float64))
            / flat.size,  # integers: exact
        }[fmt.scale.rule]
        assert scale == exact.astype(scale.dtype)


# ---- static quantization --------------------------------------------------------------------


def test_static_scale_is_used_as_it_is(rng):
    x = rng.standard_normal((4, 256), dtype=np.float32)
    q = cq.quantize(x, "int8", scale=0.02, block_size="tensor")
    assert q.scale == np.float32(0.02)
    inverse = np.float32(1) / np.float32(0.02)
    assert (q.packed == np.clip(np.rint(x * inverse), -127, 127)).all()


def test_static_zero_point():
    x = np.array([[-1.0, 0.0, 1.0, 300.0, -300.0, np.nan, np.inf, -np.inf]], np.float32)
    q = cq.quantize(x, "uint8", scale=1.0, zero_point=10, block_size="tensor")
    assert q.codes().tolist() == [[9, 10, 11, 255, 0, 10, 255, 0]]
    assert q.dequantize()[0, :3].tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", [n for n in OWN if n != "nvfp4"])
def test_static_with_the_dynamic_scales_gives_the_dynamic_codes(name, rng):
    """Where codes use the stored scale, giving it back changes nothing."""
    x = rng.standard_normal((4, 300), dtype=np.float32)
    q = cq.quantize(x, name)
    again = cq.quantize(x, name, scale=q.scale, zero_point=q.zero_point)
    for part, value in q.arrays().items():
        assert bits_equal(again.arrays()[part], value)


def test_static_nvfp4(rng):
    x = rng.standard_normal((4, 256), dtype=np.float32)
    q = cq.quantize(x, "nvfp4", global_scale=0.5)
    again = cq.quantize(x, "nvfp4", scale=q.scale, global_scale=0.5)
    for part, value in q.arrays().items():
        assert bits_equal(again.arrays()[part], value)


def test_static_codebooks_still_see_nan():
    x = np.ones((1, 128), np.float32)
    x[0, 5] = np.nan
    values = cq.quantize(x, "nf4", scale=1.0).dequantize()
    assert np.isnan(values[0, :64]).all() and (values[0, 64:] == 1).all()


# ---- double quantization and nvfp4 ----------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n for n in OWN if cq.get_format(n).scale.dtype == "float32"] + ["k4"]
)
def test_double_quantization(name, rng):
    x = rng.standard_normal((16, 4096), dtype=np.float32)
    fmt = cq.get_format(name, scale_dtype="float32" if name == "k4" else None)
    plain = cq.quantize(x, fmt)
    q = cq.quantize(x, cq.get_format(fmt, double_quant=True))
    if fmt.scale.encode_with == "exact":  # bitsandbytes': codes know nothing of the nesting
        assert bits_equal(q.codes(), plain.codes())
    else:
        static = cq.quantize(x, fmt, scale=q.scale)
        assert bits_equal(q.codes(), static.codes())
        assert cq.error(x, q).sqnr_db > cq.error(x, plain).sqnr_db - 0.2
    scale = plain.scale.reshape(-1)
    parts = q.arrays()
    offset = np.float32(np.cumsum(scale, dtype=np.float64)[-1] / len(scale))
    assert parts["nested_offset"] == offset
    nested = cq.quantize(scale - offset, "dynamic8", block_size=256)
    assert bits_equal(parts["scale"].reshape(-1), nested.packed)
    assert bits_equal(parts["nested_scale"], nested.scale)
    assert (q.scale.reshape(-1) == nested.dequantize() + offset).all()
    assert q.nbytes < plain.nbytes


def test_double_quantization_keeps_nan_in_its_nested_block(rng):
    x = rng.standard_normal((2, 64 * 256), dtype=np.float32)
    x[1, 0] = np.nan
    values = cq.quantize(x, "nf4", double_quant=True).dequantize()
    assert np.isfinite(values[0]).all() and np.isnan(values[1, :64]).all()


def test_nvfp4_global_scale(rng):
    x = rng.standard_normal((4, 256), dtype=np.float32)
    q = cq.quantize(x, "nvfp4")
    world = np.abs(x).max() / np.float32(6 * 448)
    assert q.arrays()["global_scale"] == world
    stored = q.arrays()["scale"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert bits_equal(q.scale, stored * world)
    assert stored.max() == 448
    zero = cq.quantize(np.zeros((1, 16), np.float32), "nvfp4")
    assert zero.arrays()["global_scale"] == 1 and zero.arrays()["scale"].tolist() == [[0]]


def test_many_small_matrices_in_two_dimensional_blocks_are_not_slow():
    x = np.ones((5000, 8, 8), np.float32)
    start = time.process_time()
    cq.quantize(x, "int8", block_size=(8, 8))
    assert x.nbytes / 1e6 / (time.process_time() - start) >= 5  # MB/s, on a busy machine too


# ---- what was silent ----------------------------------------------------------------------------


def test_a_scale_of_zero_or_with_a_wrong_sign_is_refused():
    x = np.ones((2, 128), np.float32)
    for scale in (0, 0.0, -0.0, np.zeros((2, 1), np.float32), np.float32(1e-46)):
        with pytest.raises(ValueError, match="scale= is 0"):
            cq.quantize(x, "int8", scale=scale)
    for name in ("int8", "uint8", "fp8_e4m3", "nf4", "k4+normal", "int1"):
        with pytest.raises(ValueError, match="no sign"):
            cq.quantize(x, name, scale=-0.5)
    for name in ("int4", "k4", "bof4s"):  # theirs carry the sign of the furthest element
        assert cq.quantize(x, name, scale=-0.5).scale.reshape(-1)[0] == -0.5
    partly = np.array([[0.1], [0]], np.float32)  # a row of zeros has the scale 0
    assert cq.quantize(x, "int8", scale=partly).scale[1, 0] == 0


def test_a_seed_without_stochastic_rounding_is_refused():
    with pytest.raises(ValueError, match="stochastic=True"):
        cq.quantize(np.ones((2, 64), np.float32), "nf4", seed=0)


@pytest.mark.parametrize("name", ["int4", "k3", "uint8", "fp6_e2m3", "int1", "bof4s"])
def test_scales_beyond_float16_warn(name, recwarn):
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    with pytest.warns(RuntimeWarning, match=r"scales of .* are beyond float16.*float32") as caught:
        cq.quantize(x * 1e9, name)
    assert caught[0].filename == __file__, "the line that called is named, and so warns once"
    recwarn.clear()
    cq.quantize(x, name)
    cq.quantize(np.full((1, 64), 65489, np.float32), "int1")  # rounds to 65504, which is no loss
    if name != "bof4s":
        cq.quantize(x * 1e9, name, **({} if name == "nf4" else {"block_size": 64}), scale=1)
    cq.quantize(x * 1e9, cq.get_format(name, scale_dtype="float32"))
    assert not recwarn.list


@pytest.mark.parametrize(
    "name",
    ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "q2_k", "q4_k", "q6_k", "iq4_nl", "iq4_xs"],
)
def test_blocks_of_ggml_that_become_infinite_warn(name, recwarn):
    """Their bytes are ggml's, which has no other scale; "clamp" saturates and is silent."""
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    with pytest.warns(RuntimeWarning, match=r"scales of .* are beyond float16: blocks become inf"):
        q = cq.quantize(x * 1e12, name)
    assert not np.isfinite(q.dequantize()).any()
    with pytest.raises(ValueError, match=r"nonfinite='clamp' to saturate|NaN|overflow"):
        cq.quantize(x * 1e12, name, nonfinite="raise")
    recwarn.clear()
    assert np.isfinite(cq.quantize(x * 1e12, name, nonfinite="clamp").dequantize()).all()
    cq.quantize(x, name)
    cq.quantize(np.full((1, 256), np.nan, np.float32), name)
    cq.quantize(np.full((1, 256), np.inf, np.float32), name)
    assert not recwarn.list


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_values_beyond_a_format_without_scales_warn(name, recwarn):
    peak = float(cq.get_format(name).codec.peak)
    x = np.full((2, 64), 1.0, np.float32)
    x[0, :3] = np.float32(3.4e38)
    if peak < 3.4e38:
        with pytest.warns(RuntimeWarning, match="3 values of .* are beyond its largest") as caught:
            cq.quantize(x, name)
        assert caught[0].filename == __file__
    recwarn.clear()
    cq.quantize(np.ones((2, 64), np.float32), name)
    cq.quantize(np.full((2, 64), np.inf, np.float32), name)  # no finite value is lost
    assert not recwarn.list


@pytest.mark.parametrize("name", ["int4", "uint4", "k3", "nvfp4"])
def test_a_given_scale_that_is_stored_as_another_is_told(name, recwarn):
    """One that is stored as 0 leaves nothing, and is refused; one that saturates is warned of."""
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    world = {"global_scale": 1.0} if name == "nvfp4" else {}
    with pytest.raises(ValueError, match=r"scale= is 0 in (float16|e4m3)"):
        cq.quantize(x, name, scale=1e-9, **world)
    cq.quantize(x, name, scale=0.25, **world)
    assert not recwarn.list
    with pytest.warns(RuntimeWarning, match=r"scales of .* are beyond (float16|e4m3): values sat"):
        cq.quantize(x, name, scale=1e6, **world)
    if name != "nvfp4":
        assert cq.quantize(x, f"{name}+float32", scale=1e-9).scale.any()


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-130, 2.0**-128])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp6"])
def test_powers_of_two_that_e8m0_lacks_are_refused(name, scale):
    """Their exponents wrapped: 2^-149 was stored as 2^107."""
    with pytest.raises(ValueError, match=r"powers of two from 2\^-127 on"):
        cq.quantize(np.ones((4, 256), np.float32), name, scale=scale)
    assert cq.quantize(np.ones((4, 256), np.float32), name, scale=2.0**-127).scale.any()


def test_a_global_scale_that_is_too_small_warns(recwarn):
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    with pytest.warns(RuntimeWarning, match="pass a larger global_scale"):
        cq.quantize(x, "nvfp4", global_scale=1e-9)


def test_a_given_scale_beyond_float32_is_refused_without_a_warning(recwarn):
    with pytest.raises(ValueError, match="finite"):
        cq.quantize(np.ones((2, 64), np.float32), "int8", scale=1e300)
    with pytest.raises(ValueError, match="finite"):
        cq.quantize(np.ones((2, 64), np.float32), "nvfp4", global_scale=1e39)
    assert not recwarn.list


@pytest.mark.parametrize("name", ["int8", "int1", "fp8_e4m3", "int4:row", "nf4", "nvfp4", "nf4+dq"])
def test_rows_without_elements_take_no_memory(name):
    """Also where each row has a scale; a few of them are as they were."""
    q = cq.quantize(np.empty((2**60, 0), np.float32), name)
    assert q.dequantize().shape == (2**60, 0)
    few = cq.quantize(np.empty((3, 0), np.float32), name)
    wanted = {c.name: c.shape for c in cq.get_format(name).components((3, 0))}
    assert {key: part.shape for key, part in few.components.items()} == wanted
    assert not any(part.any() for key, part in few.components.items() if key != "global_scale")


def test_many_rows_without_elements_keep_a_given_global_scale():
    q = cq.quantize(np.empty((2**40, 0), np.float32), "nvfp4", global_scale=0.25)
    assert q.components["global_scale"] == 0.25
