"""The command line: what it writes, prints and refuses, and what it leaves behind."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import WEIGHTS, model_arrays, run, write

import cuquant as cq
from cuquant import diagnosis
from cuquant.cli import show, system
from cuquant.cli.show import in_bytes, printable
from cuquant.diagnosis import Check, Diagnosis
from cuquant.formats.table import format_table
from cuquant.gpu import cubins
from cuquant.io.container.safetensors import SafetensorsReader

ROOT = Path(cq.__file__).parent.parent
HOSTILE = "[red]x\n\x1b[2J\u202e"


def raw(path):
    with SafetensorsReader(path) as reader:
        return {name: (t.dtype, t.shape, reader.raw(name).tobytes())
                for name, t in reader.tensors.items()}  # fmt: skip


def same(a, b):
    """Whether two QuantArrays hold the same bytes and mean the same."""
    return (a.format, a.shape, a.dtype, a.axes) == (b.format, b.shape, b.dtype, b.axes) and all(
        np.array_equal(np.asarray(x).reshape(-1).view(np.uint8), y.reshape(-1).view(np.uint8))
        for x, y in zip(a.arrays().values(), b.arrays().values(), strict=True)
    )


OPTIONS = {
    "the default": ([], ("nf4", {})),
    "an int": (["-f", "int4", "--block-size", "64"], ("int4", {"block_size": 64})),
    "a row": (["-f", "int4", "--block-size", "row"], ("int4", {"block_size": "row"})),
    "a pair": (["-f", "fp8_e4m3", "--block-size", "8x128"], ("fp8_e4m3", {"block_size": (8, 128)})),
    "nested": (["--double-quant"], ("nf4", {"double_quant": True})),
    "levels": (["-f", "k3", "--levels", "normal"], ("k3", {"levels": "normal"})),
    "an alias": (["--format", "float8_e5m2"], ("fp8_e5m2", {})),
    "global scale": (["-f", "nvfp4", "--device", "cpu"], ("nvfp4", {})),
    "ggml": (["-f", "q4_k"], ("q4_k", {})),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_quantize_writes_what_quantize_makes(model, tmp_path, case):
    arguments, (name, options) = OPTIONS[case]
    out = tmp_path / "out.safetensors"
    result = run("quantize", model, "-o", out, *arguments)
    assert result.exit_code == 0, result.output
    arrays, found = model_arrays(), cq.load(out)
    for key in WEIGHTS:
        assert same(found[key], cq.quantize(arrays[key], name, **options)), key
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "out.safetensors"]


def test_kept_tensors_and_metadata_stay_as_they_are(model, tmp_path):
    out = tmp_path / "out.safetensors"
    assert run("quantize", model, "-o", out).exit_code == 0
    before, after = raw(model), raw(out)
    for name in before.keys() - WEIGHTS:
        assert after[name] == before[name], name
    with SafetensorsReader(out) as reader:
        assert reader.metadata["made by"] == "a test"


def test_the_table_tells_bits_error_and_reasons(model, tmp_path):
    out = tmp_path / "out.safetensors"
    lines = run("quantize", model, "-o", out, "-f", "int8").output.splitlines()
    row = {line.split()[0]: line for line in lines if line.strip()}
    w = model_arrays()["layer.0.weight"]
    q = cq.quantize(w, "int8")
    assert "64 x 256" in row["layer.0.weight"]
    assert f" {q.bits_per_element:.4g} " in row["layer.0.weight"]
    assert f" {cq.error(w, q).sqnr_db:.2f} " in row["layer.0.weight"]
    assert row["ids"].rstrip().endswith("int64 values")
    assert row["norm.bias"].rstrip().endswith("fewer than two axes")
    assert "3 tensors quantized to int8, 4 kept" in lines
    old, new = (sum(len(data) for *_, data in raw(path).values()) for path in (model, out))
    assert f"{in_bytes(old)} -> {in_bytes(new)}, {old / new:.2f} times smaller" in lines
    assert any(re.fullmatch(r"[\d.]+ m?s, \d+\.\d{3} GB/s of input", line) for line in lines)


@pytest.mark.parametrize(
    "arguments, wanted",
    [
        (["--include", "layer.*"], {"layer.0.weight", "layer.1.weight"}),
        (["--exclude", "*.0.*", "--exclude", "head*"], {"layer.1.weight"}),
        (["--include", "layer.*", "--exclude", "*1*"], {"layer.0.weight"}),
    ],
)
def test_globs_choose_tensors(model, tmp_path, arguments, wanted):
    out = tmp_path / "out.safetensors"
    result = run("quantize", model, "-o", out, *arguments)
    assert {name for name, q in cq.load(out).items() if isinstance(q, cq.QuantArray)} == wanted
    said = "1 tensor quantized" if len(wanted) == 1 else f"{len(wanted)} tensors quantized"
    assert said in result.output
    assert "warning" not in result.output


def test_nothing_to_quantize_is_said(model, tmp_path):
    result = run("quantize", model, "-o", tmp_path / "out.safetensors", "--exclude", "*")
    assert result.exit_code == 0
    assert "warning: nothing was quantized" in result.output
    assert raw(tmp_path / "out.safetensors") == raw(model)


def test_an_include_that_matches_nothing_is_an_error(model, tmp_path):
    out = tmp_path / "out.safetensors"
    for globs in (["typo*"], ["layer.*", "typo*"]):
        include = [part for glob in globs for part in ("--include", glob)]
        line = failed(run("quantize", model, "-o", out, *include))
        assert "no tensor is called 'typo*'" in line and "'layer.0.weight'" in line
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_file_may_replace_itself(model, tmp_path):
    arrays = model_arrays()
    assert run("quantize", model, "-o", model).exit_code == 0
    assert same(cq.load(model)["head.weight"], cq.quantize(arrays["head.weight"], "nf4"))
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="lists open files by /proc")
@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_the_source_is_closed_before_it_is_replaced(model, tmp_path, monkeypatch, link):
    """Windows replaces no file that is open or mapped."""
    target = model if link is None else tmp_path / "link"
    if link is not None:
        link(model, target)
    replace, seen = os.replace, []

    def checked(old, new):
        fds = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        opened = {os.readlink(fd) for fd in fds if os.path.exists(fd)}
        mapped = Path("/proc/self/maps").read_text().split()
        seen.append(str(model) in opened or str(model) in mapped)
        replace(old, new)

    monkeypatch.setattr(os, "replace", checked)
    assert run("quantize", model, "-o", target, "--device", "cpu").exit_code == 0
    assert seen == [False]
    assert isinstance(cq.load(target)["head.weight"], cq.QuantArray)


@pytest.mark.parametrize("left", [0.5, 0.1, 0])
def test_a_file_that_is_cut_short_amid_the_work(model, tmp_path, monkeypatch, left):
    """Another process truncates it: an error, not SIGBUS, and nothing is left."""
    from cuquant.io import streaming

    quantize, size = streaming.quantize, model.stat().st_size

    def cutting(*arguments, **options):
        os.truncate(model, int(size * left))
        return quantize(*arguments, **options)

    monkeypatch.setattr(streaming, "quantize", cutting)
    out = tmp_path / "out.safetensors"
    line = failed(run("quantize", model, "-o", out, "--device", "cpu"))
    assert "cut short while it was read" in line and str(model) in line
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_quantizing_twice_is_refused(model, tmp_path):
    out = tmp_path / "out.safetensors"
    run("quantize", model, "-o", out)
    before = out.read_bytes()
    result = run("quantize", out, "-o", out)
    assert result.exit_code == 1
    assert "quantized already" in result.output
    assert out.read_bytes() == before


def failed(result):
    """The one line of an error that the user can mend."""
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    (line,) = result.output.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file_leaves_the_old_target(model, tmp_path, size):
    data = model.read_bytes()
    model.write_bytes(data[:size])
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"old")
    assert str(model) in failed(run("quantize", model, "-o", out))
    assert out.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "out.safetensors"]


def test_nan_is_refused_by_name(tmp_path):
    arrays = {"good": np.ones((4, 64), np.float32), "bad": np.ones((4, 64), np.float32)}
    arrays["bad"][2, 3] = np.nan
    source, out = write(tmp_path / "in.safetensors", arrays), tmp_path / "out.safetensors"
    assert "'bad'" in failed(run("quantize", source, "-o", out))
    assert os.listdir(tmp_path) == ["in.safetensors"]
    assert run("quantize", source, "-o", out, "--nonfinite", "propagate").exit_code == 0
    assert np.isnan(cq.load(out)["bad"].dequantize()[2]).all()
    assert run("quantize", source, "-o", out, "--nonfinite", "clamp").exit_code == 0
    values = cq.load(out)["bad"].dequantize()
    assert (values[2, 3], values[2, 4]) == (0, 1)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["-f", "nf5"], "known are nf4, fp4"),
        (["--levels", "normal"], "k2..k8 do"),
        (["--block-size", "12"], "multiple of 8"),
        (["-f", "int4", "--double-quant"], "double_quant"),
        (["--device", "cuda"], "pip install '.[cuda12]'"),
    ],
)
def test_what_the_user_can_mend_is_one_line(model, tmp_path, monkeypatch, arguments, text):
    monkeypatch.setitem(sys.modules, "cupy", None)  # as where it is not installed
    out = tmp_path / "out.safetensors"
    assert text in failed(run("quantize", model, "-o", out, *arguments))
    assert not out.exists()


@pytest.mark.parametrize("path", ["none.safetensors", "none/out.safetensors"])
def test_missing_files_and_folders_are_named(model, tmp_path, path):
    where = tmp_path / path
    pair = (where, tmp_path / "out") if where.parent == tmp_path else (model, where)
    assert str(where if where.parent == tmp_path else where.parent) in failed(
        run("quantize", pair[0], "-o", pair[1])
    )


@pytest.mark.parametrize(
    "arguments",
    [[], ["-o", "x", "--device", "tpu"], ["-o", "x", "--device", "cuda:a"],
     ["-o", "x", "--nonfinite", "no"], ["-o", "x", "--block-size", "8x"],
     ["-o", "x", "--block-size", "-8"], ["-o", "x", "--typo"]],
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(model, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert run("quantize", model, *arguments).exit_code == 2
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_debug_shows_the_traceback(model, tmp_path, monkeypatch):
    model.write_bytes(b"short")
    out = tmp_path / "out.safetensors"
    assert isinstance(run("--debug", "quantize", model, "-o", out).exception, cq.FormatError)
    monkeypatch.setenv("CUQUANT_DEBUG", "1")
    assert isinstance(run("quantize", model, "-o", out).exception, cq.FormatError)
    monkeypatch.setenv("CUQUANT_DEBUG", "0")
    failed(run("quantize", model, "-o", out))


def test_defects_keep_their_traceback(model, monkeypatch):
    def fail():
        raise KeyError("a defect")

    monkeypatch.setattr(diagnosis, "doctor", fail)
    assert isinstance(run("doctor").exception, KeyError)


def test_inspect_lists_any_file(model, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("tensor data was read")

    monkeypatch.setattr(SafetensorsReader, "read", fail)
    monkeypatch.setattr(SafetensorsReader, "raw", fail)
    lines = run("inspect", model).output.splitlines()
    row = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert row["head.weight"] == ["head.weight", "8", "x", "256", "bfloat16", "16", "4,096"]
    assert row["tiny"] == ["tiny", "2", "x", "2", "float4_e2m1fn", "4", "2"]
    assert "metadata made by: a test" in lines
    with SafetensorsReader(model) as reader:
        stored = sum(info.nbytes for info in reader.tensors.values())
    elements = sum(array.size for array in model_arrays().values())
    bits = f"{stored * 8 / elements:.4g} bits/element"
    assert f"7 arrays, {elements:,} elements, {in_bytes(stored)}, {bits}" in lines


def test_inspect_puts_quantized_arrays_together(tmp_path):
    w = np.ones((4, 128), np.float16)
    q = cq.quantize(w, "nf4", block_size=32, double_quant=True)
    p = cq.prepack(cq.quantize(w, "int4"))
    cq.save(tmp_path / "q", {"w": q, "b": np.zeros(3, np.float32), "p": p})
    lines = run("inspect", tmp_path / "q").output.splitlines()
    row = {line.split()[0]: line for line in lines if line.strip()}
    fields = re.split(r"\s{2,}", row["w"].strip())
    assert fields == [
        "w", str(q.format), "4 x 128", "float16", f"{q.bits_per_element:.4g}", f"{q.nbytes}"
    ]  # fmt: skip
    assert re.split(r"\s{2,}", row["p"].strip())[1] == "int4, fragments/1"
    assert "w.packed" not in row and "b" in row
    assert any(line.startswith("metadata cuquant: ") for line in lines)


def test_inspect_refuses_a_file_that_lacks_a_component(tmp_path):
    path = tmp_path / "q"
    cq.save(path, {"w": cq.quantize(np.ones((4, 64), np.float32), "nf4")})
    with SafetensorsReader(path) as reader:
        metadata, packed = reader.metadata, reader.read("w.packed")
    write(path, {"w.packed": packed}, metadata)
    assert "'scale' is missing" in failed(run("inspect", path))


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(shape=[4096, 4096]),
        lambda entry: entry.update(shape=[4, 2**40]),
        lambda entry: entry.update(axes=[0]),
        lambda entry: entry.update(layout="tiles/7"),
        lambda entry: entry.update(layout="fragments/1"),
        lambda entry: entry.update(components={"packed": {}}),
        lambda entry: entry["options"].update(block_size=32),
        lambda entry: entry.update(format="int8", options={}),
    ],
)
def test_inspect_refuses_what_load_refuses(tmp_path, change):
    path = tmp_path / "q"
    cq.save(path, {"w": cq.quantize(np.ones((4, 64), np.float32), "nf4")})
    with SafetensorsReader(path) as reader:
        described = json.loads(reader.metadata["cuquant"])
        change(described["arrays"]["w"])
        parts = {name: reader.read(name) for name in reader.tensors}
    write(path, parts, {"cuquant": json.dumps(described)})
    with pytest.raises(cq.FormatError) as caught:
        cq.load(path)
    assert failed(run("inspect", path)) == f"error: {caught.value}"


def test_names_are_printed_and_not_obeyed(tmp_path):
    path = write(tmp_path / "in", {HOSTILE: np.ones((4, 64), np.float32)}, {HOSTILE: HOSTILE})
    literal = r"[red]x\n\x1b[2J\u202e"
    shown = run("inspect", path).output
    assert f" {literal} " in shown
    assert f"metadata {literal}: {literal}" in shown
    quantized = run("quantize", path, "-o", tmp_path / "[bold]out").output
    assert f" {literal} " in quantized
    assert quantized.rstrip().endswith("[bold]out")
    assert not {"\x1b", "\u202e"} & set(shown + quantized)


def test_errors_are_printed_and_not_obeyed(tmp_path):
    line = failed(run("inspect", tmp_path / "[red]\n\x1b"))
    assert line.endswith(r"[red]\n\x1b: No such file or directory")


def test_long_names_and_tables_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(show, "MAX_ROWS", 3)
    arrays = {f"{i}{'n' * 300}": np.ones((2, 64), np.float32) for i in range(5)}
    path = write(tmp_path / "in", arrays)
    for arguments in (["inspect", path], ["quantize", path, "-o", tmp_path / "out"]):
        output = run(*arguments).output
        names = [line.split()[0] for line in output.splitlines() if "nnn" in line]
        assert [(len(name), name[0]) for name in names] == [(200, "0"), (200, "1"), (200, "2")]
        assert "... and 2 more" in output
        assert "5 arrays" in output or "5 tensors" in output


@pytest.mark.parametrize(
    "text, shown",
    [("a b", "a b"), ("é中", "é中"), ("\t\x7f\x9b", r"\t\x7f\x9b"), ("x" * 201, "x" * 197 + "...")],
)
def test_printable(text, shown):
    assert printable(text) == shown


def test_formats_lists_each_with_its_numbers():
    row = {line.split()[0]: line for line in run("formats").output.splitlines() if line.strip()}
    assert row.keys() >= set(cq.list_formats())
    assert re.split(r"\s{2,}", row["nf4"].strip()) == [
        "nf4", "4.5", "64", "absmax, float32", "16 levels", "4 bits, high first"
    ]  # fmt: skip
    assert re.split(r"\s{2,}", row["uint4"].strip())[1:5] == [
        "4.1875", "128", "range, float16", "zero point"
    ]  # fmt: skip


def test_the_markdown_table_has_a_row_for_each_format():
    result = run("formats", "--markdown")
    assert result.output == format_table()
    head, rule, *rows = format_table().splitlines()
    assert {line.count("|") for line in (head, rule, *rows)} == {9}
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [cell[0] for cell in cells] == cq.list_formats()
    for name, _, bits, *_ in cells:
        assert float(bits) == pytest.approx(cq.get_format(name).bits_per_element, rel=1e-5)


@pytest.mark.parametrize("status, code", [("ok", 0), ("missing", 0), ("problem", 1)])
def test_doctor_exits_by_what_it_found(monkeypatch, status, code):
    found = Diagnosis((Check("cupy", status, "[red]x", "pip install '.[cuda12]'"),))
    monkeypatch.setattr(system.diagnosis, "doctor", lambda: found)
    result = run("doctor")
    assert result.exit_code == code
    assert result.output.rstrip("\n") == str(found)


def test_cache_shows_counts_and_clears(tmp_path, monkeypatch):
    monkeypatch.setenv("CUQUANT_CACHE_DIR", str(tmp_path))
    kernel = cubins.sealed("a", cubins.Compiled(b"\x7fELF".ljust(1452, b"\0")))
    tmp_path.joinpath("a.cubin").write_bytes(kernel)
    tmp_path.joinpath("mine.txt").write_bytes(bytes(99))
    assert run("cache").output == f"{tmp_path}\n"
    assert run("cache", "--size").output == "1 files, 1.5 kB\n"
    assert run("cache", "--clear").output == "removed 1 files, 1.5 kB\n"
    assert os.listdir(tmp_path) == ["mine.txt"]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners of POSIX")
def test_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUQUANT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert "another user" in failed(run("cache", "--clear"))
