"""The CPU backend is no toy: at least 50 MB/s of float32 input on one core, 10 on a busy one.

`python tests/reference/test_speed.py` prints the table of examples/benchmarks.md.
"""

import time
from collections.abc import Callable

import numpy as np
import pytest

import cuquant as cq

X = np.random.default_rng(0).standard_normal((1024, 2048), dtype=np.float32)
LEAST = 10  # MB/s
NAMES = cq.list_formats()
SEARCHED = [n for n in NAMES if getattr(cq.get_format(n).scale, "rule", "") == "search"]
DIRECT = [n for n in NAMES if n not in SEARCHED]


def rate(call: Callable[[], object], enough: float) -> float:
    """Best MB/s of three, or the first that is enough.

    By CPU time, so that a busy machine does not count.
    """
    best = 0.0
    for _ in range(3):
        start = time.process_time()
        call()
        best = max(best, X.nbytes / (time.process_time() - start) / 1e6)
        if best >= enough:
            break
    return best


def quantize_rate(name: str, enough: float = np.inf, **options: object) -> float:
    return rate(lambda: cq.quantize(X, name, **options), enough)


def dequantize_rate(name: str, enough: float = np.inf) -> float:
    q = cq.quantize(X[:64], name)  # some types are slow to quantize
    return rate(cq.concatenate([q] * (len(X) // 64)).dequantize, enough)


@pytest.mark.parametrize("name", DIRECT)
def test_quantize(name):
    assert quantize_rate(name, LEAST) >= LEAST


@pytest.mark.parametrize("name", NAMES)
def test_dequantize(name):
    assert dequantize_rate(name, LEAST) >= LEAST


if __name__ == "__main__":
    print("| format | quantize | dequantize |\n|---|---|---|")
    for name in NAMES:
        print(f"| `{name}` | {quantize_rate(name):.0f} | {dequantize_rate(name):.0f} |")
    for name in ("int8", "nf4", "fp8_e4m3"):
        speed = quantize_rate(name, stochastic=True, seed=0)
        print(f"| `{name}`, stochastic | {speed:.0f} | |")
