"""Files that are replaced whole: permissions, and what killed processes leave."""

import ast
import errno
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import cuquant as cq
from cuquant import disk
from cuquant.disk import Replacement, is_temporary, open_regular, read_bounded, replace_file
from cuquant.io.streaming import quantize_file

posix = pytest.mark.skipif(os.name != "posix", reason="permissions and locks of POSIX")


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    old = os.umask(0o022)
    yield
    os.umask(old)


# ---- permissions ----------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o444, 0o660, 0o755, 0o666])
def test_a_replaced_file_keeps_its_permissions(umask, tmp_path, mode):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(mode)
    replace_file(path, b"new")
    assert (path.read_bytes(), mode_of(path)) == (b"new", mode)


@posix
def test_a_new_file_has_those_of_the_umask(umask, tmp_path):
    for mask in (0o022, 0o077, 0o002):
        os.umask(mask)
        replace_file(tmp_path / str(mask), b"")
        assert mode_of(tmp_path / str(mask)) == 0o666 & ~mask


@posix
def test_nobody_reads_a_private_file_while_it_is_written(umask, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with Replacement(path) as new:
        (temporary,) = (p for p in tmp_path.iterdir() if p != path)
        assert mode_of(temporary) == 0o600
        new.write(b"secret")


@posix
def test_the_right_of_another_group_is_not_passed_to_ones_own(umask, tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o640)

    def refused(*_):
        raise PermissionError(errno.EPERM, "not a member")

    true = Path.stat
    monkeypatch.setattr(os, "fchown", refused)
    monkeypatch.setattr(
        Path, "stat", lambda self, **o: os.stat_result(
            (*true(self, **o)[:5], true(self, **o).st_gid + 1, *true(self, **o)[6:10])
        ),
    )  # fmt: skip
    replace_file(path, b"new")
    monkeypatch.undo()
    assert mode_of(path) == 0o600


@posix
def test_all_that_writes_files_keeps_them(umask, tmp_path):
    """save, the command, bench's JSON and pictures."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    w = {"w": np.ones((2, 64), np.float32)}
    cq.save(tmp_path / "in", w)
    writers = {
        "save": lambda path: cq.save(path, w),
        "quantize_file": lambda path: list(
            quantize_file(tmp_path / "in", path, cq.get_format("nf4"), device="cpu")
        ),
        "picture.png": lambda path: disk.replace_picture(path, figure),
    }
    for name, write in writers.items():
        path = tmp_path / name
        path.write_bytes(b"old")
        path.chmod(0o600)
        write(path)
        assert mode_of(path) == 0o600 and path.read_bytes() != b"old", name
    assert len(list(tmp_path.iterdir())) == 1 + len(writers)


def test_a_picture_that_does_not_fit_leaves_the_old_one(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(disk, "write_all", full)
    with pytest.raises(OSError, match=r"No space left.*a\.png"):
        disk.replace_picture(path, figure)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.png"]


# ---- what killed processes leave ------------------------------------------------------------

CHILD = """
import sys, time
from contextlib import ExitStack
from cuquant.disk import Replacement
with ExitStack() as stack:
    for path in sys.argv[1:]:
        stack.enter_context(Replacement(path)).write(b"half")
    print("written", flush=True)
    time.sleep(60)
"""


def writing(*paths):
    """A process that has written half of each file."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, paths)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(disk.__file__).parents[1])},
    )  # fmt: skip
    assert child.stdout.readline() == "written\n"
    return child


@posix
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    paths = []
    for i, name in enumerate(["a", "n" * 255, "[a]*?", "层" * 60, "new\nline"]):
        (tmp_path / str(i)).mkdir()
        paths.append(tmp_path / str(i) / name)
    with writing(*paths) as live, writing(*paths) as killed:
        for path in paths:
            assert len(list(path.parent.iterdir())) == 2, path.name
        killed.kill()
        killed.wait()
        for path in paths:
            replace_file(path, b"new")
            left = len(list(path.parent.iterdir()))
            assert left == 2, f"{path.name}: the one that is being written stays"
        live.send_signal(signal.SIGKILL)
    for path in paths:
        replace_file(path, b"newer")
        assert [p.name for p in path.parent.iterdir()] == [path.name]


@posix
def test_only_files_of_that_name_and_kind_are_removed(tmp_path):
    mark = "0123456789abcdef"
    others = [
        ".b." + mark + ".tmp", ".a." + mark + ".tmpx", ".a." + mark[1:] + ".tmp",
        "a." + mark + ".tmp", ".a." + mark.upper() + ".tmp", ".a.tmp", ".a..tmp",
        ".a.g" + mark[1:] + ".tmp",
    ]  # fmt: skip
    for name in others:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / f".a.{'1' * 16}.tmp").mkdir()
    (tmp_path / f".a.{'2' * 16}.tmp").symlink_to(tmp_path / ".a.tmp")
    os.mkfifo(tmp_path / f".a.{'3' * 16}.tmp")
    before = set(os.listdir(tmp_path))
    (tmp_path / f".a.{mark}.tmp").write_bytes(b"left")
    replace_file(tmp_path / "a", b"new")
    assert set(os.listdir(tmp_path)) == before | {"a"}
    assert is_temporary(f".a.{mark}.tmp") and not any(map(is_temporary, others[1:]))


@posix
def test_files_of_another_user_stay(tmp_path, monkeypatch):
    left = tmp_path / f".a.{'0' * 16}.tmp"
    left.write_bytes(b"")
    monkeypatch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
    replace_file(tmp_path / "a", b"new")
    assert left.exists()


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "a"
    texts = [bytes([65 + i]) * 10_000 for i in range(8)]
    errors = []

    def write(text):
        try:
            for _ in range(60):
                replace_file(path, text, durable=False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert path.read_bytes() in texts and os.listdir(tmp_path) == ["a"]


@posix
def test_without_locks_nothing_is_taken_for_left_behind(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk.fcntl, "flock", refused)
    left = tmp_path / f".a.{'0' * 16}.tmp"
    left.write_bytes(b"")
    replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new" and left.exists()


def test_without_fcntl(tmp_path, monkeypatch):
    """As on Windows, where a file that is open cannot be removed."""
    monkeypatch.setattr(disk, "fcntl", None)
    (tmp_path / f".a.{'0' * 16}.tmp").write_bytes(b"")
    replace_file(tmp_path / "a", b"new")
    with pytest.raises(RuntimeError), Replacement(tmp_path / "a") as new:
        new.write(b"half")
        raise RuntimeError
    assert (tmp_path / "a").read_bytes() == b"new" and os.listdir(tmp_path) == ["a"]


# What writes in place all the same: a file for a disassembler in a temporary folder, the script
# that a developer runs for formats/tables.py, and an empty file that a lock is on.
IN_PLACE = {"elf.py", "fit_levels.py", "folder.py"}
SOURCES = sorted(Path(disk.__file__).parent.rglob("*.py"))


def writes_in_place(path):
    """Calls in a module that write a file under its name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
        texts += [k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)]
        modes = [t for t in texts if isinstance(t, str) and re.fullmatch(r"[rwxab+t]+", t)]
        if name in ("write_text", "write_bytes", "mkstemp", "NamedTemporaryFile"):
            yield name
        if name == "open" and any(set("wxa+") & set(mode) for mode in modes):
            yield name
        if name == "savefig" and ast.unparse(node.args[0]) != "buffer":
            yield name


def test_every_file_is_replaced_whole():
    found = {path.name for path in SOURCES if list(writes_in_place(path))}
    assert found == IN_PLACE


# ---- reading --------------------------------------------------------------------------------


def test_reading_is_bounded(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_bounded(path, 4)
    with path.open("wb") as file:
        file.truncate(20 << 30)  # sparse
    with pytest.raises(OSError, match="larger than 1000 bytes"):
        read_bounded(path, 1000)


@posix
def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(__file__)
    for path in (tmp_path / "fifo", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(OSError, match="is not a regular file"):
            open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    open_regular(tmp_path / "link").close()
    with pytest.raises(OSError) as caught:
        open_regular(tmp_path / "link", follow=False)
    assert caught.value.errno == errno.ELOOP
