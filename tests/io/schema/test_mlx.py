"""MLX's affine codes of every size, and its configuration, which alone tells the groups."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import cuquant as cq
from cuquant.io.container.safetensors import SafetensorsReader

ROOT = Path("tests/data/checkpoints")
LAYERS = ROOT / "mlx-layers"  # one of each size, without a configuration
RNG = np.random.default_rng(9)
FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def said_of(name):
    """The entry of a layer such as b4g32, or of one that is called as its mode."""
    if name in FLOATS:
        bits, size = FLOATS[name]
        return {"mode": name, "bits": bits, "group_size": size}
    bits, size = name.removeprefix("b").split("g")
    return {"bits": int(bits), "group_size": int(size)}


def folder(path, quantization, source=LAYERS):
    shutil.copy(source / "model.safetensors", path)
    (path / "config.json").write_text(json.dumps({"quantization": quantization}))
    return path


def test_codes_of_every_size(tmp_path):
    want = np.load(LAYERS / "dequantized.npz")
    said = {name: said_of(name) for name in want.files}
    with cq.open(folder(tmp_path, {"group_size": 64, "bits": 4, **said})) as file:
        for name, own in said.items():
            entry = file[f"{name}.weight"]
            q = entry.read()
            assert ("1 bit" in str(entry.notes)) == (own["bits"] == 1)
            assert name in FLOATS or q.format.offset == "min"
            np.testing.assert_array_equal(q.dequantize("float32"), want[name], name)


def test_a_module_with_the_name_of_a_setting_is_refused(tmp_path):
    w = np.ones((64, 128), np.float32)
    arrays = {f"{n}.weight": cq.quantize(w, "int4:64") for n in ("a", "b", "bits")}
    cq.save(tmp_path / "a.safetensors", arrays)
    cq.convert(tmp_path / "a.safetensors", tmp_path / "same", "mlx")
    assert cq.load(tmp_path / "same").keys() == arrays.keys()
    cq.save(tmp_path / "a.safetensors", arrays | {"bits.weight": cq.quantize(w, "int8:64+float16")})
    with pytest.raises(ValueError, match="'bits'"):
        cq.convert(tmp_path / "a.safetensors", tmp_path / "out", "mlx")
    assert not (tmp_path / "out").exists()


def test_what_words_and_scales_tell_needs_no_configuration():
    """The modes of floats, and integers whose bits times columns of a group only one pair has."""
    want = np.load(LAYERS / "dequantized.npz")
    with cq.open(LAYERS) as file:
        for name in ("mxfp4", "mxfp8", "nvfp4"):
            q = file[f"{name}.weight"].read()
            assert q.format.name == name
            np.testing.assert_array_equal(q.dequantize(np.float32), want[name])
        for name, fmt in (("b1g32", "uint2:32+min"), ("b3g32", "uint3:32+min"),
                          ("b5g64", "uint5:64+min"), ("b6g128", "uint6+min"),
                          ("b8g128", "uint8+min")):  # fmt: skip
            q = file[f"{name}.weight"].read()
            assert str(q.format).startswith(fmt)
            near = q.dequantize(np.float32)
            np.testing.assert_allclose(near, want[name], rtol=1e-6, atol=1e-6)
        for name in ("b4g64", "b2g128", "b8g32"):  # 256 of each
            with pytest.raises(cq.FormatError, match="stands in config"):
                file[f"{name}.weight"].read()


def test_groups_that_do_not_fit_are_refused(tmp_path):
    bad = (
        {}, {"group_size": 96, "bits": 4}, {"group_size": "x", "bits": 4}, {"group_size": 64},
        {"group_size": 64, "bits": 3}, {"group_size": 2**70, "bits": 4}, {"group_size": 0},
    )  # fmt: skip
    for said in bad:
        path = folder(tmp_path, {"mode": "affine", "b4g32": said})
        with cq.open(path) as file, pytest.raises(cq.FormatError):
            pytest.fail(f"{said}: {file['b4g32.weight'].read()}")


@pytest.mark.parametrize("name", ["mlx-affine", "mlx-affine-mixed"])
def test_what_mlx_wrote_is_written_again(name, tmp_path):
    """The same bytes, scales of bfloat16 and all."""
    cq.convert(ROOT / name, tmp_path / "out", "mlx")
    with (
        SafetensorsReader(ROOT / name / "model.safetensors") as want,
        SafetensorsReader(tmp_path / "out" / "model.safetensors") as found,
    ):
        assert found.tensors.keys() == want.tensors.keys()
        for key in want.tensors:
            assert found.tensors[key].dtype == want.tensors[key].dtype, key
            assert found.raw(key).tobytes() == want.raw(key).tobytes(), key


def test_our_minimums_and_experts_are_held(tmp_path):
    formats = ("uint4:64+min", "uint3:32+min+bfloat16", "uint6:128+min+float32", "uint4:256+min")
    x = RNG.standard_normal((3, 32, 256)).astype(np.float16)
    arrays = {f"a{i}.weight": cq.quantize(x[0], name) for i, name in enumerate(formats)}
    arrays["experts.weight"] = cq.quantize(x, "uint4:64+min")
    cq.save(tmp_path / "in.safetensors", arrays)
    steps = cq.convert(tmp_path / "in.safetensors", tmp_path / "out", "mlx")
    assert not any(step.rounds for step in steps)
    found = cq.load(tmp_path / "out")
    for name, q in arrays.items():
        np.testing.assert_array_equal(found[name].dequantize("float32"), q.dequantize("float32"))
        assert found[name].shape == q.shape
        assert found[name].format.scale.dtype == q.format.scale.dtype
