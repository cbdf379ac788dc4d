"""Checkpoints that the formats' owners wrote, and the numbers that they read from them.

tests/data/checkpoints: files as written by the owner, of random weights; dequantized.npz holds the
owner's numbers.
"""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuquant as cq
from cuquant.io.container.safetensors import SafetensorsReader, SafetensorsWriter

ROOT = Path("tests/data/checkpoints")
OWN = None  # the dtype of the array: that of its scales

# Each set, its kind, the dtype that the owner's product is rounded to, and formats that are in it.
SETS = {
    "awq-autoawq-gemm": ("awq", "float32", {"uint4", "uint4:32", "uint4:64"}),
    "awq-autoawq-gemv": ("awq", "float32", {"uint4", "uint4:32", "uint4:64"}),
    "awq-autoawq-gemv_fast": ("awq", "float32", {"uint4+min"}),
    "awq-gemm-gptqmodel": ("awq", "float16", {"uint4+bfloat16"}),
    "bitsandbytes-fp4": ("bitsandbytes", "float32", {"fp4", "fp4:flat"}),
    "bitsandbytes-int8": ("bitsandbytes", "float32", {"int8+absmax"}),
    "bitsandbytes-layers": (
        "bitsandbytes",
        "float32",
        {"nf4:flat", "fp4:flat128", "nf4:flat4096+dq", "nf4:flat+dq", "nf4", "fp4", "int8+absmax"},
    ),
    "bitsandbytes-nf4": ("bitsandbytes", "float32", {"nf4", "nf4:flat"}),
    "bitsandbytes-nf4-double": ("bitsandbytes", "float32", {"nf4+dq"}),
    "comfyui-layers": (
        "comfyui",
        "float32",
        {"fp8_e4m3:tensor", "fp8_e5m2:tensor", "int8:tensor", "int8", "nvfp4"},
    ),
    "comfyui-scaled-fp8": ("comfyui", "float32", {"fp8_e4m3:tensor"}),
    "ct-fp8-block": (
        "compressed-tensors",
        OWN,
        {"fp8_e4m3:128x128+float16", "fp8_e4m3:tensor+float16"},
    ),
    "ct-fp8-channel": ("compressed-tensors", OWN, {"fp8_e4m3+bfloat16"}),
    "ct-fp8-tensor": ("compressed-tensors", OWN, {"fp8_e4m3:tensor+bfloat16"}),
    "ct-layers": ("compressed-tensors", OWN, {"int2:32", "uint3:32+bfloat16", "int7:row", "nvfp4"}),
    "ct-mxfp4": ("compressed-tensors", OWN, {"mxfp4"}),
    "ct-mxfp8": ("compressed-tensors", OWN, {"mxfp8"}),
    "ct-nvfp4": ("compressed-tensors", OWN, {"nvfp4"}),
    "ct-old-actorder": ("compressed-tensors", OWN, {"int4:32+bfloat16+permuted"}),
    "ct-old-padded": ("compressed-tensors", OWN, {"int3:32", "int6:row", "int5:row+bfloat16"}),
    "ct-old-w3a16": ("compressed-tensors", OWN, {"uint8:32+bfloat16"}),
    "ct-w3a16": ("compressed-tensors", OWN, {"int3:32+bfloat16"}),
    "ct-w4a16": ("compressed-tensors", OWN, {"int4", "int4:row"}),
    "ct-w4a16-asym": ("compressed-tensors", OWN, {"uint4:32+bfloat16"}),
    "ct-w4a16-gptq": ("compressed-tensors", OWN, {"int4:32+bfloat16"}),
    "ct-w8a8-channel": ("compressed-tensors", OWN, {"int8+bfloat16"}),
    "ct-w8a8-static": ("compressed-tensors", OWN, {"int8:tensor+bfloat16"}),
    "fbgemm-fp8": ("fp8", "float32", {"fp8_e4m3"}),
    "gptq-2bit-v2": ("gptq", "float16", {"uint2:32"}),
    "gptq-3bit": ("gptq", "float16", {"uint3:32"}),
    "gptq-4bit": ("gptq", "float16", {"uint4", "uint4:row"}),
    "gptq-4bit-actorder": ("gptq", "float16", {"uint4:32+permuted"}),
    "gptq-4bit-asym-v1": ("gptq", "float16", {"uint4:32"}),
    "gptq-4bit-asym-v2": ("gptq", "float16", {"uint4:32"}),
    "gptq-4bit-zero-v1": ("gptq", "float16", {"uint4:32"}),
    "gptq-8bit": ("gptq", "float16", {"uint8:row"}),
    "gptq-autogptq-layers": ("gptq", "float32", {"uint3:64", "uint4:64+permuted"}),
    "hf-fp8-block128": ("fp8", "float32", {"fp8_e4m3:128x128"}),
    "hf-fp8-block32": ("fp8", "float32", {"fp8_e4m3:32x32"}),
    "hf-fp8-ragged": ("fp8", "float32", {"fp8_e4m3:64x64"}),
    "hf-mxfp4-gpt-oss": ("mxfp4", "float32", {"mxfp4"}),
    "mlx-affine": ("mlx", "float32", {"uint4:64+min"}),
    "mlx-affine-mixed": (
        "mlx",
        "float32",
        {"uint3:32+min+bfloat16", "uint6:32+min+bfloat16"},
    ),
    "mlx-mxfp4": ("mlx", "float32", {"mxfp4"}),
    "mlx-nvfp4": ("mlx", "float32", {"nvfp4"}),
    "modelopt-fp8": ("modelopt", "float32", {"fp8_e4m3:tensor"}),
    "modelopt-int4": ("modelopt", "float16", {"int4+float32"}),
    "modelopt-nvfp4": ("modelopt", "float32", {"nvfp4"}),
    "torchao-int8": ("torchao", "bfloat16", {"int8"}),
    "torchao-layers": ("torchao", "bfloat16", {"mxfp6", "nvfp4", "uint4:32+min+float32"}),
}
# Whose numbers have another dtype than the set's or the array's.
UNTOLD = {
    ("ct-layers", "nvfp4.weight"): "bfloat16",
    ("torchao-layers", "int4_plain.weight"): "float32",  # has no decoder on the CPU
}
# Arrays that are refused by name, and why.
UNREAD = {
    "comfyui-layers": "rotated (ConvRot)",
    "ct-old-marlin24": "order of a kernel",
}
# Whose owner rounds twice on the way: each has a test of its own.
ROUNDED = {"hqq-layers", "quanto-layers", "quanto-qint4"}


def unread(file):
    """Names of arrays that cannot be read, which their notes say."""
    return [name for name, entry in file.items() if entry.notes and not entry.tensors]


@pytest.mark.parametrize("name", SETS)
def test_numbers_are_the_owners(name):
    kind, dtype, formats = SETS[name]
    want = np.load(ROOT / name / "dequantized.npz")
    with cq.open(ROOT / name) as file:
        assert file.kind == kind
        assert formats <= {str(entry.format) for entry in file.values()}
        refused, seen = unread(file), 0
        for key in want.files:
            found = key if key in file else f"{key}.weight"
            if found in refused:
                continue
            entry = file[found]
            q, numbers = entry.read(), want[key]
            assert (q.format, q.shape, q.dtype) == (entry.format, entry.shape, entry.dtype)
            q.check()
            values = q.dequantize(UNTOLD.get((name, found), dtype))
            np.testing.assert_array_equal(values.astype(np.float32), numbers)
            seen += 1
    assert seen


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read_is_refused_by_name_and_listed(name):
    reason = UNREAD[name]
    with cq.open(ROOT / name) as file:
        refused = unread(file)
        assert refused and all(reason in file[n].notes[0] for n in refused)
        with pytest.raises(cq.FormatError, match=re.escape(refused[0])) as raised:
            file[refused[0]].read()
        assert reason in str(raised.value)
        for entry in file.values():  # and its tensors can be looked at
            if entry.format is None and entry.tensors:
                assert entry.read().shape == entry.shape
    with pytest.raises(cq.FormatError, match=re.escape(reason)):
        cq.load(ROOT / name)


def test_every_set_is_tested():
    there = {path.name for path in ROOT.iterdir()}
    assert there == SETS.keys() | UNREAD.keys() | ROUNDED | {
        "ct-old-sparse24", "gptq-autogptq-zero", "mlx-layers",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["ct-w4a16", "gptq-4bit", "awq-gemm-gptqmodel"])
def test_all_other_tensors_are_there_as_they_lie(name):
    with cq.open(ROOT / name) as file:
        plain = {n: e for n, e in file.items() if e.format is None}
        used = [t for e in file.values() for t in e.tensors]
        assert len(used) == len(set(used)) and "model.norm.weight" in plain
    loaded = cq.load(ROOT / name, names=["model.norm.weight"])
    assert loaded["model.norm.weight"].shape == plain["model.norm.weight"].shape


def test_scales_of_llm_int8_are_within_a_rounding():
    """The owner divides by 127 last: a scale that is divided first changes one in five numbers."""
    want = np.load(ROOT / "bitsandbytes-int8" / "dequantized.npz")
    differ = 0
    with cq.open(ROOT / "bitsandbytes-int8") as file:
        for key in want.files:
            q = file[key if key in file else f"{key}.weight"].read()
            numbers = want[key].astype(np.float32)
            near = (q.codes().astype(np.float32) - 128) * q.scale
            gap = np.abs(near.view(np.int32) - numbers.view(np.int32))
            assert gap.max() == 1
            differ += int((gap == 1).sum())
    assert differ > 1000


def test_exponents_of_scales_are_powers_of_two(tmp_path):
    """All of E8M0: 0 is 2^-127, and 255 is NaN."""
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).reshape(256, 1)
    one = np.full((256, 8), 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)
    cq.save(tmp_path / "m.safetensors", {"a.weight": one, "a.weight_scale_inv": scales})
    found = cq.load(tmp_path)["a.weight"].dequantize("float32")[:, 0]
    np.testing.assert_array_equal(found, scales[:, 0].astype(np.float32))


def test_zero_points_of_int4tensor_become_minimums(tmp_path):
    """Rounded where float32 does not hold one less eight scales; other classes are refused."""
    source = ROOT / "torchao-layers" / "model.safetensors"
    with SafetensorsReader(source) as reader:
        stem = "int4_plain._weight"
        parts = {end: reader.read(f"{stem}_{end}") for end in ("qdata", "scale", "zero_point")}
        said = json.loads(reader.metadata["int4_plain.weight"])

    def write(kind, **changed):
        metadata = {
            "tensor_names": '["a.weight"]',
            "a.weight": json.dumps({**said, "_type": kind}),
        }
        found = {f"a._weight_{end}": v for end, v in {**parts, **changed}.items()}
        specs = {name: (value.dtype, value.shape) for name, value in found.items()}
        with SafetensorsWriter(tmp_path / "m.safetensors", specs, metadata) as writer:
            for name, value in found.items():
                writer.write(name, value)
        return cq.load(tmp_path / "m.safetensors")["a.weight"]

    tiny = np.full_like(parts["scale"], 1e-30)
    q = write("Int4Tensor", scale=tiny)
    np.testing.assert_array_equal(q.minimum, parts["zero_point"].T.astype(np.float32))
    for kind in ("Int4TilePackedTo4dTensor", "x"):
        with pytest.raises(cq.FormatError, match=kind):
            write(kind)
