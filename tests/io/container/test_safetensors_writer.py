"""The writer of safetensors files: what it refuses, and what survives an accident."""

import contextlib
import errno
import os
import re
import signal
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors_files import write_file

import cuquant.io.container.safetensors.writer as module
from cuquant import disk
from cuquant.io.container import once
from cuquant.io.container.safetensors import SafetensorsReader, SafetensorsWriter, numpy_dtype


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


# What the writer refuses


@pytest.mark.parametrize(
    ("specs", "metadata", "kind", "reason"),
    [
        ({"": ("F32", ())}, None, ValueError, "cannot be named"),
        ({"__metadata__": ("F32", ())}, None, ValueError, "cannot be named"),
        ({1: ("F32", ())}, None, ValueError, "a string is wanted"),
        ({"\ud800": ("F32", ())}, None, ValueError, "not valid Unicode"),
        ({"a": ("f4", ())}, None, ValueError, "unknown dtype"),
        ({"a": (">f4", ())}, None, ValueError, "unknown dtype"),
        ({"a": (np.dtype(">f4"), ())}, None, TypeError, "big-endian"),
        ({"a": (object, ())}, None, TypeError, "no dtype for object"),
        ({"a": ("F32", (-1,))}, None, ValueError, "non-negative"),
        ({"a": ("F32", (1.5,))}, None, TypeError, "float"),
        ({"a": ("F32", (1,) * 65)}, None, ValueError, "at most 64"),
        ({"a": ("F32", (2**61,))}, None, ValueError, "overflows"),
        ({"a": ("F4", (3,))}, None, ValueError, "12 bits"),
        ({"a": ("F6_E2M3", (2,))}, None, ValueError, "12 bits"),
        ({}, {"a": 1}, ValueError, "a string is wanted"),
        ({}, ["a"], ValueError, "map of strings"),
    ],
    ids=[
        "empty_name",
        "metadata",
        "number_as_name",
        "surrogate",
        "numpy_string",
        "big_endian_string",
        "big_endian",
        "object",
        "negative",
        "float_size",
        "rank_65",
        "overflow",
        "odd_f4",
        "ragged_f6",
        "metadata_number",
        "metadata_list",
    ],
)
def test_specs_are_checked_before_any_file_is_made(path, specs, metadata, kind, reason):
    with pytest.raises(kind, match=reason):
        SafetensorsWriter(path, specs, metadata)
    assert list(path.parent.iterdir()) == []


def view_bytes(byte, tag):
    return np.full(4, byte, np.uint8).view(numpy_dtype(tag))


@pytest.mark.parametrize(
    ("write", "kind", "reason"),
    [
        (lambda w: w.write("a", np.zeros(4)), ValueError, "came as float64"),
        (lambda w: w.write("a", np.zeros((2, 2), "f4")), ValueError, r"came as float32 \(2, 2\)"),
        (lambda w: w.write("a", np.zeros(4, ">f4")), TypeError, "big-endian"),
        (lambda w: w.write("b", np.zeros(4, "f4")), ValueError, "specs has no tensor 'b'"),
        (lambda w: w.write_raw("a", b"123"), ValueError, "came as 3 bytes"),
        (lambda w: w.write("c", view_bytes(16, "F4")), ValueError, "holds the byte 16"),
        (lambda w: w.write("d", view_bytes(2, "BOOL")), ValueError, "holds the byte 2"),
    ],
    ids=["dtype", "shape", "big_endian", "unknown_name", "raw_size", "code", "bool"],
)
def test_bad_write_is_refused_and_leaves_nothing(path, write, kind, reason):
    specs = {"a": ("F32", (4,)), "c": ("F4", (4,)), "d": ("BOOL", (4,))}
    with pytest.raises(kind, match=reason), SafetensorsWriter(path, specs) as writer:
        write(writer)
    assert list(path.parent.iterdir()) == []


def test_refused_write_can_be_corrected(path):
    with SafetensorsWriter(path, {"a": ("F32", (4,))}) as writer:
        with pytest.raises(ValueError, match="came as"):
            writer.write("a", np.zeros(5, np.float32))
        writer.write("a", np.ones(4, np.float32))
    with SafetensorsReader(path) as reader:
        assert reader.read("a").tolist() == [1] * 4


def test_header_too_long_for_readers(path, monkeypatch):
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(ValueError, match="split the tensors"):
        SafetensorsWriter(path, {"n" * 2000: ("F32", ())})


def test_writer_outside_its_with_block(path):
    writer = SafetensorsWriter(path, {"a": ("U8", (1,))})
    with pytest.raises(ValueError, match="not open"):
        writer.write("a", np.zeros(1, np.uint8))
    with writer:
        writer.write("a", np.zeros(1, np.uint8))
        with pytest.raises(ValueError, match="open already"):
            writer.__enter__()
    with pytest.raises(ValueError, match="not open"):
        writer.write_raw("a", b"1")
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_target_in_a_missing_directory(tmp_path):
    writer = SafetensorsWriter(tmp_path / "no" / "model", {})
    with pytest.raises(FileNotFoundError, match="create it first"):
        writer.__enter__()


def test_target_is_a_directory(tmp_path):
    writer = SafetensorsWriter(tmp_path, {})
    with pytest.raises(IsADirectoryError, match="is a directory"):
        writer.__enter__()


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_permissions_follow_the_umask(path):
    old = os.umask(0o027)
    try:
        write_file(path, {})
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_long_file_names(tmp_path):
    for name in ("n" * 255, "层" * 85):
        write_file(tmp_path / name, {"a": np.zeros(2)})
    assert len(list(tmp_path.iterdir())) == 2


def test_writing_is_bounded_in_memory(path):
    array = np.broadcast_to(np.arange(1024, dtype=np.float32), (8192, 1024))  # 32 MiB in the file
    tracemalloc.start()
    try:
        write_file(path, {"strided": array})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 32 * 2**20
    assert peak < 12 * 2**20  # two chunks of 2**20 float32


# Accidents


@pytest.fixture
def target(path):
    """An older file under the name that the writer is about to replace."""
    path.write_bytes(b"an older file")
    return path


def assert_untouched(target):
    assert target.read_bytes() == b"an older file"
    assert [file.name for file in target.parent.iterdir()] == [target.name]


SPECS = {"a": ("F32", (4,)), "b": ("F32", (4,))}
ONES = np.ones(4, np.float32)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
def test_exception_midway(target, kind):
    with pytest.raises(kind), SafetensorsWriter(target, SPECS) as writer:
        writer.write("a", ONES)
        assert len(list(target.parent.iterdir())) == 2  # the temporary file is in place
        raise kind
    assert_untouched(target)


def test_missing_tensor(target):
    with (
        pytest.raises(ValueError, match=r"1 of 2 tensors were not written.*'b'"),
        SafetensorsWriter(target, SPECS) as writer,
    ):
        writer.write("a", ONES)
    assert_untouched(target)


@pytest.mark.parametrize("raw", [False, True])
def test_double_write(target, raw):
    with (
        pytest.raises(ValueError, match="'a' is written already"),
        SafetensorsWriter(target, SPECS) as writer,
    ):
        writer.write("a", ONES)
        if raw:
            writer.write_raw("a", ONES.tobytes())
        else:
            writer.write("a", ONES)
    assert_untouched(target)


class FullDisk:
    """A file that takes a few bytes, then has no space left."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.file.write(data[: self.room])
        self.room -= taken
        return taken


@pytest.mark.parametrize("room", [0, 10, 20])
def test_full_disk(target, room):
    with (
        pytest.raises(OSError, match="No space left") as caught,
        SafetensorsWriter(target, SPECS) as writer,
    ):
        writer._new.file = FullDisk(writer._new.file, room)
        writer.write("a", ONES)
        writer.write("b", ONES)
    assert caught.value.errno == errno.ENOSPC
    assert_untouched(target)


def test_swallowed_full_disk_does_not_pass_for_success(target):
    with (
        pytest.raises(ValueError, match="1 of 2 tensors were not written"),
        SafetensorsWriter(target, SPECS) as writer,
    ):
        writer.write("b", ONES)
        writer._new.file = FullDisk(writer._new.file, 3)
        with contextlib.suppress(OSError):
            writer.write("a", ONES)
    assert_untouched(target)


def test_partial_writes_are_completed(path):
    class Slow(FullDisk):
        def write(self, data):
            return self.file.write(data[:5])

    with SafetensorsWriter(path, SPECS) as writer:
        writer._new.file = Slow(writer._new.file, None)
        writer.write("a", ONES)
        writer.write_raw("b", 2 * ONES)
    with SafetensorsReader(path) as reader:
        assert reader.read("a").tolist() == [1] * 4
        assert reader.read("b").tolist() == [2] * 4


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("fault", [interrupt, None], ids=["interrupt", "io_error"])
def test_failure_while_finishing(target, monkeypatch, step, fault):
    def io_error(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk.os, step, fault or io_error)
    with (
        pytest.raises(KeyboardInterrupt if fault else OSError),
        SafetensorsWriter(target, SPECS) as writer,
    ):
        writer.write("a", ONES)
        writer.write("b", ONES)
    monkeypatch.undo()
    assert_untouched(target)


def test_a_special_file_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"), SafetensorsWriter(pipe, {}):
        pass
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    with SafetensorsWriter(link, {"w": ("U8", (1,))}) as writer:
        writer.write("w", np.ones(1, np.uint8))
    assert link.is_symlink()
    with SafetensorsReader(target) as reader:
        assert reader.read("w").tolist() == [1]


def test_a_full_disk_names_the_file(path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=re.escape(str(path))):  # noqa: SIM117
        with SafetensorsWriter(path, {"w": ("U8", (1,))}) as writer:
            monkeypatch.setattr(once, "write_all", full)
            writer.write("w", np.ones(1, np.uint8))


def test_file_of_the_temporary_name_is_not_touched(path, monkeypatch):
    monkeypatch.setattr(disk.secrets, "token_hex", lambda count: "0" * 16)
    with SafetensorsWriter(path, {}):
        (other,) = path.parent.iterdir()
        before = other.read_bytes()
        with pytest.raises(FileExistsError):
            SafetensorsWriter(path, SPECS).__enter__()
        assert other.read_bytes() == before


def test_failure_while_writing_the_header(target, monkeypatch):
    monkeypatch.setattr(disk, "write_all", interrupt)
    with pytest.raises(KeyboardInterrupt):
        SafetensorsWriter(target, SPECS).__enter__()
    assert_untouched(target)


def test_file_and_directory_are_synced_in_order(path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append("fsync directory" if is_directory else "fsync file")
        fsync(descriptor)

    def record_replace(source, destination):
        steps.append("replace")
        replace(source, destination)

    monkeypatch.setattr(disk.os, "fsync", record_fsync)
    monkeypatch.setattr(disk.os, "replace", record_replace)
    write_file(path, {"a": ONES})
    assert steps[:2] == ["fsync file", "replace"]
    assert steps[2:] == ([] if os.name == "nt" else ["fsync directory"])


CHILD = """
import resource, sys, time
import numpy as np
from cuquant.io.container.safetensors import SafetensorsWriter
path, fate = sys.argv[1:]
if fate == "limit":  # a real write error: EFBIG once the file passes 64 KiB
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
with SafetensorsWriter(path, {"a": ("F32", (50_000,)), "b": ("F32", (4,))}) as writer:
    writer.write("a", np.ones(50_000, np.float32))
    print("written", flush=True)
    time.sleep(60)
"""


def start_child(target, fate):
    root = Path(module.__file__).parents[4]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(target), fate],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_killed_process_leaves_the_target(target):
    with start_child(target, "kill") as child:
        assert child.stdout.readline() == "written\n"
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert target.read_bytes() == b"an older file"
    (left,) = (file for file in target.parent.iterdir() if file != target)
    assert left.name.startswith(f".{target.name}.")
    assert left.name.endswith(".tmp")
    write_file(target, {"a": ONES})
    assert list(target.parent.iterdir()) == [target], "the next writer removes what was left"


@pytest.mark.skipif(os.name == "nt", reason="POSIX resource limits")
def test_real_write_error_leaves_the_target(target):
    with start_child(target, "limit") as child:
        out, err = child.communicate(timeout=300)
    assert child.returncode == 1
    assert out == ""
    assert "File too large" in err
    assert_untouched(target)
