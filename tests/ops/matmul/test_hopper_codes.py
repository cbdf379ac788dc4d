"""Codes of x times prepacked weights of 4 bits in matmul/hopper.cu, under the emulator."""

from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
from coded_products import scales_far_apart, with_scales
from emulator import Emulator, Recorder, compiler
from products import Products, exact, finished, is_close, normal, values
from samples import sampled, selected

import cuquant as cq
from cuquant.ops.matmul import hopper_codes as codes
from cuquant.ops.matmul import on_gpu
from cuquant.ops.matmul.check import Finish, Operand
from cuquant.ops.matmul.experts import Rows
from cuquant.ops.matmul.hopper_tiles import Shape

F32 = np.float32
ARCH = 90
FILES = {"matmul/hopper.cu", "matmul/code_rows.cu", "matmul/codes.cu", "matmul/route.cu"}
pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

# x's format, the weight's, and M, N, K: scales of every kind on both sides, ragged ends.
CASES = [
    ("fp8_e4m3", "fp4_e2m1:row", (19, 70, 256)),
    ("fp8_e4m3", "fp4_e2m1:row", (1, 1, 1)),
    ("fp8_e4m3", "fp4_e2m1:row", (130, 130, 1160)),
    ("fp8_e4m3:tensor", "fp4_e2m1:tensor", (33, 70, 131)),
    ("fp8_e4m3:1x128", "fp4_e2m1:row", (17, 70, 400)),
    ("fp8_e4m3", "fp4_e2m1", (5, 40, 100)),
    ("fp8_e4m3:1x128", "nvfp4", (20, 70, 272)),
    ("mxfp8", "nvfp4", (70, 33, 80)),
    ("mxfp8", "mxfp4", (33, 70, 256)),
    ("mxfp8", "mxfp4", (130, 130, 360)),
    ("fp8_e4m3", "mxfp4", (9, 70, 1000)),
    ("fp8_e4m3", "mxfp4", (130, 130, 1160)),
    ("fp8_e4m3:1x128", "mxfp4", (40, 70, 1000)),
    ("fp8_e4m3:64", "mxfp4", (9, 70, 360)),
    ("fp8_e4m3", "mxfp4:16", (9, 70, 360)),
    ("fp8_e4m3", "mxfp4:64", (9, 70, 360)),
    ("fp8_e4m3", "mxfp4:128", (9, 70, 360)),
    ("fp8_e4m3:256", "mxfp4", (9, 70, 1000)),
    ("fp8_e4m3", "int4", (20, 70, 272)),
    ("fp8_e4m3:1x128", "int4:64", (40, 70, 520)),
    ("fp8_e4m3:128x128", "int4:128x128", (200, 150, 520)),
    ("fp8_e4m3:64", "int4:256", (20, 70, 900)),
    ("int8", "int4:row", (19, 70, 256)),
    ("int8", "int4", (70, 130, 600)),
    ("int8:tensor", "int4:32", (9, 70, 200)),
    ("int8:32", "int4:32", (9, 70, 200)),
    ("int8:64", "int4", (150, 70, 1000)),
    ("int8:128", "int4:16", (9, 70, 200)),
]
# tokens, row_groups, depth_groups, stages, span; streamed, once, split.
DIVIDED = [
    ((16, 1, 3, 6, 4), {}),
    ((16, 2, 2, 6, 4), {"once": True, "split": 2}),
    ((32, 1, 2, 4, 1), {}),
    ((32, 3, 1, 5, 2), {"streamed": True}),
    ((32, 2, 2, 6, 2), {"once": True}),
    ((64, 2, 1, 3, 1), {"streamed": True}),
    ((64, 2, 1, 8, 2), {"once": True, "split": 2}),
    ((96, 2, 1, 3, 2), {"streamed": True}),
    ((128, 2, 1, 2, 1), {}),
    ((128, 2, 1, 8, 1), {"once": True, "split": 2}),
    ((16, 3, 1, 4, 4), {"streamed": True}),
    ((128, 1, 2, 4, 1), {"streamed": True}),
]
PAIRS = [
    ("fp8_e4m3", "fp4_e2m1:row"),
    ("mxfp8", "mxfp4"),
    ("fp8_e4m3", "mxfp4"),
    ("fp8_e4m3:1x128", "mxfp4"),
    ("fp8_e4m3:1x128", "int4"),
    ("int8", "int4:row"),
    ("fp8_e4m3:1x128", "nvfp4"),
]
SHAPE = (90, 150, 1160)


def pair(first: str, second: str, shape: tuple) -> tuple[cq.QuantArray, cq.QuantArray]:
    m, n, k = shape
    return cq.quantize(normal((m, k)), first), cq.quantize(normal((n, k), seed=5), second)


def divided(numbers: tuple[int, ...], kept: dict, first: str, second: str, depth: int):
    """The rule names this shape."""
    scales = codes.scales_of(cq.get_format(first), cq.get_format(second), depth)
    kept = kept | {"x_fine": scales.x_fine, "folded": scales.folded}
    shape = Shape(*numbers, 2, 2, element=1, **kept)
    shape = replace(shape, segment=scales.segment(shape, -(-depth // 64)))
    return mock.patch.object(codes, "divide", lambda *_: shape)


def check(y: np.ndarray, x: cq.QuantArray, w: cq.QuantArray) -> None:
    wanted, size = exact(x, w)
    assert y.shape == wanted.shape and y.dtype == F32
    assert is_close(y, wanted, size, values(w).shape[-1] + 8)


@pytest.fixture(scope="module")
def built(request) -> None:
    """The programs of the tests that run, compiled together."""
    recorder = Recorder(arch=ARCH)
    run = Products(recorder)
    for given in selected(request, "test_the_matrix"):
        x, w = pair(*given["case"])
        run(cq.linear, x, cq.prepack(w))
    for given in selected(request, "test_every_way_to_divide"):
        x, w = pair(*given["formats"], SHAPE)
        with divided(*given["numbers"], *given["formats"], SHAPE[2]):
            run(cq.linear, x, cq.prepack(w))
    for formats in EXPERTS if selected(request, "test_offsets") else ():
        x, w = experts_of(*formats, (45,))
        for name, numbers in (("offsets", np.zeros(5, int)), ("experts", np.zeros(45, int))):
            run(cq.grouped_linear, x, cq.prepack(w), **{name: numbers})
    assert {program.file for program in recorder.programs} <= FILES
    Emulator().build(recorder.programs)


@pytest.fixture
def run(built) -> Products:
    return Products(Emulator(arch=ARCH))


@pytest.mark.parametrize(
    "case",
    sampled([(case,) for case in CASES], lambda case: case[0], lambda case: case[1]),
    ids=str,
)
def test_the_matrix(case, run):
    x, w = pair(*case)
    check(run(cq.linear, x, cq.prepack(w)), x, w)


@pytest.mark.parametrize(
    ("formats", "numbers"),
    sampled(product(PAIRS, DIVIDED), lambda formats, _: formats, lambda _, numbers: str(numbers)),
    ids=str,
)
def test_every_way_to_divide(formats, numbers, run):
    """Fewer stages than steps, so that they are used again; blocks that have several tiles."""
    x, w = pair(*formats, SHAPE)
    with divided(*numbers, *formats, SHAPE[2]):
        check(run(cq.linear, x, cq.prepack(w)), x, w)


def test_all_cases_are_multiplied_by_this_kernel():
    for case in CASES:
        x, w = pair(*case)
        recorder = Recorder(arch=ARCH)
        Products(recorder)(cq.linear, x, cq.prepack(w))
        assert "matmul/hopper.cu" in {program.file for program in recorder.programs} <= FILES, case


def test_integers_with_a_scale_a_row_are_exact(run):
    """(float(sum) * x's scale) * the weight's, to the bit."""
    x, w = pair("int8", "int4:row", (19, 70, 256))
    sums = (x.codes().astype(np.int64) - 128) @ (w.codes().astype(np.int64) - 8).T
    scales = [np.asarray(q.scale).astype(F32).reshape(-1) for q in (x, w)]
    wanted = sums.astype(F32) * scales[0][:, None] * scales[1][None, :]
    np.testing.assert_array_equal(run(cq.linear, x, cq.prepack(w)), wanted)


def test_every_code_is_what_it_stands_for(run):
    """Of e2m1 and of int4, with powers of two and one nonzero number in each row of x."""
    levels = np.concatenate([[0, 0.5, 1, 1.5, 2, 3, 4, 6], -np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])])
    one = np.eye(64, dtype=F32)[:16]
    for name, numbers in (("fp4_e2m1:row", levels), ("int4:row", np.arange(-8, 8))):
        rows = np.stack([np.roll(np.tile(numbers, 4), i) for i in range(16)]).astype(F32)
        w = cq.quantize(rows, name, scale=np.ones((16, 1), "f2"))
        for other in ("fp8_e4m3", *(["int8"] if "int" in name else [])):
            x = cq.quantize(one, other, scale=np.ones((16, 1), F32))
            y = run(cq.linear, x, cq.prepack(w))
            np.testing.assert_array_equal(y, rows[:, :16].T)


@pytest.mark.parametrize("first", ["fp8_e4m3", "fp8_e4m3:1x128", "mxfp8"])
@pytest.mark.parametrize("which", list(scales_far_apart(1, 1)))
def test_scales_far_apart(which, first, run):
    """Results are as near as any others, whatever zeros and large scales are beside a group."""
    for m, n, k in ((1, 1, 32 * 3), (33, 70, 1000), (130, 33, 360)):
        x, w = pair(first, "mxfp4", (m, n, k))
        w = with_scales(w, scales_far_apart(n, -(-k // 32))[which])
        check(run(cq.linear, x, cq.prepack(w)), x, w)


@pytest.mark.parametrize("numbers", DIVIDED, ids=str)
def test_scales_far_apart_however_it_is_divided(numbers, run):
    x, w = pair("fp8_e4m3", "mxfp4", SHAPE)
    w = with_scales(w, scales_far_apart(SHAPE[1], -(-SHAPE[2] // 32))["any"])
    with divided(*numbers, "fp8_e4m3", "mxfp4", SHAPE[2]):
        check(run(cq.linear, x, cq.prepack(w)), x, w)


def test_scales_far_apart_of_experts(run):
    x, w = experts_of("fp8_e4m3:1x128", "mxfp4", (45,))
    scale = np.stack(list(scales_far_apart(70, 9).values())[2:6])
    w = with_scales(w, scale)
    offsets = np.array([0, 3, 20, 20, 45])
    y = run(cq.grouped_linear, x, cq.prepack(w), offsets=offsets)
    for e in range(4):
        rows = slice(offsets[e], offsets[e + 1])
        wanted = values(x)[rows] @ values(w)[e].T
        size = np.abs(values(x)[rows]) @ np.abs(values(w)[e]).T
        assert is_close(y[rows], wanted, size, 272)


def test_powers_of_two_are_exact(run):
    """Sums of few numbers of 12 octaves, which float32 holds."""
    rng = np.random.default_rng(0)
    for block, k in product((16, 32, 64, 128), (64, 512)):
        w = cq.quantize(normal((70, k), seed=5), f"mxfp4:{block}")
        w = with_scales(w, 127 + rng.integers(0, 12, (70, -(-k // block))))
        x = cq.quantize(
            rng.integers(-1, 2, (20, k)).astype(F32), "fp8_e4m3", scale=np.ones((20, 1), F32)
        )
        wanted = values(x) @ values(w).T
        assert np.abs(wanted).max() < 2**23
        np.testing.assert_array_equal(run(cq.linear, x, cq.prepack(w)), wanted)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_epilogue(activation, run):
    x, w = pair("fp8_e4m3", "fp4_e2m1:row", (19, 72, 256))
    bias, residual = normal((72,), "float16"), normal((19, 72), "bfloat16", seed=2)
    kept = {"bias": bias, "activation": activation, "residual": residual}
    wide = run(cq.linear, x, cq.prepack(w), **kept)
    wanted = finished(values(x) @ values(w).T, bias, activation, residual)
    np.testing.assert_allclose(wide, wanted, rtol=1e-5, atol=1e-4)
    for dtype in ("float16", "bfloat16"):
        y = run(cq.linear, x, cq.prepack(w), **kept, out_dtype=dtype)
        np.testing.assert_array_equal(y, wide.astype(y.dtype))
        plain = run(cq.linear, x, cq.prepack(w), bias, out_dtype=dtype)
        wide_plain = run(cq.linear, x, cq.prepack(w), bias)
        np.testing.assert_array_equal(plain, wide_plain.astype(y.dtype))


def test_out_batch_and_swiglu(run):
    x, w = pair("fp8_e4m3", "mxfp4", (10, 70, 128))
    up = cq.quantize(normal((70, 128), seed=9), "mxfp4")
    deep = cq.quantize(normal((2, 5, 128)), "fp8_e4m3")
    whole = run(
        cq.linear, cq.quantize(normal((2, 5, 128)).reshape(10, 128), "fp8_e4m3"), cq.prepack(w)
    )
    np.testing.assert_array_equal(run(cq.linear, deep, cq.prepack(w)).reshape(10, 70), whole)
    around = run.backend.empty((10, 80), np.dtype(F32))
    out = around[:, 3:73]
    assert run(cq.linear, x, cq.prepack(w), out=out) is out
    np.testing.assert_array_equal(np.array(out), run(cq.linear, x, cq.prepack(w)))
    a, b = values(x) @ values(w).T, values(x) @ values(up).T
    y = run(cq.swiglu, x, cq.prepack(w), cq.prepack(up))
    np.testing.assert_allclose(y, a / (1 + np.exp(-a)) * b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("formats", PAIRS, ids=str)
def test_a_scale_that_is_nan_hurts_its_row_alone(formats, run):
    x, w = pair(*formats, (19, 70, 264))
    parts = dict(w.arrays())
    scale = np.array(parts["scale"])
    scale[61, -1] = 0xFF if scale.dtype.itemsize == 1 else np.nan
    w = cq.QuantArray(w.format, w.shape, w.dtype, parts | {"scale": scale}, w.axes)
    y = run(cq.linear, x, cq.prepack(w))
    assert np.isnan(y[:, 61]).all() and np.isfinite(np.delete(y, 61, axis=1)).all()


def test_what_else_there_is_goes_another_way():
    """Offsets, codebooks, 8 bits, other GPUs, results of 8 bits, rows that must not depend on
    others."""
    x = cq.quantize(normal((9, 128)), "fp8_e4m3")
    given = [(name, {}) for name in ("uint4", "nf4", "int8", "fp8_e4m3")]
    given += [("fp4_e2m1", {"batch_invariant": True})]
    for name, kept in given:
        w = cq.prepack(cq.quantize(normal((40, 128)), name))
        recorder = Recorder(arch=ARCH)
        Products(recorder)(cq.linear, x, w, **kept)
        assert "matmul/code_rows.cu" not in {p.file for p in recorder.programs}, name
    recorder = Recorder(arch=80)
    Products(recorder)(cq.linear, x, cq.prepack(cq.quantize(normal((40, 128)), "mxfp4")))
    assert "matmul/dense_warps.cu" in {program.file for program in recorder.programs}


# ---- experts ------------------------------------------------------------------------------------

EXPERTS = [
    ("fp8_e4m3", "fp4_e2m1:row"),
    ("fp8_e4m3:1x128", "nvfp4"),
    ("mxfp8", "mxfp4"),
    ("fp8_e4m3", "mxfp4"),
    ("fp8_e4m3:1x128", "mxfp4"),
    ("int8", "int4"),
    ("fp8_e4m3:1x128", "int4"),
]


def experts_of(first: str, second: str, rows: tuple) -> tuple[cq.QuantArray, cq.QuantArray]:
    x = cq.quantize(normal((*rows, 264)), first)
    return x, cq.quantize(normal((4, 70, 264), seed=5), second)


@pytest.mark.parametrize("formats", EXPERTS, ids=str)
@pytest.mark.parametrize("offsets", [(0, 3, 3, 20, 45), (2, 40, 41, 41, 43)], ids=str)
def test_offsets(formats, offsets, run):
    """Rows before and behind are 0."""
    x, w = experts_of(*formats, (45,))
    y = run(cq.grouped_linear, x, cq.prepack(w), offsets=np.array(offsets))
    whole = values(w)
    wanted = np.zeros((45, 70))
    size = np.zeros((45, 70))
    for e in range(4):
        rows = slice(offsets[e], offsets[e + 1])
        wanted[rows] = values(x)[rows] @ whole[e].T
        size[rows] = np.abs(values(x)[rows]) @ np.abs(whole[e]).T
    assert y.dtype == F32 and is_close(y, wanted, size, 272)


@pytest.mark.parametrize("formats", EXPERTS, ids=str)
def test_counts(formats, run):
    x, w = experts_of(*formats, (4, 21))
    counts = np.array([21, 0, 5, 17])
    y = run(cq.grouped_linear, x, cq.prepack(w), counts=counts)
    wanted = np.einsum("emk,enk->emn", values(x), values(w))
    size = np.einsum("emk,enk->emn", np.abs(values(x)), np.abs(values(w)))
    there = (np.arange(21)[None] < counts[:, None])[..., None]
    assert y.shape == (4, 21, 70) and is_close(y, wanted * there, size, 272)


@pytest.mark.parametrize("formats", EXPERTS, ids=str)
def test_rows_in_any_order(formats, run):
    x, w = experts_of(*formats, (37,))
    experts = np.random.default_rng(1).integers(0, 4, 37)
    y = run(cq.grouped_linear, x, cq.prepack(w), experts)
    wanted = np.einsum("mk,mnk->mn", values(x), values(w)[experts])
    size = np.einsum("mk,mnk->mn", np.abs(values(x)), np.abs(values(w)[experts]))
    assert is_close(y, wanted, size, 272)


def test_more_rows_than_a_tile_has_and_more_groups_than_lanes(run):
    x = cq.quantize(normal((300, 64)), "fp8_e4m3")
    w = cq.quantize(normal((40, 16, 64), seed=5), "fp4_e2m1:row")
    offsets = np.concatenate([[0, 0], np.full(37, 150), [290, 300]])
    y = run(cq.grouped_linear, x, cq.prepack(w), offsets=offsets)
    experts = np.searchsorted(offsets, np.arange(300), side="right") - 1
    np.testing.assert_allclose(y, np.einsum("mk,mnk->mn", values(x), values(w)[experts]), atol=1e-4)


def test_offsets_and_experts_of_the_device_that_are_wrong(run):
    """Offsets end where x does; a row whose expert does not exist is NaN."""
    x, w = experts_of("fp8_e4m3", "mxfp4", (9,))
    right = run(cq.grouped_linear, x, cq.prepack(w), offsets=np.array([0, 4, 9, 9, 9]))
    given = [run.guarded(side) for side in (x, cq.prepack(w))]
    operands = [Operand.of(side, name) for side, name in zip(given, "xw", strict=True)]
    for name, numbers in (
        ("offsets", [-3, 4, 70, 80, 90]),
        ("experts", [0, 0, 0, 0, 1, 1, 1, 9, -1]),
    ):
        rows = Rows(name, run.backend.array(np.array(numbers)), (9,), 4)
        with run.in_place():
            finish = Finish.check(operands, (9, 70))
            y = np.array(on_gpu.grouped_linear(*operands, rows, finish))
        kept = 9 if name == "offsets" else 7
        np.testing.assert_array_equal(y[:kept], right[:kept])
        assert np.isnan(y[kept:]).all()
