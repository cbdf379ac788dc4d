"""Products and convolutions of plain arrays on a GPU: graphs, streams, large ones."""

import threading

import numpy as np
import pytest
import waiting
from gpu_products import host, tensor
from oracle import bits_equal

import cuquant.functional as F
from cuquant.ops.matmul import coded_kernels

pytestmark = pytest.mark.gpu
F32 = np.float32


def integers(shape, dtype=np.int8, seed=0):
    limits = np.iinfo(dtype)
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


class Operands:
    def __init__(self, to) -> None:
        self.a, self.b = to(integers((2, 70, 200))), to(integers((2, 200, 90), np.uint8, 1))
        self.packed = [to(integers(shape, np.uint8)) for shape in ((40, 33), (33, 50))]
        self.x, self.w = to(integers((2, 20, 9, 9))), to(integers((6, 20, 3, 3), seed=1))
        shapes = (40, 64), (64, 50), (40, 50)
        self.h = [to((integers(s) % 5 - 2).astype(np.float16)) for s in shapes]
        self.scale, self.point = to(np.array(0.3, F32)), to(np.array(7, np.uint8))


OPERATIONS = {
    "int8_matmul": lambda o: F.int8_matmul(o.a, o.b),
    "scaled": lambda o: F.int8_matmul(o.a, o.b, o.scale, 0.5, o.scale, 3, o.point),
    "int4_matmul": lambda o: F.int4_matmul(*o.packed, 65),
    "binary_matmul": lambda o: F.binary_matmul(o.h[0], o.h[1]),
    "matmul_bias_relu": lambda o: F.matmul_bias_relu(o.h[0], o.h[1], o.h[2][0], o.scale),
    "fp16_gemm": lambda o: F.fp16_gemm(*o.h, alpha=o.scale, beta=2),
    "bf16_gemm": lambda o: F.bf16_gemm(*o.h[:2]),
    "int8_conv2d": lambda o: F.int8_conv2d(o.x, o.w, padding=1),
    "binary_conv2d": lambda o: F.binary_conv2d(o.x, o.w, 2, 1, scale=o.scale),
}


def on_cpu(name, seed=0):
    given = Operands(lambda x: x)
    if seed:
        given.a = integers((2, 70, 200), seed=seed)
    return OPERATIONS[name](given)


def close(found, wanted):
    """The bits of integers; sums of floats here are exact too."""
    assert bits_equal(host(found), wanted)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_of_cupy_is_captured_and_replayed(name, gpu):
    given = Operands(gpu.asarray)
    call, wanted = OPERATIONS[name], on_cpu(name)
    with gpu.cuda.Stream(non_blocking=True) as side:
        gpu.cuda.runtime.deviceSynchronize()
        first = call(given)
        side.synchronize()
        close(first, wanted)
        del first
        side.begin_capture()
        out = call(given)
        graph = side.end_capture()
        for _ in range(3):
            out.fill(0)
            graph.launch(side)
            side.synchronize()
            close(out, wanted)
        if "int8_matmul" in name:
            given.a.set(integers((2, 70, 200), seed=5), stream=side)
            graph.launch(side)
            side.synchronize()
            close(out, on_cpu(name, 5))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_of_torch_is_captured_and_replayed(name, torch):
    given = Operands(lambda x: tensor(torch, x))
    call, wanted = OPERATIONS[name], on_cpu(name)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        close(call(given), wanted)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(given)
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        close(out, wanted)


@pytest.mark.parametrize("name", OPERATIONS)
def test_several_streams_at_once(name, gpu):
    """Threads with a stream each, whose calls do not share memory."""
    given, call, wanted = Operands(gpu.asarray), OPERATIONS[name], on_cpu(name)
    gpu.cuda.runtime.deviceSynchronize()
    found, failed = [], []

    def work():
        try:
            with gpu.cuda.Stream(non_blocking=True) as own:
                made = [call(given) for _ in range(20)]
                own.synchronize()
                found.extend(made)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(found) == 120
    for made in found:
        close(made, wanted)


def test_nothing_waits(torch):
    """torch names a call that waits for the GPU."""
    given = Operands(lambda x: tensor(torch, x))
    for call in OPERATIONS.values():
        call(given)
    with waiting.refused(torch):
        for call in OPERATIONS.values():
            call(given)


@pytest.mark.parametrize("lie", ["rows", "turned"])
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 4096, 4104), (33, 8192, 4096)])
def test_large_products(shape, lie, torch):
    """Against torch's, of int32."""
    m, k, n = shape
    make = torch.Generator("cuda").manual_seed(0)
    options = {"device": "cuda", "dtype": torch.int8, "generator": make}
    a = torch.randint(-128, 128, (m, k), **options)
    b = torch.randint(-128, 128, (k, n) if lie == "rows" else (n, k), **options)
    b = b if lie == "rows" else b.T
    wanted = torch._int_mm(a, b.T.contiguous().T)
    assert (F.int8_matmul(a, b) == wanted).all()
    ones = (x.sign() + (x == 0).char() for x in (a, b.T.contiguous()))
    signs = torch._int_mm(next(ones), next(ones).T)
    assert (F.binary_matmul(a, b) == signs).all()
    assert (F.binary_matmul(a.half(), b.float()) == signs).all()


RAGGED = [
    ((1, 1), (1, 1)),
    ((3, 127), (127, 5)),
    ((17, 129), (129, 300)),
    ((300, 1000), (1000, 130)),
    ((64, 4097), (4097, 1001)),
    ((513, 8191), (8191, 96)),
    ((2, 70, 200), (2, 200, 90)),
    ((3, 1, 5, 333), (4, 333, 7)),
]


@pytest.mark.parametrize("lie", ["rows", "turned", "every other"])
@pytest.mark.parametrize("dtype", [F32, np.float16, np.int8, np.int64], ids=str)
@pytest.mark.parametrize("shapes", RAGGED, ids=str)
def test_signs_of_any_shape(shapes, dtype, lie, torch):
    """By bits from sm_80 to sm_90; of Hopper's the last lines and boxes are not whole."""
    host_sides = [(integers(s, np.int16, i) % 7 - 3).astype(dtype) for i, s in enumerate(shapes)]
    signs = [np.where(x < 0, -1, 1) for x in host_sides]
    sides = [tensor(torch, x) for x in host_sides]
    if lie == "turned":
        sides = [x.mT.contiguous().mT for x in sides]
    if lie == "every other":
        sides = [x.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., 1::2, ::2] for x in sides]
    found = F.binary_matmul(*sides)
    close(found, np.matmul(*(x.astype(np.int64) for x in signs)).astype(np.int32))


@pytest.mark.parametrize("shapes", RAGGED, ids=str)
def test_signs_of_any_shape_by_a_warp(shapes, torch, monkeypatch):
    """As GPUs from sm_80 on do it."""
    if not 80 <= 10 * torch.cuda.get_device_capability()[0] < 100:
        pytest.skip("no products of bits")
    monkeypatch.setattr(coded_kernels, "is_hoppers", lambda *_: False)
    host_sides = [(integers(s, np.int16, i) % 7 - 3).astype(F32) for i, s in enumerate(shapes)]
    signs = [np.where(x < 0, -1, 1).astype(np.int64) for x in host_sides]
    found = F.binary_matmul(*(tensor(torch, x) for x in host_sides))
    close(found, np.matmul(*signs).astype(np.int32))


def test_a_large_convolution(torch):
    x, w = integers((8, 64, 56, 56)), integers((128, 64, 3, 3), seed=1)
    found = F.int8_conv2d(tensor(torch, x), tensor(torch, w), padding=1)
    close(found, F.int8_conv2d(x, w, padding=1))
