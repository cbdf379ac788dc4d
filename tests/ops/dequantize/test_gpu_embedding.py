"""Rows by their numbers on a GPU: the reference's values, bit for bit, in graphs and on streams."""

import embedding_cases as lookups
import kernel_cases as cases
import numpy as np
import pytest
import waiting
from embedding_cases import MATRICES, ODDS, looked_up, numbers, one
from gpu_products import host, moves, tensor
from kernel_cases import same_values
from oracle import DTYPES

import cuquant as cq

pytestmark = pytest.mark.gpu

FEW = ("nf4", "k3", "fp8_e4m3", "q4_k", "nf4:flat", "int8+absmax")


@pytest.mark.parametrize("case", [*MATRICES, *ODDS], ids=str)
def test_the_matrix(case, gpu):
    q = case.expected()
    ids, table = numbers(q.shape[0]), moves(gpu.asarray)(q)
    for dtype in DTYPES.values():
        found = cq.embedding(gpu.asarray(ids), table, dtype=dtype)
        assert same_values(found.get(), looked_up(q, ids, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nasty_scales_and_blocks(dtype, gpu):
    made = [lookups.of_every_scale(name, dtype) for name in lookups.SCALED]
    made += [lookups.random_blocks(name, dtype) for name in lookups.BLOCKED]
    for q in made:
        ids = numbers(q.shape[0])
        found = cq.embedding(gpu.asarray(ids), moves(gpu.asarray)(q))
        assert same_values(found.get(), looked_up(q, ids)), q


@pytest.mark.parametrize("name", FEW)
def test_out_lies_anywhere(name, gpu):
    q, ids = one(name), numbers(24)
    table, given = moves(gpu.asarray)(q), gpu.asarray(ids)
    for layout in cases.WRITABLE:
        where, shape = cases.LAYOUTS[layout], (*ids.shape, 256)
        base = gpu.full(where.base(shape), 7, np.float16)
        out = where.view(base, shape)
        assert cq.embedding(given, table, out=out) is out
        assert same_values(out.get(), looked_up(q, ids, np.dtype(np.float16)))
        out[...] = 7
        assert (base.get() == 7).all()


def test_ids_of_any_dtype(gpu):
    q = one("nf4")
    table = moves(gpu.asarray)(q)
    for dtype in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        info = np.iinfo(dtype)
        ids = np.array([3, 0, 23, 24, info.max, info.min, 3, 9], dtype)
        assert same_values(cq.embedding(gpu.asarray(ids), table).get(), looked_up(q, ids))
        assert same_values(cq.embedding(gpu.asarray(ids)[::2], table).get(), looked_up(q, ids[::2]))


@pytest.mark.parametrize("name", FEW)
def test_torch_tensors(name, torch):
    to = moves(lambda part: tensor(torch, part))
    q, ids = one(name), numbers(24)
    table = to(q)
    for dtype in (torch.int64, torch.int32):
        given = to(np.clip(ids, -1, 1 << 30)).to(dtype)
        assert same_values(host(cq.embedding(given, table)), looked_up(q, host(given)))
        turned = cq.embedding(given.T, table, dtype=torch.bfloat16)
        assert turned.dtype == torch.bfloat16 and turned.is_cuda
        assert same_values(host(turned), looked_up(q, host(given).T, DTYPES["bfloat16"]))


@pytest.mark.parametrize("name", FEW)
def test_a_graph_is_replayed_with_other_ids(name, torch):
    to = moves(lambda part: tensor(torch, part))
    q = one(name)
    table, ids = to(q), to(np.zeros((2, 5), np.int64))
    out = torch.empty(2, 5, 256, device="cuda", dtype=torch.float16)
    cq.embedding(ids, table, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cq.embedding(ids, table, out=out)
    for seed in range(3):
        other = np.random.default_rng(seed).integers(-1, 25, (2, 5))
        ids.copy_(to(other))
        graph.replay()
        torch.cuda.synchronize()
        assert same_values(host(out), looked_up(q, other, np.dtype(np.float16)))


def test_the_current_stream_is_the_callers(gpu):
    """What the stream does before is done before rows are read."""
    q = one("nf4")
    table, ids = moves(gpu.asarray)(q), gpu.zeros(24, np.int64)
    with gpu.cuda.Stream(non_blocking=True) as side:
        gpu.cuda.runtime.deviceSynchronize()
        big = gpu.ones((4096, 4096), np.float32)
        for _ in range(20):
            big = big @ big * 0  # so that the ids come late
        ids[...] = gpu.arange(24) + big[0, 0].astype(np.int64)
        found = cq.embedding(ids, table)
        side.synchronize()
    assert same_values(found.get(), q.dequantize())


@pytest.mark.parametrize("name", ["nf4", "q4_k", "nf4:flat", "fp16"])
def test_nothing_waits(name, torch):
    """torch names a call that waits for the GPU."""
    to = moves(lambda part: tensor(torch, part))
    table, ids = to(one(name)), to(numbers(24))
    cq.embedding(ids, table)
    with waiting.refused(torch):
        cq.embedding(ids, table), cq.embedding(ids.T, table)


def test_a_table_of_more_than_four_gigabytes_of_values(torch):
    """Places in the table are beyond 32 bits."""
    known, columns = 600_000, 8192
    x = torch.randn(64, columns, device="cuda", dtype=torch.float16)
    some = cq.quantize(x, "int8")
    packed = torch.zeros(known, columns, device="cuda", dtype=torch.int8)
    scale = torch.zeros(known, 1, device="cuda")
    packed[-64:], scale[-64:] = some.components["packed"], some.components["scale"]
    table = cq.QuantArray(
        some.format, (known, columns), some.dtype, {"packed": packed, "scale": scale}, (0, 1)
    )
    ids = torch.arange(known - 64, known, device="cuda")
    assert torch.equal(cq.embedding(ids, table), some.dequantize())
