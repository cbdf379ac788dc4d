"""Fused row quantization on arrays like a GPU's, whose kernels the emulator runs, and on a GPU.

NumPy's bytes are the oracle: tests/reference/test_rows.py compares them with float64.
"""

import functools

import fake_gpu
import numpy as np
import pytest
import row_cases
from emulator import ORDERS, Emulator, Recorder
from functional_inputs import BF16, F32, normal
from kernel_cases import differences
from oracle import DTYPES
from row_cases import Case
from samples import sampled

import cuquant as cq
import cuquant.functional as F
from cuquant import interop
from cuquant.ops.rows import kernel
from cuquant.ops.rows.source import GELU, LAYER, RMS, Source

SAMPLE = sampled(
    row_cases.ALL,
    lambda case: (case.operation, case.dtype),
    lambda case: (case.operation, case.data),
    "format",
    "shape",
    "layout",
    "group",
)

FAR = sampled(
    row_cases.LEVEL, lambda case: (case.data, case.shape), lambda case: (case.data, case.dtype)
)


@functools.cache
def build():
    """Compile the kernels of the cases together, which is much faster than one by one."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        to = fake_gpu.install("cupy", patch, recorder)
        for param in (*SAMPLE, *FAR):
            param.values[0](to)
    Emulator().build(recorder.programs)


@pytest.fixture(params=fake_gpu.KINDS)
def to(request, monkeypatch):
    """What moves NumPy arrays to a GPU."""
    if request.param.startswith("fake"):
        build()
    return fake_gpu.use(request.param, monkeypatch)


def host(x):
    return interop.to_host(x) if interop.kind(x) else x


def same_sum(found, wanted):
    """Equality of bytes, where NaN equals NaN: the sign that arithmetic gives it differs."""
    a, b = host(found).astype(F32), host(wanted).astype(F32)
    both = np.isnan(a) & np.isnan(b)
    return bool((both | (a.view(np.uint32) == b.view(np.uint32))).all())


def check(case, to):
    (found, total), (wanted, wanted_total) = case(to), case(lambda x: x)
    assert not differences(found.numpy(), wanted)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert total is None or same_sum(total, wanted_total)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_the_bytes_of_numpy(case, to):
    check(case, to)


@pytest.mark.parametrize("case", FAR, ids=str)
def test_rows_that_are_constant_or_far_from_zero(case, to):
    check(case, to)


@pytest.mark.parametrize("eps", [0, 1e-30, 1e-5])
def test_small_eps_of_constant_rows(eps, to):
    """In larger units the mean of a row of 1e9 would overflow; without eps it is 0 / 0."""
    for dtype in (F32, BF16):
        for shape in ((20, 256), (20, 17)):
            x, weight = row_cases.level(shape, np.dtype(dtype)), np.ones(shape[1], dtype)
            wanted = F.layernorm_quantize(x, weight, eps=eps)
            assert (wanted.scale[::2] == 0).all() if eps else np.isnan(wanted.scale[::2]).all()
            assert not differences(F.layernorm_quantize(to(x), to(weight), eps=eps).numpy(), wanted)


@fake_gpu.needs_compiler
@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize("operation", ["layernorm", "hadamard"])
def test_the_order_of_threads_does_not_matter(operation, order, monkeypatch):
    to = fake_gpu.install("cupy", monkeypatch, Emulator(order))
    check(Case(operation, "int8", shape=(3, 2048), group=1024), to)


def launched(to, call, monkeypatch):
    """The kernels of a call."""
    names, launch = [], fake_gpu.gpu.Gpu.launch

    def noted(self, one, *arguments):
        names.append(one.program.entry)
        launch(self, one, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fake_gpu.gpu.Gpu, "launch", noted)
        call(to)
    return names


@pytest.mark.parametrize(
    "format", ["int8", "fp8_e4m3 128", "mxfp8", "mxfp4", "int4", "int8 static"]
)
@pytest.mark.parametrize("operation", row_cases.OPERATIONS)
def test_one_kernel(operation, format, to, monkeypatch):
    case = Case(operation, format, shape=(2, 512))
    assert launched(to, case, monkeypatch) == ["rows"]


def test_kernels_of_other_calls(to, monkeypatch):
    """One more where any row may lose a tensor's scale; values first where all of them count."""
    static, dynamic = Case("rmsnorm", "fp8_e4m3 static"), Case("rmsnorm", "fp8_e4m3 tensor")
    assert launched(to, static, monkeypatch) == ["rows", "lose"]
    assert launched(to, dynamic, monkeypatch)[0] == "rows"
    x = normal(2, 64)
    plain = lambda to: F.silu_mul_quantize(to(x), to(x), stochastic=False, seed=None)  # noqa: E731
    assert launched(to, plain, monkeypatch) == ["rows"]
    long = Case("silu_mul", "int8", shape=(2, 40000))
    assert launched(to, long, monkeypatch)[0] == "rows"
    assert launched(to, Case("layernorm", "int8", shape=(2, 100)), monkeypatch)[0] == "rows_values"


@pytest.mark.parametrize("place", ["x", "residual", "neither", "strided", "overlapping"])
def test_where_a_sum_may_go(place, to):
    x, residual, weight = (
        normal(*s, seed=i, dtype=BF16) for i, s in enumerate([(5, 64)] * 2 + [(64,)])
    )
    total = (x.astype(F32) + residual.astype(F32)).astype(BF16)
    wanted = F.rmsnorm_quantize(total, weight)
    room = to(np.concatenate([x, x]))
    a, b = room[:5], to(residual)
    out = {"x": a, "residual": b, "neither": to(np.zeros_like(x)), "strided": None}.get(place)
    if place == "strided":
        out = to(np.zeros((5, 128), BF16))[:, ::2]
    elif place == "overlapping":
        out = room[1:6]
    found = F.add_rmsnorm_quantize(a, b, to(weight), residual_out=out)
    assert not differences(found.numpy(), wanted) and same_sum(out, total)


def test_a_refused_call_leaves_the_sum(to):
    x, weight = normal(2, 64), np.ones(64, F32)
    bad = x.copy()
    bad[1, 3] = np.inf
    for given, how, error in (
        (x, {"format": "int9"}, "unknown format"),
        (bad, {"nonfinite": "raise"}, "inf|nan"),
        (x, {"scale": np.ones(3, F32)}, "scale"),
        (x, {"out": cq.quantize(to(x), "nf4")}, "out has format"),
    ):
        out = to(np.zeros((2, 64), F32))
        with pytest.raises(ValueError, match=error):
            F.add_rmsnorm_quantize(to(given), to(x), to(weight), residual_out=out, **how)
        assert not host(out).any()


def test_out(to):
    x, up = normal(4, 256, dtype=BF16), normal(4, 256, seed=1, dtype=BF16)
    q = cq.quantize(to(x), "mxfp8")
    assert F.silu_mul_quantize(to(x), to(up), format="mxfp8", out=q) is q
    assert not differences(q.numpy(), F.silu_mul_quantize(x, up, format="mxfp8"))
    with pytest.raises(ValueError, match=r"out has shape \(4, 256\)"):
        F.silu_mul_quantize(to(x[:2]), to(up[:2]), format="mxfp8", out=q)


def test_vectors_of_another_dtype(to):
    x, weight, bias = normal(3, 256, dtype=BF16), normal(256, seed=1), normal(256, seed=2)
    for shift in (None, bias, bias.astype(BF16)):
        found = F.layernorm_quantize(to(x), to(weight), None if shift is None else to(shift))
        assert not differences(found.numpy(), F.layernorm_quantize(x, weight, shift))
    found = F.rmsnorm_quantize(to(x), weight)  # on the host
    assert not differences(found.numpy(), F.rmsnorm_quantize(x, weight))


# ---- rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("share", [None, 0, 1, 8, 32])
def test_every_row_is_held(share, itemsize):
    sources = [Source(norm=RMS, weight=True), Source(norm=LAYER, weight=True), Source(gate=GELU)]
    sources += [Source(group=group, weight=True) for group in kernel.GROUPS]
    for source in sources:
        for columns in range(512 * 2, 20000, 512 * 2):
            work = kernel.work_of(source, share, columns, itemsize)
            if work is None:
                assert columns > 8192
                continue
            assert work.threads % 32 == 0 and work.threads % work.lanes == 0
            assert work.lanes & (work.lanes - 1) == 0 and work.lanes >= (work.share or 1)
            assert work.lanes * 16 >= source.group
            assert work.rows == 1 or work.lanes <= 32  # a barrier is a row's
            if source.norm or share == 0:
                assert work.lanes * work.units * 16 >= columns
                assert work.lanes <= 256  # partial sums


def test_what_is_taken():
    takes = lambda name, columns, **how: kernel.takes_format(cq.get_format(name, **how), columns)  # noqa: E731
    assert all(takes(name, 128) for name in ("int8", "mxfp8", "mxfp4", "nvfp4", "fp8_e5m2", "nf4"))
    assert not any(
        takes(name, 128) for name in ("int1", "q4_0", "fp16", "nf4+dq", "int5", "k3+word")
    )
    assert not takes("mxfp8", 48) and not takes("int8", 40) and not takes("int8", 128, block_size=8)
    assert takes("int8", 48, block_size="row") and not takes("int8", 96, block_size=48)
    assert set(DTYPES) == set(cq.interop.INPUT_DTYPES)
