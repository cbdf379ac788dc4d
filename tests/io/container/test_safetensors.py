"""The safetensors container: what is written is read back, here and by the official library."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from safetensors_files import (
    BITS,
    NUMPY_TAGS,
    SHAPES,
    TAGS,
    assert_same,
    bytes_of,
    container,
    entry,
    fits,
    sample,
    write_file,
)

import cuquant.io.container.safetensors.reader as reader_module
import cuquant.io.container.safetensors.writer as module
from cuquant.errors import FormatError
from cuquant.io.container.safetensors import (
    SafetensorsReader,
    SafetensorsWriter,
    TensorInfo,
    numpy_dtype,
    tag_of,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


# What is written is read back


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("tag", TAGS)
def test_round_trip(path, tag, copy):
    shapes = [shape for shape in SHAPES if fits(tag, shape)]
    arrays = {str(shape): sample(tag, shape, i) for i, shape in enumerate(shapes)}
    write_file(path, arrays, {"key": "välue", "": ""})
    with SafetensorsReader(path) as reader:
        assert reader.metadata == {"key": "välue", "": ""}
        assert set(reader.tensors) == set(arrays)
        for name, array in arrays.items():
            got = reader.read(name, copy=copy)
            assert_same(got, array)
            assert got.flags.writeable is copy
            assert reader.tensors[name].dtype == tag == tag_of(array.dtype)


def test_every_tag_of_the_official_library_is_known():
    safetensors = pytest.importorskip("safetensors")
    with pytest.raises(safetensors.SafetensorError, match="unknown variant") as caught:
        safetensors.deserialize(container({"a": entry("X", (), (0, 0))}))
    known = str(caught.value).split("expected one of")[1]
    assert set(known.split("`")[1::2]) == set(TAGS)


def test_sub_byte_codes_fill_bytes_from_the_least_significant_bit(path):
    arrays = {
        "f4": np.array([0x1, 0x2, 0xF, 0x8], np.uint8).view(ml_dtypes.float4_e2m1fn),
        "f6": np.array([0b000001, 0b000010, 0b100000, 0b111110], np.uint8).view(
            ml_dtypes.float6_e2m3fn
        ),
    }
    write_file(path, arrays)
    with SafetensorsReader(path) as reader:
        assert reader.raw("f4").tolist() == [0x21, 0x8F]
        word = 0b111110_100000_000010_000001  # the first code in the lowest bits
        assert reader.raw("f6").tobytes() == word.to_bytes(3, "little")


@pytest.mark.parametrize("tag", ["F4", "F6_E3M2", "F32"])
def test_arrays_longer_than_a_chunk(path, tag, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 16)
    array = sample(tag, (20, 15))
    write_file(path, {"a": array, "t": array.T})
    with SafetensorsReader(path) as reader:
        assert_same(reader.read("a"), array)
        assert_same(reader.read("t"), array.T)


@pytest.mark.parametrize("tag", ["F32", "BF16", "F4", "BOOL"])
def test_any_strides(path, tag):
    base = sample(tag, (12, 16))
    views = {
        "transposed": base.T,
        "step": base[::3, ::2],
        "reversed": base[::-1, ::-1],
        "broadcast": np.broadcast_to(base[0], (5, 16)),
        "permuted": base.reshape(3, 4, 16).transpose(2, 0, 1),
        "fortran": np.asfortranarray(base),
    }
    write_file(path, views)
    with SafetensorsReader(path) as reader:
        for name, view in views.items():
            assert_same(reader.read(name), view)


def test_tensors_start_on_their_item_size_and_the_data_on_256_bytes(path):
    arrays = {tag: sample(tag, (4,)) for tag in TAGS}
    arrays["second U8"] = sample("U8", (3,))
    write_file(path, arrays)
    with SafetensorsReader(path) as reader:
        infos = list(reader.tensors.values())
        assert infos[0].offset % 256 == 0
        for info in infos:
            assert info.offset % info.numpy_dtype.itemsize == 0, info
        order = [info.name for info in infos if info.numpy_dtype.itemsize == 8]
        assert order == ["U64", "I64", "F64", "C64"]  # ties keep the order of specs
        assert infos[-1].dtype in BITS


def test_planned_layout_is_the_layout_of_the_file(path):
    arrays = {"b": sample("U8", (3,)), "a": sample("F32", (2,)), "z": sample("F32", (0,))}
    specs = {name: (tag_of(array.dtype), list(array.shape)) for name, array in arrays.items()}
    with SafetensorsWriter(path, specs) as writer:
        for name in ("b", "z", "a"):
            writer.write(name, arrays[name])
    with SafetensorsReader(path) as reader:
        assert list(reader.tensors.items()) == list(writer.tensors.items())
        assert reader.tensors["b"] == TensorInfo("b", "U8", (3,), reader.tensors["b"].offset, 3)
        for name, array in arrays.items():
            assert_same(reader.read(name), array)


def test_raw_bytes_copy_a_file(tmp_path):
    arrays = {tag: sample(tag, (4, 3)) for tag in TAGS} | {"empty": np.zeros((0, 2), np.float32)}
    first = write_file(tmp_path / "first", arrays, {"a": "b"})
    with SafetensorsReader(first) as reader:
        specs = {info.name: (info.dtype, info.shape) for info in reader.tensors.values()}
        with SafetensorsWriter(str(tmp_path / "second"), specs, reader.metadata) as writer:
            for name in reversed(specs):
                writer.write_raw(name, reader.raw(name))
    assert (tmp_path / "second").read_bytes() == first.read_bytes()


def test_a_file_can_be_replaced_by_a_copy_of_itself(path):
    array = sample("BF16", (5, 5))
    write_file(path, {"a": array})
    with SafetensorsReader(path) as reader:
        write_file(path, {"b": reader.read("a", copy=False)})
    with SafetensorsReader(path) as reader:
        assert_same(reader.read("b"), array)


def test_no_tensors(path):
    write_file(path, {}, {"only": "metadata"})
    with SafetensorsReader(path) as reader:
        assert reader.tensors == {}
        assert reader.metadata == {"only": "metadata"}


@pytest.mark.parametrize("name", ["../../etc/passwd", "/abs", "a\0b", "naïve 层", " ", '"\\'])
def test_names_are_opaque(path, name):
    write_file(path, {name: np.arange(3.0)})
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with SafetensorsReader(path) as reader:
        assert reader.read(name).tolist() == [0, 1, 2]


# The official library agrees


@pytest.mark.parametrize("tag", TAGS)
def test_official_library_reads_ours(path, tag):
    safetensors = pytest.importorskip("safetensors")
    arrays = {str(shape): sample(tag, shape) for shape in SHAPES if fits(tag, shape)}
    write_file(path, arrays, {"format": "np"})
    read = dict(safetensors.deserialize(path.read_bytes()))
    assert set(read) == set(arrays)
    with SafetensorsReader(path) as reader:
        for name, array in arrays.items():
            assert (read[name]["dtype"], tuple(read[name]["shape"])) == (tag, array.shape)
            assert bytes(read[name]["data"]) == reader.raw(name).tobytes()
            if tag not in BITS:
                assert bytes(read[name]["data"]) == bytes_of(array)
    with safetensors.safe_open(path, framework="np") as opened:
        assert opened.metadata() == {"format": "np"}


def test_official_numpy_both_ways(tmp_path):
    official = pytest.importorskip("safetensors.numpy")
    arrays = {f"{tag}{shape}": sample(tag, shape) for tag in NUMPY_TAGS for shape in SHAPES[:-1]}
    ours = official.load_file(write_file(tmp_path / "ours", arrays))
    official.save_file(arrays, tmp_path / "theirs", {"a": "b"})
    with SafetensorsReader(tmp_path / "theirs") as reader:
        assert reader.metadata == {"a": "b"}
        assert set(reader.tensors) == set(ours) == set(arrays)
        for name, array in arrays.items():
            assert_same(reader.read(name), array)
            assert_same(ours[name], array)


TORCH_NAMES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F32": "float32",
    "BOOL": "bool",
}


@pytest.mark.parametrize("tag", TORCH_NAMES)
def test_torch_both_ways(tmp_path, tag):
    torch = pytest.importorskip("torch")
    official = pytest.importorskip("safetensors.torch")
    array = sample(tag, (6, 5))
    (tensor,) = official.load_file(write_file(tmp_path / "ours", {"a": array})).values()
    assert tensor.dtype is getattr(torch, TORCH_NAMES[tag])
    assert tuple(tensor.shape) == array.shape
    assert tensor.view(torch.uint8).numpy().tobytes() == bytes_of(array)
    official.save_file({"b": tensor}, tmp_path / "theirs")
    with SafetensorsReader(tmp_path / "theirs") as reader:
        assert_same(reader.read("b"), array)


def test_official_writer_of_packed_dtypes(path):
    safetensors = pytest.importorskip("safetensors")
    if not hasattr(safetensors, "TensorSpec"):
        pytest.skip("this safetensors takes no raw pointers")
    packed = np.array([0x21, 0x43], np.uint8)
    spec = safetensors.TensorSpec(
        dtype="float4_e2m1fn_x2", shape=(1, 2), data_ptr=packed.ctypes.data, data_len=2
    )
    path.write_bytes(safetensors.serialize({"a": spec}))
    with SafetensorsReader(path) as reader:
        assert reader.tensors["a"].shape == (1, 4)
        assert reader.read("a").view(np.uint8).tolist() == [[1, 2, 3, 4]]


# Dtypes


def test_dtype_helpers_are_inverses():
    assert [tag_of(numpy_dtype(tag)) for tag in TAGS] == TAGS


@pytest.mark.parametrize(
    "dtype", [object, "U8", "M8[s]", np.complex128, ml_dtypes.int4, [("a", "f4")]]
)
def test_tag_of_unknown_dtype(dtype):
    with pytest.raises(TypeError, match="safetensors has no dtype"):
        tag_of(dtype)


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c8"])
def test_tag_of_big_endian(dtype):
    with pytest.raises(TypeError, match="big-endian"):
        tag_of(dtype)


@pytest.mark.parametrize("tag", ["f4", "float32", "F128", "", None, ["F32"]])
def test_numpy_dtype_of_unknown_tag(tag):
    with pytest.raises(ValueError, match=r"unknown dtype .* known: BOOL"):
        numpy_dtype(tag)


# Life of a reader


def test_arrays_outlive_the_reader(path):
    write_file(path, {"a": np.arange(6.0).reshape(2, 3)})
    with SafetensorsReader(path) as reader:
        view = reader.read("a", copy=False)
        copied = reader.read("a")
    path.write_bytes(b"another file")  # nothing is mapped: what was read stays
    assert view.tolist() == copied.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    copied[0, 0] = 1


def test_close_releases_the_file(path):
    write_file(path, {"a": np.arange(3.0)})
    reader = SafetensorsReader(path)
    opened = reader._file.file
    reader.read("a")
    reader.close()
    assert opened.closed
    reader.close()
    for read in (reader.read, reader.raw, lambda name: list(reader.chunks(name))):
        with pytest.raises(ValueError, match="reader is closed"):
            read("a")
    assert list(reader.tensors) == ["a"]


@pytest.mark.parametrize("positional", [True, False])
def test_threads_read_at_the_same_time(path, positional, monkeypatch):
    if not positional:  # as on Windows
        monkeypatch.delattr(os, "preadv", raising=False)
    arrays = {str(i): np.full(100_000, i, np.int32) for i in range(16)}
    write_file(path, arrays)
    with SafetensorsReader(path) as reader, ThreadPoolExecutor(8) as pool:
        for name, got in zip(arrays, pool.map(reader.read, arrays), strict=True):
            assert_same(got, arrays[name])


def test_chunks_are_the_bytes_and_bounded(path, monkeypatch):
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", 1000)
    write_file(path, {"a": np.arange(1024, dtype=np.uint32), "none": np.zeros((0, 3))})
    with SafetensorsReader(path) as reader:
        sizes = [chunk.nbytes for chunk in reader.chunks("a")]
        assert sizes == [1000] * 4 + [96]
        assert b"".join(c.tobytes() for c in reader.chunks("a")) == reader.raw("a").tobytes()
        assert list(reader.chunks("none")) == []


@pytest.mark.parametrize("cut", ["data", "header"])
def test_a_file_that_is_cut_short_while_it_is_read(path, cut):
    write_file(path, {"a": np.arange(10_000.0), "b": np.arange(10.0)})
    with SafetensorsReader(path) as reader:
        os.truncate(path, reader.tensors["a"].offset + 100 if cut == "data" else 10)
        for read in (reader.read, reader.raw, lambda name: list(reader.chunks(name))):
            with pytest.raises(FormatError, match="'a': it was cut short while it was read") as e:
                read("a")
            assert str(path) in str(e.value)


def test_unknown_tensor_lists_the_known_ones(path):
    write_file(path, {f"t{i}": np.zeros(1) for i in range(9)})
    with SafetensorsReader(path) as reader, pytest.raises(KeyError, match=r"9: .*t0.* and more"):
        reader.read("w")


@pytest.mark.parametrize("shift", [0, 1])
def test_misaligned_files_are_read(path, shift):
    array = sample("BF16", (3, 4))
    header = json.dumps({"a": entry("BF16", (3, 4), (0, 24))})
    header += " " * (len(header) % 2 + shift)
    path.write_bytes(container(header, bytes_of(array)))
    with SafetensorsReader(path) as reader:
        found = reader.read("a")
        assert found.ctypes.data % 256 == 0
        assert_same(found, array)
