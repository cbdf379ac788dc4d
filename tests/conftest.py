"""Shared inputs: the arrays that every operation is tried on."""

import os

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("cuquant", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("cuquant")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)


@pytest.fixture(autouse=True, scope="session")
def single_threaded_blas() -> None:
    """xdist runs one worker a core: more BLAS threads would only fight."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
