"""ggml's products with q8_1 activations on a GPU: a real one with `-m gpu`, else the emulator's."""

import functools

import fake_gpu
import numpy as np
import pytest
from emulator import Emulator, Recorder, compiler
from functional_inputs import BF16, F32, WEIGHTS, needs_torch, normal
from oracle import bits_equal
from q8_1_products import exact, operands

import cuquant as cq
import cuquant.functional as F
from cuquant import interop
from cuquant.formats.blocks import BLOCK_LAYOUTS

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")
MATRIX = (33, 9, 5)  # M, N and blocks of K


def gemm(name, to, weights, tokens):
    columns = tokens.shape[1] * 32
    call = getattr(F, f"gemm_{name}_q8_1")
    return call(to(weights), to(tokens), len(weights), len(tokens), columns)


@functools.cache
def build():
    """Compile all kernels of this file together, which is much faster than one by one."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        to = fake_gpu.install("cupy", patch, recorder)
        for name in WEIGHTS:
            for n in (1, 9):
                gemm(name, to, *operands(name, 1, n, 1))
        F.quantize_q8_1(to(normal(1, 32)), sum="values")
        F.quantize_q8_1(to(normal(1, 32)))
        F.quantize_q4_0(to(normal(1, 32)))
    Emulator().build(recorder.programs)


@pytest.fixture(
    params=[
        pytest.param("fake cupy", marks=needs_compiler),
        pytest.param("fake torch", marks=[needs_compiler, needs_torch]),
        pytest.param("cupy", marks=pytest.mark.gpu),
        pytest.param("torch", marks=pytest.mark.gpu),
    ]
)
def to(request, monkeypatch):
    """What moves NumPy arrays to a GPU."""
    *fake, kind = request.param.split()
    if not fake:
        return fake_gpu.real(kind)
    build()
    return fake_gpu.install(kind, monkeypatch)


def assert_product(name, to, weights, tokens):
    found = gemm(name, to, weights, tokens)
    like = to(np.zeros(1, F32))
    assert (interop.kind(found), interop.device(found)) == (interop.kind(like), "cuda:0")
    found = interop.to_host(found)
    wanted, bound = exact(name, weights, tokens)
    assert found.dtype == F32 and found.shape == wanted.shape
    assert (np.abs(found - wanted) <= bound).all()
    assert bits_equal(found, interop.to_host(gemm(name, to, weights, tokens)))
    return found


@pytest.mark.parametrize("name", WEIGHTS)
def test_products(name, to):
    weights, tokens = operands(name, *MATRIX)
    whole = assert_product(name, to, weights, tokens)
    few = assert_product(name, to, weights[16:], tokens[:3])
    assert bits_equal(few, whole[16:, :3])


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("columns", [256, 2304, 14336])
def test_larger_products(name, columns):
    to = fake_gpu.real("cupy")
    blocks = columns // BLOCK_LAYOUTS[name].elements
    for m, n in ((1, 1), (257, 8), (300, 17), (1030, 700)):
        assert_product(name, to, *operands(name, m, n, blocks))


@needs_compiler
@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_emulators_bits(name):
    """Each rounding is spelled, so a GPU makes the numbers that the tests on the CPU see."""
    to = fake_gpu.real("cupy")
    weights, tokens = operands(name, *MATRIX)
    found = interop.to_host(gemm(name, to, weights, tokens))
    build()
    with pytest.MonkeyPatch.context() as patch:
        start = functools.partialmethod(Emulator.__init__, arch=cq.gpu.jit.device_arch())
        patch.setattr(Emulator, "__init__", start)
        fake = fake_gpu.install("cupy", patch)
        wanted = interop.to_host(gemm(name, fake, weights, tokens))
    assert bits_equal(found, wanted)


def test_views_that_are_not_aligned(to):
    weights, tokens = operands("q4_0", 5, 3, 4)
    wide = np.concatenate([weights[:, :1], weights], 1)
    call = F.gemm_q4_0_q8_1
    found = call(to(wide)[:, 1:], to(np.concatenate([tokens, tokens]))[1::2], 5, 3, 128)
    wanted = F.gemm_q4_0_q8_1(weights, np.concatenate([tokens, tokens])[1::2], 5, 3, 128)
    assert np.allclose(interop.to_host(found), wanted, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [np.dtype(F32), BF16], ids=str)
def test_the_whole_path(dtype, to):
    """Values to q8_1 to products, all of it on the GPU."""
    w, a = normal(7, 256), normal(5, 256, seed=1, dtype=dtype)
    weights = F.quantize_q4_0(to(w))
    for kind in ("quants", "values"):
        active = F.quantize_q8_1(to(a), sum=kind)
        assert bits_equal(interop.to_host(active), F.quantize_q8_1(a, sum=kind))
        found = F.gemm_q4_0_q8_1(weights, active, 7, 5, 256)
        close = np.abs(interop.to_host(found) - w @ a.astype(F32).T)
        assert close.max() < 12  # of products whose deviation is 16


def test_refusals_before_any_launch(to):
    weights, tokens = operands("q4_0", 2, 2, 2)
    with pytest.raises(ValueError, match=r"activation_q has shape \(2, 2, 36\); 3 rows"):
        F.gemm_q4_0_q8_1(to(weights), to(tokens), 2, 3, 64)
    with pytest.raises(TypeError, match="weight_q must be uint8"):
        F.gemm_q4_0_q8_1(to(weights.view(np.int8)), to(tokens), 2, 2, 64)
    with pytest.raises(cq.BackendUnavailable, match=r"activation_q is on 'cuda:0'"):
        F.gemm_q4_0_q8_1(weights, to(tokens), 2, 2, 64)
    with pytest.raises(ValueError, match="multiple of 32"):
        F.quantize_q8_1(to(normal(2, 31)), sum="values")
