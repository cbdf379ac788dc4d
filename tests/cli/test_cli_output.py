"""The command line on narrow terminals, as JSON, and what it says of names it does not know."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from rich.cells import cell_len
from rich.console import Console

import cuquant as cq
from cuquant import diagnosis
from cuquant.bench import gpu as gpu_module
from cuquant.cli import files, progress, show
from cuquant.cli.show import natural_key, table
from cuquant.diagnosis import Check, Diagnosis

NAMES = [
    f"model.layers.{i}.{part}.weight"
    for i in (0, 1, 2, 10, 11)
    for part in ("mlp.down_proj", "self_attn.q_proj")
]
ROOT_FOLDER = Path(cq.__file__).parent.parent
FILTER = "vision.patch_embed.proj.weight"


@pytest.fixture
def model(tmp_path):
    """Names in a file's usual order, layer 10 before layer 2."""
    rng = np.random.default_rng(1)
    arrays = {n: rng.standard_normal((32, 256), dtype=np.float32) for n in sorted(NAMES)}
    arrays[FILTER] = np.ones((64, 12, 1, 1), np.float32)
    cq.save(tmp_path / "in.safetensors", arrays)
    return tmp_path / "in.safetensors"


def quantized(model, *arguments):
    out = model.with_name("out.safetensors")
    return run("quantize", model, "-o", out, "--device", "cpu", *arguments), out


# ---- width --------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 60])
def test_names_are_whole_and_lines_are_not_longer_than_the_terminal(model, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    result, out = quantized(model)
    for shown in (result.output, run("inspect", out).output):
        words = [line.split() for line in shown.splitlines()]
        for name in [*NAMES, FILTER]:
            assert [name in line for line in words].count(True) == 1, name
        rows = shown[: shown.index("left out")]
        assert all(len(line) <= columns for line in rows.splitlines())
    kept = " ".join(result.output.split())
    assert "kept: short rows of 1 would take 40 bits a weight" in kept
    assert f"left out at {columns} columns: time" in result.output


@pytest.mark.parametrize("columns", [80, 60])
def test_the_formats_are_whole_on_a_narrow_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("formats").output.splitlines()
    assert all(len(line) <= columns for line in lines[:-1])
    first = [line.split()[0] for line in lines]
    assert first[2:-1] == cq.list_formats()
    assert lines[-1].split(": ")[1].split(", ")[:2] == ["aliases", "packing"]


def test_a_pipe_has_all_columns(model):
    result, _ = quantized(model)
    row = next(line for line in result.output.splitlines() if NAMES[0] in line)
    assert "32 x 256" in row and "s" in row.split()[-1]
    assert "left out" not in result.output


def drawn(made, width):
    screen = Console(file=io.StringIO(), width=width)
    made.print(screen)
    return screen.file.getvalue().splitlines()


def test_columns_leave_in_their_order_before_a_name_is_cut():
    made = table(("name", "a", "b"), right=("a",), drop=("b", "a"))
    made.add("x" * 30, "1234567", "text")
    assert drawn(made, 46)[2] == f" {'x' * 30}  1234567  text"
    assert drawn(made, 45)[2] == f" {'x' * 30}  1234567"
    assert drawn(made, 39)[2] == f" {'x' * 30}"
    assert drawn(made, 30)[2] == f" {'x' * 14}…{'x' * 14}"
    assert drawn(made, 10)[2] == f" {'x' * 30}"  # nothing would be left of it
    assert drawn(made, 30)[-1].endswith("left out at 30 columns: b, a, the middles of long names")


ROOT = "model.language_model.decoder.text_backbone"


@pytest.mark.parametrize(
    "names",
    [
        [f"{ROOT}.layers.{i}.mlp.experts.{part}_proj.weight" for i in (0, 2, 10, 11, 110)
         for part in ("gate_up", "down")],
        [f"{ROOT}.layers.{i}.self_attention.inner.{part}.weight_quantizer._zero_point"
         for i in range(12) for part in ("q", "k", "v", "o")],
        [f"{'x' * 90}{i}{'y' * 90}" for i in range(30)],
        [f"{ROOT}.{'é中' * i}.layers.{i}.weight.{'中' * 40}" for i in range(9)],
        [f"{i}{'n' * 300}{i % 3}" for i in range(30)],
        [f"{'n' * 300}{i}{'n' * 300}" for i in range(30)],
        ["a" * n for n in range(60, 90)],
        [f"{ROOT}.{i:05}.{'ab'[i % 2] * 80}.{i:05}.{'c' * 80}.weight" for i in range(30)],
    ],
    ids=range(8),
)  # fmt: skip
@pytest.mark.parametrize("columns", [40, 60, 80, 10_000])
def test_names_that_differ_look_different(names, columns):
    made = table(("name", "number"), drop=("number",))
    for name in names:
        made.add(name, "1")
    lines = [line.split("  ")[0].strip() for line in drawn(made, columns)[2 : 2 + len(names)]]
    assert len(set(lines)) == len(names)
    assert all(cell_len(line) < min(columns, 202) for line in lines)
    assert all(
        line[0] == name[0] and line[-1] == name[-1] for line, name in zip(lines, names, strict=True)
    )


def test_a_name_keeps_its_numbers_and_where_it_differs():
    """Parts that all names have become short first."""
    made = table(("tensor",))
    for layer in (2, 10):
        for part in ("gate_up", "down"):
            made.add(f"{ROOT}.layers.{layer}.mlp.experts.{part}_proj.weight")
    assert drawn(made, 53)[2:6] == [
        " m…l.la…l.de…r.te…e.la…s.2.mlp.ex…s.gate_up_proj.we…t",
        " mo…l.la…l.de…r.te…e.la…s.2.mlp.ex…ts.down_proj.we…ht",
        " m…l.l…l.de…r.te…e.la…s.10.mlp.ex…s.gate_up_proj.we…t",
        " mo…l.la…l.de…r.te…e.la…s.10.mlp.ex…s.down_proj.we…ht",
    ]


@pytest.mark.parametrize("columns", [45, 60, 80])
def test_numbers_of_real_names_are_never_cut_nor_invented(columns):
    blocks = [
        f"model.diffusion_model.{side}_blocks.{block}.1.transformer_blocks.{layer}.attn{a}.to_{o}.weight"
        for side in ("input", "output") for block in (4, 5, 8) for layer in (0, 1, 9)
        for a in (1, 2) for o in ("q", "k", "out.0")
    ]  # fmt: skip
    experts = [
        f"language_model.model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in (0, 1, 10, 31) for expert in (0, 7, 12, 127) for part in ("gate", "down")
    ]  # fmt: skip
    for names in (blocks, experts):
        made = table(("name",))
        for name in names:
            made.add(name)
        lines = [line.strip() for line in drawn(made, columns)[2 : 2 + len(names)]]
        assert len(set(lines)) == len(names)
        for line, name in zip(lines, names, strict=True):
            numbers = [part for part in name.split(".") if part.isdecimal()]
            assert "#" in line or [part for part in line.split(".") if part.isdecimal()] == numbers


def test_names_without_a_place_to_differ_are_numbered():
    made = table(("name",))
    for i in range(3):
        made.add(f"{'n' * 60}{i}{'n' * 60}")
    assert [line.split("…")[1] for line in drawn(made, 40)[2:5]] == ["#1", "#2", "#3"]


def test_a_sentence_stands_beside_the_name_or_below():
    made = table(("name", "number"))
    made.add("x" * 30, "1")
    made.add("y" * 10, sentence="kept: because of this and of that")
    assert drawn(made, 80)[3] == f" {'y' * 10}{' ' * 22}kept: because of this and of that"
    made = table(("name", "number"))
    made.add("y" * 30, sentence="kept: because of this and of that")
    assert drawn(made, 60)[2:4] == [
        f" {'y' * 30}  kept: because of this and", f" {' ' * 32}of that"
    ]  # fmt: skip
    assert drawn(made, 45)[2:4] == [f" {'y' * 30}", "     kept: because of this and of that"]


# ---- order --------------------------------------------------------------------------------------


def test_layer_2_comes_before_layer_10(model):
    result, out = quantized(model)
    for shown in (result.output, run("inspect", out).output):
        order = [line.split()[0] for line in shown.splitlines() if line.startswith(" model.")]
        assert order == NAMES


@pytest.mark.parametrize(
    "names",
    [["a.2", "a.10", "b.1"], ["1", "10", "a"], ["x9" * 300, "x10" * 300], ["", "7", "8", "٣"]],
)
def test_any_names_have_an_order(names):
    assert sorted(sorted(names, reverse=True), key=natural_key) == names
    assert natural_key("9" * 10_000) > natural_key("8" * 10_000)


def test_a_quantized_array_stands_among_the_others(tmp_path):
    w = np.ones((4, 64), np.float32)
    arrays = {"b": cq.quantize(w, "nf4"), "a": w, "c": w}
    cq.save(tmp_path / "in", arrays)
    shown = run("inspect", tmp_path / "in").output
    assert [line.split()[0] for line in shown.splitlines()[2:5]] == ["a", "b", "c"]


# ---- progress -----------------------------------------------------------------------------------


def test_progress_names_the_tensor_and_the_time_left(model, monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(progress, "console", lambda stderr=False: screen)
    result, _ = quantized(model)
    assert result.exit_code == 0, result.output
    shown = screen.file.getvalue()
    assert "layers.0.mlp.down_proj.weight" in shown
    assert "--:--" in shown or "00:0" in shown


# ---- JSON ---------------------------------------------------------------------------------------


def document(result, code=0):
    """The one JSON document of a command's stdout; RFC 8259 knows no NaN."""

    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    assert result.exit_code == code, result.output
    return json.loads(result.stdout, parse_constant=refuse)


def test_quantize_as_json(model):
    result, out = quantized(model, "-f", "nf4:32+dq", "--json")
    found = document(result)
    loaded = cq.load(out)
    assert [t["name"] for t in found["tensors"]] == [*NAMES, FILTER]
    for tensor in found["tensors"][:-1]:
        q = loaded[tensor["name"]]
        assert tensor["bytes_out"] == q.nbytes and tensor["shape"] == list(q.shape)
        assert tensor["bits_per_weight"] == q.bits_per_element and tensor["reason"] is None
        assert 15 < tensor["sqnr_db"] < 25
    assert "short rows" in found["tensors"][-1]["reason"]
    assert (found["format"], found["device"]) == ("nf4:32+dq", "cpu")
    assert (found["quantized"], found["kept"]) == (len(NAMES), 1)
    assert found["bytes_out"] == sum(t["bytes_out"] for t in found["tensors"])
    assert (found["source"], found["output"]) == (str(model), str(out))


def test_json_has_null_for_what_is_no_number(tmp_path):
    cq.save(tmp_path / "in", {"w": np.ones((2, 64), np.float32)})
    found = document(run("quantize", tmp_path / "in", "-o", tmp_path / "out", "--json"))
    assert (
        cq.error(np.ones((2, 64), np.float32), cq.load(tmp_path / "out")["w"]).sqnr_db == math.inf
    )
    assert found["tensors"][0]["sqnr_db"] is None


def test_inspect_as_json(model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(show, "MAX_ROWS", 2)
    _, out = quantized(model)
    found = document(run("inspect", out, "--json"))
    assert [a["name"] for a in found["arrays"]] == [*NAMES, FILTER]
    first, last = found["arrays"][0], found["arrays"][-1]
    assert (first["format"], first["shape"], first["dtype"]) == ("nf4", [32, 256], "float32")
    assert (last["format"], last["nbytes"], last["bits_per_element"]) == (None, 64 * 12 * 4, 32)
    assert found["nbytes"] == sum(a["nbytes"] for a in found["arrays"])
    assert json.loads(found["metadata"]["cuquant"])["version"] == 1


def test_formats_as_json():
    found = document(run("formats", "--json"))
    assert [entry["name"] for entry in found] == cq.list_formats()
    for entry in found:
        fmt = cq.get_format(entry["name"])
        assert (
            entry["bits_per_element"] == fmt.bits_per_element and entry["block"] == fmt.block_size
        )


@pytest.mark.parametrize("status, code", [("ok", 0), ("problem", 1)])
def test_doctor_as_json(monkeypatch, status, code):
    check = Check("cupy", status, "found this", "type that")
    monkeypatch.setattr(diagnosis, "doctor", lambda: Diagnosis((check,)))
    assert document(run("doctor", "--json"), code) == {
        "ok": status == "ok",
        "backend": "cpu",
        "checks": [
            {"name": "cupy", "status": status, "found": "found this", "advice": "type that"}
        ],
    }


def test_an_error_beside_json_leaves_stdout_empty(tmp_path):
    result = run("inspect", tmp_path / "none", "--json")
    assert result.exit_code == 1 and result.stdout == ""


# ---- formats NAME -------------------------------------------------------------------------------


def test_one_format_in_detail():
    shown = run("formats", "nf4:32+dq").output
    assert "nf4:32+dq" in shown and "4.25" in shown and "packed, uint8 [4096, 2048]" in shown
    assert "nested_scale, float32 [2048]" in shown and "-0.6962" in shown
    found = document(run("formats", "float8_e4m3fn", "--json"))
    assert found["name"] == "fp8_e4m3" and found["aliases"] == ["float8_e4m3fn"]
    assert [part["name"] for part in found["components"]] == ["packed", "scale"]
    assert found["levels"] is None


@pytest.mark.parametrize("name", cq.list_formats())
def test_every_format_has_details(name):
    result = run("formats", name)
    assert result.exit_code == 0 and f"name     {name}\n" in result.output
    for part in cq.get_format(name).components((4096, 4096)):
        assert f"{part.name}, {part.dtype} {list(part.shape)}" in result.output


def test_the_markdown_table_is_of_all_formats():
    assert run("formats", "nf4", "--markdown").exit_code == 2
    assert run("formats", "--json", "--markdown").exit_code == 2


# ---- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, code, text",
    [
        (["quantise", "x"], 2, "did you mean 'quantize'"),
        (["bench", "matmull"], 2, "did you mean 'matmul'"),
        (["inspekt", "x"], 2, "did you mean 'inspect'"),
        (["quantize", "x", "-o", "y", "-f", "nf5"], 1, "did you mean 'nf4'"),
        (["formats", "mxfp5"], 1, "did you mean 'mxfp"),
        (["bench", "quantize", "-f", "int9"], 1, "did you mean 'int"),
        (["bench", "quantize", "--dtypes", "float61"], 1, "did you mean 'float16'"),
        (["bench", "matmul", "--peers", "cublass"], 1, "did you mean 'cublas'"),
        (["bench", "gemm", "--peers", "scaled_m"], 1, "did you mean 'scaled_mm'"),
        (["quantize", "x", "-o", "y", "--fromat", "nf4"], 2, "--format"),
        (["bench", "matmul", "--shap", "8x8"], 2, "--shape"),
    ],
)
def test_unknown_names_are_near_to_known_ones(monkeypatch, tmp_path, arguments, code, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_module, "CupyGpu", None)
    result = run(*arguments)
    assert result.exit_code == code
    assert text in " ".join(result.output.replace("│", " ").split()), result.output


def test_precompile_says_what_an_unknown_name_is_near_to():
    for given, near in (
        ({"dtypes": "float61"}, "float16"),
        ({"operations": "quantise"}, "quantize"),
    ):
        with pytest.raises(ValueError, match=f"did you mean '{near}'"):
            cq.precompile("nf4", arch="sm_90", **given)


@pytest.mark.parametrize("command", [["bench", "quantize"], ["bench", "matmul"]])
@pytest.mark.parametrize("option", ["--shape", "--shapes"])
def test_shapes_are_spelled_alike(monkeypatch, command, option):
    monkeypatch.setattr(gpu_module, "CupyGpu", None)
    result = run(*command, option, "8x8,nonsense")
    assert result.exit_code == 2 and "nonsense" in result.output
    assert isinstance(run(*command, option, "8x64,16x64", option, "8x8").exception, TypeError)


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "quantize"],
        ["bench", "matmul"],
        ["bench", "gemm"],
        ["bench", "formats"],
        ["bench", "model"],
        ["demo"],
    ],
)
@pytest.mark.parametrize("option", ["-f", "--format", "--formats"])
def test_formats_are_spelled_alike(monkeypatch, command, option):
    from cuquant.demo import run as demo

    monkeypatch.setattr(gpu_module, "CupyGpu", None)
    monkeypatch.setattr(demo, "missing", lambda plot: None)
    monkeypatch.setattr(demo, "find_model", lambda: object())
    result = run(*command, option, "nf4:32+dq,int8:tensor", option, "nf4+typo")
    assert result.exit_code == 1 and "unknown option 'typo'" in result.output


@pytest.mark.parametrize(
    "command",
    [
        "quantize",
        "demo",
        "bench quantize",
        "bench matmul",
        "bench gemm",
        "bench formats",
        "bench model",
    ],
)
def test_an_output_is_spelled_alike(command):
    shown = run(*command.split(), "--help").output
    assert "--output" in shown and "-o" in shown
    assert "--format" in shown and "-f" in shown


def test_a_format_and_options_beside_it(model):
    for arguments in (["-f", "nf4:32+dq"], ["-f", "nf4", "--block-size", 32, "--double-quant"]):
        result, out = quantized(model, *arguments)
        assert result.exit_code == 0, result.output
        q = cq.load(out)[NAMES[0]]
        assert q.format == cq.get_format("nf4", block_size=32, double_quant=True)
    result, _ = quantized(model, "-f", "nf4:32", "--block-size", 64)
    assert result.exit_code == 1 and "contradict" in result.output


@pytest.mark.parametrize(
    "name", ["x.gguf", "x.npz", "x.PT", "-", "x.onnx", "x.bin", "model.safetensors.index.json"]
)
def test_other_kinds_of_files_are_refused_before_work(model, monkeypatch, tmp_path, name):
    monkeypatch.setattr(files, "quantize_file", None)
    monkeypatch.chdir(tmp_path)
    result = run("quantize", model, "-o", name)
    (line,) = result.output.splitlines()
    assert result.exit_code == 1 and line.startswith("error: ") and "safetensors" in line
    assert os.listdir(tmp_path) == ["in.safetensors"]


@pytest.mark.parametrize("name", ["dir", "dir/", ".", "", "new/"])
def test_an_output_that_is_a_folder_is_refused_with_a_name_to_type(model, monkeypatch, name):
    monkeypatch.chdir(model.parent)
    (model.parent / "dir").mkdir()
    before = model.read_bytes()
    result = run("quantize", "in.safetensors", "-o", name)
    (line,) = result.output.splitlines()
    assert result.exit_code == 1
    wanted = os.path.join(name.rstrip("/") or ".", "in-quantized.safetensors")
    assert line.startswith("error: ") and line.endswith(f"such as {os.path.normpath(wanted)}")
    assert sorted(os.listdir()) == ["dir", "in.safetensors"] and not os.listdir("dir")
    assert model.read_bytes() == before


def test_an_output_that_is_a_file_with_a_slash_is_refused(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    before = model.read_bytes()
    result = run("quantize", "in.safetensors", "-o", "in.safetensors/")
    assert result.exit_code == 1 and "is a file; leave out the '/'" in result.output
    assert os.listdir() == ["in.safetensors"] and model.read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="links and devices of POSIX")
def test_an_output_that_is_a_pipe_is_refused(model):
    os.mkfifo(model.parent / "pipe")
    names = ["/dev/stdout", "/dev/fd/1", "/dev/stderr", "/dev/null", "pipe"]
    code = """
import sys
from cuquant.cli import main
for name in sys.argv[1:]:
    try:
        main(["quantize", "in.safetensors", "-o", name])
    except SystemExit as end:
        assert end.code == 1, name
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT_FOLDER)}
    done = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=model.parent, env=env, capture_output=True,
        text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for name, line in zip(names, done.stderr.splitlines(), strict=True):
        assert line.startswith("error: ") and "pass a file" in line, name
    assert sorted(os.listdir(model.parent)) == ["in.safetensors", "pipe"]


@pytest.mark.parametrize("name", ["none/out.safetensors", "none/deeper/out", "to_none"])
def test_an_output_in_a_missing_folder_names_the_folder(model, monkeypatch, name):
    monkeypatch.chdir(model.parent)
    os.symlink("none/out", "to_none")
    result = run("quantize", "in.safetensors", "-o", name)
    (line,) = result.output.splitlines()
    assert result.exit_code == 1 and "no such directory; create it first" in line
    assert "none" in line and sorted(os.listdir()) == ["in.safetensors", "to_none"]


@pytest.mark.parametrize("kind", ["itself", "symlink", "hard link"])
def test_an_output_that_is_the_input(model, monkeypatch, kind):
    monkeypatch.chdir(model.parent)
    out = model.with_name("in.safetensors" if kind == "itself" else "link")
    if kind == "symlink":
        out.symlink_to("in.safetensors")
    elif kind == "hard link":
        os.link(model, out)
    assert run("quantize", "in.safetensors", "-o", out, "--device", "cpu").exit_code == 0
    assert isinstance(cq.load(out)[NAMES[0]], cq.QuantArray)
    assert out.is_symlink() is (kind == "symlink")
    # The other name of a file keeps what it was.
    kept = cq.load(model)[NAMES[0]]
    assert isinstance(kept, np.ndarray) is (kind == "hard link")
    assert set(os.listdir()) == {"in.safetensors", out.name}


def test_help_says_what_may_be_repeated():
    for command, options in {
        "quantize": ["--format", "--include", "--exclude"],
        "convert": ["--format"],
        "bench quantize": ["--format", "--dtypes", "--shape"],
        "bench matmul": ["--format", "--dtypes", "--shape", "--batch", "--peers"],
        "bench gemm": ["--format", "--shape", "--peers"],
        "bench formats": ["--format", "--rows"],
        "bench model": ["--format", "--peers"],
        "demo": ["--format"],
    }.items():
        shown = run(*command.split(), "--help").output
        assert shown.count("repeatable") == len(options), command


def test_help_breaks_lines_where_the_terminal_ends():
    shown = run("quantize", "--help").output
    assert "nf4 unless --format says" in " ".join(shown.split())
    prose = shown[shown.index("Matrices of") : shown.index("Arguments")].splitlines()[:-2]
    assert len(prose) == 3, prose  # and not as the docstring breaks them


def test_an_unknown_choice_is_told_without_a_class_of_errors():
    for option in (("--to", "ggfu"), ("--nonfinite", "ignore")):
        result = run("quantize", "a.safetensors", "-o", "b", *option)
        assert result.exit_code == 2 and option[1] in result.stderr
        assert "Value error" not in result.stderr


def test_the_version_has_a_short_option():
    assert run("-V").output == run("--version").output == f"cuquant {cq.__version__}\n"


def test_a_shell_completes_commands_and_formats():
    cases = {
        "cuquant qu": "quantize",
        "cuquant quantize x -f mxfp4": "mxfp4",
        "cuquant formats nf": "nf4",
        "cuquant demo -f nf4,bof": "nf4,bof4s",
    }
    code = """
import os, sys
from cuquant.cli import app
for words in sys.argv[1:]:
    os.environ.update(COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    try:
        app(prog_name="cuquant")
    except SystemExit:
        print("end")
"""
    environment = {**os.environ, "_CUQUANT_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", code, *cases], env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    shown = [f"{wanted}\nend" for wanted in cases.values()]
    assert done.stdout.split() == "\n".join(shown).split(), done.stderr
