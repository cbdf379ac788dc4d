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


def planar(codes, bits):
    """Words of codes [rows, 32 n], one bit at a time."""
    rows = len(codes)
    units = codes.reshape(rows, -1, 32)
    words = np.zeros((*units.shape[:2], bits), np.uint64)
    start = 0
    for width in {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}[bits]:
        for i in range(32):
            field = units[..., i].astype(np.uint64) >> np.uint64(start) & np.uint64(
                (1 << width) - 1
            )
            at = i * width
            words[..., start + at // 32] |= field << np.uint64(at % 32)
        start += width
    return words.astype(np.uint32).view(np.int32).reshape(rows, -1)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_codes_in_planes(tmp_path, bits):
    """gptq_p: of 32 codes the words of the lowest bits first; zero points as in gptq_v2."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (64, 96), np.uint8)
    zeros = rng.integers(0, 1 << bits, (3, 64), np.uint8)
    scales = rng.random((3, 64)).astype(np.float16)
    folder = tmp_path / "model"
    folder.mkdir()
    for order in (np.arange(96), rng.permutation(96)):
        g_idx = (np.arange(96) // 32)[order].astype(np.int32)
        parts = {
            "up.qweight": planar(codes, bits).T.copy(), "up.qzeros": planar(zeros, bits),
            "up.scales": scales, "up.g_idx": g_idx,
        }  # fmt: skip
        cq.save(folder / "model.safetensors", parts)
        said = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False,
                "checkpoint_format": "gptq_p"}  # fmt: skip
        (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
        q = cq.load(folder)["up.weight"]
        is_sorted = (g_idx == np.arange(96) // 32).all()
        assert str(q.format) == f"uint{bits}:32" + "+permuted" * (not is_sorted)
        assert np.array_equal(q.codes(), codes)
        number = codes.astype(np.float32) - zeros.T[:, g_idx]
        assert np.array_equal(q.dequantize("float32"), number * scales.T[:, g_idx].astype("f4"))
    if bits == 3:  # which other formats have densely
        said["checkpoint_format"] = "gptq_v2"
        (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
        assert not np.array_equal(cq.load(folder)["up.weight"].codes(), codes)
