"""The command as a process: pipes, terminals, signals."""

import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from command_line import write
from samples import sampled

import cuquant as cq

ROOT = Path(cq.__file__).parent.parent


def start(code, *arguments, **options):
    """A Python process that runs `code`; its signals are those of an ordinary one."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def test_python_m_cuquant_is_the_command(model):
    done = subprocess.run(
        [sys.executable, "-m", "cuquant", "--version"], capture_output=True, text=True,
        cwd=ROOT, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"cuquant {cq.__version__}\n")


def test_importing_cuquant_leaves_the_command_line_out():
    code = "import cuquant, sys; print([m for m in sys.argv[1:] if m in sys.modules])"
    process = start(code, "typer", "rich", "cupy", "torch", "cuquant.cli")
    out, err = process.communicate(timeout=600)
    assert (out, err) == ("[]\n", "")


def test_an_error_is_one_line_on_stderr(model):
    model.write_bytes(model.read_bytes()[:-1])
    process = start("from cuquant.cli import main; main()", "inspect", model)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (1, "")
    assert err.startswith(f"error: {model}: is truncated") and err.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
@pytest.mark.parametrize(
    ("command", "buffered", "lines"),
    sampled(
        product(
            ["formats", "formats --markdown", "inspect in", "cache", "-V", "--help",
             "quantize in -o out --device cpu"],
            [True, False],
            [0, 1],
        ),
        lambda command, *_: command.startswith("quantize"),  # the one that writes a file
        lambda _, *how: how,
    ),
)  # fmt: skip
def test_a_pipe_that_closes_early(command, buffered, lines, tmp_path, monkeypatch):
    """`cuquant inspect FILE | head -1`: no traceback, and a file is written all the same."""
    write(tmp_path / "in", {f"{i}.weight": np.ones((2, 64), np.float32) for i in range(100)})
    monkeypatch.setenv("PYTHONUNBUFFERED", "" if buffered else "1")
    process = start(
        "from cuquant.cli import main; main()", *command.split(), cwd=tmp_path,
    )  # fmt: skip
    with process:
        for _ in range(lines):
            process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode in ((0, 1) if lines else (1,))
    assert (tmp_path / "out").exists() is command.startswith("quantize")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_an_error(monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from cuquant.cli import main; main()", "cache"], stdout=full,
            stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_a_terminal_that_knows_ascii_only(tmp_path, monkeypatch):
    path = write(tmp_path / "in", {"é中": np.ones((2, 64), np.float32)})
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    process = start("from cuquant.cli import main; main()", "inspect", path)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, "")
    assert r"\xe9\u4e2d" in out


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[3]))  # nohup's do, and so may these tests
from cuquant.io import streaming
from cuquant.cli import main
quantize = streaming.quantize
def slow(*arguments, **options):
    time.sleep(0.2)
    return quantize(*arguments, **options)
streaming.quantize = slow
main(["quantize", sys.argv[1], "-o", sys.argv[2], "--device", "cpu"])
"""


def signalled(tmp_path, name, hang_up="SIG_DFL", tensors=100):
    """Quantizes tensors, is sent a signal amid them: the process at its end, and its errors."""
    arrays = {str(i): np.ones((8, 64), np.float32) for i in range(tensors)}
    source, out = write(tmp_path / "in", arrays), tmp_path / "out"
    out.write_bytes(b"old")
    process = start(SLOW, source, out, hang_up)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(".out.*.tmp")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(tmp_path.glob(".out.*.tmp")), process.poll()
    time.sleep(0.3)  # into the tensors
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=600)
    assert "Traceback" not in err
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    return process, err


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_removes_the_half_written_file(tmp_path, name, code):
    process, err = signalled(tmp_path, name)
    assert process.returncode == code, err
    assert (tmp_path / "out").read_bytes() == b"old"


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_nohup_is_respected(tmp_path):
    process, err = signalled(tmp_path, "SIGHUP", hang_up="SIG_IGN", tensors=10)
    assert process.returncode == 0, err
    assert len(cq.load(tmp_path / "out")) == 10
