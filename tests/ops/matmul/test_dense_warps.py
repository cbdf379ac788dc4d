"""Products of two quantized arrays as codes, on the CPU under the emulator."""

from itertools import pairwise, product

import numpy as np
import pytest
from coded_products import CASES, check, pair
from emulator import Emulator, Recorder, compiler
from products import Products, finished, gamma, normal, values

import cuquant as cq
from cuquant.ops.matmul import coded_on_gpu, dense_warps, on_gpu
from cuquant.ops.matmul.check import Finish, Operand
from cuquant.ops.matmul.coded import codes_of
from cuquant.ops.matmul.experts import Rows

F32 = np.float32
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")


@pytest.fixture(scope="module")
def built() -> None:
    """The programs of the matrix, compiled together."""
    recorder = Recorder(arch=80)
    run = Products(recorder)
    for case in CASES:
        run(cq.linear, *pair(case))
    files = {program.file for program in recorder.programs}
    assert files == {"matmul/dense_warps.cu", "matmul/codes.cu"}
    Emulator().build(recorder.programs)


@pytest.fixture
def run(built) -> Products:
    return Products(Emulator(arch=80))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_the_matrix(case, run):
    x, w = pair(case)
    check(run(cq.linear, x, w), x, w)


def test_bits_are_multiplied_where_tensor_cores_do():
    bits = dense_warps.program_of(("bits", "bits"), dense_warps.TILES[0], 32, False)
    for arch, depth in product((75, 80, 89, 100), (128, 136)):
        recorder = Recorder(arch=arch)
        Products(recorder)(cq.linear, *pair(("int1", "int1", (4, 9, depth))))
        assert (bits in recorder.programs) == (80 <= arch < 100 and depth == 128)


@needs_compiler
@pytest.mark.parametrize(
    "first, second", [("int8", "int8"), ("uint8:row", "int8"), ("int4:row", "uint8:row")]
)
def test_integers_with_a_scale_a_row_are_exact(run, first, second):
    """(float(sum) * x's scale) * the weight's, to the bit, with the exact sum."""
    x, w = pair((first, second, (21, 37, 190)))
    sums = integers(x) @ integers(w).T
    scales = [np.asarray(q.scale, F32).reshape(-1) for q in (x, w)]
    wanted = sums.astype(np.int32).astype(F32) * scales[0][:, None] * scales[1][None, :]
    np.testing.assert_array_equal(run(cq.linear, x, w), wanted)


def integers(q: cq.QuantArray) -> np.ndarray:
    """int64: codes less what stands for 0."""
    point = 0 if q.zero_point is None else q.zero_point.astype(np.int64)
    offset = 0 if q.zero_point is not None else q.format.codec.offset
    return q.codes().astype(np.int64) - offset - point


@needs_compiler
def test_sums_wrap_at_32_bits(run):
    """K beyond 2^17 of the largest codes: int64 mod 2^32, as hardware has it."""
    depth = 140_000
    x = cq.quantize(
        np.full((1, depth), 255, F32), "uint8:row", scale=F32([[1]]), zero_point=np.uint8([[0]])
    )
    w = cq.quantize(
        np.full((2, depth), 255, F32),
        "uint8:row",
        scale=F32([[1], [1]]),
        zero_point=np.uint8([[0], [0]]),
    )
    wanted = np.int64(depth * 255 * 255).astype(np.int32)
    assert depth * 255 * 255 != wanted
    assert (run(cq.linear, x, w) == F32(wanted)).all()


@needs_compiler
@pytest.mark.parametrize("m", [1, 20])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_epilogue(m, activation, run):
    x, w = pair(("int8", "int8", (m, 37, 64)))
    bias, residual = normal((37,), "float16"), normal((m, 37), "bfloat16", seed=2)
    kept = {"bias": bias, "activation": activation, "residual": residual}
    y = run(cq.linear, x, w, **kept, out_dtype="float16")
    wanted = finished(values(x) @ values(w).T, bias, activation, residual)
    assert y.dtype == np.float16
    np.testing.assert_allclose(y.astype(np.float64), wanted, rtol=2e-3, atol=2e-3)


@needs_compiler
@pytest.mark.parametrize("formats", [("int8", "int8"), ("int8", "nf4")])
def test_int8_results_are_those_of_quantize(formats, run):
    """With a scale that is known, wherever the product is made; NaN is 0."""
    x, w = pair((*formats, (9, 37, 64)))
    bias = np.where(np.arange(37) == 5, np.nan, normal((37,))).astype(F32)
    y = run(cq.matmul, x, w.T, bias=bias, out_dtype="int8", out_scale=0.25)
    wide = run(cq.matmul, x, w.T, bias=bias)
    with np.errstate(invalid="ignore"):
        wanted = cq.quantize(wide.reshape(-1), "int8:tensor", scale=F32(0.25)).packed
    assert y.dtype == np.int8 and (y[:, 5] == 0).all()
    np.testing.assert_array_equal(y, wanted.reshape(y.shape))
    out = np.empty((9, 37), np.int8)
    assert run(cq.matmul, x, w.T, out_dtype="int8", out_scale=F32(0.25), out=out) is out


@needs_compiler
@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 5, 64), (2, 3, 9, 64)),
        ((4, 5, 64), (9, 64)),
        ((64,), (9, 64)),
        ((5, 64), (64,)),
        ((1, 5, 64), (3, 9, 64)),
    ],
)
def test_matmul_follows_numpy(shapes, run):
    x, w = cq.quantize(normal(shapes[0]), "int8"), cq.quantize(normal(shapes[1], seed=7), "int8")
    right = w if len(shapes[1]) == 1 else w.transpose(*range(len(shapes[1]) - 2), -1, -2)
    y = run(cq.matmul, x, right)
    wanted = np.matmul(values(x), values(right))
    assert y.shape == wanted.shape
    assert np.abs(y - wanted).max() <= 70 * gamma(64)


@needs_compiler
def test_results_go_where_out_lies(run):
    """Rows apart, columns apart, and a view of a larger array."""
    x, w = pair(("int8", "int8", (6, 10, 64)))
    wanted = run(cq.linear, x, w)
    for out in (
        np.zeros((6, 14), F32)[:, 2:12],
        np.zeros((10, 6), F32).T,
        np.zeros((6, 20), F32)[:, ::2],
    ):
        assert run(cq.linear, x, w, out=out) is out
        np.testing.assert_array_equal(out, wanted)


@needs_compiler
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_scales_that_are_not_finite_go_through(run, special):
    x, w = pair(("int8", "int8", (3, 9, 64)))
    x.components["scale"].flags.writeable = True
    x.components["scale"][1] = special
    y = run(cq.linear, x, w)
    assert np.isfinite(y[[0, 2]]).all() and not np.isfinite(y[1]).any()


@needs_compiler
@pytest.mark.parametrize("formats", [("mxfp8", "mxfp8"), ("int8:128", "int8:128")])
def test_products_of_scales_may_be_beyond_float32(run, formats):
    """As long as results are not: 0 times two large scales, and small scales times large ones."""
    x, w = np.zeros((2, 256), F32), np.zeros((3, 256), F32)
    x[0, :2], x[1, 0], w[0, 1:3], w[1, 0] = (4e22, 1e18), 1e22, (1e18, 4e22), 1e-30
    first, second = (cq.quantize(a, f) for a, f in zip((x, w), formats, strict=True))
    wanted = values(first).astype(np.float64) @ values(second).astype(np.float64).T
    np.testing.assert_allclose(run(cq.linear, first, second), wanted, rtol=1e-6)


@needs_compiler
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "int8:tensor", "fp8_e5m2:128", "int8:128"])
@pytest.mark.parametrize("sizes", [(1e36, 1e-30), (1e-30, 1e36), (3e-19, 3e-19), (1e-36, 1e30)])
def test_scales_may_be_far_apart(run, name, sizes):
    first, second = (
        cq.quantize(normal((2, 512)) * F32(size), name) for size in sizes
    )  # fmt: skip
    wanted = values(first).astype(np.float64) @ values(second).astype(np.float64).T
    size = np.abs(values(first)).astype(np.float64) @ np.abs(values(second)).astype(np.float64).T
    y = run(cq.linear, first, second)
    assert (np.abs(y - wanted) <= gamma(520) * size).all()


# ---- groups --------------------------------------------------------------------------------------

OFFSETS = ([0, 3, 3, 40, 57], [0, 0, 0, 0, 0], [5, 5, 20, 21, 50], [0, 57, 57, 57, 57])


@needs_compiler
@pytest.mark.parametrize(
    "formats",
    [("int8", "int8"), ("fp8_e4m3:128", "fp8_e4m3:128x128"), ("bf16", "int4"), ("int8", "nf4")],
)
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_offsets(run, formats, offsets):
    """Rows that no expert has are 0; so they are on the CPU."""
    x, w = normal((57, 256)), cq.quantize(normal((4, 150, 256), seed=8), formats[1])
    x = x.astype(np.float16) if formats[0] == "bf16" else cq.quantize(x, formats[0])
    y = run(cq.grouped_linear, x, w, offsets=np.array(offsets))
    wanted = np.zeros((57, 150))
    for expert, (first, end) in enumerate(pairwise(offsets)):
        wanted[first:end] = values(x)[first:end] @ values(w)[expert].T
    assert np.abs(y.astype(np.float64) - wanted).max() <= 0.2 if formats[0] == "bf16" else 1e-3
    on_cpu = cq.grouped_linear(x, w, offsets=offsets)
    np.testing.assert_allclose(on_cpu.astype(F32), y.astype(F32), atol=0.2)
    assert (y[: offsets[0]] == 0).all() and (y[offsets[-1] :] == 0).all()


@needs_compiler
@pytest.mark.parametrize("formats", [("int8", "int8"), (None, "int4")])
def test_counts(run, formats):
    x, w = normal((3, 20, 64)), cq.quantize(normal((3, 9, 64), seed=8), formats[1])
    x = x if formats[0] is None else cq.quantize(x, formats[0])
    counts = np.array([20, 0, 7], np.int32)
    y = run(cq.grouped_linear, x, w, counts=counts)
    wanted = np.einsum("emk,enk->emn", values(x), values(w))
    for expert, count in enumerate(counts):
        wanted[expert, count:] = 0
        assert (y[expert, count:] == 0).all()
    assert np.abs(y - wanted).max() < 1e-4
    np.testing.assert_allclose(cq.grouped_linear(x, w, counts=counts), y, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize(
    "formats",
    [("int8", "int8"), ("uint8:row", "uint8:row"), ("int4:32", "int8"), ("fp8_e4m3:tensor", "nf4")],
    ids=str,
)
@pytest.mark.parametrize("integer", ["int64", "int16"])
def test_experts_of_quantized_rows(run, formats, integer):
    """In no order, by integers of any type; NaN where there is no such expert, and nothing else."""
    x, w = cq.quantize(normal((30, 64)), formats[0]), cq.quantize(normal((4, 9, 64)), formats[1])
    experts = np.random.default_rng(0).integers(0, 4, 30).astype(integer)
    wanted = np.einsum("tk,tnk->tn", values(x), values(w)[experts])
    given = np.stack([experts, experts], axis=1)[:, 0]  # not contiguous
    y = run(cq.grouped_linear, x, w, given)
    np.testing.assert_allclose(y, wanted, atol=1e-4)


def grouped_into(run: Products, x, w, name, integers, shape, place) -> np.ndarray:
    """grouped_linear by integers that are known on the device alone, to `place` of an array whose
    other elements stay as they are."""
    backing = run.backend.array(np.full(tuple(2 * n for n in shape), 7, F32))
    out = backing[place]
    left, right = Operand.of(run.guarded(x), "x"), Operand.of(run.guarded(w), "w")
    with run.in_place():
        finish = Finish.check([left, right], shape, out=out)
        rows = Rows(name, integers, shape[:-1], w.shape[0])
        assert on_gpu.grouped_linear(left, right, rows, finish) is out
    others = np.ones(backing.shape, bool)
    others[place] = False
    assert (backing[others] == 7).all()
    return out


@needs_compiler
@pytest.mark.parametrize("down, across", [(2, 1), (1, 2), (1, -1)])
@pytest.mark.parametrize("x_format", ["int8", None])
def test_rows_of_no_expert_in_any_out(run, x_format, down, across):
    """NaN by experts, 0 by counts and offsets."""
    plain, w = normal((30, 64)), cq.quantize(normal((3, 9, 64)), "int8")
    x = plain if x_format is None else cq.quantize(plain, x_format)
    columns = slice(8, None, -1) if across < 0 else slice(None, 9 * across, across)
    experts = np.arange(30) % 5 - 1
    offsets, by_offset = np.array([2, 2, 20, 29]), np.repeat([-1, 1, 2, 3], [2, 18, 9, 1])
    for name, given, ids in (("experts", experts, experts), ("offsets", offsets, by_offset)):
        lost = (ids < 0) | (ids > 2)
        wanted = np.einsum("tk,tnk->tn", values(x), values(w)[np.where(lost, 0, ids)])
        wanted[lost] = np.nan if name == "experts" else 0
        y = grouped_into(run, x, w, name, given, (30, 9), np.s_[60 - 30 * down :: down, columns])
        np.testing.assert_allclose(y, wanted, atol=1e-4)
    plain = plain.reshape(3, 10, 64)
    x = plain if x_format is None else cq.quantize(plain, x_format)
    counts = np.array([10, 0, -3])
    wanted = np.einsum("emk,enk->emn", values(x), values(w))
    wanted[np.arange(10)[None] >= counts[:, None]] = 0
    place = np.s_[::2, 20 - 10 * down :: down, columns]
    y = grouped_into(run, x, w, "counts", counts, (3, 10, 9), place)
    np.testing.assert_allclose(y, wanted, atol=1e-4)


# ---- which pairs ---------------------------------------------------------------------------------


def test_pairs_of_formats():
    names = cq.list_formats()
    kinds = {a: codes_of(cq.get_format(a), cq.get_format("int8")) for a in names}
    assert kinds["int8"] == ("int8", "int8") and kinds["uint8"] == ("uint8", "int8")
    assert kinds["fp8_e4m3"] is None and kinds["nf4"] is None and kinds["q4_0"] is None
    e4m3 = {a for a in names if codes_of(cq.get_format(a), cq.get_format("mxfp8"))}
    assert {"fp8_e5m2", "mxfp4", "nvfp4", "int4", "uint4", "int5", "fp6_e2m3"} <= e4m3
    assert not {"int8", "int6", "uint5", "fp16"} & e4m3


@pytest.mark.parametrize(
    "rows, tokens", [(1, 8), (8, 8), (9, 16), (64, 64), (65, 128), (4096, 128)]
)
def test_tiles(rows, tokens):
    assert dense_warps.tile_of(rows).tokens == tokens


def test_tiles_fit_every_gpu():
    for tile, step in product(dense_warps.TILES, (16, 32)):
        assert tile.shared <= 64 << 10 and tile.span // step % tile.depth_warps == 0
        assert tile.rows % (16 * tile.row_warps) == 0 == tile.tokens % (8 * tile.token_warps)


def test_arrays_in_another_order_are_no_pair():
    x = cq.quantize(normal((2, 5, 64)), "int8").transpose(1, 0, 2)
    w = cq.quantize(normal((9, 64)), "int8")
    left, right = Operand.of(x, "x"), Operand.of(w, "w")
    assert coded_on_gpu.pair_of(left, right, (2, 1)) is None
