"""explain of fused row quantizers: what the functions launch, and the bytes that they move."""

from unittest import mock

import fake_gpu
import numpy as np
import pytest
from emulator import Recorder
from in_turn import in_turn

import cuquant as cq
import cuquant.functional as F
from cuquant.bench.rows import moved_bytes
from cuquant.ops.explain_rows import SOURCES, source_of

CALLS = {
    "rmsnorm_quantize": lambda x, v, **how: F.rmsnorm_quantize(x, v, **how),
    "add_rmsnorm_quantize": lambda x, v, **how: F.add_rmsnorm_quantize(
        x, x, v, residual_out=x.copy(), **how
    ),
    "layernorm_quantize": lambda x, v, **how: F.layernorm_quantize(x, v, v, **how),
    "silu_mul_quantize": lambda x, v, **how: F.silu_mul_quantize(x, x, **how),
    "gelu_mul_quantize": lambda x, v, **how: F.gelu_mul_quantize(x, x, **how),
    "hadamard_quantize": lambda x, v, **how: F.hadamard_quantize(x, **how),
}
FORMATS = ("int8", "fp8_e4m3:128", "mxfp4", "nvfp4", "int4", "nf4", "int3", "int8:tensor")


def test_all_functions_are_known():
    named = [name for name in dir(F) if name.endswith("_quantize") and name in SOURCES]
    assert sorted(named) == sorted(SOURCES) == sorted(CALLS)


@in_turn("operation", CALLS)
def test_kernels_are_what_a_call_launches(operation, monkeypatch):
    for columns in (512, 2048, 200, 14336):
        if operation == "hadamard_quantize" and columns & (columns - 1):
            continue
        for fmt in FORMATS:
            recorder = Recorder(arch=90)
            to = fake_gpu.install("cupy", monkeypatch, recorder)
            x, vector = np.zeros((8, columns), np.float16), np.ones(columns, np.float16)
            CALLS[operation](to(x), to(vector), format=fmt)
            files = list(dict.fromkeys(launch.program.file for launch in recorder.launches))
            found = cq.explain(operation, format=fmt, shape=x.shape, arch="H100")
            assert [c.kernel for c in found.candidates] == files, (fmt, columns)
            assert all(c.is_chosen for c in found.candidates)
            assert str(found).count("\n") == len(files) + 2


@in_turn("operation", CALLS)
def test_sources_are_those_of_the_functions(operation, monkeypatch):
    to, seen = fake_gpu.install("cupy", monkeypatch, Recorder()), mock.Mock()
    monkeypatch.setattr(F.rows.door, "quantized", seen)
    CALLS[operation](to(np.zeros((2, 256), np.float32)), to(np.ones(256, np.float32)))
    assert seen.call_args.args[0].source == source_of(operation, 256)


@in_turn("operation", CALLS)
def test_the_floor_is_that_of_bytes(operation):
    shape = (4096, 4096)
    found = cq.explain(operation, format="int8", shape=shape, dtype="float32", arch="H100")
    if operation != "hadamard_quantize":  # whose benchmark has signs
        own = operation.removesuffix("_quantize")
        assert found.moved_bytes == moved_bytes(own, cq.get_format("int8"), shape, 4)
    assert (found.floor, found.floor_us * 3.15e6) == ("memory", pytest.approx(found.moved_bytes))


def test_what_is_asked_wrongly_is_named():
    with pytest.raises(ValueError, match="rmsnorm_quantize takes float32, float16, bfloat16"):
        cq.explain("rmsnorm_quantize", format="int8", shape=(4, 64), dtype="int8")
    with pytest.raises(ValueError, match="did you mean 'rmsnorm_quantize'"):
        cq.explain("rmsnorm", format="int8", shape=(4, 64))  # type: ignore[arg-type]
