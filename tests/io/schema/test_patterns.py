"""Patterns of names that nobody vouches for."""

import time

import pytest

import cuquant as cq
from cuquant.io.schema.patterns import MAX_NAME, matches


@pytest.mark.parametrize(
    ("pattern", "name", "wanted"),
    [
        (r".*\.(?:18|19)\..*gate_proj.*", "model.layers.18.mlp.gate_proj", True),
        (r".*\.(?:18|19)\..*gate_proj.*", "model.layers.17.mlp.gate_proj", False),
        (r"model\.layers\.0\.", "model.layers.0.self_attn.q_proj", True),
        (r"layers", "model.layers.0", False),  # from the beginning
        (r"^int4$", "int4odd", False),
    ],
)
def test_patterns_of_real_files(pattern, name, wanted):
    assert matches(pattern, name) == wanted


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a*)*b", "(.*)*x", "a*a*a*a*b", "(", "[z-a]", "a" * 501, r"(x+x+)+y"]
)
def test_what_may_take_long_or_is_none_is_refused(pattern):
    begun = time.process_time()
    with pytest.raises(cq.FormatError, match="pattern"):
        matches(pattern, "a" * MAX_NAME)
    assert time.process_time() - begun < 1


def test_the_longest_name_is_matched_soon():
    begun = time.process_time()
    assert not matches(".*a.*b.*c", "ab" * (MAX_NAME // 2))
    assert not matches(".*", "a" * (MAX_NAME + 1))
    assert time.process_time() - begun < 5
