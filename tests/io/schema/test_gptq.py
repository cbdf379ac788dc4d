"""GPTQ's zero points: files of AutoGPTQ that have lost some are refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import cuquant as cq
from cuquant.io.container.safetensors import SafetensorsReader

ROOT = Path("tests/data/checkpoints")


def test_zero_points_that_autogptq_has_overwritten_are_refused_by_name(tmp_path):
    """The numbers that were packed are not in the file: reading it would give others."""
    damaged = ROOT / "gptq-autogptq-zero"
    with cq.open(damaged) as file:
        arrays = [name for name, entry in file.items() if entry.format is not None]
        assert len(arrays) == 3
        for name in arrays:
            with pytest.raises(cq.FormatError, match=f"{name}.*AutoGPTQ has overwritten"):
                file[name].read()
    for kind in ("gptq", "gguf", "cuquant"):
        out = tmp_path / ("o.gguf" if kind == "gguf" else kind)
        with pytest.raises(cq.FormatError, match="AutoGPTQ has overwritten"):
            cq.convert(damaged, out, kind)
        assert not list(tmp_path.iterdir())


def test_gptqmodels_zero_points_are_read(tmp_path):
    """It borrows from whole words, also where two fields at the top are all ones."""
    found = cq.load(ROOT / "gptq-autogptq-layers")
    assert all(v.format.offset for v in found.values() if isinstance(v, cq.QuantArray))
    weight = cq.quantize(np.random.default_rng(0).standard_normal((32, 64)), "uint4:32")
    zero = np.array(weight.zero_point)
    zero[6::8], zero[7::8] = 0, 1  # -1 and 0, of which a borrow makes two times 15
    weight = weight._with(components={**weight.components, "zero_point": zero})
    cq.save(tmp_path / "w.safetensors", {"up.weight": weight})
    cq.convert(tmp_path / "w.safetensors", tmp_path / "v2", "gptq")
    shutil.copytree(tmp_path / "v2", tmp_path / "v1")
    with SafetensorsReader(tmp_path / "v2" / "model.safetensors") as reader:
        parts = {name: reader.read(name) for name in reader.tensors}
    parts["up.qzeros"] = (parts["up.qzeros"].view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    assert (parts["up.qzeros"].view(np.uint32) >> 24 == 0xFF).all()
    cq.save(tmp_path / "v1" / "model.safetensors", parts)
    path = tmp_path / "v1" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq"
    path.write_text(json.dumps(config))
    with pytest.raises(cq.FormatError, match="AutoGPTQ has overwritten"):
        cq.load(tmp_path / "v1")
    config["quantization_config"]["meta"] = {"quantizer": ["gptqmodel:7.7.0"]}
    path.write_text(json.dumps(config))
    assert np.array_equal(cq.load(tmp_path / "v1")["up.weight"].zero_point, zero)
