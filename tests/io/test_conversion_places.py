"""Where a conversion is written, and configurations that cannot be: said before the work."""

import json
import os

import numpy as np
import pytest

import cuquant as cq
from cuquant.io.conversion import door
from cuquant.io.conversion.door import Conversion


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    cq.save(folder / "model.safetensors", {"a.weight": np.ones((64, 64), np.float32)})
    return folder


def refused(monkeypatch, error, *arguments):
    """A conversion that is refused before an array is made."""
    monkeypatch.setattr(door, "_write", lambda *_: pytest.fail("an array was written"))
    with pytest.raises(error) as caught:
        cq.convert(*arguments)
    return str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="links of POSIX")
@pytest.mark.parametrize("there", [False, True])
def test_a_link_to_a_folder_stays(model, tmp_path, there):
    if there:
        (tmp_path / "disk").mkdir()
    link = tmp_path / "out"
    link.symlink_to(tmp_path / "disk")
    cq.convert(model, link, "gptq", "int4")
    assert link.is_symlink() and cq.load(tmp_path / "disk").keys() == {"a.weight"}
    assert sorted(os.listdir(tmp_path)) == ["disk", "model", "out"]


def test_the_current_folder_is_not_replaced(model, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "in use" in refused(monkeypatch, ValueError, model, ".", "gptq", "int4")
    assert sorted(os.listdir(tmp_path)) == ["here", "model"]


def test_a_mounted_folder_is_not_replaced(model, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("out"))
    assert "in use" in refused(monkeypatch, ValueError, model, tmp_path / "out", "gptq", "int4")


def test_what_another_process_made_meanwhile_stays(model, tmp_path, monkeypatch):
    with Conversion(model, tmp_path / "out", "gptq", "int4") as work:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "its").write_text("x")
        monkeypatch.setattr(door, "_write", lambda *_: pytest.fail("an array was written"))
        with pytest.raises(FileExistsError):
            list(work.run())
    assert os.listdir(tmp_path / "out") == ["its"]
    assert sorted(os.listdir(tmp_path)) == ["model", "out"]


def test_the_folder_is_held_until_it_has_its_name(model, tmp_path, monkeypatch):
    """Without, another process takes it for one that nobody works on, and removes it."""
    rename, seen = os.rename, []

    def renamed(old, new):
        seen.extend(os.listdir(old))
        rename(old, new)

    monkeypatch.setattr(os, "rename", renamed)
    cq.convert(model, tmp_path / "out", "gptq", "int4")
    assert (".lock" in seen) == (os.name == "posix")
    assert ".lock" not in os.listdir(tmp_path / "out")


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices of POSIX")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_no_file_beside_the_tensors_is_damage(model, name):
    path = model / name
    os.mkfifo(path)
    for make in (None, path.mkdir, lambda: path.symlink_to("/dev/zero")):
        if make:
            path.rmdir() if path.is_dir() else path.unlink()
            make()
        with pytest.raises(cq.FormatError, match=name):
            cq.load(model)


def test_half_a_character_is_written_as_it_was(model, tmp_path):
    (model / "config.json").write_text('{"a": "\\ud800", "b": "\\u00e9"}')
    cq.convert(model, tmp_path / "out", "gptq", "int4")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["a"], said["b"]) == ("\ud800", "\u00e9")


@pytest.mark.parametrize("depth", [600, 900])
def test_a_deep_configuration_is_refused_before_the_work(model, tmp_path, monkeypatch, depth):
    (model / "config.json").write_text('{"a_config":' * depth + "1" + "}" * depth)
    why = refused(monkeypatch, cq.FormatError, model, tmp_path / "out", "gptq", "int4")
    assert "nested too deeply" in why or "is no JSON" in why  # json reads them deeper from 3.12 on
    assert os.listdir(tmp_path) == ["model"]
