"""matmul_stream.cu against float64, on the CPU under the emulator."""

import numpy as np
import pytest
from emulator import Emulator, Recorder, compiler
from emulator.compile import HERE
from fragment_products import (
    AXES,
    CASES,
    OWN,
    TYPES,
    Case,
    Expected,
    check_epilogues,
    check_nan_scales,
    check_nonfinite_x,
    check_out,
    run_case,
)
from kernel_arrays import LEVELS, WRITABLE
from oracle import bits_equal
from products import ULP, Products, exact, is_close, normal, values, weight
from samples import each_number, sampled, selected
from stream_products import divided, gated, swiglu_bound

import cuquant as cq
from cuquant.gpu.jit import Launch, Program
from cuquant.ops.layout import packed_weight as prepacked
from cuquant.reference import ACTIVATIONS

F32 = np.float32
ARCH = 80  # the first one
pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

ROWS = [
    Case(name, dtype, rows, (35, 131))
    for name, dtype in zip(("int4", "nf4"), TYPES, strict=True)
    for rows in range(1, 34)
]

# Of x [13, K] and a weight of 70 rows: tokens, tiles, strips, depth, split, strips taken.
SHAPES = [
    (13, 2, 5, 1, 1, 5),
    (4, 1, 2, 2, 1, 6),
    (13, 2, 1, 4, 1, 5),
    (5, 1, 1, 8, 1, 2),
    (8, 1, 3, 3, 1, 3),
    (13, 4, 2, 5, 1, 4),
    (1, 1, 4, 1, 1, 16),
]
UNEVEN = [
    (13, 2, 3, 2, 1, 5),
    (13, 2, 4, 1, 2, 5),
    (13, 4, 2, 2, 1, 3),
]  # last rounds of fewer strips
SPLIT = [(13, 2, 3, 2, 2, 3), (5, 1, 1, 4, 2, 3)]  # with clusters of two blocks
DIVIDED = [
    *((Case("nf4", "float16", 13, (70, 1100)), shape) for shape in SHAPES + UNEVEN),
    *(
        (Case(name, dtype, 13, (70, depth), options=options), shape)
        for name, dtype, depth, options in (
            ("uint4", "bfloat16", 1100, (("block_size", 16),)),
            ("q4_k", "float16", 1024, ()),
            ("k5", "float16", 1100, (("block_size", "row"),)),
            ("int4", "bfloat16", 1100, (("block_size", 320),)),
            ("int8", "float16", 1100, (("block_size", (8, 128)),)),
        )
        for shape in (SHAPES[1], SPLIT[0], UNEVEN[1], (13, 2, 4, 4, 1, 5))
    ),
    (Case("nf4", "float16", 13, (70, 1100)), SPLIT[1]),
    (Case("nf4", "float16", 13, (70, 200)), SPLIT[1]),  # parts of K that have no unit
    *(  # groups of two chunks, within which parts of K begin; strips that are not there
        (Case(name, dtype, 4, (70, 1600), options=(("block_size", 512), *options)), shape)
        for name, dtype, options in (
            ("int4", "float16", ()),
            ("uint3", "bfloat16", ()),
            ("nf4", "float16", (("double_quant", True),)),
            ("int8", "bfloat16", (("scale_dtype", "float32"),)),
        )
        for shape in ((4, 1, 2, 2, 1, 6), (4, 1, 4, 3, 1, 8), (4, 1, 1, 1, 2, 6))
    ),
    *(
        (Case("uint4", dtype, 13, (70, 1100), options=(("offset", "min"), *options)), SHAPES[1])
        for dtype, options in (
            ("float16", (("block_size", 16),)),
            ("bfloat16", (("block_size", 320), ("scale_dtype", "float32"))),
            ("float16", (("block_size", (8, 128)), ("scale_dtype", "bfloat16"))),
        )
    ),
    # 8 units ahead, in whole chunks and not.
    (Case("int3", "float16", 3, (70, 1100)), (3, 1, 2, 1, 1, 6, 8)),
    (Case("int3", "bfloat16", 8, (70, 1024)), (8, 1, 1, 2, 1, 5, 8)),
]
# Weights that are not prepacked, but whose rows lie as this kernel can read them.
ROWS_TAKEN = [name for name in OWN if prepacked.takes_rows(cq.get_format(name), 256)]
DIRECT = [
    *(Case(name, TYPES[i % 2], 5, (35, 256)) for i, name in enumerate(ROWS_TAKEN)),
    *(Case("int4", "float16", rows, (35, 192)) for rows in (1, 2, 3, 8, 9, 16)),
    *(Case("nf4", "bfloat16", 4, (n, 320)) for n in (1, 8, 9, 17, 47)),
    *(
        Case(name, "float16", 3, (35, 640), "whole", options)
        for name, options in (
            ("nf4", (("block_size", 320),)),
            ("uint4", (("block_size", "row"),)),
            ("int8", (("double_quant", True),)),
            ("uint2", (("block_size", 192),)),
        )
    ),
    *(  # groups of 16 and 32 columns, whose codes lanes exchange; and each number of bits
        Case(name, TYPES[i % 2], 9, (35, 320), options=(("block_size", block),))
        for i, (name, block) in enumerate(
            (name, block)
            for name in [
                "uint2",
                "int4",
                "nf4",
                "uint4",
                "int8",
                "fp8_e4m3",
                "k8",
                "int3",
                "uint5",
                "k6",
                "int7",
                "fp6_e2m3",
            ]
            for block in (16, 32)
        )
    ),
    *(
        Case(name, TYPES[i % 2], 9, (35, 320), options=(("offset", "min"), *options.items()))
        for i, (name, options) in enumerate(
            (
                ("uint4", {}),
                ("uint4", {"block_size": 64, "scale_dtype": "bfloat16"}),
                ("uint4", {"block_size": 16, "scale_dtype": "float32"}),
                ("uint8", {"block_size": 32}),
                ("uint2", {"block_size": 32, "scale_dtype": "bfloat16"}),
                ("uint2", {"block_size": 64}),
                ("uint3", {"block_size": "row", "scale_dtype": "float32"}),
                ("uint5", {"block_size": 16}),
            )
        )
    ),
    *(
        Case(name, TYPES[i % 2], 9, (35, 320), options=(("scale_dtype", dtype), *block))
        for i, (name, dtype, block) in enumerate(
            (
                ("int4", "bfloat16", ()),
                ("uint4", "bfloat16", (("block_size", 16),)),
                ("int8", "e8m0", (("block_size", 64),)),
                ("fp8_e4m3", "e8m0", (("block_size", 32),)),
            )
        )
    ),
    *(Case(f"k{bits}", "float16", 9, (35, 320)) for bits in range(2, 9)),
    *(Case(f"uint{bits}", "bfloat16", 9, (35, 320)) for bits in range(2, 9)),
    Case("int4", "float16", 3, (35, 256), "misaligned"),
]
# So much of K for a warp that what follows comes to L2 by lines, of the last rows' strip too.
DIRECT_DIVIDED = [
    (Case("int4", "float16", 2, (35, 1280)), (2, 1, 1, 1, 1, 2)),
    (Case("int8", "bfloat16", 4, (37, 2304)), (4, 1, 2, 1, 1, 2)),
    (Case("nf4", "float16", 1, (17, 1280)), (1, 1, 1, 1, 2, 2)),
]
GATED = [
    ("nf4", "nf4", {}),
    ("nvfp4", "nvfp4", {}),
    ("q4_k", "q4_k", {}),
    ("uint3", "uint3", {"block_size": 32}),
    ("uint4", "uint4", {"block_size": 32, "offset": "min"}),
]
GATED_UNEVEN = [
    (GATED[0], UNEVEN[0]),
    (GATED[2], UNEVEN[1]),
    (GATED[3], UNEVEN[2]),
    (("int4", "int4", {}), (13, 2, 4, 4, 1, 5)),
]
UNLIKE = [("nf4", "int4"), ("q4_0", "nf4")]
NO_PLACE = ("huge", "tiny", "all sizes")  # levels in 16 bits: infinite, or all of them 0


def two_codebooks() -> list[cq.QuantArray]:
    return [weight("k4", (35, 64), levels=LEVELS[name]) for name in ("16 close", "5")]


def wide_levels(name: str) -> cq.QuantArray:
    levels = LEVELS[name]
    bits = max(2, (len(levels) - 1).bit_length())
    return weight(f"k{bits}", (9, 64), levels=levels, scale_dtype="float32")


@pytest.fixture(scope="module")
def built(request) -> None:
    """The programs of the tests that run, compiled together."""
    recorder = Recorder(arch=ARCH)
    run = Products(recorder)
    for given in (
        *selected(request, "test_the_matrix"),
        *selected(request, "test_any_number_of_rows"),
    ):
        run_case(run, given["case"])
    for given in selected(request, "test_any_number_of_rows"):
        run(cq.linear, given["case"].x[-1:], cq.prepack(given["case"].weight))
    for given in selected(request, "test_every_way_to_divide"):
        with divided(given["numbers"]):
            run_case(run, given["case"])
    for given in selected(request, "test_weights_that_are_not_prepacked"):
        run(cq.linear, given["case"].x, given["case"].weight)
    for given in selected(request, "test_weights_that_are_not_prepacked_divided"):
        with divided(given["numbers"]):
            run(cq.linear, given["case"].x, given["case"].weight)
    for given in selected(request, "test_a_scale_that_is_nan_hurts_its_row_alone"):
        q = weight(given["name"], (35, 131))
        run(cq.linear, normal((given["rows"], 131), "float16"), cq.prepack(q))
    for given in selected(request, "test_swiglu"):
        names, rows = given["names"], given["rows"]
        run(cq.swiglu, normal((rows, 256), "float16"), *map(cq.prepack, gated(*names)))
        if names == GATED[0] and rows == 3:
            run(cq.swiglu, normal((rows, 256), "float16"), *gated(*names))
    for given in selected(request, "test_swiglu_whose_last_rounds_have_fewer_strips"):
        with divided(given["numbers"]):
            pair = map(cq.prepack, gated(*given["names"]))
            run(cq.swiglu, normal((13, 256), "float16"), *pair)
    assert {program.file for program in recorder.programs} <= {"matmul/stream.cu"}
    for pair in (two_codebooks(), *(gated(*names, {}) for names in UNLIKE)):
        run(cq.swiglu, normal((3, pair[0].shape[1]), "float16"), *map(cq.prepack, pair))
    for name in NO_PLACE:
        run(cq.linear, normal((2, 64), "float16"), cq.prepack(wide_levels(name)))
    Emulator().build(recorder.programs)


@pytest.fixture
def run(built) -> Products:
    return Products(Emulator(arch=ARCH))


# ---- linear -------------------------------------------------------------------------------------


def test_all_cases_are_multiplied_by_this_kernel():
    """Each of them by it alone: also those that only `-m full` runs."""
    for case in CASES:
        recorder = Recorder(arch=ARCH)
        run_case(Products(recorder), case)
        assert {program.file for program in recorder.programs} == {"matmul/stream.cu"}, case


@pytest.mark.parametrize("case", sampled(CASES, *AXES), ids=str)
def test_the_matrix(case, run):
    x, expected = case.x, Expected.of(case.x, case.weight)
    y = run_case(run, case)
    assert y.dtype == x.dtype and y.shape == expected.sums.shape
    assert expected.admits(y, case.shape[1])
    wide = run_case(run, case, out_dtype="float32")
    assert wide.dtype == F32 and expected.admits(wide, case.shape[1])


@pytest.mark.parametrize(
    "case",
    sampled(ROWS, "format", lambda case: (case.rows - 1) // 8, lambda case: case.rows % 8),
    ids=str,
)
def test_any_number_of_rows(case, run):
    """Each row is what it is alone: what is between x's rows and the end of a tile is not read."""
    y = run_case(run, case, out_dtype="float32")
    assert Expected.of(case.x, case.weight).admits(y, case.shape[1])
    last = run(cq.linear, case.x[-1:], cq.prepack(case.weight), out_dtype="float32")
    assert bits_equal(y[-1:], last)


@pytest.mark.parametrize(
    ("case", "numbers"),
    sampled(DIVIDED, "format", "options", *each_number(7)),
    ids=lambda v: v if isinstance(v, tuple) else str(v),
)
def test_every_way_to_divide(case, numbers, run):
    with divided(numbers):
        y = run_case(run, case, out_dtype="float32")
    assert Expected.of(case.x, case.weight).admits(y, case.shape[1])


@pytest.mark.parametrize(
    "case", sampled(DIRECT, lambda case: case.weight.format.bits, *AXES[1:]), ids=str
)
def test_weights_that_are_not_prepacked(case, run):
    y = run(cq.linear, case.x, case.weight, out_dtype="float32")
    assert Expected.of(case.x, case.weight).admits(y, case.shape[1])


@pytest.mark.parametrize(("case", "numbers"), DIRECT_DIVIDED, ids=str)
def test_weights_that_are_not_prepacked_divided(case, numbers, run):
    with divided(numbers):
        y = run(cq.linear, case.x, case.weight, out_dtype="float32")
    assert Expected.of(case.x, case.weight).admits(y, case.shape[1])


def test_the_same_bits_in_every_order_of_threads(built):
    runs = []
    for order in ("ascending", "descending", "shuffled"):
        with divided(SPLIT[1]):
            emulator = Emulator(order=order, arch=ARCH)
            runs.append(run_case(Products(emulator), DIVIDED[-2][0], out_dtype="float32"))
    assert all(bits_equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *(
            (name, 3)
            for name in ("nf4", "uint4", "int8", "mxfp4", "fp8_e4m3", "k3", "int4+bfloat16")
        ),
        *((name, 3) for name in ("uint4:32+min", "uint4:64+min+bfloat16", "int8:64+e8m0")),
        ("int4", 12),
        ("uint4:64+min", 12),
    ],
)
def test_a_scale_that_is_nan_hurts_its_row_alone(name, rows, run):
    """Also that of the last group, which the columns behind K share."""
    check_nan_scales(run, weight(name, (35, 131)), normal((rows, 131), "float16"), 21)


@pytest.mark.parametrize("rows", [3, 12])
def test_nan_and_infinity_of_x_go_through(rows, run):
    """K is ragged."""
    check_nonfinite_x(run, weight("nf4", (35, 131)), normal((rows, 131), "bfloat16"))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NO_PLACE)
def test_levels_without_a_place_in_16_bits_are_multiplied_by_the_plain_kernel(name, dtype, run):
    q, x = wide_levels(name), normal((2, 64), dtype)
    y = run(cq.linear, x, cq.prepack(q), out_dtype="float32")
    wanted, size = exact(x, q)
    assert is_close(y, wanted, size, 64)


# ---- what happens to the sums -------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("rows", [3, 12])
def test_epilogues(run, activation, rows):
    check_epilogues(run, weight("int4", (35, 131)), normal((rows, 131), "float16"), activation)


@pytest.mark.parametrize("layout", ["whole", *WRITABLE])
def test_out_lies_anywhere(run, layout):
    """N is no multiple of 4."""
    case = Case("nf4", "float16", 3, (35, 131))
    check_out(run, case, layout, Expected.of(case.x, case.weight))


# ---- gated units --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 12])
@pytest.mark.parametrize("names", GATED, ids=str)
def test_swiglu(names, rows, run):
    gate, up = gated(*names)
    x = normal((rows, 256), "float16")
    true, bound = swiglu_bound(x, gate, up)
    pairs = [(cq.prepack(gate), cq.prepack(up))]
    if names == GATED[0] and rows == 3:
        pairs.append((gate, up))
    for pair in pairs:
        y = run(cq.swiglu, x, *pair)
        assert y.dtype == np.float16 and y.shape == (rows, 70)
        assert (np.abs(values(y) - true) <= bound + ULP["float16"] * np.abs(true) + 2.0**-25).all()


@pytest.mark.parametrize(("names", "numbers"), GATED_UNEVEN, ids=str)
def test_swiglu_whose_last_rounds_have_fewer_strips(names, numbers, run):
    gate, up = gated(*names)
    x = normal((13, 256), "float16")
    true, bound = swiglu_bound(x, gate, up)
    with divided(numbers):
        y = run(cq.swiglu, x, cq.prepack(gate), cq.prepack(up))
    assert (np.abs(values(y) - true) <= bound + ULP["float16"] * np.abs(true) + 2.0**-25).all()


@pytest.mark.parametrize("names", UNLIKE, ids=str)
def test_swiglu_of_weights_that_no_kernel_takes_together(names, run):
    """Of two formats; and where one of them is not prepacked."""
    gate, up = gated(*names, {})
    x = normal((3, 256), "float16")
    wanted = cq.swiglu(x, gate, up)
    pairs = ((cq.prepack(gate), cq.prepack(up)), (cq.prepack(gate), up), (gate, cq.prepack(up)))
    for pair in pairs:
        assert np.allclose(values(run(cq.swiglu, x, *pair)), wanted, rtol=2e-3, atol=2e-3)


def test_swiglu_of_two_codebooks(run):
    """Their levels differ, and a kernel has one table."""
    gate, up = two_codebooks()
    x = normal((3, 64), "float16")
    y = run(cq.swiglu, x, cq.prepack(gate), cq.prepack(up))
    assert np.allclose(values(y), cq.swiglu(x, gate, up), rtol=2e-3, atol=2e-3)


# ---- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [32, 160, 512, 1024])
@pytest.mark.parametrize("fours", [1, 2, 3, 7, 28, 56, 129, 511, 513, 1023, 1024, 1025, 9600])
def test_threads_divide_by_a_reciprocal_exactly(fours, threads):
    """Each has the four of a line that its number says, and then one `threads` further."""
    emulator = Emulator(folders=[HERE / "planted"])
    places = emulator.empty((threads, 2, 2), np.dtype(np.int32))
    launch = Launch(Program("turns.cu", "turns"), (1, 1, 1), threads)
    emulator.launch(launch, 4 * fours, emulator.pointer(places))
    first = np.arange(threads)[:, None] + [0, threads]
    assert np.array_equal(places, np.stack(np.divmod(first, fours), axis=2))
