"""Files that are no safetensors files: what they are is said, and what to type."""

import gzip
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from itertools import product

import numpy as np
import pytest
from samples import sampled

import cuquant as cq
from cuquant.io.container.safetensors import SafetensorsReader

# The one line of an advice ends without closing files.
UNCLOSED = pytest.mark.filterwarnings("ignore::ResourceWarning")
ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3)}


def refused(path):
    """What `load` says of a file."""
    with pytest.raises(cq.FormatError) as caught:
        cq.load(path)
    where, _, message = str(caught.value).partition(": ")
    assert where == str(path)
    return message


def test_an_index_names_its_shards(tmp_path):
    names = [f"model-{i:05}-of-00007.safetensors" for i in range(1, 8)]
    path = tmp_path / "model.safetensors.index.json"
    for indent in (None, 2):
        path.write_text(json.dumps(
            {"metadata": {"total_size": 1}, "weight_map": {n[6:11]: n for n in names}},
            indent=indent,
        ))  # fmt: skip
        message = refused(path)
        assert "7 of 7 shards are missing: " + ", ".join(names[:5]) in message
        with pytest.raises(cq.FormatError, match="index of a sharded checkpoint") as caught:
            SafetensorsReader(path)  # as commands do that take one file
        assert ", ".join(names[:5]) + " and 2 more" in str(caught.value)
        assert "give its folder" in str(caught.value)
    for text in ("{}", '{"weight_map": [1]}', "[", '{"weight_map": {"a": 1}}'):
        path.write_text(text)
        assert "index" in refused(path) and "shards" in refused(path)
    path.write_text('{"weight_map": {"a": "../a.safetensors"}}')
    assert "no name of a file" in refused(path)


def test_a_folder_of_gguf_files_names_them(tmp_path):
    assert refused(tmp_path) == "is a folder without .safetensors files"
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF\3\0\0\0" + bytes(16))
    assert refused(tmp_path).endswith("; give a GGUF file in it: a.gguf, b.gguf")


def test_mlx_without_its_config_says_what_is_missing(tmp_path):
    folder = tmp_path / "mlx"
    cq.save(tmp_path / "w.safetensors", {"up.weight": np.ones((32, 64), np.float32)})
    cq.convert(tmp_path / "w.safetensors", folder, "mlx", "int4:64")
    assert isinstance(cq.load(folder)["up.weight"], cq.QuantArray)
    (folder / "config.json").unlink()
    with pytest.raises(cq.FormatError, match="'quantization', and there is none"):
        cq.load(folder)["up.weight"]


def test_a_gguf_file_is_read_where_weights_are_loaded(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(16))
    assert cq.load(path) == {}
    with pytest.raises(cq.FormatError, match="is a GGUF file"):
        SafetensorsReader(path)


def run_advice(message, folder, trusted=False, monkeypatch=None):
    """Do what a message says to type, anywhere; returns what `load` finds then.

    With `monkeypatch` in this process, which has imported torch: another one takes 3 s to.
    """
    command = re.search(r"convert it: (python .*)", message).group(1)
    if trusted:
        assert "weights_only=False if you trust" in message
        command = command.replace("weights_only=True", "weights_only=False")
    words = shlex.split(command)
    assert words[:2] == ["python", "-c"]
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    if monkeypatch is None:
        subprocess.run([sys.executable, *words[1:]], cwd=elsewhere, check=True, timeout=600)
    else:
        monkeypatch.chdir(elsewhere)
        monkeypatch.setattr(sys, "argv", ["-c", *words[3:]])
        exec(words[2], {"__name__": "__main__"})
    return cq.load(elsewhere / "OUT.safetensors")


def same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("compressed", [False, True])
def test_npz_can_be_converted_as_advised(tmp_path, compressed):
    (np.savez_compressed if compressed else np.savez)(tmp_path / "a.npz", **ARRAYS)
    message = refused(tmp_path / "a.npz")
    assert "is a .npz file of NumPy" in message
    same(run_advice(message, tmp_path), ARRAYS)


def test_npy_can_be_converted_as_advised(tmp_path):
    np.save(tmp_path / "a.npy", ARRAYS["w"])
    message = refused(tmp_path / "a.npy")
    assert "is one array of NumPy" in message
    same(run_advice(message, tmp_path), {"array": ARRAYS["w"]})


@UNCLOSED
@pytest.mark.parametrize(
    ("zipped", "name"),
    sampled(
        product([True, False], ["model.pt", "pytorch_model.bin", "w.pth", "model.safetensors"]),
        lambda zipped, _: zipped,
    ),
)
def test_files_of_torch_can_be_converted_as_advised(tmp_path, monkeypatch, name, zipped):
    torch = pytest.importorskip("torch")
    torch.save(
        {key: torch.from_numpy(value) for key, value in ARRAYS.items()}, tmp_path / name,
        _use_new_zipfile_serialization=zipped,
    )  # fmt: skip
    message = refused(tmp_path / name)
    assert "is a pickle of PyTorch" in message
    same(run_advice(message, tmp_path, monkeypatch=None if zipped else monkeypatch), ARRAYS)


@UNCLOSED
@pytest.mark.parametrize("key", sampled(["state_dict", "model"]))
def test_a_checkpoint_of_training_can_be_converted_as_advised(tmp_path, monkeypatch, key):
    torch = pytest.importorskip("torch")
    weights = {name: torch.from_numpy(value) for name, value in ARRAYS.items()}
    torch.save({key: weights, "epoch": 3}, tmp_path / "last.ckpt")
    advice = refused(tmp_path / "last.ckpt")
    same(run_advice(advice, tmp_path, monkeypatch=monkeypatch), ARRAYS)


def checkpoints(torch):
    weights = {name: torch.from_numpy(value) for name, value in ARRAYS.items()}
    linear = torch.nn.Linear(3, 2)
    one = {"weight": linear.weight.detach().numpy(), "bias": linear.bias.detach().numpy()}
    two = {f"{i}.{name}": value for i in (0, 1) for name, value in ARRAYS.items()}
    yield "PyTorch's tutorial", {"epoch": 3, "model_state_dict": weights}, ARRAYS
    yield "weights beside numbers", {**weights, "epoch": 3, "lr": 0.1, "names": ["w"]}, ARRAYS
    yield "a list", [weights, weights], two
    yield "a tuple", (weights, weights), two
    yield "parameters", linear.state_dict(keep_vars=True), one
    yield "a module", linear, one
    yield "a module of training", {"model": linear, "epoch": 3}, one
    yield "a module of modules", torch.nn.Sequential(linear), {f"0.{k}": one[k] for k in one}
    yield "modules", [linear], {f"0.{k}": one[k] for k in one}


@UNCLOSED
@pytest.mark.parametrize("case", range(9))
def test_whatever_torch_saved_can_be_converted_as_advised(tmp_path, monkeypatch, case):
    torch = pytest.importorskip("torch")
    what, saved, wanted = list(checkpoints(torch))[case]
    torch.save(saved, tmp_path / "last.ckpt")
    advice = refused(tmp_path / "last.ckpt")
    same(run_advice(advice, tmp_path, "module" in what, monkeypatch), wanted)


def test_a_name_cannot_extend_the_command(tmp_path):
    path = tmp_path / "a'); print('.npz"
    np.savez(tmp_path / "a.npz", **ARRAYS)
    (tmp_path / "a.npz").rename(path)
    assert "numpy.load('IN')" in refused(path)


def tar(path):
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("a"))
    return path.read_bytes()


def zipped(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")
    return path.read_bytes()


OTHERS = {
    "a pickle": (lambda _: pickle.dumps({"a": [1.5] * 10}), "is a pickle"),
    "hdf5": (lambda _: b"\x89HDF\r\n\x1a\n" + bytes(99), "is an HDF5 file"),
    "git lfs": (
        lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        "Git LFS pointer",
    ),
    "html": (lambda _: b"<!DOCTYPE html><html><body>404", "error page"),
    "gzip": (lambda _: gzip.compress(b"a" * 99), "compressed by gzip"),
    "gzip without a time": (lambda _: gzip.compress(b"a" * 99, mtime=0), "compressed by gzip"),
    "zstd": (lambda _: b"\x28\xb5\x2f\xfd" + bytes(range(99)), "compressed by zstd"),
    "tar": (tar, "is a tar archive"),
    "zip": (zipped, "is a zip archive"),
    "a list": (lambda _: b"[1, 2, 3, 4, 5, 6]", "is a JSON file"),
    "empty": (lambda _: b"", "0 bytes long"),
    "cut safetensors": (lambda _: (300).to_bytes(8, "little") + b'{"a":', "300 bytes long"),
    "noise": (lambda _: b"\xaa" * 99, "truncated or of another format"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_it_is_is_said(case, tmp_path):
    make, text = OTHERS[case]
    path = tmp_path / "file"
    path.write_bytes(make(path))
    assert text in refused(path)


def test_an_onnx_model(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08\x12\x07pytorch" + b"\xaa" * 99)
    assert "is an ONNX model" in refused(tmp_path / "m.onnx")


def test_a_directory_lists_its_files(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"without \.safetensors files"):
        SafetensorsReader(tmp_path)
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / name).touch()
    with pytest.raises(IsADirectoryError, match=r"a file in it: a\.safetensors, b\.safetensors$"):
        try:
            SafetensorsReader(tmp_path)
        except IsADirectoryError as error:
            raise IsADirectoryError(error.strerror) from None


def test_a_folder_is_loaded_as_one(tmp_path):
    with pytest.raises(cq.FormatError, match=r"without \.safetensors files"):
        cq.load(tmp_path)
    cq.save(tmp_path / "a.safetensors", {"w": cq.quantize(np.ones((2, 64), np.float32))})
    cq.save(tmp_path / "b.safetensors", {"bias": np.zeros(2)})
    found = cq.load(tmp_path)
    assert list(found) == ["w", "bias"] and found["w"].shape == (2, 64)
    cq.save(tmp_path / "c.safetensors", {"bias": np.zeros(2)})
    both = r"'bias' lies in b\.safetensors and in c\.safetensors; give one"
    with pytest.raises(cq.FormatError, match=both):
        cq.load(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="devices of POSIX")
def test_devices_are_not_read():
    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(cq.FormatError, match="is not a regular file"):
            cq.load(device)
