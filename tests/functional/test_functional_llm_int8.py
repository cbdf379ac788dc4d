"""LLM.int8() against bitsandbytes: what it gave once, and itself where it is installed.

What takes `to` runs under the emulator and, with `-m gpu`, on a GPU.
"""

from pathlib import Path

import fake_gpu
import ml_dtypes
import numpy as np
import pytest
from emulator import Emulator
from in_turn import in_turn
from oracle import bits_equal

import cuquant.functional as F
from cuquant import interop
from cuquant.ops import llm_int8 as on_gpu
from cuquant.ops.remember import Remembered
from cuquant.reference import llm_int8 as reference

F32, BF16 = np.float32, ml_dtypes.bfloat16
DTYPES = (np.float16, F32, BF16)
GOLDEN = Path(__file__).parents[1] / "data" / "bitsandbytes_1.npz"
THRESHOLDS = (0.0, 6.0, 2.5)


@pytest.fixture(params=fake_gpu.KINDS)
def to(request, monkeypatch):
    """What moves NumPy arrays to a GPU; to that of the emulator as one of sm_80."""
    *fake, library = request.param.split()
    if not fake:
        return fake_gpu.real(library)
    return fake_gpu.install(library, monkeypatch, Emulator(arch=80))


def rows(m=9, k=80, dtype=np.float16, seed=0):
    """Few outliers, rows of zeros and of small numbers, ties, and what is not finite."""
    rng = np.random.default_rng([seed, m, k])
    x = rng.standard_normal((m, k)).astype(F32)
    if m > 6 and k > 20:
        x[:, 5] *= 7
        x[0, 7], x[1, 3], x[0, 2], x[1, 0] = 6, -6, 5.9, 5.998
        x[2], x[3] = 0, 1e-7 * x[3]
        x[4, :8] = [127, 0.5, -1.5, 2.5, 63.5, -0.0, 3, 4]
        x[5, 11], x[5, 0] = 70000, 1e30
        x[6, 12] = np.nan
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def weights(n=12, k=80, seed=1):
    w = np.random.default_rng([seed, n, k]).standard_normal((n, k)).astype(np.float16)
    codes, absmax, _ = F.quantize_llm_int8(w, 0)
    return codes, absmax


# ---- bitsandbytes -------------------------------------------------------------------------------


@pytest.mark.skipif(not GOLDEN.exists(), reason="no golden data of bitsandbytes")
@pytest.mark.parametrize("threshold", ["0.0", "6.0"])
def test_what_its_kernel_gave(threshold):
    """Of a GPU: it divides with less precision, and parts at ties alone."""
    golden = np.load(GOLDEN)
    x, codes, absmax, columns = (
        golden[f"int8_vectorwise/{threshold}/{name}"]
        for name in ("x", "codes", "row_absmax", "outlier_columns")
    )
    found = F.quantize_llm_int8(x, float(threshold))
    assert bits_equal(found[1], absmax)
    assert np.array_equal(found[2].nonzero()[0], columns)
    assert np.abs(found[0].astype(int) - codes).max() <= 1 and (found[0] != codes).sum() <= 4


@pytest.mark.parametrize("threshold", THRESHOLDS)
@in_turn("shape", [(9, 80), (1, 80), (64, 257), (7, 1)])
def test_codes_are_those_of_its_operator(threshold, shape):
    bnb = pytest.importorskip("bitsandbytes")
    torch = pytest.importorskip("torch")
    x = rows(*shape)
    codes, absmax, columns = bnb.functional.int8_vectorwise_quant(torch.from_numpy(x), threshold)
    mine = F.quantize_llm_int8(x, threshold)
    assert np.array_equal(mine[0], codes.numpy())
    assert bits_equal(mine[1], absmax.numpy())
    given = [] if columns is None else columns.numpy()
    assert np.array_equal(mine[2].nonzero()[0], given)


@pytest.mark.parametrize("threshold", THRESHOLDS)
@in_turn("name", ["float16", "float32", "bfloat16"])
def test_products_are_those_of_its_operator(threshold, name):
    """Bit for bit; the sums of outliers have another order, and one more rounding."""
    bnb = pytest.importorskip("bitsandbytes")
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    x = torch.from_numpy(rows(64, 257)[7:]).to(dtype)
    codes, absmax = (torch.from_numpy(a) for a in weights(40, 257))
    bias = torch.linspace(-1, 1, 40).to(dtype)
    state = bnb.MatmulLtState()
    state.threshold, state.has_fp16_weights = threshold, False
    state.CB, state.SCB = codes, absmax
    theirs = bnb.autograd._functions.MatMul8bitLt.apply(x, codes, None, bias, state)
    mine = F.llm_int8_linear(x, codes, absmax, bias, threshold=threshold)
    assert mine.dtype == theirs.dtype
    columns = F.quantize_llm_int8(x, threshold)[2]
    assert bool(columns.any()) == (threshold > 0)
    if threshold == 0:
        assert torch.equal(mine, theirs)
    else:
        eps = torch.finfo(dtype).eps
        gap = (mine.double() - theirs.double()).abs()
        assert (gap <= eps * theirs.double().abs().clamp(min=10)).all()


# ---- what it is ---------------------------------------------------------------------------------


@in_turn("dtype", DTYPES)
def test_product_of_outliers_is_exact_where_all_is(dtype):
    """Small integers: no rounding hides what is multiplied."""
    x = np.array([[1, -2, 64, 0], [127, 3, 8, 1]], dtype)
    codes = np.array([[127, 1, -4, 2], [0, -127, 5, 1], [127, 127, 127, 127]], np.int8)
    absmax = np.full(3, 127, F32)
    y = F.llm_int8_linear(x, codes, absmax, threshold=6.0)
    wanted = x.astype(F32) @ codes.astype(F32).T
    assert y.dtype == dtype and np.abs(y.astype(F32) - wanted).max() < 0.02 * np.abs(wanted).max()


def test_shapes():
    codes, absmax = weights()
    for shape in ((80,), (0, 80), (2, 0, 80), (2, 3, 80)):
        x = np.resize(rows()[:2], shape)
        found, peaks, outliers = F.quantize_llm_int8(x)
        assert found.shape == shape and peaks.shape == shape[:-1] and outliers.shape == (80,)
        y = F.llm_int8_linear(x, codes, absmax)
        assert y.shape == (*shape[:-1], 12)
    empty = F.llm_int8_linear(
        np.ones((3, 0), F32), codes[:, :0], absmax, np.arange(12.0, dtype=F32)
    )
    assert (empty == np.arange(12)).all()
    wide = rows(9, 160)[:, ::2]
    assert bits_equal(
        F.llm_int8_linear(wide, codes, absmax), F.llm_int8_linear(wide.copy(), codes, absmax)
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": rows().astype(np.float64)}, TypeError, "x must be"),
        ({"x": rows()[:, :79]}, ValueError, "its last axis must be 80"),
        ({"x": np.float16(1)}, (ValueError, TypeError), "x"),
        ({"weight": weights()[0].astype(np.int16)}, TypeError, "weight must be int8, got int16"),
        ({"weight": weights()[0][0]}, ValueError, r"\[N, K\]"),
        ({"absmax": weights()[1][:5]}, ValueError, r"absmax has shape \(5,\); it must be \(12,\)"),
        ({"absmax": weights()[1].astype(np.float64)}, TypeError, "absmax must be float32"),
        ({"bias": np.ones(3, F32)}, ValueError, r"bias has shape \(3,\)"),
        ({"threshold": -1}, ValueError, "threshold must be a number that is not negative, got -1"),
        ({"threshold": float("nan")}, ValueError, "threshold"),
        ({"threshold": "6"}, ValueError, "threshold"),
    ],
)
def test_refusals(change, error, message):
    codes, absmax = weights()
    given = {"x": rows(), "weight": codes, "absmax": absmax, **change}
    with pytest.raises(error, match=message):
        F.llm_int8_linear(**given)


# ---- kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", THRESHOLDS)
@in_turn("dtype", DTYPES)
@in_turn("shape", [(9, 80), (1, 80), (70, 300), (7, 1), (0, 8), (3, 0)])
def test_kernels_give_the_same_codes(to, threshold, dtype, shape):
    x = rows(*shape, dtype)
    found = [interop.to_host(a) for a in F.quantize_llm_int8(to(x), threshold)]
    wanted = reference.quantize(x, threshold)
    assert all(bits_equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("threshold", [0.0, 6.0])
@in_turn("dtype", DTYPES)
@in_turn("shape", [(9, 80), (1, 80), (33, 128), (0, 80), (3, 0)])
def test_kernels_multiply(to, threshold, dtype, shape):
    """Within what the two constants for 1 / 127^2 differ by, and the roundings."""
    x = rows(*shape, dtype)
    x = x[np.isfinite(x.astype(F32)).all(1) & (np.abs(x.astype(F32)) < 1e4).all(1)]
    codes, absmax = weights(k=shape[1])
    bias = np.linspace(-1, 1, 12).astype(dtype)
    y = F.llm_int8_linear(to(x), to(codes), to(absmax), to(bias), threshold=threshold)
    found, wanted = interop.to_host(y), reference.linear(x, codes, absmax, bias, threshold)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if found.size:
        eps = 2 * float(ml_dtypes.finfo(dtype).eps) + 4e-5
        gap = np.abs(found.astype(F32) - wanted.astype(F32))
        assert (gap <= eps * (np.abs(wanted.astype(F32)) + np.abs(wanted.astype(F32)).max())).all()


@in_turn("width", [80, 75])
def test_without_a_threshold_there_is_one_product(to, width, monkeypatch):
    monkeypatch.setattr(on_gpu, "_known", Remembered())
    calls = []
    for name in ("_product", "_outliers"):
        own = getattr(on_gpu, name)
        monkeypatch.setattr(on_gpu, name, lambda *a, own=own, **k: calls.append(1) or own(*a, **k))
    codes, absmax = weights(k=width)
    for threshold, times in ((0, 0), (6.0, 1)):
        calls.clear()
        F.llm_int8_linear(to(rows(2, width)), to(codes), to(absmax), threshold=threshold)
        assert len(calls) == times


@pytest.mark.parametrize("threshold", [0, 6.0])
@in_turn("m", [1, 9, 40])
def test_a_repeated_call_finds_its_plan(to, m, threshold, monkeypatch):
    """With other numbers in x, the bias and the weight; not with other arrays or thresholds."""
    monkeypatch.setattr(on_gpu, "_known", Remembered())
    codes, absmax = (to(a) for a in weights())
    bias = to(np.linspace(-1, 1, 12).astype(F32))
    xs = [to(np.nan_to_num(rows(m, seed=seed), posinf=9)) for seed in range(3)]

    def call(x, codes=codes, threshold=threshold):
        return F.llm_int8_linear(x, codes, absmax, bias, threshold=threshold)

    wanted = [interop.to_host(call(x)).copy() for x in xs]
    slow, own = [], on_gpu.linear
    monkeypatch.setattr(on_gpu, "linear", lambda *a: slow.append(1) or own(*a))
    found = [interop.to_host(call(x)) for x in xs]
    assert not slow and all(bits_equal(a, b) for a, b in zip(found, wanted, strict=True))
    other = to(interop.to_host(weights()[0])[::-1].copy())
    assert not bits_equal(
        interop.to_host(F.llm_int8_linear(xs[0], other, absmax, bias, threshold=threshold)),
        found[0],
    )
    call(xs[0], threshold=3.0)
    call(xs[0][:, ::1][: m // 2]), call(xs[0].reshape(1, m, 80))
    assert len(slow) == 4
    if hasattr(codes, "copy_"):
        codes.copy_(other)
    else:
        codes[...] = other
    assert not bits_equal(interop.to_host(call(xs[0])), found[0]) and len(slow) == 4
    with pytest.raises(ValueError, match="threshold"):
        call(xs[0], threshold=-1.0)
