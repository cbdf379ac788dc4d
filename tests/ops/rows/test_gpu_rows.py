"""Fused row quantization on a GPU: every case with its kernels, streams, graphs, all numbers."""

import fake_gpu
import numpy as np
import pytest
import row_cases
from functional_inputs import BF16, F32, normal
from kernel_cases import differences

import cuquant.functional as F
from cuquant import interop
from cuquant.gpu.arrays import backend_of
from cuquant.ops.rows.on_gpu import values_of
from cuquant.ops.rows.source import GELU, SILU, Rows, Source
from cuquant.reference import rows as reference

pytestmark = pytest.mark.gpu
REFERENCES = {SILU: reference.silu_mul, GELU: reference.gelu_mul}


def plain(x):
    return x


def same_values(found, wanted):
    """Equality of bits, where NaN equals NaN."""
    a, b = found.astype(F32), wanted.astype(F32)
    both = np.isnan(a) & np.isnan(b)
    return bool((both | (a.view(np.uint32) == b.view(np.uint32))).all())


@pytest.mark.parametrize("kind", ["cupy", "torch"])
@pytest.mark.parametrize("case", row_cases.ALL, ids=str)
def test_the_bytes_of_numpy(case, kind):
    (found, total), (wanted, wanted_total) = case(fake_gpu.real(kind)), case(plain)
    assert not differences(found.numpy(), wanted)
    assert total is None or same_values(interop.to_host(total), wanted_total)


@pytest.mark.parametrize("gate", REFERENCES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gates_of_all_numbers(dtype, gate, gpu):
    """All of 16 bits; of float32 2^24, of all exponents and of the usual size."""
    if dtype == "float32":
        rng = np.random.default_rng(0)
        x = rng.integers(0, 2**32, 2**23, np.uint32).view(F32)
        x = np.concatenate([x, rng.standard_normal(2**23, F32) * F32(6)])
    else:
        x = np.arange(2**16, dtype=np.uint16).view(interop.float_dtype(dtype))
    x = x.reshape(-1, 4096)
    ones = np.ones_like(x)
    given, up = fake_gpu.mover("cupy")(x), fake_gpu.mover("cupy")(ones)
    out = gpu.empty_like(given)
    with backend_of(given) as backend:
        values_of(backend, Rows(Source(gate=gate), given, up), out)
    assert same_values(interop.to_host(out), REFERENCES[gate](x, ones))


@pytest.mark.parametrize("shape", [(2048, 4096), (512, 14336), (1, 4096), (40000, 128)])
@pytest.mark.parametrize("operation", ["add_rmsnorm", "layernorm", "silu_mul", "signed"])
def test_large_arrays(operation, shape, gpu):
    case = row_cases.Case(operation, "fp8_e4m3", shape=shape)
    (found, _), (wanted, _) = case(fake_gpu.mover("cupy")), case(plain)
    assert not differences(found.numpy(), wanted)


def operands(to):
    x, residual = (to(normal(64, 1024, seed=i, dtype=BF16)) for i in range(2))
    return x, residual, to(normal(1024, seed=2, dtype=BF16)), to(np.zeros((64, 1024), BF16))


OPERATIONS = {
    "add_rmsnorm": lambda x, y, w, s, **how: F.add_rmsnorm_quantize(
        x, y, w, residual_out=s, format="mxfp8", **how
    ),
    "silu_mul": lambda x, y, w, s, **how: F.silu_mul_quantize(x, y, format="int8", **how),
    "layernorm to planes": lambda x, y, w, s, **how: F.layernorm_quantize(
        x, w, format="nf4", double_quant=True, **how
    ),
    "hadamard": lambda x, y, w, s, **how: F.hadamard_quantize(
        x, group=1024, format="fp8_e4m3", **how
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_is_captured_and_replayed(name, gpu):
    to, call = fake_gpu.mover("cupy"), OPERATIONS[name]
    given = operands(to)
    q = call(*given)
    side = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.runtime.deviceSynchronize()
    with side:
        call(*given, out=q)
        side.begin_capture()
        call(*given, out=q)
        graph = side.end_capture()
        for seed in range(5, 8):
            fresh = normal(64, 1024, seed=seed, dtype=BF16)
            given[0][...] = to(fresh)
            graph.launch(side)
            side.synchronize()
            host = (fresh, *(interop.to_host(a) for a in given[1:3]), np.zeros((64, 1024), BF16))
            assert not differences(q.numpy(), call(*host))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_of_torch(name, torch):
    to, call = fake_gpu.mover("torch"), OPERATIONS[name]
    given = operands(to)
    q = call(*given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(*given, out=q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*given, out=q)
    for seed in range(5, 8):
        fresh = normal(64, 1024, seed=seed, dtype=BF16)
        given[0].copy_(to(fresh))
        graph.replay()
        torch.cuda.synchronize()
        host = (fresh, *(interop.to_host(a) for a in given[1:3]), np.zeros((64, 1024), BF16))
        assert not differences(q.numpy(), call(*host))


@pytest.mark.parametrize("kind", ["cupy", "torch"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_several_streams(name, kind, gpu):
    """Calls on streams of their own do not wait for each other, nor share memory."""
    to, call = fake_gpu.real(kind), OPERATIONS[name]
    sets = [operands(to) for _ in range(4)]
    gpu.cuda.runtime.deviceSynchronize()
    streams = [gpu.cuda.Stream(non_blocking=True) for _ in sets]
    made = [
        call(*s, stream=stream) for _ in range(5) for s, stream in zip(sets, streams, strict=True)
    ]
    for stream in streams:
        stream.synchronize()
    wanted = call(*operands(plain))
    assert all(not differences(q.numpy(), wanted) for q in made)
