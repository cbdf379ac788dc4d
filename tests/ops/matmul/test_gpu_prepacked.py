"""Products with prepacked weights on a GPU, by the stream and Hopper kernels, against float64.

Capture, streams and waiting are tested with those of all products in test_gpu_matmul_streams.py.
"""

from typing import Any

import numpy as np
import pytest
from emulator import Recorder
from fragment_products import BLOCKS, OPTIONS, TAILS, TYPES, VIEWS, Case, Expected, unit_of
from gpu_products import compile_together
from kernel_arrays import LAYOUTS, WRITABLE
from oracle import DTYPES, bits_equal
from prepack_cases import LAID
from products import Products, finished, normal, values, weight
from stream_products import LARGE, ROW_GROUPS, check_columns, check_large_scales

import cuquant as cq
from cuquant.array.fragments import FRAGMENTS_LAYOUT, takes
from cuquant.ops.matmul import hopper_tiles as tiles
from cuquant.ops.matmul.choose import choose
from cuquant.ops.matmul.problem import Problem

pytestmark = pytest.mark.gpu

F32 = np.float32
ROWS = (1, 5, 16, 17, 40, 130, 300)
SHAPE = (1000, 4096)
SMALL = [*TAILS, *BLOCKS, *OPTIONS]
RAW = ("nf4", "int4", "uint4", "int8", "dynamic8", "fp8_e4m3", "int2", "mxfp4", "nvfp4", "k3")


@pytest.fixture(scope="module")
def device(gpu):
    """Architecture and multiprocessors."""
    made = gpu.cuda.Device()
    return int(made.compute_capability), made.attributes["MultiProcessorCount"]


@pytest.fixture(scope="module", autouse=True)
def compiled(device):
    """The programs of all formats, by all processors together."""
    arch, multiprocessors = device
    recorder = Recorder(multiprocessors, arch)
    run = Products(recorder)
    for name in LAID:
        p = cq.prepack(Case(name, shape=SHAPE).weight)
        for dtype in TYPES:
            for rows in ROWS:
                run(cq.linear, np.zeros((rows, SHAPE[1]), DTYPES[dtype]), p)
    compile_together(recorder.programs, arch)


def expect(
    x: np.ndarray, q: cq.QuantArray, device: tuple[int, int], gated: bool = False
) -> Expected:
    """What the kernel that the rule names may give."""
    aligned = x.strides[0] % 16 == 0
    sizes, dtype = (len(x), q.shape[0], q.shape[1]), x.dtype.name
    problem = Problem(*sizes, q.format, FRAGMENTS_LAYOUT, dtype, aligned, *device, gated=gated)
    return Expected.of(x, q, unit_of(x, q) if choose(problem) == "hopper" else None)


def there(p: cq.PackedWeight) -> cq.PackedWeight:
    return p.to("cuda")


@pytest.fixture
def by_rows(gpu):
    """linear of a weight that is not prepacked."""
    return lambda x, q: cq.linear(gpu.asarray(x), q.to("cuda"), out_dtype="float32").get()


# ---- every format -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", LAID)
def test_every_format(name, dtype, gpu, device):
    """Rows of x for each kind of tile; and every run gives the same bits."""
    q = Case(name, shape=SHAPE).weight
    p, x = there(cq.prepack(q)), normal((max(ROWS), SHAPE[1]), dtype)
    for rows in ROWS:
        moved = gpu.asarray(x[:rows])
        runs = [cq.linear(moved, p, out_dtype="float32").get() for _ in range(3)]
        assert all(bits_equal(run, runs[0]) for run in runs)
        wanted = expect(x[:rows], q, device)
        assert wanted.admits(runs[0], SHAPE[1], on_gpu=True), rows
        assert wanted.admits(cq.linear(moved, p).get(), SHAPE[1], on_gpu=True), rows


@pytest.mark.parametrize("rows", [3, 24])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_shapes_blocks_and_options(case, rows, gpu, device):
    """Rows of x that are no whole vectors go to matmul/stream.cu, however many they are."""
    q, depth = case.weight, case.shape[1]
    x = normal((rows, depth), case.dtype)
    y = cq.linear(gpu.asarray(x), there(cq.prepack(q)), out_dtype="float32").get()
    assert expect(x, q, device).admits(y, depth, on_gpu=True)


@pytest.mark.parametrize("case", VIEWS, ids=str)
def test_x_lies_anywhere(case, gpu):
    x = LAYOUTS[case.layout].view(gpu.asarray(case.base), case.x.shape)
    y = cq.linear(x, there(cq.prepack(case.weight)), out_dtype="float32").get()
    assert Expected.of(case.x, case.weight).admits(y, case.shape[1], on_gpu=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 9, 16])
def test_weights_that_are_not_prepacked(rows, dtype, gpu):
    """Those whose rows matmul/stream.cu reads as they lie."""
    for name in RAW:
        q, x = Case(name, shape=SHAPE).weight, normal((rows, SHAPE[1]), dtype)
        y = cq.linear(gpu.asarray(x), q.to("cuda"), out_dtype="float32").get()
        assert Expected.of(x, q).admits(y, SHAPE[1], on_gpu=True), name


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "block"), ROW_GROUPS)
def test_rows_with_several_groups_in_a_unit(name, block, dtype, by_rows):
    sizes = ((1, SHAPE), (3, (35, 704)), (8, SHAPE), (13, (70, 1280)))
    for rows, shape in sizes:
        case = Case(name, dtype, rows, shape, options=(("block_size", block),))
        y = by_rows(case.x, case.weight)
        assert Expected.of(case.x, case.weight).admits(y, shape[1], on_gpu=True), rows


@pytest.mark.sanitize
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_products_beyond_float16_are_not_lost(case, by_rows):
    check_large_scales(by_rows, case, on_gpu=True)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_one_column_of_x_gives_weights_as_they_are(case, by_rows):
    check_columns(by_rows, case)


@pytest.mark.parametrize(
    ("name", "dtype", "columns", "depth"),
    [
        ("nf4", "float16", 5120, 13824),
        ("int4", "bfloat16", 5120, 13824),
        ("q4_k", "float16", 5120, 13824),
        ("int8", "bfloat16", 2112, 7168),
        ("uint4", "float16", 28672, 520),
    ],
)
def test_blocks_that_share_tiles(name, dtype, columns, depth, gpu, device):
    """Each time with the same sums; in graphs too, whose tickets come again."""
    q = Case(name, shape=(columns, depth)).weight
    p, x = there(cq.prepack(q)), normal((300, depth), dtype)
    for rows in (20, 40, 64, 90, 128, 160, 192, 256, 300):
        problem = Problem(rows, *q.shape, q.format, FRAGMENTS_LAYOUT, dtype, True, *device)
        shape = tiles.shape_of(problem)
        assert device != (90, 132) or columns > 20000 or shape.streamed or shape.split > 1, rows
        wanted, moved = expect(x[:rows], q, device), gpu.asarray(x[:rows])
        y = cq.linear(moved, p, out_dtype="float32").get()
        assert wanted.admits(y, depth, on_gpu=True), rows
        assert wanted.admits(cq.linear(moved, p).get(), depth, on_gpu=True), rows
        out = gpu.empty((rows, columns), "float32")
        stream = gpu.cuda.Stream(non_blocking=True)
        gpu.cuda.runtime.deviceSynchronize()
        with stream:
            cq.linear(moved, p, out=out)  # gets the stream's workspace
            stream.begin_capture()
            cq.linear(moved, p, out=out)
            graph = stream.end_capture()
            for _ in range(20):
                out.fill(0)
                graph.launch(stream)
                assert bits_equal(out.get(stream), y), rows


@pytest.mark.parametrize("rows", [140, 300, 400, 1290])
@pytest.mark.parametrize(
    ("name", "dtype", "depth"),
    [("int4", "float16", 520), ("nf4", "bfloat16", 520), ("q4_k", "float16", 1024)],
)
def test_tiles_of_any_rows_of_x(name, dtype, depth, rows, gpu, device):
    """Also of several tiles, the last ones of which are not whole."""
    q, x = Case(name, shape=(8200, depth)).weight, normal((rows, depth), dtype)
    problem = Problem(rows, *q.shape, q.format, FRAGMENTS_LAYOUT, dtype, True, *device)
    assert rows < 300 or device != (90, 132) or tiles.shape_of(problem).tokens in tiles.MANY
    wanted, moved, p = expect(x, q, device), gpu.asarray(x), there(cq.prepack(q))
    assert wanted.admits(cq.linear(moved, p, out_dtype="float32").get(), depth, on_gpu=True)
    assert wanted.admits(cq.linear(moved, p).get(), depth, on_gpu=True)


# ---- what happens to the sums -------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("rows", [3, 40, 300])
def test_epilogues(rows, activation, gpu):
    """Each function is within a few ulp of NumPy's, on the same sums; then one rounding."""
    p, x = there(cq.prepack(weight("int4", (520, 1024)))), normal((rows, 1024), "bfloat16")
    moved = gpu.asarray(x)
    sums = cq.linear(moved, p, out_dtype="float32").get()
    for bias, residual in (
        (None, None),
        (normal((520,), "bfloat16"), None),
        (normal((520,)), normal((rows, 520), "float16")),
    ):
        wanted = finished(sums, bias, activation, residual)
        off = 8 * 2.0**-24 * np.maximum(np.abs(finished(sums, bias)), 1)
        added = [None if part is None else gpu.asarray(part) for part in (bias, residual)]
        for dtype, ulp in (("float32", 0), ("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
            y = cq.linear(
                moved, p, added[0], activation=activation, residual=added[1], out_dtype=dtype
            )
            assert y.dtype == DTYPES[dtype]
            bound = off + ulp * (np.abs(wanted) + off) + 2.0**-24
            assert (np.abs(values(y.get()) - wanted) <= bound).all()


@pytest.mark.parametrize("layout", ["whole", *WRITABLE])
@pytest.mark.parametrize("rows", [3, 40, 130])
def test_out_lies_anywhere(rows, layout, gpu, device):
    """What lies between and beside its elements is left alone."""
    q, x = weight("nf4", (72, 256)), normal((rows, 256), "float16")
    where, wanted = LAYOUTS[layout], expect(x, q, device)
    for dtype in DTYPES.values():
        base = gpu.full(where.base((rows, 72)), 7, dtype)
        out = where.view(base, (rows, 72))
        cq.linear(gpu.asarray(x), there(cq.prepack(q)), out=out)
        assert wanted.admits(out.get(), 256, on_gpu=True)
        out[...] = 7
        assert (base.get() == 7).all()


@pytest.mark.parametrize("rows", [3, 16, 40, 300])
def test_swiglu(rows, gpu, device):
    """|silu'| < 1.1 and |silu(a)| <= |a|."""
    for name in ("nf4", "int4", "q4_k"):
        gate, up = Case(name, shape=SHAPE).weight, cq.quantize(normal(SHAPE, seed=5), name)
        x = normal((rows, SHAPE[1]), "float16")
        packed = [there(cq.prepack(q)) for q in (gate, up)]
        y = cq.swiglu(gpu.asarray(x), *packed).get()
        a, b = (expect(x, q, device, gated=True) for q in (gate, up))
        with np.errstate(over="ignore"):
            true = a.sums / (1 + np.exp(-a.sums)) * b.sums
        roundings = 2.0**-24 * (36 * SHAPE[1] / 16 + 32)
        first, second = (side.off + roundings * (side.size + side.off) for side in (a, b))
        bound = 1.1 * first * (np.abs(b.sums) + second) + np.abs(a.sums) * second
        bound += (8 * 2.0**-24 + 2.0**-11) * (np.abs(true) + bound) + 2.0**-25
        assert (np.abs(values(y) - true) <= bound).all()


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("name", ["nf4", "uint4", "mxfp4", "int8"])
def test_a_scale_that_is_nan_hurts_its_row_alone(name, rows, gpu):
    q, x = weight(name, (70, 264)), normal((rows, 264), "float16")
    scale = q.arrays()["scale"].copy()
    scale[4, 0], scale[61, -1] = (255, 255) if scale.dtype == np.uint8 else (np.nan, np.nan)
    hurt = cq.QuantArray(q.format, q.shape, q.dtype, {**q.arrays(), "scale": scale}, q.axes)
    moved = gpu.asarray(x)
    y, clean = (cq.linear(moved, there(cq.prepack(w))).get() for w in (hurt, q))
    assert np.isnan(values(y)[:, [4, 61]]).all()
    others = np.delete(np.arange(70), [4, 61])
    assert bits_equal(y[:, others], clean[:, others]) and np.isfinite(values(clean)).all()


# ---- large weights ------------------------------------------------------------------------------


def codes(gpu: Any, shape: tuple[int, ...]) -> Any:
    """Bytes that a GPU makes up."""
    packed = gpu.empty(shape, gpu.uint8)
    mixed = "y = (unsigned char)((i * 0x9E3779B97F4A7C15ull) >> 40)"
    gpu.ElementwiseKernel("", "uint8 y", mixed, "fill_with_codes")(packed)
    return packed


@pytest.mark.parametrize("rows", [1, 40, 300])
def test_more_than_2_to_the_31_weights(rows, gpu, device):
    """The first and last rows of a weight of 2.3e9 elements, and those of the middle."""
    n, k = 70_000, 32_768
    if gpu.cuda.runtime.memGetInfo()[0] < 6 << 30:
        pytest.skip("the GPU has too little free memory")
    fmt = cq.get_format("int4")
    assert takes(fmt, (n, k))
    scale = gpu.asarray(np.abs(normal((n, k // 128))).astype(np.float16))
    parts = {"packed": codes(gpu, (n, k // 2)), "scale": scale}
    p = cq.prepack(cq.QuantArray(fmt, (n, k), np.dtype(np.float16), parts, (0, 1)))
    x = normal((rows, k), "float16")
    y = cq.linear(gpu.asarray(x), p, out_dtype="float32")
    for part in (slice(0, 40), slice(n // 2, n // 2 + 40), slice(n - 40, n)):
        own = {name: array[part].get() for name, array in parts.items()}
        few = cq.QuantArray(fmt, (40, k), np.dtype(np.float16), own, (0, 1))
        assert expect(x, few, device).admits(y[:, part].get(), k, on_gpu=True)


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_x_that_shared_memory_does_not_hold(rows, gpu, device):
    """Nor that of two blocks."""
    q, x = weight("int4", (40, 1 << 18)), normal((rows, 1 << 18), "float16")
    y = cq.linear(gpu.asarray(x), there(cq.prepack(q)), out_dtype="float32").get()
    unit = 1.0 if device[0] == 90 else None
    assert Expected.of(x, q, unit).admits(y, 1 << 18, on_gpu=True)
