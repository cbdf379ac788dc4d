"""Odd formats: permuted columns, blocks over the flattened array, absmax in place of scales."""

import pickle
import warnings

import ml_dtypes
import numpy as np
import pytest
from in_turn import in_turn

import cuquant as cq
from cuquant.array import arranged
from cuquant.io.renaming import by_rows

RNG = np.random.default_rng(3)
X = RNG.standard_normal((6, 96)).astype(np.float32)
Y, Z = (
    RNG.standard_normal((3, 96)).astype(np.float32),
    RNG.standard_normal((3, 6)).astype(np.float32),
)
FLAT = (
    "nf4:flat", "fp4:flat128+dq", "dynamic8:flat", "linear8:flat64", "bof4s:flat", "k3:flat32",
    "k3:flat+word", "k5:flat32+planes", "int8:flat32", "int4:flat", "int3:flat32", "uint4:flat32",
    "mxfp4:flat", "fp8_e4m3:flat64", "nvfp4:flat", "int1:flat64",
)  # fmt: skip
ODD = (
    "nf4:flat",
    "nf4:flat+dq",
    "nf4:flat32",
    "int8+absmax",
    "int4:32+permuted",
    "uint3:32+permuted",
    "nvfp4+divisor",
    "nvfp4+per_matrix",
    "nvfp4+divisor+per_matrix",
)


ALL = tuple(dict.fromkeys((*FLAT, *ODD)))


def permuted(x, name, axis=-1):
    """An array whose columns are stored in a random order."""
    order = RNG.permutation(x.shape[axis]).astype(np.int32)
    stored = cq.quantize(np.take(x, order, axis), name, axis=axis)
    fmt = cq.get_format(name, permuted=True)
    return stored._with(format=fmt, components={**stored.components, "permutation": order}), stored


def made(name, x=X, axis=-1):
    plain = name.removesuffix("+permuted")
    return cq.quantize(x, name, axis=axis) if plain == name else permuted(x, plain, axis)[0]


def in_torch(q):
    torch = pytest.importorskip("torch")
    parts = {name: torch.from_numpy(np.array(part)) for name, part in q.components.items()}
    return q._with(components=parts)


# ---- what they are ------------------------------------------------------------------------------


@in_turn("name", ALL)
def test_a_format_is_its_string(name):
    fmt = cq.get_format(name)
    assert cq.get_format(str(fmt)) == fmt and not fmt.is_plain and fmt.plain.is_plain
    assert hash(fmt) != hash(fmt.plain) and fmt != fmt.plain
    assert cq.get_format(str(fmt.plain)) == fmt.plain and fmt.plain.plain is fmt.plain
    assert pickle.loads(pickle.dumps(fmt)) == fmt
    assert cq.get_format(fmt.name, **fmt.options) == fmt


def test_flat_is_the_formats_own_size():
    assert cq.get_format("nf4", block_size="flat") == cq.get_format("nf4:flat64")
    assert str(cq.get_format("nf4:flat64")) == "nf4:flat"
    assert cq.get_format("k4:flat").codec == cq.get_format("k4").codec
    assert (
        cq.get_format("k4:flat32").codec
        == cq.get_format("k4:32").codec
        != cq.get_format("k4").codec
    )


@in_turn("name", FLAT)
def test_flat_is_the_array_of_one_axis(name):
    for x in (X, X[:0], X[:, :31], X[:1, :5].astype(np.float16), np.ones((2, 3, 33), np.float32)):
        q, flat = cq.quantize(x, name), cq.quantize(x.reshape(-1), cq.get_format(name).plain)
        q.check()
        assert q.shape == x.shape and q.axes == tuple(range(x.ndim))
        for part, array in q.arrays().items():
            np.testing.assert_array_equal(array, flat.arrays()[part])
        np.testing.assert_array_equal(q.dequantize(), flat.dequantize().reshape(x.shape))
        np.testing.assert_array_equal(q.codes(), flat.codes().reshape(x.shape))
        np.testing.assert_array_equal(q.scale, flat.scale)
        assert cq.array_equal(q.reshape(-1), q.reshape(q.size))
    along = cq.quantize(X, name, axis=0)
    want = cq.quantize(np.ascontiguousarray(X.T), name)
    np.testing.assert_array_equal(along.dequantize(), want.dequantize().T)
    assert cq.array_equal(along.T, want)


def test_flat_blocks_are_bitsandbytes_own():
    """The same bytes as the function that flattens."""
    for shape in ((5, 96), (33, 49)):
        x = RNG.standard_normal(shape).astype(np.float32)
        packed, absmax = cq.functional.quantize_nf4(x)
        q = cq.quantize(x, "nf4:flat")
        np.testing.assert_array_equal(q.packed, packed)
        np.testing.assert_array_equal(q.scale, absmax)


def test_permuted_columns_are_where_they_were():
    for axis in (0, 1):
        q, stored = permuted(X, "uint4:32" if axis else "uint4:8", axis)
        order = q.arrays()["permutation"]
        put = (slice(None), order) if axis else (order,)
        values, codes = np.empty_like(X), np.empty(X.shape, np.uint8)
        values[put], codes[put] = stored.dequantize(), stored.codes()
        np.testing.assert_array_equal(q.dequantize(), values)
        np.testing.assert_array_equal(q.codes(), codes)
        np.testing.assert_array_equal(q.T.dequantize(), values.T)
        np.testing.assert_array_equal(q.scale, stored.scale)
        np.testing.assert_array_equal(q.zero_point, stored.zero_point)
    own = cq.quantize(X, "int4:32+permuted")  # columns stay where they are
    np.testing.assert_array_equal(own.dequantize(), cq.quantize(X, "int4:32").dequantize())
    np.testing.assert_array_equal(own.arrays()["permutation"], np.arange(96))


def test_absmax_is_multiplied_before_127_divides():
    x = np.concatenate([X, np.zeros((1, 96), np.float32)])
    q, plain = cq.quantize(x, "int8+absmax"), cq.quantize(x, "int8")
    np.testing.assert_array_equal(q.packed, plain.packed)
    absmax = q.arrays()["scale"]
    np.testing.assert_array_equal(absmax[:, 0], np.abs(x).max(1))
    want = (q.packed.astype(np.float32) * absmax) * np.float32(1 / 127)
    np.testing.assert_array_equal(q.dequantize(), want)
    assert (want != plain.dequantize()).any()  # the order matters
    assert not np.signbit(q.dequantize()[-1]).any()
    np.testing.assert_array_max_ulp(q.scale, plain.scale, 1)
    np.testing.assert_array_equal(q.dequantize("float16"), want.astype(np.float16))
    least = q._with(
        components={"packed": np.full((1, 2), -128, np.int8), "scale": absmax[:1]}, shape=(1, 2)
    )
    assert least.dequantize()[0, 0] == np.float32(-128) * absmax[0, 0] * np.float32(1 / 127)


def test_absmax_near_the_largest_float_stays_finite():
    top = np.finfo(np.float32).max
    x = np.array([[top, -top / 2], [np.inf, 1], [np.nan, 1]], np.float32)
    q = cq.quantize(x, "int8+absmax")
    found = q.dequantize()
    np.testing.assert_allclose(found[0], x[0], atol=top / 250)  # half a step
    np.testing.assert_array_equal(np.isnan(found[1:]), True)
    assert np.isfinite(q[:1].dequantize("float16")).all()
    with pytest.raises(ValueError, match="holds inf at flat index 2"):
        cq.quantize(x, "int8+absmax", nonfinite="raise")
    with pytest.raises(ValueError, match="takes no scale="):
        cq.quantize(X, "int8+absmax", scale=1.0)


# ---- global scales ------------------------------------------------------------------------------

EXPERTS = RNG.standard_normal((3, 8, 64)) * np.array([1, 100, 0.01])[:, None, None]
EXPERTS = EXPERTS.astype(np.float32)
GLOBAL = ("nvfp4+divisor", "nvfp4+per_matrix", "nvfp4+divisor+per_matrix", "nvfp4:8x32+per_matrix")


def decoded(q):
    """nvfp4's numbers, by what is stored."""
    parts = q.arrays()
    codes = np.stack([parts["packed"] & 15, parts["packed"] >> 4], -1).reshape(q.shape)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.where(codes & 8, -levels[codes & 7], levels[codes & 7])
    scale = parts["scale"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    world = parts["global_scale"]
    world = world[..., None, None] if world.ndim else world
    scale = scale / world if "divisor" in q.format.odd else scale * world
    return values * np.repeat(scale, q.format.block_size, -1)


@in_turn("name", GLOBAL[:3])
def test_global_scales_multiply_or_divide_in_the_owners_order(name):
    q = cq.quantize(EXPERTS, name)
    assert q.arrays()["global_scale"].shape == ((3,) if "per_matrix" in name else ())
    np.testing.assert_array_equal(q.dequantize(), decoded(q))
    rounded = cq.dequantize(q._with(format=q.format.plain, components=arranged.plain(q).components))
    assert ("per_matrix" in name) == (rounded == q.dequantize()).all()  # what products may have
    np.testing.assert_array_max_ulp(rounded, q.dequantize(), 4)
    np.testing.assert_array_equal(q.scale, np.abs(decoded(one_code(q)))[..., ::16])


def one_code(q):
    """The array with 1.0 everywhere."""
    return q._with(components={**q.components, "packed": np.full_like(q.packed, 0x22)})


@in_turn("name", GLOBAL)
def test_a_matrix_of_several_is_that_matrix_alone(name):
    q, alone = cq.quantize(EXPERTS, name), name.replace("+per_matrix", "")
    values = q.dequantize()
    for i in range(3):
        if "per_matrix" in name:
            assert cq.array_equal(q[i], cq.quantize(EXPERTS[i], alone))
        assert str(q[i].format) == alone and q[i].shape == (8, 64)
        np.testing.assert_array_equal(q[i].dequantize(), values[i])
    many = cq.quantize(EXPERTS.reshape(3, 1, 8, 64), name)
    for index in (
        np.s_[1:], [2, 0], np.s_[::-1], np.s_[..., 32:], np.s_[:0], np.s_[1, :, 32:], np.s_[:, :8],
        np.array([[0, 1], [2, 2]]),
    ):  # fmt: skip
        np.testing.assert_array_equal(q[index].dequantize(), values[index])
        assert q[index].format == q.format or q[index].ndim == 2
        q[index].check()
    np.testing.assert_array_equal(many[2].dequantize(), values[2:])
    np.testing.assert_array_equal(many[:, 0].dequantize(), values)
    assert cq.array_equal(many.reshape(3, 8, 64), q)
    if "per_matrix" in name:
        with pytest.raises(ValueError, match=r"different numbers of scales|do not divide"):
            q.reshape(24, 64)
        with pytest.raises(ValueError, match=r"take one first|slice them"):
            q[:, 3]
        with pytest.raises(ValueError, match=r"take one first|slice them"):
            q[[0, 1], 2]
    across = cq.quantize(EXPERTS.transpose(0, 2, 1), name, axis=1)
    np.testing.assert_array_equal(across.dequantize(), values.transpose(0, 2, 1))
    np.testing.assert_array_equal(across[2].dequantize(), values[2].T)


def test_global_scales_are_joined_matrix_by_matrix():
    q = cq.quantize(EXPERTS, "nvfp4+per_matrix")
    assert cq.array_equal(cq.concatenate([q[:1], q[1:]]), q)
    assert cq.array_equal(cq.concatenate([q[..., :32], q[..., 32:]], axis=2), q)
    assert cq.array_equal(cq.concatenate([q[:, :3], q[:, 3:]], axis=1), q)
    with pytest.raises(ValueError, match="different values of global_scale"):
        cq.concatenate([q, q[::-1]], axis=1)


def test_global_scales_are_given():
    for given in (2.0, np.array([1, 2, 4], np.float32)):
        q = cq.quantize(EXPERTS, "nvfp4+per_matrix", global_scale=given)
        np.testing.assert_array_equal(q.arrays()["global_scale"], np.broadcast_to(given, 3))
        d = cq.quantize(EXPERTS, "nvfp4+divisor+per_matrix", global_scale=1 / np.asarray(given))
        np.testing.assert_array_equal(d.packed, q.packed)
        np.testing.assert_array_equal(d.dequantize(), q.dequantize())
    for four in (4, np.array(4), np.array([4.0])):
        q = cq.quantize(EXPERTS, "nvfp4+divisor", global_scale=four)
        assert q.arrays()["global_scale"] == 4 and cq.error(EXPERTS, q).sqnr_db > 18
    assert cq.quantize(EXPERTS, "nvfp4+divisor", global_scale=0.5).arrays()["global_scale"] == 0.5
    with pytest.raises(ValueError, match=r"global_scale has shape \(2,\)"):
        cq.quantize(EXPERTS, "nvfp4+per_matrix", global_scale=np.ones(2))
    with pytest.raises(ValueError, match="takes no scale="):
        cq.quantize(EXPERTS, "nvfp4+per_matrix", scale=1.0, global_scale=1.0)


@in_turn("name", GLOBAL[:3])
def test_global_scales_of_odd_numbers(name):
    """Nothing, zeros, NaN, and numbers whose divisor would be infinite."""
    for shape in ((0, 4, 16), (2, 0, 16), (2, 4, 0), (16,), (0,), (5, 19)):
        q = cq.quantize(np.ones(shape, np.float32), name)
        q.check()
        np.testing.assert_array_equal(q.dequantize(), np.ones(shape))
    x = np.zeros((2, 2, 16), np.float32)
    np.testing.assert_array_equal(cq.quantize(x, name).dequantize(), x)
    x[1] = np.linspace(0, 6e-38, 16)
    np.testing.assert_allclose(cq.quantize(x, name).dequantize(), x, atol=1.1e-38)
    x[1, 0, 0] = np.nan
    found = cq.quantize(x, name).dequantize()
    assert np.isnan(found[1, 0]).all() and np.isfinite(found[0]).all()
    top = cq.quantize(np.full((1, 2, 16), np.finfo(np.float32).max), name).dequantize()
    np.testing.assert_allclose(top, np.finfo(np.float32).max, rtol=1e-6)


# ---- how they travel ----------------------------------------------------------------------------


@in_turn("name", [*ODD, "nf4:flat4096"])
def test_files_copies_and_memory_keep_them(name, tmp_path):
    for axis in (0, 1):
        q = made(name.replace(":32+p", ":8+p"), axis=axis)
        cq.save(tmp_path / "m.safetensors", {"w": q, "p": cq.prepack(q) if axis else q})
        found = cq.load(tmp_path / "m.safetensors")
        assert cq.array_equal(found["w"], q) and str(found["w"].format) == str(q.format)
        again = cq.unpack(found["p"]) if axis else found["p"]
        assert cq.array_equal(again, q)
        for other in (q.copy(), q.numpy(), q.to("cpu"), pickle.loads(pickle.dumps(q))):
            assert cq.array_equal(other, q)
        assert in_torch(q).dequantize().numpy().tobytes() == q.dequantize().tobytes()
        assert in_torch(q).codes().numpy().tobytes() == q.codes().tobytes()
        np.testing.assert_array_equal(np.asarray(in_torch(q).scale), q.scale)


@in_turn("name", ALL)
def test_out_is_overwritten(name):
    if name.endswith("+permuted"):
        name = name.replace("uint3", "int5")
    for make in (lambda q: q, in_torch):
        wanted, out = cq.quantize(X, name), cq.quantize(X[::-1], name)
        out = make(out._with(components={k: np.array(v) for k, v in out.components.items()}))
        x = X if make is not in_torch else pytest.importorskip("torch").from_numpy(X)
        assert cq.quantize(x, name, out=out) is out
        assert cq.array_equal(out.numpy(), wanted)
    values = np.empty((96, 6), np.float16).T
    assert wanted.dequantize(out=values) is values
    np.testing.assert_array_equal(values, wanted.dequantize("float16"))
    with pytest.raises(ValueError, match="out has shape"):
        wanted.dequantize(out=np.empty((6, 95), np.float32))


@in_turn("name", ALL)
def test_slices_are_right_or_refused(name):
    q = made(name)
    values, right = q.dequantize(), 0
    for index in (
        np.s_[2:], np.s_[:2], np.s_[:4], np.s_[1:4], 0, -2, np.s_[:, :32], np.s_[:, :64],
        np.s_[::-1], [0, 3], np.s_[3:2], np.s_[:], np.s_[2:4, :], np.s_[1, :32],
    ):  # fmt: skip
        try:
            part = q[index]
        except ValueError as why:
            assert "slice" in str(why) or "block boundaries" in str(why)
            continue
        part.check()
        np.testing.assert_array_equal(part.dequantize(), values[index])
        assert part.format.odd == tuple(
            w for w in q.format.odd if w != "per_matrix" or part.ndim > 2
        )
        right += 1
    assert right >= 2
    block = q.format.rule.flat
    if block and 96 % block:
        with pytest.raises(ValueError, match=f"blocks of {block} run across rows of 96"):
            q[1:]
    if q.format.permuted:
        with pytest.raises(ValueError, match="stored in another order"):
            q[:, :32]


@in_turn("name", [name for name in ALL if "nvfp4" not in name])  # of one global scale each
def test_arrays_are_joined_or_refused(name):
    q = made(name)
    parts = [q[:4], q[4:]] if not q.format.is_flat else [made(name, X[:4]), made(name, X[4:])]
    if q.format.is_flat and 4 * 96 % q.format.rule.flat:
        with pytest.raises(ValueError, match="whole blocks"):
            cq.concatenate(parts)
        return
    joined = cq.concatenate(parts)
    joined.check()
    want = np.concatenate([part.dequantize() for part in parts])
    np.testing.assert_array_equal(joined.dequantize(), want)
    if q.format.permuted or q.format.is_flat:
        with pytest.raises(ValueError, match=r"first axis|one permutation"):
            cq.concatenate([q, q], axis=1)
    if q.format.permuted:
        with pytest.raises(ValueError, match="one permutation"):
            cq.concatenate([q, made(name)])


def test_shapes_change_where_bytes_stay():
    flat = cq.quantize(X, "nf4:flat")
    np.testing.assert_array_equal(
        flat.reshape(96, 6).dequantize(), flat.dequantize().reshape(96, 6)
    )
    q = made("int4:32+permuted", X.reshape(2, 3, 96))
    np.testing.assert_array_equal(q.reshape(6, 96).dequantize(), q.dequantize().reshape(6, 96))
    with pytest.raises(ValueError, match="columns are permuted"):
        q.reshape(12, 48)
    for name in ("mxfp4:flat", "mxfp4+permuted", "nf4:flat", "nvfp4+divisor"):
        with pytest.raises(ValueError, match="no ggml block"):
            cq.quantize(X, name).to_blocks()


def test_rows_in_another_order_keep_the_columns():
    q, rows = made("int4:32+permuted"), np.array([3, 1, 2, 0, 5, 4])
    np.testing.assert_array_equal(by_rows(q, rows).dequantize(), q.dequantize()[rows])


# ---- products -----------------------------------------------------------------------------------


def close(found, want):
    """Sums of 96 products of float32, in another order."""
    np.testing.assert_allclose(np.asarray(found), want, atol=2e-4, rtol=2e-5)


@in_turn("name", ODD)
def test_products_are_those_of_the_values(name):
    torch = pytest.importorskip("torch")
    xq = cq.quantize(Y, "int8")
    for axis in (0, 1):
        q = made(name.replace(":32+p", ":8+p"), axis=axis)
        d = q.dequantize()
        for w, y, z in (
            (q, Y, Z),
            (in_torch(q), torch.from_numpy(Y), torch.from_numpy(Z)),
            (in_torch(q), Y, Z),
        ):
            close(cq.linear(y, w), Y @ d.T)
            close(y @ w.T, Y @ d.T)
            close(z @ w, Z @ d)
            close(w @ y.T, d @ Y.T)
            close(cq.matmul(w, y[0]), d @ Y[0])
            close(cq.matmul(z[0], w), Z[0] @ d)
            close(cq.linear(xq, w), xq.dequantize() @ d.T)
            close(cq.matmul(w, xq.T), d @ xq.dequantize().T)
            close(cq.matmul(w, q.T), d @ d.T)
            gate = Y @ d.T
            close(cq.swiglu(y, w, w), gate / (1 + np.exp(-gate)) * gate)
            assert type(cq.swiglu(y, w, w)) is type(y)
            if axis:
                p = cq.prepack(w)
                assert cq.array_equal(cq.unpack(p), w)
                close(cq.linear(y, p), Y @ d.T)
        out, bias = np.empty((3, 6), np.float16), np.ones(6, np.float32)
        kept = {"activation": "relu", "residual": np.full((3, 6), 2, np.float32), "out": out}
        assert cq.linear(Y, q, bias, **kept) is out
        np.testing.assert_allclose(out, np.maximum(Y @ d.T + 1, 0) + 2, rtol=1e-3)
        assert cq.linear(Y.astype(np.float16), q).dtype == np.float16
        with pytest.raises(ValueError, match=r"x has shape \(3, 95\)"):
            cq.linear(Y[:, :95], q)


@in_turn("name", ODD)
def test_experts_are_right(name):
    x = RNG.standard_normal((3, 4, 96)).astype(np.float32)
    q, experts = made(name, x), np.array([2, 0, 2])
    want = np.einsum("tk,tnk->tn", Y, q.dequantize()[experts])
    for w in (q, cq.prepack(q)):
        close(cq.grouped_linear(Y, w, experts), want)
    close(np.matmul(Y, q.transpose(0, 2, 1)), np.matmul(Y, q.dequantize().transpose(0, 2, 1)))


# ---- damage -------------------------------------------------------------------------------------


@in_turn(
    "change",
    [(0, -1, "-1"), (0, 96, "96"), (0, 2**31 - 1, "columns are 0..95"), (1, None, "twice")],
)
def test_a_permutation_that_is_none_is_refused(change, tmp_path):
    place, value, why = change
    q = made("int4:32+permuted")
    order = np.array(q.components["permutation"])
    order[place] = order[0] if value is None else value
    bad = q._with(components={**q.components, "permutation": order})
    for use in (
        bad.dequantize,
        bad.check,
        bad.codes,
        lambda: cq.linear(Y, bad),
        lambda: cq.prepack(bad),
    ):
        with pytest.raises(cq.FormatError, match=why):
            use()
    cq.save(tmp_path / "good", {"w": q})
    data = (tmp_path / "good").read_bytes()
    (tmp_path / "bad").write_bytes(
        data.replace(q.components["permutation"].tobytes(), order.tobytes())
    )
    with pytest.raises(cq.FormatError, match=why):
        cq.load(tmp_path / "bad")


def test_a_scale_that_saturates_is_told_once():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cq.quantize(np.full((2, 96), 1e9, np.float32), "int4:flat64")
    assert len(told) == 1 and issubclass(told[0].category, RuntimeWarning)
