"""Integer, 4-bit, binary and float products, against exact arithmetic."""

import ml_dtypes
import numpy as np
import pytest
from functional_inputs import BF16, F32, FLOATS, integers, normal
from oracle import bits_equal

import cuquant as cq
import cuquant.functional as F

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


@pytest.mark.parametrize("dtype, value, depth", [(np.int8, -128, 131072), (np.uint8, 255, 33026)])
def test_sums_wrap_from_the_documented_depth_on(dtype, value, depth):
    """2^31 and more are negative in int32, wherever they go; one column less is exact."""
    for k in (depth - 1, depth):
        a = np.full((1, k), value, dtype)
        exact = k * value**2
        wanted = exact - 2**32 * (exact >= 2**31)
        assert (exact == wanted) == (k < depth)
        assert F.int8_matmul(a, a.T).tolist() == [[wanted]]
        y = F.matmul_bias_relu(a, a.T, np.ones(1, F32), scale_c=0.5)
        assert y.tolist() == [[max(0, F32(wanted) * F32(0.5) + F32(1))]]


BATCHES = [((3, 4, 33), (33, 5)), ((4, 33), (2, 3, 33, 5)), ((2, 1, 4, 16), (3, 16, 5))]


@pytest.mark.parametrize("shapes", BATCHES, ids=str)
def test_batches_broadcast_as_numpy_has_it(shapes):
    a, b = (integers(-128, 127, shape, np.int8, i) for i, shape in enumerate(shapes))
    wanted = np.matmul(a.astype(np.int64), b.astype(np.int64)).astype(np.int32)
    assert bits_equal(F.int8_matmul(a, b), wanted)
    packed = F.pack_int4(a % 8), F.pack_int4(b % 8, axis=-2)
    small = np.matmul(a.astype(np.int64) % 8, b.astype(np.int64) % 8).astype(np.int32)
    assert bits_equal(F.int4_matmul(*packed, shapes[0][-1]), small)
    signs = [np.where(x < 0, -1, 1) for x in (a, b)]
    assert bits_equal(F.binary_matmul(a, b), np.matmul(*signs).astype(np.int32))
    *_, m, n = wanted.shape
    scale_a, scale_b = normal(*wanted.shape[:-1], 1), normal(n, seed=1)
    wide = wanted.astype(F32) * scale_a * scale_b
    assert bits_equal(F.int8_matmul(a, b, scale_a, scale_b), wide)
    bias, c = normal(n, seed=2), normal(m, n, seed=3)
    found = F.matmul_bias_relu(a, b, bias, scale_a, scale_b)
    assert bits_equal(found, np.maximum(wide + bias, F32(0)))
    x, w = (operand.astype(F32) % 8 for operand in (a, b))
    assert bits_equal(F.fp16_gemm(x, w, c, beta=2), np.matmul(x, w) + F32(2) * c)


def test_bf16_gemm_is_fp16_gemm_with_another_result():
    a = integers(-4, 4, (5, 60), np.int64).astype(BF16)
    found = F.bf16_gemm(a, a.T, a[:, :5], 0.3, -0.7)
    assert found.dtype == BF16
    assert bits_equal(found, F.fp16_gemm(a, a.T, a[:, :5], 0.3, -0.7, "bfloat16"))
    assert F.bf16_gemm(a, a.T, out_dtype="float32").dtype == F32


def _of_numbers(name, torch):
    """A product's call, with one argument that a gradient should flow to."""
    wants = torch.ones(2, 2, requires_grad=True)
    plain, whole = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int8)
    one, each = (torch.ones(n, requires_grad=True) for n in (1, 2))
    image = torch.ones(1, 1, 2, 2)
    return {
        "fp16_gemm a": lambda: F.fp16_gemm(wants, plain),
        "fp16_gemm b": lambda: F.fp16_gemm(plain, wants),
        "bf16_gemm c": lambda: F.bf16_gemm(plain, plain, wants),
        "bf16_gemm alpha": lambda: F.bf16_gemm(plain, plain, alpha=one),
        "bf16_gemm beta": lambda: F.bf16_gemm(plain, plain, plain, beta=one),
        "matmul_bias_relu a": lambda: F.matmul_bias_relu(wants, plain, plain[0]),
        "matmul_bias_relu bias": lambda: F.matmul_bias_relu(plain, plain, each),
        "binary_matmul b": lambda: F.binary_matmul(plain, wants),
        "binary_conv2d x": lambda: F.binary_conv2d(image.clone().requires_grad_(), image),
        "int8_conv2d scale": lambda: F.int8_conv2d(whole[None, None], whole[None, None], scale=one),
        "int8_matmul scale_a": lambda: F.int8_matmul(whole, whole, each),
        "int8_matmul scale_c": lambda: F.int8_matmul(whole, whole, scale_c=one),
        "int4_matmul scale_b": lambda: F.int4_matmul(
            whole.view(torch.uint8), whole.view(torch.uint8)[:, :1].expand(2, 2), scale_b=each
        ),
        "matmul out_scale": lambda: cq.matmul(
            plain, cq.quantize(plain, "int8").T, out_dtype="int8", out_scale=one
        ),
    }[name]


@pytest.mark.parametrize(
    "name",
    ["fp16_gemm a", "fp16_gemm b", "bf16_gemm c", "bf16_gemm alpha", "bf16_gemm beta",
     "matmul_bias_relu a", "matmul_bias_relu bias", "binary_matmul b", "binary_conv2d x",
     "int8_conv2d scale", "int8_matmul scale_a", "int8_matmul scale_c", "int4_matmul scale_b",
     "matmul out_scale"],
)  # fmt: skip
def test_a_lost_gradient_is_an_error(name):
    torch = pytest.importorskip("torch")
    call, argument = _of_numbers(name, torch), name.split()[1]
    with pytest.raises(RuntimeError, match=f"^{argument} requires grad.*no_grad"):
        call()
    with torch.no_grad():
        assert not call().requires_grad


def test_messages_name_what_is_asked_for():
    packed = np.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match=r"^K must be 0 or more, got -1"):
        F.int4_matmul(packed, packed, K=-1)
    with pytest.raises(ValueError, match=r"^a has 2 bytes in a row; K = 5 integers have 3"):
        F.int4_matmul(packed, packed, K=5)
    with pytest.raises(TypeError, match=r"got list; np.asarray\(x, np.int8\) makes one"):
        F.int8_matmul([[1]], packed)
    with pytest.raises(TypeError, match=r"got list; np.asarray\(x, np.int32\) makes one"):
        F.pack_int4([1, 2])
    assert len(F.pack_int4(np.asarray([1, 2], np.int32))) == 1
    for gemm in (F.fp16_gemm, F.bf16_gemm):
        with pytest.raises(TypeError, match=r"^out_dtype must be .*, got None"):
            gemm(packed, packed, out_dtype=None)
