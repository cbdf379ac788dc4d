"""Products on a GPU: CuPy arrays and torch tensors, against float64; and what is refused.

The first half also runs on arrays that only look like theirs, with the emulator below.
"""

from typing import Any

import fake_gpu
import numpy as np
import pytest
from gpu_products import F32, PRODUCTS, check, host, to_gpu
from kernel_arrays import LAYOUTS
from kernel_cases import NAMES
from oracle import bits_equal
from products import CASES, Case, exact, finished, is_close, normal, values, weight
from vendor_products import expect

import cuquant as cq
from cuquant import interop
from cuquant.ops.matmul.choose import choose
from cuquant.ops.matmul.problem import Problem, Weight


@pytest.fixture(params=fake_gpu.KINDS)
def kind(request):
    return request.param


@pytest.fixture
def to(kind, monkeypatch):
    return to_gpu(kind, monkeypatch)


# ---- every operation ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRODUCTS)
def test_linear_and_matmul(name, to):
    q, x, bias = weight(name), normal((3, 256), "float16"), normal((19,), "float16")
    there, moved = to(x), to(q)
    for y in (
        cq.linear(there, moved),
        cq.matmul(there, moved.T),
        there @ moved.T,
        cq.linear(there, cq.prepack(moved)),
    ):
        check(y, x, q, there)
    residual = normal((3, 19))
    y = cq.linear(
        there, moved, to(bias), activation="silu", residual=to(residual), out_dtype="float32"
    )
    sums = host(cq.linear(there, moved, out_dtype="float32"))
    assert np.allclose(host(y), finished(sums, bias, "silu", residual), rtol=0, atol=1e-5)
    left = cq.matmul(moved, to(normal((256, 5))))  # the QuantArray on the left
    wanted = values(q) @ values(normal((256, 5)))
    assert np.allclose(host(left), wanted, atol=1e-3) and left.shape == (19, 5)


def test_both_sides_quantized(to):
    a, b = cq.quantize(normal((4, 64)), "int8"), weight("nf4", (9, 64))
    y = cq.matmul(to(a), to(b).T)
    wanted, size = exact(a, b)
    assert is_close(host(y), wanted, size, 64)
    assert interop.dtype_of(to(a) @ to(b).T) == F32
    assert interop.dtype_of(cq.linear(to(a), to(b), out_dtype="bfloat16")).name == "bfloat16"


def test_swiglu_and_experts(to):
    gate, up, x = weight("nf4", (20, 64)), weight("int4", (20, 64)), normal((2, 3, 64))
    y = host(cq.swiglu(to(x), to(gate), to(up)))
    assert y.shape == (2, 3, 20) and np.allclose(y, cq.swiglu(x, gate, up), atol=2e-4)
    w, experts = cq.quantize(normal((4, 9, 64)), "int4"), np.array([3, 0, 0, 2, 3, 1])
    x = normal((6, 64), "float16")
    products = [exact(row, w[expert]) for row, expert in zip(x, experts, strict=True)]
    wanted, size = map(np.stack, zip(*products, strict=True))
    there = to(experts.astype(np.int32))
    out = to(np.zeros((6, 9), np.float16))
    for given in (experts, experts.tolist(), there):
        y = cq.grouped_linear(to(x), to(w), given)
        assert is_close(host(y), wanted, size, 64)
    assert cq.grouped_linear(to(x), to(w), there, out=out) is out
    assert bits_equal(host(out), host(y))
    lost = host(cq.grouped_linear(to(x), to(w), to(np.array([3, 0, 4, -1, 3, 1]))))
    assert np.isnan(lost[[2, 3]]).all() and bits_equal(lost[[0, 1, 4, 5]], host(y)[[0, 1, 4, 5]])


def test_empty(to):
    q = weight("int4", (5, 64))
    assert cq.linear(to(np.ones((0, 64), F32)), to(q)).shape == (0, 5)
    assert cq.matmul(to(np.ones((2, 0, 64), F32)), to(q).T).shape == (2, 0, 5)
    none = to(np.array([], np.int64))
    w = cq.quantize(normal((2, 5, 64)), "int4")
    assert cq.grouped_linear(to(np.ones((0, 64), F32)), to(w), none).shape == (0, 5)
    empty = cq.quantize(np.ones((5, 0), F32), "int4")
    assert (host(cq.linear(to(np.ones((2, 0), F32)), to(empty))) == 0).all()


# ---- what is refused ----------------------------------------------------------------------------


def test_wrong_operands_are_the_errors_of_the_cpu(to):
    """Each with the same message."""
    q, x, w = weight("nf4"), normal((2, 256)), cq.quantize(normal((3, 5, 64)), "int4")
    rows = normal((2, 64))
    calls = [
        lambda at: cq.matmul(at(x), at(x.T)),
        lambda at: cq.linear(at(x), 5),
        lambda at: cq.linear(at(x[:, :-1].copy()), at(q)),
        lambda at: cq.matmul(at(x), at(q)),
        lambda at: cq.linear(at(x.astype(np.float64)), at(q)),
        lambda at: cq.linear([1.0], at(q)),
        lambda at: cq.linear(at(x), at(q), activation="tanh"),
        lambda at: cq.linear(at(x), at(q), at(np.zeros(18, F32))),
        lambda at: cq.linear(at(x), at(q), at(np.zeros(19))),
        lambda at: cq.linear(at(x), at(q), 1.0),
        lambda at: cq.linear(at(x), at(q), residual=at(np.zeros((2, 18), F32))),
        lambda at: cq.linear(at(x), at(q), out=at(np.zeros((2, 18), F32))),
        lambda at: cq.linear(at(x), at(q), out=at(np.zeros((2, 19)))),
        lambda at: cq.linear(at(x), at(q), out=at(np.zeros((2, 19), F32)), out_dtype="float16"),
        lambda at: cq.linear(at(x), at(q), out_dtype="int8"),
        lambda at: cq.matmul(at(x), at(q.T[0])),
        lambda at: cq.linear(at(x), at(weight("nf4", (256,)))),
        lambda at: cq.matmul(at(np.ones((2, 3, 256), F32)), at(normal((3, 256, 5)))),
        lambda at: cq.grouped_linear(at(rows), at(w), at(np.zeros(2))),
        lambda at: cq.grouped_linear(at(rows), at(w), at(np.zeros(3, int))),
        lambda at: cq.grouped_linear(at(rows), at(w), [0, 3]),
        lambda at: cq.swiglu(at(x), at(q), at(weight("nf4", (12, 256)))),
    ]
    for i, call in enumerate(calls):
        with pytest.raises((TypeError, ValueError)) as wanted:
            call(lambda value: value)
        with pytest.raises(wanted.type) as found:
            call(to)
        assert str(found.value) == str(wanted.value), i


def test_arrays_of_other_places_are_refused_before_any_launch(to, monkeypatch):
    q, x = weight("nf4"), normal((2, 256))
    there, moved, bias = to(x), to(q), np.zeros(19, F32)
    out, experts = np.zeros((2, 19), F32), np.zeros(2, int)
    w = cq.quantize(normal((3, 5, 64)), "int4")
    monkeypatch.setattr(cq.gpu.arrays.Gpu, "launch", None)
    for call in (
        lambda: cq.linear(x, moved),
        lambda: cq.linear(there, q),
        lambda: cq.linear(there, moved, bias),
        lambda: cq.linear(there, moved, residual=out),
        lambda: cq.linear(there, moved, out=out),
        lambda: cq.linear(x, q, to(bias)),
        lambda: cq.linear(x, q, out=to(out)),
        lambda: x @ moved.T,
        lambda: cq.swiglu(there, moved, q),
        lambda: cq.grouped_linear(x[:, :64], w, to(experts)),
    ):
        with pytest.raises((TypeError, ValueError), match="move one to where the other is"):
            call()


def test_out_must_not_overlap(to):
    """At the first call and at later ones, when the plan is known."""
    q = to(weight("nf4", (32, 64)))
    memory = to(np.ones(512, F32))
    x = memory[:64].reshape(1, 64)
    for _ in range(2):
        assert cq.linear(x, q, out=memory[64:96].reshape(1, 32)).shape == (1, 32)
        with pytest.raises(ValueError, match="overlaps"):
            cq.linear(x, q, out=memory[48:80].reshape(1, 32))
        bias = memory[128:160]
        cq.linear(x, q, bias, out=memory[160:192].reshape(1, 32))
        with pytest.raises(ValueError, match="overlaps"):
            cq.linear(x, q, bias, out=memory[144:176].reshape(1, 32))


def test_gradients(to, kind):
    if kind != "torch":
        pytest.skip("CuPy has none, and torch calls operators of a GPU on its own tensors alone")
    q, x = to(weight("nf4")), to(normal((2, 256)))
    plain = cq.linear(x, q)
    x.requires_grad_(True)
    y = cq.linear(x, q)
    assert bits_equal(host(y.detach()), host(plain))
    y.sum().backward()
    wanted = weight("nf4").dequantize().sum(0)
    assert np.allclose(host(x.grad), np.stack([wanted, wanted]), rtol=0, atol=1e-4)
    with fake_gpu.torch.no_grad():
        assert bits_equal(host(cq.linear(x, q).detach()), host(plain))


def test_lazy_negatives(to, kind):
    """torch's, of which the memory holds the numbers before they are negated."""
    if not kind.endswith("torch"):
        pytest.skip("CuPy has none")
    q, x, bias = to(weight("nf4")), to(normal((2, 256))), to(normal((19,)))
    for _ in range(2):
        plain = host(cq.linear(x, q, bias))
        found = cq.linear(fake_gpu.torch._neg_view(x), q, fake_gpu.torch._neg_view(bias))
        assert bits_equal(host(found), -plain)


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_matrix(case, gpu):
    x = LAYOUTS[case.layout].view(gpu.asarray(case.base), (*case.lead, case.shape[1]))
    q = case.weight.to("cuda")
    y = cq.linear(x, q)
    check(y, case.x, case.weight, x)
    out = gpu.zeros_like(y)
    cq.linear(x, q, out=out)
    assert bits_equal(out.get(), y.get())


def admitted(y: np.ndarray, x: np.ndarray, q: cq.QuantArray, rows: int, gpu: Any) -> bool:
    """Whether the kernel that the rule names for so many rows of x may give `y`."""
    device, (n, k), dtype = gpu.cuda.Device(), q.shape, x.dtype.name
    places = int(device.compute_capability), device.attributes["MultiProcessorCount"]
    problem = Problem(rows, n, k, q.format, Weight.layout, dtype, True, *places, vendor=True)
    if choose(problem) == "vendor" and expect(x, q).admits(y, k, on_gpu=True):
        return True
    wanted, size = exact(x, q)
    return is_close(y, wanted, size, k)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 8, 40, 300])
def test_larger_products_and_every_run_gives_the_same(name, rows, gpu):
    case = Case(name, (rows,), (1000, 4096), "float16")
    x, q = gpu.asarray(case.x), case.weight.to("cuda")
    runs = [cq.linear(x, q, out_dtype="float32") for _ in range(4)]
    assert all(bits_equal(run.get(), runs[0].get()) for run in runs)
    assert admitted(runs[0].get(), case.x, case.weight, rows, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40])
def test_more_than_2_to_the_31_weights(rows, gpu):
    """The last rows of a weight of 2.3e9 elements, and those of the middle."""
    n, k = 70_000, 32_768
    if gpu.cuda.runtime.memGetInfo()[0] < 4 << 30:
        pytest.skip("the GPU has too little free memory")
    packed = gpu.empty((n, k // 2), gpu.uint8)
    mixed = "y = (unsigned char)((i * 0x9E3779B97F4A7C15ull) >> 40)"
    gpu.ElementwiseKernel("", "uint8 y", mixed, "fill_with_codes")(packed)
    scale = gpu.asarray(np.abs(normal((n, k // 128))).astype(np.float16))
    parts = {"packed": packed, "scale": scale}
    q = cq.QuantArray(cq.get_format("int4"), (n, k), np.dtype(np.float16), parts, (0, 1))
    x = gpu.asarray(normal((rows, k), "float16"))
    y = cq.linear(x, q)
    for part in (slice(0, 40), slice(n // 2, n // 2 + 40), slice(n - 40, n)):
        own = {name: array[part].copy() for name, array in parts.items()}
        few = cq.QuantArray(q.format, (40, k), q.dtype, own, (0, 1)).numpy()
        check(y[:, part], x.get(), few, y)


@pytest.mark.gpu
def test_more_than_2_to_the_31_results(gpu):
    rows, n = 70_000, 32_768
    if gpu.cuda.runtime.memGetInfo()[0] < 8 << 30:
        pytest.skip("the GPU has too little free memory")
    w = weight("nf4", (n, 8))
    x = normal((rows, 8), "float16")
    y = cq.linear(gpu.asarray(x), w.to("cuda"))
    for part in (slice(0, 9), slice(rows - 9, rows)):
        assert admitted(y[part].get(), x[part], w, rows, gpu)
