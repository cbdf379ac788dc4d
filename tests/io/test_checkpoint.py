"""Checkpoints of several files, and files that are opened and not read."""

import json

import numpy as np
import pytest

import cuquant as cq
from cuquant.array.raw_blocks import RawBlocks
from cuquant.io import checkpoint
from cuquant.io.checkpoint import Checkpoint

gguf = pytest.importorskip("gguf")


def shards(folder, count=3, listed=True):
    """Arrays w0, w1, ... of which each lies in a shard."""
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        cq.save(folder / name, {f"w{i}": np.full(4, i, np.float32)})
    if listed:
        mapped = {f"w{i}": name for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapped}))
    return names


@pytest.mark.parametrize("given", [".", "model.safetensors.index.json"])
def test_all_shards_are_one_checkpoint(tmp_path, given):
    names = shards(tmp_path)
    with Checkpoint(tmp_path / given) as c:
        assert [path.name for path in c.files] == names
        assert c.read("w2")[0] == 2 and c.file_of("w1").name == names[1] and "w0" in c
        with pytest.raises(cq.FormatError, match="has no tensor 'w9'"):
            c.read("w9")
    found = cq.load(tmp_path / given)
    assert {name: int(array[0]) for name, array in found.items()} == {"w0": 0, "w1": 1, "w2": 2}


def test_files_that_no_index_names_are_left_out(tmp_path):
    shards(tmp_path)
    cq.save(tmp_path / "consolidated.safetensors", {"w0": np.zeros(4, np.float32)})
    assert len(cq.load(tmp_path)) == 3


def test_few_files_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MOST_OPEN", 2)
    shards(tmp_path, 5)
    with Checkpoint(tmp_path) as c:
        for i in (0, 4, 1, 3, 2, 0):
            assert c.read(f"w{i}")[0] == i and len(c._open) <= 2
    assert not c._open


def test_layers_are_found_over_all_shards(tmp_path):
    """Codes in one file, and their scales in another one."""
    codes = np.full((8, 4), 0x11111111, np.int32)
    cq.save(tmp_path / "a.safetensors", {"m.weight_packed": codes})
    scale = np.full((8, 1), 0.5, np.float16)
    cq.save(tmp_path / "b.safetensors", {"m.weight_scale": scale, "m.bias": np.zeros(8)})
    group = {"targets": ["Linear"], "weights": {"num_bits": 4}, "format": "pack-quantized"}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with cq.open(tmp_path) as file:
        assert list(file) == ["m.bias", "m.weight"] and file.kind == "compressed-tensors"
        assert file["m.weight"].shape == (8, 32) and file["m.weight"].nbytes == 8 * 4 * 4 + 8 * 2
    assert (cq.load(tmp_path)["m.weight"].dequantize() == -3.5).all()  # (1 - 8) / 2


@pytest.mark.parametrize("text", ["[1]", "{", '"a"', "[" * 100_000])
def test_a_config_that_is_none_is_an_error(tmp_path, text):
    shards(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(cq.FormatError, match=r"config\.json: (is no JSON|holds no JSON object)"):
        cq.load(tmp_path)


def test_names_of_an_opened_file_are_suggested(tmp_path):
    shards(tmp_path)
    with cq.open(tmp_path) as file:
        assert len(file) == 3 and file.kind == "safetensors"
        with pytest.raises(KeyError, match="w0"):
            file["w00"]


# ---- GGUF ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file of the gguf package, and what it holds."""
    path, rng = tmp_path_factory.mktemp("gguf") / "m.gguf", np.random.default_rng(0)
    values = rng.standard_normal((6, 512), dtype=np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    kinds = gguf.GGMLQuantizationType
    wanted = {"norm": values[0]}
    writer.add_tensor("norm", values[0])
    for kind in (kinds.Q4_0, kinds.Q5_1, kinds.Q8_0, kinds.TQ2_0):
        blocks = gguf.quants.quantize(values, kind)
        writer.add_tensor(kind.name, blocks, raw_dtype=kind)
        wanted[kind.name] = gguf.quants.dequantize(blocks, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, wanted


def test_a_gguf_file_loads_to_the_owners_numbers(written):
    path, wanted = written
    found = cq.load(path)
    assert list(found) == list(wanted)
    np.testing.assert_array_equal(found["norm"], wanted["norm"])
    for name in ("Q4_0", "Q5_1", "Q8_0"):
        assert str(found[name].format) == name.lower()
        np.testing.assert_array_equal(found[name].dequantize(), wanted[name])


def test_a_type_without_codec_is_kept_as_its_bytes(written):
    path, wanted = written
    with cq.open(path) as file:
        assert file.kind == "gguf" and file.metadata["general.architecture"] == "llama"
        entry = file["TQ2_0"]
        raw = entry.read()
    assert entry.format == "TQ2_0" and raw.shape == entry.shape == (6, 512)
    assert isinstance(raw, RawBlocks) and raw.nbytes == entry.nbytes == 6 * 2 * 66
    kind = gguf.GGMLQuantizationType.TQ2_0
    np.testing.assert_array_equal(gguf.quants.dequantize(raw.blocks, kind), wanted["TQ2_0"])
    with pytest.raises(TypeError, match="TQ2_0 is a type of ggml's that cuquant does not decode"):
        raw.dequantize()
    with pytest.raises(TypeError, match="TQ2_0"):
        np.asarray(raw)
    assert repr(raw) == "RawBlocks(TQ2_0, shape=(6, 512), 2.062 bits/element, device=cpu)"


def test_names_that_are_wanted_are_read_alone(written):
    path, _ = written
    assert list(cq.load(path, names=["Q8_0"])) == ["Q8_0"]
    with pytest.raises(ValueError, match="has no array 'Q8'"):
        cq.load(path, names=["Q8"])
    with cq.open(path) as file:
        assert "Format('q8_0'), shape=" in repr(file["Q8_0"])
        assert "<function" not in repr(file["Q8_0"])
