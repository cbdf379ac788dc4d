"""convert: the same numbers in another kind of files, or a refusal before anything is written."""

import json
import os
import re
import shutil
import tracemalloc
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuquant as cq
from cuquant.formats.packing import Packing
from cuquant.io.container.gguf import GgufReader
from cuquant.io.container.safetensors import SafetensorsReader
from cuquant.io.conversion import door
from cuquant.io.conversion.plan import WRITERS
from cuquant.io.schema import recipe

ROOT = Path("tests/data/checkpoints")
pytestmark = pytest.mark.filterwarnings("ignore:the architecture is not known")
FOLDERS = [kind for kind in WRITERS if kind not in ("cuquant", "gguf")]
RNG = np.random.default_rng(7)


def values_of(array):
    """The numbers of an array, float32."""
    if isinstance(array, cq.QuantArray):
        return array.dequantize(np.float32)
    return np.asarray(array).astype(np.float32)


def same_numbers(a, b):
    """Bit for bit, but for NaN's payload."""
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(values_of(a[name]), values_of(b[name]), err_msg=name)


def target(folder, kind):
    return folder / {"gguf": "out.gguf", "cuquant": "out.safetensors"}.get(kind, f"out-{kind}")


def weights(fmt, shape=(64, 256), dtype=np.float16, **options):
    x = RNG.standard_normal(shape).astype(dtype)
    return cq.quantize(x, fmt, **options)


def saved(folder, **arrays):
    """A file of ours with these weights."""
    path = folder / "in.safetensors"
    cq.save(path, {name.replace("__", "."): value for name, value in arrays.items()})
    return path


# What holds the numbers of what: the format of a source, and what the kind calls it.
HELD = [
    ("int4", "gptq", "uint4"),
    ("int4:row", "gptq", "uint4:row"),
    ("uint4:32", "gptq", "uint4:32"),
    ("int2", "gptq", "uint2"),
    ("uint3:64", "gptq", "uint3:64"),
    ("int8:32+float16", "gptq", "uint8:32"),
    ("q4_0", "gptq", "uint4:32"),
    ("q8_0", "gptq", "uint8:32"),
    ("int4", "awq", "uint4"),
    ("uint4:64", "awq", "uint4:64"),
    ("q4_0", "awq", "uint4:32"),
    ("int4", "compressed-tensors", "int4"),
    ("uint4", "compressed-tensors", "uint4"),
    ("uint3:32", "compressed-tensors", "uint3:32"),
    ("int5:row", "compressed-tensors", "int5:row"),
    ("int8", "compressed-tensors", "int8"),
    ("int6:tensor", "compressed-tensors", "int6:tensor"),
    ("q5_0", "compressed-tensors", "int5:32"),
    ("fp8_e4m3", "compressed-tensors", "fp8_e4m3"),
    ("fp8_e4m3:tensor", "compressed-tensors", "fp8_e4m3:tensor"),
    ("fp8_e4m3:32x64", "compressed-tensors", "fp8_e4m3:32x64"),
    ("mxfp4", "compressed-tensors", "mxfp4"),
    ("mxfp6", "compressed-tensors", "mxfp6"),
    ("mxfp8", "compressed-tensors", "mxfp8"),
    ("nf4", "bitsandbytes", "nf4"),
    ("fp4:128", "bitsandbytes", "fp4:128"),
    ("nf4:32+dq", "bitsandbytes", "nf4:32+dq"),
    ("fp4:flat128", "bitsandbytes", "fp4:128"),
    ("int8+absmax", "bitsandbytes", "int8+absmax"),
    ("int8:32+float16+permuted", "gptq", "uint8:32"),
    ("uint4:32+min", "gguf", "q4_1"),
    ("uint4:64+min", "gguf", "q4_1"),
    ("uint3:row+min", "gguf", "q4_1"),
    ("uint5:128+min", "gguf", "q5_1"),
    ("uint4:64+min", "mlx", "uint4:64+min"),
    ("uint6:32+min+bfloat16", "mlx", "uint6:32+min+bfloat16"),
    ("mxfp4", "mlx", "mxfp4"),
    ("mxfp8", "mlx", "mxfp8"),
    ("fp8_e4m3:128x128", "fp8", "fp8_e4m3:128x128"),
    ("fp8_e4m3:tensor", "fp8", "fp8_e4m3:tensor"),
    ("int4:32", "gguf", "q4_0"),
    ("int4", "gguf", "q4_0"),
    ("int4:row", "gguf", "q4_0"),
    ("int3:64", "gguf", "q4_0"),
    ("uint4:32", "gguf", "q5_0"),
    ("int5:32", "gguf", "q5_0"),
    ("int8:32+float16", "gguf", "q8_0"),
    ("q4_k", "gguf", "q4_k"),
    ("iq4_nl", "gguf", "iq4_nl"),
    ("nvfp4", "gguf", "nvfp4"),
    ("nvfp4+divisor", "compressed-tensors", "nvfp4+divisor"),
]


@pytest.mark.parametrize(("name", "kind", "found"), HELD)
def test_a_kind_holds_the_numbers_of_a_format(tmp_path, name, kind, found):
    q = weights(name)
    source = saved(tmp_path, up__weight=q, up__bias=np.arange(64, dtype=np.float16))
    (step, plain) = sorted(cq.convert(source, target(tmp_path, kind), kind), key=lambda s: s.rounds)
    assert not step.rounds and not plain.rounds
    with cq.open(target(tmp_path, kind)) as file:
        assert file.kind == kind
        assert str(file["up.weight"].format) == found
    back = cq.load(target(tmp_path, kind))
    same_numbers(cq.load(source), back)
    assert back["up.weight"].shape == q.shape
    cq.convert(target(tmp_path, kind), tmp_path / "again.safetensors", "cuquant")
    same_numbers(back, cq.load(tmp_path / "again.safetensors"))


AFFINE = ("int4", "uint4:32", "int3:64", "int8:64+float16", "q4_0", "q4_1", "q8_0", "int4:row")


@pytest.mark.parametrize("name", AFFINE)
def test_mlx_has_the_numbers_of_integers(tmp_path, name):
    q = weights(name)
    cq.convert(saved(tmp_path, up__weight=q), tmp_path / "out", "mlx")
    with SafetensorsReader(tmp_path / "out" / "model.safetensors") as reader:
        words, scales, biases = (reader.read(f"up.{n}") for n in ("weight", "scales", "biases"))
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    codes = Packing(said["bits"], "dense").unpack(words, 256)
    wide = [np.repeat(part, said["group_size"], axis=1) for part in (scales, biases)]
    np.testing.assert_array_equal(codes * wide[0] + wide[1], q.dequantize(np.float32))
    same_numbers({"up.weight": q}, cq.load(tmp_path / "out"))


CHUNKED = [case[:2] for case in HELD if case[1] != "bitsandbytes"]


@pytest.mark.parametrize(("name", "kind"), CHUNKED)
def test_rows_may_be_unpacked_some_at_a_time(tmp_path, monkeypatch, name, kind):
    source = saved(tmp_path, up__weight=weights(name, (160, 512)))
    cq.convert(source, target(tmp_path, kind), kind)
    whole = cq.load(target(tmp_path, kind))["up.weight"]
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(recipe, "CHUNK", 64 * 512)  # 64, 64 and 32 rows
    cq.convert(source, target(tmp_path / "b", kind), kind)
    assert cq.array_equal(whole, cq.load(target(tmp_path / "b", kind))["up.weight"])


MEMORY = (
    ("q8_0", "gguf", 1.1), ("float16", "gguf", 1.1), ("q4_0", "cuquant", 1.1),
    ("int4", "gptq", 1.5), ("int4", "compressed-tensors", 0.3), ("uint4:32", "gguf", 0.9),
)  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "most"), MEMORY)
def test_memory_holds_less_than_two_arrays(tmp_path, name, kind, most):
    """Once what stays as it is, or lies along the other axis; else some rows at a time."""
    x = np.full((2048, 4096), 0.5, np.float16)
    array = x if name == "float16" else cq.quantize(x, name)
    source = saved(tmp_path, **{f"l{i}__weight": array for i in range(3)})
    cq.convert(source, target(tmp_path, kind), kind)  # nothing is imported or remembered later
    (tmp_path / "b").mkdir()
    tracemalloc.start()
    try:
        cq.convert(source, target(tmp_path / "b", kind), kind)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most * array.nbytes


@pytest.mark.parametrize("name", cq.list_formats())
def test_our_own_files_hold_every_format(tmp_path, name):
    source = saved(
        tmp_path, up__weight=weights(name), down__weight=weights(name, (256, 8), axis=0).T
    )
    cq.convert(source, tmp_path / "out.safetensors", "cuquant")
    before, after = cq.load(source), cq.load(tmp_path / "out.safetensors")
    assert all(cq.array_equal(before[key], after[key]) for key in before)
    assert source.read_bytes() == (tmp_path / "out.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q6_k", "iq4_xs"])
def test_gguf_and_back_is_the_same_file(tmp_path, name):
    arrays = {"a.weight": weights(name), "b.weight": np.ones((3, 5), ml_dtypes.bfloat16)}
    cq.save(tmp_path / "a", arrays)
    cq.convert(tmp_path / "a", tmp_path / "b.gguf", "gguf")
    cq.convert(tmp_path / "b.gguf", tmp_path / "c.safetensors", "cuquant")
    cq.convert(tmp_path / "c.safetensors", tmp_path / "d.gguf", "gguf")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "d.gguf").read_bytes()
    same_numbers(cq.load(tmp_path / "a"), cq.load(tmp_path / "d.gguf"))


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q8_0", "q4_k", "mxfp4"])
def test_the_owner_of_gguf_reads_the_same_numbers(tmp_path, name):
    gguf = pytest.importorskip("gguf")
    source = {"q4_0": "int4", "q5_0": "uint4:64", "q8_0": "int8:32+float16"}.get(name, name)
    q = weights(source)
    path = saved(tmp_path, up__weight=q, bias=np.arange(64, dtype=np.float16))
    cq.convert(path, tmp_path / "out.gguf", "gguf")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    found = tensors["up.weight"]
    assert found.tensor_type.name.lower() == name
    np.testing.assert_array_equal(
        gguf.quants.dequantize(found.data, found.tensor_type), q.dequantize(np.float32)
    )
    assert tensors["bias"].tensor_type.name == "F32"  # ggml adds vectors of float32 alone


GOLDEN = {
    "gptq-4bit": ("gptq", "awq", "compressed-tensors"),
    "gptq-4bit-asym-v1": ("gptq", "awq", "compressed-tensors"),
    "gptq-2bit-v2": ("gptq", "compressed-tensors"),
    "gptq-8bit": ("gptq", "compressed-tensors"),
    "gptq-4bit-actorder": ("gptq", "cuquant"),
    "gptq-autogptq-layers": ("gptq", "cuquant"),
    "ct-old-actorder": ("gptq", "cuquant"),
    "awq-autoawq-gemm": ("gptq", "compressed-tensors"),
    "awq-gemm-gptqmodel": ("awq", "compressed-tensors"),
    "ct-w4a16": ("compressed-tensors", "gptq", "awq"),
    "ct-w4a16-asym": ("compressed-tensors", "gptq", "awq"),
    "ct-fp8-block": ("compressed-tensors",),
    "ct-mxfp4": ("compressed-tensors",),
    "ct-mxfp8": ("compressed-tensors",),
    "ct-nvfp4": ("compressed-tensors",),
    "hf-fp8-block128": ("fp8", "compressed-tensors"),
    "mlx-affine": ("mlx",),
    "mlx-affine-mixed": ("mlx",),
    "mlx-mxfp4": ("mlx",),
    "quanto-qint4": ("mlx",),
    "awq-autoawq-gemv_fast": ("mlx",),
    "comfyui-scaled-fp8": ("fp8", "compressed-tensors"),
    "bitsandbytes-nf4-double": ("bitsandbytes",),
    "bitsandbytes-nf4": ("bitsandbytes", "cuquant"),
    "bitsandbytes-fp4": ("bitsandbytes",),
    "bitsandbytes-int8": ("bitsandbytes", "cuquant"),
    "bitsandbytes-layers": ("cuquant",),
    "modelopt-int4": ("compressed-tensors",),
}


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n, kinds in GOLDEN.items() for k in kinds])
def test_checkpoints_of_owners_become_others(tmp_path, name, kind):
    before = cq.load(ROOT / name)
    try:
        steps = cq.convert(ROOT / name, target(tmp_path, kind), kind)
    except ValueError as why:
        pytest.fail(str(why))
    assert not any(step.rounds for step in steps)
    with cq.open(target(tmp_path, kind)) as file:
        assert file.kind == kind
    after = cq.load(target(tmp_path, kind))
    same_numbers(before, after)
    if kind == "cuquant" or (name.startswith(kind) and kind in ("gptq", "bitsandbytes")):
        arrays = [key for key, value in before.items() if isinstance(value, cq.QuantArray)]
        assert all(cq.array_equal(before[key], after[key]) for key in arrays)


@pytest.mark.parametrize(
    "name", ["uint2:32", "uint3:32", "uint4:64", "int4", "uint8:128", "int3:32"]
)
def test_columns_in_any_order_come_back_from_gptq(tmp_path, name):
    """Values and codes; columns of a group lie in the order of the array then."""
    stored = weights(name, (64, 224))  # of a short last group, but for 32 columns
    fmt, order = cq.get_format(name, permuted=True), RNG.permutation(224).astype(np.int32)
    q = stored._with(format=fmt, components={**stored.components, "permutation": order})
    cq.convert(saved(tmp_path, up__weight=q), tmp_path / "out", "gptq")
    found = cq.load(tmp_path / "out")["up.weight"]
    np.testing.assert_array_equal(found.dequantize(np.float32), q.dequantize(np.float32))
    np.testing.assert_array_equal(found.codes(), q.codes())
    size = fmt.block_size
    for start in range(0, 224, size):
        group = slice(start, start + size)
        np.testing.assert_array_equal(found.arrays()["permutation"][group], np.sort(order[group]))


# ---- refusals -----------------------------------------------------------------------------------

LOST = [
    ("nf4", "gguf", "no type with such codes"),
    ("nf4", "gptq", "integers of 2, 3, 4 or 8 bits"),
    ("int5", "gptq", "integers of 2, 3, 4 or 8 bits"),
    ("int3", "awq", "4 bits"),
    ("int4", "bitsandbytes", "nf4 and fp4"),
    ("bof4s", "bitsandbytes", "nf4 and fp4"),
    ("int8", "bitsandbytes", "int8+absmax"),
    ("int4+permuted", "awq", "columns are permuted"),
    ("int4+permuted", "gguf", "columns are permuted"),
    ("int8:tensor+permuted", "compressed-tensors", "columns are permuted"),
    ("nf4:flat", "compressed-tensors", "blocks run across rows"),
    ("uint4:flat", "gptq", "blocks run across rows"),
    ("int8+absmax", "compressed-tensors", "absmax in place of scales"),
    ("int4", "fp8", "fp8_e4m3"),
    ("fp8_e4m3", "fp8", "for each block or matrix"),
    ("fp8_e5m2", "compressed-tensors", "holds integers"),
    ("q4_k", "compressed-tensors", "holds integers"),
    ("uint8:32", "gguf", "beyond the 8 bits of q8_0"),
    ("int4:16", "gguf", "a scale for each 32 columns"),
    ("int8", "gguf", "float32 scales"),
    ("uint6:64+min", "gguf", "up to 5 bits"),
    ("uint4:16+min", "gguf", "a minimum for each 32 columns"),
    ("uint4:64+min", "gptq", "integers of 2, 3, 4 or 8 bits"),
    ("nvfp4+divisor", "gguf", "its global scale divides"),
    ("nvfp4+divisor", "mlx", "its global scale divides"),
    ("nvfp4+per_matrix", "mlx", "each matrix has a global scale"),
]


@pytest.mark.parametrize(("name", "kind", "why"), LOST)
def test_what_would_be_lost_is_named_and_nothing_is_written(tmp_path, name, kind, why):
    source = saved(tmp_path, a__weight=np.ones((8, 8), np.float32), up__weight=weights(name))
    with pytest.raises(ValueError, match=r"up\.weight.*without loss.*requantize=True") as raised:
        cq.convert(source, target(tmp_path, kind), kind)
    assert why in str(raised.value)
    assert os.listdir(tmp_path) == ["in.safetensors"]
    (step,) = (
        s for s in cq.convert(source, target(tmp_path, kind), kind, requantize=True)
        if s.name == "up.weight"
    )  # fmt: skip
    assert step.rounds
    before, after = cq.load(source)["up.weight"], cq.load(target(tmp_path, kind))["up.weight"]
    assert cq.error(before.dequantize(np.float32), after).sqnr_db > 8
    assert after.dtype == (np.float32 if kind == "gguf" else np.float16)


@pytest.mark.parametrize("kind", ["gptq", "bitsandbytes", "mlx", "fp8"])
def test_what_fits_no_format_of_a_kind_is_decoded(tmp_path, kind):
    experts = weights("uint5:32", (2, 8, 40))
    source = saved(
        tmp_path, experts__weight=experts, down__weight=weights("int4", (256, 64), axis=0)
    )
    with pytest.raises(ValueError, match="requantize=True"):
        cq.convert(source, tmp_path / "out", kind)
    steps = {s.name: s for s in cq.convert(source, tmp_path / "out", kind, requantize=True)}
    step = steps["experts.weight"]
    assert (step.rounds, step.was, step.becomes) == (True, "uint5:32", "float16")
    assert step.bytes_out == experts.size * 2
    assert steps["down.weight"].rounds and steps["down.weight"].recipe is not None
    found = cq.load(tmp_path / "out")["experts.weight"]
    np.testing.assert_array_equal(found, experts.dequantize())


def test_mlx_refuses_codebooks(tmp_path):
    source = saved(tmp_path, up__weight=weights("nf4"))
    with pytest.raises(ValueError, match="MLX holds integers"):
        cq.convert(source, tmp_path / "out", "mlx")
    (step,) = cq.convert(source, tmp_path / "out", "mlx", requantize=True)
    assert step.rounds and step.becomes == "affine, groups of 64"


def test_scales_beyond_float16_are_refused_by_name(tmp_path):
    q = cq.quantize(RNG.standard_normal((64, 256)).astype(np.float32) * 1e-7, "int4+float32")
    source = saved(tmp_path, up__weight=q)
    with pytest.raises(ValueError, match=r"up\.weight.*float32 scales are not those of F16"):
        cq.convert(source, tmp_path / "out", "gptq")
    cq.convert(source, tmp_path / "out", "compressed-tensors")
    same_numbers(cq.load(source), cq.load(tmp_path / "out"))


def test_every_refusal_is_counted(tmp_path):
    source = saved(tmp_path, a__weight=weights("nf4"), b__weight=weights("nf4"))
    with pytest.raises(ValueError, match=r"a\.weight.*and 1 more arrays"):
        cq.convert(source, tmp_path / "out", "gptq")


def test_kinds_of_files_are_told_by_their_names(tmp_path):
    source = saved(tmp_path, up__weight=weights("int4"))
    for out, kind, why in [
        ("out", "gguf", "call it out.gguf"),
        ("out.safetensors", "gptq", "name a folder"),
        ("out.gguf", "awq", "no GGUF file"),
        ("out.gguf", "qptq", "gptq"),
        ("in.safetensors/x", "gptq", "No such|no such|Not a directory"),
    ]:
        with pytest.raises((ValueError, OSError), match=why):
            cq.convert(source, tmp_path / out, kind)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(ValueError, match="is there already"):
        cq.convert(source, tmp_path / "full", "gptq")


def test_arrays_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(cq.FormatError, match="marlin"):
        cq.convert(ROOT / "ct-old-marlin24", tmp_path / "out", "cuquant")
    assert not os.listdir(tmp_path)


def test_other_axes_are_refused_by_other_kinds(tmp_path):
    source = saved(tmp_path, up__weight=weights("int4", (256, 64), axis=0))
    with pytest.raises(ValueError, match="last axis"):
        cq.convert(source, tmp_path / "out", "gptq")


# ---- folders ------------------------------------------------------------------------------------


def test_a_folder_has_shards_an_index_and_what_lay_beside(tmp_path, monkeypatch):
    source = tmp_path / "in"
    source.mkdir()
    arrays = {f"l{i}.weight": RNG.standard_normal((64, 128)).astype(np.float16) for i in range(5)}
    cq.save(source / "model.safetensors", arrays | {"embed_tokens.weight": arrays["l0.weight"]})
    (source / "config.json").write_text('{"model_type": "x", "torch_dtype": "float16"}')
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("")
    monkeypatch.setattr(door, "SHARD_BYTES", 12_000)
    steps = cq.convert(source, tmp_path / "out", "gptq", format="int4:32")
    assert [step.rounds for step in sorted(steps, key=lambda s: s.name)] == [False] + [True] * 5
    out = tmp_path / "out"
    names = sorted(os.listdir(out))
    assert names[:1] == ["config.json"] and names[-2:] == [
        "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    shards = [name for name in names if name.endswith("safetensors")]
    assert len(shards) > 2 and shards[0] == f"model-00001-of-0000{len(shards)}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == sum(step.bytes_out for step in steps)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "x"
    said = config["quantization_config"]
    assert (said["bits"], said["group_size"], said["sym"]) == (4, 32, True)
    assert said["dynamic"] == {"-:embed_tokens$": {}}
    for name, q in cq.load(out).items():
        if name != "embed_tokens.weight":
            want = cq.quantize(arrays[name], "int4:32")
            np.testing.assert_array_equal(q.dequantize(), want.dequantize())
    cq.convert(out, tmp_path / "ours", "cuquant")
    assert "quantization_config" not in json.loads((tmp_path / "ours/config.json").read_text())
    same_numbers(cq.load(out), cq.load(tmp_path / "ours"))


def test_modules_may_have_settings_of_their_own(tmp_path):
    q = {
        "a__weight": weights("int4"),
        "b__weight": weights("int4"),
        "c__weight": weights("int8:32+float16"),
    }
    source = saved(tmp_path, **q)
    for kind in ("gptq", "compressed-tensors"):
        cq.convert(source, tmp_path / kind, kind)
        same_numbers(cq.load(source), cq.load(tmp_path / kind))
    saved(tmp_path, a__weight=weights("int4"), b__weight=weights("int4:32"))
    with pytest.raises(ValueError, match="one size of groups for all arrays"):
        cq.convert(source, tmp_path / "awq", "awq")


@pytest.mark.parametrize("kind", ["gguf", "cuquant", "gptq"])
def test_nothing_stays_of_a_conversion_that_fails(tmp_path, kind):
    source = saved(
        tmp_path, a__weight=weights("int4:32"), b__weight=np.full((32, 64), np.nan, np.float16)
    )
    with pytest.raises(ValueError, match=r"nan|NaN"):
        cq.convert(source, target(tmp_path, kind), kind, format="int4:32")
    assert os.listdir(tmp_path) == ["in.safetensors"]
    work = door.Conversion(source, target(tmp_path, kind), kind)
    run = work.run()
    next(run)
    run.close()
    work.close()
    assert os.listdir(tmp_path) == ["in.safetensors"]


def test_metadata_of_gguf_goes_with_it(tmp_path):
    source = saved(tmp_path, w=weights("q4_0"))
    cq.convert(source, tmp_path / "a.gguf", "gguf")
    from cuquant.io.container.gguf import GgufWriter

    with GgufWriter(tmp_path / "b.gguf", {"w": ("q8_0", (2, 32))}, {
        "general.architecture": "llama", "general.file_type": np.uint32(7),
    }) as writer:  # fmt: skip
        writer.write("w", np.zeros((2, 34), np.uint8))
    cq.convert(tmp_path / "b.gguf", tmp_path / "c.gguf", "gguf")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "c.gguf").read_bytes()
    cq.convert(tmp_path / "b.gguf", tmp_path / "c.gguf", "gguf", "q4_0", requantize=True)
    with GgufReader(tmp_path / "c.gguf") as reader:
        assert reader.metadata == {"general.architecture": "llama"}
        assert reader.tensors["w"].type.name == "Q4_0"


def test_a_refusal_of_a_format_names_one_that_the_kind_holds(tmp_path):
    source = saved(tmp_path, up__weight=RNG.standard_normal((64, 256)).astype(np.float16))
    for fmt, kind, near in (
        ("int8:128", "gptq", "int8:128+float16"),  # GPTQ has float16 scales alone
        ("nf4", "gptq", "int4"),
        ("nf4", "gguf", "q4_k"),
        ("nf4", "mlx", "int4:64"),
        ("q4_k", "fp8", "fp8_e4m3:128x128"),
        ("mxfp8", "bitsandbytes", "nf4"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"; as {near} it can")):
            cq.convert(source, target(tmp_path, kind), kind, fmt)
        (step,) = cq.convert(source, target(tmp_path, f"{kind}-{fmt}"), "cuquant", near)
        assert step.becomes == near
        cq.convert(source, target(tmp_path, kind), kind, near)  # as it says
        shutil.rmtree(target(tmp_path, kind), ignore_errors=True)


def test_a_folder_of_another_library_without_anything_quantized_is_told(tmp_path):
    source = saved(tmp_path, up__weight=RNG.standard_normal((64, 256)).astype(np.float16))
    for kind in ("gptq", "awq", "compressed-tensors", "bitsandbytes", "mlx", "fp8"):
        with pytest.warns(UserWarning, match="no array is quantized"):
            cq.convert(source, tmp_path / kind, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cq.convert(source, tmp_path / "one", "gptq", "int4")
        cq.convert(source, tmp_path / "ours", "cuquant")


def test_a_format_that_no_array_takes_is_told(tmp_path):
    """convert -f q5_k of a file that is q4_k already writes q4_k again."""
    source = saved(tmp_path, up__weight=weights("q4_k"))
    with pytest.warns(UserWarning, match="none is quantized to it: 1 that are quantized already"):
        (step,) = cq.convert(source, tmp_path / "a.safetensors", "cuquant", "q5_k")
    assert step.becomes == "q4_k"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cq.convert(source, tmp_path / "b.safetensors", "cuquant")
        (step,) = cq.convert(source, tmp_path / "c.safetensors", "cuquant", "q5_k", True)
    assert step.becomes == "q5_k"


def test_global_scales_that_multiply_go_where_they_divide_only_without_loss(tmp_path):
    """nvfp4 in compressed-tensors: 1 / g rounds, and e4m3 / (1 / g) may be another float32."""
    x = RNG.standard_normal((64, 256)).astype(np.float32)
    q = cq.quantize(x, "nvfp4", global_scale=0.25)
    cq.convert(saved(tmp_path, up__weight=q), tmp_path / "exact", "compressed-tensors")
    found = cq.load(tmp_path / "exact")["up.weight"]
    assert str(found.format) == "nvfp4+divisor"
    assert np.array_equal(found.dequantize("float32"), q.dequantize("float32"))
    q = cq.quantize(x, "nvfp4", global_scale=np.float32(0.1))
    source = saved(tmp_path, up__weight=q)
    with pytest.raises(ValueError, match="its global scale multiplies block scales"):
        cq.convert(source, tmp_path / "no", "compressed-tensors")
    (step,) = cq.convert(source, tmp_path / "near", "compressed-tensors", requantize=True)
    near = cq.load(tmp_path / "near")["up.weight"]
    assert step.rounds and np.array_equal(near.packed, q.packed)
    np.testing.assert_allclose(near.dequantize("float32"), q.dequantize("float32"), rtol=3e-7)
    # Floats are quantized to what the kind has.
    (step,) = cq.convert(
        saved(tmp_path, up__weight=x), tmp_path / "made", "compressed-tensors", "nvfp4"
    )
    made = cq.load(tmp_path / "made")["up.weight"]
    assert cq.array_equal(made, cq.quantize(x, "nvfp4+divisor"))
