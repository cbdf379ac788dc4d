"""Streams, CUDA graphs, threads: work is ordered as the caller ordered it, and nothing waits."""

import os
import subprocess
import sys
import time

import kernel_cases as cases
import numpy as np
import pytest
from kernel_cases import Case, differences, same_values

import cuquant as cq

pytestmark = pytest.mark.gpu

F32 = np.float32
SHAPE = (64, 1024)
DIRECT = ("nf4", "int8", "mxfp4", "q4_0", "k3", "uint4", "fp8_e4m3", "dynamic8")
SPIN = r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long first, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(first));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - first < ns);
}
"""


@pytest.fixture(scope="module")
def delay(gpu):
    """delay(seconds): keep the current CuPy stream busy."""
    kernel = gpu.RawKernel(SPIN, "spin")

    def run(seconds: float) -> None:
        kernel((1,), (1,), (np.uint64(seconds * 1e9),))

    run(1e-6)
    gpu.cuda.runtime.deviceSynchronize()
    return run


@pytest.fixture
def data(gpu):
    """What is to be quantized; on the GPU, ready."""
    x = cases.normal(SHAPE, np.dtype(np.float32))
    there = gpu.asarray(x)
    gpu.cuda.runtime.deviceSynchronize()
    return x, there


def warm(x, names=DIRECT) -> None:
    """Load kernels and tables, which waits."""
    for name in names:
        cq.quantize(x, name).dequantize()


class Handle:
    """A stream of which only the handle is known."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class Protocol:
    """A stream of another library."""

    def __init__(self, stream) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.ptr


# ---- order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["current", "cupy", "protocol", "torch"])
@pytest.mark.parametrize("name", ["nf4", "int8", "q4_0", "k3"])
def test_a_delayed_producer_on_a_side_stream(name, how, gpu, delay, data, request):
    """x gets its numbers late, on a stream of its own; quantize on that stream sees them."""
    values, ready = data
    warm(ready, [name])
    x = gpu.full(SHAPE, 7, gpu.float32)
    out = cq.quantize(x, name)
    gpu.cuda.runtime.deviceSynchronize()
    side = gpu.cuda.Stream(non_blocking=True)
    with side:
        delay(0.2)
        gpu.cuda.runtime.memcpyAsync(x.data.ptr, ready.data.ptr, x.nbytes, 3, side.ptr)
        if how == "current":
            cq.quantize(x, name, out=out)
    if how != "current":
        stream = side
        if how == "protocol":
            stream = Protocol(side)
        if how == "torch":
            stream = request.getfixturevalue("torch").cuda.ExternalStream(side.ptr)
        cq.quantize(x, name, out=out, stream=stream)
    assert not side.done, "the call waited for the producer"
    y = gpu.empty_like(x)
    cq.dequantize(out, out=y, stream=side)
    side.synchronize()
    wanted = cq.quantize(values, name)
    assert not differences(out.numpy(), wanted)
    assert same_values(y.get(), wanted.dequantize())


@pytest.mark.parametrize("name", ["nf4", "int8", "nvfp4", "q4_k", "k3"])
def test_torch_streams(name, torch, gpu, delay, data):
    """torch's current stream; and another one, with x freed right after the call."""
    values, _ = data
    ready = torch.from_numpy(values).cuda()
    wanted = cq.quantize(values, name)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # kernels, and memory of this stream: torch's malloc may wait
        cq.quantize(ready + 0, name).dequantize()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        with gpu.cuda.Stream.from_external(Handle(side.cuda_stream)):
            delay(0.1)
        q = cq.quantize(ready + 0, name)  # a temporary of this stream
        y = q.dequantize()
        assert not side.query(), "the call waited"
    side.synchronize()
    assert not differences(q.numpy(), wanted)
    assert same_values(y.cpu().numpy(), wanted.dequantize())

    x = ready.clone()
    side.wait_stream(torch.cuda.current_stream())
    with gpu.cuda.Stream.from_external(Handle(side.cuda_stream)):
        delay(0.1)
    q = cq.quantize(x, name, stream=side)
    del x
    again = [torch.full_like(ready, float("nan")) for _ in range(4)]  # takes memory that is free
    side.synchronize()
    assert not differences(q.numpy(), wanted) and len(again) == 4


def test_a_temporary_of_the_stream_may_be_freed_right_after(gpu, delay, data):
    values, ready = data
    warm(ready, ["nf4"])
    with gpu.cuda.Stream(non_blocking=True) as side:
        delay(0.05)
        q = cq.quantize(ready + 0, "nf4")
        again = gpu.full(SHAPE, np.nan, gpu.float32)
        side.synchronize()
    assert not differences(q.numpy(), cq.quantize(values, "nf4")) and bool(again[0, 0] != 0)


def test_streams_of_a_wrong_kind_are_refused(gpu, data):
    with pytest.raises(TypeError, match="stream must be"):
        cq.quantize(data[1], "nf4", stream="side")
    with pytest.raises(ValueError, match="CPU"):
        cq.quantize(data[0], "nf4", stream=gpu.cuda.Stream())


def test_the_current_stream_and_device_stay(gpu, data):
    side = gpu.cuda.Stream(non_blocking=True)
    before = gpu.cuda.get_current_stream().ptr, gpu.cuda.runtime.getDevice()
    cq.quantize(data[1], "nf4", stream=side).dequantize(stream=side)
    with pytest.raises(ValueError):
        cq.quantize(data[1], "q4_0", axis=5, stream=side)
    assert (gpu.cuda.get_current_stream().ptr, gpu.cuda.runtime.getDevice()) == before
    side.synchronize()


# ---- nothing waits ------------------------------------------------------------------------------


def calls(gpu, x):
    """What a user does without wanting to wait for the device."""
    columns = gpu.asarray(cases.normal((1024, 64), np.dtype(np.float16)))
    for name in (*DIRECT, "nvfp4", "int1", "q4_k"):
        q = cq.quantize(x, name)
        y = gpu.empty_like(x)
        yield f"quantize {name}", lambda name=name: cq.quantize(x, name)
        yield f"quantize {name} out=", lambda name=name, q=q: cq.quantize(x, name, out=q)
        yield f"dequantize {name}", lambda q=q: q.dequantize()
        yield f"dequantize {name} out=", lambda q=q, y=y: q.dequantize(out=y)
        yield f"codes and scale of {name}", lambda q=q: (q.codes(), q.scale)
    yield "an axis", lambda: cq.quantize(columns, "nf4", axis=0).dequantize()
    yield "odd rows", lambda: cq.quantize(x[:, 1:], "uint4").dequantize()
    yield "double", lambda: cq.quantize(x, "nf4", double_quant=True).dequantize()
    yield "tensor", lambda: cq.quantize(x, "int8", block_size="tensor")
    yield "stochastic", lambda: cq.quantize(x, "nf4", stochastic=True, seed=1)
    yield "clamp", lambda: cq.quantize(x, "nf4", nonfinite="clamp")
    scale = gpu.full((64, 1), 0.03, gpu.float32)
    yield "static", lambda: cq.quantize(x, "int8", scale=scale)
    word = cq.get_format("k3", packing="word")
    yield "words", lambda: cq.quantize(x, word).dequantize()


def test_no_call_waits_for_the_device(gpu, delay, data):
    """Behind 0.25 s of work on the stream, each call returns in a fraction of that."""
    _, x = data
    listed = list(calls(gpu, x))
    with gpu.cuda.Stream(non_blocking=True) as side:
        for _ in range(2):  # kernels are loaded, memory is in the pool
            for _, call in listed:
                call()
            side.synchronize()
        waited = []
        for what, call in listed:
            delay(0.25)
            start = time.perf_counter()
            call()
            if side.done or time.perf_counter() - start > 0.15:
                waited.append(what)
            side.synchronize()
    assert not waited


# ---- CUDA graphs --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIRECT)
def test_a_graph_of_cupy_is_captured_and_replayed(name, gpu, data):
    values, _ = data
    static = gpu.ones(SHAPE, gpu.float32)
    q, y = cq.quantize(static, name), gpu.empty(SHAPE, gpu.float32)
    q.dequantize(out=y)
    with gpu.cuda.Stream(non_blocking=True) as side:
        gpu.cuda.runtime.deviceSynchronize()
        side.begin_capture()
        cq.quantize(static, name, out=q)
        q.dequantize(out=y)
        graph = side.end_capture()
        for round_ in range(3):
            numbers = values * F32(1 + round_)
            static.set(numbers, stream=side)
            graph.launch(side)
            side.synchronize()
            wanted = cq.quantize(numbers, name)
            assert not differences(q.numpy(), wanted)
            assert same_values(y.get(), wanted.dequantize())


@pytest.mark.parametrize("name", [*DIRECT, "nvfp4", "double", "q4_k"])
def test_a_graph_of_torch_is_captured_and_replayed(name, torch, data):
    """Also what needs memory between its kernels, which is the graph's own."""
    values, _ = data
    double = name == "double"
    fmt = cq.get_format("nf4" if double else name, double_quant=double)
    static = torch.ones(SHAPE, device="cuda")
    q = cq.quantize(static, fmt)
    y = q.dequantize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cq.quantize(static, fmt, out=q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cq.quantize(static, fmt, out=q)
        q.dequantize(out=y)
    for round_ in range(3):
        numbers = values * F32(1 + round_)
        static.copy_(torch.from_numpy(numbers))
        graph.replay()
        torch.cuda.synchronize()
        wanted = cq.quantize(numbers, fmt)
        assert not differences(q.numpy(), wanted)
        assert same_values(y.cpu().numpy(), wanted.dequantize())


def test_a_first_call_in_a_capture_is_refused_and_the_stream_stays_usable(gpu):
    case: Case = cases.UNSEEN
    x = gpu.asarray(case.base)
    gpu.cuda.runtime.deviceSynchronize()
    with gpu.cuda.Stream(non_blocking=True) as side:
        side.begin_capture()
        with pytest.raises(RuntimeError, match=r"precompile"):
            cq.quantize(x, case.fmt)
        side.end_capture()
        q = cq.quantize(x, case.fmt)
        side.synchronize()
    assert not differences(q.numpy(), case.expected())


def test_a_first_call_in_a_capture_of_torch_is_refused(torch):
    """In a process of its own, where nothing is loaded."""
    done = run_alone(
        """
        import torch, cuquant as cq
        x = torch.randn(64, 1024, device="cuda")
        graph = torch.cuda.CUDAGraph()
        said = ""
        with torch.cuda.graph(graph):
            y = x + 1
            try:
                cq.quantize(x, "nf4")
            except RuntimeError as error:
                said = str(error)
        assert "precompile" in said, said
        graph.replay()
        torch.cuda.synchronize()
        q = cq.quantize(x, "nf4")
        host = cq.quantize(x.cpu().numpy(), "nf4")
        assert all((q.numpy().arrays()[k] == v).all() for k, v in host.arrays().items())
        assert torch.equal(y, x + 1)
        print("usable")
        """
    )
    assert done == "usable"


# ---- processes and threads ----------------------------------------------------------------------


def run_alone(code: str, **environment: str) -> str:
    """What a fresh interpreter prints last."""
    lines = code.splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    text = "\n".join(line[indent:] for line in lines)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_the_first_call_of_32_threads(gpu, tmp_path):
    """They compile a kernel once and all get the same bytes."""
    done = run_alone(
        """
        import threading
        import cupy, numpy as np, cuquant as cq
        from cuquant.gpu import jit
        built, build = [], jit.build
        def counted(program, *rest):
            built.append(program.name)
            return build(program, *rest)
        jit.build = counted
        x = np.random.default_rng(0).standard_normal((64, 1024), np.float32)
        there = cupy.asarray(x)
        cupy.cuda.Device(0).synchronize()
        start, found, errors = threading.Barrier(32), [None] * 32, []
        def use(i):
            try:
                start.wait()
                with cupy.cuda.Stream(non_blocking=True) as stream:
                    q = cq.quantize(there, "nf4")
                    y = q.dequantize()
                    stream.synchronize()
                    found[i] = q.numpy(), y.get()
            except Exception as error:
                errors.append(repr(error))
        threads = [threading.Thread(target=use, args=(i,)) for i in range(32)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not errors, errors
        host = cq.quantize(x, "nf4")
        for q, y in found:
            assert all((q.arrays()[k] == v).all() for k, v in host.arrays().items())
            assert (y == host.dequantize()).all()
        assert len(built) == len(set(built)), built
        print("same")
        """,
        CUQUANT_CACHE_DIR=str(tmp_path / "cache"),
        CUQUANT_CUBINS="",
    )
    assert done == "same"
    assert len(list((tmp_path / "cache").glob("*.cubin"))) >= 2


def test_an_error_that_was_pending_is_not_ours(gpu):
    """After a foreign kernel has gone wrong: its error, not one about captures or compiling."""
    done = run_alone(
        """
        import os, cupy, cuquant as cq
        x = cupy.ones((4, 64), cupy.float32)
        cq.quantize(x, "nf4")
        wrong = cupy.RawKernel(
            'extern "C" __global__ void wrong(int* p) { *p = 1; }', "wrong")
        wrong((1,), (1,), (8,))
        try:
            cupy.cuda.runtime.deviceSynchronize()
        except cupy.cuda.runtime.CUDARuntimeError:
            pass
        try:
            cq.quantize(x, "fp4")
        except Exception as error:
            print(type(error).__name__, " ".join(str(error).split()), flush=True)
        os._exit(0)  # the context is lost, and CuPy cannot take leave of it
        """
    )
    assert "llegal" in done and "capture" not in done and "precompile" not in done


def test_a_spawned_pool_works(gpu, tmp_path):
    script = tmp_path / "pool.py"
    script.write_text(
        "import multiprocessing, cupy, numpy as np, cuquant as cq\n"
        "def work(seed):\n"
        "    x = np.random.default_rng(seed).standard_normal((8, 256), np.float32)\n"
        "    q, host = cq.quantize(cupy.asarray(x), 'nf4').numpy(), cq.quantize(x, 'nf4')\n"
        "    return all((q.arrays()[k] == v).all() for k, v in host.arrays().items())\n"
        "if __name__ == '__main__':\n"
        "    assert work(0)\n"
        "    with multiprocessing.get_context('spawn').Pool(2) as pool:\n"
        "        print(all(pool.map(work, range(4))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "True", done.stderr[-3000:]


def test_the_same_bytes_on_every_run(gpu, data):
    _, x = data
    for name in ("nf4", "int1", "nvfp4", "q4_k"):
        runs = [cq.quantize(x, name).numpy() for _ in range(5)]
        assert not any(differences(run, runs[0]) for run in runs)
