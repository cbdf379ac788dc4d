"""What users type around the kernels, for arrays on a GPU or on what looks like one."""

import fake_gpu
import numpy as np
import pytest
from gpu_products import host, to_gpu
from oracle import bits_equal

import cuquant as cq
from cuquant import interop

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
