"""`embedding`: rows of quantized matrices of any library, by ids of the host or of the device."""

import fake_gpu
import ml_dtypes
import numpy as np
import pytest
from embedding_cases import ODDS, looked_up, numbers, one
from gpu_products import host, moves
from in_turn import in_turn
from kernel_cases import NAMES, OWN, same_values
from oracle import DTYPES, bits_equal

import cuquant as cq
from cuquant import interop

F32 = np.float32
IDS = np.array([[3, 0, 3], [23, 7, 1]])
TABLE = cq.quantize(np.random.default_rng(2).standard_normal((24, 256)).astype(F32), "nf4")


# ---- on the CPU ---------------------------------------------------------------------------------


@in_turn("name", NAMES)
def test_rows_are_those_of_all_values(name):
    shapes = [((24, 256), -1), ((256, 24), 0)] + [((24, 131), -1)] * (name in OWN)
    for shape, axis in shapes:
        x = np.random.default_rng(3).standard_normal(shape).astype(F32)
        q = cq.quantize(x, name, axis=axis)
        for dtype in DTYPES.values():
            assert bits_equal(cq.embedding(IDS, q, dtype=dtype), q.dequantize(dtype=dtype)[IDS])


@in_turn("case", ODDS)
def test_rows_of_odd_formats(case):
    q = case.expected()
    ids = np.arange(case.shape[0])[::-1]
    assert bits_equal(cq.embedding(ids, q), q.dequantize()[ids])


@in_turn("name", ["fp8_e4m3:128x128", "nf4:16x8", "int8:tensor", "nf4+dq", "uint4:64+min"])
def test_rows_of_blocks_of_other_shapes(name):
    q = cq.quantize(np.random.default_rng(3).standard_normal((150, 200)).astype(F32), name)
    ids = np.array([149, 127, 128, 0, 149])
    assert bits_equal(cq.embedding(ids, q), q.dequantize()[ids])


def test_the_dtype_is_that_which_was_quantized():
    for dtype in DTYPES.values():
        q = TABLE.astype(dtype)
        assert cq.embedding(IDS, q).dtype == dtype
        assert cq.embedding(IDS, q, dtype="float32").dtype == F32


def test_ids_of_any_shape_and_kind():
    values = TABLE.dequantize()
    for dtype in ("int8", "uint8", "int16", "int32", "uint64", ">i4"):
        assert bits_equal(cq.embedding(IDS.astype(dtype), TABLE), values[IDS])
    assert bits_equal(cq.embedding(IDS.tolist(), TABLE), values[IDS])
    assert bits_equal(cq.embedding(5, TABLE), values[5])
    assert bits_equal(cq.embedding(np.int64(5), TABLE), values[5])
    assert bits_equal(cq.embedding(IDS.T[::-1], TABLE), values[IDS.T[::-1]])
    for empty in ([], np.zeros((2, 0, 3), np.int64)):
        assert cq.embedding(empty, TABLE).shape == (*np.shape(empty), 256)


def test_out_has_any_strides():
    base = np.full((2, 3, 512), 7, np.float16)
    out = base[..., ::2]
    assert cq.embedding(IDS, TABLE, out=out) is out
    assert bits_equal(np.array(out), TABLE.dequantize("float16")[IDS])
    assert (base[..., 1::2] == 7).all()


def test_torch_tensors_on_the_cpu():
    torch = pytest.importorskip("torch")
    q = cq.quantize(torch.randn(24, 256, dtype=torch.bfloat16), "int4")
    ids = torch.tensor(IDS)
    rows = cq.embedding(ids, q)
    assert rows.dtype == torch.bfloat16 and torch.equal(rows, q.dequantize()[ids])
    out = torch.zeros(2, 3, 256)
    assert cq.embedding(ids.int(), q, out=out) is out
    assert torch.equal(out, q.dequantize("float32")[ids])
    assert isinstance(cq.embedding(ids, TABLE), np.ndarray)  # of q's kind


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "told"),
    [([24], 24), ([-1], -1), ([3, 25, 99, 0], 25), ([0, 1 << 40], 1 << 40), (-9, -9),
     (np.array([1 << 63], np.uint64), 1 << 63)],
)  # fmt: skip
def test_ids_of_no_row(ids, told):
    with pytest.raises(IndexError, match=rf"ids must be in 0\.\.23, got {told}$"):
        cq.embedding(ids, TABLE)
    ids = np.atleast_1d(ids)
    out = np.full((len(ids), 256), 7, F32)
    with pytest.raises(IndexError):
        cq.embedding(ids, TABLE, out=out)
    assert (out == 7).all()


def test_a_matrix_without_rows():
    q = cq.quantize(np.zeros((0, 64), F32), "nf4")
    assert cq.embedding([], q).shape == (0, 64)
    with pytest.raises(IndexError, match="q has no rows"):
        cq.embedding([0], q)


def test_what_are_no_ids():
    for ids in ([0.5], np.zeros(3, F32), np.zeros(0, F32), [True], np.array(["a"])):
        with pytest.raises(TypeError, match="ids must be"):
            cq.embedding(ids, TABLE)
    with pytest.raises(ValueError, match="ids does not make an array"):
        cq.embedding([[1], [1, 2]], TABLE)


def test_what_is_no_matrix():
    with pytest.raises(TypeError, match="rows of a QuantArray, got ndarray"):
        cq.embedding(IDS, TABLE.dequantize())
    with pytest.raises(TypeError, match=r"got PackedWeight; pass cuquant\.unpack\(p\)"):
        cq.embedding(IDS, cq.prepack(TABLE))
    for shape in ((64,), (2, 3, 64)):
        with pytest.raises(ValueError, match=r"a matrix \[V, D\], got shape"):
            cq.embedding([0], cq.quantize(np.zeros(shape, F32), "nf4"))


def test_an_out_that_does_not_fit():
    shape = (2, 3, 256)
    for out, message in (
        (np.zeros((3, 256), F32), "out has shape"),
        (np.zeros(shape, np.float64), "out must be float32"),
        (np.broadcast_to(F32(0), shape), "read-only"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            cq.embedding(IDS, TABLE, out=out)
    with pytest.raises(ValueError, match="but float16 is asked for"):
        cq.embedding(IDS, TABLE, dtype="float16", out=np.zeros(shape, F32))
    with pytest.raises(TypeError, match="dtype must be float32"):
        cq.embedding(IDS, TABLE, dtype="float64")
    memory = np.zeros(6 * 256, F32)
    own = memory[:12].view(np.int64).reshape(2, 3)
    with pytest.raises(ValueError, match="overlaps an input"):
        cq.embedding(own, TABLE, out=memory.reshape(shape))


# ---- on a GPU, and on what looks like one -------------------------------------------------------


@pytest.fixture(params=fake_gpu.KINDS)
def to(request, monkeypatch):
    """What moves arrays and QuantArrays to the GPU."""
    return moves(fake_gpu.use(request.param, monkeypatch))


@in_turn("name", ["nf4", "q4_k", "int8+absmax", "nf4:flat", "int4:32+permuted", "nvfp4+divisor"])
def test_rows_on_a_gpu(to, name):
    q, ids = one(name), numbers(24)
    table = to(q)
    found = cq.embedding(to(ids), table)
    assert interop.kind(found) == table.kind and interop.device(found) == table.device
    assert same_values(host(found), looked_up(q, ids))


def test_ids_of_the_host(to):
    table = to(TABLE)
    for ids in (IDS, IDS.tolist()):
        assert bits_equal(host(cq.embedding(ids, table)), TABLE.dequantize()[IDS])
    with pytest.raises(IndexError, match=r"0\.\.23"):
        cq.embedding([24], table)


def test_out_and_dtypes_on_a_gpu(to):
    table, ids, wanted = to(TABLE), to(IDS), TABLE.dequantize("bfloat16")[IDS]
    assert bits_equal(host(cq.embedding(ids, table, dtype="bfloat16")), wanted)
    base = to(np.zeros((2, 3, 512), ml_dtypes.bfloat16))
    out = base[..., ::2]
    assert cq.embedding(ids, table, out=out) is out
    assert bits_equal(host(base)[..., ::2], wanted)
    with pytest.raises(ValueError, match="out has shape"):
        cq.embedding(to(IDS[0]), table, out=out)
    with pytest.raises(TypeError, match="out must be a"):
        cq.embedding(ids, table, out=np.zeros((2, 3, 256), F32))


def test_ids_that_are_refused_on_a_gpu(to):
    with pytest.raises(TypeError, match="ids must be integers, got float32"):
        cq.embedding(to(np.zeros(3, F32)), to(TABLE))
    with pytest.raises(ValueError, match="move one to where the other is"):
        cq.embedding(to(IDS), TABLE)
