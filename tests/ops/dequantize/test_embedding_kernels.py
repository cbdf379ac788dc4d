"""The kernel that decodes rows by their numbers gives the reference's values, on the emulator."""

from collections.abc import Iterator

import embedding_cases as lookups
import kernel_cases as cases
import numpy as np
import pytest
from embedding_cases import MATRICES, ODDS, looked_up, numbers, one
from emulator import Emulator, Recorder, compiler
from kernel_cases import FEW, NAMES, same_values
from on_emulator import OnEmulator
from oracle import DTYPES
from samples import sampled, selected

import cuquant as cq

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

F32 = np.float32
SOME = sampled(MATRICES, "format", *cases.AXES_OF_CASES)
SOME_ODD = sampled(ODDS, "format", "dtype", lambda case: (case.shape, case.axis))
TARGETS = ("nf4", "k3", "bf16", "q4_k", "int8+absmax", "nf4:flat")


@pytest.fixture(scope="module", autouse=True)
def built(request) -> None:
    """All kernels of the tests that run, compiled together."""
    recorder = Recorder()
    run = OnEmulator(recorder)
    found = [
        given["case"].expected()
        for test in ("test_the_matrix", "test_odd_formats")
        for given in selected(request, test)
    ]
    for test, make in OF_A_NAME.items():
        found += [make(**given) for given in selected(request, test)]
    for q in found:
        run.embedding(numbers(q.shape[0]), run.copy(q))
    for given in selected(request, "test_rows_go_anywhere"):
        for q, ids, out, _ in targets(recorder, given["name"]):
            run.embedding(ids, q, out=out)
    Emulator().build(recorder.programs)


OF_A_NAME = {
    "test_scales_that_values_overflow_with": lookups.of_every_scale,
    "test_random_bytes_of_ggml_blocks": lookups.random_blocks,
    "test_components_lie_anywhere": lambda name, layout: one(name),
}


def check(q: cq.QuantArray, ids: np.ndarray | None = None, dtype: object = None) -> None:
    emulator = Emulator()
    run = OnEmulator(emulator)
    given = numbers(q.shape[0]) if ids is None else ids
    found = run.embedding(emulator.array(given), run.copy(q), dtype)
    assert same_values(found, looked_up(q, given, dtype))


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SOME, ids=str)
def test_the_matrix(case):
    check(case.expected())


@pytest.mark.parametrize("case", SOME_ODD, ids=str)
def test_odd_formats(case):
    check(case.expected())


def test_every_format_is_looked_up():
    assert {case.format for case in MATRICES} >= set(NAMES)
    assert {case.format for case in MATRICES if case.axis == 0} >= set(NAMES)


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled([(n, d) for n in lookups.SCALED for d in DTYPES], lambda n, _: cases.kind_of(n),
            lambda _, d: d),
)  # fmt: skip
def test_scales_that_values_overflow_with(name, dtype):
    check(lookups.of_every_scale(name, dtype))


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled([(n, d) for n in lookups.BLOCKED for d in DTYPES], lambda n, _: n, lambda _, d: d),
)
def test_random_bytes_of_ggml_blocks(name, dtype):
    check(lookups.random_blocks(name, dtype))


# ---- ids, and where rows go ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
                                   "uint64"])  # fmt: skip
def test_ids_of_any_dtype(dtype):
    q, info = one("nf4"), np.iinfo(dtype)
    ids = np.array([3, 0, 23, 24, info.max, info.min, 3], dtype)
    check(q, ids)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_last_of_an_odd_number_of_chunks_is_written(dtype):
    """Pairs of lanes trade halves of float32, and the last one's partner has none of its own."""
    for columns in (8, 40, 520):
        q = cq.quantize(np.ones((3, columns), F32), "nf4")
        check(q, np.array([2]), dtype)
        check(q, np.array([0, 1, 2]), dtype)


def test_ids_of_any_shape():
    q, ids = one("nf4"), numbers(24)
    for given in (ids[0, 0], ids[0], ids.reshape(3, 5, 2, 2), ids[:, :1], ids[..., None]):
        check(q, given)


def test_ids_that_do_not_follow_each_other():
    q, emulator = one("nf4"), Emulator()
    run = OnEmulator(emulator)
    whole = emulator.array(numbers(24))
    for ids in (whole[:, ::3], whole.T, whole[::-1, ::-1], np.broadcast_to(whole[0, 3], (4,))):
        assert same_values(run.embedding(ids, run.copy(q)), looked_up(q, ids))


def targets(
    backend: Emulator | Recorder, name: str
) -> Iterator[tuple[cq.QuantArray, np.ndarray, np.ndarray, np.ndarray]]:
    """QuantArrays, ids, arrays to write to, and the memory these are views of."""
    q = OnEmulator(backend).copy(one(name))
    for lead in ((6,), (2, 3)):
        ids = backend.array(numbers(24)[2, :6].reshape(lead))
        for layout in cases.WRITABLE:
            where, shape = cases.LAYOUTS[layout], (*lead, 256)
            base = backend.empty(where.base(shape), q.dtype)
            base[...] = 7
            yield q, ids, where.view(base, shape), base


@pytest.mark.parametrize("name", TARGETS)
def test_rows_go_anywhere(name):
    """What lies between and beside them is left alone."""
    emulator = Emulator()
    for q, ids, out, base in targets(emulator, name):
        wanted = looked_up(q, ids)
        assert OnEmulator(emulator).embedding(ids, q, out=out) is out
        assert same_values(np.array(out), wanted)
        out[...] = 7
        assert (base == 7).all()


@pytest.mark.parametrize("layout", ["misaligned", "steps", "rows", "reversed"])
@pytest.mark.parametrize("name", ["nf4", "k3", "uint4", "fp16", "q4_0", "q6_k"])
def test_components_lie_anywhere(name, layout):
    q, emulator, parts = one(name), Emulator(), {}
    for key, part in q.arrays().items():
        where = cases.LAYOUTS[layout if part.ndim else "whole"]
        base = emulator.zeros(where.base(part.shape), part.dtype)
        parts[key] = where.view(base, part.shape)
        parts[key][...] = part
    ids = numbers(24)
    found = OnEmulator(emulator).embedding(emulator.array(ids), q._with(components=parts))
    assert same_values(found, looked_up(q, ids))


def test_no_permutation_leads_out_of_the_array():
    """On a GPU it is not looked at beforehand: memory that is not the array's is never read."""
    q = one("int4:32+permuted")
    emulator = Emulator()
    run = OnEmulator(emulator)
    for bad in (np.full(256, 1 << 30), np.full(256, -5), np.zeros(256)):
        parts = {**q.components, "permutation": bad.astype(np.int32)}
        found = run.embedding(emulator.array(np.arange(24)), run.copy(q._with(components=parts)))
        assert found.shape == (24, 256)


# ---- launches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FEW, "q4_k", "fp16", "nf4:flat", "int8+absmax"])
def test_one_kernel_does_it(name):
    recorder = Recorder()
    run = OnEmulator(recorder)
    run.embedding(np.arange(24).reshape(4, 6), run.copy(one(name)))
    assert [launch.program.entry for launch in recorder.launches] == ["decode_rows"]


def test_empty_arrays_launch_nothing():
    recorder = Recorder()
    run = OnEmulator(recorder)
    for shape, lead in (((4, 64), (0,)), ((4, 64), (2, 0, 3)), ((4, 0), (5,)), ((0, 64), (0,))):
        q = run.copy(cq.quantize(np.zeros(shape, F32), "nf4"))
        found = run.embedding(np.zeros(lead, np.int64), q)
        assert found.shape == (*lead, shape[1])
    assert not recorder.launches


@pytest.mark.parametrize("name", ["nf4", "q4_0", "fp8_e4m3:128x128"])
def test_a_matrix_without_rows_has_none(name):
    check(cq.quantize(np.zeros((0, 64), F32), name), np.array([0, -1, 7]))
