"""ModelOpt's weights whose columns were scaled before (AWQ): the number stays beside them."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import cuquant as cq
from cuquant.io.container.safetensors import SafetensorsReader

ROOT = Path("tests/data/checkpoints/modelopt-int4")
STEM = "model.layers.0.mlp.down_proj."


def folder(path, scale):
    """The set, with a pre_quant_scale beside one of its weights."""
    with SafetensorsReader(ROOT / "model.safetensors") as reader:
        tensors = {name: reader.read(name) for name in reader.tensors}
    path.mkdir()
    cq.save(path / "model.safetensors", {**tensors, f"{STEM}pre_quant_scale": scale})
    for name in ("config.json", "hf_quant_config.json"):
        shutil.copy(ROOT / name, path)
    return path


@pytest.mark.parametrize("shape", [(256,), (1, 256)])
def test_the_weight_is_the_stored_one_and_the_scale_a_tensor(tmp_path, shape):
    scale = np.linspace(0.5, 2, 256, dtype=np.float16).reshape(shape)
    with cq.open(folder(tmp_path / "in", scale)) as file:
        entry = file[f"{STEM}weight"]
        assert "multiplied by pre_quant_scale" in entry.notes[0]
        want = np.load(ROOT / "dequantized.npz")[f"{STEM}weight"]
        np.testing.assert_array_equal(entry.read().dequantize("float16"), want)
        np.testing.assert_array_equal(file[f"{STEM}pre_quant_scale"].read(), scale)
    cq.convert(tmp_path / "in", tmp_path / "own.safetensors", "cuquant")
    assert f"{STEM}pre_quant_scale" in cq.load(tmp_path / "own.safetensors")


def test_other_kinds_have_no_place_for_it(tmp_path):
    folder(tmp_path / "in", np.ones(256, np.float16))
    for kind in ("compressed-tensors", "gptq", "mlx"):
        with pytest.raises(ValueError, match=r"down_proj\.pre_quant_scale'.*no \w+"):
            cq.convert(tmp_path / "in", tmp_path / "out", kind, requantize=True)


def test_one_that_is_not_of_the_columns_is_refused(tmp_path):
    with pytest.raises(cq.FormatError, match=r"down_proj\.weight.*none of its columns"):
        cq.load(folder(tmp_path / "in", np.ones(128, np.float16)))
