"""GGUF files that are malformed: refused with what is wrong, within bounds, and never a crash."""

import os
import struct
import time
import tracemalloc

import pytest
from gguf_files import array, container, scalar, string, tensor, text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuquant.errors import FormatError
from cuquant.io.container.gguf import GgufReader
from cuquant.io.container.positions import PositionedFile

MOST_BYTES = 4 << 20  # of memory, for files of a few kB: what is read first is 64 kB
F32 = bytes(16)  # the data of `tensor()`


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def nested(levels):
    """Arrays in arrays, the innermost one empty and of uint8."""
    return array("a", 9, 1, struct.pack("<IQ", 9, 1) * (levels - 2) + struct.pack("<IQ", 0, 0))


def header(version, counts=(0, 0)):
    return container(version=version, counts=counts)


MALFORMED = {
    "empty": (b"", "starts with b''"),
    "three_bytes": (b"GGU", "starts with b'GGU'"),
    "magic_alone": (b"GGUF", "reach byte 8, and the file is 4 bytes"),
    "no_counts": (container()[:20], "reach byte 24"),
    "another_format": (b"PK\x03\x04" + bytes(60), "another format"),
    "before_gguf": (b"tjgg" + bytes(60), "from before GGUF"),
    "git_lfs_pointer": (b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
    "error_page": (b"<!DOCTYPE html><html>", "fetch the file again"),
    "compressed": (b"\x1f\x8b\x08" + bytes(60), "gzip; unpack it first"),
    "safetensors": (struct.pack("<Q", 2) + b"{}", "a safetensors file; give a .gguf file"),
    "magic_reversed": (b"FUGG" + bytes(60), "another format"),
    "version_0": (header(0), "version 0"),
    "version_1": (header(1), "version 1; versions 2 and 3 can be read, convert it again"),
    "version_4": (header(4), "version 4"),
    "2_60_entries": (header(3, (0, 2**60)), f"{2**60} metadata entries"),
    "2_64_entries": (header(3, (0, 2**64 - 1)), f"{2**64 - 1} metadata entries"),
    "2_60_tensors": (header(3, (2**60, 0)), f"{2**60} tensors"),
    "an_entry_is_missing": (container([scalar("a", 0, 1)], counts=(0, 2)), "reach byte"),
    "a_tensor_is_missing": (container([], [tensor("a")], F32, counts=(3, 0)), "reach byte"),
    "key_of_4_GB": (container([struct.pack("<Q", 2**32) + b"a" * 20]), "key 0 is 4294967296 bytes"),
    "key_not_utf8": (container([scalar(b"\xff", 0, 1)]), r"key 0 is b'\xff', which is not UTF-8"),
    "key_twice": (container([scalar("a", 0, 1), scalar("a", 4, 2)]), "the key 'a' twice"),
    "value_type_13": (container([text("a") + struct.pack("<IQ", 13, 0)]), "has the type 13"),
    "string_of_4_GB": (container([text("a") + struct.pack("<IQ", 8, 2**32)]), "metadata 'a'"),
    "string_of_2_64": (container([text("a") + struct.pack("<IQ", 8, 2**64 - 1)]), "reach byte"),
    "truth_is_2": (container([scalar("a", 7, 2)]), "a truth is stored as 2"),
    "a_truth_of_an_array": (container([array("a", 7, 2, b"\1\xff")]), "stored as 255"),
    "array_type_99": (container([array("a", 99, 1, bytes(8))]), "array has the type 99"),
    "array_of_2_60": (container([array("a", 12, 2**60)]), "reach byte"),
    "array_is_cut": (container([array("a", 4, 3, bytes(11))]), "reach byte"),
    "2_60_strings": (container([array("a", 8, 2**60)]), "reach byte"),
    "a_string_of_an_array_is_cut": (container([array("a", 8, 2, text("a") * 1)]), "reach byte"),
    "a_string_of_an_array_has_2_63": (
        container([array("a", 8, 2, struct.pack("<Q", 2**63) + bytes(99))]),
        "reach byte",
    ),
    "strings_go_back": (
        container([array("a", 8, 2, struct.pack("<Q", 2**64 - 8) + bytes(99))]),
        "reach byte",
    ),
    "nests_9_deep": (container([nested(9)]), "more than 8 levels"),
    "nests_10000_deep": (container([nested(10_000)]), "more than 8 levels"),
    "10_6_nested": (container([array("a", 9, 10**6, bytes(10**6))]), "nested arrays"),
    "alignment_0": (container([scalar("general.alignment", 4, 0)]), "alignment is np.uint32(0)"),
    "alignment_24": (container([scalar("general.alignment", 4, 24)]), "power of two"),
    "alignment_is_signed": (container([scalar("general.alignment", 5, 32)]), "a uint32"),
    "alignment_is_text": (container([string("general.alignment", "32")]), "a uint32"),
    "alignment_is_an_array": (container([array("general.alignment", 8, 0)]), "a uint32"),
    "alignment_of_2_31": (
        container([scalar("general.alignment", 4, 2**31)], [tensor("a")], F32),
        "truncated",
    ),
    "name_not_utf8": (container([], [tensor(b"a\x80")], F32), "name of tensor 0 is b'a\\x80'"),
    "name_of_4_GB": (container([], [struct.pack("<Q", 2**32) + bytes(40)]), "name of tensor 0"),
    "name_twice": (
        container([], [tensor("a"), tensor("a", offset=32)], bytes(64)),
        "tensor 'a' twice",
    ),
    "5_axes": (container([], [tensor("a", (1,) * 5)], F32), "tensor 'a': it has 5 axes"),
    "1000_axes": (container([], [tensor("a", (1,) * 1000)], F32), "it has 1000 axes"),
    "2_32_axes": (
        container([], [text("a") + struct.pack("<I", 2**32 - 1) + bytes(20)]),
        "it has 4294967295 axes",
    ),
    "product_wraps_at_2_64": (container([], [tensor("a", (2**32, 2**32))], F32), "overflows 2^63"),
    "product_overflows_beside_0": (
        container([], [tensor("a", (2**62, 4, 0))], F32),
        "overflows 2^63",
    ),
    "axis_of_2_64": (container([], [tensor("a", (2**64 - 1,))], F32), "overflows 2^63"),
    "axis_of_2_64_of_no_known_type": (
        container([], [tensor("a", (2**64 - 1,), kind=99)], F32),
        "overflows 2^63",
    ),
    "ragged_rows": (container([], [tensor("a", (33, 32), kind=2)], bytes(999)), "blocks of 32"),
    "blocks_of_a_number": (container([], [tensor("a", (), kind=2)], bytes(999)), "blocks of 32"),
    "larger_than_the_file": (container([], [tensor("a", (2**40,))], F32), "truncated"),
    "one_byte_is_missing": (container([], [tensor("a")], F32[:-1]), "truncated, fetch it again"),
    "no_data": (container([], [tensor("a")]), "truncated"),
    "offset_beyond_the_end": (container([], [tensor("a", offset=2**40)], F32), "truncated"),
    "offset_of_2_64": (container([], [tensor("a", offset=2**64 - 32)], F32), "truncated"),
    "empty_tensor_beyond_the_end": (
        container([], [tensor("a", (0,), offset=64)], F32),
        "truncated",
    ),
    "unknown_type_beyond_the_end": (
        container([], [tensor("a", kind=99, offset=2**40)], F32),
        "truncated",
    ),
    "misaligned": (container([], [tensor("a", offset=4)], bytes(64)), "multiple of the alignment"),
    "misaligned_for_64": (
        container(
            [scalar("general.alignment", 4, 64)],
            [tensor("a"), tensor("b", offset=32)],
            bytes(64),
            align=64,
        ),
        "alignment, 64",
    ),
    "overlap": (
        container([], [tensor("a", (9,)), tensor("b", offset=32)], bytes(64)),
        "tensor 'b' overlaps tensor 'a'",
    ),
    "the_same_bytes_twice": (container([], [tensor("a"), tensor("b")], F32), "overlaps"),
    "an_empty_tensor_in_another": (
        container([], [tensor("a", (16,)), tensor("b", (0,), offset=32)], bytes(64)),
        "overlaps",
    ),
    "part_10_of_3": (
        container([scalar("split.no", 2, 9), scalar("split.count", 2, 3)]),
        "part 10 of 3",
    ),
    "65535_parts": (container([scalar("split.count", 2, 65_535)]), "at most 1000 parts"),
    "count_of_parts_is_text": (container([string("split.count", "3")]), "split.count is '3'"),
    "negative_parts": (container([scalar("split.count", 5, -3)]), "split.count is"),
    "a_part_of_another_name": (
        container([scalar("split.no", 2, 1), scalar("split.count", 2, 3)]),
        "its name is not NAME-00002-of-00003.gguf",
    ),
    "other_count_of_tensors": (
        container([scalar("split.tensors.count", 5, 2)], [tensor("a")], F32),
        "have 2 tensors, and they have 1",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file(path, case):
    stored, reason = MALFORMED[case]
    path.write_bytes(stored)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            GgufReader(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES + 2 * len(stored)
    finally:
        tracemalloc.stop()
    named, _, message = str(caught.value).partition(": ")
    assert named == str(path)
    assert reason in message
    assert len(message) < 800  # a hostile header is not repeated


@pytest.mark.parametrize(
    "entry",
    [
        text("a") + struct.pack("<IQ", 8, 40 << 30),
        array("a", 12, 5 << 30),
        array("a", 8, 5 << 30),
        array("a", 9, 4 << 30),
    ],
    ids=["string", "numbers", "strings", "arrays"],
)
def test_lengths_in_a_sparse_file_of_50_GB_are_not_believed(path, entry):
    """They fit into the file, and no header is so long."""
    path.write_bytes(container([entry]))
    os.truncate(path, 50 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"longer than 100000000 bytes|nested arrays"):
            GgufReader(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_a_header_of_zeros_ends_at_the_limits(path):
    """A sparse file: 2,000,001 empty strings, which would be read one by one."""
    path.write_bytes(container([array("a", 8, 2_000_001)]))
    os.truncate(path, 50 << 30)
    with pytest.raises(FormatError, match="more than 2000000 strings"):
        GgufReader(path)


@pytest.mark.parametrize(
    ("counts", "reason"),
    [((65_537, 0), "65537 tensors, the limit is 65536"), ((0, 65_537), "65537 metadata entries")],
)
def test_counts_are_limited(path, counts, reason):
    path.write_bytes(header(3, counts) + bytes(1 << 21))
    with pytest.raises(FormatError, match=reason):
        GgufReader(path)


def test_limits_of_the_caller(path):
    path.write_bytes(container([string("a", "b" * 100)], [tensor("a"), tensor("b", (0,))], F32))
    GgufReader(path).close()
    with pytest.raises(FormatError, match="longer than 99 bytes; pass max_header_bytes="):
        GgufReader(path, max_header_bytes=99)
    with pytest.raises(FormatError, match="has 2 tensors, the limit is 1"):
        GgufReader(path, max_tensors=1)


def test_every_truncation_is_refused(path):
    whole = container([string("a", "b"), array("c", 8, 1, text("d"))], [tensor("e")], F32)
    path.write_bytes(whole)
    GgufReader(path).close()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            GgufReader(path)


def test_opening_a_large_file_reads_its_header_alone(path):
    """50 GB of data, sparse, and 100,000 strings: 1 MB is read."""
    size = 50 << 30
    count = (size - (16 << 20)) // 4
    strings = array("a", 8, 100_000, b"".join(text(f"{i}") for i in range(100_000)))
    path.write_bytes(container([strings], [tensor("w", (count,))], b"\0"))
    os.truncate(path, size)
    tracemalloc.start()
    try:
        with GgufReader(path) as reader:
            assert reader.tensors["w"].nbytes == 4 * count
            assert reader.metadata["a"][99_999] == "99999"
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("cut", ["data", "header"])
def test_a_file_that_is_cut_short_while_it_is_read(path, cut):
    path.write_bytes(container([], [tensor("a", (100_000,))], bytes(400_000)))
    with GgufReader(path) as reader:
        os.truncate(path, 200_000 if cut == "data" else 10)
        for read in (reader.read, reader.raw, lambda name: list(reader.chunks(name))):
            with pytest.raises(FormatError, match="'a': it was cut short while it was read"):
                read("a")


def test_a_header_that_is_cut_short_while_it_is_read(path, monkeypatch):
    """The size is that of the file as it was opened; the message names the file once."""
    path.write_bytes(container([string("a", "b" * 200_000)]))
    opened = PositionedFile.__init__

    def cutting(file, path):
        opened(file, path)
        os.truncate(path, 100)

    monkeypatch.setattr(PositionedFile, "__init__", cutting)
    with pytest.raises(FormatError, match="ended at its header: it was cut short") as caught:
        GgufReader(path)
    assert str(caught.value).count(str(path)) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FormatError, match="not a regular file"):
        GgufReader(tmp_path / "fifo")
    with pytest.raises(IsADirectoryError):
        GgufReader(tmp_path)
    with pytest.raises(FileNotFoundError):
        GgufReader(tmp_path / "none")


# ---- parts of split files -----------------------------------------------------------------------


def part(number, count, names, *entries, total=2):
    told = scalar("split.no", 2, number), scalar("split.count", 2, count)
    tensors = [tensor(name, offset=32 * i) for i, name in enumerate(names)]
    told += (scalar("split.tensors.count", 5, total),)
    return container([*entries, *told], tensors, bytes(32 * len(names)))


def write_parts(folder, *stored):
    paths = [folder / f"m-{i + 1:05d}-of-{len(stored):05d}.gguf" for i in range(len(stored))]
    for path, data in zip(paths, stored, strict=True):
        path.write_bytes(data)
    return paths


def test_a_missing_part_is_named(tmp_path):
    paths = write_parts(tmp_path, part(0, 3, "a"), part(1, 3, "b"), part(2, 3, ""))
    for path in paths[1:]:
        path.unlink()
    with pytest.raises(FormatError, match=r"2 are missing.*m-00002-of-00003\.gguf.*m-00003"):
        GgufReader(paths[0])


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ((part(0, 2, "a"), part(0, 2, "b")), "part 1 of 2, its name says 2 of 2"),
        ((part(0, 2, "a"), part(1, 3, "b")), "part 2 of 3, its name says 2 of 2"),
        ((part(0, 2, "a"), container([], [tensor("b")], F32)), "part 1 of 0"),
        ((part(0, 2, "a"), part(1, 2, "a")), "tensor 'a' twice"),
        ((part(0, 2, "a"), part(1, 2, "bc")), "have 2 tensors, and they have 3"),
        ((part(0, 2, "a"), part(1, 2, "b")[:-20]), "truncated"),
        ((part(0, 2, "a"), b"GGUF"), "reach byte 8"),
    ],
)
def test_parts_that_do_not_belong_together(tmp_path, stored, reason):
    first, second = write_parts(tmp_path, *stored)
    with pytest.raises(FormatError, match=reason) as caught:
        GgufReader(first)
    assert str(caught.value).startswith((f"{first}: ", f"{second}: "))


def test_parts_together_are_limited_too(tmp_path):
    first, _ = write_parts(tmp_path, part(0, 2, "a"), part(1, 2, "b"))
    with pytest.raises(FormatError, match="more than 1 tensors"):
        GgufReader(first, max_tensors=1)


@pytest.mark.parametrize("linked", [False, True])
def test_parts_are_looked_for_beside_the_name_that_was_given(tmp_path, linked):
    """A hub's cache has links with names to files without; no name in a file is followed."""
    store, folder = tmp_path / "store", tmp_path / "folder"
    store.mkdir(), folder.mkdir()
    for i, path in enumerate(write_parts(folder, part(0, 2, "a"), part(1, 2, "b"))):
        if linked:
            path.rename(store / str(i))
            path.symlink_to(store / str(i))
    with GgufReader(folder / "m-00002-of-00002.gguf") as reader:
        assert list(reader.tensors) == ["a", "b"]


@pytest.mark.parametrize("alignment", [8, 64])
def test_later_parts_may_have_an_alignment_of_their_own(tmp_path, alignment):
    """As llama.cpp's gguf-split writes them: 32 bytes, whatever the first part says."""
    aligned = scalar("general.alignment", 4, alignment)
    for extra in range(9):  # headers of other lengths
        first = part(0, 2, "", aligned, total=1)
        told = [scalar("split.no", 2, 1), scalar("split.count", 2, 2), string("a", "b" * 8 * extra)]
        second = container(told, [tensor("w", (8,))], bytes(range(32)))
        with GgufReader(write_parts(tmp_path, first, second)[0]) as reader:
            assert reader.alignment == alignment
            assert reader.raw("w").tolist() == list(range(32))


# ---- mutations ----------------------------------------------------------------------------------

NUMBERS = [0, 1, 2, 3, 8, 9, 31, 32, 33, 255, 2**16, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**64 - 1]
WIDTH = {"I": 2**32, "Q": 2**64}


def as_fields(entries, tensors):
    """A header as (letter, number) or bytes, one a field."""
    fields = [b"GGUF", ("I", 3), ("Q", len(tensors)), ("Q", len(entries))]
    for key, kind, value in entries:
        fields += [("Q", len(key)), key, ("I", kind), *value]
    for i, (name, dims, kind) in enumerate(tensors):
        fields += [("Q", len(name)), name, ("I", len(dims)), *(("Q", n) for n in dims)]
        fields += [("I", kind), ("Q", 64 * i)]
    return fields


SEED = as_fields(
    [
        (b"general.alignment", 4, [("I", 32)]),
        (b"split.count", 2, [b"\0\0"]),
        (b"truths", 9, [("I", 7), ("Q", 2), b"\0\1"]),
        (b"text", 8, [("Q", 3), b"a\xffb"]),
        (b"floats", 9, [("I", 6), ("Q", 2), b"abcdefgh"]),
        (b"strings", 9, [("I", 8), ("Q", 2), ("Q", 1), b"a", ("Q", 0)]),
        (b"arrays", 9, [("I", 9), ("Q", 2), ("I", 8), ("Q", 0), ("I", 0), ("Q", 1), b"\7"]),
    ],
    [(b"a", [4, 3], 0), (b"b", [32, 1], 8), (b"c", [7], 24), (b"d", [2], 99)],
)


def as_bytes(fields, order="<"):
    return b"".join(
        field if isinstance(field, bytes) else struct.pack(order + field[0], field[1])
        for field in fields
    )


@st.composite
def mutated(draw):
    """A file of which some fields are others, doubled or gone, some bytes flipped, some cut off."""
    fields = list(SEED)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(fields) - 1))
        action = draw(st.sampled_from(["change", "change", "change", "double", "drop"]))
        if action == "change" and isinstance(fields[at], tuple):
            letter, number = fields[at]
            by = draw(st.sampled_from([*NUMBERS, number + 1, number - 1]))
            fields[at] = letter, by % WIDTH[letter]
        elif action == "change":
            fields[at] = draw(st.binary(max_size=12))
        else:
            fields[at : at + 1] = [fields[at]] * 2 if action == "double" else []
    stored = bytearray(as_bytes(fields, draw(st.sampled_from("<<>"))))
    stored += bytes(-len(stored) % 32) + bytes(range(256))
    for _ in range(draw(st.integers(0, 2))):
        stored[draw(st.integers(0, len(stored) - 1))] = draw(st.integers(0, 255))
    return bytes(stored[: draw(st.integers(0, len(stored)))] if draw(st.booleans()) else stored)


def check_survives(path, stored):
    """Opened and read whole, or refused; in memory that does not grow with what the file says."""
    path.write_bytes(stored)
    start = time.process_time()
    tracemalloc.start()
    try:
        with GgufReader(path) as reader:
            for value in reader.metadata.values():
                repr(value)
            for name, info in reader.tensors.items():
                if info.type.is_known:
                    assert reader.read(name).nbytes == info.nbytes
                else:
                    with pytest.raises(FormatError, match="not known"):
                        reader.read(name)
    except FormatError as error:
        assert str(error).startswith(f"{path}: ") and len(str(error)) < 1000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST_BYTES
    assert time.process_time() - start < 30  # of its own: a loop over a stated count takes more


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_seed_of_mutations_is_a_good_file(path, order):
    stored = as_bytes(SEED, order)
    path.write_bytes(stored + bytes(-len(stored) % 32) + bytes(256))
    with GgufReader(path) as reader:
        assert len(reader.metadata) == 6 and len(reader.tensors) == 4


SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(SHARED, max_examples=300)
@given(stored=mutated())
def test_mutated_files(path, stored):
    check_survives(path, stored)


@pytest.mark.full
@settings(SHARED, max_examples=10_000)
@given(stored=mutated())
def test_ten_thousand_mutated_files(path, stored):
    check_survives(path, stored)
