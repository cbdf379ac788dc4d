"""GGUF files of ggml's own blocks: their values are the gguf package's, and our bytes are ggml's.

random.gguf holds random bytes of every type; arrays.gguf what ggml's C quantizers make of an array.
"""

from pathlib import Path

import numpy as np
import pytest
from in_turn import in_turn

import cuquant as cq

DATA = Path(__file__).parents[1] / "data" / "gguf"
RANDOM, ARRAYS = DATA / "gguf-random-blocks", DATA / "gguf-ggml-arrays"
DIRECT = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "nvfp4")  # quantized without a search


@in_turn("folder", [RANDOM, ARRAYS])
def test_values_are_the_owners(folder):
    """Bit by bit, of every type that is decoded; -0.0, infinities and all."""
    (path,) = folder.glob("*.gguf")
    found, wanted = cq.load(path), np.load(folder / "dequantized.npz")
    decoded = {n: q for n, q in found.items() if isinstance(q, cq.QuantArray)}
    assert {"ggml_mxfp4", "ggml_nvfp4", "q4_k"} <= {str(q.format) for q in decoded.values()}
    for name, q in decoded.items():
        with np.errstate(all="ignore"):
            values = q.dequantize()
        theirs = wanted[name].reshape(values.shape)
        same = values.view(np.uint32) == theirs.view(np.uint32)
        assert (same | (np.isnan(values) & np.isnan(theirs))).all(), name


@pytest.mark.parametrize("name", DIRECT)
def test_bytes_are_ggmls(name):
    x = np.load(ARRAYS / "original.npz")["x"]
    stored = cq.load(ARRAYS / "arrays.gguf")[f"{name}.plain"]
    assert cq.array_equal(cq.quantize(x, stored.format), stored)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_blocks_become_ocps_format_and_are_written_again(name, tmp_path):
    """Codes and scales as they are: no scale of these is one that OCP reads otherwise."""
    stored = cq.load(ARRAYS / "arrays.gguf")[f"{name}.plain"]
    other = cq.QuantArray.from_blocks(stored.to_blocks(), name, stored.shape)
    assert other.format.name == name
    assert (other.dequantize() == stored.dequantize()).all()
    for i, q in enumerate((stored, other)):
        cq.save(tmp_path / f"{i}.safetensors", {"w": q})
        with pytest.warns(UserWarning, match="architecture"):
            cq.convert(tmp_path / f"{i}.safetensors", tmp_path / f"{i}.gguf", "gguf")
        assert cq.array_equal(cq.load(tmp_path / f"{i}.gguf")["w"], stored)
