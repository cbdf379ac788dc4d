"""The safetensors container: what is written, what is refused, what survives an accident."""

import contextlib
import errno
import json
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

try:
    import safetensors
except ImportError:
    safetensors = None

import cuquant.io.safetensors.writer as module
from cuquant.errors import FormatError
from cuquant.io.safetensors import (
    SafetensorsReader,
    SafetensorsWriter,
    TensorInfo,
    numpy_dtype,
    tag_of,
)

NUMPY_TAGS = [
    "BOOL",
    "U8",
    "I8",
    "U16",
    "I16",
    "U32",
    "I32",
    "U64",
    "I64",
    "F16",
    "F32",
    "F64",
    "C64",
]
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
TAGS = [*NUMPY_TAGS, "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", *BITS]
SHAPES = [(), (1,), (0,), (0, 7), (3, 0, 5), (7,), (31, 33), (2, 3, 5, 7), (4,), (8, 12), (1,) * 64]


def fits(tag, shape):
    return int(np.prod(shape)) * BITS.get(tag, 8) % 8 == 0


def sample(tag, shape, seed=0):
    """Random bytes of every kind (NaN payloads included), as an array of that dtype."""
    dtype = numpy_dtype(tag)
    highest = 1 if tag == "BOOL" else 2 ** BITS.get(tag, 8) - 1
    size = int(np.prod(shape)) * dtype.itemsize
    codes = np.random.default_rng(seed).integers(0, highest, size, np.uint8, endpoint=True)
    return codes.view(dtype).reshape(shape)


def bytes_of(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def assert_same(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert bytes_of(got) == bytes_of(want)


def write_file(path, arrays, metadata=None):
    specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    with SafetensorsWriter(path, specs, metadata) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
    return path


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def container(header, data=b"", length=None):
    """The bytes of a file; header is an object to dump, or text or bytes to take as they are."""
    if isinstance(header, dict):
        header = json.dumps(header)
    header = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(header) if length is None else length) + header + data


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


# Malformed files

GOOD = entry()
MALFORMED = {
    "empty": (b"", "0 bytes long"),
    "seven_bytes": (b"\0" * 7, "7 bytes long"),
    "header_longer_than_file": (container("{}", length=3), "header is 3 bytes long"),
    "header_of_2_60_bytes": (container("{}", length=2**60), "header is 1152921504606846976"),
    "header_of_2_64_bytes": (container("{}", length=2**64 - 1), "header is 18446744073709551615"),
    "no_header": (container(""), "starts with"),
    "not_utf8": (container(b'{"\xff":1}'), "not UTF-8"),
    "utf8_bom": (container(b"\xef\xbb\xbf{}"), "starts with"),
    "leading_space": (container(" {}"), "starts with"),
    "array_at_top": (container("[]"), "starts with"),
    "string_at_top": (container('"a"'), "starts with"),
    "not_json": (container("{a}"), "not JSON"),
    "cut_json": (container('{"a":'), "not JSON"),
    "two_objects": (container("{}{}"), "not JSON"),
    "zero_padding": (container("{}\0\0"), "not JSON"),
    "control_character": (container('{"a\n":1}'), "not JSON"),
    "duplicate_tensor": (
        container(f'{{"a":{json.dumps(GOOD)},"a":{json.dumps(GOOD)}}}', b"1234"),
        "'a' twice",
    ),
    "duplicate_spelled_otherwise": (container('{"a":0,"\\u0061":0}'), "'a' twice"),
    "duplicate_field": (container('{"a":{"dtype":"U8","dtype":"I8"}}'), "'dtype' twice"),
    "duplicate_metadata_map": (container('{"__metadata__":{},"__metadata__":{}}'), "twice"),
    "duplicate_metadata_key": (container('{"__metadata__":{"k":"a","k":"b"}}'), "'k' twice"),
    "nan": (container('{"a":NaN}'), "number 'NaN'"),
    "minus_infinity": (container('{"a":-Infinity}'), "number '-Infinity'"),
    "exponent": (container('{"a":1e400}'), "number '1e400'"),
    "integer_of_a_million_digits": (container('{"a":' + "9" * 10**6 + "}"), "number '9999"),
    "deep_lists": (container('{"a":' + "[" * 200_000 + "]" * 200_000 + "}"), "nests too deep"),
    "deep_objects": (container('{"a":' * 90_000 + "0" + "}" * 90_000), "nests too deep"),
    "lone_surrogate": (
        container('{"\\ud800":' + json.dumps(GOOD) + "}", b"1234"),
        "not valid Unicode",
    ),
    "entry_is_null": (container({"a": None}), "exactly dtype, shape and data_offsets"),
    "entry_is_list": (container({"a": [1, 2]}), "exactly dtype"),
    "missing_field": (container({"a": {"dtype": "U8", "shape": [0]}}), "exactly dtype"),
    "extra_field": (container({"a": entry(more=1)}, b"1234"), "exactly dtype"),
    "unknown_dtype": (container({"a": entry("F128")}, b"1234"), "unknown dtype 'F128'"),
    "dtype_in_lower_case": (container({"a": entry("u8")}, b"1234"), "unknown dtype"),
    "dtype_is_list": (container({"a": entry(["U8"])}, b"1234"), "unknown dtype"),
    "shape_is_string": (container({"a": GOOD | {"shape": "4"}}, b"1234"), "shape is '4'"),
    "negative_size": (container({"a": entry(shape=(-2, -2))}, b"1234"), "its shape is"),
    "boolean_size": (container({"a": entry(shape=(True, 4))}, b"1234"), "its shape is"),
    "float_size": (container({"a": entry(shape=(4.0,))}, b"1234"), "number '4.0'"),
    "nested_shape": (container({"a": entry(shape=([4],))}, b"1234"), "its shape is"),
    "rank_65": (container({"a": entry(shape=(1,) * 64 + (4,))}, b"1234"), "at most 64"),
    "rank_100000": (container({"a": entry(shape=(2,) * 100_000)}, b"1234"), "at most 64"),
    "product_wraps_at_2_64": (container({"a": entry(shape=(2**32, 2**32))}, b""), "overflows"),
    "product_overflows_beside_zero": (
        container({"a": entry(shape=(2**62, 4, 0), offsets=(0, 0))}),
        "overflows",
    ),
    "larger_than_file": (
        container({"a": entry(shape=(2**40,), offsets=(0, 2**40))}, b"1234"),
        "truncated",
    ),
    "offsets_missing_end": (container({"a": entry(offsets=(0,))}, b"1234"), "its data_offsets are"),
    "offsets_of_three": (
        container({"a": entry(offsets=(0, 4, 4))}, b"1234"),
        "its data_offsets are",
    ),
    "offsets_boolean": (
        container({"a": entry(shape=(1,), offsets=(False, True))}, b"1"),
        "its data_offsets are",
    ),
    "offsets_negative": (container({"a": entry(offsets=(-4, 0))}, b"1234"), "its data_offsets are"),
    "offsets_reversed": (container({"a": entry(offsets=(4, 0))}, b"1234"), "its data_offsets are"),
    "size_mismatch": (container({"a": entry("F32", (2,), (0, 4))}, b"1234"), "takes 8"),
    "odd_f4": (container({"a": entry("F4", (3,), (0, 2))}, b"12"), "12 bits"),
    "ragged_f6": (container({"a": entry("F6_E2M3", (5,), (0, 4))}, b"1234"), "30 bits"),
    "overlap": (container({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456"), "overlaps"),
    "same_bytes_twice": (container({"a": entry(), "b": entry()}, b"1234"), "overlaps"),
    "empty_inside_another": (
        container({"a": entry(), "b": entry(shape=(0,), offsets=(2, 2))}, b"1234"),
        "overlaps",
    ),
    "hole": (container({"a": entry(), "b": entry(offsets=(5, 9))}, b"123456789"), "hole"),
    "hole_at_start": (container({"a": entry(offsets=(1, 5))}, b"12345"), "hole"),
    "truncated_data": (container({"a": entry()}, b"123"), "truncated"),
    "trailing_bytes": (container({"a": entry()}, b"12345"), "trailing bytes"),
    "bytes_of_no_tensor": (container({}, b"1"), "trailing bytes"),
    "metadata_is_null": (container({"__metadata__": None}), "__metadata__"),
    "metadata_value_is_number": (container({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata_is_nested": (container({"__metadata__": {"a": {"b": "c"}}}), "__metadata__"),
    "metadata_is_tensor": (container({"__metadata__": GOOD}, b"1234"), "__metadata__"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file(path, case):
    data, reason = MALFORMED[case]
    path.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(FormatError) as caught:
        SafetensorsReader(path)
    assert time.perf_counter() - start < 1
    named, _, message = str(caught.value).partition(": ")
    assert named == str(path)
    assert reason in message
    assert len(message) < 1500  # a hostile header is not repeated


def test_valid_corner_cases(path):
    header = {
        "__metadata__": {},
        "": entry(offsets=(0, 4)),
        "scalar": entry("F32", (), (4, 8)),
        "empty_at_end": entry("F64", (0, 2**40), (8, 8)),
        "empty_at_start": entry("F4", (3, 0), (0, 0)),
    }
    path.write_bytes(container(json.dumps(header) + " \n ", b"12345678"))
    with SafetensorsReader(path) as reader:
        assert list(reader.tensors) == ["empty_at_start", "", "scalar", "empty_at_end"]
        assert reader.read("scalar").tobytes() == b"5678"
        assert reader.read("empty_at_end").shape == (0, 2**40)
        assert reader.read("empty_at_start").shape == (3, 0)


def test_limits(path):
    write_file(path, {str(i): np.zeros(1) for i in range(3)}, {"a": "b"})
    SafetensorsReader(path, max_tensors=3, max_header_bytes=1000).close()
    with pytest.raises(FormatError, match="more than 2 tensors; raise max_tensors"):
        SafetensorsReader(path, max_tensors=2)
    with pytest.raises(FormatError, match="the limit is 20; raise max_header_bytes"):
        SafetensorsReader(path, max_header_bytes=20)
    write_file(path, {str(i): np.zeros(1) for i in range(3)})  # the same without __metadata__
    with pytest.raises(FormatError, match="more than 2 tensors"):
        SafetensorsReader(path, max_tensors=2)


def test_flood_of_objects_is_cut_off_while_parsing(path):
    path.write_bytes(container('{"a":[' + "{}," * 10**6 + "{}]}"))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="more than 10 tensors"):
            SafetensorsReader(path, max_tensors=10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10e6  # header bytes and text, 3 MB each; the objects alone would be 64 MB


def test_claimed_sizes_are_not_allocated(path):
    claims = [
        container("{}", length=2**60),
        container({"a": entry("U8", (2**60,), (0, 2**60))}, b"1234"),
        container({"a": entry("F64", (2**50, 0, 2**10), (0, 0))}, b"1234"),
    ]
    tracemalloc.start()
    try:
        for claim in claims:
            path.write_bytes(claim)
            with pytest.raises(FormatError):
                SafetensorsReader(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6


def test_opening_and_viewing_do_not_read_the_data(path):
    with path.open("wb") as file:  # 1 GiB of holes
        file.write(container({"a": entry("U8", (2**30,), (0, 2**30))}))
        file.truncate(file.tell() + 2**30)
    tracemalloc.start()
    try:
        with SafetensorsReader(path) as reader:
            assert reader.read("a", copy=False).nbytes == reader.raw("a").nbytes == 2**30
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6


def test_boolean_bytes_are_checked(path):
    path.write_bytes(container({"a": entry("BOOL")}, b"\0\1\2\0"))
    with SafetensorsReader(path) as reader:
        for copy in (True, False):
            with pytest.raises(FormatError, match="holds the byte 2"):
                reader.read("a", copy=copy)
        assert reader.raw("a").tolist() == [0, 1, 2, 0]


def test_missing_file(path):
    with pytest.raises(FileNotFoundError):
        SafetensorsReader(path)


def test_directory(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a directory"):
        SafetensorsReader(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no FIFOs")
def test_fifo_does_not_block(path):
    os.mkfifo(path)
    with pytest.raises(FormatError, match="not a regular file"):
        SafetensorsReader(path)


VALID = container(
    {
        "__metadata__": {"format": "pt", "note": "x"},
        "layer.0.weight": entry("BF16", (2, 3), (0, 12)),
        "codes": entry("F4", (4,), (12, 14)),
        "six": entry("F6_E3M2", (4,), (14, 17)),
        "mask": entry("BOOL", (2,), (17, 19)),
        "scalar": entry("F64", (), (19, 27)),
        "none": entry("I32", (0, 5), (27, 27)),
    },
    bytes(range(17)) + b"\0\1" + bytes(8),
)


def read_everything(path):
    """Parse or refuse; any other exception goes up. What we accept, the official library does."""
    try:
        reader = SafetensorsReader(path)
    except FormatError:
        return False
    with reader:
        for name, info in reader.tensors.items():
            assert reader.raw(name).nbytes == info.nbytes
            with contextlib.suppress(FormatError):  # a BOOL byte that is neither 0 nor 1
                assert reader.read(name).shape == reader.read(name, copy=False).shape == info.shape
        if safetensors is not None:
            official = {
                name: bytes(found["data"])
                for name, found in safetensors.deserialize(path.read_bytes())
            }
            assert official == {name: reader.raw(name).tobytes() for name in reader.tensors}
    return True


bytes_changed = st.lists(
    st.tuples(
        st.integers(0, len(VALID) - 1),
        st.sampled_from(b'{}[]",:0129-.eNtfn\\ \0\xff') | st.integers(0, 255),
    ),
    max_size=4,
)
fuzz = settings(
    max_examples=300,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def test_the_file_that_is_fuzzed_is_valid(path):
    path.write_bytes(VALID)
    assert read_everything(path)


@fuzz
@given(bytes_changed, st.none() | st.integers(0, len(VALID)), st.binary(max_size=9))
def test_mutated_files_parse_or_are_refused(path, changes, end, tail):
    data = bytearray(VALID)
    for position, byte in changes:
        data[position] = byte
    path.write_bytes(bytes(data[:end]) + tail)
    read_everything(path)


json_values = st.recursive(
    st.none() | st.integers(-3, 2**65) | st.floats() | st.text(max_size=3) | st.sampled_from(TAGS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
sizes = st.sampled_from([0, 1, 2, 3, 4, 2**31, 2**62, 2**64])
near_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(TAGS) | json_values,
        "shape": st.lists(sizes, max_size=4) | json_values,
        "data_offsets": st.tuples(st.integers(0, 9), st.integers(0, 9)) | json_values,
    }
)
headers = st.dictionaries(
    st.text(max_size=2) | st.just("__metadata__"), near_entries | json_values, max_size=3
)


@fuzz
@given(headers, st.integers(0, 9))
def test_invented_headers_parse_or_are_refused(path, header, data_bytes):
    path.write_bytes(container(header, bytes(data_bytes)))
    read_everything(path)


# Life of a reader


def test_views_outlive_the_reader(path):
    write_file(path, {"a": np.arange(6.0).reshape(2, 3)})
    with SafetensorsReader(path) as reader:
        view = reader.read("a", copy=False)
        copied = reader.read("a")
        assert np.shares_memory(view, reader.raw("a"))
        assert not np.shares_memory(view, copied)
    path.unlink()
    assert view.tolist() == copied.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1


def test_close_releases_the_map(path):
    write_file(path, {"a": np.arange(3.0)})
    reader = SafetensorsReader(path)
    mapped = reader._mmap
    reader.read("a")
    reader.close()
    assert mapped.closed
    reader.close()
    with pytest.raises(ValueError, match="reader is closed"):
        reader.read("a")
    with pytest.raises(ValueError, match="reader is closed"):
        reader.raw("a")
    assert list(reader.tensors) == ["a"]


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
        view = reader.read("a", copy=False)
        assert view.flags.aligned is (shift == 0)
        assert_same(view, array)
        assert_same(view.astype(np.float32), array.astype(np.float32))
        assert_same(reader.read("a"), array)


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
        writer._file = FullDisk(writer._file, room)
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
        writer._file = FullDisk(writer._file, 3)
        with contextlib.suppress(OSError):
            writer.write("a", ONES)
    assert_untouched(target)


def test_partial_writes_are_completed(path):
    class Slow(FullDisk):
        def write(self, data):
            return self.file.write(data[:5])

    with SafetensorsWriter(path, SPECS) as writer:
        writer._file = Slow(writer._file, None)
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

    monkeypatch.setattr(module.os, step, fault or io_error)
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
            monkeypatch.setattr(module, "_write_all", full)
            writer.write("w", np.ones(1, np.uint8))


def test_file_of_the_temporary_name_is_not_touched(path, monkeypatch):
    monkeypatch.setattr(module.secrets, "token_hex", lambda count: "0" * 16)
    other = path.with_name(f".{path.name}.{'0' * 16}.tmp")
    other.write_bytes(b"another's")
    with pytest.raises(FileExistsError):
        SafetensorsWriter(path, SPECS).__enter__()
    assert other.read_bytes() == b"another's"


def test_failure_while_writing_the_header(target, monkeypatch):
    monkeypatch.setattr(module, "_write_all", interrupt)
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

    monkeypatch.setattr(module.os, "fsync", record_fsync)
    monkeypatch.setattr(module.os, "replace", record_replace)
    write_file(path, {"a": ONES})
    assert steps[:2] == ["fsync file", "replace"]
    assert steps[2:] == ([] if os.name == "nt" else ["fsync directory"])


CHILD = """
import resource, sys, time
import numpy as np
from cuquant.io.safetensors import SafetensorsWriter
path, fate = sys.argv[1:]
if fate == "limit":  # a real write error: EFBIG once the file passes 64 KiB
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
with SafetensorsWriter(path, {"a": ("F32", (50_000,)), "b": ("F32", (4,))}) as writer:
    writer.write("a", np.ones(50_000, np.float32))
    print("written", flush=True)
    time.sleep(60)
"""


def start_child(target, fate):
    root = Path(module.__file__).parents[3]
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


@pytest.mark.skipif(os.name == "nt", reason="POSIX resource limits")
def test_real_write_error_leaves_the_target(target):
    with start_child(target, "limit") as child:
        out, err = child.communicate(timeout=30)
    assert child.returncode == 1
    assert out == ""
    assert "File too large" in err
    assert_untouched(target)
