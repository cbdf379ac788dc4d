"""Prepacked experts on a GPU, against float64: matmul/hopper.cu on sm_90, else plain kernels."""

from typing import Any

import numpy as np
import pytest
from expert_products import CASES, COUNTS, KINDS, RAGGED, Case
from fragment_products import Expected
from gpu_products import host, moves, tensor
from oracle import bits_equal
from products import normal, values

import cuquant as cq

pytestmark = pytest.mark.gpu

LARGE = [Case(name, "float16", rows, (8, 1024, 2048))
         for name in ("nf4", "int4", "q4_k") for rows in (16, 200, 3000)]  # fmt: skip


@pytest.fixture(scope="module")
def arch(gpu) -> int:
    return int(gpu.cuda.Device().compute_capability)


def expected(case: Case, arch: int) -> Expected:
    """What the kernel that the rule names may give."""
    if arch == 90:
        return Expected.routed(case.x, case.weight, case.experts)
    x, w = values(case.x), values(case.weight)[case.experts]
    sums, size = (np.einsum("tk,tnk->tn", f(x), f(w)) for f in (np.positive, np.abs))
    return Expected(sums, size)


def there(case: Case, gpu: Any) -> tuple[Any, cq.PackedWeight, Any]:
    return gpu.asarray(case.x), cq.prepack(case.weight).to("cuda"), gpu.asarray(case.experts)


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_the_matrix(case, gpu, arch):
    """And every run gives the same bits."""
    x, w, experts = there(case, gpu)
    runs = [cq.grouped_linear(x, w, experts).get() for _ in range(3)]
    assert all(bits_equal(run, runs[0]) for run in runs)
    assert expected(case, arch).admits(runs[0], case.shape[2], on_gpu=True)


@pytest.mark.parametrize("case", [KINDS[0], COUNTS[3], COUNTS[6]], ids=str)
def test_rows_without_an_expert_become_nan(case, gpu):
    x, w, _ = there(case, gpu)
    experts = case.experts.copy()
    experts[1::5], experts[3::7] = -1, case.shape[0]
    lost = (experts < 0) | (experts >= case.shape[0])
    y = cq.grouped_linear(x, w, gpu.asarray(experts)).get()
    clean = cq.grouped_linear(x, w, gpu.asarray(case.experts)).get()
    assert np.isnan(y[lost]).all() and np.isfinite(values(clean)).all()
    assert bits_equal(y[~lost], clean[~lost])


def test_x_and_out_lie_anywhere(gpu, arch):
    x, w, experts = there(RAGGED, gpu)
    wide = gpu.zeros((len(x), 2 * x.shape[1] + 1), x.dtype)
    wide[:, 1::2] = x
    base = gpu.full((len(x), 2 * w.shape[1]), 7, np.float32)
    out = base[:, ::2]
    assert cq.grouped_linear(wide[:, 1::2], w, experts, out=out) is out
    assert expected(RAGGED, arch).admits(out.get(), RAGGED.shape[2], on_gpu=True)
    assert bool((base[:, 1::2] == 7).all())


@pytest.mark.parametrize("case", [KINDS[0], COUNTS[3], LARGE[1]], ids=str)
def test_a_graph_of_cupy_is_captured_and_replayed(case, gpu):
    """With other rows of x, and other experts, than when it was captured."""
    x, w, experts = there(case, gpu)
    out = gpu.zeros((case.rows, case.shape[1]), x.dtype)
    with gpu.cuda.Stream(non_blocking=True) as side:
        gpu.cuda.runtime.deviceSynchronize()
        cq.grouped_linear(x, w, experts, out=out)
        side.synchronize()
        side.begin_capture()
        cq.grouped_linear(x, w, experts, out=out)
        graph = side.end_capture()
        for seed in range(3):
            x.set(normal(x.shape, case.dtype, seed), stream=side)
            chosen = np.random.default_rng(seed).integers(-1, case.shape[0], case.rows)
            experts.set(chosen.astype(experts.dtype), stream=side)
            graph.launch(side)
            side.synchronize()
            replayed = out.get()
            cq.grouped_linear(x, w, experts, out=out)
            side.synchronize()
            assert bits_equal(replayed, out.get()) and np.isfinite(values(replayed)).any()


@pytest.mark.parametrize("case", [KINDS[1], COUNTS[3]], ids=str)
def test_a_graph_of_torch_is_captured_and_replayed(case, torch):
    to = moves(lambda part: tensor(torch, part))
    x, w, experts = to(case.x), cq.prepack(to(case.weight)), to(case.experts)
    out = to(np.zeros((case.rows, case.shape[1]), case.x.dtype))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cq.grouped_linear(x, w, experts, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cq.grouped_linear(x, w, experts, out=out)
    for seed in range(3):
        x.copy_(tensor(torch, normal(case.x.shape, case.dtype, seed)))
        graph.replay()
        torch.cuda.synchronize()
        replayed = host(out)
        cq.grouped_linear(x, w, experts, out=out)
        assert bits_equal(replayed, host(out)) and np.abs(values(replayed)).max() > 0
