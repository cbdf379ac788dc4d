"""Samples of matrices: what every run of the tests has of them. `pytest -m full` has the rest."""

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

Axis = str | Callable[..., Hashable]
rest_runs = True  # whether this run may have more than the samples; conftest.py says


def sampled(cases: Iterable[Any], *axes: Axis) -> list[Any]:
    """Parameters of which some run always, and all others under `-m full`: see `marked`.

    Where they do not run they are not made either, since each takes time to collect.
    """
    params = marked(cases, *axes)
    return params if rest_runs else [param for param in params if not param.marks]


def marked(cases: Iterable[Any], *axes: Axis) -> list[Any]:
    """Parameters for each case, with the mark `full` for all but a sample.

    The sample meets each value of each axis at least once; each pair of values where an axis is of
    pairs. Again and again the case is taken that meets most values that none met before, the first
    one of several: the same cases in every run. Without axes it is the first case alone.

    Parameters
    ----------
    cases
        What `parametrize` takes: a plain tuple holds one value for each name.
    axes
        Functions of what a case holds, or names of attributes of the first value. Their values are
        hashable.
    """
    given = list(cases)
    told = [case if type(case) is tuple else (case,) for case in given]
    found = [_met(values, axes) for values in told]
    kept = set(_covering(found))
    marks = [() if i in kept else pytest.mark.full for i in range(len(given))]
    return [pytest.param(*case, marks=mark) for case, mark in zip(told, marks, strict=True)]


def _met(values: tuple, axes: tuple[Axis, ...]) -> set[tuple[int, Hashable]]:
    """The numbers of axes, and a case's values on them."""
    return {
        (i, attrgetter(axis)(values[0]) if isinstance(axis, str) else axis(*values))
        for i, axis in enumerate(axes)
    } or {(0, None)}


def _covering(found: list[set]) -> list[int]:
    """Of some sets those, by number, whose union is that of all; greedily."""
    left, kept = set().union(*found), []
    while left:
        best = max(range(len(found)), key=lambda i: len(found[i] & left))
        left -= found[best]
        kept.append(best)
    return kept


def each_number(count: int) -> list[Axis]:
    """Axes of a case and numbers: every one of these, where it is; some have fewer."""
    return [lambda _, numbers, i=i: numbers[i : i + 1] for i in range(count)]


def selected(request: pytest.FixtureRequest, test: str) -> list[dict[str, Any]]:
    """The parameters with which this run has a test of a module, for fixtures that compile kernels
    ahead. The same for all of xdist's workers, which then find each other's."""
    return _by_test(request.session)[request.path, test]


@functools.lru_cache(maxsize=1)
def _by_test(session: pytest.Session) -> dict[tuple[Path, str], list[dict[str, Any]]]:
    """The parameters of all tests, by file and function: one walk for all fixtures."""
    found = defaultdict(list)
    for item in session.items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            found[item.path, item.originalname].append(item.callspec.params)
    return found
