"""Hypothesis: what must hold for every input (reliability promises).

Drawing an array takes far longer than quantizing it, so all formats are given the same examples.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_cases import kind_of
from oracle import bits_equal
from samples import sampled

import cuquant as cq
from cuquant.formats import Codebook, Uniform

NAMES = cq.list_formats()
OWN = [n for n in NAMES if not cq.get_format(n).is_blocks]
SCALED = [n for n in OWN if cq.get_format(n).scale is not None]

EXAMPLES = 100
FLOATS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 90)), elements=FLOATS)
WHOLE = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.just(256)), elements=FLOATS)


@st.composite
def _cut(draw, rows):
    x = draw(rows)
    return x, draw(st.integers(0, len(x)))


CUT_ROWS, CUT_WHOLE = _cut(ROWS), _cut(WHOLE)  # and how many of the rows are before a cut
SIZED = ROWS.filter(lambda x: (np.abs(x).max(-1) > 1e-3).all())


@cache
def drawn(strategy) -> list[Any]:
    found = []
    settings(max_examples=EXAMPLES)(given(strategy)(lambda example: found.append(example)))()
    return found


def holds(strategy, check: Callable[[Any], None]) -> None:
    """`check` for every example; where one fails, hypothesis looks for a smaller one."""
    try:
        for example in drawn(strategy):
            check(example)
    except Exception:
        given(strategy)(check)()
        raise


def is_blocks(name: str) -> bool:
    return cq.get_format(name).is_blocks


@pytest.mark.parametrize("name", sampled(NAMES, kind_of))
def test_finite_stays_finite_and_scales_too(name):
    def check(x):
        if is_blocks(name):
            x = np.clip(x, -6e4, 6e4)  # above, ggml's float16 scale is infinite
        q = cq.quantize(x, name)
        assert np.isfinite(q.dequantize()).all()
        assert q.scale is None or np.isfinite(q.scale).all()

    holds(WHOLE if is_blocks(name) else ROWS, check)


@pytest.mark.parametrize("name", sampled(NAMES, kind_of))
def test_a_shard_quantized_alone_has_its_bytes(name):
    options = {"global_scale": 2.0} if name == "nvfp4" else {}

    def check(example):
        x, cut = example
        whole = cq.quantize(x, name, **options)
        for part in (slice(None, cut), slice(cut, None)):
            alone, shard = cq.quantize(x[part], name, **options), whole[part]
            for key, value in alone.arrays().items():
                assert bits_equal(shard.arrays()[key], value)

    holds(CUT_WHOLE if is_blocks(name) else CUT_ROWS, check)


@pytest.mark.parametrize("name", SCALED)
def test_decoding_is_monotone(name):
    """Within a block a larger value never decodes to a smaller one."""

    def check(x):
        values = cq.quantize(np.sort(x[:1], axis=1), name, block_size="row").dequantize()
        assert (np.diff(values) >= 0).all()

    holds(ROWS, check)


NEAREST = [n for n in SCALED if isinstance(cq.get_format(n).codec, Uniform) and n != "int1"]


@pytest.mark.parametrize("name", NEAREST)
def test_integers_err_by_half_a_step(name):
    """|x - x'| <= |scale| / 2 inside the codec's range."""

    def check(x):
        q = cq.quantize(x, name, block_size="row")
        scale = np.abs(q.scale.astype(np.float32))
        assert (scale > 0).all()
        steps = x / q.scale.astype(np.float32)
        low, high = q.format.codec.low, q.format.codec.high
        point = 0 if q.zero_point is None else q.zero_point.astype(np.float32)
        inside = (steps + point >= low) & (steps + point <= high)
        # float32: a step and a half rounding of the product and of the reciprocal.
        slack = 4 * np.spacing(np.abs(x)) + scale * 2.0**-12
        assert (np.abs(x - q.dequantize()) <= scale / 2 + slack)[inside].all()

    holds(SIZED, check)


@pytest.mark.parametrize("name", SCALED)
def test_signs_of_scales(name):
    def check(x):
        q = cq.quantize(x, name, block_size="row")
        scale = q.scale.astype(np.float32)
        zero = (x == 0).all(-1, keepdims=True)
        if q.format.scale.dtype != "e8m0":
            assert (scale[zero] == 0).all()
        if q.format.scale.rule != "signed_max":
            assert (scale >= 0).all()
            return
        first = np.take_along_axis(x, np.abs(x).argmax(-1)[:, None], -1)
        peak = q.format.scale.peak
        used = scale != 0
        assert (np.signbit(scale) == (np.signbit(first) != (peak < 0)))[used].all()

    holds(ROWS, check)


IDEMPOTENT = [
    "nf4",
    "fp4",
    "bof4s",
    "linear8",
    "int8",
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e5m2",
    "mxfp8",
    "mxfp8_e5m2",
    "mxfp6",
    "mxfp6_e3m2",
    "mxfp4",
    "int1",
]


# Float16 and bfloat16-valued input keeps the products exact enough for the scale to come back.
SHORT = ROWS.map(lambda x: (x / np.float32(20)).astype(np.float16).astype(np.float32)).filter(
    lambda x: np.abs(x).max() > 1e-3
)


@pytest.mark.parametrize("name", IDEMPOTENT)
def test_quantizing_again_changes_nothing(name):
    """For formats whose block maximum decodes to itself; int1's mean of one size is that size."""
    options = {} if cq.get_format(name).scale is None else {"block_size": 32}

    def check(x):
        x = np.where(np.abs(x) < 1e-3, 0, x).astype(np.float32)
        once = cq.quantize(x, name, **options)
        twice = cq.quantize(once.dequantize(), name, **options)
        values, again = once.dequantize(), twice.dequantize()
        # A reciprocal and a product, rounded: at most 2 ulp apart, never another level.
        assert (np.abs(values - again) <= 2 * np.spacing(np.abs(values))).all()

    holds(SHORT, check)


@given(
    levels=hnp.arrays(
        np.float32, st.integers(2, 16), elements=st.floats(-4, 4, width=32), unique=True
    ),
    x=ROWS,
)
def test_user_levels_are_the_nearest(levels, x):
    levels = np.sort(levels)
    assume((np.diff(levels) > 0).all())
    q = cq.quantize(x, "k4", levels=levels, block_size="row")
    codec = q.format.codec
    assert isinstance(codec, Codebook) and codec.levels == tuple(levels.tolist())
    middle = (levels[1:] + levels[:-1]) * np.float32(0.5)
    with np.errstate(divide="ignore"):
        inverse = np.float32(1) / q.scale.astype(np.float32)
    exact = x * np.where(np.isfinite(inverse), inverse, np.float32(0))
    assert (q.codes() == np.searchsorted(middle, exact, side="left")).all()


@pytest.mark.parametrize("name", sampled(NAMES, kind_of))
def test_slices_of_rows_and_joins_are_lossless(name):
    options = {"global_scale": 2.0} if name == "nvfp4" else {}

    def check(example):
        x, cut = example
        q = cq.quantize(x, name, **options)
        joined = cq.concatenate([q[:cut], q[cut:]])
        for key, value in q.arrays().items():
            assert bits_equal(joined.arrays()[key], value)

    holds(CUT_WHOLE if is_blocks(name) else CUT_ROWS, check)
