"""Products with ggml's blocks as they lie on a GPU, by matmul/ggml.cu, against float64."""

import numpy as np
import pytest
from emulator import Recorder
from fragment_products import TYPES, Case, Expected
from ggml_products import GATED, LIES, NAMES, of_bytes, swiglu_bound
from gpu_products import compile_together
from kernel_arrays import LAYOUTS
from oracle import DTYPES, bits_equal
from products import UNIT, Products, finished, normal, values

import cuquant as cq
from cuquant.formats.blocks import BLOCK_LAYOUTS

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 8, 9, 16)
# K in one chunk of x; shared by two blocks; and few strips.
SHAPES = [(1000, 4096), (4096, 14336), (520, 2048)]


@pytest.fixture(scope="module", autouse=True)
def compiled(gpu):
    """The programs of all types, by all processors together."""
    made = gpu.cuda.Device()
    arch = int(made.compute_capability)
    recorder = Recorder(made.attributes["MultiProcessorCount"], arch)
    run = Products(recorder)
    for name in NAMES:
        for n, k in SHAPES:
            q = of_bytes(name, n, k)
            for dtype in TYPES:
                for rows in ROWS:
                    run(cq.linear, np.zeros((rows, k), DTYPES[dtype]), q)
    compile_together(recorder.programs, arch)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_type(name, dtype, shape, gpu):
    """Random bytes; and every run gives the same bits."""
    q, x = of_bytes(name, *shape), normal((max(ROWS), shape[1]), dtype)
    x *= x.dtype.type(2**-6)  # so that float16 has room for the results
    wanted, there = Expected.of(x, q), q.to("cuda")
    for rows in ROWS:
        moved = gpu.asarray(x[:rows])
        runs = [cq.linear(moved, there, out_dtype="float32").get() for _ in range(3)]
        assert all(bits_equal(run, runs[0]) for run in runs)
        own = Expected(wanted.sums[:rows], wanted.size[:rows])
        assert own.admits(runs[0], shape[1], on_gpu=True), rows
        assert own.admits(cq.linear(moved, there).get(), shape[1], on_gpu=True), rows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blocks", [1, 3, 9, 33])
def test_rows_of_any_length(name, blocks, gpu):
    """Rows that are no whole vectors or words, and N that is no whole strip."""
    depth = blocks * BLOCK_LAYOUTS[name].elements
    for rows, n, dtype in ((1, 35, "float16"), (7, 300, "bfloat16"), (13, 17, "float16")):
        q, x = of_bytes(name, n, depth), normal((rows, depth), dtype)
        y = cq.linear(gpu.asarray(x), q.to("cuda"), out_dtype="float32").get()
        assert Expected.of(x, q).admits(y, depth, on_gpu=True), (rows, n)


@pytest.mark.parametrize("name", ["q4_1", "q5_1", "q2_k", "q4_k", "q5_k"])
def test_subnormal_operands_are_exact(name, gpu):
    """Codes with minimums are subnormal float16 in the tensor cores, and so may x be."""
    q = of_bytes(name, 256, 256, seed=1)
    x = (np.eye(256) * 2.0**-24).astype(np.float16)
    for first in range(0, 256, 16):
        y = cq.linear(gpu.asarray(x[first : first + 16]), q.to("cuda"), out_dtype="float32").get()
        assert Expected.of(x[first : first + 16], q).admits(y, 0)


@pytest.mark.parametrize("case", LIES, ids=str)
def test_x_lies_anywhere(case, gpu):
    x = LAYOUTS[case.layout].view(gpu.asarray(case.base), case.x.shape)
    y = cq.linear(x, case.weight.to("cuda"), out_dtype="float32").get()
    assert Expected.of(case.x, case.weight).admits(y, case.shape[1], on_gpu=True)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("rows", [3, 12])
def test_epilogues(rows, activation, gpu):
    """Each function is within a few ulp of NumPy's, on the same sums."""
    q, moved = Case("q4_k", shape=(520, 1024)).weight.to("cuda"), normal((rows, 1024), "bfloat16")
    moved = gpu.asarray(moved)
    sums = cq.linear(moved, q, out_dtype="float32").get()
    bias, residual = normal((520,), "bfloat16"), normal((rows, 520), "float32")
    wanted = finished(sums, bias, activation, residual)
    given = {"activation": activation, "residual": gpu.asarray(residual)}
    y = cq.linear(moved, q, gpu.asarray(bias), out_dtype="float32", **given).get()
    off = 8 * UNIT * np.maximum(np.abs(finished(sums, bias)), 1)
    assert (np.abs(y - wanted) <= off + UNIT * (np.abs(wanted) + off) + UNIT).all()


@pytest.mark.parametrize("rows", [1, 8, 12])
@pytest.mark.parametrize(("name", "dtype"), GATED)
def test_swiglu(name, dtype, rows, gpu):
    gate = Case(name, shape=(1024, 4096)).weight
    up = cq.quantize(normal((1024, 4096), seed=5), cq.get_format(name))
    x = normal((rows, 4096), dtype)
    true, bound = swiglu_bound(x, gate, up, 36 * (4096 // 16) + 24)
    y = cq.swiglu(gpu.asarray(x), gate.to("cuda"), up.to("cuda")).get()
    assert (np.abs(values(y) - true) <= bound).all()
