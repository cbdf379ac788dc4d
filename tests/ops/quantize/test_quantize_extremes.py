"""quantize where numbers end: zeros of both signs, NaN, infinity, overflow, subnormals."""

import ml_dtypes
import numpy as np
import pytest
from in_turn import in_turn
from oracle import DTYPES, bits_equal, single_scale_formats

import cuquant as cq

OWN = single_scale_formats()
NAMES = cq.list_formats()
VARIANTS = ("uint4:64+min", "uint3:64+min+bfloat16", "int8:64+e8m0", "fp8_e4m3:64+bfloat16")
BLOCKED = [n for n in NAMES if cq.get_format(n).is_blocks]


@pytest.mark.parametrize("name", [*(n for n in NAMES if n not in BLOCKED), *VARIANTS])
@in_turn("block", ["own", "row", "tensor"])
def test_zeros_decode_to_positive_zero(name, block):
    """All codes are that of 0, all scales 0 (E8M0: byte 0), and no NaN byte anywhere."""
    fmt = cq.get_format(name)
    if fmt.scale is None:
        q = cq.quantize(np.zeros((3, 100), np.float32), name)
    else:
        q = cq.quantize(
            np.zeros((3, 100), np.float32), fmt, block_size=None if block == "own" else block
        )
        assert (q.arrays()["scale"] == 0).all() and not np.signbit(q.scale).any()
    assert (q.codes() == q.format.zero_code).all()
    values = q.dequantize()
    assert (values == 0).all() and not np.signbit(values).any()


@pytest.mark.parametrize("name", BLOCKED)
def test_zero_blocks_of_ggml_decode_to_zero(name):
    assert (cq.quantize(np.zeros((2, 512), np.float32), name).dequantize() == 0).all()


@pytest.mark.parametrize("name", (*NAMES, *VARIANTS))
@in_turn("bad", [np.nan, np.inf, -np.inf])
@in_turn("dtype", DTYPES)
def test_nonfinite_makes_its_block_nan_and_no_other(name, dtype, bad, rng):
    x = rng.standard_normal((4, 1024)).astype(DTYPES[dtype])
    clean = cq.quantize(x, name, **({"global_scale": 0.01} if name == "nvfp4" else {}))
    x[1, 700] = bad
    q = cq.quantize(x, name, **({"global_scale": 0.01} if name == "nvfp4" else {}))
    values, before = q.dequantize(), clean.dequantize()
    block = q.format.block_size
    elements = q.format.packing.elements if name in BLOCKED else block
    elements = 1024 if block == "row" else 1 if block is None else elements
    start = 700 // elements * elements
    inside = np.zeros(x.shape, bool)
    inside[1, start : start + elements] = True
    if q.format.scale is None:
        assert bits_equal(values[inside], x[inside])
    elif not q.format.holds_nan:  # NaN is 0, and an infinity the largest number
        assert not np.isnan(values[inside]).any()
        assert values[1, 700] == 0 if np.isnan(bad) else values[1, 700] * bad > 0
    else:
        assert np.isnan(values[inside]).all()
        assert (q.codes()[inside] == q.format.zero_code).all()
    assert bits_equal(values[~inside], before[~inside])


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8_e4m3", "k3", "uint4", "int1"])
def test_a_nan_scale_is_the_canonical_one(name):
    x = np.array([[-np.nan, 1.0] * 64], np.float32)
    x.view(np.uint32)[0, 2] = 0xFFC12345  # a NaN with a sign and a payload
    scale = cq.quantize(x, name).scale
    canonical = {2: 0x7E00, 4: 0x7FC00000}[scale.dtype.itemsize]
    assert scale.view(f"u{scale.dtype.itemsize}").reshape(-1)[0] == canonical


@pytest.mark.parametrize("name", NAMES)
def test_raise_names_the_flat_index_and_writes_nothing(name, rng):
    x = rng.standard_normal((4, 512), dtype=np.float32)
    out = cq.quantize(x, name)
    kept = {part: value.copy() for part, value in out.arrays().items()}
    x[2, 77] = np.nan
    with pytest.raises(ValueError, match="flat index 1101"):
        cq.quantize(x, name, nonfinite="raise", out=out)
    for part, value in out.arrays().items():
        assert bits_equal(value, kept[part])


def test_raise_finds_the_index_of_a_view(rng):
    x = rng.standard_normal((512, 4), dtype=np.float32).T
    x[2, 77] = np.inf
    with pytest.raises(ValueError, match="flat index 1101"):
        cq.quantize(x, "nf4", axis=0, nonfinite="raise")


@pytest.mark.parametrize("name", NAMES)
def test_clamp_is_quantizing_the_repaired_array(name, rng):
    x = rng.standard_normal((2, 512)).astype(np.float16)
    x[0, 3], x[1, 4], x[1, 200] = np.nan, np.inf, -np.inf
    repaired = np.nan_to_num(x, nan=0.0)  # infinities to +-65504
    q = cq.quantize(x, name, nonfinite="clamp")
    wanted = cq.quantize(repaired, name)
    assert bits_equal(q.codes(), wanted.codes())
    assert np.isfinite(q.dequantize(dtype="float32")).all()


@pytest.mark.parametrize(
    "name", [n for n in OWN if cq.get_format(n).scale.dtype in ("float16", "e4m3")]
)
def test_a_scale_that_overflows_saturates(name):
    x = np.full((1, 128), 3e38, np.float32)
    x[0, 1::2] = -3e38
    options = {"global_scale": 1.0} if name == "nvfp4" else {}
    q = cq.quantize(x, name, **options)
    assert np.abs(q.scale).max() == (448 if options else 65504)
    assert np.isfinite(q.dequantize()).all()
    with pytest.raises(ValueError, match="overflow"):
        cq.quantize(x, name, nonfinite="raise", **options)


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "iq4_nl"])
def test_ggml_scales_overflow_as_ggml_does(name):
    x = np.full((1, 256), 3e38, np.float32)
    assert np.isinf(cq.quantize(x, name).scale).all()
    with pytest.raises(ValueError, match="overflow"):
        cq.quantize(x, name, nonfinite="raise")
    assert np.isfinite(cq.quantize(x, name, nonfinite="clamp").scale).all()


def test_fp16_saturates_and_bf16_rounds():
    x = np.array([1e6, -1e6, 65519.0, 1e-8, np.inf], np.float32)
    q = cq.quantize(x, "fp16")
    assert q.dequantize().tolist() == [65504, -65504, 65504, np.float32(np.float16(1e-8)), np.inf]
    with pytest.raises(ValueError, match="overflow"):
        cq.quantize(x[:4], "fp16", nonfinite="raise")
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38], np.float32)
    largest = (2 - 2.0**-7) * 2.0**127  # 3.39e38
    assert cq.quantize(x, "bf16").dequantize().tolist() == [1.0, 1 + 4 * 2**-8, largest]


@pytest.mark.parametrize("name", NAMES)
@in_turn("value", [1e-45, 1e-40, 1.2e-38, 2.0**-127, 2.0**-133])
def test_subnormal_blocks_are_finite(name, value):
    x = np.zeros((1, 256), np.float32)
    x[0, ::3], x[0, 1::3] = value, -value
    values = cq.quantize(x, name).dequantize()
    assert np.isfinite(values).all()
    assert np.abs(values).max() <= 2 * value


def test_e8m0_reaches_its_lowest_scale():
    q = cq.quantize(np.full((1, 32), 2.0**-127, np.float32), "mxfp4")
    assert q.arrays()["scale"].tolist() == [[0]] and q.scale[0, 0] == 2.0**-127
    assert (q.dequantize() == 2.0**-127).all()


@pytest.mark.parametrize(
    "name",
    ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "mxfp8", "mxfp4", "nvfp4", "fp6_e2m3", "fp16", "bf16"],
)
def test_negative_zero_is_kept_where_the_format_has_it(name):
    x = np.array([[1.0, -0.0, 0.0, -1.0] * 8], np.float32)
    assert np.signbit(cq.quantize(x, name).dequantize()[0, :4]).tolist() == [
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("name", ["nf4", "int4", "k3", "bof4s", "int8", "uint4"])
def test_negative_zero_becomes_zero_elsewhere(name):
    x = np.array([[1.0, -0.0, 0.0, -2.0] * 32], np.float32)  # a negative scale under signed max
    values = cq.quantize(x, name).dequantize()
    assert not np.signbit(values[values == 0]).any()


# ---- what once went wrong -------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
@in_turn("dtype", DTYPES)
def test_the_largest_value_of_a_dtype_stays_finite(name, dtype):
    """127 * (FLT_MAX / 127) overflows, and so does 15 * half(65504 / 15) in float16."""
    top = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    x = np.array([[top, 1.0, -top, np.inf] * 8], DTYPES[dtype])
    values = cq.quantize(x, name, nonfinite="clamp").dequantize()
    assert values.dtype == x.dtype and np.isfinite(values).all()
    assert np.isfinite(cq.quantize(x[:, :3], name).dequantize()).all()


@pytest.mark.parametrize("name", ["q8_0", "q8_1", "q5_1", "q4_0"])
def test_the_largest_float16_stays_finite_in_ggml_types(name):
    x = np.array([[65504.0, 1.0, -65504.0, 3.0] * 8], np.float16)
    assert np.isfinite(cq.quantize(x, name).dequantize()).all()


@pytest.mark.parametrize("name", BLOCKED)
def test_scales_that_overflow_are_silent(name):
    x = np.full((1, 256), 1e38, np.float32)
    x[0, ::2] = 3e38
    cq.quantize(x, name).dequantize()  # any warning is an error here


def test_a_tiny_nvfp4_tensor_keeps_a_usable_global_scale():
    for value in (1e-45, 1e-42, 5e-42, 1e-40):
        x = np.full((1, 64), value, np.float32)
        q = cq.quantize(x, "nvfp4")
        world = q.arrays()["global_scale"]
        assert world > 0 and np.abs(q.dequantize()).max() <= 2 * value
        cq.quantize(x, "nvfp4", global_scale=world)


# ---- scales below the smallest normal number ------------------------------------------------


def sqnr(x: np.ndarray, q: cq.QuantArray) -> float:
    """dB."""
    x, y = x.astype(np.float64), q.dequantize().astype(np.float64)
    with np.errstate(divide="ignore"):
        return float(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()))


def weights(size: float, rows: int = 16) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((rows, 1024)) * size).astype(np.float32)


LEAST = {  # dB
    "uint8": 35, "int7": 35, "uint6": 29, "int6": 29, "k8": 40, "fp6_e2m3": 30, "bof4s": 20,
    "fp4_e2m1": 19, "iq4_nl": 13, "iq4_xs": 13, "q6_k": 31,
}  # fmt: skip


@pytest.mark.parametrize(("name", "least"), LEAST.items())
def test_weights_of_1e_6_are_not_erased(name, least):
    """6e-6 / 255 is less than half of float16's smallest number: the nearest scale is 0."""
    assert sqnr(weights(1e-6), cq.quantize(weights(1e-6), name)) > least


def test_an_outlier_does_not_erase_the_blocks_beside_it():
    x = weights(1.0)
    x[0, 0] = 1e6
    q = cq.quantize(x, "nvfp4")
    assert sqnr(x[1:], q[1:]) > 17.9  # it was 2.6


@pytest.mark.parametrize("name", ["uint2", "uint4", "uint8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_range_beyond_float32_has_a_scale(name, dtype):
    """Its bytes are those of a quarter of the numbers, with four times the scale."""
    fmt = cq.get_format(name, block_size="row", scale_dtype=dtype)
    x = (np.random.default_rng(2).uniform(-1, 1, (5, 300)) * 3.3e38).astype(np.float32)
    q, small = cq.quantize(x, fmt), cq.quantize(x / np.float32(4), fmt)
    assert bits_equal(q.packed, small.packed) and bits_equal(q.zero_point, small.zero_point)
    assert bits_equal(q.scale, small.scale * q.scale.dtype.type(4))


STEPS = {"float16": (2.0**-24, 1024), "e4m3": (2.0**-9, 8)}
ROUNDED = [
    name
    for name in OWN
    if cq.get_format(name).scale.dtype in STEPS and cq.get_format(name).scale.rule != "mean_abs"
]
ONE = {"nvfp4": {"global_scale": 1.0}}


def exact_scales(x: np.ndarray, fmt: cq.Format) -> np.ndarray:
    """float32 [blocks] of x [blocks, block]: statistic / peak."""
    low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    top = x[np.arange(len(x)), np.abs(x).argmax(-1)]
    rule = {"range": high - low, "signed_max": top, "absmax": np.abs(top)}[fmt.scale.rule]
    return rule / np.float32(fmt.scale.peak)


@pytest.mark.parametrize("name", ROUNDED)
@in_turn("kind", ["normal", "uniform", "heavy"])
def test_a_small_scale_is_the_one_that_errs_less(name, kind):
    """Of the multiples of the smallest number below and above, tried as scales that are given."""
    fmt, rng = cq.get_format(name), np.random.default_rng(3)
    block, peak, options = fmt.scale.block, abs(fmt.scale.peak), ONE.get(name, {})
    x = {
        "normal": lambda shape: rng.standard_normal(shape),
        "uniform": lambda shape: rng.random(shape) - 0.3,
        "heavy": lambda shape: rng.standard_t(2, shape),
    }[kind]((600, block))
    step, normal = STEPS[fmt.scale.dtype]
    x = (x * 10 ** rng.uniform(-2, 1.3, (600, 1)) * step * peak).astype(np.float32)
    q = cq.quantize(x, fmt, **options)
    exact = exact_scales(x, fmt)
    steps = np.abs(exact.astype(np.float64)) / step
    below = np.floor(steps)
    errors = []
    for count in (below, below + 1):
        scale = np.copysign(count * step, exact).astype(np.float32)[:, None]
        given = {"scale": scale, **options}
        if fmt.offset:
            low = np.minimum(x.min(-1, keepdims=True), 0)
            ratio = np.where(scale > 0, -low / np.where(scale > 0, scale, 1), 0)
            given["zero_point"] = np.clip(np.rint(ratio), 0, peak).astype(np.uint8)
        y = cq.quantize(x, fmt, **given).dequantize().astype(np.float64)
        errors.append(((x - y) ** 2).sum(-1))
    found = ((x - q.dequantize().astype(np.float64)) ** 2).sum(-1)
    best, small = np.minimum(*errors), steps < normal
    assert small.mean() > 0.5
    # Errors were compared in units of 2^-15 of the peak times the larger scale, rounded to half
    # of one: near ties may go either way.
    unit = 2.0**-15 * peak * (below + 1) * step
    slack = 2 * (np.sqrt(block * best) * unit / 2 + block * unit**2 / 4)
    assert (found <= best + slack)[small].all()
    chosen = np.abs(q.scale.reshape(-1).astype(np.float64)) / step
    assert ((chosen == below) | (chosen == below + 1))[small].all()


@pytest.mark.parametrize("name", ROUNDED)
def test_normal_scales_are_the_nearest(name):
    """And so the bytes of blocks that have one are what they were."""
    fmt = cq.get_format(name)
    dtype = {"float16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn}[fmt.scale.dtype]
    x = weights(1.0).reshape(-1, fmt.scale.block)
    q = cq.quantize(x, fmt, **ONE.get(name, {}))
    assert (q.scale.reshape(-1) == exact_scales(x, fmt).astype(dtype).astype(np.float32)).all()


VANISHING = {  # numbers too small for the scales of a format
    "float16": 1e-12, "e4m3": 1e-12, "float32": 1e-45, "bfloat16": 1e-45, "e8m0": 1e-45,
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in NAMES if cq.get_format(n).scale])
def test_raise_reports_blocks_that_vanish(name):
    fmt = cq.get_format(name)
    width = fmt.layout.elements if fmt.is_blocks else fmt.scale.block
    width = 256 if width == "row" else width
    x = np.ones((4, 2 * width), np.float32)
    x[1, width:] = 0  # a block of zeros is fine
    q = cq.quantize(x, name, nonfinite="raise")
    x[2, width : width + width // 2] = VANISHING[fmt.scale.dtype]
    x[2, width + width // 2 :] = -VANISHING[fmt.scale.dtype]
    if fmt.scale.block == "row":
        x[2] = x[2, -1]
    kept = {part: value.copy() for part, value in q.arrays().items()}
    assert not cq.quantize(x, name).dequantize()[2, width:].any()
    each = fmt.layout.sub_blocks if fmt.is_blocks and not fmt.layout.has_half_scale else 1
    with pytest.raises(ValueError, match=f"^{each} blocks of {name} underflow"):
        cq.quantize(x, name, nonfinite="raise", out=q)
    assert all(bits_equal(part, kept[key]) for key, part in q.arrays().items())


@pytest.mark.parametrize(
    "name", [*NAMES, *VARIANTS, "nf4+dq", "fp4:128+dq", "int4:row", "k4:tensor"]
)
@in_turn("size", [1e-3, 1e-5, 1e-6, 1e-7, 3e-8, 1e-10, 1e-38, 1e-40, 1e-44])
def test_raise_reports_every_loss_of_all_bits(name, size):
    """q4_1 keeps a minimum where its scale is 0, nvfp4 has a global scale, fp16 has none."""
    x = (np.random.default_rng(0).standard_normal((4, 256)) * size).astype(np.float32)
    fine = sqnr(x, cq.quantize(x, name)) > 1.5
    if fine and size > 1e-8:
        assert bits_equal(
            cq.quantize(x, name, nonfinite="raise").dequantize(), cq.quantize(x, name).dequantize()
        )
    elif not fine:
        with pytest.raises(ValueError, match="underflow"):
            cq.quantize(x, name, nonfinite="raise")


@pytest.mark.parametrize("name", ["q4_1", "q5_1", "q4_k", "q2_k", "uint4+min"])
def test_numbers_that_their_minimum_holds_do_not_vanish(name):
    """A scale of 0 loses nothing that float16 could hold."""
    x = np.full((2, 256), 1e-3, np.float32)
    x[:, ::2] += np.float32(2e-9)
    assert sqnr(x, cq.quantize(x, name, nonfinite="raise")) > 50


@in_turn("dtype", ["float16", "bfloat16", "float32"])
def test_a_minimum_is_the_smallest_number_of_its_block(dtype):
    """Whatever the others are: no zero is counted in, also not those that a partial block lacks."""
    x = np.concatenate([np.linspace(10, 13, 70), np.linspace(-3, -1, 30)]).astype(np.float32)
    q = cq.quantize(np.stack([x, -x]), f"uint4:40+min+{dtype}")
    held = np.dtype(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16)
    for sign, low in ((1, q.minimum[0]), (-1, q.minimum[1])):
        blocks = (sign * x[:40], sign * x[40:80], sign * x[80:])
        assert low.tolist() == [float(block.min().astype(held)) for block in blocks]
    assert np.abs(q.dequantize()[:, 80:] - np.stack([x, -x])[:, 80:]).max() <= 1 / 7


def test_a_minimum_too_large_for_its_dtype_saturates_and_is_told():
    x = np.array([[-1e6, 1e6, *[0.0] * 62], [1e6, *[1e6 + 1] * 63]], np.float32)
    with pytest.warns(RuntimeWarning, match="^3 scales or minimums of uint4:64.min are beyond"):
        q = cq.quantize(x, "uint4:64+min")
    assert q.minimum.tolist() == [[-65504.0], [65504.0]] and q.scale.tolist()[0] == [65504.0]
    with pytest.raises(ValueError, match=r"^3 float16 entries of uint4 overflow"):
        cq.quantize(x, "uint4:64+min", nonfinite="raise")
    assert cq.quantize(x, "uint4:64+min+bfloat16", nonfinite="raise").minimum[1, 0] == 999_424


def test_given_scales_say_nothing_of_minimums():
    with pytest.raises(ValueError, match=r"takes no scale=, which says nothing of its minimums"):
        cq.quantize(np.ones((2, 64), np.float32), "uint4:64+min", scale=0.5)
    with pytest.raises(ValueError, match="has no zero point"):
        cq.quantize(np.ones((2, 64), np.float32), "int4:64+bfloat16", scale=0.5, zero_point=1)


def test_values_of_finite_scales_and_minimums_saturate():
    """As those of other formats; what is infinite itself stays so."""
    x = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 64)
    q = cq.quantize(x, "uint4:64+min+float32")
    parts = {name: part.copy() for name, part in q.arrays().items()}
    parts["scale"][:], parts["minimum"][:] = 1e38, 3e38
    top = np.finfo(np.float32).max
    large = cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)
    assert large.dequantize()[0, -1] == top and large.dequantize()[0, 0] == np.float32(3e38)
    assert (large.dequantize(dtype="float16") == 65504).all()
    parts["scale"][:], parts["minimum"][:] = 1, -np.inf
    assert (cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes).dequantize() == -np.inf).all()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_raise_names_rows_of_values_that_vanish(name):
    x = np.ones((4, 8), np.float32)
    x[1:3] = 1e-42
    x[3, 1:] = 1e-42  # one number of a row is left
    with pytest.raises(ValueError, match=f"^2 rows of {name} underflow.*no {name} value"):
        cq.quantize(x, name, nonfinite="raise")
