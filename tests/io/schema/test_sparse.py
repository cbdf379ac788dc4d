"""Two of four numbers and the bits of their places: floats, and codes with scales."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuquant as cq
from cuquant.io.schema.sparse import scattered

ROOT = Path("tests/data/checkpoints/ct-old-sparse24")
CONFIG = {"quantization_config": {"quant_method": "compressed-tensors"}}


def halved(weight):
    """A weight of which two of four are kept: the numbers, the bits, and what they make."""
    rng = np.random.default_rng(3)
    rows, depth = weight.shape
    order = np.argsort(rng.random((rows, depth // 4, 4)), axis=-1)
    kept = (order < 2).reshape(rows, depth)
    bits = np.packbits(kept, axis=1, bitorder="little")
    return (
        weight[kept].reshape(rows, depth // 2),
        bits,
        np.where(kept, weight, weight.dtype.type(0)),
    )


def folder(path, tensors):
    cq.save(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_floats_are_the_owners():
    want = np.load(ROOT / "dequantized.npz")
    with cq.open(ROOT) as file:
        assert file.kind == "compressed-tensors"
        assert not [name for name in file if name.endswith(("compressed", "bitmask", "shape"))]
        for name in want.files:
            entry, found = file[name], file[name].read()
            assert (entry.format, entry.dtype.name, found.dtype) == (None, "bfloat16", entry.dtype)
            np.testing.assert_array_equal(found.astype(np.float32), want[name])


def test_codes_stay_codes(tmp_path):
    """Bytes of the first versions: 8-bit floats, and integers with zero points."""
    rng = np.random.default_rng(1)
    codes = rng.integers(-128, 128, (6, 32)).astype(np.int8)
    scales = rng.random((6, 1)).astype(np.float32)
    zeros = rng.integers(-128, 128, (6, 1)).astype(np.int8)
    floats = rng.normal(size=(6, 32)).astype(ml_dtypes.float8_e4m3fn)
    tensors = {}
    wanted = {}
    for stem, weight, zero in (("a.", codes, None), ("b.", codes, zeros), ("c.", floats, None)):
        numbers, bits, dense = halved(weight)
        tensors |= {f"{stem}compressed": numbers, f"{stem}bitmask": bits}
        tensors |= {f"{stem}shape": np.array([[6], [32]]), f"{stem}weight_scale": scales}
        if zero is not None:
            tensors[f"{stem}weight_zero_point"] = zero
        less = dense.astype(np.float32) - (0 if zero is None else zero.astype(np.float32))
        wanted[f"{stem}weight"] = less * scales
    found = cq.load(folder(tmp_path, tensors))
    formats = {name: str(q.format) for name, q in found.items()}
    assert formats == {
        "a.weight": "int8", "b.weight": "uint8:row+float32", "c.weight": "fp8_e4m3",
    }  # fmt: skip
    for name, numbers in wanted.items():
        np.testing.assert_array_equal(found[name].dequantize("float32"), numbers)


def test_bits_that_do_not_fit_are_refused(tmp_path):
    numbers, bits, _ = halved(np.ones((4, 24), np.float16))
    good = {"a.compressed": numbers, "a.bitmask": bits, "a.shape": np.array([[4], [24]])}
    assert cq.load(folder(tmp_path, good))["a.weight"].shape == (4, 24)
    more = bits.copy()
    more[2, 1] = 0xFF
    bad = {
        "a row with more ones": {"a.bitmask": more},
        "bits of fewer rows": {"a.bitmask": bits[:3]},
        "another shape": {"a.shape": np.array([[4], [48]])},
        "a shape of floats": {"a.shape": np.array([[4.0], [24.0]])},
        "a long shape": {"a.shape": np.arange(10)},
        "numbers of no matrix": {"a.compressed": numbers.reshape(-1)},
        "codes without scales": {"a.compressed": numbers.astype(np.int8)},
    }
    for what, changed in bad.items():
        with pytest.raises(cq.FormatError, match=r"a\.weight"):
            pytest.fail(f"{what}: {cq.load(folder(tmp_path, {**good, **changed}))}")
    with pytest.raises(ValueError, match="half"):
        scattered(np.zeros((1, 2)), np.array([[0xFF]], np.uint8), 0)
    assert scattered(np.zeros((1 << 40, 0)), np.zeros((0, 0), np.uint8), 0).size == 0


def test_floats_become_files_of_other_kinds(tmp_path):
    """Twice the bytes that they take here; and they can be quantized on the way."""
    steps = cq.convert(ROOT, tmp_path / "own.safetensors", to="cuquant")
    step = next(s for s in steps if s.name.endswith("down_proj.weight"))
    assert step.becomes == "bfloat16" and step.bytes_out == 2 * np.prod(step.shape)
    want = cq.load(ROOT)
    found = cq.load(tmp_path / "own.safetensors")
    for name, array in want.items():
        np.testing.assert_array_equal(found[name].view(np.uint16), array.view(np.uint16))
    cq.convert(ROOT, tmp_path / "gptq", to="gptq", format="int4:32")
    name = "model.layers.0.mlp.down_proj.weight"
    assert isinstance(cq.load(tmp_path / "gptq")[name], cq.QuantArray)
