"""Products on a GPU that is not the current one: made there, with the same bits."""

import numpy as np
import pytest
from gpu_products import host, moves, tensor
from oracle import bits_equal
from products import normal, weight

import cuquant as cq
from cuquant import interop

pytestmark = pytest.mark.gpu

SHAPE = (2048, 1024)
WEIGHTS = {
    "int4": {},
    "nf4": {"double_quant": True},
    "fp8_e4m3": {},
    "int3": {"block_size": 16},
    "q4_k": {},
    "mxfp4": {},
}


@pytest.fixture(params=["cupy", "torch"])
def to(request, two):
    """What moves arrays and weights to a GPU, by its number."""
    torch = request.getfixturevalue("torch") if request.param == "torch" else None

    def move(value, index):
        if torch is not None:
            return tensor(torch, value).to(f"cuda:{index}")
        with two.cuda.Device(index):
            return two.asarray(value)

    return lambda value, index: moves(lambda array: move(array, index))(value)


def results(x, q, w, experts, out):
    """Of each operation, as it lies and prepacked."""
    p = cq.prepack(q)
    yield from (cq.linear(x, q), cq.linear(x, p, activation="gelu", out=out), x @ q.T)
    yield from (cq.swiglu(x, q, q), cq.swiglu(x, p, p))
    yield from (cq.grouped_linear(x, w, experts), cq.grouped_linear(x, cq.prepack(w), experts))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("rows", [1, 6, 40, 300])
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_are_made_where_their_operands_are(name, rows, dtype, to, two):
    x, q = normal((rows, SHAPE[1]), dtype), weight(name, SHAPE, **WEIGHTS[name])
    w = cq.quantize(normal((3, 64, SHAPE[1])), q.format)
    operands = x, q, w, np.arange(rows) % 3, np.zeros((rows, SHAPE[0]), x.dtype)
    here, there = ([to(value, index) for value in operands] for index in (0, 1))
    wanted = [host(y) for y in results(*here)]
    for current in (0, 0, 1, 1):  # a second time by the plans of the first
        with two.cuda.Device(current):
            found = list(results(*there))
            assert two.cuda.runtime.getDevice() == current
        assert {interop.device(y) for y in found} == {"cuda:1"}
        assert all(bits_equal(host(y), want) for y, want in zip(found, wanted, strict=True))


@pytest.mark.parametrize("rows", [1, 40])
def test_integer_products_of_blocks(rows, to):
    q, x = cq.quantize(normal((96, 512)), "q4_0"), normal((rows, 512))
    made = []
    for index in (0, 1):
        blocks, activations = to(q.to_blocks(), index), to(x, index)
        eight = cq.functional.quantize_q8_1(activations)
        made.append(cq.functional.gemm_q4_0_q8_1(blocks, eight, 96, rows, 512))
        assert interop.device(made[-1]) == f"cuda:{index}"
    assert bits_equal(*map(host, made))


def test_operands_on_two_gpus_are_refused(to):
    q, x = weight("int4", (64, 256)), normal((2, 256), "float16")
    for call in (
        lambda: cq.linear(to(x, 0), to(q, 1)),
        lambda: cq.linear(to(x, 1), cq.prepack(to(q, 0))),
        lambda: cq.linear(to(x, 1), to(q, 1), to(np.zeros(64, np.float16), 0)),
        lambda: cq.linear(to(x, 1), to(q, 1), out=to(np.zeros((2, 64), np.float16), 0)),
        lambda: cq.swiglu(to(x, 1), to(q, 1), to(q, 0)),
    ):
        with pytest.raises(ValueError, match=r"cuda:[01]"):
            call()
