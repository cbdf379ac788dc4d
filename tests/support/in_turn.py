"""One test for several values, where a value takes less time than pytest takes for a test."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def in_turn(name: str, values: Iterable[Any]) -> Callable:
    """As `pytest.mark.parametrize`, in one test, whose failure names the value.

    Pytest takes 4 ms of CPU time for each test in two processes, and most tests of a format and a
    short array take less. Fixtures are made once for all values, so none may be used up.

    Parameters
    ----------
    name
        The test's parameter.
    values
        Their texts differ, since they are their names.
    """
    listed = list(values)
    given = {str(value): value for value in listed}
    assert given, f"no values of {name}: the test would assert nothing"
    assert len(given) == len(listed), f"values of {name} look the same"

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(*arguments: Any, **others: Any) -> None:
            for label, value in given.items():
                try:
                    test(*arguments, **others, **{name: value})
                except (Exception, pytest.fail.Exception) as error:
                    raise AssertionError(f"{name} = {label}: {error}") from error

        kept = [p for p in signature.parameters.values() if p.name != name]
        assert len(kept) == len(signature.parameters) - 1, f"{test.__name__} takes no {name}"
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
