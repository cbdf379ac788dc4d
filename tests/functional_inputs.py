"""What the tests of `functional` share: inputs, and arrays of torch where it is installed."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cuquant.formats.blocks import BLOCK_LAYOUTS

try:
    import torch
except ImportError:
    torch = None


needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")

F32 = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(F32), np.dtype(np.float16), BF16]
TYPES = list(BLOCK_LAYOUTS)
WEIGHTS = [name for name in TYPES if name != "q8_1"]
GOLDEN = np.load(Path(__file__).parent / "data" / "bitsandbytes_1.npz")
PACKINGS = ["dense", "word", "planes"]


def numpy_of(x):
    """A torch tensor's values as NumPy's, bfloat16 by its bits; anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.view(torch.int16).numpy().view(BF16) if x.dtype == torch.bfloat16 else x.numpy()


def torch_of(x):
    if isinstance(x, np.ndarray) and x.dtype == BF16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def normal(*shape, seed=0, dtype=F32):
    return np.random.default_rng(seed).standard_normal(shape, F32).astype(dtype)


def integers(low, high, shape, dtype, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape, dtype, endpoint=True)
