"""Products on a GPU that were made before: they find their plans, and cost the host little."""

import gc
import sys
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import fake_gpu
import numpy as np
import pytest
from emulator.cublas import Library
from fragment_products import Expected
from gpu_products import F32, check, host, to_gpu
from oracle import DTYPES, bits_equal
from products import normal, values, weight
from samples import sampled

import cuquant as cq
from cuquant.gpu import arrays as backends
from cuquant.gpu.cublas import Cublas
from cuquant.ops.matmul import choose as rule
from cuquant.ops.matmul import prepared as repeated
from cuquant.ops.matmul import unpacked
from cuquant.ops.remember import Remembered


@pytest.fixture(params=fake_gpu.KINDS)
def to(request, monkeypatch):
    return to_gpu(request.param, monkeypatch)


@pytest.fixture
def fake(request) -> bool:
    return request.node.callspec.params["to"].startswith("fake")


@pytest.fixture
def plans(monkeypatch):
    """The plans that a test makes, and whether the slow way was gone."""
    monkeypatch.setattr(repeated, "_known", Remembered())
    slow = []
    prepare = cq.ops.matmul.on_gpu.linear
    monkeypatch.setattr(cq.ops.matmul.on_gpu, "linear", lambda *a: slow.append(1) or prepare(*a))
    return slow


def test_a_repeated_call_finds_its_plan(to, plans):
    """With other arrays of the same kind; and it gives the same bits."""
    q, other = to(weight("int4", (16, 64))), to(weight("nf4", (16, 64)))
    xs = [to(normal((2, 64), "float16", seed)) for seed in range(3)]
    bias, residual = to(normal((16,))), to(normal((2, 16)))
    calls = [
        lambda x, **o: cq.linear(x, q, **o),
        lambda x, **o: cq.linear(x, q, bias, activation="gelu", **o),
        lambda x, **o: cq.linear(x, q, residual=residual, **o),
        lambda x, **o: cq.linear(x, q, out_dtype="float16", **o),
        lambda x, **o: cq.matmul(x, q.T, **o),
        lambda x, **o: cq.swiglu(x, other, q, **o),
        lambda x, **o: cq.linear(x, cq.QuantArray(q.format, q.shape, q.dtype, q.arrays(), q.axes)),
    ]
    for call in calls:
        wanted = [host(call(x)) for x in xs]
        del plans[:]
        assert all(bits_equal(host(call(x)), want) for x, want in zip(xs, wanted, strict=True))
        out = to(np.zeros((2, 16), np.float16))
        assert not plans, "the plan was not found"
        for _ in range(2):
            found = call(xs[1], out=out) if call is not calls[-1] else call(xs[1])
            assert bits_equal(host(found), wanted[1])
        assert len(plans) <= 1


def test_what_differs_has_a_plan_of_its_own(to, plans):
    """A square weight, whose transpose is another matrix; rows; dtypes; alignment; strides."""
    square, x = weight("int4", (64, 64)), normal((4, 64))
    q, there = to(square), to(x)
    for _ in range(2):
        check(cq.linear(there, q), x, square, there)
        y = host(cq.matmul(there, q))
        assert np.allclose(y, values(x) @ values(square), atol=1e-3)
        check(cq.matmul(there, q.T), x, square, there)
        for dtype in DTYPES:
            own = x.astype(DTYPES[dtype])
            check(cq.linear(to(own), q), own, square, there)
        check(cq.linear(there[1:3], q), x[1:3], square, there)
        check(cq.linear(there[::2], q), x[::2], square, there)
        crooked = to(np.concatenate([[0], x.ravel()]).astype(F32))[1:].reshape(4, 64)
        check(cq.linear(crooked, q), x, square, there)
        assert host(cq.linear(there, q, activation="relu")).min() == 0


def test_a_weight_that_was_overwritten_or_replaced(to):
    """Plans look at memory, not at what was there."""
    first, second = weight("int4", (16, 64)), cq.quantize(normal((16, 64), seed=9), "int4")
    q, x = to(first), normal((2, 64))
    there = to(x)
    for _ in range(2):
        check(cq.linear(there, q), x, first, there)
    cq.quantize(to(second.dequantize()), "int4", out=q)
    check(cq.linear(there, q), x, q.numpy(), there)
    mixed = cq.QuantArray(
        q.format, q.shape, q.dtype, {**q.arrays(), "scale": to(second.scale)}, q.axes
    )
    wanted = mixed.numpy()
    for _ in range(2):
        check(cq.linear(there, mixed), x, wanted, there)
        check(cq.linear(there, q), x, q.numpy(), there)


def _overwrite(p, other, data=False):
    for name, part in p.arrays().items():
        new = other.arrays()[name]
        if hasattr(part, "copy_"):
            (part.data if data else part).copy_(new)
        else:
            part[...] = new


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["int4", "q4_0", "nf4"])
def test_a_prepacked_weight_that_was_overwritten(name, dtype, to):
    """Also where its rows are unpacked for a kernel: each product fills them anew."""
    first, second = (cq.quantize(normal((16, 64), seed=s), name) for s in (3, 9))
    p, x = cq.prepack(to(first)), normal((2, 64), dtype)
    there = to(x)
    for _ in range(2):
        check(cq.linear(there, p), x, first, there)
    _overwrite(p, cq.prepack(to(second)))
    for _ in range(2):
        check(cq.linear(there, p), x, second, there)


def test_rows_of_a_prepacked_weight_are_kept_once(to, plans):
    """Whatever x is; both of a gated unit, and they go with the weight."""
    p, other = (cq.prepack(to(weight(name, (16, 64)))) for name in ("int4", "nf4"))
    there = to(normal((9, 64)))
    for rows in range(1, 9):
        cq.linear(there[:rows], p), cq.swiglu(there[:rows], p, other)
    del plans[:]
    for rows in range(1, 9):
        cq.linear(there[:rows], p), cq.swiglu(there[:rows], p, other)
    assert not plans and len(unpacked._rows) == 2
    kept = {id(part) for found in repeated._known._entries.values() for plan in found.plans.values()
            for part in plan.kept if not isinstance(part, cq.formats.Format)}  # fmt: skip
    assert kept == {id(part) for rows in unpacked._rows._entries.values() for part in rows.values()}
    del p, other, rows, kept
    gc.collect()
    assert not unpacked._rows and not repeated._known


OTHER_ROWS = {
    "plain": {},
    "all": {"bias": (16,), "residual": (48, 16), "activation": "gelu"},
    "out": {"out": (48, 16)},
}


@pytest.mark.parametrize(
    ("name", "given"),
    sampled(
        product(["int4", "nf4", "q4_0", "prepacked"], OTHER_ROWS),
        lambda name, _: name,
        lambda _, given: given,
    ),
)
def test_other_rows_are_checked_no_more(name, given, to, fake, plans, monkeypatch):
    """And give the bits that a first call gives: without what is kept, on the same rows."""
    options, laid_out = OTHER_ROWS[given], name == "prepacked"
    w = to(weight("int4" if laid_out else name, (16, 64)))
    x = to(normal((48, 64), "float16" if laid_out else "float32"))
    if laid_out:
        w = cq.prepack(w)
        if fake:  # Turing has no kernel for it
            monkeypatch.setattr(backends, "_arch", lambda _: 80)
    whole = {k: to(normal(v, seed=5)) if isinstance(v, tuple) else v for k, v in options.items()}

    def called(rows):
        own = {k: v[:rows] if k in ("residual", "out") else v for k, v in whole.items()}
        return host(cq.linear(x[:rows], w, **own)).copy()

    called(48)
    counts = (2, 3, 8, 9, 16, 17, 31, 40)
    del plans[:]
    found = [called(rows) for rows in counts]
    assert not plans
    for rows, y in zip(counts, found, strict=True):
        repeated._known._entries.clear()
        assert bits_equal(called(rows), y), rows
    assert len(plans) == len(counts)


def test_other_rows_look_at_the_weight_once_for_each_kernel(to, plans, monkeypatch):
    """15 numbers of rows, two of which may need another family's kernel."""
    q, x, seen = to(weight("int4", (16, 64))), to(normal((200, 64))), []

    def noting(prepare):
        return lambda *given: seen.append(given) or prepare(*given)

    cq.linear(x, q)
    for kind in set(map(type, rule.FAMILIES.values())):
        monkeypatch.setattr(kind, "prepare", noting(kind.prepare))
    for rows in range(50, 200, 10):
        cq.linear(x[:rows], q)
    assert 1 <= len(seen) <= 2


def test_other_rows_while_a_component_lies_elsewhere(to, plans):
    """What is prepared then must not be found once it is back."""
    q, x = to(weight("int4", (16, 64))), to(normal((48, 64)))
    scale = q.components["scale"]
    if not hasattr(scale, "copy_"):
        pytest.skip("memory of CuPy's arrays stays")
    cq.linear(x, q)
    home, wanted = scale.data, host(cq.linear(x[:7], to(weight("int4", (16, 64)))))
    away = home.clone() * 2
    scale.data = away
    assert bits_equal(host(cq.linear(x[:7], q)), 2 * wanted)
    scale.data = home
    away.zero_()
    assert bits_equal(host(cq.linear(x[:7], q)), wanted)


def test_other_rows_that_do_not_fit_are_refused(to, plans):
    q, x = to(weight("int4", (16, 64))), to(normal((48, 64)))
    residual = to(normal((48, 16)))
    cq.linear(x, q, residual=residual)
    cq.linear(x, q, out=to(normal((48, 16))))
    with pytest.raises(ValueError, match="residual has shape"):
        cq.linear(x[:7], q, residual=residual)
    with pytest.raises(ValueError, match="out"):
        cq.linear(x[:7], q, out=residual)
    del plans[:]
    wide = cq.linear(x[:40][::2], q)  # rows in steps
    assert plans and bits_equal(host(wide), host(cq.linear(x[:40], q))[::2])
    assert cq.linear(x[:0], q).shape == (0, 16)


def test_a_component_in_steps_that_was_overwritten(to):
    """It is copied for kernels, anew for each product, also beside rows that are kept."""
    p, x = (
        cq.prepack(to(cq.quantize(normal((16, 512)), "nf4", double_quant=True))),
        normal((2, 512)),
    )
    name, there = "nested_scale", to(x)
    scale = host(p.arrays()[name])
    wide = to(np.repeat(scale, 2))
    steps = replace(p, components={**p.arrays(), name: wide[::2]})
    for size in (F32(1), F32(2), F32(4)):
        wide[...] = to(np.repeat(scale * size, 2))
        whole = replace(p, components={**p.arrays(), name: to(scale * size)})
        for _ in range(2):
            assert bits_equal(host(cq.linear(there, steps)), host(cq.linear(there, whole)))


@pytest.fixture
def decoded(monkeypatch, request):
    """Shape of a weight that is decoded to x's dtype, or meets its scales in it."""
    if not request.node.callspec.params["to"].startswith("fake"):
        return 1024, 1024
    cublas = Cublas(Library(alignment=64))
    monkeypatch.setattr(backends, "_vendor", lambda *_: cublas)
    monkeypatch.setattr(backends.Gpu, "has_vendor", True)
    monkeypatch.setattr(rule, "choose", lambda _: "vendor")
    return 16, 64


def _inference(wanted):
    return sys.modules["torch"].inference_mode() if wanted else nullcontext()


def _is_near(y, x, q, size) -> bool:
    wanted = Expected.of(x, q).sums
    assert np.abs(wanted).max() > 4 * size
    return bool((np.abs(host(y) - wanted) <= 2.0**-8 * size * x.shape[1] ** 0.5).all())


def _shifted(part, to, by):
    """The array, cut out of a buffer of bytes at a place `by` bytes from 256."""
    values = host(part)
    room = np.zeros(values.nbytes + 512, np.uint8)
    if hasattr(part, "host"):  # the fake of CuPy's, which wraps NumPy's
        at = -room.ctypes.data % 256 + by
        view = room[at : at + values.nbytes].view(values.dtype).reshape(values.shape)
        view[...] = values
        return type(part)(view)
    buffer = to(room)
    address = buffer.data_ptr() if hasattr(buffer, "data_ptr") else buffer.data.ptr
    at = -address % 256 + by
    buffer[at : at + values.nbytes] = to(np.ascontiguousarray(values).view(np.uint8).ravel())
    return buffer[at : at + values.nbytes].view(part.dtype).reshape(tuple(part.shape))


SHIFTED = [
    ("nf4", "codes", 4), ("nf4", "scale", 4), ("nf4", "codes", 8), ("uint4", "zero_point", 1),
    ("q4_k", "minimum", 2), ("q4_k", "sub_scale", 1), ("int4", "scale", 2), ("mxfp4", "scale", 3),
    ("nvfp4", "global_scale", 4), ("int3", "codes", 4),
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 40, 300])
@pytest.mark.parametrize(
    ("name", "component", "by"), sampled(SHIFTED, lambda *given: given[1], lambda *given: given[2])
)
def test_a_component_that_starts_anywhere(name, component, by, rows, to, fake, monkeypatch):
    """As views of one flat buffer do: kernels read vectors of 16 bytes."""
    if fake and rows > 1:
        pytest.skip("the driver makes the tensor maps of these kernels")
    if fake:
        monkeypatch.setattr(backends, "_arch", lambda _: 90)
    p = cq.prepack(to(cq.quantize(normal((48, 512)), name)))
    there = to(normal((rows, 512), "float16"))
    parts = p.arrays()
    moved = replace(p, components={**parts, component: _shifted(parts[component], to, by)})
    wanted = host(cq.linear(there, p))
    for _ in range(2):
        assert bits_equal(host(cq.linear(there, moved)), wanted)
    back = cq.unpack(moved)
    assert all(
        (host(part) == host(cq.unpack(p).arrays()[key])).all()
        for key, part in back.arrays().items()
    )


def test_elements_that_no_gpu_can_read_are_refused_by_name(to):
    p, x = cq.prepack(to(weight("int4", (16, 64)))), to(normal((2, 64)))
    if hasattr(x, "copy_"):
        pytest.skip("torch makes no such views")
    for name in ("x", "bias", "residual", "out"):
        part = {"x": x, "bias": to(normal((16,)))}.get(name, to(normal((2, 16))))
        given = {"x": x, name: _shifted(part, to, 2)}
        with pytest.raises(ValueError, match=f"{name} starts at address"):
            cq.linear(given.pop("x"), p, **given)


SCALED = (
    *(("nf4", how) for how in ("out=", "in place", "data", "inference")),
    *((name, "in place") for name in ("fp8_e4m3", "mxfp4", "int4", "q4_k")),
)
SIZES = {"q4_k": (2.0**10, 2.0**-5, 2.0**3), "int4": (2.0**14, 2.0**-8, 2.0**3)}  # float16 scales


@pytest.mark.parametrize("laid_out", [False, True], ids=["rows", "prepacked"])
@pytest.mark.parametrize(("name", "how"), sampled(SCALED, lambda _, how: how))
def test_weights_that_became_much_larger_or_smaller(name, laid_out, how, to, decoded, plans):
    """Than float16 holds, by means that no library counts: their scales are read each time."""
    x, w = normal((40, decoded[1]), "float16"), normal(decoded, seed=9)
    if name == "q4_k":  # whole blocks
        w, x = np.repeat(w[:, :64], 4, 1), np.repeat(x[:, :64], 4, 1)
    there = to(x)
    is_torch = hasattr(there, "copy_")
    if not is_torch and how not in ("out=", "in place"):
        pytest.skip("of torch alone")
    if how == "out=" and laid_out:
        pytest.skip("a PackedWeight is not quantized to")

    def laid(q):
        return cq.prepack(q) if laid_out else q

    with _inference(how == "inference"):
        weights = laid(to(cq.quantize(w, name)))
        there = to(x)
        cq.linear(there, weights, out_dtype="float32")
        for size in SIZES.get(name, (2.0**20, 2.0**-30, 2.0**3)):
            other = cq.quantize(w * F32(size), name)
            if how == "out=":
                cq.quantize(to(w * F32(size)), name, out=weights)
            else:
                _overwrite(weights, laid(to(other)), data=how == "data")
            del plans[:]
            assert _is_near(cq.linear(there, weights, out_dtype="float32"), x, other, size)
            assert not plans, "the plan is the same: it holds no numbers of the weight"


def test_finalizers_do_not_grow_with_calls(to):
    """With weights that are overwritten, or with new ones that share arrays with old ones."""
    q, x, w = to(weight("int4", (16, 64))), to(normal((2, 64))), to(normal((16, 64)))

    def round_of_calls():
        cq.quantize(w, "int4", out=q)
        cq.linear(x, q)
        parts = {**q.arrays(), "scale": to(host(q.arrays()["scale"]))}
        cq.linear(x, cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes))

    def held():
        gc.collect()
        references = sum(weakref.getweakrefcount(part) for part in q.arrays().values())
        return references, len(weakref.finalize._registry), len(repeated._known)

    round_of_calls()
    before = held()
    for _ in range(20):
        round_of_calls()
    assert held() == before


def test_plans_go_with_their_weight_and_are_not_too_many(to, plans, monkeypatch):
    q, there = to(weight("int4", (16, 64))), to(normal((12, 64)))
    monkeypatch.setattr(repeated, "MOST", 4)
    for rows in range(1, 13):
        cq.linear(there[:rows], q)
    (kept,) = repeated._known._entries.values()
    assert 0 < len(kept.plans) <= 4
    assert len(kept.rows) == 1
    del q, kept
    gc.collect()
    assert not repeated._known


@pytest.mark.gpu
def test_a_repeated_call_costs_the_host_at_most_20_us(gpu):
    """The best of runs of 100, on a queue that is never full: of many, or of more for 20 seconds,
    since other tests may have the processor."""
    q, x = weight("int4", (64, 256)).to("cuda"), gpu.asarray(normal((1, 256), "float16"))
    out = gpu.zeros((1, 64), gpu.float16)
    cq.linear(x, q, out=out)
    best, runs, end = np.inf, 0, time.perf_counter() + 20
    while runs < 30 or (best >= 20e-6 and time.perf_counter() < end):
        runs += 1
        gpu.cuda.runtime.deviceSynchronize()
        start = time.perf_counter()
        for _ in range(100):
            cq.linear(x, q, out=out)
        best = min(best, (time.perf_counter() - start) / 100)
    assert best < 20e-6
