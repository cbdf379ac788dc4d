"""optimum-quanto's weights: codes, scales and shifts to the bit, and shapes that nothing tells."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import cuquant as cq
from cuquant.io.container.safetensors import SafetensorsReader

ROOT = Path("tests/data/checkpoints")
NAME = "model.layers.0.mlp.down_proj.weight"


def test_whole_codes_are_the_owners():
    with cq.open(ROOT / "quanto-layers") as file:
        want = np.load(ROOT / "quanto-layers" / "dequantized.npz")
        assert file.kind == "quanto"
        formats = {name: str(file[name].format) for name in want.files}
        assert formats == {
            "qint8.weight": "int8", "qfloat8.weight": "fp8_e4m3", "qint4.weight": "uint4+min",
            "qint2.weight": "uint2+min+float32",
        }  # fmt: skip
        for name in ("qint8.weight", "qfloat8.weight", "qint2.weight"):
            np.testing.assert_array_equal(file[name].read().dequantize("float32"), want[name])
        assert file["qint8.input_scale"].read() == 1  # as it lies


@pytest.mark.parametrize("name", ["quanto-layers", "quanto-qint4"])
def test_codes_of_groups_are_the_owners(name):
    """Rounded as quanto does, the product and then the difference, the numbers are its own."""
    want = np.load(ROOT / name / "dequantized.npz")
    arrays = cq.load(ROOT / name)
    seen = 0
    for key in want.files:
        q = arrays[key]
        if q.format.offset != "min":
            continue
        assert q.dtype == q.scale.dtype == q.minimum.dtype
        codes = q.codes().reshape(*q.scale.shape, -1).astype(q.scale.dtype)
        near = (codes * q.scale[..., None] + q.minimum[..., None]).reshape(q.shape)
        np.testing.assert_array_equal(near.astype(np.float32), want[key], key)
        seen += 1
    assert seen >= 2


def copied(folder, **config):
    """The model with other settings."""
    source = ROOT / "quanto-qint4"
    shutil.copy(source / "model.safetensors", folder)
    told = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, **config}))
    return folder


@pytest.mark.parametrize("value", [None, "x", True, 0, -96, 95, 64, 2**70])
def test_shapes_that_do_not_fit_are_refused_by_name(tmp_path, value):
    """Columns are not stored: config.json tells those of linear layers it knows."""
    with cq.open(copied(tmp_path, intermediate_size=value)) as file:
        with pytest.raises(cq.FormatError, match=r"down_proj\.weight.*shape|rows of"):
            file[NAME].read()
        file[NAME.replace("mlp.down", "self_attn.k")].read()  # others can be read


def test_the_map_tells_the_bits_of_few_groups(tmp_path):
    """Two groups fill one row of bytes, of 4 bits as of 2."""
    tensors = {
        "a.weight._data._data": np.full((1, 64), 0x21, np.uint8),
        "a.weight._scale": np.ones((2, 1), np.float16), "a.bias": np.zeros(2, np.float16),
        "a.weight._shift": np.zeros((2, 1), np.float16),
    }  # fmt: skip
    cq.save(tmp_path / "m.safetensors", tensors)
    with pytest.raises(cq.FormatError, match=r"a\.weight.*2 groups"):
        cq.load(tmp_path)
    for kind, want in (("qint4", [1, 2]), ("qint2", [1, 0])):
        (tmp_path / "quanto_qmap.json").write_text(json.dumps({"a": {"weights": kind}}))
        assert cq.load(tmp_path)["a.weight"].dequantize("float32")[:, 0].tolist() == want
    for kind in ("qint8", "x"):
        (tmp_path / "quanto_qmap.json").write_text(json.dumps({"a": {"weights": kind}}))
        with pytest.raises(cq.FormatError, match=r"a\.weight"):
            cq.load(tmp_path)
    (tmp_path / "quanto_qmap.json").write_text("[")
    with pytest.raises(cq.FormatError, match="no JSON"):
        cq.load(tmp_path)


def test_a_bias_tells_the_rows(tmp_path):
    source = ROOT / "quanto-layers"
    with SafetensorsReader(source / "model.safetensors") as reader:
        given = {n: reader.read(n) for n in reader.tensors if n.startswith("qint4.")}
    for rows in (24, 48, 12):
        bias = {"qint4.bias": np.zeros(rows, np.float16)}
        cq.save(tmp_path / "m.safetensors", {**given, **bias})
        q = cq.load(tmp_path / "m.safetensors")["qint4.weight"]
        assert q.shape == (rows, 48 * 128 // rows)
    for bias in ({}, {"qint4.bias": np.zeros(7, np.float16)}):
        rest = {name: value for name, value in given.items() if not name.endswith("bias")}
        cq.save(tmp_path / "m.safetensors", {**rest, **bias})
        with pytest.raises(cq.FormatError, match=r"qint4\.weight"):
            cq.load(tmp_path / "m.safetensors")
