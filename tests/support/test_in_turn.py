"""in_turn: every value is tried, and a failure names its own."""

import inspect

import pytest
from in_turn import in_turn

tried = []


@in_turn("x", [1, 2])
@in_turn("y", {3: "a mapping's keys", 4: "as parametrize"})
@pytest.mark.parametrize("z", [5, 6])
def test_the_values(x, y, z):
    tried.append((x, y, z))


def test_every_value_was_tried():
    test_the_values(z=7)
    assert tried[-4:] == [(1, 3, 7), (1, 4, 7), (2, 3, 7), (2, 4, 7)]
    assert list(inspect.signature(test_the_values).parameters) == ["z"]


def test_a_failure_names_its_value():
    @in_turn("x", [1, 2])
    def checks(x):
        assert x == 1

    with pytest.raises(AssertionError, match=r"^x = 2: .*2 == 1"):
        checks()


def test_what_does_not_raise_is_named_too():
    @in_turn("x", [1])
    def checks(x):
        with pytest.raises(ValueError):
            pass

    with pytest.raises(AssertionError, match=r"x = 1: .*DID NOT RAISE"):
        checks()


def test_values_that_look_the_same_are_refused():
    with pytest.raises(AssertionError, match="look the same"):
        in_turn("x", [1, 1])


@pytest.mark.parametrize("values", [[], {}])
def test_no_values_are_refused(values):
    with pytest.raises(AssertionError, match="would assert nothing"):
        in_turn("x", values)


def test_a_name_that_the_test_does_not_take_is_refused():
    with pytest.raises(AssertionError, match="takes no y"):
        in_turn("y", [1])(lambda x: None)
