"""prepack and unpack on a GPU: the bytes of NumPy, in the weight's library and on its stream."""

import numpy as np
import prepack_cases as cases
import pytest
from oracle import bits_equal
from prepack_cases import Case

import cuquant as cq
from cuquant import interop

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["cupy", "torch"])
def on_gpu(request):
    """QuantArray -> the same on the GPU, in one library or the other."""
    library = request.getfixturevalue("gpu" if request.param == "cupy" else "torch")

    def array(part):
        if request.param == "cupy":
            return library.asarray(part)
        return interop.from_numpy(np.array(part), "torch").to("cuda")

    def weight(q):
        parts = {name: array(part) for name, part in q.arrays().items()}
        return cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)

    return weight


def same_parts(found: dict, wanted: dict) -> bool:
    alike = all(bits_equal(found[name], part) for name, part in wanted.items())
    return list(found) == list(wanted) and alike


@pytest.mark.parametrize("case", [*cases.ALL, *cases.EMPTY, *cases.AS_THEY_ARE], ids=str)
def test_the_bytes_of_numpy(case, on_gpu):
    q = case.weight()
    there = on_gpu(q)
    p = cq.prepack(there)
    assert (p.kind, p.device, p.shape) == (there.kind, "cuda:0", q.shape)
    assert same_parts(p.numpy().arrays(), cq.prepack(q).arrays())
    again = cq.unpack(p)
    assert (again.kind, again.device) == (there.kind, "cuda:0")
    assert same_parts(again.numpy().arrays(), q.arrays())


@pytest.mark.parametrize("case", cases.DECODED, ids=str)
def test_values_are_those_of_the_rows(case, on_gpu):
    """Where a kernel decodes the layout, and where rows of codes are made first."""
    q = case.weight()
    p = cq.prepack(on_gpu(q))
    for dtype in interop.INPUT_DTYPES:
        wanted = q.dequantize(dtype)
        found = interop.to_host(p.dequantize(dtype))
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted, equal_nan=True)


@pytest.mark.parametrize("name", ["int4", "nf4", "k3", "int8", "q4_k", "q6_k", "nvfp4"])
def test_a_large_weight(name, on_gpu):
    """Many blocks of threads, and indices beyond a strip's."""
    q = Case(name, (1031, 4096)).weight()
    p = cq.prepack(on_gpu(q))
    assert same_parts(p.numpy().arrays(), cq.prepack(q).arrays())
    assert same_parts(cq.unpack(p).numpy().arrays(), q.arrays())


def test_more_than_two_to_the_31_codes(gpu):
    """Rows around the edge, of a weight of random bytes."""
    free, _ = gpu.cuda.runtime.memGetInfo()
    if free < 12 << 30:
        pytest.skip(f"{free >> 30} GB of GPU memory are free; 12 are needed")
    fmt, shape = cq.get_format("int4", block_size="row"), (2**31 // 4096 + 5, 4096)
    parts = {
        "packed": gpu.random.default_rng(3).integers(0, 256, (shape[0], 2048), dtype=gpu.uint8),
        "scale": gpu.arange(shape[0], dtype=gpu.int64)
        .astype(gpu.uint16)[:, None]
        .view(gpu.float16),
    }
    q = cq.QuantArray(fmt, shape, np.dtype(np.float32), parts, (0, 1))
    p = cq.prepack(q)
    for strip in (0, 2**30 // 4096 // 16, 2**31 // 4096 // 16 - 1, 2**31 // 4096 // 16):
        rows = slice(16 * strip, min(16 * strip + 16, shape[0]))
        alone = cq.prepack(q[rows].numpy()).arrays()
        for name, part in alone.items():
            assert bits_equal(p.arrays()[name][strip].get(), part[0])
    again = cq.unpack(p).arrays()
    assert all(
        bool((again[name] == part).all()) for name, part in parts.items() if name == "packed"
    )
    assert bool((again["scale"].view(gpu.uint16) == parts["scale"].view(gpu.uint16)).all())


@pytest.mark.parametrize("name", ["int4", "k3", "q4_k"])
def test_a_graph_of_torch_is_captured_and_replayed(name, torch):
    """There and back, in memory of the graph; replayed with other numbers."""
    q, other = Case(name, (64, 512)).weight(), Case(name, (65, 512)).weight()[:64]
    parts = {k: interop.from_numpy(np.array(v), "torch").to("cuda") for k, v in q.arrays().items()}
    there = cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)
    cq.unpack(cq.prepack(there))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        p = cq.prepack(there)
        again = cq.unpack(p)
    for wanted in (q, other):
        for key, part in wanted.arrays().items():
            parts[key].copy_(interop.from_numpy(np.array(part), "torch"))
        graph.replay()
        torch.cuda.synchronize()
        assert same_parts(p.numpy().arrays(), cq.prepack(wanted).arrays())
        assert same_parts(again.numpy().arrays(), wanted.arrays())


def test_torch_streams(torch):
    """On torch's current stream: the weight's numbers come late."""
    q = Case("int4", (256, 1024)).weight()
    ready = {k: interop.from_numpy(np.array(v), "torch").to("cuda") for k, v in q.arrays().items()}
    parts = {name: torch.zeros_like(part) for name, part in ready.items()}
    late = cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cq.unpack(cq.prepack(late))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for name, part in parts.items():
            part.copy_(ready[name])
        p = cq.prepack(late)
        assert not side.query(), "the call waited"
    side.synchronize()
    assert same_parts(p.numpy().arrays(), cq.prepack(q).arrays())


def test_files(gpu, tmp_path):
    q = cq.quantize(np.random.default_rng(0).standard_normal((37, 200), np.float32), "uint4")
    p = cq.prepack(q.to("cuda"))
    p.save(tmp_path / "w")
    loaded = cq.load(tmp_path / "w")["array"]
    assert same_parts(loaded.arrays(), cq.prepack(q).arrays())
    assert same_parts(cq.unpack(loaded.to("cuda")).numpy().arrays(), q.arrays())
