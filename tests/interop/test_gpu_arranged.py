"""Odd formats on a GPU, or on what looks like one: the bytes of the host, and its products."""

import fake_gpu
import numpy as np
import pytest
from gpu_products import host, to_gpu
from oracle import bits_equal

import cuquant as cq
from cuquant.ops.matmul import prepared

F32 = np.float32
RNG = np.random.default_rng(9)
X = RNG.standard_normal((16, 96)).astype(F32)
Y, Z = (RNG.standard_normal((3, n)).astype(np.float16).astype(F32) for n in (96, 16))
NAMES = (
    "nf4:flat", "nf4:flat+dq", "nf4:flat32", "int8+absmax", "int4:32+permuted", "nvfp4+divisor",
    "nvfp4+per_matrix", "nvfp4+divisor+per_matrix",
)  # fmt: skip


@pytest.fixture(params=fake_gpu.KINDS)
def to(request, monkeypatch):
    return to_gpu(request.param, monkeypatch)


def made(name, axis, x=X):
    """On the host; permuted columns are in a random order."""
    name = name.replace(":32+p", ":16+p")
    q = cq.quantize(x, name, axis=axis)
    if not q.format.permuted:
        return q
    order = RNG.permutation(x.shape[axis]).astype(np.int32)
    return q._with(components={**q.components, "permutation": order})


def moved(q, to):
    return q._with(components={name: to(np.array(part)) for name, part in q.components.items()})


@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_values_are_the_hosts(name, to):
    for axis in (0, 1):
        wanted = cq.quantize(X, name.replace(":32+p", ":16+p"), axis=axis)
        found = cq.quantize(to(X), wanted.format, axis=axis)
        assert cq.array_equal(found, wanted)
        out = moved(cq.quantize(-X, wanted.format, axis=axis), to)
        assert cq.quantize(to(X), wanted.format, axis=axis, out=out) is out
        assert cq.array_equal(out, wanted)
        q = made(name, axis)
        on_gpu = moved(q, to)
        for dtype in ("float32", "float16"):
            assert bits_equal(host(on_gpu.dequantize(dtype)), q.dequantize(dtype))
        target = to(np.zeros(X.shape, np.float16))
        assert on_gpu.dequantize(out=target) is target
        assert bits_equal(host(target), q.dequantize("float16"))
        assert bits_equal(host(on_gpu.codes()), q.codes())
        np.testing.assert_array_max_ulp(host(on_gpu.scale), q.scale, 1)
        assert cq.array_equal(on_gpu.copy(), q)
        if axis:
            assert bits_equal(host(on_gpu[8:].dequantize()), q.dequantize()[8:])
            assert cq.array_equal(cq.prepack(on_gpu), cq.prepack(q))
            assert cq.array_equal(cq.unpack(cq.prepack(on_gpu)), q)


def close(found, a, b):
    """a @ b: sums of float32 in another order; of float16, three roundings to 2^-11 at most."""
    values = host(found)
    step = 2.0**-9 if values.dtype == np.float16 else 1e-5
    gap = np.abs(values.astype(F32) - a @ b)
    assert (gap <= step * (np.abs(a) @ np.abs(b))).all()


@pytest.mark.parametrize("name", NAMES)
def test_products_are_the_hosts(name, to):
    bias, more = np.ones(16, F32), np.full((3, 16), 2, F32)
    for axis in (0, 1):
        q = made(name, axis)
        d, w = q.dequantize(), moved(q, to)
        for dtype in (F32, np.float16):
            y, z = to(Y.astype(dtype)), to(Z.astype(dtype))
            for _ in range(2):  # again, by what was kept
                close(cq.linear(y, w), Y, d.T)
            close(y @ w.T, Y, d.T)
            close(z @ w, Z, d)
            close(w @ y.T, d, Y.T)
            assert cq.linear(y, w).dtype == y.dtype
        out = to(np.zeros((3, 16), F32))
        kept = {"activation": "relu", "residual": to(more), "out": out}
        assert cq.linear(to(Y), w, to(bias), **kept) is out
        gate = Y @ d.T
        np.testing.assert_allclose(host(out), np.maximum(gate + 1, 0) + 2, atol=1e-3)
        gated = host(cq.swiglu(to(Y), w, w))
        np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * gate, atol=1e-3, rtol=1e-4)
        close(cq.linear(cq.quantize(to(Y), "int8"), w), cq.quantize(Y, "int8").dequantize(), d.T)
        if axis:
            close(cq.linear(to(Y), cq.prepack(w)), Y, d.T)
            close(cq.linear(to(Y.astype(np.float16)), cq.prepack(w)), Y, d.T)
        if q.format.odd == ("divisor",):  # which may be written to, and a product is found again
            first = cq.linear(to(Y), w)
            known = {ids for ids in prepared._known._entries if id(w.components["packed"]) in ids}
            w.components["global_scale"][...] *= 2
            np.testing.assert_allclose(host(cq.linear(to(Y), w)), host(first) / 2, rtol=1e-6)
            assert known and known <= prepared._known._entries.keys()
            w.components["global_scale"][...] *= 0.5
    x = RNG.standard_normal((3, 16, 96)).astype(F32)
    q, experts = made(name, 2, x), np.array([2, 0, 2])
    want = np.einsum("tk,tnk->tn", Y, q.dequantize()[experts])
    for w in (moved(q, to), cq.prepack(moved(q, to))):
        found = host(cq.grouped_linear(to(Y), w, experts))
        np.testing.assert_allclose(found, want, atol=1e-3)


@pytest.mark.parametrize("name", ["int8+absmax", "int4:32+permuted", "nvfp4+divisor"])
def test_what_is_overwritten_in_place_counts_in_the_next_product(name, to):
    """Scales, divisor and permutation are read anew by each product, also by a kept plan."""
    q = made(name, 1)
    part = "global_scale" if "divisor" in name else "scale"
    twice = np.asarray(q.components[part] * q.components[part].dtype.type(2))
    other = q._with(components={**q.components, part: twice})
    for lay in (lambda array: array, cq.prepack):
        w, changed, y = lay(moved(q, to)), lay(moved(other, to)), to(Y)
        for _ in range(2):
            close(cq.linear(y, w), Y, q.dequantize().T)
        w.components[part][...] = changed.components[part]
        for _ in range(2):
            close(cq.linear(y, w), Y, other.dequantize().T)
        if q.format.permuted:
            order = RNG.permutation(X.shape[1]).astype(np.int32)
            w.components["permutation"][...] = to(order)
            turned = other._with(components={**other.components, "permutation": order})
            close(cq.linear(y, w), Y, turned.dequantize().T)
