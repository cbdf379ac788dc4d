"""The CPU backend is no toy: at least 50 MB/s of float32 input on one core.

`python tests/test_speed.py` prints the table that the README quotes.
"""

import time
from collections.abc import Callable

import numpy as np
import pytest

import cuquant as cq

X = np.random.default_rng(0).standard_normal((1024, 2048), dtype=np.float32)
NAMES = cq.list_formats()
SEARCHED = [n for n in NAMES if getattr(cq.get_format(n).scale, "rule", "") == "search"]
DIRECT = [n for n in NAMES if n not in SEARCHED]


def rate(call: Callable[[], object], nbytes: int) -> float:
    """Best MB/s of three, by CPU time, so that a busy machine does not count."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return nbytes / best / 1e6


def quantize_rate(name: str, **options: object) -> float:
    return rate(lambda: cq.quantize(X, name, **options), X.nbytes)


def dequantize_rate(name: str) -> float:
    return rate(cq.quantize(X, name).dequantize, X.nbytes)


@pytest.mark.parametrize("name", DIRECT)
def test_quantize(name):
    assert quantize_rate(name) >= 50


@pytest.mark.parametrize("name", NAMES)
def test_dequantize(name):
    assert dequantize_rate(name) >= 50


if __name__ == "__main__":
    print("| format | quantize | dequantize |\n|---|---|---|")
    for name in NAMES:
        print(f"| `{name}` | {quantize_rate(name):.0f} | {dequantize_rate(name):.0f} |")
    for name in ("int8", "nf4", "fp8_e4m3"):
        speed = quantize_rate(name, stochastic=True, seed=0)
        print(f"| `{name}`, stochastic | {speed:.0f} | |")
