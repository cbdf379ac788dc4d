"""The kernels that quantize have the reference's bytes, on the CPU under the emulator."""

from itertools import product

import kernel_cases as cases
import numpy as np
import pytest
from emulator import ORDERS, Emulator, Recorder, compiler
from in_turn import in_turn
from kernel_cases import FEW, FORMATS, NAMES, OWN, Case, differences
from on_emulator import OnEmulator
from oracle import DTYPES
from samples import sampled, selected

import cuquant as cq
from cuquant.formats.search import SEARCHES
from cuquant.ops.quantize.finite import first_nonfinite
from cuquant.ops.quantize.search import Search

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

F32 = np.float32


@pytest.fixture(scope="module", autouse=True)
def built(request) -> None:
    """All kernels of the tests that run, compiled together."""
    recorder = Recorder()
    for case in {item["case"]: None for test in MATRIX for item in selected(request, test)}:
        OnEmulator(recorder).case(case)
    for item in selected(request, "test_the_number_of_multiprocessors_does_not_matter"):
        recorder.multiprocessors = item["multiprocessors"]
        OnEmulator(recorder).case(in_parts(item["name"]))
    recorder.multiprocessors = Emulator().multiprocessors
    for item in selected(request, "test_raise_says_what_the_reference_says"):
        for nonfinite in ("propagate", "raise"):
            usual = Case(item["name"], "float32", (4, 256), data="normal", nonfinite=nonfinite)
            OnEmulator(recorder).case(usual)
    for item in selected(request, "test_out_is_overwritten_wherever_it_lies"):
        OnEmulator(recorder).case(Case(item["name"], cases.dtype_of(item["name"]), data="normal"))
    for dtype in DTYPES.values():
        x = np.zeros((2, 3, 40), dtype)
        first_nonfinite(recorder, recorder.view(x))
    Emulator().build(p for p in recorder.programs if p.file != "quantize/search.cu")
    searches = [Search(FORMATS[name]) for name in sorted(SEARCHES)]  # as their own tests do
    Emulator().build(s.launch(dtype, 1).program for s in searches for dtype in DTYPES.values())


# Tests of a case, whose kernels are the same for all.
MATRIX = (
    "test_every_format_and_dtype",
    "test_blocks_run_along_any_axis",
    "test_rows_of_any_length",
    "test_arrays_lie_anywhere",
    "test_blocks_of_any_size",
    "test_nonfinite_numbers_are_clamped",
    "test_stochastic_rounding_draws_the_same",
    "test_scales_that_were_found_beforehand",
    "test_scales_are_quantized_themselves",
    "test_minimums_and_scales_of_other_dtypes",
    "test_codebooks_of_any_levels",
    "test_words_and_planes",
    "test_scales_below_the_smallest_normal_number",
    "test_ranges_beyond_float32",
    "test_the_order_of_threads_does_not_matter",
)


def check(case: Case, emulator: Emulator | None = None) -> None:
    found = OnEmulator(emulator or Emulator()).case(case)
    assert not differences(found, case.expected())


# ---- the matrix ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", sampled(cases.BASICS, cases.of_own_dtype, "dtype"), ids=str)
def test_every_format_and_dtype(case):
    check(case)


@pytest.mark.parametrize("case", sampled(cases.AXES, *cases.AXES_OF_CASES), ids=str)
def test_blocks_run_along_any_axis(case):
    check(case)


@pytest.mark.parametrize("case", sampled(cases.SHAPES, *cases.AXES_OF_CASES), ids=str)
def test_rows_of_any_length(case):
    check(case)


@pytest.mark.parametrize("case", sampled(cases.VIEWED, *cases.AXES_OF_CASES), ids=str)
def test_arrays_lie_anywhere(case):
    check(case)


@pytest.mark.parametrize(
    "case", sampled(cases.BLOCKS, *cases.AXES_OF_CASES, "options", "shape"), ids=str
)
def test_blocks_of_any_size(case):
    check(case)


@pytest.mark.parametrize("case", sampled(cases.CLAMPED, *cases.AXES_OF_CASES), ids=str)
def test_nonfinite_numbers_are_clamped(case):
    check(case)


@pytest.mark.parametrize("case", sampled(cases.STOCHASTIC, *cases.AXES_OF_CASES), ids=str)
def test_stochastic_rounding_draws_the_same(case):
    check(case)


@pytest.mark.parametrize("case", sampled(cases.GIVEN, *cases.AXES_OF_CASES), ids=str)
def test_scales_that_were_found_beforehand(case):
    check(case)


@pytest.mark.parametrize("case", sampled(cases.DOUBLE, *cases.AXES_OF_CASES), ids=str)
def test_scales_are_quantized_themselves(case):
    check(case)


@pytest.mark.parametrize("case", cases.STORED, ids=str)
def test_minimums_and_scales_of_other_dtypes(case):
    check(case)


@pytest.mark.parametrize("case", sampled(cases.LEARNED, *cases.AXES_OF_CASES, "options"), ids=str)
def test_codebooks_of_any_levels(case):
    check(case)


@pytest.mark.parametrize("case", sampled(cases.PACKINGS, "options", "shape"), ids=str)
def test_words_and_planes(case):
    check(case)


@pytest.mark.parametrize("case", sampled(cases.SMALL, *cases.AXES_OF_CASES), ids=str)
def test_scales_below_the_smallest_normal_number(case):
    check(case)


@pytest.mark.parametrize(
    "case", sampled(cases.RANGES, *cases.AXES_OF_CASES, "format", "shape"), ids=str
)
def test_ranges_beyond_float32(case):
    check(case)


# ---- threads and multiprocessors ----------------------------------------------------------------

UNORDERED = [
    *(Case(name, cases.dtype_of(name)) for name in FEW),
    *(case for case in cases.BLOCKS if case.format in ("int1", "uint4")),
    *(case for case in cases.AXES if case.axis == 0 and case.format in FEW),
]


@pytest.mark.parametrize(
    ("case", "order"),
    sampled(
        product(UNORDERED, ORDERS[:3]),
        "format",
        "options",
        lambda case, order: (case.axis, len(case.shape), order),
    ),
    ids=str,
)
def test_the_order_of_threads_does_not_matter(case, order):
    check(case, Emulator(order))


def in_parts(name: str) -> Case:
    options = (("block_size", "tensor"),)
    return Case(name, cases.dtype_of(name), (37, 131), data="normal", options=options)


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("name", ["nf4", "int4", "uint4", "int1", "nvfp4"])
def test_the_number_of_multiprocessors_does_not_matter(name, multiprocessors):
    """Blocks too large for a thread block are looked at in as many parts as fill the GPU."""
    check(in_parts(name), Emulator(multiprocessors=multiprocessors))


# ---- NaN and infinity ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_the_first_nonfinite_number_is_found(layout, dtype):
    rng = np.random.default_rng(5)
    for value, count in ((np.nan, 1), (np.inf, 3), (-np.inf, 40), (0, 1)):
        values = rng.standard_normal((6, 40)).astype(DTYPES[dtype])
        values.reshape(-1)[rng.choice(240, count, replace=False)] = value
        base = cases.placed(values, layout)
        emulator = Emulator()
        x = cases.LAYOUTS[layout].view(emulator.array(base), values.shape)
        wrong = np.flatnonzero(~np.isfinite(np.asarray(x).reshape(-1)))
        wanted = int(wrong[0]) if len(wrong) else None
        assert first_nonfinite(emulator, emulator.view(x)) == wanted


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 1), (2, 3, 41), (41, 2, 3)])
def test_the_first_nonfinite_number_of_any_shape(shape):
    count = int(np.prod(shape))
    for at in {0, count // 2, count - 1}:
        x = np.zeros(shape, F32)
        x.reshape(-1)[at] = np.nan
        emulator = Emulator()
        for order in (shape, shape[::-1]):
            view = emulator.array(x).reshape(order)
            assert first_nonfinite(emulator, emulator.view(view)) == at


def refused(call, *arguments, **options) -> str:
    with pytest.raises(ValueError) as error:
        call(*arguments, **options)
    return str(error.value)


def of_raise(name: str) -> tuple:
    """What is counted, and of formats with kernels for float32 all kinds."""
    kind = cases.kind_of(name)
    return kind if cases.dtype_of(name) == "float32" else kind[:1]


@pytest.mark.parametrize("name", [*sampled(NAMES, of_raise), "nf4+dq"])
def test_raise_says_what_the_reference_says(name):
    """A NaN, an infinity, scales that overflow; and what is fine has its usual bytes."""
    fmt = cq.get_format(name)
    x = cases.normal((4, 256), DTYPES["float32"])
    for at, value in ((700, np.nan), (3, np.inf)):
        bad = x.copy()
        bad.reshape(-1)[at] = value
        wanted = refused(cq.quantize, bad, fmt, nonfinite="raise")
        assert refused(OnEmulator(Emulator()).quantize, bad, fmt, nonfinite="raise") == wanted
    mixed = x.copy()  # some blocks vanish, others are zeros
    mixed[0], mixed[1, ::2] = 0, F32(1e-45)
    mixed[1, 1::2] = -F32(1e-45)
    sizes = (1, 1e10, 1e37, 1e-6, 1e-7, 3e-8, 1e-8, 1e-9, 1e-30, 1e-40)
    for given in (*(x * F32(size) for size in sizes), mixed):
        try:
            expected = cq.quantize(given, fmt, nonfinite="raise")
        except ValueError as error:
            message = refused(OnEmulator(Emulator()).quantize, given, fmt, nonfinite="raise")
            assert message == str(error)
        else:
            found = OnEmulator(Emulator()).quantize(given, fmt, nonfinite="raise")
            assert not differences(found, expected)


# ---- out= and empty arrays ----------------------------------------------------------------------


def _out(q: cq.QuantArray, emulator: Emulator, misplaced: bool) -> cq.QuantArray:
    """A QuantArray to write to, whose components lie anywhere where `misplaced`."""
    layout = cases.LAYOUTS["misaligned" if misplaced else "whole"]
    parts = {}
    for name, part in q.arrays().items():
        base = emulator.empty(layout.base(part.shape), part.dtype)
        parts[name] = layout.view(base, part.shape)
    return cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)


@pytest.mark.parametrize(
    ("name", "misplaced", "nonfinite"),
    sampled(
        product([*FEW, "fp16", "q4_0", "q4_k"], [False, True], ["propagate", "raise"]),
        lambda name, *_: name,
        lambda _, *how: how,
    ),
)
def test_out_is_overwritten_wherever_it_lies(name, misplaced, nonfinite):
    case = Case(name, cases.dtype_of(name), data="normal", nonfinite=nonfinite)
    emulator, wanted = Emulator(), case.expected()
    out = _out(wanted, emulator, misplaced)
    x = emulator.array(case.base)
    found = OnEmulator(emulator).quantize(x, case.fmt, out=out, nonfinite=nonfinite)
    assert not differences(out, wanted)
    assert all(part is out.arrays()[key] for key, part in found.arrays().items())


def test_out_keeps_its_bytes_where_x_is_refused():
    emulator, case = Emulator(), Case("nf4", data="normal")
    out = _out(case.expected(), emulator, misplaced=False)
    before = {key: part.copy() for key, part in out.arrays().items()}
    x = case.base.copy()
    x[3, 5] = np.inf
    refused(OnEmulator(emulator).quantize, x, case.fmt, out=out, nonfinite="raise")
    assert all((out.arrays()[key] == part).all() for key, part in before.items())


@pytest.mark.parametrize("name", NAMES)
@in_turn("shape", [(0,), (0, 256), (3, 0), (2, 0, 256)])
def test_empty_arrays_launch_nothing(name, shape):
    x, recorder = np.zeros(shape, F32), Recorder()
    found = OnEmulator(recorder).quantize(x, FORMATS[name])
    assert not differences(found, cq.quantize(x, name)) and not recorder.launches


@pytest.mark.parametrize("name", [name for name in OWN if FORMATS[name].offset])
def test_empty_arrays_keep_calibrated_numbers(name):
    x, given = np.zeros((3, 0), F32), {"scale": F32(0.5), "zero_point": 1}
    fmt = cq.get_format(name, block_size="row")
    found = OnEmulator(Recorder()).quantize(x, fmt, **given)
    assert not differences(found, cq.quantize(x, fmt, **given))
