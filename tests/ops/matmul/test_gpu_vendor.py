"""Products by cuBLAS on a GPU, with weights that are decoded first: values, graphs, memory."""

from dataclasses import replace
from typing import Any

import fake_gpu
import numpy as np
import pytest
from fragment_products import SMALLEST, Expected
from oracle import DTYPES, bits_equal
from products import ULP, finished, normal, values, weight
from vendor_products import by_vendor, expect

import cuquant as cq
from cuquant import interop
from cuquant.gpu import arrays as backends
from cuquant.gpu import workspace

pytestmark = pytest.mark.gpu

F32 = np.float32
FORMATS = ("int4", "nf4", "uint8", "k3", "fp8_e4m3", "mxfp4", "nvfp4", "q4_k", "q6_k", "fp16")
SHAPES = ((1000, 4096), (37, 131), (513, 72))


@pytest.fixture(params=["cupy", "torch"])
def to(request, gpu):
    """What moves arrays and weights to the GPU; skips where there is no cuBLAS."""
    move = fake_gpu.real(request.param)
    if not backends.CupyBackend(0, gpu.cuda.get_current_stream().ptr).has_vendor:
        pytest.skip("no cuBLAS")

    def there(value: Any) -> Any:
        if not isinstance(value, (cq.QuantArray, cq.PackedWeight)):
            return move(value)
        parts = {name: move(part) for name, part in value.arrays().items()}
        if isinstance(value, cq.PackedWeight):
            return replace(value, components=parts)
        return cq.QuantArray(value.format, value.shape, value.dtype, parts, value.axes)

    there.kind = request.param  # type: ignore[attr-defined]
    workspace.release()
    yield there
    workspace.release()


def host(x: Any) -> np.ndarray:
    return interop.to_host(x)


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_of_format(name, dtype, to):
    """By rows and prepacked; the same bits in every run."""
    for n, k in SHAPES:
        fmt = cq.get_format(name)
        if fmt.is_blocks and k % fmt.layout.elements:
            continue
        q = weight(name, (n, k))
        for rows in (17, 300):
            x = normal((rows, k), dtype)
            wanted, there = expect(x, q), to(x)
            for w in (to(q), to(cq.prepack(q))):
                with by_vendor():
                    runs = [host(cq.linear(there, w, out_dtype="float32")) for _ in range(3)]
                    own = host(cq.linear(there, w))
                assert all(bits_equal(run, runs[0]) for run in runs)
                assert wanted.admits(runs[0], k, on_gpu=True), (n, k, rows)
                assert wanted.admits(own, k, on_gpu=True) and own.dtype == x.dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_rule_takes_it_for_many_rows(dtype, to, monkeypatch):
    """Of a weight that is not prepacked; and without cuBLAS another kernel multiplies."""
    q, x = weight("int4", (4096, 4096)), normal((512, 4096), dtype)
    moved, there = to(q), to(x)
    y = host(cq.linear(there, moved, out_dtype="float32"))
    assert workspace._kept
    part = slice(0, 4096, 97)
    few = cq.QuantArray(
        q.format,
        (len(range(4096)[part]), 4096),
        q.dtype,
        {name: np.ascontiguousarray(array[part]) for name, array in q.arrays().items()},
        q.axes,
    )
    assert expect(x, few).admits(y[:, part], 4096, on_gpu=True)
    workspace.release()
    monkeypatch.setattr(backends, "_vendors", {0: None})
    other = to(q)  # of which no plan is known
    plain = host(cq.linear(there, other, out_dtype="float32"))
    assert not workspace._kept
    assert expect(x, few).admits(plain[:, part], 4096, on_gpu=True)


def test_epilogues_and_strides(to):
    q, x = weight("nf4", (300, 256)), normal((70, 256), "float16")
    bias, residual = normal((300,), "float16"), normal((70, 300))
    moved, there = to(q), to(x)
    with by_vendor():
        sums = host(cq.linear(there, moved, out_dtype="float32"))
        y = cq.linear(
            there,
            moved,
            to(bias),
            activation="silu",
            residual=to(residual),
            out_dtype="float32",
        )
        wide = to(np.full((70, 640), 7, np.float16))
        out = wide[:, 20:320]
        assert cq.linear(there, moved, out=out) is out
        apart = to(np.full((70, 600), 7, np.float16))
        cq.linear(there, moved, out=apart[:, ::2])
    assert np.allclose(host(y), finished(sums, bias, "silu", residual), rtol=0, atol=1e-4)
    rounded = ULP["float16"] * np.abs(sums) + SMALLEST["float16"]
    for made, rest in ((host(wide)[:, 20:320], host(wide)[:, 320:]), (host(apart)[:, ::2],) * 2):
        assert (np.abs(values(made) - sums) <= rounded).all()
        assert rest is made or (rest == 7).all()
    assert (host(wide)[:, :20] == 7).all() and (host(apart)[:, 1::2] == 7).all()


def test_gated_units(to):
    gate, up = weight("nf4", (300, 256)), weight("q4_0", (300, 256))
    x = normal((70, 256), "float16") * np.float16(0.1)
    a, b = expect(x, gate).sums, expect(x, up).sums
    with by_vendor():
        y = host(cq.swiglu(to(x), to(gate), to(cq.prepack(up))))
    assert np.allclose(values(y), a / (1 + np.exp(-a)) * b, rtol=4e-3, atol=4e-3)


def test_a_weight_of_several_slabs(to):
    """70 000 rows of 4096 columns are 0.6 GB of float16; a workspace has 256 MB of them."""
    n, k = 70_000, 4096
    q = weight("int4", (500, k))
    parts = {name: np.tile(array, (n // 500, 1)) for name, array in q.arrays().items()}
    large = cq.QuantArray(q.format, (n, k), q.dtype, parts, q.axes)
    x = normal((40, k), "float16")
    with by_vendor():
        y = host(cq.linear(to(x), to(large), out_dtype="float32"))
    wanted: Expected = expect(x, q)
    assert all(wanted.admits(y[:, i : i + 500], k, on_gpu=True) for i in range(0, n, 500))
    ((piece,),) = workspace._kept.values()
    assert piece.nbytes < 450 << 20


# ---- graphs, streams and memory -----------------------------------------------------------------

OPERATIONS = {
    "straight": lambda x, w, b, out: cq.linear(x, w, out=out),
    "ended": lambda x, w, b, out: cq.linear(x, w, b, activation="gelu", out=out),
    "gated": lambda x, w, b, out: cq.swiglu(x, w, w, out=out),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_of_cupy_is_captured_and_replayed(name, gpu, to):
    if to.kind != "cupy":
        pytest.skip("its graphs are another test's")
    x, w = to(normal((70, 256), "float16")), to(weight("nf4", (96, 256)))
    bias, out = to(normal((96,))), to(np.zeros((70, 96), np.float16))
    call = OPERATIONS[name]
    with by_vendor(), gpu.cuda.Stream(non_blocking=True) as side:
        gpu.cuda.runtime.deviceSynchronize()
        call(x, w, bias, out)
        side.synchronize()
        side.begin_capture()
        call(x, w, bias, out)
        graph = side.end_capture()
        for seed in range(3):
            x.set(normal((70, 256), "float16", seed), stream=side)
            graph.launch(side)
            side.synchronize()
            replayed = out.get()
            call(x, w, bias, out)
            side.synchronize()
            assert bits_equal(replayed, out.get()) and np.abs(replayed).max() > 0
        # A larger product takes a larger workspace, and the graph's own stays what it is.
        cq.linear(x, to(weight("nf4", (4096, 256))))
        graph.launch(side)
        side.synchronize()
        assert bits_equal(replayed, out.get())


def test_a_workspace_does_not_grow_in_a_graph_of_cupy(gpu, to):
    """The capture can be ended, and the stream goes on."""
    if to.kind != "cupy":
        pytest.skip("torch's graphs have memory of their own")
    x, w = to(normal((70, 256), "float16")), to(weight("nf4", (96, 256)))
    with by_vendor(), gpu.cuda.Stream(non_blocking=True) as side:
        gpu.cuda.runtime.deviceSynchronize()
        wanted = cq.linear(x, w).get()
        workspace.release()
        out = gpu.zeros((70, 96), gpu.float16)
        side.synchronize()
        side.begin_capture()
        with pytest.raises(RuntimeError, match=r"workspace of \d+ bytes is used for"):
            cq.linear(x, w, out=out)
        side.end_capture()
        assert bits_equal(cq.linear(x, w).get(), wanted)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_of_torch_is_captured_and_replayed(name, torch, to):
    """On the stream that torch captures on, which no call was made on before."""
    if to.kind != "torch":
        pytest.skip("CuPy's graphs are another test's")
    x, w = to(normal((70, 256), "float16")), to(weight("nf4", (96, 256)))
    bias, out = to(normal((96,))), to(np.zeros((70, 96), np.float16))
    call = OPERATIONS[name]
    with by_vendor():
        call(x, w, bias, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(x, w, bias, out)
        workspace.release()  # it has memory of its own
        for seed in range(3):
            x.copy_(to(normal((70, 256), "float16", seed)))
            graph.replay()
            torch.cuda.synchronize()
            replayed = host(out)
            call(x, w, bias, out)
            assert bits_equal(replayed, host(out)) and np.abs(replayed).max() > 0


def test_a_call_with_out_does_not_allocate(gpu, to):
    """From the second on; and all layers share what the first one took."""
    layers = [to(weight(name, (512, 256))) for name in ("nf4", "int4", "q4_0")]
    x, bias = to(normal((70, 256), "float16")), to(normal((512,)))
    out = to(np.zeros((70, 512), np.float16))

    class Count(gpu.cuda.MemoryHook):
        name, count = "count", 0

        def malloc_preprocess(self, **_: Any) -> None:
            self.count += 1

    def calls() -> int:
        """Allocations of all operations and layers."""
        with Count() as hook:
            before = fake_gpu.torch.cuda.memory_stats() if to.kind == "torch" else {}
            for call in OPERATIONS.values():
                for w in layers:
                    call(x, w, bias, out)
            after = fake_gpu.torch.cuda.memory_stats() if to.kind == "torch" else {}
        name = "allocation.all.allocated"
        return hook.count + after.get(name, 0) - before.get(name, 0)

    with by_vendor():
        assert calls() > 0  # they are counted
        assert calls() == 0 and len(workspace._kept) == 1


def test_products_on_several_streams_do_not_disturb_each_other(gpu, to):
    """Each stream has its own workspace; the same handle of cuBLAS serves them."""
    if to.kind != "cupy":
        pytest.skip("streams are CuPy's here")
    weights = [to(weight("nf4", (1024, 2048))), to(weight("int4", (1024, 2048)))]
    x = to(normal((300, 2048), "float16"))
    with by_vendor():
        wanted = [cq.linear(x, w).get() for w in weights]
        gpu.cuda.runtime.deviceSynchronize()
        streams = [gpu.cuda.Stream(non_blocking=True) for _ in weights]
        made: list[list[Any]] = [[], []]
        for _ in range(20):
            for stream, w, results in zip(streams, weights, made, strict=True):
                with stream:
                    results.append(cq.linear(x, w))
        gpu.cuda.runtime.deviceSynchronize()
    for results, want in zip(made, wanted, strict=True):
        assert all(bits_equal(result.get(), want) for result in results)
