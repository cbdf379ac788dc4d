"""Hypothesis without deadlines and without luck; one seed for all random arrays."""

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("cuquant", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("cuquant")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)
