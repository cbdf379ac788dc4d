"""cuquant.error: how far decoded values are off."""

import numpy as np
import pytest

import cuquant as cq


def test_error_by_hand():
    x, y = np.float32([3, 4]), np.float32([3, 3])
    found = cq.error(x, y)
    assert found == (pytest.approx(10 * np.log10(25)), 1.0, pytest.approx(21 / (5 * 18**0.5)))
    assert cq.error(x, x) == (np.inf, 0.0, pytest.approx(1.0))
    assert cq.error(x * 0, x * 0) == (np.inf, 0.0, 1.0)
    assert cq.error(x * 0, x).sqnr_db == -np.inf
    assert all(np.isnan(cq.error(x, np.float32([np.nan, 1]))))
    with pytest.raises(ValueError, match="shape"):
        cq.error(x, y[:1])
    with pytest.raises(TypeError, match="complex"):
        cq.error(x + 1j, y)


def test_errors_advice_works_when_it_is_typed():
    """error(q, x) names a call that gives the answer; a PackedWeight is decoded."""
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    q = cq.quantize(x)
    wanted = cq.error(x, q)
    assert cq.error(x, cq.prepack(q)) == wanted
    for a, b in ((q, x), (q, q), (cq.prepack(q), x), (cq.prepack(q), q)):
        with pytest.raises(TypeError, match=r"call cuquant\.error\(") as caught:
            cq.error(a, b)
        said = str(caught.value).partition("call ")[2]
        found = eval(said, {"cuquant": cq}, {"x": a, "q": b})
        assert found == (wanted if b is x else (np.inf, 0.0, pytest.approx(1.0)))
