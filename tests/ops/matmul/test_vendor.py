"""Products by a decoded weight and the vendor's GEMM against float64, on the CPU: the kernels under
the emulator, cuBLAS by functions on NumPy that take what its own take. Itself: test_cublas.py."""

import gc
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fake_gpu
import numpy as np
import pytest
from emulator import Emulator, Recorder, compiler
from emulator.cublas import Library
from fragment_products import AXES, Case, with_scale
from kernel_arrays import LAYOUTS, WRITABLE
from kernel_cases import NAMES, kind_of
from oracle import DTYPES, bits_equal
from prepack_cases import LAID
from products import ULP, UNIT, Products, finished, normal, values, weight
from samples import sampled, selected
from vendor_products import F32, by_vendor, expect, unit_of

import cuquant as cq
from cuquant import interop
from cuquant.gpu import arrays as gpu
from cuquant.gpu import cublas, jit, workspace
from cuquant.ops.matmul import choose as product
from cuquant.ops.matmul import vendor
from cuquant.reference import ACTIVATIONS

REAL, HAS_VENDOR = product.choose, gpu.Gpu.has_vendor
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

CASES = [
    *(Case(name, list(DTYPES)[i % 3], 5) for i, name in enumerate(NAMES)),
    *(Case(name, dtype, 3) for name in ("int4", "nf4", "uint8", "q4_k") for dtype in DTYPES),
    *(Case("nf4", "float16", m, (n, k)) for m, n, k in [(1, 1, 1), (17, 33, 131), (2, 70, 8)]),
    *(
        Case(name, "bfloat16", 4, (35, 200), options=options)
        for name, options in (
            ("uint4", (("block_size", 24),)),
            ("int4", (("block_size", (16, 8)),)),
            ("nf4", (("double_quant", True),)),
            ("k5", (("packing", "word"),)),
            ("fp8_e4m3", (("block_size", "tensor"),)),
            ("uint4", (("offset", "min"), ("block_size", 24))),
            ("uint4", (("offset", "min"), ("scale_dtype", "bfloat16"))),
        )
    ),
    *(Case("int4", "float16", 5, (35, 200), layout) for layout in ("rows", "misaligned")),
    Case("int4", "float32", 1, (9, 64), "repeated rows"),
]
PREPACKED = [
    *(Case(name, list(DTYPES)[i % 3], 5, (35, 256)) for i, name in enumerate(LAID)),
    *(Case("nf4", dtype, 3, (35, 131)) for dtype in DTYPES),
    Case("q5_1", "float16", 5, (35, 32)),
    *(Case("q6_k", "bfloat16", 2, (n, 256)) for n in (1, 8, 17, 48)),
    *(
        Case(name, "float16", 4, (40, 300), options=options)
        for name, options in (
            ("uint4", (("block_size", 16),)),
            ("uint3", (("block_size", 32),)),
            ("nf4", (("block_size", 192),)),
            ("nf4", (("double_quant", True),)),
            ("int4", (("block_size", (128, 128)),)),
            ("uint8", (("block_size", (8, 32)),)),
            ("k7", (("block_size", "tensor"),)),
            ("fp8_e5m2", (("block_size", "row"),)),
            ("uint4", (("offset", "min"), ("block_size", 16))),
            ("uint8", (("offset", "min"), ("scale_dtype", "bfloat16"))),
            ("uint3", (("offset", "min"), ("block_size", (8, 64)), ("scale_dtype", "float32"))),
            ("int4", (("scale_dtype", "bfloat16"),)),
            ("fp8_e4m3", (("block_size", "row"), ("scale_dtype", "e8m0"))),
        )
    ),
]
SLABS = [("nf4", (300, 64)), ("q4_0", (513, 32)), ("nvfp4", (256, 72))]  # of 256 rows or of x


def small_slabs() -> Any:
    """Workspaces are so small that 256 rows of weights and of x are multiplied at a time."""
    divide = vendor.divide.__wrapped__
    return mock.patch.multiple(vendor, DECODED=1, SUMS=1, divide=divide)


UNIT_TEST = "test_the_unit_brings_the_largest_weight_into_the_range_of_float16"


@pytest.fixture(scope="module")
def built(request) -> None:
    """The programs of the tests that run, compiled together."""
    recorder = Recorder(vendor=True)
    run = Products(recorder)
    with by_vendor():
        for given in selected(request, "test_weights_by_rows"):
            run(cq.linear, given["case"].x, given["case"].weight, activation="relu")
        for given in selected(request, "test_prepacked_weights"):
            for w in (given["case"].weight, cq.prepack(given["case"].weight)):
                run(cq.linear, given["case"].x, w)
        for given in selected(request, UNIT_TEST):
            q = weight(given["name"], (9, 256), **given["options"])
            run(cq.linear, normal((3, 256), "float16"), cq.prepack(q) if given["laid_out"] else q)
        for name in ("nf4", "mxfp4", "int8", "nvfp4"):
            q = weight(name, (9, 64))
            run(cq.linear, normal((3, 64), "float16"), q)
            run(cq.linear, normal((3, 64), "float16"), cq.prepack(q), activation="relu")
        for name, shape in SLABS:
            q = weight(name, shape)
            run(cq.linear, normal((3, shape[1]), "float16"), q)
            run(cq.linear, normal((3, shape[1]), "float16"), cq.prepack(q))
    files = {program.file for program in recorder.programs}
    assert files == {
        "matmul/vendor_rows.cu",
        "matmul/vendor_fragments.cu",
        "matmul/vendor_finish.cu",
        "matmul/float16_range.cu",
    }
    Emulator().build(recorder.programs)


@pytest.fixture
def run(built) -> Iterator[Products]:
    with by_vendor():
        yield Products(Emulator(arch=80, vendor=True))


# ---- the unit -----------------------------------------------------------------------------------

UNITS = [
    ("nf4", {}), ("nf4", {"double_quant": True}), ("int8", {}), ("mxfp8", {}), ("fp8_e5m2", {}),
    ("nvfp4", {}), ("int4", {}), ("uint8", {}), ("fp6_e3m2", {}), ("k3", {}), ("q4_0", {}),
    ("q4_1", {}), ("q4_k", {}), ("q6_k", {}), ("iq4_xs", {}), ("ggml_mxfp4", {}),
    ("uint4", {"offset": "min"}), ("uint8", {"offset": "min", "scale_dtype": "bfloat16"}),
    ("int4", {"scale_dtype": "bfloat16"}), ("fp8_e4m3", {"block_size": 64, "scale_dtype": "e8m0"}),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("laid_out", [False, True], ids=["rows", "prepacked"])
@pytest.mark.parametrize(
    ("name", "options", "size"),
    sampled(
        [(*unit, size) for unit in UNITS for size in (1e-30, 1e-9, 1.0, 3e4, 1e30, 0.0)],
        lambda name, options, _: (name, *options),
        lambda *given: given[2],
    ),
    ids=str,
)
def test_the_unit_brings_the_largest_weight_into_the_range_of_float16(
    name, options, size, laid_out, built
):
    """And is a power of two, which no rounding knows of; of scales that float16 holds too."""
    fmt = cq.get_format(name, **options)
    if fmt.scale is not None and fmt.scale.dtype == "float16":
        size = float(np.clip(size, 0 if size == 0 else 1e-2, 1e4))
    q = cq.quantize(normal((9, 256)) * np.float32(size), fmt)
    unit = unit_of(cq.prepack(q) if laid_out else q)
    assert math.frexp(unit)[0] == 0.5
    largest = float(np.abs(values(q)).max()) * unit
    # Codes and the fields of K-quants need not reach their largest numbers.
    room = 448 if name == "nvfp4" else 64 if fmt.is_blocks else 4
    assert size == 0 or 2.0**13 / room <= largest < 2.0**14


@needs_compiler
def test_units_see_through_scales_that_are_not_finite(built):
    q = weight("nf4", (9, 128))
    scale = q.arrays()["scale"].copy()
    scale[0], scale[1] = np.nan, np.inf
    rest = cq.quantize(q.dequantize()[2:], "nf4")
    assert unit_of(with_scale(q, scale)) == unit_of(rest)


@needs_compiler
def test_the_unit_of_more_scales_than_a_launch_has_threads(built):
    """Wherever the largest one is."""
    scale = np.full(70_001, 2.0**-20, F32)
    q = cq.quantize(np.ones((70_001, 1), F32), "int8")
    for place in (0, 511, 65_535, 65_536, 70_000):
        own = scale.copy()
        own[place] = 2.0**9
        large = unit_of(with_scale(q, own.reshape(-1, 1)))
        assert large * 2.0**29 == unit_of(with_scale(q, scale.reshape(-1, 1)))


# ---- linear -------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    "case", sampled(CASES, lambda case: kind_of(case.format), *AXES[1:]), ids=str
)
def test_weights_by_rows(case, run):
    check(case, case.weight, run)


@needs_compiler
@pytest.mark.parametrize(
    "case", sampled(PREPACKED, lambda case: kind_of(case.format), *AXES[1:]), ids=str
)
def test_prepacked_weights(case, run):
    """They are decoded as they lie, and to the same bits."""
    p = cq.prepack(case.weight)
    assert p.layout == "fragments/1"
    check(case, p, run)
    rows, strips = (run(cq.linear, case.x, w, out_dtype="float32") for w in (case.weight, p))
    assert bits_equal(rows, strips)


def check(case: Case, w: Any, run: Products) -> None:
    """Straight from the GEMM, where out has x's dtype or is float32; and through an epilogue."""
    wanted, depth = expect(case.x, case.weight), case.shape[1]
    for dtype in (None, *DTYPES):
        y = run(cq.linear, case.x, w, out_dtype=dtype)
        assert y.dtype == (case.x.dtype if dtype is None else DTYPES[dtype])
        assert y.shape == wanted.sums.shape and wanted.admits(y, depth)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoded_weights_are_what_dequantize_gives(dtype, run):
    """Where x picks them one by one; scales of float16 need no power of two."""
    for name in ("int4", "uint8", "q5_k", "mxfp4", "nf4"):
        q = weight(name, (33, 256))
        wide = dtype == "float16" and name in ("mxfp4", "nf4")
        x = np.eye(256, dtype=F32).astype(DTYPES[dtype])
        wanted = q.dequantize(dtype=dtype).astype(F32).T
        for w in (q, cq.prepack(q)):
            y = run(cq.linear, x, w, out_dtype="float32")
            assert np.allclose(y, wanted, rtol=2**-10, atol=0) if wide else (y == wanted).all()


@needs_compiler
@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 3e4, 1e30])
@pytest.mark.parametrize("name", ["nf4", "mxfp4", "int8", "nvfp4"])
def test_small_and_large_scales_survive_float16(name, size, run):
    """int8's are float32; a power of two brings the largest weight near 1."""
    q = cq.quantize(normal((9, 64)) * F32(size), name)
    x = normal((3, 64), "float16")
    for w in (q, cq.prepack(q)):
        y = run(cq.linear, x, w, out_dtype="float32")
        assert expect(x, q).admits(y, 64) and np.abs(y).max() > size / 10


@needs_compiler
def test_what_is_not_finite_goes_through(run):
    q, x = weight("nf4", (35, 128)), normal((5, 128), "bfloat16")
    scale = q.arrays()["scale"].copy()
    scale[4, 0], scale[21, -1] = np.nan, np.nan
    x[1, 3], x[3, 127] = np.nan, np.inf
    broken = cq.QuantArray(q.format, q.shape, q.dtype, {**q.arrays(), "scale": scale}, q.axes)
    wanted = cq.linear(x, broken, out_dtype="float32")
    for w in (broken, cq.prepack(broken)):
        y = run(cq.linear, x, w, out_dtype="float32")
        assert bits_equal(np.isnan(y), np.isnan(wanted)) and np.isfinite(y).any()
        assert (y[np.isinf(wanted)] == wanted[np.isinf(wanted)]).all()


@needs_compiler
def test_weights_beyond_float16_are_multiplied_as_they_are(run):
    """Also where scales are float16 themselves."""
    q = cq.quantize(np.full((3, 128), 4e5, F32), "int4")
    assert values(q).min() > 3e5
    x = np.zeros((2, 128), np.float16)
    x[:, 5] = 1
    for w in (q, cq.prepack(q)):
        y = run(cq.linear, x, w, out_dtype="float32")
        assert (np.abs(y - values(q)[:, 5]) <= ULP["float16"] * values(q)[:, 5]).all()


@needs_compiler
def test_empty_products_and_those_without_columns(run):
    q = weight("int4", (5, 64))
    assert run(cq.linear, np.ones((0, 64), F32), q).shape == (0, 5)
    empty = cq.quantize(np.ones((5, 0), F32), "int4")
    with mock.patch.object(product, "choose", REAL):  # the rule leaves K = 0 to others
        assert (run(cq.linear, np.ones((40, 0), F32), empty) == 0).all()


# ---- what happens to the sums -------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_epilogues(run, activation):
    """Each function is within a few ulp of NumPy's, on the same sums; then one rounding."""
    q, x = weight("int4", (35, 200)), normal((5, 200), "float16")
    sums = run(cq.linear, x, q, out_dtype="float32")
    names = list(DTYPES)
    for i, (with_bias, with_residual) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        bias = normal((35,), names[i % 3]) if with_bias else None
        residual = normal((5, 70), names[(i + 1) % 3])[:, ::2] if with_residual else None
        wanted = finished(sums, bias, activation, residual)
        off = 8 * UNIT * np.maximum(np.abs(finished(sums, bias)), 1)
        for dtype in names:
            y = run(
                cq.linear, x, q, bias, activation=activation, residual=residual, out_dtype=dtype
            )
            bound = off + ULP[dtype] * (np.abs(wanted) + off) + UNIT
            assert y.dtype == DTYPES[dtype] and (np.abs(values(y) - wanted) <= bound).all()


@needs_compiler
@pytest.mark.parametrize("layout", ["whole", *WRITABLE])
def test_out_lies_anywhere(run, layout):
    """What lies between and beside its elements is left alone. N is no multiple of 4."""
    q, x, where = weight("int4", (35, 200)), normal((5, 200), "float16"), LAYOUTS[layout]
    for dtype in DTYPES.values():
        base = run.backend.empty(where.base((5, 35)), dtype)
        base[...] = 7
        out = where.view(base, (5, 35))
        assert run(cq.linear, x, q, out=out) is out
        assert expect(x, q).admits(np.array(out), 200)
        out[...] = 7
        assert (base == 7).all()


@needs_compiler
@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize(("name", "shape"), SLABS)
def test_slabs(name, shape, prepacked, run):
    """Of weights and of x: each has its own part of bias, residual and out."""
    q, x = weight(name, shape), normal((270, shape[1]), "float16")
    w = cq.prepack(q) if prepacked else q
    bias, residual = normal(shape[:1], "float16"), normal((270, shape[0]))
    whole = run(cq.linear, x, w, out_dtype="float32")
    ended = run(cq.linear, x, w, bias, activation="silu", residual=residual)
    gated = run(cq.swiglu, x, w, w)
    with small_slabs():
        gemms = run.backend._cublas._library.calls
        del gemms[:]
        assert bits_equal(run(cq.linear, x, w, out_dtype="float32"), whole)
        assert len(gemms) == -(-shape[0] // 256)
        again = run(cq.linear, x, w, bias, activation="silu", residual=residual)
        assert bits_equal(again, ended) and len(gemms) == 3 * -(-shape[0] // 256)
        assert bits_equal(run(cq.swiglu, x, w, w), gated)
    assert expect(x, q).admits(whole, shape[1])


# ---- gated units and matmul ---------------------------------------------------------------------


def close_to(y: np.ndarray, wanted: np.ndarray) -> bool:
    return np.allclose(values(y), wanted, rtol=4e-3, atol=4e-3)


@needs_compiler
def test_swiglu_of_any_two_weights(run):
    """Of two formats and layouts; out may have strides."""
    gate, up = weight("nf4", (35, 256)), weight("q4_0", (35, 256))
    x = normal((5, 256), "float16")
    x *= np.float16(0.1)
    a, b = expect(x, gate).sums, expect(x, up).sums
    wanted = a / (1 + np.exp(-a)) * b
    for pair in ((gate, up), (cq.prepack(gate), up), (cq.prepack(gate), cq.prepack(up))):
        out = run.backend.empty((5, 70), DTYPES["float16"])[:, ::2]
        assert close_to(run(cq.swiglu, x, *pair), wanted)
        assert close_to(run(cq.swiglu, x, *pair, out=out), wanted)


@needs_compiler
def test_matmul_by_a_transposed_weight(run):
    q, x = weight("int4", (35, 200)), normal((2, 3, 200), "float16")
    y = run(lambda a, w: cq.matmul(a, w.T), x, q)
    assert bits_equal(y, run(cq.linear, x, q)) and y.shape == (2, 3, 35)


# ---- the rule on a backend ----------------------------------------------------------------------


@needs_compiler
def test_without_the_library_another_kernel_multiplies(built):
    """The same problem, on a backend that has it and on one that has not."""
    q, x = weight("int4", (35, 200)), normal((20, 200), "float16")
    asked = []

    def choose(problem: Any) -> str:
        asked.append(problem.vendor)
        return "vendor" if problem.vendor else "plain_tiles"

    with mock.patch.object(product, "choose", choose):
        for vendor_is_there in (True, False):
            run = Products(Recorder(vendor=vendor_is_there))
            run(cq.linear, x, q)
            files = {program.file for program in run.backend.programs}
            assert files == (
                {"matmul/vendor_rows.cu", "matmul/float16_range.cu"}
                if vendor_is_there
                else {"matmul/any.cu"}
            )
    assert asked == [True, True, False]


@pytest.mark.parametrize("kind", ["cupy", "torch"])
@needs_compiler
def test_arrays_of_libraries(kind, monkeypatch, built):
    """With a device that is not there: also a plan that is found again."""
    if kind == "torch" and fake_gpu.torch is None:
        pytest.skip("no torch")
    backend = Emulator(arch=80, vendor=True)
    to = install(kind, monkeypatch, backend)
    q, x = weight("int4", (35, 256)), normal((5, 256), "float16")
    parts = {name: to(part) for name, part in q.arrays().items()}
    moved = cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)
    there, bias = to(x), to(normal((35,)))
    with by_vendor():
        first, ended = cq.linear(there, moved), cq.linear(there, moved, bias)
        with mock.patch.object(cq.ops.matmul.on_gpu, "linear", None):  # by the plan
            again = cq.linear(there, moved)
    assert bits_equal(interop.to_host(again), interop.to_host(first))
    wanted = expect(x, q)
    assert wanted.admits(interop.to_host(first), 256)
    assert not bits_equal(interop.to_host(ended), interop.to_host(first))
    assert len(workspace._kept) == 1
    del moved, parts
    gc.collect()
    workspace.release()
    assert not workspace._kept


def install(kind: str, monkeypatch: pytest.MonkeyPatch, backend: Emulator) -> Any:
    """fake_gpu's, with cuBLAS."""
    to = fake_gpu.install(kind, monkeypatch, backend)
    vendors = {0: cublas.Cublas(Library(alignment=256 if kind == "cupy" else 16))}
    monkeypatch.setattr(gpu, "_vendors", vendors)
    monkeypatch.setattr(gpu.Gpu, "has_vendor", HAS_VENDOR)
    monkeypatch.setattr(jit, "is_capturing", lambda stream: False)
    monkeypatch.setattr(workspace, "_kept", {})
    return to


# ---- how a product is cut -----------------------------------------------------------------------


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("count", [1, 2])
def test_divisions_fit_what_they_are_given(itemsize, count):
    for rows in (17, 1000, 70_000, 10**9):
        for columns, depth in ((1, 1), (4096, 4096), (128_256, 8192), (33, 10**6), (10**9, 9)):
            d = vendor.divide(rows, columns, depth, itemsize, count, 90)
            assert 0 < d.wide <= columns and 0 < d.tall <= rows
            assert d.pitch % 8 == 0 and d.sums_pitch % 4 == 0 and d.decoded % 256 == 0
            assert d.wide == columns or d.wide % 256 == 0
            assert d.tall == rows or d.tall % 256 == 0
            assert d.decoded >= d.wide * depth * itemsize and d.sums >= d.tall * d.wide * 4
            assert d.wide <= 256 or count * d.decoded <= vendor.DECODED
            assert count * d.sums <= vendor.SUMS
    usual = vendor.divide(4096, 14336, 4096, 2, 1, 90)
    assert usual.wide == 14336 and usual.decoded == 14336 * 4096 * 2


def test_endings_of_a_gemm():
    """Which results a GEMM stores itself."""
    plain = vendor.Ending(64, 0, 0, 40, 1, 0, 1, 0, 0, 0)
    assert plain.is_plain("float16", 5, 40) and not plain.is_plain("bfloat16", 5, 40)
    assert plain._replace(out_type=0).is_plain("bfloat16", 5, 40)
    assert not plain.is_plain("float16", 5, 41) and plain.is_plain("float16", 1, 41)
    for change in (
        {"bias": 8},
        {"residual": 8},
        {"activation": 1},
        {"out_column": 2},
        {"out_stride": 0},
        {"out_stride": 2**31},
    ):
        assert not plain._replace(**change).is_plain("float16", 5, 40)
