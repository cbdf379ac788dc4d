"""prepack's kernels under the emulator, against what NumPy makes."""

import fake_gpu
import numpy as np
import prepack_cases as cases
import pytest
from emulator import Emulator, Recorder
from fake_gpu import needs_compiler, needs_torch
from prepack_cases import Case, same, same_parts
from samples import sampled, selected

import cuquant as cq
from cuquant.array.fragments import Fragments, takes
from cuquant.ops.layout.prepack import Prepack
from cuquant.ops.programs import PROGRAMS


@pytest.fixture(scope="module")
def built(request):
    """All kernels of the tests that run, compiled together."""
    recorder = Recorder()
    tests = ("test_kernels_make_what_numpy_makes", "test_on_a_gpu_of_a_library")
    for given in (given for test in tests for given in selected(request, test)):
        q = given["case"].weight()
        if not takes(q.format, q.shape):
            continue
        layout = Prepack(Fragments(q.format, q.shape))
        layout.rows(recorder, layout.lay_out(recorder, q.arrays()))
    Emulator().build(recorder.programs)
    return recorder


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [*sampled(cases.ALL, "format", lambda case: len(case.shape), "options"), *cases.EMPTY],
    ids=str,
)
def test_kernels_make_what_numpy_makes(case, built):
    q, emulator = case.weight(), Emulator()
    layout = Prepack(Fragments(q.format, q.shape))
    given = {name: emulator.array(part) for name, part in q.arrays().items()}
    laid = layout.lay_out(emulator, given)
    assert same_parts(laid, cq.prepack(q).arrays())
    assert same_parts(layout.rows(emulator, laid), q.arrays())
    assert same_parts(given, q.arrays())


@needs_compiler
@pytest.mark.parametrize("name", cases.LAID)
def test_programs_are_known_ahead(name, built):
    fmt = cq.get_format(name)
    own = [case for case in cases.BASICS if case.format == name]
    recorder, known = Recorder(), set(PROGRAMS["prepack"](fmt))
    for case in own:
        layout = Prepack(Fragments(fmt, case.shape))
        layout.rows(recorder, layout.lay_out(recorder, case.weight().arrays()))
    assert set(recorder.programs) == known
    assert not PROGRAMS["prepack"](cq.get_format("fp16"))


LIBRARIES = ["cupy", pytest.param("torch", marks=needs_torch)]


@needs_compiler
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "case",
    [*cases.BASICS[1::9], cases.DOUBLE[0], cases.PACKINGS[3], *cases.AS_THEY_ARE[:1]],
    ids=str,
)
def test_on_a_gpu_of_a_library(case, library, built, monkeypatch):
    """prepack, unpack and numpy(), where arrays are CuPy's or torch's on a GPU."""
    q = case.weight()
    wanted = cq.prepack(q)
    to = fake_gpu.install(library, monkeypatch)
    there = {name: to(part) for name, part in q.arrays().items()}
    given = cq.QuantArray(q.format, q.shape, q.dtype, there, q.axes)
    p = cq.prepack(given)
    assert (p.kind, p.device) == (library, "cuda:0")
    assert same_parts(p.numpy().arrays(), wanted.arrays())
    again = cq.unpack(p)
    assert (again.kind, again.device) == (library, "cuda:0") and same(again.numpy(), q)
    if library == "cupy":
        assert same_parts(wanted.to("cuda").numpy().arrays(), wanted.arrays())


@needs_compiler
@pytest.mark.parametrize("name", ["nf4", "k3", "q4_0", "q4_k"])
def test_components_lie_anywhere(name, built, monkeypatch):
    """What a user makes a QuantArray of need not be contiguous, nor start on whole elements."""
    q = Case(name, (37, 512)).weight()
    to = fake_gpu.install("cupy", monkeypatch)
    for view in (lambda a: a[..., ::2], lambda a: a[..., 1::2]):
        parts = {}
        for key, part in q.arrays().items():
            base = to(np.zeros((*part.shape[:-1], 2 * part.shape[-1]), part.dtype))
            parts[key] = view(base)
            parts[key][...] = to(part)
        moved = cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)
        assert same_parts(cq.prepack(moved).numpy().arrays(), cq.prepack(q).arrays())


@needs_compiler
@pytest.mark.parametrize("name", ["int8", "q4_0", "q6_k", "q5_1"])
def test_bytes_start_anywhere(name, built):
    """A byte further than the allocation: ggml's blocks in a file map."""
    q, emulator = Case(name, (37, 512)).weight(), Emulator()
    parts = {}
    for key, part in q.arrays().items():
        base = emulator.empty((part.size + 1,), part.dtype)
        parts[key] = base[1:].reshape(part.shape)
        parts[key][...] = part
    layout = Prepack(Fragments(q.format, q.shape))
    assert same_parts(layout.lay_out(emulator, parts), cq.prepack(q).arrays())
