"""Samples of matrices meet all that they say, and the rest is left to `-m full`."""

from itertools import product

import pytest
import samples
from kernel_cases import BASICS
from samples import marked, sampled, selected

LETTERS, NUMBERS = "abcde", range(3)
GRID = list(product(LETTERS, NUMBERS))


def kept(params: list) -> list:
    return [param.values for param in params if not param.marks]


def test_every_case_stays_in_its_place():
    params = marked(GRID, lambda letter, _: letter)
    assert [param.values for param in params] == GRID
    assert {mark.name for param in params for mark in param.marks} == {"full"}


@pytest.mark.parametrize("rest", [False, True])
def test_the_rest_is_made_where_it_runs(rest, monkeypatch):
    monkeypatch.setattr(samples, "rest_runs", rest)
    params = marked(GRID, lambda letter, _: letter)
    kept = [param for param in params if not param.marks]
    assert sampled(GRID, lambda letter, _: letter) == (params if rest else kept) != []


def test_each_value_is_met():
    """And no more cases than the longest axis has values are kept for it."""
    found = kept(marked(GRID, lambda letter, _: letter, lambda _, number: number))
    assert [set(values) for values in zip(*found, strict=True)] == [set(LETTERS), set(NUMBERS)]
    assert len(found) == len(LETTERS)


def test_pairs_are_met():
    assert kept(marked(GRID, lambda *pair: pair)) == GRID


def test_names_of_attributes():
    found = [case for (case,) in kept(marked(BASICS, "format", "dtype"))]
    assert {case.format for case in found} == {case.format for case in BASICS}
    assert {case.dtype for case in found} == {case.dtype for case in BASICS}
    assert len(found) < len(BASICS)


def test_without_axes_the_first_case_is_kept():
    assert kept(marked([3, 2, 1])) == [(3,)]
    assert marked([]) == []


@pytest.fixture
def here(request) -> list:
    return selected(request, "test_what_a_fixture_sees")


@pytest.mark.parametrize("number", sampled(NUMBERS, lambda number: number > 0))
def test_what_a_fixture_sees(number, here):
    assert {"number": number} in here
    assert len(here) <= len(NUMBERS)
