"""GGUF files that we write and read: every type and value, parts, and what is refused."""

import errno
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gguf_files import (
    container,
    contents,
    copy_file,
    plain,
    sample,
    samples_of_all_types,
    scalar,
    tensor,
    text,
    typed,
    write_file,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cuquant.io.container.gguf.reader as reader_module
import cuquant.io.container.gguf.writer as writer_module
from cuquant.errors import FormatError
from cuquant.io.container import once
from cuquant.io.container.gguf import TYPES, GgufReader, GgufWriter, Strings, gguf_type
from cuquant.io.container.gguf.endian import is_turned

Q8 = gguf_type("q8_0")
F32 = gguf_type("F32")
SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


# ---- types --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
def test_types_are_found_by_their_names(kind):
    assert gguf_type(kind.name) is gguf_type(kind.name.lower()) is gguf_type(kind) is kind
    if kind.is_plain:
        assert gguf_type(kind.dtype) is kind
        assert kind.nbytes == kind.dtype.itemsize and kind.format is None


def test_unknown_types_list_the_known():
    with pytest.raises(ValueError, match=r"'q4_q' \(did you mean 'q4_[01k]'.*known: F32, F16"):
        gguf_type("q4_q")
    with pytest.raises(TypeError, match="no tensors of uint32; give one of float32, float16"):
        gguf_type(np.uint32)


# ---- tensors ------------------------------------------------------------------------------------


def test_tensors_of_all_types(path):
    arrays = samples_of_all_types()
    write_file(path, arrays)
    with GgufReader(path) as reader:
        assert list(reader.tensors) == list(arrays)
        for name, (kind, array) in arrays.items():
            info, read = reader.tensors[name], reader.read(name)
            assert (info.type, info.nbytes, info.offset % 32) == (kind, array.nbytes, 0)
            assert (read.dtype, read.shape) == (array.dtype, array.shape)
            assert read.tobytes() == array.tobytes()
            assert read.ctypes.data % 256 == 0 and read.flags.writeable


@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (0, 7), (3, 0, 5), (2, 3, 5, 7)])
def test_shapes(path, shape):
    write_file(path, {"a": (F32, sample(F32, shape)), "b": (F32, sample(F32, (3,)))})
    with GgufReader(path) as reader:
        assert reader.tensors["a"].shape == shape
        assert reader.read("a").tobytes() == sample(F32, shape).tobytes()
        assert reader.read("b").tobytes() == sample(F32, (3,)).tobytes()


def test_axes_are_reversed_in_the_file(path):
    write_file(path, {"a": (Q8, sample(Q8, (3, 64)))})
    assert struct.pack("<IQQI", 2, 64, 3, 8) in path.read_bytes()


@pytest.mark.parametrize("view", ["transposed", "strided", "broadcast", "big-endian"])
def test_arrays_as_they_lie(path, view, monkeypatch):
    monkeypatch.setattr(writer_module, "CHUNK", 5)
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    x = {
        "transposed": x.T,
        "strided": x[::-2, ::3],
        "broadcast": np.broadcast_to(x[:1], (3, 6)),
        "big-endian": x.astype(">f4"),
    }[view]
    write_file(path, {"x": (F32, x)})
    with GgufReader(path) as reader:
        np.testing.assert_array_equal(reader.read("x"), x)


def test_tensors_may_come_in_any_order(path):
    specs = {"a": ("F32", (3,)), "b": ("q8_0", (2, 32)), "c": (np.int16, (2,))}
    with GgufWriter(path, specs) as writer:
        writer.write("c", np.arange(2, dtype=np.int16))
        writer.write("a", np.arange(3, dtype=np.float32))
        writer.write_raw("b", bytes(range(68)))
    with GgufReader(path) as reader:
        assert list(reader.tensors) == ["a", "b", "c"]
        assert reader.raw("b").tobytes() == bytes(range(68))
        assert reader.read("c").tolist() == [0, 1]


def test_a_file_without_tensors(path):
    write_file(path, {}, {"a": "b"})
    with GgufReader(path) as reader:
        assert reader.tensors == {} and reader.metadata == {"a": "b"}


def test_types_that_came_later_are_listed_and_not_read(path):
    """With the bytes that they may have: up to the next tensor, or the end."""
    tensors = [tensor("new", (2, 3), 99), tensor("old", (4,), 0, 64), tensor("newer", (5,), 77, 96)]
    path.write_bytes(container([], tensors, bytes(96 + 40)))
    with GgufReader(path) as reader:
        assert reader.tensors["new"].type.id == 99 and reader.tensors["new"].shape == (3, 2)
        assert [info.nbytes for info in reader.tensors.values()] == [64, 16, 40]
        assert reader.read("old").tolist() == [0] * 4
        for read in (reader.read, reader.raw, lambda name: list(reader.chunks(name))):
            with pytest.raises(FormatError, match="'newer' is of type 77, which is not known"):
                read("newer")


def test_holes_and_trailing_bytes_are_no_fault(path):
    """Writers differ in their padding."""
    data = bytes(64) + struct.pack("<f", 3) + b"more"
    path.write_bytes(container([], [tensor("a", (1,), 0, 64)], data))
    with GgufReader(path) as reader:
        assert reader.read("a").tolist() == [3]


def test_tensors_need_not_lie_in_the_order_of_their_names(path):
    tensors = [tensor("second", (1,), 0, 32), tensor("first", (1,))]
    path.write_bytes(container([], tensors, struct.pack("<f28xf", 1, 2)))
    with GgufReader(path) as reader:
        assert list(reader.tensors) == ["first", "second"]
        assert reader.read("second").tolist() == [2]


# ---- chunks, threads, closing -------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 100, 1000, 10**6])
def test_chunks_are_whole_blocks(path, most, monkeypatch):
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", most)
    write_file(path, {"a": (Q8, sample(Q8, (9, 128))), "none": (Q8, sample(Q8, (0, 64)))})
    with GgufReader(path) as reader:
        chunks = [chunk.tobytes() for chunk in reader.chunks("a")]
        assert all(0 < len(c) <= max(most, 34) and len(c) % 34 == 0 for c in chunks)
        assert b"".join(chunks) == reader.raw("a").tobytes()
        assert list(reader.chunks("none")) == []


def test_parts_of_a_tensor_are_whole_blocks(path):
    write_file(path, {"a": (Q8, sample(Q8, (2, 64)))})
    with GgufReader(path) as reader:
        stored = np.empty(68, np.uint8)
        reader.read_into("a", stored, 34)
        assert stored.tobytes() == reader.raw("a")[34:102].tobytes()
        for size, start in ((68, 33), (67, 34)):
            with pytest.raises(
                ValueError, match=f"{size} bytes from byte {start} on are not whole"
            ):
                reader.read_into("a", stored[:size], start)


@pytest.mark.parametrize("positional", [True, False])
def test_threads_read_at_the_same_time(path, positional, monkeypatch):
    if not positional:  # as on Windows
        monkeypatch.delattr(os, "preadv", raising=False)
    arrays = {str(i): (F32, np.full(100_000, i, np.float32)) for i in range(16)}
    write_file(path, arrays)
    with GgufReader(path) as reader, ThreadPoolExecutor(8) as pool:
        for name, got in zip(arrays, pool.map(reader.read, arrays), strict=True):
            np.testing.assert_array_equal(got, arrays[name][1])


def test_a_closed_reader_and_a_name_that_is_not_there(path):
    write_file(path, {"a": (F32, sample(F32, (3,)))})
    with GgufReader(path) as reader, pytest.raises(KeyError, match=r"no tensor 'b'; it has 1"):
        reader.read("b")
    reader.close()
    with pytest.raises(ValueError, match="reader is closed"):
        reader.read("a")


# ---- metadata -----------------------------------------------------------------------------------

NUMBERS = [np.dtype(c) for c in "bBhHiIqQfd"]


def scalars():
    """Numbers of every type and all their bits, NaN payloads included."""
    made = [
        st.binary(min_size=d.itemsize, max_size=d.itemsize).map(
            lambda b, d=d: np.frombuffer(b, d)[0]
        )
        for d in NUMBERS
    ]
    return st.one_of(*made)


def texts():
    return st.binary(max_size=20).map(lambda stored: stored.decode("utf-8", "surrogateescape"))


def arrays():
    several = st.sampled_from([*NUMBERS, np.dtype(bool)])
    numbers = several.flatmap(lambda d: hnp.arrays(d, st.integers(0, 9)))
    return st.one_of(numbers, st.lists(texts(), min_size=1, max_size=5))


def values():
    nested = st.recursive(arrays(), lambda a: st.lists(a, max_size=3).map(tuple), max_leaves=5)
    return st.one_of(scalars(), texts(), st.booleans(), nested)


def expected(value):
    """What is read where `value` was written: a list of str comes back as Strings."""
    if isinstance(value, list):
        return "Strings", [("str", element) for element in value]
    if isinstance(value, tuple):
        return "tuple", [expected(element) for element in value]
    return typed(value)


@SHARED
@given(metadata=st.dictionaries(st.text(max_size=9), values(), max_size=6))
def test_metadata_come_back_with_their_types_and_bits(path, metadata):
    write_file(path, {}, metadata)
    with GgufReader(path) as reader:
        assert list(reader.metadata) == list(metadata)
        for key, value in metadata.items():
            assert typed(reader.metadata[key]) == expected(value)
    copy_file(path, path.with_name("copy.gguf"))
    assert path.with_name("copy.gguf").read_bytes() == path.read_bytes()


def test_strings_are_a_sequence(path):
    words = ["", "a", "é", "\udcff", "🙂"]
    write_file(path, {}, {"words": words})
    with GgufReader(path) as reader:
        read = reader.metadata["words"]
    assert isinstance(read, Strings)
    assert list(read) == words == plain(read) and len(read) == 5
    assert read[-1] == "🙂" and read[1:4] == words[1:4] and read[::-2] == words[::-2]
    assert "é" in read and read.index("é") == 2
    assert repr(read) == "Strings(['', 'a', 'é'], 5 in all)"
    with pytest.raises(IndexError):
        read[5]


def test_empty_arrays_keep_their_types(path):
    metadata = {"numbers": np.empty(0, np.int16), "arrays": (), "deep": ((), (np.empty(0, bool),))}
    write_file(path, {}, metadata)
    with GgufReader(path) as reader:
        assert {key: typed(value) for key, value in reader.metadata.items()} == {
            key: expected(value) for key, value in metadata.items()
        }


def test_an_empty_array_of_strings_keeps_its_type(path):
    path.write_bytes(container([text("a") + struct.pack("<IIQ", 9, 8, 0)]))
    copy_file(path, path.with_name("copy.gguf"))
    with GgufReader(path.with_name("copy.gguf")) as reader:
        assert isinstance(reader.metadata["a"], Strings) and len(reader.metadata["a"]) == 0


@pytest.mark.parametrize(
    ("value", "error", "reason"),
    [
        (7, TypeError, "int 7 does not tell its width; give a NumPy number, such as np.uint32"),
        (1.5, TypeError, r"float 1\.5 does not tell its width.*np\.float32"),
        ([1, 2], TypeError, "int 1 does not tell its width"),
        ([], TypeError, "an empty list tells no type"),
        (["a", True], TypeError, "mixes types"),
        ([np.int8(1), np.int16(1)], TypeError, "mixes types"),
        (("a",), TypeError, "a tuple holds arrays"),
        (None, TypeError, "None is a NoneType; give str, bool"),
        (b"a", TypeError, "is a bytes"),
        ({}, TypeError, "is a dict"),
        (np.float16(1), TypeError, "GGUF has no float16; give one of uint8"),
        (np.complex64(1), TypeError, "GGUF has no complex64"),
        (np.array(["a"]), TypeError, "GGUF has no <U1"),
        (np.zeros((2, 2)), ValueError, r"shape \(2, 2\); one axis"),
        ("\ud800", ValueError, "not valid Unicode"),
    ],
)
def test_values_that_cannot_be_stored(path, value, error, reason):
    with pytest.raises(error, match="metadata 'key': .*" + reason):
        GgufWriter(path, {}, {"key": value})


def test_arrays_that_nest_too_deep(path):
    value = np.zeros(1, np.uint8)
    for _ in range(7):
        value = (value,)
    write_file(path, {}, {"a": value})
    with GgufReader(path) as reader:
        assert typed(reader.metadata["a"]) == expected(value)
    with pytest.raises(ValueError, match="more than 8 levels"):
        GgufWriter(path, {}, {"a": (value,)})


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
def test_keys_of_parts_are_the_writers_own(path, key):
    with pytest.raises(ValueError, match=f"{key}, which the writer sets; pass part_bytes="):
        GgufWriter(path, {}, {key: np.uint16(1)})


def test_a_whole_file_that_is_called_the_only_part(path):
    entries = [scalar("split.no", 2, 0), scalar("split.count", 2, 1)]
    path.write_bytes(container(entries, [tensor("a")], bytes(16)))
    with GgufReader(path) as reader:
        assert reader.parts == [path] and reader.metadata == {}


# ---- what cannot be written ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (("F32", (1,) * 5), "at most 4 non-negative sizes"),
        (("F32", (-1,)), "at most 4 non-negative sizes"),
        (("F32", (2**61, 2)), "overflows"),
        (("q4_k", (2, 128)), r"Q4_K \(2, 128\) has rows that are no multiple of its blocks of 256"),
        (("q4_0", ()), "blocks of 32"),
        (("q9", (1,)), "unknown GGUF type 'q9'"),
    ],
)
def test_specs_that_cannot_be_stored(path, spec, reason):
    with pytest.raises(ValueError, match=reason):
        GgufWriter(path, {"a": spec})


@pytest.mark.parametrize("name", ["\ud800", "\udcff", "a" * 65_536, 7])
def test_names_that_cannot_be_stored(path, name):
    with pytest.raises(ValueError, match="a tensor name is"):
        GgufWriter(path, {name: ("F32", (1,))})
    with pytest.raises(ValueError, match="a key of the metadata is"):
        GgufWriter(path, {}, {name: True})


@pytest.mark.parametrize("alignment", [np.uint32(0), np.uint32(24), np.int32(32), "32"])
def test_alignments_that_cannot_be(path, alignment):
    with pytest.raises(ValueError, match=r"general\.alignment is .* power of two"):
        GgufWriter(path, {}, {"general.alignment": alignment})


def test_a_header_too_long_for_readers(path, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(ValueError, match="readers accept 1000"):
        GgufWriter(path, {}, {"a": "b" * 1000})


def wrong_writes():
    x = np.ones(3, np.float32)
    return {
        "unknown": (lambda w: w.write("b", x), r"no tensor 'b'; it has 2: \['a', 'q'\]"),
        "twice": (lambda w: [w.write("a", x), w.write("a", x)], "written already"),
        "dtype": (lambda w: w.write("a", x.astype("f8")), "came as float64"),
        "shape": (lambda w: w.write("a", x[:2]), r"came as float32 \(2,\)"),
        "elements": (lambda w: w.write("q", np.ones((1, 32), "f4")), r"stored as uint8 \(1, 34\)"),
        "short": (lambda w: w.write_raw("a", bytes(11)), "came as 11 bytes and takes 12"),
        "long": (lambda w: w.write_raw("a", bytes(13)), "came as 13 bytes and takes 12"),
        "short_chunks": (lambda w: w.write_raw("a", iter([np.zeros(5, np.uint8)])), "hold 5"),
        "missing": (lambda w: w.write("a", x), r"1 of 2 tensors were not written.*\['q'\]"),
    }


@pytest.mark.parametrize("part_bytes", [None, 1])
@pytest.mark.parametrize("case", wrong_writes())
def test_a_wrong_write_leaves_no_file(path, case, part_bytes):
    write, reason = wrong_writes()[case]
    specs = {"a": ("F32", (3,)), "q": ("q8_0", (1, 32))}
    writer = GgufWriter(path, specs, part_bytes=part_bytes)
    with pytest.raises(ValueError, match=reason), writer:
        write(writer)
    assert list(path.parent.iterdir()) == []
    with pytest.raises(ValueError, match="the writer is not open"):
        writer.write("a", np.ones(3, np.float32))


@pytest.mark.parametrize("part_bytes", [None, 1])
def test_an_interrupt_leaves_the_old_file(path, part_bytes):
    old = write_file(path, {"a": (F32, sample(F32, (3,)))})
    stored = path.read_bytes()
    specs = {"a": ("F32", (3,)), "b": ("F32", (3,))}
    writer = GgufWriter(path, specs, part_bytes=part_bytes)
    with pytest.raises(KeyboardInterrupt), writer:
        writer.write("a", np.ones(3, np.float32))
        assert len(list(path.parent.iterdir())) == 2 + (part_bytes is not None)
        raise KeyboardInterrupt
    assert list(path.parent.iterdir()) == old and path.read_bytes() == stored


def test_a_full_disk_names_the_file_and_leaves_none(path, monkeypatch):
    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    specs = {"a": ("F32", (3,)), "b": ("F32", (3,))}
    writer = GgufWriter(path, specs, part_bytes=1)
    with pytest.raises(OSError, match="No space left") as caught, writer:
        monkeypatch.setattr(once, "write_all", full)
        writer.write("a", np.ones(3, np.float32))
    assert caught.value.filename == str(path.with_name("model-00001-of-00002.gguf"))
    assert list(path.parent.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="create it first"):
        GgufWriter(tmp_path / "none" / "m.gguf", {}).__enter__()


# ---- parts --------------------------------------------------------------------------------------


def test_parts_have_at_most_the_bytes_that_were_asked_for(path):
    sizes = [10, 20, 30, 200, 1, 5, 100]
    arrays = {str(i): (F32, np.full(n, i, np.float32)) for i, n in enumerate(sizes)}
    paths = write_file(path, arrays, {"a": "b"}, part_bytes=400)
    assert [p.name for p in paths] == [f"model-0000{i}-of-00004.gguf" for i in range(1, 5)]
    assert sorted(path.parent.iterdir()) == paths
    with GgufReader(paths[2]) as reader:
        parts = [info.part for info in reader.tensors.values()]
        assert parts == [0, 0, 0, 1, 2, 2, 3]
        assert reader.metadata == {"a": "b"}
        for name, (_, array) in arrays.items():
            np.testing.assert_array_equal(reader.read(name), array)


def test_every_part_says_the_alignment(path):
    """So that readers which take each file by itself find the data."""
    arrays = {str(i): (F32, np.full(3, i, np.float32)) for i in range(3)}
    metadata = {"general.alignment": np.uint32(256), "more": True}
    for part in write_file(path, arrays, metadata, part_bytes=1):
        assert part.read_bytes().count(b"general.alignment") == 1
        assert part.stat().st_size % 256 == 0


@pytest.mark.parametrize("most", [0, -1])
def test_parts_of_no_bytes(path, most):
    with pytest.raises(ValueError, match=f"part_bytes is {most}; a positive number"):
        GgufWriter(path, {}, part_bytes=most)


def test_too_many_parts(path):
    specs = {str(i): ("I8", (1,)) for i in range(1001)}
    with pytest.raises(ValueError, match="part_bytes=1 makes 1001 parts; 1000 is the limit"):
        GgufWriter(path, specs, part_bytes=1)


def test_the_first_part_appears_last(path, monkeypatch):
    seen = []
    replace = os.replace
    monkeypatch.setattr(
        "cuquant.disk.os.replace", lambda a, b: (seen.append(os.path.basename(b)), replace(a, b))
    )
    write_file(path, {n: (F32, sample(F32, (1,))) for n in "abc"}, part_bytes=1)
    assert [re.findall(r"-(\d+)-of", name) for name in seen] == [["00003"], ["00002"], ["00001"]]


def test_a_copy_in_other_parts_is_the_same(path):
    metadata = {"a": np.uint8(1), "b": ["x", "y"], "general.alignment": np.uint32(64)}
    write_file(path, samples_of_all_types(), metadata)
    for most in (1, 300, 5000):
        parts = copy_file(path, path.with_name(f"{most}.gguf"), part_bytes=most)
        assert contents(parts[-1]) == contents(path)


# ---- big-endian ---------------------------------------------------------------------------------


def test_metadata_and_chunks_of_a_big_endian_file(path, monkeypatch):
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", 6)
    entries = [scalar("a", 4, 7, ">"), text("b", ">") + struct.pack(">IIQhh", 9, 3, 2, -2, 513)]
    stored = container(
        entries, [tensor("t", (5,), 25, order=">")], struct.pack(">5h", *range(5)), order=">"
    )
    path.write_bytes(stored)
    with GgufReader(path) as reader:
        assert reader.byte_order == "big" and reader.metadata["a"] == np.uint32(7)
        assert reader.metadata["b"].tolist() == [-2, 513]
        assert reader.metadata["b"].dtype == np.dtype(np.int16)
        chunks = [chunk.tobytes() for chunk in reader.chunks("t")]
        assert chunks == [struct.pack("<3h", 0, 1, 2), struct.pack("<2h", 3, 4)]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", [0.5, 1e-4, 50_000])
@pytest.mark.parametrize("count", [3, 100])
def test_scales_are_told_from_their_turned_bytes(count, size, turned):
    scales = np.random.default_rng(count).uniform(0.9, 1.1, count) * size
    words = scales.astype("<f2").view("<u2")
    assert is_turned(words.byteswap() if turned else words, 10) is turned


def test_scales_that_do_not_tell_are_as_the_writer_leaves_them():
    for words in ([], [0, 0], [0x1C1C], [0x2A2A, 0x2A2A]):
        assert not is_turned(np.array(words, "<u2"), 10)
