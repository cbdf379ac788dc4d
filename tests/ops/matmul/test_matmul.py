"""Products against float64, every shape, dtype and epilogue."""

import math
from typing import get_args

import numpy as np
import products
import pytest
from in_turn import in_turn
from oracle import DTYPES, bits_equal
from products import exact, is_close, normal

import cuquant as cq
from cuquant.ops.matmul.door import Activation
from cuquant.reference import ACTIVATIONS, erf

NAMES = cq.list_formats()


def weight(name: str, shape=(24, 256), **options) -> cq.QuantArray:
    return products.weight(name, shape, **options)


@pytest.mark.parametrize("name", NAMES)
@in_turn("dtype", DTYPES)
def test_linear(name, dtype, rng):
    q = weight(name)
    x = rng.standard_normal((5, 256)).astype(DTYPES[dtype])
    wanted, size = exact(x, q)
    for y in (cq.linear(x, q), x @ q.T, cq.matmul(x, q.T), cq.linear(x, cq.prepack(q))):
        assert y.dtype == x.dtype and y.shape == (5, 24)
        assert is_close(y, wanted, size, 256)


@pytest.mark.parametrize("shape", [(256,), (1, 256), (2, 3, 256), (0, 256), (2, 0, 256)])
def test_leading_axes(shape, rng):
    q = weight("nf4")
    x = rng.standard_normal(shape).astype(np.float32)
    wanted, size = exact(x, q)
    assert is_close(cq.linear(x, q), wanted, size, 256)
    assert (x @ q.T).shape == (*shape[:-1], 24)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((256,), (256,)),
        ((4, 256), (256,)),
        ((256,), (256, 3)),
        ((2, 4, 256), (2, 256, 3)),
        ((5, 1, 4, 256), (2, 256, 3)),
        ((256,), (2, 256, 3)),
    ],
)
def test_matmul_follows_numpy(a, b, rng):
    x, y = rng.standard_normal(a).astype(np.float32), rng.standard_normal(b).astype(np.float32)
    left, right = cq.quantize(x, "int8"), cq.quantize(y, "int8", axis=0)
    for one, two in ((x, right), (left, y), (left, right)):
        first = one if isinstance(one, np.ndarray) else one.dequantize()
        second = two if isinstance(two, np.ndarray) else two.dequantize()
        wanted = np.matmul(first.astype(np.float64), second.astype(np.float64))
        found = cq.matmul(one, two)
        assert found.shape == wanted.shape and found.dtype == np.float32
        size = np.matmul(np.abs(first).astype(np.float64), np.abs(second).astype(np.float64))
        assert is_close(np.asarray(found), wanted, size, 256)
        assert bits_equal(np.asarray(one @ two), np.asarray(found))


def test_both_sides_quantized_as_in_w8a8(rng):
    x = rng.standard_normal((8, 256), dtype=np.float32)
    wq = weight("int8")
    xq = cq.quantize(x, "int8", block_size="row")
    y = cq.matmul(xq, wq.T, out_dtype="bfloat16")
    wanted, size = exact(xq.dequantize(), wq)
    assert y.dtype.name == "bfloat16" and is_close(y, wanted, size, 256)
    assert cq.matmul(xq, wq.T).dtype == cq.linear(xq, wq).dtype == np.float32


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_epilogue_order(activation, rng):
    """activation(x @ w.T + bias) + residual, in float32, rounded once."""
    q = weight("int4", (24, 128))
    x = rng.standard_normal((5, 128)).astype(np.float16)
    bias = rng.standard_normal(24).astype(np.float16)
    residual = rng.standard_normal((5, 24)).astype(np.float32)
    plain = cq.linear(x, q, out_dtype="float32") + bias.astype(np.float32)
    wanted = plain if activation is None else ACTIVATIONS[activation](plain)
    wanted = wanted + residual
    y = cq.linear(x, q, bias, activation=activation, residual=residual)
    assert bits_equal(y, wanted.astype(np.float16))
    out = np.empty((5, 24), np.float32)
    assert cq.linear(x, q, bias, activation=activation, residual=residual, out=out) is out
    assert bits_equal(out, wanted)


def test_an_activation_that_is_none():
    x, q = np.ones((2, 64), np.float32), cq.quantize(np.ones((8, 64), np.float32), "int4")
    for activation in ("tanh", [], 1):
        with pytest.raises(ValueError, match="activation must be None or one of"):
            cq.linear(x, q, activation=activation)


def test_activations_by_the_c_library():
    x = np.linspace(-9, 9, 4001, dtype=np.float32)
    true = x.astype(np.float64)
    gelu = np.array([v / 2 * (1 + math.erf(v / math.sqrt(2))) for v in true])
    # float32: four roundings of numbers no larger than |x|.
    assert (np.abs(ACTIVATIONS["gelu"](x) - gelu) <= 4 * 2.0**-24 * np.maximum(np.abs(x), 1)).all()
    silu = true / (1 + np.exp(-true))
    assert (np.abs(ACTIVATIONS["silu"](x) - silu) <= 4 * 2.0**-24 * np.maximum(np.abs(x), 1)).all()
    assert bits_equal(ACTIVATIONS["relu"](x), np.maximum(x, np.float32(0)))
    assert np.abs(erf(x) - [math.erf(v) for v in true]).max() < 1e-7
    with np.errstate(invalid="ignore"):
        ends = {k: f(np.float32([np.inf, np.nan, 3e38, -3e38])) for k, f in ACTIVATIONS.items()}
    for values in ends.values():
        assert values[0] == np.inf and np.isnan(values[1])
        assert (values[2:] == np.float32([3e38, 0])).all()


def test_a_weight_that_is_not_transposed_and_one_of_floats_are_told(rng):
    x, q = rng.standard_normal((2, 256)).astype(np.float32), weight("nf4", (24, 256))
    for call in (lambda: cq.matmul(x, q), lambda: x @ q):
        with pytest.raises(ValueError, match=r"pass w\.T, or use linear"):
            call()
    with pytest.raises(ValueError, match=r"last but one$"):
        cq.matmul(x[:, :255], q)
    with pytest.raises(TypeError, match="quantize makes one"):
        cq.linear(x, x)


def test_swiglu(rng):
    gate, up = weight("nf4"), weight("q4_0")
    x = rng.standard_normal((2, 3, 256)).astype(np.float16)
    a, b = cq.linear(x, gate, out_dtype="float32"), cq.linear(x, up, out_dtype="float32")
    wanted = (ACTIVATIONS["silu"](a) * b).astype(np.float16)
    assert bits_equal(cq.swiglu(x, gate, up), wanted)
    out = np.empty_like(wanted)
    assert cq.swiglu(x, cq.prepack(gate), up, out=out) is out and bits_equal(out, wanted)
    with pytest.raises(ValueError, match="equal"):
        cq.swiglu(x, gate, weight("nf4", (12, 256)))
    for other in (None, x[0], "nf4"):
        with pytest.raises(TypeError, match="w_up must be a QuantArray or PackedWeight, got"):
            cq.swiglu(x, gate, other)
        with pytest.raises(TypeError, match="w_gate must be a QuantArray or PackedWeight, got"):
            cq.swiglu(x, other, up)


@pytest.mark.parametrize(
    ("name", "double"),
    [
        ("nf4", False),
        ("q4_k", False),
        ("nvfp4", False),
        ("int8", False),
        ("nf4", True),
        ("int8", True),
    ],
)
def test_grouped_linear(name, double, rng):
    w = rng.standard_normal((4, 8, 256), dtype=np.float32)
    q = cq.quantize(w, name, double_quant=double)
    x = rng.standard_normal((7, 256), dtype=np.float32)
    experts = np.array([3, 0, 0, 2, 3, 3, 2])
    y = cq.grouped_linear(x, q, experts)
    values = q.dequantize()
    for i, expert in enumerate(experts):
        wanted = x[i].astype(np.float64) @ values[expert].astype(np.float64).T
        assert np.allclose(y[i], wanted, rtol=0, atol=256 * 2**-24 * 64)
    assert bits_equal(cq.grouped_linear(x, cq.prepack(q), experts.tolist()), y)
    assert cq.grouped_linear(x[:0], q, []).shape == (0, 8)
    for wrong, error in [
        ([3, 0], ValueError),
        ([4] * 7, ValueError),
        ([-1] * 7, ValueError),
        ([0.5] * 7, TypeError),
    ]:
        with pytest.raises(error):
            cq.grouped_linear(x, q, wrong)


def test_weights_quantized_along_another_axis(rng):
    w = rng.standard_normal((128, 24), dtype=np.float32)
    q = cq.quantize(w, "int4", axis=0)
    x = rng.standard_normal((3, 128), dtype=np.float32)
    assert np.allclose(x @ q, x @ q.dequantize(), atol=1e-4)
    stacked = cq.quantize(rng.standard_normal((128, 4, 8), dtype=np.float32), "int4", axis=0)
    y = cq.grouped_linear(np.ones((2, 8), np.float32), stacked, [127, 3])
    assert np.allclose(y, stacked.dequantize()[[127, 3]].sum(-1), atol=1e-4)


def test_wrong_operands(rng):
    q, x = weight("nf4"), rng.standard_normal((2, 256), dtype=np.float32)
    for call, error in [
        (lambda: cq.matmul(x, x.T), TypeError),
        (lambda: cq.linear(x, x), TypeError),
        (lambda: cq.linear(x[:, :-1], q), ValueError),
        (lambda: cq.matmul(x, q), ValueError),
        (lambda: cq.linear(x.astype(np.float64), q), TypeError),
        (lambda: cq.linear([1.0], q), TypeError),
        (lambda: cq.linear(x, q, activation="tanh"), ValueError),
        (lambda: cq.linear(x, q, np.zeros(23, np.float32)), ValueError),
        (lambda: cq.linear(x, q, np.zeros(24)), TypeError),
        (lambda: cq.linear(x, q, 1.0), TypeError),
        (lambda: cq.linear(x, q, residual=np.zeros((2, 23), np.float32)), ValueError),
        (lambda: cq.linear(x, q, out=np.zeros((2, 23), np.float32)), ValueError),
        (lambda: cq.linear(x, q, out=np.zeros((2, 24))), TypeError),
        (lambda: cq.linear(x, q, out_dtype="int8"), TypeError),
        (lambda: cq.linear(x, q, out=x[:, :24]), ValueError),
        (lambda: cq.linear(x, q, stream=0), ValueError),
        (lambda: cq.matmul(x, q.T[0]), ValueError),
        (lambda: cq.linear(x, weight("nf4", (256,))), ValueError),
        (lambda: cq.matmul(np.float32(1), q), ValueError),
        (lambda: cq.grouped_linear(x, q, [0, 0]), ValueError),
        (lambda: cq.prepack(q.T), ValueError),
        (lambda: cq.prepack(x), TypeError),
        (lambda: cq.unpack(q), TypeError),
    ]:
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("name", NAMES)
def test_prepack_loses_nothing(name):
    q = weight(name)
    again = cq.unpack(cq.prepack(q))
    assert (again.format, again.shape, again.dtype) == (q.format, q.shape, q.dtype)
    for key, value in q.arrays().items():
        assert bits_equal(again.arrays()[key], value)


def test_precompile_says_what_is_missing():
    with pytest.raises(cq.BackendUnavailable, match="pip install"):
        cq.precompile("nf4")


def test_out_that_holds_an_element_twice_or_lies_beside_an_input():
    q, both = weight("nf4", (8, 64)), np.ones((3, 72), np.float32)
    for strides in ((0, 4), (4, 4), (28, 4)):
        out = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (3, 8), strides)
        with pytest.raises(ValueError, match="more than once"):
            cq.linear(both[:, :64], q, out=out)
    wanted = cq.linear(both[:, :64], q)
    backwards = np.zeros((6, 16), np.float32)[::-2, ::2]
    for out in (both[:, 64:], np.zeros((8, 3), np.float32).T, backwards):
        assert bits_equal(np.ascontiguousarray(cq.linear(both[:, :64], q, out=out)), wanted)
    with pytest.raises(ValueError, match="overlaps"):
        cq.linear(both[:, :64], q, out=both[:, 60:68])


@pytest.mark.parametrize("rows", range(1, 6))
def test_results_start_on_256_bytes(rows):
    q, x = weight("int4", (8, 64)), np.zeros((rows, 64), np.float32)
    experts = cq.quantize(np.zeros((2, 8, 64), np.float32), "int4")
    for y in (
        cq.linear(x, q),
        x @ q.T,
        cq.swiglu(x, q, q),
        cq.grouped_linear(x, experts, np.zeros(rows, int)),
    ):
        assert y.ctypes.data % 256 == 0


def test_type_checkers_know_the_activations():
    assert get_args(Activation) == tuple(name for name in ACTIVATIONS if name)


def test_rows_do_not_depend_on_how_many_there_are():
    """batch_invariant on the CPU: the bits of a row are the same in 1 to 300 of them."""
    x, w = normal((300, 96)), cq.quantize(normal((40, 96)), "int4")
    whole = cq.linear(x, w, batch_invariant=True)
    np.testing.assert_array_equal(whole, cq.matmul(x, w.T, batch_invariant=True))
    for count in (1, 2, 63, 64, 65, 299):
        y = cq.linear(x[:count], w, batch_invariant=True)
        np.testing.assert_array_equal(y, whole[:count])
        y = cq.linear(x[300 - count :], w, batch_invariant=True)
        np.testing.assert_array_equal(y, whole[300 - count :])
    with pytest.raises(TypeError, match="batch_invariant must be a bool"):
        cq.linear(x, w, batch_invariant="yes")


@pytest.mark.parametrize("shape", [(96,), (1, 96, 40), (2, 96, 40)])
def test_rows_times_a_vector_or_a_batch_do_not_depend_on_how_many_there_are(shape):
    x, b = normal((2, 130, 96)), cq.quantize(normal(shape), "int8", axis=max(len(shape) - 2, 0))
    x = x if len(shape) > 2 else x[0]
    axis = x.ndim - 2
    whole = cq.matmul(x, b, batch_invariant=True)
    np.testing.assert_allclose(whole, x @ b.dequantize(), rtol=1e-4, atol=1e-4)
    for count in (1, 63, 65):
        y = cq.matmul(x.take(range(count), axis), b, batch_invariant=True)
        np.testing.assert_array_equal(y, whole.take(range(count), axis))
    if axis == 0:
        np.testing.assert_array_equal(cq.matmul(x[7], b, batch_invariant=True), whole[7])


def test_products_along_nothing_are_0():
    q = cq.quantize(np.zeros((3, 0), np.float32), "int8")
    experts = cq.quantize(np.zeros((2, 8, 0), np.float32), "int8")
    x = np.zeros((6, 0), np.float32)
    assert not cq.matmul(q, q.T, batch_invariant=True).any()
    for rows in ({"experts": [0, 1] * 3}, {"offsets": [0, 2, 6]}):
        y = cq.grouped_linear(x, experts, **rows)
        assert y.shape == (6, 8) and not y.any()
    y = cq.grouped_linear(x.reshape(2, 3, 0), experts, counts=[1, 3])
    assert y.shape == (2, 3, 8) and not y.any()


def test_int8_results_need_their_scale():
    x, w = normal((3, 64)), cq.quantize(normal((5, 64)), "int8")
    y = cq.matmul(x, w.T, out_dtype="int8", out_scale=0.5)
    wanted = np.clip(np.rint(cq.matmul(x, w.T) * np.float32(2)), -127, 127)
    np.testing.assert_array_equal(y, wanted.astype(np.int8))
    for options in (
        {"out_dtype": "int8"},
        {"out_scale": 0.5},
        {"out_scale": 0, "out_dtype": "int8"},
    ):
        with pytest.raises((TypeError, ValueError), match=r"int8|out_scale"):
            cq.matmul(x, w.T, **options)


def test_an_out_scale_without_an_inverse_is_refused():
    x, w = normal((3, 64)), cq.quantize(normal((5, 64)), "int8")
    for small in (1e-39, np.float32(2.0**-128), np.array([2.0**-149], np.float32)):
        with pytest.raises(ValueError, match=r"out_scale is .*e-.* is beyond float32; pass more"):
            cq.matmul(x, w.T, out_dtype="int8", out_scale=small)
    least = np.nextafter(np.float32(2.0**-128), np.float32(1))
    wanted = 127 * np.sign(cq.matmul(x, w.T))
    np.testing.assert_array_equal(cq.matmul(x, w.T, out_dtype="int8", out_scale=least), wanted)


def test_what_is_no_out_or_activation_is_named():
    x, w = normal((3, 64)), cq.quantize(normal((5, 64)), "int8")
    whole = {"out_dtype": "int8", "out_scale": 1.0}
    for dtype in (np.float32, np.int32):
        out = np.zeros((3, 5), dtype)
        name = np.dtype(dtype).name
        with pytest.raises(ValueError, match=rf"^out has dtype {name}, but int8 is asked for"):
            cq.matmul(x, w.T, out=out, **whole)
    out = np.zeros((3, 5), np.int8)
    assert cq.matmul(x, w.T, out=out, **whole) is out
    with pytest.raises(TypeError, match=r"^out must be float32, float16 or bfloat16, got int8"):
        cq.matmul(x, w.T, out=out)
    with pytest.raises(TypeError, match=r"^out must be a NumPy, CuPy or torch array, got list$"):
        cq.linear(x, w, out=[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^dtype must be float32, float16 or bfloat16, got int8"):
        w.dequantize(dtype="int8", out=np.zeros((5, 64), np.int8))
    for wrong in (np.array(["relu", "silu"]), ["relu"], 1, "tanh"):
        with pytest.raises(ValueError, match=r"^activation must be None or one of .*relu.*, got "):
            cq.linear(x, w, activation=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["experts", "counts", "offsets"])
def test_integers_beyond_int64_are_named(name):
    experts = cq.quantize(normal((2, 5, 64)), "int8")
    x = normal((2, 3, 64)) if name == "counts" else normal((3, 64))
    length = 2 if name == "counts" else 3
    rows = np.array([2**64 - 1] * length, np.uint64)
    with pytest.raises(ValueError, match=f"{name} must .*, got .*18446744073709551615"):
        cq.grouped_linear(x, experts, **{name: rows})
