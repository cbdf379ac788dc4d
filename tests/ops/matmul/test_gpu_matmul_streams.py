"""Products on a GPU: graphs that capture them, streams, and that none waits or allocates."""

import time

import numpy as np
import pytest
from gpu_products import check, host, moves, tensor
from oracle import bits_equal
from products import normal, weight

import cuquant as cq
from cuquant.gpu.arrays import stream_handle
from cuquant.interop import span


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
@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_streams_of_gated_units_and_experts(kind, gpu, torch):
    """x is there when the stream has come to it, and is zeros before."""
    to = moves(gpu.asarray if kind == "cupy" else lambda a: tensor(torch, a))
    stream = gpu.cuda.Stream(non_blocking=True) if kind == "cupy" else torch.cuda.Stream()
    x = normal((4, 256), "float16")
    there, ready, q = to(x * 0), to(x), to(weight("nf4", (96, 256)))
    w, experts = to(cq.quantize(normal((3, 96, 256)), "int4")), to(np.array([2, 0, 0, 1]))
    wanted = cq.swiglu(ready, q, q), cq.grouped_linear(ready, w, experts)
    cq.swiglu(there, q, q), cq.grouped_linear(there, w, experts)
    gpu.cuda.runtime.deviceSynchronize()
    addresses = (span(array)[0] for array in (there, ready))
    gpu.cuda.runtime.memcpyAsync(*addresses, x.nbytes, 3, stream_handle(stream))
    gated = cq.swiglu(there, q, q, stream=stream)
    routed = cq.grouped_linear(there, w, experts, stream=stream)
    stream.synchronize()
    assert bits_equal(host(gated), host(wanted[0])) and bits_equal(host(routed), host(wanted[1]))
    with pytest.raises(TypeError, match="stream must be"):
        cq.swiglu(there, q, q, stream="side")


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
