"""Codes by rows with several groups in a unit, on a GPU: what test_row_groups.py has on
the CPU, and larger shapes."""

import pytest
from fragment_products import TYPES, Case
from row_group_products import (
    CASES,
    FORMATS,
    LARGE,
    check_large_scales,
    check_rounded_once,
    expected,
    large_case,
)

import cuquant as cq

pytestmark = pytest.mark.gpu


@pytest.fixture
def linear(gpu):
    return lambda x, q: cq.linear(gpu.asarray(x), q.to("cuda"), out_dtype="float32").get()


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.sanitize if c.rows in (4, 8) else ()) for c, _ in CASES],
    ids=str,
)
def test_against_float64(case, linear):
    y = linear(case.x, case.weight)
    assert expected(case).admits(y, case.shape[1], on_gpu=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "block"), FORMATS)
def test_of_the_size_of_a_layer(name, block, dtype, linear):
    shape = (1000, 4096)
    for rows in (1, 2, 8):
        case = Case(name, dtype, rows, shape, options=(("block_size", block),))
        y = linear(case.x, case.weight)
        assert expected(case).admits(y, shape[1], on_gpu=True)


@pytest.mark.sanitize
@pytest.mark.parametrize("large", LARGE, ids=str)
def test_products_beyond_float16_are_not_lost(large, linear):
    check_large_scales(linear, large_case(*large), on_gpu=True)


@pytest.mark.parametrize("large", LARGE, ids=str)
def test_a_weight_that_meets_its_scale_is_rounded_once(large, linear):
    check_rounded_once(linear, large_case(*large))
