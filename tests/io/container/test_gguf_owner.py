"""GGUF files against the `gguf` package, both ways, and every file again as it was."""

import argparse
import builtins
import importlib
import logging

import numpy as np
import pytest
from gguf_files import contents, copy_file, plain, samples_of_all_types, write_file

import cuquant as cq
from cuquant.formats.blocks import BLOCK_LAYOUTS
from cuquant.io.container.gguf import TYPES, GgufReader, gguf_type

gguf = pytest.importorskip("gguf")

Kind = gguf.GGUFValueType
EXTREMES = {
    "uint8": 255, "int8": -128, "uint16": 65_535, "int16": -32_768, "uint32": 2**32 - 1,
    "int32": -(2**31), "uint64": 2**64 - 1, "int64": -(2**63), "float32": 1.5e-3, "float64": 1 / 3,
}  # fmt: skip
CONVERTED = {"BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"}  # by gguf-convert-endian
STALE = {"Q8_1"}  # gguf's table has 40 bytes for a block, C has 36
BIG = gguf.GGUFEndian.BIG


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_all_values(writer):
    for name, value in EXTREMES.items():
        kind = Kind[name.upper()]
        writer.add_key_value(f"test.{name}", value, kind)
        writer.add_key_value(f"test.array.{name}", [value, 1, 0, 7], Kind.ARRAY, kind)
    writer.add_bool("test.true", True)
    writer.add_bool("test.false", False)
    writer.add_string("test.string", "a\nb \"' \\ naïve 日本語 🙂")
    writer.add_key_value("test.empty", "", Kind.STRING)
    writer.add_key_value("test.bytes", b"\xff\xfe is no text \xc3", Kind.STRING)
    writer.add_array("test.array.bool", [True, False, True])
    writer.add_array("test.array.string", ["", "a", b"\x80\xff", "é" * 300])
    writer.add_array("test.array.nested", [[1, 2], [3, 4, 5]])
    writer.add_array("test.array.deeper", [[["a"], ["b", "c"]], [["d"]]])


def owners_samples():
    """(gguf's type, array) of what the owner can name and sizes as C does."""
    found = {
        name: (gguf.GGMLQuantizationType(kind.id), array)
        for name, (kind, array) in samples_of_all_types().items()
        if kind.id in list(gguf.GGMLQuantizationType) and kind.name not in STALE
    }
    assert len(found) >= 27
    return found


def owners_file(path, *, tensors=True, values=True, alignment=None, **options):
    writer = gguf.GGUFWriter(path, "llama", **options)
    if alignment:
        writer.add_custom_alignment(alignment)
    if values:
        add_all_values(writer)
    for name, (kind, array) in owners_samples().items() if tensors else ():
        stored = array.view(np.uint8) if kind.name == "BF16" else array
        writer.add_tensor(f"blk.0.{name}", stored, raw_dtype=kind)
    finish(writer)
    return path


def check_tensors(reader):
    for name, (kind, array) in owners_samples().items():
        info, read = reader.tensors[f"blk.0.{name}"], reader.read(f"blk.0.{name}")
        assert info.type.name == kind.name
        assert read.shape == info.stored_shape == array.shape
        assert read.dtype == info.dtype == array.dtype
        assert read.tobytes() == array.tobytes(), name


def check_values(reader):
    for name, value in EXTREMES.items():
        read, several = reader.metadata[f"test.{name}"], reader.metadata[f"test.array.{name}"]
        want = np.array([value, 1, 0, 7], name)
        assert read.dtype == several.dtype == want.dtype
        assert read == want[0] and several.tolist() == want.tolist()
    assert reader.metadata["test.true"] is True and reader.metadata["test.false"] is False
    assert reader.metadata["test.string"] == "a\nb \"' \\ naïve 日本語 🙂"
    assert reader.metadata["test.empty"] == ""
    stored = reader.metadata["test.bytes"].encode("utf-8", "surrogateescape")
    assert stored == b"\xff\xfe is no text \xc3"
    assert plain(reader.metadata["test.array.bool"]) == [True, False, True]
    assert list(reader.metadata["test.array.string"])[::3] == ["", "é" * 300]
    assert reader.metadata["test.array.string"][2] == "\udc80\udcff"
    assert plain(reader.metadata["test.array.nested"]) == [[1, 2], [3, 4, 5]]
    assert plain(reader.metadata["test.array.deeper"]) == [[["a"], ["b", "c"]], [["d"]]]


# ---- types --------------------------------------------------------------------------------------


def test_types_are_the_owners():
    ours = {kind.id: (kind.name, kind.elements, kind.nbytes) for kind in TYPES.values()}
    for kind, (elements, nbytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.name not in STALE:
            assert ours[int(kind)] == (kind.name, elements, nbytes)


def test_formats_have_the_bytes_of_their_types():
    named = {kind.format: kind for kind in TYPES.values() if kind.format}
    assert set(named) == {n for n in cq.list_formats() if n in BLOCK_LAYOUTS} - {"mxfp4", "nvfp4"}
    for name, kind in named.items():
        q = cq.quantize(np.ones((1, kind.elements), np.float32), name)
        assert q.nbytes == kind.nbytes, name


# ---- what the owner writes ----------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [None, 1, 8, 64, 4096])
def test_we_read_what_the_owner_writes(tmp_path, alignment):
    path = owners_file(tmp_path / "m.gguf", alignment=alignment)
    with GgufReader(path) as reader:
        assert (reader.version, reader.byte_order) == (3, "little")
        assert reader.alignment == (alignment or 32)
        assert reader.metadata["general.architecture"] == "llama"
        check_values(reader)
        check_tensors(reader)


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
@pytest.mark.parametrize("given", [0, 1, -1])
def test_any_part_of_a_split_file_gives_all(tmp_path, given, alignment):
    owners_file(tmp_path / "m.gguf", alignment=alignment, split_max_tensors=7)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 3
    with GgufReader(parts[given]) as reader:
        assert reader.parts == parts
        assert "split.count" not in reader.metadata
        check_values(reader)
        check_tensors(reader)
        assert {info.part for info in reader.tensors.values()} == set(range(len(parts)))


def test_a_first_part_without_tensors(tmp_path):
    owners_file(tmp_path / "m.gguf", split_max_tensors=100, small_first_shard=True)
    with GgufReader(tmp_path / "m-00001-of-00002.gguf") as reader:
        check_values(reader)
        check_tensors(reader)


def test_the_second_version_is_the_third_without_big_endian(tmp_path):
    path = owners_file(tmp_path / "m.gguf")
    stored = bytearray(path.read_bytes())
    stored[4] = 2
    path.write_bytes(stored)
    with GgufReader(path) as reader:
        assert reader.version == 2
        check_values(reader)
        check_tensors(reader)


# ---- what we write ------------------------------------------------------------------------------


def owners_reading(paths):
    """Metadata and (type, shape, bytes) of tensors as the owner reads them."""
    metadata, tensors = {}, {}
    for number, path in enumerate(paths):
        reader = gguf.GGUFReader(path)
        metadata |= {
            key: field.contents()
            for key, field in reader.fields.items()
            if not number and not key.startswith(("GGUF.", "split."))
        }
        tensors |= {
            t.name: (t.tensor_type.name, tuple(t.shape.tolist()[::-1]), t.data.tobytes())
            for t in reader.tensors
        }
    return metadata, tensors


OURS = {
    "general.architecture": "llama",
    "general.name": "naïve 日本語",
    "a.bool": True,
    "a.none": "",
    **{f"a.{name}": np.dtype(name).type(value) for name, value in EXTREMES.items()},
    **{f"a.array.{name}": np.array([value, 1], name) for name, value in EXTREMES.items()},
    "a.strings": ["", "a", "é"],
    "a.truths": [True, False],
    "a.numbers": [np.int16(3), np.int16(-3)],
}


@pytest.mark.parametrize("alignment", [None, 1, 8, 64, 4096])
@pytest.mark.parametrize("part_bytes", [None, 1, 2000, 10**9])
def test_the_owner_reads_what_we_write(tmp_path, alignment, part_bytes):
    metadata = OURS | ({"general.alignment": np.uint32(alignment)} if alignment else {})
    kinds = {kind.name.lower() for kind, _ in owners_samples().values()}
    arrays = {n: value for n, value in samples_of_all_types().items() if n in kinds}
    paths = write_file(tmp_path / "m.gguf", arrays, metadata, part_bytes=part_bytes)
    assert len(paths) == {None: 1, 1: len(arrays), 10**9: 1}.get(part_bytes, len(paths))
    read, tensors = owners_reading(paths)
    assert read == {key: plain(np.asarray(value)) for key, value in metadata.items()}
    assert tensors == {
        name: (kind.name, (2, 2 * kind.elements), array.tobytes())
        for name, (kind, array) in arrays.items()
    }


def test_parts_say_what_the_owner_says_of_them(tmp_path):
    kinds = {kind.name.lower() for kind, _ in owners_samples().values()}
    arrays = {n: value for n, value in samples_of_all_types().items() if n in kinds}
    for number, path in enumerate(write_file(tmp_path / "m.gguf", arrays, part_bytes=1)):
        fields = gguf.GGUFReader(path).fields
        told = {key: field for key, field in fields.items() if key.startswith("split.")}
        assert {k: f.contents() for k, f in told.items()} == {
            "split.no": number, "split.count": len(arrays), "split.tensors.count": len(arrays)
        }  # fmt: skip
        assert [f.types[0].name for f in told.values()] == ["UINT16", "UINT16", "INT32"]


@pytest.mark.parametrize("alignment", [None, 8, 4096])
def test_a_copy_has_the_same_bytes(tmp_path, alignment):
    path = owners_file(tmp_path / "m.gguf", alignment=alignment)
    copy_file(path, tmp_path / "copy.gguf")
    assert (tmp_path / "copy.gguf").read_bytes() == path.read_bytes()


def test_a_copy_of_a_split_file_has_the_same_contents(tmp_path):
    owners_file(tmp_path / "m.gguf", split_max_tensors=5, alignment=64)
    first = min(tmp_path.iterdir())
    copy_file(first, tmp_path / "whole.gguf")
    parts = copy_file(first, tmp_path / "parts.gguf", part_bytes=1000)
    assert contents(first) == contents(tmp_path / "whole.gguf") == contents(parts[2])


# ---- big-endian ---------------------------------------------------------------------------------


def test_a_big_endian_file_of_the_writer(tmp_path):
    """Numbers are turned; blocks, and BF16 that comes as bytes, are as they were."""
    path = owners_file(tmp_path / "m.gguf", endianess=BIG, tensors=False)
    with GgufReader(path) as reader:
        assert reader.byte_order == "big"
        check_values(reader)
    for name, (kind, array) in scaled_samples().items():
        writer = gguf.GGUFWriter(path, "llama", endianess=BIG)
        writer.add_tensor(name, array, raw_dtype=kind)
        writer.add_tensor("plain", np.arange(7, dtype=np.int64))
        finish(writer)
        with GgufReader(path) as reader:
            assert reader.read(name).tobytes() == array.tobytes(), name
            assert reader.read("plain").tolist() == list(range(7))


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "int16", "int32", "int64"])
def test_plain_tensors_of_a_big_endian_file(tmp_path, name):
    x = np.arange(-12, 12).reshape(2, 3, 4).astype(name)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=BIG)
    writer.add_tensor("x", x.copy())  # older releases turn it in place
    finish(writer)
    with GgufReader(tmp_path / "m.gguf") as reader:
        np.testing.assert_array_equal(reader.read("x"), x)
        assert reader.read("x").dtype == x.dtype
    copy_file(tmp_path / "m.gguf", tmp_path / "little.gguf")
    with GgufReader(tmp_path / "little.gguf") as reader:
        assert reader.byte_order == "little"
        np.testing.assert_array_equal(reader.read("x"), x)


def scaled_samples(rows=3, columns=512):
    """(gguf's type, bytes) of weights that the owner quantized, or of blocks with real scales."""
    rng = np.random.default_rng(7)
    weights = rng.normal(0, 0.02, (rows, columns)).astype(np.float32)
    found = {}
    for name in ("Q4_0", "Q8_0", "Q5_0", "BF16"):
        kind = gguf.GGMLQuantizationType[name]
        found[name] = kind, gguf.quants.quantize(weights, kind)
    for name, scales in {"Q4_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82)}.items():
        kind = gguf_type(name)
        blocks = rng.integers(0, 256, (rows * columns // 256, kind.nbytes), np.uint8)
        for byte in scales:
            d = rng.uniform(1e-4, 4e-4, len(blocks)).astype("<f2")
            blocks[:, byte : byte + 2] = d.view(np.uint8).reshape(-1, 2)
        found[name] = gguf.GGMLQuantizationType[name], blocks.reshape(rows, -1)
    return found


@pytest.mark.parametrize("together", [True, False])
def test_a_big_endian_file_of_the_converter(tmp_path, monkeypatch, together):
    """gguf-convert-endian turns BF16 and the scales in the blocks that it knows."""
    converter = importlib.import_module("gguf.scripts.gguf_convert_endian")
    if not hasattr(converter, "byteswap_tensors"):
        pytest.skip("this release of gguf converts fewer types")
    monkeypatch.setattr(builtins, "input", lambda prompt: "YES")
    known = {n: v for n, v in scaled_samples().items() if n in CONVERTED}
    for names in [list(known)] if together else [[name] for name in known]:
        path = tmp_path / f"{names[0]}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tensor("plain", np.arange(8, dtype=np.float32))
        for name in names:
            writer.add_tensor(name, known[name][1], raw_dtype=known[name][0])
        finish(writer)
        before = contents(path)
        told = argparse.Namespace(order="big", dry_run=False)
        converter.convert_byteorder(gguf.GGUFReader(path, "r+"), told)
        with GgufReader(path) as reader:
            assert reader.byte_order == "big"
        assert contents(path) == before, names


def test_bfloat16_of_ones_is_told_from_its_turned_bytes(tmp_path):
    """A norm's weights: finite either way, and 1 is likelier than 6e-39."""
    ones = np.full((1, 64), 0x3F80, np.uint16)
    kind = gguf.GGMLQuantizationType.BF16
    for stored in (ones.view(np.uint8), ones):  # the writer turns what comes as uint16
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=BIG)
        writer.add_tensor("norm", stored, raw_dtype=kind)
        finish(writer)
        with GgufReader(tmp_path / "m.gguf") as reader:
            assert reader.read("norm").astype(np.float32).tolist() == [[1.0] * 64]
