"""QuantArray: members, copies, joins, transposes, ggml blocks."""

import copy
import pickle
import weakref

import numpy as np
import pytest
from oracle import bits_equal
from quant_arrays import BLOCKED, NAMES, make

import cuquant as cq


@pytest.mark.parametrize("name", NAMES)
def test_members(name):
    q = make(name)
    assert (q.shape, q.ndim, q.size, len(q)) == ((4, 512), 2, 2048, 4)
    assert q.dtype == np.float32 and q.device == "cpu" and q.kind == "numpy" and q.axis == 1
    assert q.bits_per_element == q.nbytes * 8 / 2048
    assert repr(q).startswith(f"QuantArray({name}, shape=(4, 512), dtype=float32")
    assert q.codes().shape == (4, 512) and q.codes().dtype == q.format.codec.code_dtype
    if q.format.scale is not None:
        assert q.scale.shape == q.format.scale.shape((4, 512))
        assert q.scale.dtype in (np.float32, np.float16)
    else:
        assert q.scale is None
    assert (q.zero_point is not None) == name.startswith("uint")


@pytest.mark.parametrize("name", NAMES)
def test_values_follow_from_codes_and_scales(name):
    """x' = decode(codes) * scale + minimum, from the public members alone."""
    q = make(name)
    scale = np.float32(1) if q.scale is None else q.scale.astype(np.float32)
    if q.scale is not None:
        scale = np.repeat(scale, 512 // q.scale.shape[-1], axis=-1)
    values = q.format.codec.decode(q.codes())
    if q.zero_point is not None:
        values = values - np.repeat(q.zero_point, 512 // q.scale.shape[-1], axis=-1).astype(
            np.float32
        )
    values = values * scale
    if q.minimum is not None:
        values = values + np.repeat(q.minimum, 512 // q.minimum.shape[-1], axis=-1)
    assert (values == q.dequantize()).all()


@pytest.mark.parametrize("name", NAMES)
def test_packed_of_every_format_unpacks_to_its_codes(name):
    q = make(name)
    assert (q.format.row_packing.unpack(q.packed, 512).view(q.codes().dtype) == q.codes()).all()


def test_it_is_frozen_and_no_array():
    q = make("nf4")
    with pytest.raises(AttributeError):
        q.shape = (1,)
    for convert in (np.asarray, np.array):
        with pytest.raises(TypeError, match="dequantize"):
            convert(q)
    assert q == q


@pytest.mark.parametrize("name", ["nf4", "q4_k", "nvfp4", "k3"])
def test_copies_and_pickles(name):
    q = make(name)
    for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), q.numpy(), q.to("cpu")):
        assert other.format == q.format
        for part, value in q.arrays().items():
            assert bits_equal(other.arrays()[part], value)


def test_devices():
    q = make("nf4")
    with pytest.raises(ValueError, match="tpu"):
        q.to("tpu")
    for device in ("cuda", "cuda:1"):
        with pytest.raises(cq.BackendUnavailable, match=r"pip install|cuquant doctor"):
            q.to(device)


# ---- transposes -----------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ["nf4", "q4_0", "nvfp4", "uint4"])
def test_transpose(name, axis):
    q = make(name, (32, 64, 96), axis=axis)
    t = q.T
    assert t.shape == (96, 64, 32) and t.axis == 2 - axis
    assert bits_equal(np.ascontiguousarray(t.dequantize()), np.ascontiguousarray(q.dequantize().T))
    assert bits_equal(np.ascontiguousarray(t.codes()), np.ascontiguousarray(q.codes().T))
    assert (
        t.T.axes == q.axes
        and t.arrays()[next(iter(t.arrays()))] is q.arrays()[next(iter(t.arrays()))]
    )


def test_transpose_of_two_dimensional_and_double_blocks():
    for options in ({"block_size": (8, 16)}, {"double_quant": True}):
        q = make("nf4", (3, 32, 64), **options)
        assert bits_equal(
            np.ascontiguousarray(q.T.dequantize()), np.ascontiguousarray(q.dequantize().T)
        )


# ---- joins ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_concatenate_rows_and_columns(name):
    q = make(name, (4, 1024))
    if q.format.block_size != "row":
        joined = cq.concatenate([q[:, :256], q[:, 256:768], q[:, 768:]], axis=1)
        for key, value in q.arrays().items():
            assert bits_equal(np.ascontiguousarray(joined.arrays()[key]), value)
    joined = cq.concatenate([q[:1], q[1:3], q[3:]], axis=-2)
    for key, value in q.arrays().items():
        assert bits_equal(joined.arrays()[key], value)


def test_concatenate_refuses_what_it_would_have_to_requantize():
    a, b = make("nf4", (2, 64)), make("nf4", (2, 100))
    assert cq.concatenate([a, b], axis=1).shape == (2, 164)
    for arrays, axis in [
        ([b, a], 1),
        ([a, b], 0),
        ([a, make("fp4", (2, 64))], 0),
        ([], 0),
        ([a, a], 2),
        ([a, a.T], 0),
        ([make("int8", (2, 64)), make("int8", (2, 32))], 1),
    ]:
        with pytest.raises(ValueError):
            cq.concatenate(arrays, axis)
    with pytest.raises(ValueError, match="global_scale"):
        cq.concatenate([make("nvfp4", (2, 64)), make("nvfp4", (2, 64), global_scale=1.0)])
    with pytest.raises(ValueError, match="scale"):
        cq.concatenate(
            [make("int8", (2, 64), block_size="tensor"), make("int8", (3, 64), block_size="tensor")]
        )
    with pytest.raises(TypeError, match="QuantArrays"):
        cq.concatenate([a, a.dequantize()])


# ---- ggml's bytes ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*BLOCKED, "mxfp4", "nvfp4"])
def test_blocks_round_trip(name):
    q = make(name, (3, 2, 512), **({"global_scale": 1.0} if name == "nvfp4" else {}))
    blocks = q.to_blocks()
    size = {"mxfp4": (32, 17), "nvfp4": (64, 36)}.get(name) or (
        q.format.packing.elements,
        q.format.packing.nbytes,
    )
    assert blocks.dtype == np.uint8 and blocks.shape == (3, 2, 512 // size[0], size[1])
    for given in (blocks, blocks.reshape(3, 2, -1), blocks[:, :, ::-1][:, :, ::-1]):
        again = cq.QuantArray.from_blocks(given, name, (3, 2, 512))
        for key, value in q.arrays().items():
            assert bits_equal(again.arrays()[key], value)


def test_nvfp4_scales_of_ggml_have_no_sign():
    blocks = make("nvfp4", (2, 64), global_scale=1.0).to_blocks()
    signed = blocks.copy()
    signed[..., :4] |= 0x80
    wanted, found = (cq.QuantArray.from_blocks(b, "nvfp4", (2, 64)) for b in (blocks, signed))
    assert bits_equal(found.dequantize(), wanted.dequantize())


@pytest.mark.parametrize("name", [*BLOCKED, "mxfp4", "nvfp4"])
def test_empty_blocks(name):
    q = make(name, (0, 512), **({"global_scale": 1.0} if name == "nvfp4" else {}))
    assert cq.QuantArray.from_blocks(q.to_blocks(), name, (0, 512)).dequantize().shape == (0, 512)


def test_to_blocks_of_other_formats():
    for q, message in [
        (make("nf4"), "no ggml block"),
        (make("mxfp4", (2, 40)), "multiple of 32"),
        (make("nvfp4"), "global_scale=1"),
        (make("mxfp4", block_size=64), "block"),
        (make("nvfp4", (2, 96), global_scale=1.0), "multiple of 64"),
    ]:
        with pytest.raises(ValueError, match=message):
            q.to_blocks()


def test_from_blocks_checks_its_bytes():
    blocks = make("q4_0").to_blocks()
    for given, name, shape, error in [
        (blocks[..., :-1], "q4_0", (4, 512), cq.FormatError),
        (blocks, "q4_0", (4, 500), cq.FormatError),
        (blocks, "q4_0", (4, 544), cq.FormatError),
        (blocks, "q4_0", (), cq.FormatError),
        (blocks.view(np.int8), "q4_0", (4, 512), cq.FormatError),
        (blocks, "nf4", (4, 512), ValueError),
        ("q4_0", "q4_0", (4, 512), TypeError),
    ]:
        with pytest.raises(error):
            cq.QuantArray.from_blocks(given, name, shape)


def test_dtype_may_come_first_and_a_packed_weight_decodes():
    q = cq.quantize(np.random.default_rng(0).standard_normal((24, 128)).astype(np.float32))
    wanted = q.dequantize(dtype="float16")
    p = cq.prepack(q)
    for found in (q.dequantize("float16"), cq.dequantize(q, "float16"), p.dequantize("float16")):
        assert bits_equal(found, wanted)
    assert bits_equal(p.dequantize(), q.dequantize())
    out = np.empty((24, 128), np.float16)
    assert p.dequantize(out=out) is out and bits_equal(out, wanted)
    with pytest.raises(TypeError, match=r"p\.dequantize\(\)"):
        cq.dequantize(p)


# ---- what once went wrong -------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))])
def test_a_copy_sees_what_is_written_to_it(duplicate):
    q = make("nf4")
    q.dequantize()
    other = duplicate(q)
    x = np.full((4, 512), 3.0, np.float32)
    cq.quantize(x, "nf4", out=other)
    assert (other.dequantize() == 3).all() and not (q.dequantize() == 3).all()


@pytest.mark.parametrize(
    ("name", "options"), [("nvfp4", {}), ("int8", {"block_size": "tensor"}), ("nf4", {})]
)
def test_writing_to_a_slice_or_a_join_leaves_the_others(name, options):
    a = make(name, **options)
    before = a.dequantize()
    for part in (a[:2], a[[0, 1]], cq.concatenate([a[:1], a[1:2]])):
        for value in part.components.values():
            value[...] = 1
    assert bits_equal(a.dequantize(), before)


def test_index_arrays_on_another_axis_never_reorder():
    q = make("nf4", (4, 3, 5, 64), axis=1)
    values = q.dequantize()
    assert bits_equal(np.ascontiguousarray(q[:, :, [1, 2]].dequantize()), values[:, :, [1, 2]])
    for index in [(0, slice(None), [1, 2]), (0, ..., [3, 1]), ([[0, 1], [2, 3]],)]:
        with pytest.raises(IndexError, match="two steps"):
            q[index]


def test_nan_scales_are_equal_to_themselves():
    x = np.ones((4, 64), np.float32)
    x[0, 0] = np.nan
    q = cq.quantize(x, "int8", block_size="tensor")
    assert np.isnan(cq.concatenate([q, q]).dequantize()).all()


def test_slices_and_joins_start_on_256_bytes():
    q = make("k3", (8, 512))
    for part in (q[1:3], q[3], q[:, 64:128], cq.concatenate([q[1:2], q])):
        assert all(a.ctypes.data % 256 == 0 for a in part.arrays().values())


def test_an_empty_list_takes_no_rows():
    assert make("nf4")[[]].shape == (0, 512)


# ---- as NumPy's arrays --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_arrays_are_read_only_and_out_still_writes(name):
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    q = cq.quantize(x, name)
    parts = [*q.arrays().values(), *cq.prepack(q).arrays().values()]
    parts.append(q.to_blocks() if q.format.is_blocks else q.packed)
    parts += [part for part in (q.zero_point,) if part is not None]
    if q.format.scale_is_plain and not q.format.is_blocks:
        parts.append(q.scale)
    for part in parts:
        assert not part.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            part[...] = 0
    other = cq.quantize(-x, name)
    assert cq.quantize(-x, name, out=q) is q and cq.array_equal(q, other)
    for again in (cq.unpack(cq.prepack(q)), q.copy(), q[0:4], cq.concatenate([q]), q.numpy()):
        assert cq.quantize(x, name, out=again) is again


def test_plain_functions_give_arrays_that_can_be_written():
    x = np.ones((2, 64), np.float32)
    made = [
        *cq.functional.quantize_nf4(x),
        *cq.functional.quantize_kbit(x, 3),
        *cq.functional.quantize_tensor(x),
        *cq.functional.dynamic_quantize(x),
        cq.functional.quantize_q4_0(x),
        cq.functional.quantize_mxfp4(x),
    ]
    assert all(part.flags.writeable for part in made)


@pytest.mark.parametrize("name", NAMES)
def test_array_equal_compares_format_and_bytes(name):
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    q = cq.quantize(x, name)
    assert cq.array_equal(q, cq.quantize(x, name)) and cq.array_equal(q, q.copy())
    assert cq.array_equal(cq.prepack(q), cq.prepack(q.copy()))
    assert cq.array_equal(q, q.astype("float16")), "dtype is what dequantize gives, no byte"
    unlike = [cq.quantize(-x, name), q[0:3], q.T, q.reshape(2, 2, 256), cq.prepack(q)]
    unlike.append(cq.quantize(x, "k5+planes"))
    assert not any(cq.array_equal(q, other) or cq.array_equal(other, q) for other in unlike)
    changed = q.copy()
    part = next(iter(changed.components.values()))
    part.view(np.uint8)[..., -1] ^= 1
    assert not cq.array_equal(q, changed)


def test_array_equal_takes_quantized_arrays_of_every_library():
    x = np.full((2, 64), np.nan, np.float32)
    assert cq.array_equal(cq.quantize(x), cq.quantize(x)), "bytes: a NaN equals itself"
    torch = pytest.importorskip("torch")
    assert cq.array_equal(cq.quantize(torch.tensor(x)), cq.quantize(x))
    for a, b in ((x, cq.quantize(x)), (cq.quantize(x), x), (None, None)):
        with pytest.raises(TypeError, match=r"np\.array_equal"):
            cq.array_equal(a, b)


def test_comparing_by_operator_names_array_equal():
    x = np.ones((2, 64), np.float32)
    q, r = cq.quantize(x), cq.quantize(x)
    p = cq.prepack(q)
    for compare in (
        lambda: q == r,
        lambda: q != r,
        lambda: p == cq.prepack(r),
        lambda: q == p,
        lambda: q == x,
        lambda: x == q,
        lambda: np.equal(q, r),
        lambda: r in [q],
    ):
        with pytest.raises(TypeError, match=r"cuquant\.array_equal"):
            compare()
    assert q == q and q != None and q != "nf4"  # noqa: E711
    assert {q: 1, r: 2, p: 3}[r] == 2 and q in [q] and len({q, r, p, q}) == 3
    kept = weakref.WeakKeyDictionary({q: 1})
    assert kept[q] == 1 and r not in kept


def test_numpys_matmul_is_ours_and_other_functions_are_refused_by_name():
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((3, 128), (8, 128)))
    q = cq.quantize(w)
    wanted = cq.matmul(x, q.T)
    assert bits_equal(np.matmul(x, q.T), wanted) and bits_equal(x @ q.T, wanted)
    assert bits_equal(np.matmul(q, x.T), q @ x.T)
    out = np.empty((3, 8), np.float32)
    assert np.matmul(x, q.T, out=out) is out and bits_equal(out, wanted)
    assert np.matmul(x, q.T, dtype=np.float16).dtype == np.float16
    with pytest.raises(TypeError, match="casting="):
        np.matmul(x, q.T, casting="no")
    for name, call in {
        "add": lambda: x + q[0:3],
        "multiply": lambda: np.float32(2) * q,
        "exp": lambda: np.exp(q),
        "add.reduce": lambda: np.add.reduce(q),
        "maximum.outer": lambda: np.maximum.outer(q, q),
    }.items():
        with pytest.raises(TypeError, match=rf"np\.{name} does not take a QuantArray.*dequantize"):
            call()
    for call in (lambda: x @ cq.prepack(q), lambda: np.matmul(x, cq.prepack(q))):
        with pytest.raises(TypeError, match=r"cuquant\.linear\(x, p\)"):
            call()
    for call in (np.array_equal, np.array_equiv):  # they answer False where an array is refused
        for pair in ((q, q), (x, q), (cq.prepack(q), x)):
            with pytest.raises(TypeError, match=rf"np\.{call.__name__} .*cuquant\.array_equal"):
                call(*pair)
    assert np.shape(q) == q.shape and np.transpose(q).shape == q.T.shape
    # CuPy asks the instance, and leaves `cupy_array @ q` to q where this is None.
    assert q.__array_ufunc__ is None
    torch = pytest.importorskip("torch")
    t, qt = torch.tensor(x), cq.quantize(torch.tensor(w))
    assert torch.equal(t @ qt.T, cq.matmul(t, qt.T))


@pytest.mark.parametrize("name", NAMES)
def test_copies_types_and_transposes(name):
    x = np.random.default_rng(0).standard_normal((2, 4, 256)).astype(np.float32)
    q = cq.quantize(x, name)
    copied = q.copy()
    assert cq.array_equal(copied, q)
    for part, other in zip(copied.arrays().values(), q.arrays().values(), strict=True):
        assert not np.shares_memory(part, other) and part.ctypes.data % 256 == 0
    half = q.astype("float16")
    assert half.dtype == np.float16 and bits_equal(half.dequantize(), q.dequantize("float16"))
    for axes in ((), ((2, 0, 1),), (0, 2, 1), (-1, 0, 1), (None,)):
        found = q.transpose(*axes)
        assert found.shape == x.transpose(*axes).shape
        assert bits_equal(found.dequantize(), q.dequantize().transpose(*axes).copy())
    for axes in ((0, 1), (0, 0, 1), (0, 1, 3), (0, 1, 2, 3)):
        with pytest.raises(ValueError, match="each of the 3 axes once"):
            q.transpose(*axes)
    with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
        q.astype("int8")


SHAPES = [(24, 512), (2, 2, 6, 512), (4, 6, 512), (-1, 512), (6, -1, 512), (1, 24, 512)]
SHAPES += [(4, 3072), (12288,), (4, 12, 256), (4, 6, 16, 32), (4, 6, 64, 8)]


@pytest.mark.parametrize("name", [*NAMES, "nf4+dq", "k3+word", "k5+planes", "int8:tensor"])
def test_reshape_keeps_every_value_or_says_why_not(name):
    x = np.random.default_rng(0).standard_normal((4, 6, 512)).astype(np.float32)
    q = cq.quantize(x, name)
    for shape in SHAPES:
        try:
            found = q.reshape(shape)
        except ValueError as error:
            assert shape[-1] != 512, f"rows can always be regrouped: {error}"
            continue
        assert found.shape == x.reshape(shape).shape and found.nbytes == q.nbytes
        found.check()
        assert bits_equal(found.dequantize(), q.dequantize().reshape(shape))
        assert bits_equal(found.reshape(4, 6, 512).dequantize(), q.dequantize())
    assert q.reshape(24, 512).shape == q.reshape([24, 512]).shape == (24, 512)


@pytest.mark.parametrize("shape", [(4, 12, 256), (4, 3072), (12288,), (4, 6, 8, 64)])
def test_blocks_that_are_whole_reshape(shape):
    q = cq.quantize(np.random.default_rng(0).standard_normal((4, 6, 512)).astype(np.float32))
    assert q.reshape(shape).shape == shape


@pytest.mark.parametrize(
    ("name", "shape", "wanted", "message"),
    [
        ("nf4", (4, 128), (16, 32), "blocks of 64"),
        ("nf4", (4, 96), (2, 192), "blocks of 64"),
        ("int8", (4, 128), (8, 64), "a row has one scale"),
        ("k3:8+word", (4, 24), (2, 48), "byte or word"),
        ("int3:8", (4, 8), (1, 32), "byte or word"),
        ("fp8_e4m3:4x8", (8, 16), (4, 32), "blocks hold 4 rows"),
        ("fp8_e4m3:4x8", (2, 6, 16), (3, 4, 16), "blocks of 4 rows"),
        ("q4_0", (4, 64), (16, 16), "multiple of 32"),
        ("nf4", (4, 128), (5, 128), "number of elements"),
        ("nf4", (4, 128), (-1, -1), "number of elements"),
        ("nf4", (4, 128), (-1, 100), "number of elements"),
        ("nf4", (4, 128), (-4, -128), "number of elements"),
        ("nf4", (0, 128), (-1, 0), "number of elements"),
    ],
)
def test_reshapes_that_are_refused(name, shape, wanted, message):
    q = cq.quantize(np.ones(shape, np.float32), name)
    with pytest.raises(ValueError, match=message):
        q.reshape(wanted)


def test_a_transposed_array_is_not_reshaped():
    q = cq.quantize(np.ones((4, 128), np.float32), "nf4")
    assert q.T.reshape(128, 4).shape == (128, 4)
    with pytest.raises(ValueError, match="before it is transposed"):
        q.T.reshape(512)


def test_blocks_of_rows_reshape_where_they_are_whole():
    x = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)
    q = cq.quantize(x, "fp8_e4m3:4x8")
    for shape in ((16, 16), (4, 4, 16), (1, 2, 8, 16)):
        assert bits_equal(q.reshape(shape).dequantize(), q.dequantize().reshape(shape))


def test_torchs_components_are_tensors_still():
    torch = pytest.importorskip("torch")
    q = cq.quantize(torch.ones(4, 128), "nf4")
    for made in (q.copy(), q.astype(torch.float16), q.reshape(2, 2, 128), q.transpose(1, 0)):
        assert made.kind == "torch" and all(torch.is_tensor(p) for p in made.arrays().values())
    assert q.astype(torch.float16).dequantize().dtype == torch.float16
    q.packed[0, 0] = 3  # torch has no read-only tensors
