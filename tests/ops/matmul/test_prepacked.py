"""Values of prepacked weights under the emulator, without rows of codes: those of `dequantize`."""

import gc

import fake_gpu
import ml_dtypes
import numpy as np
import prepack_cases as cases
import pytest
from emulator import Emulator, Recorder
from fake_gpu import needs_compiler, needs_torch
from samples import sampled, selected

import cuquant as cq
from cuquant.ops.matmul import prepacked

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def _decoded(backend, p: cq.PackedWeight, dtype: str) -> np.ndarray | None:
    """What kernels make of it; None where they do not."""
    out = backend.empty(p.shape, np.dtype(DTYPES[dtype]))
    parts = {name: backend.array(part) for name, part in p.arrays().items()}
    done = prepacked.decode_to(backend, p.format, parts, p.shape, backend.view(out))
    return out if done else None


@pytest.fixture(scope="module")
def built(request):
    """All kernels of the tests that run, compiled together."""
    recorder = Recorder()
    for given in selected(request, "test_kernels_give_what_dequantize_gives"):
        _decoded(recorder, cq.prepack(given["case"].weight()), "float32")
    Emulator().build(recorder.programs)
    return recorder


@needs_compiler
@pytest.mark.parametrize(
    "case", sampled(cases.DECODED, "format", lambda c: len(c.shape), "options"), ids=str
)
def test_kernels_give_what_dequantize_gives(case, built):
    """Of random bits, so that scales are NaN and infinite too."""
    q = case.weight()
    for dtype in DTYPES:
        found, wanted = _decoded(Emulator(), cq.prepack(q), dtype), q.dequantize(dtype)
        if found is None:  # experts whose components are not those of one weight
            assert len(q.shape) == 3 and q.format.rule.block in ("tensor", (128, 128))
            return
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted, equal_nan=True)
        assert (np.signbit(found) == np.signbit(wanted))[wanted == 0].all()


def test_what_has_no_matrix_of_16_bytes_is_decoded_in_rows():
    for name, shape in (
        ("nf4", (37, 131)),
        ("nf4", (3, 17, 72)),
        ("nf4", (0, 64)),
        ("int4", (0, 5, 64)),
    ):
        assert prepacked._matrix_of(cq.get_format(name), shape) is None
    tall = cq.get_format("int4", block_size=(32, 64))
    assert prepacked._matrix_of(tall, (3, 48, 64)) is None
    assert prepacked._matrix_of(tall, (3, 64, 64)) == (192, 64)


@needs_compiler
@pytest.mark.parametrize("library", ["cupy", pytest.param("torch", marks=needs_torch)])
def test_on_a_gpu_of_a_library(library, monkeypatch):
    """To new memory, to `out`, and to one that starts or lies elsewhere."""
    to = fake_gpu.install(library, monkeypatch)
    for name, shape in (("nf4", (37, 136)), ("q4_k", (2, 16, 256)), ("int4", (2, 17, 64))):
        q = cq.quantize(np.random.default_rng(0).standard_normal(shape).astype(np.float32), name)
        there = {key: to(part) for key, part in q.arrays().items()}
        p = cq.prepack(cq.QuantArray(q.format, q.shape, q.dtype, there, q.axes))
        wanted = q.dequantize()
        for found in (p.dequantize(), p.dequantize("float16")):
            host = cq.interop.to_host(found)
            assert np.array_equal(host, q.dequantize(host.dtype))
        room = to(np.full(2 * q.size + 1, 7, np.float32))
        for out in (room[: q.size], room[1 : q.size + 1], room[: 2 * q.size : 2]):
            out = out.reshape(shape)
            assert p.dequantize(out=out) is out
            assert np.array_equal(cq.interop.to_host(out), wanted)
        with pytest.raises(ValueError):
            p.dequantize(out=to(np.zeros(3, np.float32)))


@needs_compiler
@pytest.mark.parametrize("library", ["cupy", pytest.param("torch", marks=needs_torch)])
def test_a_weight_is_decoded_again_as_it_is_now(library, monkeypatch):
    """What is kept of the first time is no value, and goes with the arrays."""
    to = fake_gpu.install(library, monkeypatch)
    rng, before = np.random.default_rng(0), len(prepacked._known)
    q, other = (
        cq.prepack(cq.quantize(rng.standard_normal((32, 128)).astype(np.float32), "nf4"))
        for _ in range(2)
    )
    there = {key: to(part) for key, part in q.arrays().items()}
    p = cq.PackedWeight(q.format, q.layout, there, q.shape, q.dtype)
    again = cq.PackedWeight(q.format, q.layout, there, q.shape, q.dtype)
    for dtype in ("float32", "float16"):
        for weight in (p, again, p):
            host = cq.interop.to_host(weight.dequantize(dtype))
            assert host.dtype == dtype and np.array_equal(host, q.dequantize(dtype))
    assert len(prepacked._known) == before + 1
    for key, part in other.arrays().items():
        there[key][...] = to(part)
    assert np.array_equal(cq.interop.to_host(p.dequantize()), other.dequantize())
    if library == "torch":  # whose arrays can be moved
        there["codes"].data = to(q.arrays()["codes"]).data
        there["scale"].data = to(q.arrays()["scale"]).data
        assert np.array_equal(cq.interop.to_host(p.dequantize()), q.dequantize())
    with pytest.raises(TypeError):
        p.dequantize("int8")
    del p, again, weight, there, part
    gc.collect()
    assert len(prepacked._known) == before
