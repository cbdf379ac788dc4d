"""prepack and unpack: every bit lies where the layout says and comes back; files."""

import json
import pickle
import tracemalloc
from dataclasses import FrozenInstanceError, replace

import numpy as np
import prepack_cases as cases
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import bits_equal
from prepack_cases import Case, random_weight, same, same_parts

import cuquant as cq
from cuquant import interop
from cuquant.array import fragments
from cuquant.array.fragments import Fragments
from cuquant.formats import Codebook, Minifloat
from cuquant.io.container.safetensors import SafetensorsReader, SafetensorsWriter

F32 = np.float32
BITS = range(1, 9)
try:
    import torch
except ImportError:
    torch = None
needs_torch = pytest.mark.skipif(torch is None, reason="torch is optional")


# ---- where codes lie ----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_positions_fill_the_lower_halves_of_words(bits):
    places = [place for pair in range(16) for place in fragments.position(bits, pair)]
    assert sorted(places) == [(word, shift) for word in range(bits) for shift in range(16)]


def test_positions_are_those_of_the_rules():
    position = fragments.position
    assert position(1, 9) == ((0, 9),)
    assert position(2, 9) == ((1, 2), (1, 3))
    assert position(3, 6) == ((1, 3), (1, 4), (1, 5))
    assert position(5, 15) == tuple((i, 15) for i in range(5))
    assert position(6, 15) == ((3, 12), (3, 13), (3, 14), (3, 15), (5, 14), (5, 15))
    assert position(7, 3) == ((0, 12), (0, 13), (0, 14), (0, 15), (4, 6), (4, 7), (6, 3))
    assert position(8, 3) == tuple((1, 8 + i) for i in range(8))
    assert [fragments.sections(b) for b in (1, 2, 3, 4, 8)] == [
        ((0, 1),), ((0, 2),), ((0, 2), (2, 1)), ((0, 4),), ((0, 4), (4, 4))
    ]  # fmt: skip


def test_a_lane_holds_what_mma_wants_of_it():
    """Row and column of register r of the A fragment of m16n8k16 (PTX ISA), for each k16 step."""
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for step in range(4):
            for register in range(4):
                row = group + 8 * (register % 2)
                column = 16 * step + 2 * thread + 8 * (register // 2)
                for low_or_high in (0, 1):
                    found = fragments.lane_and_pair(row, column + low_or_high)
                    assert found == (lane, 4 * step + register)


def code_in(unit: np.ndarray, fmt: cq.Format, row: int, column: int) -> int:
    """A code of a unit, bit by bit."""
    bits, high = fmt.bits, column % 2
    lane, pair = fragments.lane_and_pair(row, column)
    if isinstance(fmt.codec, (Codebook, Minifloat)) and bits == 4:
        places = [(pair // 4, 8 * (pair % 4) + 4 * high + i) for i in range(4)]
    else:
        places = [(word, shift + 16 * high) for word, shift in fragments.position(bits, pair)]
    words = [int(unit[fragments.word_in_unit(bits, lane, word)]) for word, _ in places]
    return sum(
        (word >> at & 1) << i for i, (word, (_, at)) in enumerate(zip(words, places, strict=True))
    )


@pytest.mark.parametrize("name", [*(f"int{bits}" for bits in BITS), "k3", "nf4", "k5", "fp4_e2m1"])
def test_codes_lie_at_their_positions(name):
    q = Case(name, (21, 75)).weight()
    codes, laid = q.codes(), cq.prepack(q).arrays()["codes"]
    assert laid.dtype == np.uint32 and laid.shape == (2, 2, 32 * q.format.bits)
    for row, column in np.ndindex(32, 128):
        wanted = codes[row, column] if row < 21 and column < 75 else 0
        unit = laid[row // 16, column // 64]
        assert code_in(unit, q.format, row % 16, column % 64) == wanted


def test_experts_lie_alone():
    q = Case("uint5", (3, 21, 75)).weight()
    laid = cq.prepack(q).arrays()
    for expert in range(3):
        alone = cq.prepack(q[expert]).arrays()
        for name, part in alone.items():
            assert bits_equal(laid[name][expert], part)


def test_scales_of_rows_8_apart_are_neighbours():
    q = Case("uint4", (21, 300)).weight()
    laid = cq.prepack(q).arrays()
    for name in ("scale", "zero_point"):
        part = q.arrays()[name]
        assert laid[name].shape == (2, 3, 16) and laid[name].dtype == part.dtype
        for row, group in np.ndindex(32, 3):
            found = laid[name][row // 16, group, row % 8 * 2 + row % 16 // 8]
            assert bits_equal(found, part[row, group] if row < 21 else part.dtype.type(0))


@pytest.mark.parametrize("name", [n for n in cases.LAID if cq.get_format(n).is_blocks])
def test_what_blocks_hold_beside_codes(name):
    q = Case(name, (21, 512)).weight()
    layout, laid = q.format.layout, cq.prepack(q).arrays()
    held = layout.stored(q.arrays()["blocks"].reshape(-1, layout.nbytes))
    if "sc" in held:
        held["sc"] = (held["sc"].astype(int) + layout.sc_zero & 255).astype(np.uint8)
    names = {"sc": "sub_scale", "m": "sub_minimum"}
    assert set(laid) == {names.get(key, key) for key in held}
    for key in held.keys() - {"codes"}:
        part, rows = names.get(key, key), held[key].reshape(21, -1)
        for row, group in np.ndindex(rows.shape):
            place = row % 8 * 2 + row % 16 // 8
            assert bits_equal(laid[part][row // 16, group, place], rows[row, group])


# ---- every bit comes back -----------------------------------------------------------------------


COME_BACK = [*cases.ALL, *cases.EMPTY]


@pytest.mark.parametrize("name", dict.fromkeys(case.format for case in COME_BACK))
def test_every_bit_comes_back(name):
    for case in (case for case in COME_BACK if case.format == name):
        q = case.weight()
        p = cq.prepack(q)
        assert p.layout == "fragments/1", case
        wanted = Fragments(q.format, q.shape).components
        assert [(n, a.dtype, a.shape) for n, a in p.arrays().items()] == list(wanted), case
        assert p.nbytes == sum(part.nbytes for part in p.arrays().values()), case
        assert same(cq.unpack(p), q), case


@pytest.mark.parametrize("case", cases.AS_THEY_ARE, ids=str)
def test_other_blocks_stay_as_they_are(case):
    q = case.weight()
    p = cq.prepack(q)
    assert p.layout == "rows/1" and p.nbytes == q.nbytes
    assert same_parts(p.arrays(), q.arrays()) and same(cq.unpack(p), q)


SIZES = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 128, 200]))


@given(data=st.data())
def test_any_weight_comes_back(data):
    name = data.draw(st.sampled_from(cases.NAMES))
    fmt = cq.get_format(name)
    if not fmt.is_blocks and fmt.scale is not None:
        options = {"block_size": data.draw(st.sampled_from(
            [None, 8, 16, 24, 32, 64, 128, "row", "tensor", (1, 32), (16, 64), (3, 24)]
        ))}  # fmt: skip
        if name in [f"k{bits}" for bits in range(2, 9)]:
            options["packing"] = data.draw(st.sampled_from(["dense", "word", "planes"]))
        if fmt.scale.dtype == "float32":
            options["double_quant"] = data.draw(st.booleans())
        fmt = cq.get_format(name, **options)
    columns = data.draw(SIZES)
    if fmt.is_blocks:
        columns = columns % 4 * fmt.layout.elements
    shape = (*data.draw(st.lists(st.integers(0, 3), max_size=1)), data.draw(SIZES), columns)
    q = random_weight(fmt, shape, data.draw(st.integers(0, 2**32)))
    p = cq.prepack(q)
    assert (p.layout == "fragments/1") == fragments.takes(fmt, shape)
    assert same(cq.unpack(p), q)


def test_slabs_join_without_a_seam(monkeypatch):
    """Weights are re-laid a few strips at a time."""
    q = Case("k3", (2, 100, 131), (("packing", "word"),)).weight()
    whole = cq.prepack(q).arrays()
    monkeypatch.setattr(fragments, "_SLAB", 1)
    assert same_parts(cq.prepack(q).arrays(), whole) and same(cq.unpack(cq.prepack(q)), q)


def test_little_memory_is_needed_beside_the_result():
    q = random_weight(cq.get_format("int4"), (2048, 4096), 0)
    p = cq.prepack(q)
    for call in (lambda: cq.prepack(q), lambda: cq.unpack(p)):
        tracemalloc.start()
        try:
            made = call()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < made.nbytes + (24 << 20)  # slabs of 2^20 codes in a few forms


# ---- what a PackedWeight is ---------------------------------------------------------------------


def test_what_it_says_of_itself():
    q = cq.quantize(np.ones((8, 100), F32), "int4")
    p = cq.prepack(q)
    assert (p.format, p.layout, p.shape, p.dtype) == (q.format, "fragments/1", (8, 100), q.dtype)
    assert (p.ndim, len(p), p.kind, p.device) == (2, 8, "numpy", "cpu")
    assert repr(p) == (
        "PackedWeight(int4, layout=fragments/1, shape=(8, 100), dtype=float32, device=cpu)"
    )
    assert p.arrays() is not p.components and same_parts(p.arrays(), p.components)
    assert all(part.ctypes.data % 256 == 0 for part in p.arrays().values())
    for field in ("format", "layout", "components", "shape", "dtype"):
        with pytest.raises(FrozenInstanceError):
            setattr(p, field, None)
    with pytest.raises(TypeError, match="unpack"):
        np.asarray(p)
    with pytest.raises(ValueError, match="device"):
        p.to("tpu")
    assert same_parts(p.to("cpu").arrays(), p.arrays())


@pytest.mark.parametrize("name", ["nf4", "k3", "q4_k", "fp16"])
def test_pickled(name):
    p = cq.prepack(Case(name, (5, 256)).weight())
    again = pickle.loads(pickle.dumps(p))
    assert repr(again) == repr(p) and same_parts(again.arrays(), p.arrays())


@needs_torch
@pytest.mark.parametrize("name", ["nf4", "k3", "uint4", "q4_k", "fp16"])
def test_torch_tensors_stay_torch(name):
    q = Case(name, (5, 256)).weight()
    parts = {key: interop.from_numpy(part.copy(), "torch") for key, part in q.arrays().items()}
    given = cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)
    p = cq.prepack(given)
    assert p.kind == "torch" and all(isinstance(v, torch.Tensor) for v in p.arrays().values())
    assert same_parts(p.numpy().arrays(), cq.prepack(q).arrays())
    assert cq.unpack(p).kind == "torch" and same(cq.unpack(p), given)
    again = pickle.loads(pickle.dumps(p))
    assert again.kind == "torch" and same_parts(again.numpy().arrays(), p.numpy().arrays())


def test_what_is_refused():
    q = Case("nf4", (5, 256)).weight()
    p = cq.prepack(q)

    def made(layout=p.layout, **parts):
        return cq.PackedWeight(p.format, layout, {**p.arrays(), **parts}, p.shape, p.dtype)

    codes, scale = p.arrays().values()
    for wrong in (
        made("fragments/2"),
        made("tiles"),
        made("rows/1"),
        made(codes=codes[:, :2]),
        made(codes=codes.view(np.int32)),
        made(scale=scale.view(np.uint32)),
        made(tail=scale),
        cq.PackedWeight(p.format, p.layout, {"codes": codes}, p.shape, p.dtype),
        cq.PackedWeight(p.format, p.layout, p.arrays(), (5, 3, 2, 256), p.dtype),
        cq.PackedWeight(cq.get_format("fp16"), p.layout, p.arrays(), p.shape, p.dtype),
    ):
        with pytest.raises(cq.FormatError):
            cq.unpack(wrong)
    for call, error in [
        (lambda: cq.prepack(q.T), ValueError),
        (lambda: cq.prepack(q[0]), ValueError),
        (lambda: cq.prepack(codes), TypeError),
        (lambda: cq.unpack(q), TypeError),
    ]:
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("name", ["nf4", "uint4", "k3", "mxfp4", "q4_k", "nvfp4", "fp16"])
def test_products_are_those_of_the_quantized_weight(name, rng):
    w, x = (rng.standard_normal(shape, dtype=F32) for shape in ((19, 256), (3, 256)))
    q = cq.quantize(w, name)
    assert bits_equal(cq.linear(x, cq.prepack(q)), cq.linear(x, q))


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [*(Case(n, (5, 512)) for n in cases.NAMES), *cases.EMPTY, *cases.PACKINGS[1::2], *cases.DOUBLE],
    ids=str,
)
def test_saved_and_loaded(case, tmp_path):
    path, p = tmp_path / "w", cq.prepack(case.weight())
    cq.save(path, {"w": p, "b": np.zeros(3)}, nonfinite="propagate")
    loaded = cq.load(path)
    again = loaded["w"]
    assert list(loaded) == ["w", "b"] and repr(again) == repr(p)
    assert same_parts(again.arrays(), p.arrays())
    assert same(cq.unpack(again), cq.unpack(p))
    assert all(part.ctypes.data % 256 == 0 for part in again.arrays().values() if part.size)


def test_a_file_names_the_layout_and_its_version(tmp_path):
    p = cq.prepack(cq.quantize(np.ones((5, 100), F32), "int4"))
    p.save(tmp_path / "w")
    with SafetensorsReader(tmp_path / "w") as reader:
        entry = json.loads(reader.metadata["cuquant"])["arrays"]["array"]
        assert set(reader.tensors) == {"array.codes", "array.scale"}
    assert entry["layout"] == "fragments/1" and set(entry["components"]) == {"codes", "scale"}


def test_nonfinite_weights_are_refused(tmp_path):
    x = np.ones((5, 100), F32)
    x[3, 7] = np.nan
    p = cq.prepack(cq.quantize(x, "int4"))
    with pytest.raises(ValueError, match="'array' has 1 blocks"):
        p.save(tmp_path / "w")
    assert not any(tmp_path.iterdir())


def written(path, change, spec=None) -> None:
    """A file of an int4 weight, its entry changed by `change`, its tensors of other specs."""
    p = cq.prepack(cq.quantize(np.ones((40, 200), F32), "int4"))
    p.save(path)
    with SafetensorsReader(path) as reader:
        described = json.loads(reader.metadata["cuquant"])
        data = {name: reader.read(name) for name in reader.tensors}
    change(described["arrays"]["array"])
    for name, made in (spec or {}).items():
        data.pop(f"array.{name}", None)
        if made is not None:
            data[f"array.{name}"] = made
    specs = {name: (part.dtype, part.shape) for name, part in data.items()}
    with SafetensorsWriter(path, specs, {"cuquant": json.dumps(described)}) as writer:
        for name, part in data.items():
            writer.write(name, part)


def setting(**fields):
    return lambda entry: entry.update(fields)


CODES, SCALE = np.zeros((3, 4, 128), np.uint32), np.zeros((3, 2, 16), np.float16)
HOSTILE = {
    "another version": (setting(layout="fragments/2"), {}),
    "another layout": (setting(layout="rows/1"), {}),
    "layout a number": (setting(layout=1), {}),
    "layout a list": (setting(layout=["fragments/1"]), {}),
    "layout null": (setting(layout=None), {}),
    "layout empty": (setting(layout=""), {}),
    "more rows": (setting(shape=[49, 200]), {}),
    "fewer rows": (setting(shape=[32, 200]), {}),
    "more columns": (setting(shape=[40, 257]), {}),
    "experts": (setting(shape=[1, 40, 200], axes=[0, 1, 2]), {}),
    "one axis": (setting(shape=[8000], axes=[0]), {}),
    "four axes": (setting(shape=[1, 1, 40, 200], axes=[0, 1, 2, 3]), {}),
    "transposed": (setting(axes=[1, 0]), {}),
    "large": (setting(shape=[2**62, 2**62]), {}),
    "no columns": (setting(shape=[2**62, 0]), {}),
    "another format": (setting(format="int8"), {}),
    "a block of 48": (setting(options={"block_size": 48}), {}),
    "fp16": (setting(format="fp16", components={"packed": {}}), {}),
    "another component": (setting(components={"codes": {}, "zero_point": {}}), {}),
    "a tail": (setting(components={"codes": {}, "scale": {}, "tail": {}}), {"tail": CODES}),
    "codes of another dtype": (setting(), {"codes": CODES.view(np.int32)}),
    "codes too short": (setting(), {"codes": CODES[:2]}),
    "codes too long": (setting(), {"codes": np.zeros((3, 5, 128), np.uint32)}),
    "flat codes": (setting(), {"codes": CODES.reshape(-1)}),
    "no codes": (setting(), {"codes": None}),
    "scale of another dtype": (setting(), {"scale": SCALE.astype(F32)}),
    "scale as in rows": (setting(), {"scale": np.zeros((40, 2), np.float16)}),
    "no scale": (setting(), {"scale": None}),
}


@pytest.mark.parametrize(("change", "spec"), HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_file_is_a_format_error(change, spec, tmp_path):
    path = tmp_path / "w"
    written(path, change, spec)
    with pytest.raises(cq.FormatError, match="array"):
        cq.load(path)


def test_the_hostile_file_is_well_formed_without_its_change(tmp_path):
    written(tmp_path / "w", setting(), {"codes": CODES, "scale": SCALE})
    assert cq.load(tmp_path / "w")["array"].layout == "fragments/1"


def test_weights_in_rows_are_read_as_they_are(tmp_path):
    """Files of a version that knew no other layout."""
    q = Case("int4", (5, 100)).weight()
    p = cq.PackedWeight(q.format, "rows/1", q.arrays(), q.shape, q.dtype)
    cq.save(tmp_path / "w", {"w": p}, nonfinite="propagate")
    again = cq.load(tmp_path / "w")["w"]
    assert again.layout == "rows/1" and same(cq.unpack(again), q)


@pytest.mark.parametrize("parts", [{}, {"codes": None, "scale": None}, {"codes": np.zeros(3)}])
def test_a_packed_weight_of_other_arrays_is_refused(parts):
    p = replace(cq.prepack(Case("nf4", (8, 64)).weight()), components=parts)
    for call in (lambda: cq.unpack(p), lambda: cq.linear(np.ones((2, 64), np.float32), p)):
        with pytest.raises(cq.FormatError, match="it must hold"):
            call()
