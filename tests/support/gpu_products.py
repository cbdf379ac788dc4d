"""Products on a GPU: what moves operands there, and what checks the results."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import fake_gpu
import numpy as np
import pytest
from emulator import Emulator, Recorder
from fragment_products import Expected
from products import exact, is_close, normal, values, weight

import cuquant as cq
from cuquant import interop
from cuquant.gpu import jit

F32 = np.float32
PRODUCTS = ("int4", "nf4", "q4_0", "fp16")


def moves(move):
    """What moves NumPy arrays, and QuantArrays of them."""

    def to(x):
        if not isinstance(x, cq.QuantArray):
            return move(x)
        parts = {name: move(part) for name, part in x.arrays().items()}
        return cq.QuantArray(x.format, x.shape, x.dtype, parts, x.axes)

    return to


def compile_together(programs, arch):
    """Compile programs for a GPU, by all processors.

    Each process of the test run begins with another one: what others have compiled is in the cache.
    """
    worker, workers = (os.environ.get(f"PYTEST_XDIST_WORKER{n}", "") for n in ("", "_COUNT"))
    first = len(programs) * int(worker.removeprefix("gw") or 0) // int(workers or 1)
    with ThreadPoolExecutor() as pool:
        programs = [*programs[first:], *programs[:first]]
        list(pool.map(lambda program: jit.compiled(program, arch), programs))


@functools.cache
def build():
    """Compile the kernels together, which is much faster than one by one."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        to = moves(fake_gpu.install("cupy", patch, recorder))
        x, across = to(normal((3, 256))), to(normal((256, 5)))
        weights = {name: to(weight(name)) for name in PRODUCTS}
        for q in weights.values():
            cq.linear(x, q), cq.matmul(q, across)
            cq.linear(x, cq.prepack(q))
        cq.swiglu(x, weights["nf4"], weights["int4"])
        cq.linear(to(cq.quantize(normal((3, 256)), "int8")), weights["nf4"])
        cq.matmul(x, to(weight("int4", (256, 256))))
        cq.linear(to(normal((149, 256))), weights["int4"])
        stacked = to(cq.quantize(normal((4, 9, 256)), "int4"))
        cq.grouped_linear(x, stacked, to(np.zeros(3, np.int32)))
    Emulator().build(recorder.programs)


def to_gpu(kind: str, monkeypatch):
    """What moves NumPy arrays and QuantArrays of them to a GPU, or to what looks like one."""
    if kind.startswith("fake"):
        build()
    return moves(fake_gpu.use(kind, monkeypatch))


def tensor(torch, values: np.ndarray):
    return interop.from_numpy(np.ascontiguousarray(values).reshape(values.shape), "torch").to(
        "cuda"
    )


def host(x) -> np.ndarray:
    return interop.to_host(x)


def check(y, x, w, like) -> None:
    """`x` and `w` are those of the host."""
    assert (interop.kind(y), interop.device(y)) == (interop.kind(like), "cuda:0")
    wanted, size = exact(x, w)
    found = host(y)
    assert found.dtype == np.asarray(x).dtype
    depth = values(w).shape[-1]
    if is_close(found, wanted, size, depth):
        return
    # Tensor cores multiply levels that were rounded to x's dtype.
    assert found.dtype != F32 and isinstance(w, cq.QuantArray)
    assert Expected.of(np.asarray(x), w).admits(found, depth, on_gpu=True)
