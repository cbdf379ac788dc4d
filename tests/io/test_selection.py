"""Formats by globs of names: in Selection, quantize_file and convert."""

import json

import ml_dtypes
import numpy as np
import pytest
from command_line import run

import cuquant as cq
from cuquant.io.selection import Selection
from cuquant.io.streaming import quantize_file

RNG = np.random.default_rng(9)
NAMES = ("l.0.up.weight", "l.0.down.weight", "l.1.up.weight", "l.1.down.weight", "lm_head.weight")
PLAN = {"*.down": "int8", "lm_head": None, "l.1.*": "int4:32", "*": "nf4"}
BECOMES = ("nf4", "int8", "int4:32", "int8", None)


@pytest.fixture
def model(tmp_path):
    arrays = {name: RNG.standard_normal((64, 128)).astype(ml_dtypes.bfloat16) for name in NAMES}
    folder = tmp_path / "model"
    folder.mkdir()
    cq.save(folder / "model.safetensors", {**arrays, "norm.weight": np.ones(64, np.float32)})
    return folder


def formats_in(path):
    with cq.open(path) as file:
        return tuple(file[name].format and str(file[name].format) for name in NAMES)


def test_an_exact_name_or_the_first_glob_that_fits_decides():
    chosen = Selection.of(PLAN)
    found = [chosen.format_of(name) for name in NAMES]
    assert tuple(fmt and str(fmt) for fmt in found) == BECOMES
    named = Selection.of({"*": "nf4", "l.0.up": "int8", "l.0.down.weight": None})
    found = [named.format_of(name) for name in NAMES[:3]]
    assert [fmt and str(fmt) for fmt in found] == ["int8", None, "nf4"]
    shape, dtype = (64, 128), np.dtype(np.float32)
    only = Selection.of("nf4", include=["*.up"], exclude=["l.0.*"])
    why = [only.decide((name,), dtype, shape)[1] for name in NAMES]
    assert why == ["excluded", "not included", None, "not included", "not included"]
    assert str(Selection.of("nf4:32")) == "nf4:32"
    assert str(chosen) == "*.down=int8, lm_head=kept, l.1.*=int4:32, *=nf4"
    with pytest.raises(ValueError, match="unknown format"):
        Selection.of({"*": "nf5"})
    with pytest.raises(ValueError, match="empty dict"):
        Selection.of({})
    with pytest.raises(TypeError, match="key 3"):
        Selection.of({3: "nf4"})  # type: ignore[dict-item]


def test_a_file_gets_formats_by_name(model, tmp_path):
    source = model / "model.safetensors"
    list(quantize_file(source, tmp_path / "out.safetensors", PLAN, device="cpu"))
    assert formats_in(tmp_path / "out.safetensors") == BECOMES
    before, after = cq.load(source), cq.load(tmp_path / "out.safetensors")
    for name, text in zip(NAMES, BECOMES, strict=True):
        if text:
            assert cq.array_equal(after[name], cq.quantize(before[name], text))
        else:
            assert np.array_equal(after[name], before[name])
    with pytest.raises(ValueError, match=r"no tensor is called '\*.typo'"):
        list(quantize_file(source, tmp_path / "no", {"*.typo": "nf4", "*": "nf4"}))


def test_convert_takes_formats_by_name_of_either_side(model, tmp_path):
    cq.convert(model, tmp_path / "out", "cuquant", PLAN, device="cpu")
    assert formats_in(tmp_path / "out") == BECOMES
    # A glob of its own quantizes what loaders of a kind expect as it is.
    plans = {None: {"*": "int4:32"}, "uint8:32": {"lm_head": "int8:32+float16", "*": "int4:32"}}
    for lm_head, plan in plans.items():
        steps = cq.convert(model, tmp_path / f"gptq{lm_head}", "gptq", plan, True)
        assert formats_in(tmp_path / f"gptq{lm_head}") == (*["uint4:32"] * 4, lm_head)
        assert sum(step.rounds for step in steps) == 4 + bool(lm_head)
    # What is quantized stays so, but for those that a glob fits where rounding is accepted.
    plan = {"*.up": "q8_0"}
    cq.convert(tmp_path / "out", tmp_path / "again", "cuquant", plan, requantize=True)
    assert formats_in(tmp_path / "again") == ("q8_0", "int8", "q8_0", "int8", None)
    with pytest.raises(ValueError, match=r"no tensor is called 'typo'"):
        cq.convert(model, tmp_path / "no", "cuquant", {"typo": "nf4"})
    assert not (tmp_path / "no").exists()


def test_the_command_quantizes_folders_into_any_kind(model, tmp_path):
    said = [part for glob, fmt in PLAN.items() for part in ("-f", f"{glob}={fmt or 'keep'}")]
    arguments = ("quantize", model, *said, "--device", "cpu")
    dry = json.loads(run(*arguments, "-o", tmp_path / "a", "--dry-run", "--json").stdout)
    assert not (tmp_path / "a").exists() and dry["is_dry_run"]
    done = json.loads(run(*arguments, "-o", tmp_path / "a", "--json").stdout)
    assert formats_in(tmp_path / "a") == BECOMES and done["to"] == "cuquant"
    assert (dry["bytes_out"], dry["arrays"]) == (done["bytes_out"], done["arrays"])
    result = run("quantize", model, "-f", "q8_0", "-o", tmp_path / "a.gguf", "--to", "gguf")
    assert result.exit_code == 0, result.output
    assert formats_in(tmp_path / "a.gguf") == ("q8_0",) * 5
    result = run(
        "quantize", model, "-f", "nf4", "--exclude", "*.up", "-o", tmp_path / "b", "--to",
        "bitsandbytes",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert formats_in(tmp_path / "b") == (None, "nf4", None, "nf4", None)


def test_a_dry_run_of_one_file_has_its_sizes(model, tmp_path):
    source, out = model / "model.safetensors", tmp_path / "o.safetensors"
    arguments = ("quantize", source, "-f", "*.up=int4:32", "-o", out, "--device", "cpu", "--json")
    dry = json.loads(run(*arguments, "--dry-run").stdout)
    assert not out.exists()
    done = json.loads(run(*arguments).stdout)
    same = ("format", "quantized", "kept", "bytes_in", "bytes_out")
    assert all(dry[key] == done[key] for key in same) and done["quantized"] == 2
    assert [t["reason"] for t in dry["tensors"]] == [t["reason"] for t in done["tensors"]]
    shown = run(*arguments[:-1], "--dry-run").stdout
    assert "nothing was written" in shown and "2 tensors quantized to *.up=int4:32" in shown


def test_two_formats_for_one_glob_are_refused(model, tmp_path):
    for said in (("nf4", "int4"), ("*.up=nf4", "*.up=int4")):
        pairs = [part for text in said for part in ("-f", text)]
        result = run("quantize", model, *pairs, "-o", tmp_path / "out")
        assert result.exit_code == 2 and "GLOB=FORMAT" in result.output


def test_nonfinite_values_are_refused_by_name(model, tmp_path):
    arrays = cq.load(model)
    arrays["l.0.up.weight"] = np.full((64, 128), np.nan, np.float32)
    cq.save(model / "model.safetensors", arrays)
    result = run("quantize", model, "-o", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 1 and "holds nan" in result.stderr, result.stderr
    assert "l.0.up.weight" in result.stderr
    assert not (tmp_path / "out").exists()
    result = run("quantize", model, "-o", tmp_path / "out", "--nonfinite", "clamp")
    assert result.exit_code == 0, result.output


def test_globs_that_fit_nothing_are_refused_wherever_they_stand(model, tmp_path):
    source = model / "model.safetensors"
    for where, words in (
        ({"include": ["typo"]}, "include"),
        ({"exclude": ["typo"]}, "exclude"),
        ({"format": {"typo": "nf4", "*": "int8"}}, "format"),
    ):
        chosen = Selection.of(where.pop("format", "nf4"), **where)
        with pytest.raises(ValueError, match=f"no tensor is called 'typo', which {words} names"):
            list(quantize_file(source, tmp_path / "no", chosen))
    for arguments in ((source, "-o", tmp_path / "no.safetensors"), (model, "-o", tmp_path / "no")):
        result = run("quantize", *arguments, "--exclude", "lm_hed")
        assert result.exit_code == 1 and "'lm_hed', which exclude names" in result.stderr
    assert not list(tmp_path.glob("no*"))
