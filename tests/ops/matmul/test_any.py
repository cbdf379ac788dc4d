"""The plain kernels of products against float64, on the CPU under the emulator; and the choice."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulator import Emulator, Recorder, compiler
from kernel_arrays import LAYOUTS, LEVELS, WRITABLE
from oracle import DTYPES, bits_equal
from products import CASES, Case, Products, exact, finished, is_close, normal, values, weight
from samples import sampled, selected

import cuquant as cq
from cuquant.ops.matmul import on_gpu as multiply
from cuquant.ops.matmul.any import plain_launch
from cuquant.ops.matmul.check import Finish, Operand
from cuquant.ops.matmul.choose import FAMILIES, choose
from cuquant.ops.matmul.experts import Rows
from cuquant.ops.matmul.problem import Dense, Problem, Product
from cuquant.ops.matmul.route import route, route_bytes
from cuquant.reference import ACTIVATIONS

F32 = np.float32
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")


@pytest.fixture(scope="module")
def built(request) -> None:
    """The programs of the tests that run, compiled together."""
    recorder = Recorder()
    run = Products(recorder)
    for given in selected(request, "test_the_matrix"):
        run(cq.linear, given["case"].x, given["case"].weight)
    for given in selected(request, "test_swiglu"):
        gate, up = gate_and_up(given["pair"])
        for dtype in ("float16", "float32"):
            x = normal((given["m"], 256), dtype)
            run(cq.swiglu, x, gate, up), run(cq.linear, x, gate), run(cq.linear, x, up)
    for name in SATURATED:
        q = saturated(name)
        run(cq.linear, np.zeros((8, 64), F32), q), run(cq.linear, np.zeros((1, 64), F32), q)
    Emulator().build(recorder.programs)


@pytest.fixture
def run(built) -> Products:
    return Products(Emulator())


def check(y: np.ndarray, x: Any, w: Any) -> None:
    wanted, size = exact(x, w)
    assert y.shape == wanted.shape
    assert is_close(y, wanted, size, wanted.size and values(w).shape[-1])


# ---- linear -------------------------------------------------------------------------------------


def told(case: Case) -> tuple:
    """The names of options, and the size of blocks."""
    return tuple((key, value if key == "block_size" else "") for key, value in case.options)


@needs_compiler
@pytest.mark.parametrize(
    "case", sampled(CASES, "format", "dtype", "layout", "lead", "shape", told), ids=str
)
def test_the_matrix(case, run):
    x = case.x
    y = run(cq.linear, x, case.weight)
    assert y.dtype == x.dtype
    check(y, x, case.weight)


SATURATED = {"fp8_e5m2": 64, "int4": 64, "dynamic8": 64, "nf4": 8}  # rows of x


def saturated(name: str) -> cq.QuantArray:
    return weight(name, (8, 64), **({} if name == "fp8_e5m2" else {"scale_dtype": "float32"}))


@needs_compiler
def test_every_code_with_scales_that_overflow_saturates_as_decoding_does(run):
    """x is a unit matrix: each sum is one value, which is exact."""
    for name, m in SATURATED.items():
        q = saturated(name)
        special = F32([1, 3e38, -3e38, 0, 1e-40, np.inf, np.nan, 2])
        q = replace_parts(q, scale=np.resize(special, q.arrays()["scale"].shape).astype(F32))
        x = np.eye(64, dtype=F32)[:m]
        with np.errstate(all="ignore"):
            wanted = values(q)[:, :m].T
        one = np.array([run(cq.linear, row[None], q)[0] for row in x[:3]])
        for found, want in ((run(cq.linear, x, q), wanted), (one, wanted[:3])):
            finite = np.isfinite(want) & ~np.isnan(found)  # a NaN or infinity in a row spreads
            rows = np.isfinite(values(q)).all(1)
            assert finite[:, rows].all() and (found[:, rows] == want[:, rows]).all()
            assert np.isnan(found[:, np.isnan(values(q)).any(1)]).all()


def replace_parts(q: cq.QuantArray, **parts: np.ndarray) -> cq.QuantArray:
    return cq.QuantArray(q.format, q.shape, q.dtype, {**q.arrays(), **parts}, q.axes)


@needs_compiler
@pytest.mark.parametrize("m", [2, 17])
def test_nan_and_infinity_go_through(run, m):
    """Where the CPU's result is not finite, this is the same; and nowhere else. K is ragged."""
    q, x = weight("nf4", (20, 131)), normal((m, 131))
    x[0, 3], x[1, 130], q_nan = np.nan, np.inf, cq.quantize(normal((20, 131)), "nf4")
    q_nan.components["scale"][4, 0] = np.nan
    for w in (q, q_nan):
        y, wanted = run(cq.linear, x, w), cq.linear(x, w)
        finite = np.isfinite(wanted)
        assert (np.isfinite(y) == finite).all() and not finite.all()
        assert bits_equal(np.isnan(y), np.isnan(wanted))
        assert (y[np.isinf(wanted)] == wanted[np.isinf(wanted)]).all()


@needs_compiler
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("m", [2, 17])
def test_epilogues(run, activation, m):
    """Each function is within a few ulp of NumPy's, on the same sums; then one rounding."""
    q, x = weight("int4", (9, 64)), normal((m, 64), "float16")
    x[0] *= 30  # where silu and gelu are 0 or x
    sums = run(cq.linear, x, q, out_dtype="float32")
    names = list(DTYPES)
    for i, (with_bias, with_residual) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        bias = normal((9,), names[i % 3]) if with_bias else None
        residual = normal((m, 18), names[(i + 1) % 3])[:, ::2] if with_residual else None
        wanted = finished(sums, bias, activation, residual)
        off = 8 * 2.0**-24 * np.maximum(np.abs(finished(sums, bias)), 1)
        for dtype in names:
            y = run(
                cq.linear, x, q, bias, activation=activation, residual=residual, out_dtype=dtype
            )
            assert y.dtype == DTYPES[dtype]
            ulp = {"float32": 0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
            bound = off + ulp * (np.abs(wanted) + off) + 2.0**-24
            assert (np.abs(values(y) - wanted) <= bound).all()


def test_special_numbers_of_activations():
    """Through a kernel that adds a bias to sums of 0."""
    if compiler() is None:
        pytest.skip("no g++ to compile kernels with")
    bias = F32([np.nan, np.inf, -np.inf, 0.0, 1.0, -200.0, 3e38, -3e38])
    x, q = np.zeros((1, 64), F32), weight("int4", (8, 64))
    with np.errstate(all="ignore"):
        for name, function in ACTIVATIONS.items():
            y = Products(Emulator())(cq.linear, x, q, bias, activation=name)[0]
            assert np.allclose(y, function(bias), atol=1e-6, equal_nan=True)
            assert (y[6:] == F32([3e38, 0])).all()


@needs_compiler
@pytest.mark.parametrize("layout", ["whole", *WRITABLE])
@pytest.mark.parametrize("m", [2, 17])
def test_out_lies_anywhere(run, layout, m):
    """What lies between and beside its elements is left alone."""
    q, x = weight("nf4", (10, 64)), normal((m, 64), "float16")
    where = LAYOUTS[layout]
    for dtype in DTYPES.values():
        base = run.backend.empty(where.base((m, 10)), dtype)
        base[...] = 7
        out = where.view(base, (m, 10))
        assert run(cq.linear, x, q, out=out) is out
        check(np.array(out), x, q)
        out[...] = 7
        assert (base == 7).all()


@needs_compiler
def test_leading_axes_that_are_no_rows(run):
    """Of x, of a residual and of out: they are copied."""
    q, big = weight("int4", (10, 64)), normal((4, 6, 64))
    x, residual = big[:, ::2], normal((4, 5, 10))[:, :3]
    out = np.full((4, 6, 10), 7, F32)
    y = run(cq.linear, x, q, residual=residual, out=out[:, ::2])
    wanted, size = exact(x, q)
    assert is_close(y, wanted + residual, size + np.abs(residual), 65)
    assert (out[:, 1::2] == 7).all()


@pytest.mark.parametrize(
    ("lead", "shape"), [((0,), (5, 64)), ((2, 0), (5, 64)), ((3,), (0, 64)), ((3,), (5, 0))]
)
def test_empty_operands(lead, shape):
    """K = 0 gives the epilogue of 0."""
    x, q = np.ones((*lead, shape[1]), F32), cq.quantize(np.ones(shape, F32), "nf4")
    bias = np.arange(shape[0], dtype=F32)
    if compiler() is None and shape[1] == 0:
        pytest.skip("no g++ to compile kernels with")
    y = Products(Emulator())(cq.linear, x, q, bias, activation="relu")
    assert bits_equal(y, cq.linear(x, q, bias, activation="relu"))


@needs_compiler
@pytest.mark.parametrize("layout", ["misaligned", "steps", "rows", "reversed"])
@pytest.mark.parametrize("name", ["nf4", "int8", "k3", "uint2", "fp16", "nvfp4", "q4_0", "q6_k"])
def test_components_lie_anywhere(name, layout, run):
    q, parts = weight(name, (9, 256)), {}
    for key, part in q.arrays().items():
        where = LAYOUTS[layout if part.ndim else "whole"]
        base = run.backend.zeros(where.base(part.shape), part.dtype)
        parts[key] = where.view(base, part.shape)
        parts[key][...] = part
    moved = cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)
    x = normal((3, 256))
    with run.in_place():
        check(cq.linear(x, moved), x, q)


@needs_compiler
def test_weights_quantized_along_the_other_axis_and_quantized_x(run):
    w = cq.quantize(normal((64, 9)), "int4", axis=0)  # [N, K] = [64, 9] in blocks along N
    x = normal((3, 9))
    check(run(cq.linear, x, w), x, w)
    a, b = cq.quantize(normal((3, 64)), "int8"), weight("nf4", (9, 64))
    y = run(cq.linear, a, b)
    assert y.dtype == F32
    check(y, a, b)
    assert run(cq.linear, a, b, out_dtype="bfloat16").dtype.name == "bfloat16"


@needs_compiler
def test_a_packed_weight(run):
    for name in ("nf4", "q4_0", "fp16"):
        q, x = weight(name, (16, 256)), normal((2, 256))
        p = cq.prepack(q)
        with run.in_place():
            assert bits_equal(cq.linear(x, p), cq.linear(x, cq.unpack(p)))


@needs_compiler
@pytest.mark.parametrize("m", [5, 70])
def test_the_same_bits_in_every_order_of_threads(m):
    q, x = weight("nf4", (40, 520)), normal((m, 520), "bfloat16")
    runs = [
        Products(Emulator(order=order))(cq.linear, x, q, out_dtype="float32")
        for order in ("ascending", "descending", "shuffled")
    ]
    assert all(bits_equal(run, runs[0]) for run in runs)


# ---- matmul -------------------------------------------------------------------------------------

SHAPES = [
    ((64,), (64,)),
    ((4, 64), (64,)),
    ((64,), (64, 3)),
    ((20, 64), (64, 3)),
    ((2, 4, 64), (2, 64, 3)),
    ((5, 1, 4, 64), (2, 64, 3)),
    ((2, 64), (3, 2, 64, 5)),
    ((3, 2, 18, 64), (64, 5)),
    ((64,), (2, 64, 3)),
    ((2, 4, 0), (2, 0, 3)),
    ((0, 4, 64), (64, 3)),
]


@needs_compiler
@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_matmul_follows_numpy(a, b, run):
    x, y = normal(a), normal(b)
    along = (cq.quantize(x, "int8"), cq.quantize(y, "nf4", axis=max(len(b) - 2, 0)))
    across = (cq.quantize(x, "int4", axis=0), cq.quantize(y, "int4", axis=-1))
    bias = normal(b[-1:] if len(b) > 1 else ()) if len(b) > 1 else None
    for one, two in (
        (x, along[1]), (along[0], y), along, (x, across[1]), (across[0], y), across,
        (along[0], across[1]),
    ):  # fmt: skip
        left, right = values(one), values(two)
        added = 0 if bias is None else bias
        wanted, size = left @ right + added, np.abs(left) @ np.abs(right) + np.abs(added)
        found = np.asarray(run(cq.matmul, one, two, bias=bias))
        assert found.shape == wanted.shape and found.dtype == F32
        assert is_close(found, wanted, size, a[-1] + 1)


@needs_compiler
def test_matmul_of_views_into_a_strided_out(run):
    q = cq.quantize(normal((2, 64, 24)), "int4", axis=1)
    x = normal((3, 2, 64, 5)).swapaxes(-1, -2)
    out = np.zeros((3, 2, 24, 5), np.float16).swapaxes(-1, -2)
    assert run(cq.matmul, x, q, out=out) is out
    wanted = values(x) @ values(q)
    assert is_close(np.array(out), wanted, np.abs(values(x)) @ np.abs(values(q)), 64)


@needs_compiler
def test_more_axes_than_a_kernel_counts(run):
    """Broadcast so that none of them can be merged."""
    a, b = normal((2, 1, 2, 1, 2, 1, 2, 1, 3, 16)), normal((1, 2, 1, 2, 1, 2, 1, 2, 16, 2))
    q = cq.quantize(b, "int8", axis=-2)
    wanted = values(a) @ values(q)
    found = run(cq.matmul, a, q)
    assert is_close(found, wanted, np.abs(values(a)) @ np.abs(values(q)), 16)


# ---- gated units --------------------------------------------------------------------------------


def gate_and_up(pair: str) -> tuple[cq.QuantArray, cq.QuantArray]:
    first, second = pair.split()
    options = {"levels": LEVELS["16 close"]} if first == "k4" else {}
    gate = weight(first, (70, 256), **options)  # two codebooks of one size
    return gate, cq.quantize(normal((70, 256), seed=5), second)


@needs_compiler
@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("pair", ["nf4 nf4", "int4 q4_0", "k4 k4", "q4_k q4_k"])
def test_swiglu(pair, m, run):
    """silu is 1.1-Lipschitz and at most its argument: the bound of both factors, multiplied out."""
    gate, up = gate_and_up(pair)
    x = normal((m, 256), "float16")
    y = run(cq.swiglu, x, gate, up)
    assert y.dtype == np.float16 and y.shape == (m, 70)
    a, b = (run(cq.linear, x, w, out_dtype="float32") for w in (gate, up))
    wanted = finished(a, activation="silu") * b
    wide = run(cq.swiglu, x.astype(F32), gate, up)
    (left, size), (right, other) = exact(x, gate), exact(x, up)
    true = left / (1 + np.exp(-left)) * right
    off = 2.0**-24 * 260
    bound = 1.2 * off * size * (np.abs(right) + off * other) + np.abs(left) * off * other
    assert (np.abs(wide - true) <= bound + 8 * 2.0**-24 * np.abs(true) + 1e-6).all()
    assert (np.abs(values(y) - wanted) <= 2.0**-11 * np.abs(wanted) + bound + 1e-6).all()


# ---- experts ------------------------------------------------------------------------------------


def grouped(run: Products, x: Any, w: Any, experts: np.ndarray) -> np.ndarray:
    """grouped_linear with experts that are on the device."""
    left, right = Operand.of(run.guarded(x), "x"), Operand.of(run.guarded(w), "w")
    with run.in_place():
        finish = Finish.check([left, right], (len(x), w.shape[1]))
        return multiply.grouped_linear(
            left, right, Rows("experts", _OnDevice(experts), (len(x),), w.shape[0]), finish
        )


class _OnDevice(np.ndarray):
    """Integers that are not looked at on the host."""

    def __new__(cls, experts: np.ndarray) -> Any:
        return experts.view(cls)


def _rows_by_expert(count: int, known: int, seed: int = 0) -> np.ndarray:
    """Some experts get many rows, some none."""
    rng = np.random.default_rng(seed)
    return np.minimum(rng.geometric(0.3, count) - 1, known - 1)


@needs_compiler
@pytest.mark.parametrize("name", ["nf4", "q4_0", "nvfp4", "int8"])
@pytest.mark.parametrize("count", [1, 7, 40, 150])
def test_grouped_linear(name, count, run):
    w = cq.quantize(normal((4, 9, 64)), name, **({"double_quant": True} if name == "nf4" else {}))
    x, experts = normal((count, 64), "bfloat16"), _rows_by_expert(count, 4)
    y = run(cq.grouped_linear, x, w, experts)
    assert y.dtype == x.dtype and y.shape == (count, 9)
    own = values(w)[experts]
    wanted = np.einsum("tk,tnk->tn", values(x), own)
    assert is_close(y, wanted, np.einsum("tk,tnk->tn", np.abs(values(x)), np.abs(own)), 64)


@needs_compiler
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_rows_without_an_expert_become_nan(run, dtype):
    w, x = cq.quantize(normal((3, 5, 64)), "int4"), normal((9, 64))
    experts = np.array([2, 100, 0, 3, 1, 1, 7, 0, 2]).astype(dtype)
    if np.dtype(dtype).kind == "i":
        experts[3], experts[6] = -1, np.iinfo(dtype).min
    strided = np.repeat(experts, 2)[::2]
    lost = [1, 3, 6]
    for given in (experts, strided):
        y = grouped(run, x, w, given)
        assert np.isnan(y[lost]).all()
        kept = np.delete(np.arange(9), lost)
        with run.in_place():
            wanted = cq.grouped_linear(x[kept], w, experts[kept])
        assert bits_equal(y[kept], wanted)


@needs_compiler
def test_experts_are_sorted_in_the_order_in_which_they_came(run):
    """More of them than a thread block has threads, and more rows than one look of a warp."""
    for count, known in ((5, 700), (2100, 3), (1025, 1100), (33, 1)):
        experts = _rows_by_expert(count, known, seed=count).astype(np.int32)
        experts[::17] = known
        there = run.backend.array(experts)
        memory = run.backend.empty((route_bytes(count, known, 8),), np.dtype(np.uint8))
        at = run.backend.pointer(memory)
        routing = route(run.backend, run.backend.view(there), known, 8, 10, at)
        assert routing.end == at + memory.size

        def integers(where: int, count: int, memory: np.ndarray = memory, at: int = at) -> Any:
            return memory[where - at :][: 8 * count].view(np.int64)

        order = np.argsort(experts, kind="stable")
        assert (integers(routing.order, count) == order).all()
        begins = np.searchsorted(experts[order], np.arange(known + 1))
        assert (integers(routing.offsets, known + 1) == begins).all()
        used = integers(routing.segments, 3 * int(integers(routing.count, 1)[0])).reshape(-1, 3)
        found = {}
        for expert, first, rows in used.tolist():
            assert 0 < rows <= 8
            found.setdefault(known if expert < 0 else expert, []).append((first, rows))
        numbers, counts = np.unique(experts, return_counts=True)
        assert sorted(found) == numbers.tolist()
        for expert, total in zip(numbers.tolist(), counts.tolist(), strict=True):
            begin = int(np.flatnonzero(experts[order] == expert)[0])
            assert [f for f, _ in found[expert]] == list(range(begin, begin + total, 8))
            assert sum(rows for _, rows in found[expert]) == total
        assert len(used) <= routing.most


@needs_compiler
def test_experts_quantized_along_another_axis(run):
    w = cq.quantize(normal((64, 4, 8)), "int4", axis=0)
    x, experts = normal((3, 8)), np.array([63, 0, 63])
    y = run(cq.grouped_linear, x, w, experts)
    wanted = np.einsum("tk,tnk->tn", values(x), values(w)[experts])
    assert np.allclose(y, wanted, atol=1e-5)
    q = cq.quantize(normal((3, 64)), "int8")
    check(run(cq.grouped_linear, q, weight("nf4", (1, 5, 64)), np.zeros(3, int)),
          q, weight("nf4", (1, 5, 64))[0])  # fmt: skip


# ---- which kernel -------------------------------------------------------------------------------

PROBLEM = Problem(1, 4096, 4096, cq.get_format("int4"), "rows/1", "float16", True, 90, 132)


def test_the_rule_knows_every_problem():
    """Whatever it names is there, and takes the layout."""
    for rows in (1, 8, 9, 16, 17, 64, 4096):
        for arch in (75, 80, 86, 89, 90, 100, 120):
            for fmt, layout in ((PROBLEM.format, "rows/1"), (None, "dense")):
                for other in ({}, {"gated": True}, {"experts": 8}, {"swapped": True}):
                    problem = replace(
                        PROBLEM, rows=rows, arch=arch, format=fmt, layout=layout, **other
                    )
                    assert layout in FAMILIES[choose(problem)].layouts
    assert choose(PROBLEM) == "plain_rows"
    assert choose(replace(PROBLEM, rows=64)) == "plain_tiles"


def test_small_products_share_rows_among_warps():
    """So that a GPU has work; never more warps than there are chunks of 32 lanes."""
    plain: Any = FAMILIES["plain_rows"]
    dense = Dense(0, np.dtype(F32), 1, 1)

    def splits(rows: int, columns: int, depth: int) -> int:
        product = Product(rows, columns, depth, dense, (dense,))
        return plain.splits(product, -(-rows // plain.height), 132)

    assert [splits(1, 4096, k) for k in (0, 8, 256, 512, 1024, 4096)] == [1, 1, 1, 2, 2, 2]
    assert [splits(1, n, 16384) for n in (1, 1024, 4096, 14336)] == [8, 8, 2, 1]


def test_a_grid_has_no_more_blocks_than_a_gpu_takes():
    launch = plain_launch("matmul_rows", ("Dense", "Dense"), "", 2**40)
    assert launch.grid == (2**31 - 1, 1, 1)
