"""ComfyUI's files: what says how a layer is quantized, and layers that are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

import cuquant as cq
from cuquant.io.container.safetensors import SafetensorsReader, SafetensorsWriter
from cuquant.io.schema.comfyui import untiled

ROOT = Path("tests/data/checkpoints/comfyui-layers")
SAYS = ".comfy_quant"


def tensors():
    """Of the set, without the layer that is rotated: dtype, shape and bytes."""
    with SafetensorsReader(ROOT / "model.safetensors") as reader:
        return {
            name: (info.dtype, info.shape, reader.raw(name))
            for name, info in reader.tensors.items()
            if "convrot" not in name
        }


def write(path, found, metadata=None):
    specs = {name: (dtype, shape) for name, (dtype, shape, _) in found.items()}
    with SafetensorsWriter(path, specs, metadata or {}) as writer:
        for name, (_, _, data) in found.items():
            writer.write_raw(name, data)
    return path


def test_the_metadata_says_the_same_as_tensors(tmp_path):
    found = tensors()
    said = {
        name.removesuffix(SAYS): json.loads(bytes(data))
        for name, (_, _, data) in found.items()
        if SAYS in name
    }
    rest = {name: info for name, info in found.items() if SAYS not in name}
    text = json.dumps(
        {"format_version": "1.0", "layers": said | {"not.there": {"format": "nvfp4"}}}
    )
    path = write(tmp_path / "m.safetensors", rest, {"_quantization_metadata": text})
    with cq.open(path) as file:
        assert file.kind == "comfyui"
        want = np.load(ROOT / "dequantized.npz")
        for name in want.files:
            if "convrot" not in name:
                values = file[name].read().dequantize("float32")
                np.testing.assert_array_equal(values, want[name])
    for bad in ("[", "[]", "{}", '{"layers": []}', "[" * 100_000):
        write(path, rest, {"_quantization_metadata": bad})
        with pytest.raises(cq.FormatError, match="_quantization_metadata"):
            cq.open(path)


def test_the_dtype_is_that_of_tensors_that_are_not_quantized():
    with cq.open(ROOT) as file:
        assert {e.dtype.name for e in file.values() if e.format is not None} == {"bfloat16"}
        assert file["blocks.0.fp8.input_scale"].read() == 0.5  # as it lies


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"format": "int8_tensorwise", "convrot": True}, "ConvRot"),
        ({"format": "int8_tensorwise", "params": {"convrot": True}}, "ConvRot"),
        ({"format": "convrot_w4a4"}, "ConvRot"),
        ({"format": "asym_w4a8_int8"}, "ConvRot"),
        ({"format": "awq_w4a16"}, "awq_w4a16"),
        ({"format": "nvfp4"}, "no nvfp4"),
        ({"format": ["x"]}, "format"),
        ({}, "format"),
        ([], "JSON object"),
    ],
)
def test_other_layers_are_refused_by_name(said, why, tmp_path):
    found = tensors()
    text = json.dumps(said).encode()
    found[f"blocks.0.int8{SAYS}"] = "U8", (len(text),), np.frombuffer(text, np.uint8)
    with cq.open(write(tmp_path / "m.safetensors", found)) as file:
        entry = file["blocks.0.int8.weight"]
        with pytest.raises(cq.FormatError, match=why) as raised:
            entry.read()
        assert "blocks.0.int8" in str(raised.value) and why in entry.notes[0]
        file["blocks.0.fp8.weight"].read()  # others can be read


def test_rows_that_are_padded_are_refused(tmp_path):
    """nvfp4's rows and columns are padded to 16; a bias tells how many rows there are."""
    found = tensors()
    found["blocks.0.nvfp4.bias"] = "BF16", (140,), np.zeros(280, np.uint8)
    with (
        cq.open(write(tmp_path / "m.safetensors", found)) as file,
        pytest.raises(cq.FormatError, match="padded"),
    ):
        file["blocks.0.nvfp4.weight"].read()


def test_tiles_are_undone_for_every_scale():
    """A tile of 128 x 4 holds four rows beside each other: 32 apart."""
    rows, columns = 200, 10
    scales = np.arange(rows * columns, dtype=np.int64).reshape(rows, columns)
    tiles = np.zeros((2, 3, 512), np.int64)
    for r in range(rows):
        for k in range(columns):
            inner = r % 128
            tiles[r // 128, k // 4, inner % 32 * 16 + inner // 32 * 4 + k % 4] = scales[r, k]
    np.testing.assert_array_equal(untiled(tiles.reshape(-1), rows, columns), scales)
    with pytest.raises(ValueError, match="do not fill"):
        untiled(np.zeros(512), 200, 2)


def test_the_marker_of_older_files_goes_with_their_layers(tmp_path):
    """What other kinds are written from it has no marker that would say the weights are fp8."""
    source = ROOT.with_name("comfyui-scaled-fp8")
    with cq.open(source) as file:
        assert not [name for name in file if "scaled_fp8" in name]
    cq.convert(source, tmp_path / "m.safetensors", to="cuquant")
    want, found = cq.load(source), cq.load(tmp_path / "m.safetensors")
    assert found.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, cq.QuantArray):
            assert found[name].format == value.format
            np.testing.assert_array_equal(found[name].packed, value.packed)
