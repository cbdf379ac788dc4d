"""Prepacked experts by matmul/hopper.cu, against float64, on the CPU under the emulator."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from emulator import Emulator, Recorder, compiler
from expert_products import CASES, COUNTS, KINDS, RAGGED, Case
from fragment_products import Expected
from kernel_arrays import LAYOUTS, WRITABLE
from oracle import DTYPES, bits_equal
from products import Products, values
from programs import number
from samples import sampled

import cuquant as cq
from cuquant.ops.matmul import on_gpu as multiply
from cuquant.ops.matmul.check import Finish, Operand
from cuquant.ops.matmul.experts import Rows

ARCH = 90
pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")


def run_case(run: Products, case: Case, **options: Any) -> np.ndarray:
    return run(cq.grouped_linear, case.x, cq.prepack(case.weight), case.experts, **options)


def on_device(run: Products, case: Case, experts: np.ndarray) -> np.ndarray:
    """With experts that nobody looks at on the host."""
    w = cq.prepack(case.weight)
    left, right = Operand.of(run.guarded(case.x), "x"), Operand.of(run.guarded(w), "w")
    with run.in_place():
        finish = Finish.check([left, right], (len(case.x), case.shape[1]))
        there = run.backend.array(experts).view(_OnDevice)
        return multiply.grouped_linear(
            left, right, Rows("experts", there, (len(case.x),), w.shape[0]), finish
        )


class _OnDevice(np.ndarray):
    """Integers of a GPU."""


@pytest.fixture(scope="module")
def built() -> None:
    """The programs of all cases, compiled together."""
    recorder = Recorder(arch=ARCH)
    run = Products(recorder)
    for case in CASES:
        run_case(run, case)
    files = {program.file for program in recorder.programs}
    assert files == {"matmul/route.cu", "matmul/gather.cu", "matmul/hopper.cu"}
    Emulator().build(recorder.programs)


@pytest.fixture
def run(built) -> Products:
    return Products(Emulator(arch=ARCH))


def test_no_memory_but_a_workspace_is_taken(run):
    """Rows are sorted and copied in what the call has meanwhile."""
    case, recorder = CASES[0], Recorder(arch=ARCH)
    x, w = run.guarded(case.x), run.guarded(cq.prepack(case.weight))
    out, asked = np.zeros((len(case.x), case.shape[1]), case.x.dtype), []

    @contextmanager
    def workspace(nbytes: int) -> Iterator[int]:
        asked.append(nbytes)
        yield 1 << 20

    with (
        mock.patch.object(recorder, "workspace", workspace),
        mock.patch.object(recorder, "array", lambda experts: experts),  # as if they were there
        mock.patch.object(recorder, "empty", side_effect=AssertionError("an array was made")),
        Products(recorder).in_place(),
    ):
        cq.grouped_linear(x, w, case.experts, out=out)
    assert len(recorder.launches) == 3 and len(asked) == 1 and asked[0] > case.x.nbytes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_matrix(case, run):
    wanted = Expected.routed(case.x, case.weight, case.experts)
    y = run_case(run, case)
    assert y.dtype == case.x.dtype and y.shape == wanted.sums.shape
    assert wanted.admits(y, case.shape[2])


def test_segments_of_every_height_are_met(built):
    recorder = Recorder(arch=ARCH)
    for case in COUNTS:
        run_case(Products(recorder), case)
    hoppers = [p for p in recorder.programs if p.entry == "matmul_hopper"]
    assert {number(p, "tokens") for p in hoppers} == {16, 32, 64, 128, 256}


@pytest.mark.parametrize("case", [COUNTS[0], COUNTS[3]], ids=str)
def test_boxes_of_rows_lie_within_what_was_gathered(case, built):
    """What is behind the last row of x is there, and 0."""
    emulator = Emulator(arch=ARCH)
    made = mock.patch.object(emulator, "tensor_map", side_effect=emulator.tensor_map)
    launched = mock.patch.object(emulator, "launch", side_effect=emulator.launch)
    with made as maps, launched as launches:
        run_case(Products(emulator), case)
    (_, rows, depth, _, height, _), _ = maps.call_args
    assert rows == len(case.x) + height - 1 and depth == case.shape[2]
    (gather,) = (c.args[0] for c in launches.call_args_list if c.args[0].program.entry == "gather")
    assert gather.grid == (rows, 1, 1)


@pytest.mark.parametrize("case", [KINDS[0], COUNTS[3], COUNTS[6]], ids=str)
def test_rows_without_an_expert_become_nan(case, run):
    """And no other row; also where there is no expert for any of them."""
    experts = case.experts.copy()
    experts[1::5], experts[3::7] = -1, case.shape[0]
    lost = (experts < 0) | (experts >= case.shape[0])
    y = on_device(run, case, experts)
    assert lost.any() and np.isnan(y[lost]).all()
    kept = on_device(run, case, case.experts)
    assert bits_equal(y[~lost], kept[~lost]) and np.isfinite(values(kept)).all()
    assert np.isnan(on_device(run, case, np.full_like(experts, -1))).all()


def test_a_row_does_not_know_of_the_others(run):
    """Where it stands in its segment, and what else there is."""
    case = KINDS[0]
    y, order = run_case(run, case), np.random.default_rng(0).permutation(case.rows)
    shuffled = run(cq.grouped_linear, case.x[order], cq.prepack(case.weight), case.experts[order])
    assert bits_equal(shuffled, y[order])


def test_experts_that_are_nan_hurt_their_rows_alone(run):
    case = Case("int4", "float16")
    q, scale = case.weight, case.weight.arrays()["scale"].copy()
    scale[1, 4] = np.nan
    hurt = cq.QuantArray(q.format, q.shape, q.dtype, {**q.arrays(), "scale": scale}, q.axes)
    y, clean = (run(cq.grouped_linear, case.x, cq.prepack(w), case.experts) for w in (hurt, q))
    own = case.experts == 1
    assert own.any() and np.isnan(y[own, 4]).all()
    y[own, 4] = clean[own, 4]
    assert bits_equal(y, clean)


@pytest.mark.parametrize(
    ("case", "layout"),
    sampled(
        product([KINDS[0], COUNTS[4]], ["whole", *WRITABLE]),
        lambda case, _: case,
        lambda _, layout: layout,
    ),
    ids=str,
)
def test_out_lies_anywhere(run, layout, case):
    """What lies between and beside its elements is left alone."""
    where, shape = LAYOUTS[layout], (case.rows, case.shape[1])
    for dtype in DTYPES.values():
        base = run.backend.empty(where.base(shape), dtype)
        base[...] = 7
        out = where.view(base, shape)
        assert run_case(run, case, out=out) is out
        wanted = Expected.routed(case.x, case.weight, case.experts)
        assert wanted.admits(np.array(out), case.shape[2])
        out[...] = 7
        assert (base == 7).all()


@pytest.mark.parametrize("layout", ["rows", "crooked rows", "misaligned", "upside down"])
def test_x_lies_anywhere(run, layout):
    case, where = RAGGED, LAYOUTS[layout]
    base = run.backend.empty(where.base(case.x.shape), case.x.dtype)
    base[...] = 0
    x = where.view(base, case.x.shape)
    x[...] = case.x
    y = run(cq.grouped_linear, x, cq.prepack(case.weight), case.experts)
    assert bits_equal(y, run_case(run, case))


def test_the_same_bits_in_every_order_of_threads(built):
    for case in (KINDS[0], COUNTS[4]):
        orders = ("ascending", "descending", "shuffled")
        runs = [run_case(Products(Emulator(order=order, arch=ARCH)), case) for order in orders]
        assert all(bits_equal(run, runs[0]) for run in runs)
