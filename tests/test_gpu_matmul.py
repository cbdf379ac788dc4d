"""Products on a GPU: CuPy arrays and torch tensors, against float64; what is refused; and repeated
calls. The first half also runs on arrays that only look like theirs, with the emulator below."""

import gc
import time

import fake_gpu
import numpy as np
import pytest
from emulator import compiler
from fragment_products import Expected
from kernel_arrays import LAYOUTS
from kernel_cases import NAMES
from oracle import DTYPES, bits_equal
from products import CASES, Case, exact, finished, is_close, normal, values, weight

import cuquant as cq
from cuquant import interop
from cuquant.ops import repeated

F32 = np.float32
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")
needs_torch = pytest.mark.skipif(fake_gpu.torch is None, reason="no torch")


@pytest.fixture(
    params=[
        pytest.param("fake cupy", marks=needs_compiler),
        pytest.param("fake torch", marks=[needs_compiler, needs_torch]),
        pytest.param("cupy", marks=pytest.mark.gpu),
        pytest.param("torch", marks=pytest.mark.gpu),
    ]
)
def kind(request):
    return request.param


@pytest.fixture
def to(kind, monkeypatch):
    """What moves NumPy arrays and QuantArrays of them to a GPU."""
    *fake, library = kind.split()
    move = fake_gpu.install(library, monkeypatch) if fake else fake_gpu.real(library)

    def there(x):
        if not isinstance(x, cq.QuantArray):
            return move(x)
        parts = {name: move(part) for name, part in x.arrays().items()}
        return cq.QuantArray(x.format, x.shape, x.dtype, parts, x.axes)

    return there


def host(x) -> np.ndarray:
    return interop.to_host(x)


def check(y, x, w, like) -> None:
    """`x` and `w` are those of the host."""
    assert (interop.kind(y), interop.device(y)) == (interop.kind(like), "cuda:0")
    wanted, size = exact(x, w)
    found = host(y)
    assert found.dtype == np.asarray(x).dtype
    depth = values(w).shape[-1]
    if is_close(found, wanted, size, depth):
        return
    # Tensor cores multiply levels that were rounded to x's dtype.
    assert found.dtype != F32 and isinstance(w, cq.QuantArray)
    assert Expected.of(np.asarray(x), w).admits(found, depth, on_gpu=True)


# ---- every operation ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "nf4", "q4_0", "fp16"])
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
    wanted = cq.grouped_linear(x, w, experts)
    there = to(experts.astype(np.int32))
    out = to(np.zeros((6, 9), np.float16))
    for given in (experts, experts.tolist(), there):
        y = cq.grouped_linear(to(x), to(w), given)
        assert np.allclose(host(y).astype(F32), wanted.astype(F32), atol=0.05)
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
    monkeypatch.setattr(cq.ops.gpu.Gpu, "launch", None)
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


def test_gradients_are_refused(to, kind):
    if not kind.endswith("torch"):
        pytest.skip("CuPy has none")
    q, x = to(weight("nf4")), to(normal((2, 256)))
    plain = cq.linear(x, q)
    x.requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires grad"):
        cq.linear(x, q)
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


# ---- repeated calls -----------------------------------------------------------------------------


@pytest.fixture
def plans(monkeypatch):
    """The plans that a test makes, and whether the slow way was gone."""
    monkeypatch.setattr(repeated, "_plans", {})
    slow = []
    prepare = cq.ops.multiply.linear
    monkeypatch.setattr(cq.ops.multiply, "linear", lambda *a: slow.append(1) or prepare(*a))
    return slow


def test_a_repeated_call_finds_its_plan(to, plans):
    """With other arrays of the same kind; and it gives the same bits."""
    q, other = to(weight("int4", (16, 64))), to(weight("nf4", (16, 64)))
    xs = [to(normal((2, 64), "float16", seed)) for seed in range(3)]
    bias, residual = to(normal((16,))), to(normal((2, 16)))
    calls = [
        lambda x, **o: cq.linear(x, q, **o),
        lambda x, **o: cq.linear(x, q, bias, activation="gelu", **o),
        lambda x, **o: cq.linear(x, q, residual=residual, **o),
        lambda x, **o: cq.linear(x, q, out_dtype="float16", **o),
        lambda x, **o: cq.matmul(x, q.T, **o),
        lambda x, **o: cq.swiglu(x, q, other, **o),
        lambda x, **o: cq.linear(x, cq.QuantArray(q.format, q.shape, q.dtype, q.arrays(), q.axes)),
    ]
    for call in calls:
        wanted = [host(call(x)) for x in xs]
        del plans[:]
        assert all(bits_equal(host(call(x)), want) for x, want in zip(xs, wanted, strict=True))
        out = to(np.zeros((2, 16), np.float16))
        assert not plans, "the plan was not found"
        for _ in range(2):
            found = call(xs[1], out=out) if call is not calls[-1] else call(xs[1])
            assert bits_equal(host(found), wanted[1])
        assert len(plans) <= 1


def test_what_differs_has_a_plan_of_its_own(to, plans):
    """A square weight, whose transpose is another matrix; rows; dtypes; alignment; strides."""
    square, x = weight("int4", (64, 64)), normal((4, 64))
    q, there = to(square), to(x)
    for _ in range(2):
        check(cq.linear(there, q), x, square, there)
        y = host(cq.matmul(there, q))
        assert np.allclose(y, values(x) @ values(square), atol=1e-3)
        check(cq.matmul(there, q.T), x, square, there)
        for dtype in DTYPES:
            own = x.astype(DTYPES[dtype])
            check(cq.linear(to(own), q), own, square, there)
        check(cq.linear(there[1:3], q), x[1:3], square, there)
        check(cq.linear(there[::2], q), x[::2], square, there)
        crooked = to(np.concatenate([[0], x.ravel()]).astype(F32))[1:].reshape(4, 64)
        check(cq.linear(crooked, q), x, square, there)
        assert host(cq.linear(there, q, activation="relu")).min() == 0


def test_a_weight_that_was_overwritten_or_replaced(to):
    """Plans look at memory, not at what was there."""
    first, second = weight("int4", (16, 64)), cq.quantize(normal((16, 64), seed=9), "int4")
    q, x = to(first), normal((2, 64))
    there = to(x)
    for _ in range(2):
        check(cq.linear(there, q), x, first, there)
    cq.quantize(to(second.dequantize()), "int4", out=q)
    check(cq.linear(there, q), x, q.numpy(), there)
    mixed = cq.QuantArray(
        q.format, q.shape, q.dtype, {**q.arrays(), "scale": to(second.scale)}, q.axes
    )
    wanted = mixed.numpy()
    for _ in range(2):
        check(cq.linear(there, mixed), x, wanted, there)
        check(cq.linear(there, q), x, q.numpy(), there)


def test_plans_go_with_their_weight_and_are_not_too_many(to, plans):
    q, x = to(weight("int4", (16, 64))), normal((200, 64))
    there = to(x)
    for rows in range(1, 150):
        cq.linear(there[:rows], q)
    (kept,) = repeated._plans.values()
    assert 0 < len(kept) <= repeated.MOST
    del q, kept
    gc.collect()
    assert not repeated._plans


# ---- on a GPU -----------------------------------------------------------------------------------


def tensor(torch, values: np.ndarray):
    return interop.from_numpy(np.ascontiguousarray(values), "torch").to("cuda")


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 8, 40, 300])
def test_larger_products_and_every_run_gives_the_same(name, rows, gpu):
    case = Case(name, (rows,), (1000, 4096), "float16")
    x, q = gpu.asarray(case.x), case.weight.to("cuda")
    runs = [cq.linear(x, q, out_dtype="float32") for _ in range(4)]
    assert all(bits_equal(run.get(), runs[0].get()) for run in runs)
    wanted, size = exact(case.x, case.weight)
    assert is_close(runs[0].get(), wanted, size, 4096)


class Operands:
    """x and weights of every kind, moved to a GPU."""

    def __init__(self, rows: int, to) -> None:
        self.x = to(normal((rows, 256), "float16"))
        self.q, self.other = to(weight("int4", (96, 256))), to(weight("nf4", (96, 256)))
        self.packed = cq.prepack(self.other)  # in float16 by a power of two, which is looked for
        self.across = to(cq.quantize(normal((256, 96)), "int4", axis=-1))
        self.stacked = to(cq.quantize(normal((4, 96, 256)), "int4"))
        self.experts = to(np.random.default_rng(0).integers(0, 4, rows))
        self.out = to(np.zeros((rows, 96), np.float16))


OPERATIONS = {
    "linear": lambda o: cq.linear(o.x, o.q, activation="silu", out=o.out),
    "matmul": lambda o: cq.matmul(o.x, o.q.T, out=o.out),
    "swiglu": lambda o: cq.swiglu(o.x, o.q, o.other, out=o.out),
    "prepacked": lambda o: cq.linear(o.x, o.packed, activation="silu", out=o.out),
    "prepacked swiglu": lambda o: cq.swiglu(o.x, o.packed, o.packed, out=o.out),
    "experts": lambda o: cq.grouped_linear(o.x, o.stacked, o.experts, out=o.out),
    "decoded": lambda o: cq.matmul(o.x, o.across, out=o.out),
}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 100])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_of_cupy_is_captured_and_replayed(name, rows, gpu):
    def to(value):
        return value.to("cuda") if isinstance(value, cq.QuantArray) else gpu.asarray(value)

    given, call = Operands(rows, to), OPERATIONS[name]
    x, out = given.x, given.out
    with gpu.cuda.Stream(non_blocking=True) as side:
        gpu.cuda.runtime.deviceSynchronize()
        call(given)
        side.synchronize()
        side.begin_capture()
        call(given)
        graph = side.end_capture()
        for seed in range(3):
            x.set(normal((rows, 256), "float16", seed), stream=side)
            graph.launch(side)
            side.synchronize()
            replayed = out.get()
            call(given)
            side.synchronize()
            assert bits_equal(replayed, out.get()) and np.abs(replayed).max() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 100])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_of_torch_is_captured_and_replayed(name, rows, torch):
    def to(value):
        if not isinstance(value, cq.QuantArray):
            return tensor(torch, value)
        parts = {key: tensor(torch, part) for key, part in value.arrays().items()}
        return cq.QuantArray(value.format, value.shape, value.dtype, parts, value.axes)

    given, call = Operands(rows, to), OPERATIONS[name]
    x, out = given.x, given.out
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(given)
    for seed in range(3):
        x.copy_(tensor(torch, normal((rows, 256), "float16", seed)))
        graph.replay()
        torch.cuda.synchronize()
        replayed = host(out)
        call(given)
        assert bits_equal(replayed, host(out)) and np.abs(replayed).max() > 0


@pytest.mark.gpu
def test_streams(gpu, torch):
    """stream= orders the work, also behind what the stream still does."""
    q, x = weight("nf4", (96, 256)).to("cuda"), normal((4, 256), "float16")
    there, out = gpu.zeros((4, 256), gpu.float16), gpu.zeros((4, 96), gpu.float16)
    cq.linear(there, q, out=out)
    ready = gpu.asarray(x)
    gpu.cuda.runtime.deviceSynchronize()
    side = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.runtime.memcpyAsync(there.data.ptr, ready.data.ptr, x.nbytes, 3, side.ptr)
    cq.linear(there, q, out=out, stream=side)
    side.synchronize()
    check(out, x, q.numpy(), out)
    own = torch.cuda.Stream()
    x_torch = tensor(torch, x)
    parts = {key: tensor(torch, part) for key, part in q.numpy().arrays().items()}
    moved = cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)
    own.wait_stream(torch.cuda.current_stream())
    y = cq.linear(x_torch, moved, stream=own)
    own.synchronize()
    assert bits_equal(host(y), out.get())


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
        wanted, size = exact(x[part], w)
        assert is_close(y[part].get(), wanted, size, 8)


@pytest.mark.gpu
def test_no_call_waits_for_the_device_or_allocates_with_out(gpu):
    """Behind 0.2 s of work each call returns in a fraction of that; the pool stays as it is."""
    spin = gpu.RawKernel(
        'extern "C" __global__ void spin(unsigned long long ns) {'
        "unsigned long long first, now;"
        'asm volatile("mov.u64 %0, %globaltimer;" : "=l"(first));'
        'do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - first < ns);}',
        "spin",
    )
    spin((1,), (1,), (np.uint64(1000),))

    def to(value):
        return value.to("cuda") if isinstance(value, cq.QuantArray) else gpu.asarray(value)

    given = Operands(4, to)
    gpu.cuda.runtime.deviceSynchronize()
    with gpu.cuda.Stream(non_blocking=True) as side:
        for name, call in OPERATIONS.items():
            for _ in range(2):
                call(given)
            side.synchronize()
            before = gpu.get_default_memory_pool().used_bytes()
            spin((1,), (1,), (np.uint64(2e8),))
            start = time.perf_counter()
            call(given)
            assert time.perf_counter() - start < 0.1 and not side.done, name
            assert gpu.get_default_memory_pool().used_bytes() == before, name
            side.synchronize()


@pytest.mark.gpu
def test_a_repeated_call_costs_the_host_at_most_20_us(gpu):
    """The best of many runs of 100, on a queue that is never full."""
    q, x = weight("int4", (64, 256)).to("cuda"), gpu.asarray(normal((1, 256), "float16"))
    out = gpu.zeros((1, 64), gpu.float16)
    cq.linear(x, q, out=out)
    best = np.inf
    for _ in range(30):
        gpu.cuda.runtime.deviceSynchronize()
        start = time.perf_counter()
        for _ in range(100):
            cq.linear(x, q, out=out)
        best = min(best, (time.perf_counter() - start) / 100)
    assert best < 20e-6
