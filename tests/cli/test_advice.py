"""Advice in errors: what a command says to type, it takes."""

import ast
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import cuquant as cq
from cuquant.cli import app
from cuquant.cli.advice import PARAMETERS, for_shell, options_of

PACKAGE = Path(cq.__file__).parent
GROUP = typer.main.get_command(app)
COMMANDS = {"quantize": GROUP.commands["quantize"], "inspect": GROUP.commands["inspect"]}


def check(text, command):
    """All options that a text names are the command's, and no parameter of the library is left."""
    options = options_of(COMMANDS[command])
    text = re.sub(r"\bpip \w+[^;&]*", "", text)  # pip's own
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= options, text
    for clause in text.split("; ")[1:]:
        assert not [n for n in re.findall(r"\b([a-z_]+)=", clause) if n in PARAMETERS], text


def raised():
    """The texts of all errors that the modules behind the commands raise; {} for what varies."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in ("bench", "demo", "torch", "functional", "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = node.exc.args[0]
                if isinstance(text, ast.JoinedStr):
                    yield "".join(
                        part.value if isinstance(part, ast.Constant) else "{}"
                        for part in text.values
                    )
                elif isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text.value


def test_texts_are_found():
    texts = set(raised())
    assert len(texts) > 150
    assert sum("; " in text for text in texts) > 60
    assert any("nonfinite=" in text for text in texts)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_error_can_be_followed(command):
    options = options_of(COMMANDS[command])
    for text in set(raised()):
        made = for_shell(text, options)
        check(made, command)
        assert made.startswith(for_shell(text.split("; ")[0], options))


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("a; pass another format or get_format(..., scale_dtype='float32')",
         "a; pass another format"),
        ("a; pad it, as ggml does, or pass another axis=", "a; pad it, as ggml does"),
        ("a, and nonfinite='raise'; rescale x, or pass nonfinite='propagate' to saturate",
         "a, and --nonfinite raise; rescale x, or pass --nonfinite propagate to saturate"),
        ("a; pass block_size='row'; b", "a; pass --block-size row; b"),
        ("/data/axis=1/x; y=2.safetensors: is truncated; fetch it again",
         "/data/axis=1/x; y=2.safetensors: is truncated; fetch it again"),
        ("a; pass nothing", "a; pass nothing"),
    ],
)  # fmt: skip
def test_for_shell(text, wanted):
    assert for_shell(text, options_of(COMMANDS["quantize"])) == wanted


W = np.ones((4, 256), np.float32)


@pytest.mark.parametrize(
    "arrays, arguments",
    [
        ({"w": np.where(np.eye(4, 256) > 0, np.nan, W)}, []),
        ({"w": W * np.float32(1e30)}, ["-f", "int4"]),
        ({"w": W * np.float32(1e30)}, ["-f", "k4"]),
        ({"w": W * np.float32(1e30)}, ["-f", "fp16"]),
        ({"w": W.astype(ml_dtypes.bfloat16) * 1e30}, ["-f", "q4_0"]),
        ({"w": W}, ["-f", "int4", "--double-quant"]),
        ({"w": W}, ["--block-size", "12"]),
        ({"w": W}, ["--levels", "normal"]),
        ({"w": W, "w.packed": np.zeros(3)}, []),
    ],
)  # fmt: skip
def test_errors_of_quantize_name_its_own_options(tmp_path, arrays, arguments):
    cq.save(tmp_path / "in", arrays)
    command = ["quantize", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--device", "cpu"]
    result = CliRunner().invoke(app, command + arguments)
    (line,) = result.output.splitlines()
    assert result.exit_code == 1 and line.startswith("error: ")
    check(line, "quantize")


def test_a_header_over_the_limit(tmp_path):
    path = tmp_path / "in"
    path.write_bytes((100_000_001).to_bytes(8, "little") + b"{" + b" " * 100_000_000)
    with pytest.raises(cq.FormatError, match="pass max_header_bytes= if you trust"):
        cq.load(path)
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert "the limit is 100000000" in result.output and "max_header_bytes" not in result.output
