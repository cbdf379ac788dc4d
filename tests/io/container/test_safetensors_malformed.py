"""Safetensors files that are malformed: refused, and never a crash."""

import json
import os
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_turn import in_turn
from safetensors_files import TAGS, container, entry, write_file

try:
    import safetensors
except ImportError:
    safetensors = None

from cuquant.errors import FormatError
from cuquant.io.container.safetensors import SafetensorsReader


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


# Malformed files

GOOD = entry()
FIELDS = json.dumps(GOOD)[1:-1]
MALFORMED = {
    "empty": (b"", "0 bytes long"),
    "seven_bytes": (b"\0" * 7, "7 bytes long"),
    "header_longer_than_file": (container("{}", length=3), "header is 3 bytes long"),
    "header_of_2_60_bytes": (container("{}", length=2**60), "header is 1152921504606846976"),
    "header_of_2_64_bytes": (container("{}", length=2**64 - 1), "header is 18446744073709551615"),
    "no_header": (container(""), "starts with"),
    "not_utf8": (container(b'{"\xff":1}'), "not UTF-8"),
    "utf8_bom": (container(b"\xef\xbb\xbf{}"), "starts with"),
    "leading_no_break_space": (container("\u00a0{}"), "starts with"),
    "blank_header": (container("    "), "starts with"),
    "array_at_top": (container("[]"), "starts with"),
    "string_at_top": (container('"a"'), "starts with"),
    "not_json": (container("{a}"), "not JSON"),
    "cut_json": (container('{"a":'), "not JSON"),
    "two_objects": (container("{}{}"), "not JSON"),
    "zero_padding": (container("{}\0\0"), "not JSON"),
    "control_character": (container('{"a\n":1}'), "not JSON"),
    "overridden_entry_is_malformed": (
        container(f'{{"a":0,"\\u0061":{json.dumps(GOOD)}}}', b"1234"),
        "tensor 'a': its entry is 0",
    ),
    "overridden_metadata_is_malformed": (
        container('{"__metadata__":{"k":1,"k":"b"}}'),
        "__metadata__['k'] is 1",
    ),
    "duplicate_field": (container('{"a":{"dtype":"U8","dtype":"I8"}}'), "'dtype' twice"),
    "duplicate_metadata_map": (container('{"__metadata__":{},"__metadata__":{}}'), "twice"),
    "nan": (container('{"a":NaN}'), "number 'NaN'"),
    "minus_infinity": (container('{"a":-Infinity}'), "number '-Infinity'"),
    "nan_in_a_field_of_another": (container({"a": entry(more=float("nan"))}, b"1234"), "number"),
    "half_a_character_in_a_field_of_another": (
        container({"a": entry(more=["\ud800"])}, b"1234"),
        "not valid Unicode",
    ),
    "a_field_of_another_nests_too_deep": (
        container(f'{{"a":{{{FIELDS},"more":{"[" * 126 + "]" * 126}}}}}', b"1234"),
        "nests too deep",
    ),
    "exponent": (container('{"a":1e400}'), "number '1e400'"),
    "integer_of_a_million_digits": (container('{"a":' + "9" * 10**6 + "}"), "number '9999"),
    "deep_lists": (container('{"a":' + "[" * 200_000 + "]" * 200_000 + "}"), "nests too deep"),
    "deep_objects": (container('{"a":' * 90_000 + "0" + "}" * 90_000), "nests too deep"),
    "lone_surrogate": (
        container('{"\\ud800":' + json.dumps(GOOD) + "}", b"1234"),
        "not valid Unicode",
    ),
    "entry_is_null": (container({"a": None}), "with dtype, shape and data_offsets"),
    "entry_is_list": (container({"a": [1, 2]}), "with dtype"),
    "missing_field": (container({"a": {"dtype": "U8", "shape": [0]}}), "with dtype"),
    "unknown_dtype": (container({"a": entry("F128")}, b"1234"), "unknown dtype 'F128'"),
    "dtype_in_lower_case": (container({"a": entry("u8")}, b"1234"), "unknown dtype"),
    "dtype_is_list": (container({"a": entry(["U8"])}, b"1234"), "unknown dtype"),
    "shape_is_string": (container({"a": GOOD | {"shape": "4"}}, b"1234"), "shape is '4'"),
    "negative_size": (container({"a": entry(shape=(-2, -2))}, b"1234"), "its shape is"),
    "boolean_size": (container({"a": entry(shape=(True, 4))}, b"1234"), "its shape is"),
    "float_size": (container({"a": entry(shape=(4.0,))}, b"1234"), "its shape is [4.0]"),
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
    "metadata_is_a_list": (container({"__metadata__": [["a", "b"]]}), "__metadata__"),
    "metadata_value_is_null": (container({"__metadata__": {"a": None}}), "__metadata__"),
    "minus_zero": (container('{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'), "[-0.0]"),
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
    assert time.perf_counter() - start < 30
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
    with pytest.raises(FormatError, match="more than 2 tensors"):
        SafetensorsReader(path, max_tensors=2)
    with pytest.raises(FormatError, match="the limit is 20; pass max_header_bytes="):
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


def test_opening_does_not_read_the_data(path):
    with path.open("wb") as file:  # 1 GiB of holes
        file.write(container({"a": entry("U8", (2**30,), (0, 2**30))}))
        file.truncate(file.tell() + 2**30)
    tracemalloc.start()
    try:
        with SafetensorsReader(path) as reader:
            assert reader.tensors["a"].nbytes == 2**30
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6


@pytest.mark.skipif(safetensors is None, reason="the official library is not installed")
def test_every_byte_but_zero_is_true_as_by_the_official_library(path):
    from safetensors.numpy import load_file

    path.write_bytes(container({"a": entry("BOOL")}, b"\0\1\2\xff"))
    assert load_file(path)["a"].tolist() == [False, True, True, True]
    with SafetensorsReader(path) as reader:
        for copy in (True, False):
            # Other bytes than 0 and 1 are no booleans to NumPy: sums and views would differ.
            assert reader.read("a", copy=copy).view(np.uint8).tolist() == [0, 1, 1, 1]
        assert reader.raw("a").tolist() == [0, 1, 2, 255]


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


# Names and values of a header, as long as the header: no message repeats them.


def long_headers(n):
    long, good = "x" * n, json.dumps(GOOD)
    yield f'{{"{long}":0}}'
    yield f'{{"{long}":0,"{long}":{good}}}'
    yield f'{{"a":{{"dtype":"U8","dtype":"{long}"}}}}'
    yield f'{{"a":{{"dtype":"{long}","shape":[4],"data_offsets":[0,4]}}}}'
    yield f'{{"a":{{"dtype":"U8","shape":"{long}","data_offsets":[0,4]}}}}'
    yield f'{{"a":{{"dtype":"U8","shape":[4],"data_offsets":["{long}"]}}}}'
    yield f'{{"a":{{"dtype":"U8","shape":[4],"data_offset":[0,4],"{long}":1}}}}'
    yield f'{{"a":{{"dtype":"U8","shape":[{"1," * n}4],"data_offsets":[0,4]}}}}'
    yield f'{{"a":[["{long}"]]}}'
    yield f'{{"__metadata__":"{long}"}}'
    yield f'{{"__metadata__":{{"{long}":1}}}}'
    yield f'{{"a{long}":{good}}}'  # the data is too short for it


@pytest.mark.parametrize("case", range(12))
def test_messages_are_short_however_long_the_names(path, case):
    path.write_bytes(container(list(long_headers(10**6))[case]))
    with pytest.raises(FormatError) as caught:
        SafetensorsReader(path)
    assert len(str(caught.value)) < 1500


def test_a_message_about_90_megabytes(path):
    path.write_bytes(container('{"' + "x" * 90_000_000 + '":0}'))
    with pytest.raises(FormatError) as caught:
        SafetensorsReader(path)
    assert len(str(caught.value)) < 1500


# What the official library takes, we take, and read it as it does: the last of equal keys counts.

PLAIN = f'"a":{{{FIELDS}}}'
AS_THE_OFFICIAL = [
    "{%s}", " {%s}", "\n\t\r {%s}", "{%s} ", "{ %s\n}", "{%s,}", "{%s}}", "{%s", "[{%s}]",
    "{%s}\0", "\0{%s}", "\ufeff{%s}", "\u00a0{%s}", "\x0b{%s}", "\x0c{%s}", "{/**/%s}", "",
    '{"__metadata__":null,%s}', '{"__metadata__":{},%s}', '{"__metadata__":{"k":"v"},%s}',
    '{"__metadata__":{"k":null},%s}', '{"__metadata__":[],%s}', '{"__metadata__":"",%s}',
    '{"__metadata__":0,%s}', '{%s,"__metadata__":null}', '{"__metadata__":{"k":["v"]},%s}',
    '{"a":{"data_offsets":[0,4],"shape":[4],"dtype":"U8"}}',
    '{"a":{"data_offsets":[-0,4],"shape":[4],"dtype":"U8"}}',
    '{"a":{"data_offsets":[0,4.0],"shape":[4],"dtype":"U8"}}',
    '{"a":{"data_offsets":[0,4],"shape":[4e0],"dtype":"U8"}}',
    '{"a":{"data_offsets":[0,4],"shape":[04],"dtype":"U8"}}',
    '{"a":{"data_offsets":[0,4],"shape":[true,4],"dtype":"U8"}}',
    '{"a":{"data_offsets":[0,4],"shape":null,"dtype":"U8"}}',
    '{"a":{"data_offsets":[0,4],"shape":["4"],"dtype":"U8"}}',
    '{"a":{"data_offsets":[0,4],"shape":[4],"dtype":null}}',
    '{"a":{"data_offsets":[0,4],"shape":[4],"dtype":"u8"}}',
    '{"a":{"data_offsets":[0,4],"shape":[4]}}',
    '{"\\u0061":{"data_offsets":[0,4],"shape":[2,2],"dtype":"I8"}}',
    '{"\\ud83d\\ude00":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}}',
    '{"\\x":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}}',
    '{"":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}}', "{'a':0}", "null", '{"a":null}',
    *(f'{{"a":{{{FIELDS},"more":{more}}}}}' for more in (
        "1", "1.5", "-0", "1e-400", "1e400", "NaN", "9" * 308, "9" * 309, "null", '"x"', "[{}]",
        '{"k":[1,null,true]}', '{"k":1,"k":2}', '"\\ud800"', '{"\\ud800":1}', "[" * 125 + "]" * 125,
        "[" * 126 + "]" * 126, '1,"more":2', '1,"dtype":"U8"', '1,"shape":[2,2]',
    )),
    '{%s,%s}', '{%s,"a":null}', '{"a":null,%s}', '{"a":{"dtype":"U8"},%s}',
    '{%s,"\\u0061":{"dtype":"I8","shape":[2,2],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"I8","shape":[9],"data_offsets":[7,5]},%s}',
    '{"a":{"dtype":"x","shape":[4],"data_offsets":[0,4]},%s}',
    '{"a":{"dtype":"I8","dtype":"I8","shape":[4],"data_offsets":[0,4]},%s}',
    '{"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},%s}',
    '{"__metadata__":{"k":"a","l":"m","k":"b"},%s}', '{"__metadata__":{"k":1,"k":"b"},%s}',
    '{"__metadata__":{},"__metadata__":{},%s}', '{"__metadata__":null,"__metadata__":{},%s}',
    '{"__metadata__":{},%s,"__metadata__":null}', '{"b":{"__metadata__":{}},%s}',
]  # fmt: skip


@pytest.mark.skipif(safetensors is None, reason="the official library is not installed")
@in_turn("text", AS_THE_OFFICIAL)
def test_headers_are_taken_and_refused_as_by_the_official_library(path, text):
    path.write_bytes(container(text.replace("%s", PLAIN), b"1234"))
    agree_with_the_official(path)


def agree_with_the_official(path):
    """Taken by both, with the same values, or refused by both."""
    try:
        safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError:
        with pytest.raises(FormatError):
            SafetensorsReader(path)
        return
    assert read_everything(path)


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
            assert reader.read(name).shape == reader.read(name, copy=False).shape == info.shape
        if safetensors is not None:
            official = {
                name: (found["dtype"], tuple(found["shape"]), bytes(found["data"]))
                for name, found in safetensors.deserialize(path.read_bytes())
            }
            assert official == {
                name: (info.dtype, info.shape, reader.raw(name).tobytes())
                for name, info in reader.tensors.items()
            }
            with safetensors.safe_open(path, "np") as file:
                assert (file.metadata() or {}) == reader.metadata
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


def in_json(pairs):
    """An object with these keys, equal ones too."""
    return "{" + ",".join(f"{json.dumps(key)}:{text}" for key, text in pairs) + "}"


fields = st.tuples(
    st.sampled_from(["dtype", "shape", "data_offsets", "more", "x"]),
    st.sampled_from(['"U8"', '"I8"', "[4]", "[2,2]", "[0,4]", "[4,8]", "1", "-1.5", "{}", "[[]]"]),
)
whole = st.sampled_from([GOOD, entry("I8"), entry("BOOL"), entry(offsets=(4, 8))])
whole_entries = st.builds(
    lambda good, more: in_json([(k, json.dumps(v)) for k, v in good.items()] + more),
    whole,
    st.lists(fields, max_size=2),
)
repeating_metadata = st.lists(
    st.tuples(st.sampled_from("kl"), st.sampled_from(['"v"', '""', "1", "null"])), max_size=3
).map(in_json)
repeating_headers = st.lists(
    st.tuples(st.sampled_from("ab"), whole_entries | st.lists(fields).map(in_json))
    | st.tuples(st.just("__metadata__"), repeating_metadata),
    max_size=4,
).map(in_json)


@pytest.mark.skipif(safetensors is None, reason="the official library is not installed")
@fuzz
@given(repeating_headers, st.sampled_from([4, 8]))
def test_headers_that_repeat_keys_are_read_as_by_the_official_library(path, header, data_bytes):
    path.write_bytes(container(header, bytes(range(data_bytes))))
    agree_with_the_official(path)
