"""What users type around the kernels, for arrays on a GPU or on what looks like one."""

import fake_gpu
import numpy as np
import pytest
from gpu_products import host, to_gpu
from oracle import bits_equal

import cuquant as cq
from cuquant import interop
from cuquant.gpu import arrays as gpu

F32 = np.float32


@pytest.fixture(params=fake_gpu.KINDS)
def to(request, monkeypatch):
    return to_gpu(request.param, monkeypatch)


def normal(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def same(q, wanted) -> bool:
    """Whether an array on the GPU has the bytes of one on the host."""
    parts = q.arrays()
    return q.dtype == wanted.dtype and all(
        bits_equal(host(parts[name]), part) for name, part in wanted.arrays().items()
    )


@pytest.mark.parametrize("dtype", ["float64", "int8", "int32", "int64", "uint8", "bool"])
def test_other_numbers_are_computed_as_float32(dtype, to):
    x = (normal((16, 256)).astype(np.float64) * 50).astype(dtype)
    if dtype == "float64":
        x[3, 5] = 1e39
    q, wanted = cq.quantize(to(x), "nf4"), cq.quantize(x, "nf4")
    assert q.dtype == F32 and interop.is_on_gpu(q.packed) and same(q, wanted)
    other = cq.quantize(to(np.zeros((16, 256), F32)), "nf4")
    assert cq.quantize(to(x), "nf4", out=other) is other and same(other, wanted)


def test_complex_numbers_are_refused(to):
    with pytest.raises(TypeError, match="computed as float32; got complex64"):
        cq.quantize(to(np.ones((2, 64), np.complex64)))


# ---- blocks larger than the array, and arrays without elements ----------------------------------

HUGE = 2**31 - 8


@pytest.mark.parametrize("name", ["nf4", "uint4"])
@pytest.mark.parametrize("block", [HUGE, (HUGE, 8), (8, HUGE)], ids=str)
def test_blocks_larger_than_the_array(name, block, to):
    fmt = cq.get_format(name, block_size=block)
    for shape in ((2, 64), (3, 2, 40)):
        x = normal(shape)
        q, wanted = cq.quantize(to(x), fmt), cq.quantize(x, fmt)
        assert same(q, wanted)
        assert bits_equal(host(q.dequantize()), wanted.dequantize())
        assert bits_equal(host(q.codes()), wanted.codes())


def test_products_with_blocks_larger_than_the_array(to):
    x, w = normal((3, 64)), normal((16, 64), 1)
    q = cq.quantize(to(w), cq.get_format("int4", block_size=(HUGE, 8)))
    wanted = x @ cq.quantize(w, q.format).dequantize().T
    for weight in (q, cq.prepack(q)):
        np.testing.assert_allclose(host(cq.linear(to(x), weight)), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["nf4", "nf4+dq", "int8:tensor", "q4_0", "k3", "nvfp4", "fp16"])
@pytest.mark.parametrize("shape", [(2**40, 0), (0, 2**40), (2**20, 2**20, 0)], ids=str)
def test_arrays_without_elements_return_at_once(name, shape, to):
    q = cq.quantize(to(np.empty(shape, F32)), name)
    assert same(q, cq.quantize(np.empty(shape, F32), name))
    assert tuple(q.dequantize().shape) == tuple(q.codes().shape) == shape
    assert q[0:5].shape == (min(shape[0], 5), *shape[1:])
    if len(shape) == 2:
        none = to(np.empty((0, shape[1]), F32))
        assert tuple(cq.linear(none, q).shape) == (0, shape[0])


@pytest.mark.parametrize("shape", [(0, 128), (3, 0)])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("given", [None, np.full((3, 1), 0.25, F32)], ids=["found", "scale"])
def test_a_global_scale_of_an_array_without_elements(given, on_gpu, shape, to):
    x, weight = np.empty(shape, F32), np.ones(shape[1], F32)
    fmt, how = cq.get_format("nvfp4"), {"global_scale": F32(0.002)}
    if given is not None:
        fmt = cq.get_format("nvfp4", block_size="row")
        how["scale"] = given[: shape[0]]
    wanted = cq.quantize(x, fmt, **how)
    assert wanted.components["global_scale"] == F32(0.002)
    if on_gpu:  # as one number, or as an array of one
        how["global_scale"] = to(np.full((1,) * (shape[0] > 0), 0.002, F32))
    q = cq.quantize(to(x), fmt, **how)
    assert same(q, wanted) and cq.array_equal(q.numpy(), wanted)
    assert same(cq.functional.layernorm_quantize(to(x), to(weight), format=fmt, **how), wanted)
    out = cq.quantize(to(x), fmt)
    assert cq.quantize(to(x), fmt, out=out, **how) is out and same(out, wanted)


def test_a_global_scale_on_the_gpu_may_be_an_array_of_one(to):
    x, scale = normal((2, 128)), np.full((1, 1), 0.002, F32)
    assert same(cq.quantize(to(x), "nvfp4", global_scale=to(scale)),
                cq.quantize(x, "nvfp4", global_scale=scale))  # fmt: skip


@pytest.mark.parametrize("name", ["int8:tensor", "uint4"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_given_numbers_are_not_copied_from_the_host(name, on_gpu, to, monkeypatch):
    """A copy waits, and a CUDA graph cannot have one: int8 has no zero points to copy, either."""
    x, scale = normal((3, 128)), np.full((), 0.04, F32)
    moved, given = to(x), to(scale) if on_gpu else 0.04
    for backend in (gpu.CupyBackend, gpu.TorchBackend):
        monkeypatch.setattr(backend, "array", None)
    assert same(cq.quantize(moved, name, scale=given), cq.quantize(x, name, scale=0.04))


# ---- as the library's own arrays ----------------------------------------------------------------


def test_copies_reshapes_and_comparisons(to):
    x = normal((4, 256))
    q, wanted = cq.quantize(to(x), "nf4"), cq.quantize(x, "nf4")
    assert cq.array_equal(q, wanted) and cq.array_equal(q, q.copy())
    assert not cq.array_equal(q, cq.quantize(to(-x), "nf4"))
    assert cq.array_equal(cq.prepack(q), cq.prepack(wanted))
    assert same(q.reshape(2, 2, 256), wanted.reshape(2, 2, 256))
    found = q.transpose(1, 0).astype("float16").dequantize()
    assert bits_equal(np.ascontiguousarray(host(found)), wanted.dequantize("float16").T.copy())
    assert bits_equal(host(cq.prepack(q).dequantize()), wanted.dequantize())
    with pytest.raises(TypeError, match=r"cuquant\.array_equal"):
        q == cq.quantize(to(x), "nf4")  # noqa: B015


def test_matmul_by_operator(to):
    x, w = to(normal((3, 64))), cq.quantize(to(normal((16, 64), 1)), "int4")
    assert bits_equal(host(x @ w.T), host(cq.matmul(x, w.T)))
