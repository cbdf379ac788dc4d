"""convert, compare and inspect on the command line."""

import json
import math
import os
import re
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from command_line import run

import cuquant as cq
from cuquant.io.container.gguf import GgufWriter

ROOT = Path("tests/data/checkpoints")
RNG = np.random.default_rng(5)


def failed(result):
    assert result.exit_code == 1, result.output
    return result.stderr.strip()


@pytest.fixture
def ours(tmp_path):
    """A file of ours with a few arrays."""
    arrays = {
        "up.weight": cq.quantize(RNG.standard_normal((64, 256)).astype(np.float16), "int4"),
        "layer.10.weight": RNG.standard_normal((64, 256)).astype(np.float32),
        "layer.2.weight": RNG.standard_normal((64, 256)).astype(np.float32),
        "bias": np.zeros(64, np.float32),
    }
    cq.save(tmp_path / "in.safetensors", arrays)
    return tmp_path / "in.safetensors"


# ---- convert ------------------------------------------------------------------------------------


def test_convert_writes_and_tells(ours, tmp_path):
    result = run("convert", ours, tmp_path / "out", "--to", "gptq", "-f", "int4:32")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    names = [row[0] for row in rows if row and row[0] in cq.load(ours)]
    assert names == ["bias", "layer.2.weight", "layer.10.weight", "up.weight"]
    assert "4 arrays from cuquant to gptq: 2 rounded, 2 with the same numbers" in result.stdout
    assert "int4     4 bits, groups of 128" in result.stdout
    assert "float32  4 bits, groups of 32 (rounded)" in result.stdout
    assert "GB/s of input" in result.stdout
    assert str(cq.load(tmp_path / "out")["layer.2.weight"].format) == "uint4:32"


def test_a_dry_run_writes_nothing_and_has_the_sizes(ours, tmp_path):
    arguments = ("convert", ours, tmp_path / "out.gguf", "--to", "gguf", "-f", "q8_0", "--json")
    dry = json.loads(run(*arguments, "--dry-run").stdout)
    assert os.listdir(tmp_path) == ["in.safetensors"]
    done = json.loads(run(*arguments).stdout)
    assert dry["is_dry_run"] and not done["is_dry_run"]
    same = ("bytes_in", "bytes_out", "arrays", "rounded", "from", "to", "warnings")
    assert all(dry[key] == done[key] for key in same)
    with cq.open(tmp_path / "out.gguf") as file:
        assert done["bytes_out"] == sum(entry.nbytes for entry in file.values())
        assert {a["name"] for a in done["arrays"]} == set(file)
    assert done["rounded"] == 2 and "architecture is not known" in done["warnings"][0]
    assert "config.json belongs beside the weights" in done["warnings"][0]
    assert "nothing was written" in run(*arguments[:-1], "--dry-run").stdout


def test_what_would_be_lost_is_one_line_with_the_flag(ours, tmp_path):
    line = failed(run("convert", ours, tmp_path / "out", "--to", "bitsandbytes"))
    assert line.startswith("error: 'up.weight': int4 cannot be bitsandbytes without loss")
    assert line.endswith("; pass --requantize to round it to a format that can")
    assert "\n" not in line
    assert os.listdir(tmp_path) == ["in.safetensors"]
    result = run("convert", ours, tmp_path / "out", "--to", "bitsandbytes", "--requantize")
    assert result.exit_code == 0, result.output
    assert str(cq.load(tmp_path / "out")["up.weight"].format) == "nf4"


def test_unknown_kinds_and_formats_are_named(ours, tmp_path):
    result = run("convert", ours, tmp_path / "out", "--to", "gptk")
    assert result.exit_code == 2 and "gptq" in result.output
    assert "unknown format" in failed(
        run("convert", ours, tmp_path / "out", "--to", "gptq", "-f", "int44")
    )
    assert "No such file" in failed(run("convert", tmp_path / "no", tmp_path / "o", "--to", "awq"))
    assert "name a folder" in failed(
        run("convert", ours, tmp_path / "o.safetensors", "--to", "awq")
    )


# ---- compare ------------------------------------------------------------------------------------


def test_compare_has_the_worst_first(ours, tmp_path):
    arrays = cq.load(ours)
    arrays["layer.2.weight"] = cq.quantize(arrays["layer.2.weight"], "int4:32")
    arrays["layer.10.weight"] = cq.quantize(arrays["layer.10.weight"], "q2_k")
    del arrays["bias"]
    arrays["other"] = np.ones(3)
    cq.save(tmp_path / "b", arrays)
    found = cq.compare(ours, tmp_path / "b")
    assert [row.name for row in found.arrays] == ["layer.10.weight", "layer.2.weight", "up.weight"]
    before, after = cq.load(ours), cq.load(tmp_path / "b")
    for row in found.arrays[:2]:
        want = cq.error(before[row.name], after[row.name])
        assert (row.sqnr_db, row.max_error, row.cosine) == want
        assert (row.format_a, row.bits_a) == ("float32", 32)
        assert (row.format_b, row.bits_b) == (
            str(after[row.name].format), after[row.name].bits_per_element,
        )  # fmt: skip
    assert (found.arrays[2].sqnr_db, found.arrays[2].max_error) == (math.inf, 0)
    assert (found.only_a, found.only_b, found.left_out) == (("bias",), ("other",), {})
    assert not found.is_equal and cq.compare(ours, ours).is_equal
    assert str(found).splitlines()[0].startswith("layer.10.weight: ")
    result = run("compare", ours, tmp_path / "b")
    lines = result.stdout.splitlines()
    assert lines[2].split()[:4] == ["layer.10.weight", "64", "x", "256"]
    assert "bias: only in A" in lines and "other: only in B" in lines
    assert lines[-1] == "3 arrays compared, 1 of them equal"
    told = json.loads(run("compare", ours, tmp_path / "b", "--json").stdout)
    assert [row["name"] for row in told["arrays"]] == [row.name for row in found.arrays]
    assert told["arrays"][2]["sqnr_db"] is None  # infinite
    assert told["only_a"] == ["bias"] and told["is_equal"] is False


def test_compare_takes_arrays_and_leaves_out_what_has_no_numbers(tmp_path):
    w = RNG.standard_normal((4, 64)).astype(np.float32)
    found = cq.compare({"w": w, "n": w}, {"w": cq.prepack(cq.quantize(w, "int4:32")), "n": w[:2]})
    assert found.arrays[0].format_b == "int4:32"
    assert found.left_out == {"n": "shapes (4, 64) and (2, 64)"}
    with GgufWriter(tmp_path / "a.gguf", {"w": ("IQ2_S", (2, 256))}) as writer:
        writer.write("w", np.zeros((2, 82), np.uint8))
    found = cq.compare(tmp_path / "a.gguf", tmp_path / "a.gguf")
    assert found.left_out == {"w": "IQ2_S is not decoded yet"} and not found.is_equal
    with pytest.raises(TypeError, match="paths or dicts"):
        cq.compare(3, {})
    nan = np.full_like(w, np.nan)
    found = cq.compare({"a": w, "b": w}, {"a": w + 1, "b": nan})
    assert found.arrays[0].name == "b" and math.isnan(found.arrays[0].sqnr_db)


def test_compare_writes_a_page_that_stands_alone(ours, tmp_path):
    arrays = {k: v for k, v in cq.load(ours).items() if k != "bias"}
    arrays = {k: cq.quantize(v, "q8_0") if k != "up.weight" else v for k, v in arrays.items()}
    arrays["<script>alert(1)</script>"] = np.ones(2)
    cq.save(tmp_path / "b", arrays)
    out = tmp_path / "page.html"
    assert run("compare", ours, tmp_path / "b", "--html", out).exit_code == 0
    text = out.read_text()
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", text, re.DOTALL).group(0))
    dots = [part for part in svg.iter() if part.tag.endswith("circle")]
    assert len(dots) == 2  # the third pair is equal
    assert "layer.2.weight" in dots[0][0].text and "q8_0" in dots[0][0].text
    assert "<script" not in text and "&lt;script&gt;" in text
    assert not re.search(r'(src|href)="', text)
    line = run("compare", ours, tmp_path / "b", "--html", tmp_path / "page.png")
    assert line.exit_code == 2 and ".html" in line.output


# ---- inspect ------------------------------------------------------------------------------------

KINDS = {
    "gptq-4bit": ("gptq", "LlamaForCausalLM", "uint4"),
    "awq-gemm-gptqmodel": ("awq", "LlamaForCausalLM", "uint4+bfloat16"),
    "ct-w4a16": ("compressed-tensors", "LlamaForCausalLM", "int4"),
    "bitsandbytes-nf4": ("bitsandbytes", "LlamaForCausalLM", "nf4"),
    "hf-fp8-block128": ("fp8", "LlamaForCausalLM", "fp8_e4m3:128x128"),
    "mlx-mxfp4": ("mlx", "LlamaForCausalLM", "mxfp4"),
    "torchao-int8": ("torchao", "", "int8"),
    "mlx-affine": ("mlx", "LlamaForCausalLM", "uint4:64+min"),
    "hqq-layers": ("hqq", "", "uint4:64+min+float32"),
    "quanto-qint4": ("quanto", "LlamaForCausalLM", "uint4:row+min+bfloat16"),
    "comfyui-layers": ("comfyui", "", "int8:tensor"),
}


@pytest.mark.parametrize("name", KINDS)
def test_inspect_tells_the_kind_of_a_folder(name):
    kind, architecture, fmt = KINDS[name]
    told = json.loads(run("inspect", ROOT / name, "--json").stdout)
    assert told["kind"] == kind
    assert told["architecture"] in (architecture, "LlamaForCausalLM", "")
    assert told["formats"][fmt] > 0
    with cq.open(ROOT / name) as file:
        assert {a["name"] for a in told["arrays"]} == set(file)
        assert told["nbytes"] == sum(entry.nbytes for entry in file.values())
    lines = run("inspect", ROOT / name).stdout.splitlines()
    assert any(line.startswith(kind) and fmt in line for line in lines)


def test_inspect_warns_of_what_is_not_read(tmp_path):
    told = json.loads(run("inspect", ROOT / "ct-old-marlin24", "--json").stdout)
    assert any("marlin-24" in text for text in told["warnings"])
    assert any(a["error"] for a in told["arrays"])
    shown = run("inspect", ROOT / "ct-old-marlin24").output
    assert "cannot be read, see below" in shown and "warning: " in shown
    marlin = {"a.B": np.zeros((4, 32), np.int32), "a.s": np.ones((1, 16), np.float16)}
    cq.save(tmp_path / "m.safetensors", marlin)
    told = json.loads(run("inspect", tmp_path / "m.safetensors", "--json").stdout)
    assert told["kind"] == "Marlin" and "does not read" in told["warnings"][0]
    assert told["arrays"]


def test_inspect_shows_metadata_of_gguf(tmp_path):
    path = tmp_path / "a.gguf"
    told = {"general.architecture": "llama", "llama.block_count": np.uint32(2), "x.on": True,
            "tokenizer.ggml.tokens": ["a", "b"]}  # fmt: skip
    with GgufWriter(path, {"w": ("q4_k", (2, 256)), "i": ("IQ2_S", (2, 256))}, told) as writer:
        writer.write("w", np.zeros((2, 144), np.uint8))
        writer.write("i", np.zeros((2, 82), np.uint8))
    found = json.loads(run("inspect", path, "--json").stdout)
    assert (found["kind"], found["architecture"]) == ("gguf", "llama")
    assert found["formats"] == {"q4_k": 1, "IQ2_S": 1}
    assert found["metadata"] == {
        **told,
        "llama.block_count": 2,
        "tokenizer.ggml.tokens": "2 values",
    }
    assert "metadata llama.block_count: 2" in run("inspect", path).output


def sparse(path, container):
    """A file of 50 GB that takes no room, of 700 tensors."""
    count, rows = 700, 140_000
    if container == "gguf":
        specs = {f"blk.{i}.w": ("q8_0", (rows, 512)) for i in range(count)}
        size = GgufWriter(path, specs)._sizes[0]
        header = GgufWriter(path, specs)._headers[0]
    else:
        from cuquant.io.container.safetensors import SafetensorsWriter

        specs = {f"blk.{i}.weight": ("BF16", (rows, 256)) for i in range(count)}
        writer = SafetensorsWriter(path, specs)
        header = writer._header
        size = max(info.offset + info.nbytes for info in writer.tensors.values())
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(size)
    return size


@pytest.mark.parametrize("container", ["gguf", "safetensors"])
def test_a_file_of_50_gb_is_inspected_within_2_seconds(tmp_path, container):
    path = tmp_path / f"big.{container}"
    try:
        assert sparse(path, container) > 50e9
    except OSError:
        pytest.skip("this file system has no sparse files")
    started = time.perf_counter()
    result = run("inspect", path, "--json")
    seconds = time.perf_counter() - started
    assert result.exit_code == 0 and len(json.loads(result.stdout)["arrays"]) == 700
    assert seconds < 2
