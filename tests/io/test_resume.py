"""A conversion that was stopped: what is left, and how the next one goes on."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import cuquant as cq
from cuquant.io.conversion import door
from cuquant.io.conversion.door import Conversion

RNG = np.random.default_rng(3)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder of six matrices, of which two lie in a shard of the target."""
    monkeypatch.setattr(door, "SHARD_BYTES", 20_000)
    folder = tmp_path / "model"
    folder.mkdir()
    arrays = {f"l.{i}.weight": RNG.standard_normal((64, 256)).astype("f4") for i in range(6)}
    cq.save(folder / "model.safetensors", arrays)
    return folder


def stopped_after(count, source, target, **options):
    """A conversion that is closed behind `count` arrays."""
    with Conversion(source, target, "cuquant", "int4", **options) as work:
        steps = work.run()
        for _ in range(count):
            next(steps)
        steps.close()


def hidden(folder):
    return [path for path in folder.iterdir() if path.name.startswith(".out.")]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_finished_shards_are_taken_up_again(model, tmp_path, monkeypatch):
    cq.convert(model, tmp_path / "whole", "cuquant", "int4")
    target = tmp_path / "out"
    stopped_after(5, model, target)
    (left,) = hidden(tmp_path)
    assert sorted(os.listdir(left)) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2)]
    assert not target.exists()
    made = []
    write = door._write
    monkeypatch.setattr(
        door, "_write", lambda writer, step: (made.append(step), write(writer, step))
    )
    steps = cq.convert(model, target, "cuquant", "int4", resume=True)
    assert [step.name for step in made] == ["l.4.weight", "l.5.weight"] and len(steps) == 6
    assert contents(target) == contents(tmp_path / "whole")
    assert not hidden(tmp_path)


def test_without_resume_everything_is_made_anew(model, tmp_path):
    target = tmp_path / "out"
    stopped_after(3, model, target)
    (left,) = hidden(tmp_path)
    (left / "model-00001-of-00003.safetensors").write_bytes(b"of someone")
    cq.convert(model, target, "cuquant", "int4")
    assert len(cq.load(target)) == 6 and not hidden(tmp_path)


def test_what_a_format_of_the_same_words_left_is_not_taken(model, tmp_path):
    """Both are "4 bits, groups of 128" in GPTQ, whose tensors have the same shapes."""
    target = tmp_path / "out"
    with Conversion(model, target, "gptq", "int4") as work:
        steps = work.run()
        for _ in range(4):
            next(steps)
        steps.close()
    assert hidden(tmp_path)
    cq.convert(model, target, "gptq", "uint4", resume=True)
    cq.convert(model, tmp_path / "whole", "gptq", "uint4")
    assert contents(target) == contents(tmp_path / "whole")


def test_what_another_source_or_format_left_is_not_taken(model, tmp_path):
    target = tmp_path / "out"
    stopped_after(4, model, target)
    (left,) = hidden(tmp_path)
    cq.convert(model, target, "cuquant", "int8", resume=True)
    assert {str(q.format) for q in cq.load(target).values()} == {"int8"}
    assert not left.exists()  # nobody will go on with it
    other = tmp_path / "out2"
    stopped_after(4, model, other)
    arrays = {f"l.{i}.weight": np.full((64, 256), i, np.float32) for i in range(6)}
    cq.save(model / "model.safetensors", arrays)
    cq.convert(model, other, "cuquant", "int4", resume=True)
    for name, q in cq.load(other).items():
        assert cq.array_equal(q, cq.quantize(arrays[name], "int4"))


def test_a_half_written_shard_is_no_finished_one(model, tmp_path):
    target = tmp_path / "out"
    cq.convert(model, tmp_path / "whole", "cuquant", "int4")
    stopped_after(5, model, target)
    (left,) = hidden(tmp_path)
    shard = left / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    cq.convert(model, target, "cuquant", "int4", resume=True)
    assert contents(target) == contents(tmp_path / "whole")


def test_nothing_is_left_of_what_finished_nothing(model, tmp_path):
    stopped_after(1, model, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["model"]


KILLED = """
import sys, time
from cuquant.io.conversion import door
door.SHARD_BYTES = 20_000
with door.Conversion(sys.argv[1], sys.argv[2], "cuquant", "int4") as work:
    for number, _ in enumerate(work.run()):
        if number == 3:
            print("ready", flush=True)
            time.sleep(600)
"""


@pytest.mark.skipif(os.name != "posix", reason="locks and signals of POSIX")
def test_a_killed_process_leaves_shards_and_a_running_one_is_not_disturbed(model, tmp_path):
    target = tmp_path / "out"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, model, target], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        for resume in (True, False):
            with pytest.raises(OSError, match="another process is writing it"):
                cq.convert(model, target, "cuquant", "int4", resume=resume)
    finally:
        child.kill()
        child.communicate()
    (left,) = hidden(tmp_path)
    before = time.time()
    shard = Path(left, "model-00001-of-00003.safetensors")
    assert shard.stat().st_mtime <= before
    made = shard.stat().st_ino
    cq.convert(model, target, "cuquant", "int4", resume=True)
    assert (target / shard.name).stat().st_ino == made
    assert not hidden(tmp_path) and len(cq.load(target)) == 6


def test_one_file_is_written_from_its_start_and_says_so(model, tmp_path):
    with pytest.warns(UserWarning, match="only folders are resumed"):
        cq.convert(model, tmp_path / "o.safetensors", "cuquant", "int4", resume=True)
    assert len(cq.load(tmp_path / "o.safetensors")) == 6
