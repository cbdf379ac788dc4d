"""HQQ's layers: codes, scales and zeros to the bit, and settings that are refused."""

from pathlib import Path

import numpy as np
import pytest

import cuquant as cq
from cuquant.io.container.safetensors import SafetensorsReader

ROOT = Path("tests/data/checkpoints/hqq-layers")
FORMATS = {
    "b8": "uint8:64+min+float32", "b6": "uint6:64+min+float32", "b5": "uint5:64+min+float32",
    "b4": "uint4:64+min+float32", "b3": "uint3:64+min+float32", "b2": "uint2:64+min+float32",
    "b1": "uint2:64+min+float32",
}  # fmt: skip


def tensors(stem):
    """Of one layer, by the ends of their names."""
    with SafetensorsReader(ROOT / "model.safetensors") as reader:
        names = [name for name in reader.tensors if name.startswith(f"{stem}.")]
        return {name.removeprefix(f"{stem}."): reader.read(name) for name in names}


def written(path, found):
    cq.save(path, {f"a.{end}": np.asarray(value) for end, value in found.items()})
    return path


def test_codes_and_zeros_are_the_owners():
    """Rounded as HQQ does, in its compute_dtype, the numbers are its own; and the exact ones lie
    within these two roundings of half a unit each, which move one by 2^-11 of the size it had."""
    want = np.load(ROOT / "dequantized.npz")
    with cq.open(ROOT) as file:
        assert file.kind == "hqq"
        assert not [n for n in file if n.endswith((".nbits", ".packing", ".round_zero"))]
        for stem, fmt in FORMATS.items():
            entry, given = file[f"{stem}.weight"], tensors(stem)
            q = entry.read()
            assert str(q.format) == fmt and ("1 bit" in str(entry.notes)) == (stem == "b1")
            scale, zero = given["scale"], given["zero"]
            assert q.dtype == scale.dtype
            codes = q.codes().reshape(len(scale), -1)
            near = (codes.astype(scale.dtype) - zero) * scale
            np.testing.assert_array_equal(near.reshape(q.shape), want[f"{stem}.weight"], stem)
            exact = (codes - zero.astype(np.float64)) * scale.astype(np.float64)
            size = (np.abs(codes) + np.abs(zero)) * np.abs(scale).astype(np.float64)
            gap = np.abs(q.dequantize("float32").reshape(exact.shape) - exact)
            assert (gap <= 2.0**-23 * size).all(), stem


def test_groups_across_rows_are_decoded_as_the_owner_does(tmp_path):
    want = np.load(ROOT / "dequantized.npz")["axis0.weight"]
    with cq.open(ROOT) as file:
        entry = file["axis0.weight"]
        assert entry.format is None and "axis 0" in entry.notes[0] and len(entry.tensors) > 3
        found = entry.read()
    assert found.dtype == np.float16 == entry.dtype
    np.testing.assert_array_equal(found.astype(np.float32), want)
    cq.convert(ROOT, tmp_path / "out.safetensors", "cuquant")
    np.testing.assert_array_equal(cq.load(tmp_path / "out.safetensors")["axis0.weight"], found)


def test_codes_of_more_bits_are_refused_across_rows(tmp_path):
    given = tensors("axis0")
    codes = np.arange(64 * 32, dtype=np.uint8).reshape(64, 32) % 32
    given |= {"W_q": codes, "nbits": np.int32(5), "packing": np.frombuffer(b"8bit_u8", np.uint8)}
    q = cq.load(written(tmp_path / "m.safetensors", given))["a.weight"]
    want = (codes.astype(np.float16) - given["zero"]) * given["scale"]
    np.testing.assert_array_equal(q, want.reshape(16, 128))
    codes[60, 3] = 32
    with pytest.raises(cq.FormatError, match="more than 5 bits"):
        cq.load(written(tmp_path / "m.safetensors", given))


def test_whole_zeros_are_zero_points(tmp_path):
    """Then a number is one product, which float32 rounds once as HQQ does."""
    given = tensors("b4")
    given["zero"] = np.arange(32, dtype=np.float16).reshape(32, 1) % 16
    q = cq.load(written(tmp_path / "m.safetensors", given))["a.weight"]
    assert str(q.format) == "uint4:64"
    codes = q.codes().reshape(32, -1).astype(np.float16)
    want = ((codes - given["zero"]) * given["scale"]).reshape(q.shape)
    np.testing.assert_array_equal(q.dequantize("float16"), want)
    for zero in (16, -1, 0.5, np.nan):  # no codes
        given["zero"][3] = zero
        q = cq.load(written(tmp_path / "m.safetensors", given))["a.weight"]
        assert q.format.offset == "min"


def test_a_group_may_be_a_row(tmp_path):
    given = tensors("b8")
    given |= {"shape": np.array([32, 64])}
    q = cq.load(written(tmp_path / "m.safetensors", given))["a.weight"]
    assert str(q.format) == "uint8:row+min+float32" and q.shape == (32, 64)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"quant_scale": np.uint8(1)}, "quant_scale"),
        ({"view_as_float": np.uint8(1)}, "view_as_float"),
        ({"axis": np.int32(0)}, "groups across rows"),
        ({"axis": np.int32(2)}, "axis is 2"),
        ({"nbits": np.int32(3)}, "3 bits"),
        ({"packing": np.frombuffer(b"4bit_32", np.uint8)}, "4bit_32"),
        ({"packing": np.zeros(1000, np.uint8)}, "packing"),
        ({"shape": np.array([16, 96])}, "groups"),
        ({"shape": np.array([2**50, 1])}, "shape"),
        ({"shape": np.array([16.0, 128.0])}, "shape"),
        ({"shape": np.array([64, 32])}, "groups"),
        ({"zero": np.zeros(32, np.float16)}, "groups"),
        ({"nbits": np.float32(4)}, "nbits"),
    ],
)
def test_other_settings_are_refused_by_name(changed, why, tmp_path):
    with (
        cq.open(written(tmp_path / "m.safetensors", {**tensors("b4"), **changed})) as file,
        pytest.raises(cq.FormatError, match=why) as raised,
    ):
        file["a.weight"].read()
    assert "a.weight" in str(raised.value)


def test_codes_of_more_bits_are_refused(tmp_path):
    given = tensors("b5")
    given["W_q"][3, 4] = 32
    with pytest.raises(cq.FormatError, match="more than 5 bits"):
        cq.load(written(tmp_path / "m.safetensors", given))
