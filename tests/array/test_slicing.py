"""Slices of QuantArrays: rows, columns on borders of blocks, and what is refused."""

import numpy as np
import pytest
from in_turn import in_turn
from oracle import bits_equal
from quant_arrays import NAMES, make

import cuquant as cq

ROW_INDEXES = {
    "int": 2,
    "negative": -1,
    "slice": slice(1, 3),
    "step": slice(None, None, 2),
    "reverse": slice(None, None, -1),
    "none": slice(2, 2),
    "list": [3, 0, 0],
    "array": np.array([1, 2]),
    "ellipsis": ...,
    "tuple": (slice(0, 2), slice(None)),
    "ellipsis and columns": (..., slice(None)),
}


@pytest.mark.parametrize("name", NAMES)
@in_turn("index", ROW_INDEXES)
def test_rows(name, index):
    q = make(name)
    part = q[ROW_INDEXES[index]]
    wanted = q.dequantize()[ROW_INDEXES[index]]
    assert part.shape == wanted.shape
    assert bits_equal(part.dequantize(), wanted)
    assert part.nbytes == sum(a.nbytes for a in part.arrays().values())


@pytest.mark.parametrize("name", NAMES)
@in_turn("columns", [(0, 256), (256, 512), (0, 512), (256, 256)])
def test_columns_on_block_boundaries(name, columns):
    q = make(name)
    part = q[:, slice(*columns)]
    wanted = q.dequantize()[:, slice(*columns)]
    assert bits_equal(part.dequantize(), np.ascontiguousarray(wanted))
    block = q.format.block_size
    if columns[0] < columns[1] and block != "row":  # a shard has the bytes it would have alone
        whole = np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32)
        options = {"global_scale": 0.01} if name == "nvfp4" else {}
        alone = cq.quantize(np.ascontiguousarray(whole[:, slice(*columns)]), name, **options)
        for key, value in alone.arrays().items():
            assert bits_equal(np.ascontiguousarray(part.arrays()[key]), value)


@pytest.mark.parametrize("packing", ["dense", "word", "planes"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_columns_inside_a_word_are_packed_again(bits, packing):
    fmt = cq.get_format(f"k{bits}", block_size=8, packing=packing, levels="normal")
    x = np.random.default_rng(2).standard_normal((3, 100)).astype(np.float32)
    q = cq.quantize(x, fmt)
    for start, stop in [(8, 40), (0, 24), (72, 100), (96, 100), (40, 40)]:
        alone = cq.quantize(np.ascontiguousarray(x[:, start:stop]), fmt)
        for key, value in alone.arrays().items():
            assert bits_equal(np.ascontiguousarray(q[:, start:stop].arrays()[key]), value)


@pytest.mark.parametrize("name", ["nf4", "int4", "uint4", "k3", "q4_0"])
def test_columns_inside_a_block_are_refused(name):
    q = make(name)
    for columns in (slice(0, 5), slice(5, 512), slice(0, 512, 2)):
        with pytest.raises(ValueError, match=r"block boundaries|step 1"):
            q[:, columns]
    with pytest.raises(ValueError, match="slices on block boundaries"):
        q[:, 3]


def test_row_scales_allow_any_columns():
    q = make("int8")
    assert bits_equal(q[:, 5:77].dequantize(), np.ascontiguousarray(q.dequantize()[:, 5:77]))


def test_two_dimensional_blocks_slice_on_their_boundaries():
    q = make("fp8_e4m3", (2, 40, 96), block_size=(16, 32))
    values = q.dequantize()
    for index in [
        (slice(None), slice(16, 40)),
        (1,),
        (..., slice(32, 96)),
        (0, slice(0, 32), slice(64, 96)),
    ]:
        assert bits_equal(
            np.ascontiguousarray(q[index].dequantize()), np.ascontiguousarray(values[index])
        )
    for index in [(0, 3), (0, slice(5, 20)), (0, slice(0, 32, 2)), (..., slice(0, 20))]:
        with pytest.raises(ValueError, match=r"boundaries|slice them"):
            q[index]


@pytest.mark.parametrize("name", ["fp8_e4m3", "uint4", "nf4"])
def test_one_row_of_blocks_that_have_one(name):
    """It has blocks along it alone."""
    q = make(name, (3, 4, 256), block_size=(1, 128))
    values = q.dequantize()
    for index in [(0, 1), (-1, 3, slice(128, 256)), (slice(None), 2), (0, [3, 1])]:
        row = q[index]
        assert bits_equal(row.dequantize(), np.ascontiguousarray(values[index]))
        assert repr(row) and row.nbytes == sum(a.nbytes for a in row.arrays().values())
    assert q[0, 1].format == cq.get_format(name, block_size=128)
    assert [r.shape for r in q[0]] == [(256,)] * 4
    assert bits_equal(q[0, 0] @ np.eye(256, dtype=np.float32), values[0, 0])
    with pytest.raises(ValueError, match="slice it"):
        make("fp8_e4m3", (4, 32), block_size=(1, 1))[0]


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        ({"scale": np.ones((3, 2), np.float16)}, (8, 256)),
        ({"scale": np.ones((8, 2), np.float32)}, (8, 256)),
        ({"packed": np.zeros((8, 128), np.float32)}, (8, 256)),
        ({"scale": None}, (8, 256)),
        ({"zero_point": np.zeros((8, 2), np.uint8)}, (8, 256)),
        ({}, (16, 256)),
        ({}, (8, 512)),
    ],
)
def test_components_that_are_not_the_formats_are_refused(change, shape, tmp_path):
    """Before anything is read or written."""
    q = make("int4", (8, 256))
    parts = {k: v for k, v in {**q.arrays(), **change}.items() if v is not None}
    bad = cq.QuantArray(q.format, shape, q.dtype, parts, (0, 1))
    x = np.ones((2, shape[1]), np.float32)
    for call in (
        lambda: cq.linear(x, bad),
        lambda: x @ bad.T,
        lambda: cq.prepack(bad),
        lambda: bad.dequantize(),
        lambda: bad.save(tmp_path / "w"),
    ):
        with pytest.raises(cq.FormatError, match="it must hold"):
            call()
    assert not list(tmp_path.iterdir())
    q.check()


def test_slices_of_a_transposed_array():
    q = make("int4", (256, 6), axis=0).T[1:4]
    assert q.shape == (3, 256)
    wanted = make("int4", (256, 6), axis=0).dequantize().T[1:4]
    assert (q.dequantize() == wanted).all()
    with pytest.raises(ValueError, match="boundaries"):
        make("int4", (256, 6), axis=0)[0:5]


def test_gathering_rows_with_a_matrix_of_indices():
    """An embedding lookup."""
    q = make("nf4", (10, 64))
    ids = np.array([[1, 2, 3], [9, 0, 1]])
    assert bits_equal(q[ids].dequantize(), q.dequantize()[ids])


@pytest.mark.parametrize(
    "index",
    [
        (0, 0, 0),
        4,
        -5,
        [4],
        [-5],
        (..., ...),
        None,
        True,
        1.0,
        "a",
        np.array([True] * 4),
        ([0], [1]),
    ],
    ids=str,
)
def test_bad_indices(index):
    with pytest.raises((IndexError, ValueError)):
        make("nf4")[index]


def test_iteration():
    q = make("int8")
    assert [row.shape for row in q] == [(512,)] * 4


@pytest.mark.parametrize("name", ["nf4", "fp4", "int8", "fp8_e4m3"])
def test_slices_of_double_quantized_arrays_keep_the_values(name):
    q = make(name, (600, 512), double_quant=True)
    for index in (slice(3, 9), [5, 2], slice(None)):
        part = q[index]
        assert part.format == cq.get_format(name) and bits_equal(
            part.dequantize(), q.dequantize()[index]
        )
