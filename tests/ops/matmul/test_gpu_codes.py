"""Products of two quantized arrays on a GPU: CuPy arrays and torch tensors.

All but the last part also runs on arrays that only look like theirs, with the emulator below.
"""

import fake_gpu
import numpy as np
import pytest
from coded_products import (
    CASES,
    check_on_gpu,
    check_rows_on_gpu,
    pair,
    scales_far_apart,
    with_scales,
)
from gpu_products import host, to_gpu
from products import normal, values

import cuquant as cq
from cuquant import interop
from cuquant.ops.matmul import on_gpu as multiply

F32 = np.float32
FEW = (CASES[0], CASES[6], CASES[14], CASES[17])  # for the emulator


@pytest.fixture(params=fake_gpu.KINDS)
def kind(request):
    return request.param


@pytest.fixture
def to(kind, monkeypatch):
    return to_gpu(kind, monkeypatch)


def test_linear_and_matmul(kind, to):
    for case in FEW if "fake" in kind else CASES:
        x, w = pair(case)
        y = host(cq.linear(to(x), to(w)))
        check_on_gpu(y, x, w)
        np.testing.assert_array_equal(host(cq.matmul(to(x), to(w).T)), y)


def test_results(to):
    """int8 with a scale of the host or of the device; bias, activation and residual; out."""
    x, w = pair(("int8", "int8", (9, 37, 64)))
    bias, residual = normal((37,)), normal((9, 37), seed=2)
    kept = {"bias": to(bias), "activation": "relu", "residual": to(residual)}
    wide = host(cq.matmul(to(x), to(w).T, **kept))
    np.testing.assert_allclose(
        wide, np.maximum(values(x) @ values(w).T + bias, 0) + residual, atol=1e-4
    )
    wanted = cq.quantize(wide.reshape(-1), "int8:tensor", scale=F32(0.25)).packed.reshape(9, 37)
    out = to(np.zeros((9, 37), np.int8))
    for scale in (0.25, to(np.array(0.25, F32)), to(np.array([0.25], F32))):
        y = cq.matmul(to(x), to(w).T, **kept, out_dtype="int8", out_scale=scale)
        np.testing.assert_array_equal(host(y), wanted)
    assert cq.matmul(to(x), to(w).T, **kept, out_dtype="int8", out_scale=0.25, out=out) is out
    np.testing.assert_array_equal(host(out), wanted)
    y = cq.linear(to(x), to(w), to(bias.astype(np.float16)), out_dtype="bfloat16")
    assert interop.dtype_of(y).name == "bfloat16"


def test_swiglu(to):
    """Both products as codes: silu of the one times the other, rounded once."""
    x, gate = pair(("int8", "int8", (6, 20, 64)))
    up = cq.quantize(normal((20, 64), seed=8), "int4")
    left, right = values(x) @ values(gate).T, values(x) @ values(up).T
    wanted = left / (1 + np.exp(-left)) * right
    for out in (None, to(np.zeros((6, 20), np.float16))):
        y = cq.swiglu(to(x), to(gate), to(up), out=out)
        np.testing.assert_allclose(host(y).astype(F32), wanted, rtol=2e-3, atol=2e-3)


def test_a_batch(to):
    x, w = cq.quantize(normal((2, 3, 5, 64)), "int8"), cq.quantize(normal((2, 3, 9, 64)), "int8")
    y = host(cq.matmul(to(x), to(w).transpose(0, 1, 3, 2)))
    np.testing.assert_allclose(y, values(x) @ values(w).swapaxes(-1, -2), atol=1e-4)
    residual = normal((2, 3, 5, 9))
    plain = normal((2, 3, 5, 64))
    y = host(cq.matmul(to(plain), to(w).transpose(0, 1, 3, 2), residual=to(residual)))
    np.testing.assert_allclose(y, plain @ values(w).swapaxes(-1, -2) + residual, atol=1e-4)


@pytest.mark.parametrize("x_format", ["int8", None])
def test_groups(to, x_format):
    plain, w = normal((30, 64)), cq.quantize(normal((4, 9, 64), seed=8), "int8")
    x = plain if x_format is None else cq.quantize(plain, x_format)
    ids = np.repeat([0, 2, 3], [7, 20, 3])
    wanted = np.einsum("tk,tnk->tn", values(x), values(w)[ids])
    for given in ({"offsets": np.array([0, 7, 7, 27, 30], np.int32)}, {"experts": ids}):
        for place in (to, lambda array: array):
            moved = {name: place(array) for name, array in given.items()}
            y = host(cq.grouped_linear(to(x), to(w), **moved))
            np.testing.assert_allclose(y, wanted, atol=1e-4)
    mixed = np.random.default_rng(0).permutation(ids)
    y = host(cq.grouped_linear(to(x), to(w), to(mixed)))
    np.testing.assert_allclose(y, np.einsum("tk,tnk->tn", values(x), values(w)[mixed]), atol=1e-4)
    lost = np.where(np.arange(30) == 4, 9, ids)
    y = host(cq.grouped_linear(to(x), to(w), to(lost)))
    assert np.isnan(y[4]).all() and np.isfinite(np.delete(y, 4, 0)).all()
    # What is told on the device may end beyond x, or begin behind its start.
    y = host(cq.grouped_linear(to(x), to(w), offsets=to(np.array([5, 7, 7, 27, 99]))))
    np.testing.assert_allclose(y[5:], wanted[5:], atol=1e-4)
    assert (y[:5] == 0).all()


@pytest.mark.parametrize("x_format", ["int8", None])
def test_counts(to, x_format):
    plain, w = normal((3, 10, 64)), cq.quantize(normal((3, 9, 64), seed=8), "int8")
    x = plain if x_format is None else cq.quantize(plain, x_format)
    wanted = np.einsum("emk,enk->emn", values(x), values(w))
    counts = np.array([10, 0, 3])
    for expert, count in enumerate(counts):
        wanted[expert, count:] = 0
    out = to(np.full((3, 10, 9), 7, F32))
    y = cq.grouped_linear(to(x), to(w), counts=to(counts), out=out)
    assert y is out
    np.testing.assert_allclose(host(y), wanted, atol=1e-4)
    room = to(np.full((3, 20, 9), 7, F32))  # whose rows cannot be counted through
    cq.grouped_linear(to(x), to(w), counts=to(counts), out=room[:, 5:15])
    np.testing.assert_allclose(host(room)[:, 5:15], wanted, atol=1e-4)
    assert (host(room)[:, :5] == 7).all() and (host(room)[:, 15:] == 7).all()


def test_wrong_groups_are_the_errors_of_the_cpu(to):
    x, w = cq.quantize(normal((6, 64)), "int8"), cq.quantize(normal((2, 5, 64)), "int8")
    for given in (
        {},
        {"experts": np.zeros(6, int), "offsets": np.array([0, 3, 6])},
        {"offsets": np.array([0, 3])},
        {"offsets": np.array([0.0, 3, 6])},
        {"offsets": np.array([0, 4, 3])},
        {"offsets": np.array([0, 4, 7])},
        {"counts": np.array([1, 2])},
        {"experts": np.array([0, 1, 2, 0, 0, 0])},
    ):
        with pytest.raises((TypeError, ValueError)) as on_cpu:
            cq.grouped_linear(x, w, **given)
        with pytest.raises(type(on_cpu.value)) as on_gpu:
            cq.grouped_linear(to(x), to(w), **given)
        assert str(on_gpu.value) == str(on_cpu.value)


@pytest.mark.parametrize(
    "formats", [("int8", "int8"), ("fp8_e4m3", "fp8_e4m3:128x128"), (None, "int4"), (None, "nf4")]
)
def test_rows_do_not_depend_on_how_many_there_are(kind, to, formats):
    """batch_invariant: the bits of a row are the same in 1 to 300 of them."""
    counts = (1, 3, 17) if "fake" in kind else range(1, 301)
    most, columns, depth = max(counts), *((9, 128) if "fake" in kind else (512, 1024))
    plain, w = normal((most, depth), "float16"), cq.quantize(normal((columns, depth)), formats[1])
    weight = to(w) if formats[0] else cq.prepack(to(w))
    x = to(plain)
    x = x if formats[0] is None else cq.quantize(x, formats[0])
    whole = host(cq.linear(x, weight, batch_invariant=True))
    for count in counts:
        for first in {0, most - count}:
            y = cq.linear(x[first : first + count], weight, batch_invariant=True)
            np.testing.assert_array_equal(host(y), whole[first : first + count])


def test_a_call_alike_is_made_by_the_plan_of_the_one_before(to, monkeypatch):
    """Nothing is looked at again but addresses; another format, shape or bias has its own plan."""
    x, w = pair(("int8", "int8", (6, 10, 64)))
    there, weight, bias = to(x), to(w), to(normal((10,)))
    first = host(cq.linear(there, weight, bias))
    other = cq.quantize(normal((6, 64), seed=9), "int8")
    shorter, tensor = (
        cq.quantize(normal((5, 64)), "int8"),
        cq.quantize(normal((6, 64)), "int8:tensor"),
    )
    looked_at = []
    pair_of = multiply.pair_of
    monkeypatch.setattr(multiply, "pair_of", lambda *a: looked_at.append(1) or pair_of(*a))
    out = to(np.zeros((6, 10), F32))
    np.testing.assert_array_equal(host(cq.linear(there, weight, bias)), first)
    y = host(cq.linear(to(other), weight, bias))
    np.testing.assert_allclose(y, values(other) @ values(w).T + host(bias), atol=1e-4)
    assert not looked_at
    for given, options in ((there, {"out": out}), (to(shorter), {}), (to(tensor), {})):
        y = cq.linear(given, weight, bias, **options)
        assert len(looked_at) == 1
        np.testing.assert_array_equal(host(cq.linear(given, weight, bias, **options)), host(y))
        assert len(looked_at.copy()) == 1
        looked_at.clear()
    # What the arrays hold may change; where out may not lie is still refused.
    weight.components["packed"][...] = to(np.zeros((10, 64), np.int8))
    assert (host(cq.linear(there, weight)) == 0).all()
    inside = there.components["scale"].reshape(-1)[:6].reshape(6, 1)
    one = to(cq.quantize(normal((1, 64)), "int8"))
    cq.linear(there, one, out=to(np.zeros((6, 1), F32)))
    with pytest.raises(ValueError, match="overlaps"):
        cq.linear(there, one, out=inside)


# ---- on a GPU alone ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
    "formats",
    [
        ("int8", "int8"),
        ("uint8:row", "uint8:row"),
        pytest.param(("fp8_e4m3:128", "fp8_e4m3:128x128"), marks=pytest.mark.named_barriers),
        pytest.param(("mxfp8", "nvfp4"), marks=pytest.mark.named_barriers),
        ("int1", "int1"),
    ],
)
def test_larger_products(formats):
    to = to_gpu("cupy", None)
    for shape in (
        (1, 512, 1024),
        (16, 200, 1040),
        (64, 384, 4096),
        (300, 520, 2000),
        (1030, 1000, 512),
    ):
        x, w = pair((*formats, shape))
        check_on_gpu(host(cq.linear(to(x), to(w))), x, w)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_graph_sees_other_counts(library, monkeypatch):
    to = to_gpu(library, monkeypatch)
    x, w = cq.quantize(normal((3, 40, 256)), "int8"), cq.quantize(normal((3, 72, 256)), "int8")
    counts, there, weight = to(np.array([40, 0, 3])), to(x), to(w)
    out = to(np.zeros((3, 40, 72), F32))

    def run():
        cq.grouped_linear(there, weight, counts=counts, out=out)

    replay = captured(library, run)
    for given in ([40, 0, 3], [1, 40, 0]):
        counts[...] = to(np.array(given))
        replay()
        wanted = np.einsum("emk,enk->emn", values(x), values(w))
        for expert, count in enumerate(given):
            wanted[expert, count:] = 0
        np.testing.assert_allclose(host(out), wanted, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("formats", [("int8", "int8"), ("uint8:row", "int4"), ("mxfp8", "mxfp4")])
def test_a_graph_sees_other_experts_and_offsets(library, formats, monkeypatch):
    """Rows that no expert has are NaN or 0 in every replay, in an out with gaps too."""
    to = to_gpu(library, monkeypatch)
    x, w = cq.quantize(normal((40, 256)), formats[0]), cq.quantize(normal((3, 72, 256)), formats[1])
    there, weight, room = to(x), to(w), to(np.full((80, 144), 7, F32))
    out = room[::2, ::2]
    rows = np.arange(40)
    cases = {
        "experts": ([rows % 3, rows % 5 - 1], lambda e: np.where((e < 0) | (e > 2), -1, e)),
        "offsets": ([[0, 7, 7, 40], [3, 10, 30, 38]], lambda o: offset_ids(np.array(o), 40)),
    }
    for name, (all_given, ids_of) in cases.items():
        integers = to(np.array(all_given[0]))

        def run(name=name, integers=integers):
            cq.grouped_linear(there, weight, **{name: integers}, out=out)

        run()
        replay = captured(library, run)
        for given in all_given[::-1]:
            integers[...] = to(np.array(given))
            replay()
            ids = ids_of(given)
            others = np.nan if name == "experts" else 0
            check_rows_on_gpu(host(room)[::2, ::2], x, w, ids, others)
    assert (host(room)[1::2] == 7).all() and (host(room)[:, 1::2] == 7).all()


def offset_ids(offsets, rows):
    """The expert of each row, -1 where it has none."""
    ids = np.searchsorted(offsets, np.arange(rows), side="right") - 1
    return np.where(ids < len(offsets) - 1, ids, -1)


def captured(library, run):
    """What replays a graph of a call that was made before."""
    if library == "torch":
        import torch

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return lambda: (graph.replay(), torch.cuda.synchronize())
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run()
        stream.synchronize()
        stream.begin_capture()
        run()
        graph = stream.end_capture()
    return lambda: (cupy.cuda.Device().synchronize(), graph.launch(stream), stream.synchronize())


@pytest.mark.parametrize(
    "formats",
    [
        ("fp8_e4m3", "fp4_e2m1:row"),
        ("mxfp8", "mxfp4"),
        ("fp8_e4m3", "mxfp4"),
        ("fp8_e4m3:1x128", "mxfp4"),
        ("fp8_e4m3:1x128", "nvfp4"),
        ("int8", "int4"),
    ],
)
def test_prepacked_weights(to, formats):
    """Twice, of which the second time is by what was kept; columns of whole vectors, or not."""
    for m, n, k in ((1, 70, 256), (70, 130, 320), (9, 40, 200)):
        x, w = pair((*formats, (m, n, k)))
        there, packed, bias = to(x), cq.prepack(to(w)), to(normal((n,)))
        first, second = (cq.linear(there, packed, bias) for _ in range(2))
        wanted = values(x) @ values(w).T + normal((n,))
        np.testing.assert_allclose(host(first), wanted, rtol=1e-3, atol=1e-2)
        np.testing.assert_array_equal(host(first), host(second))


@pytest.mark.parametrize("first", ["fp8_e4m3", "fp8_e4m3:1x128"])
def test_prepacked_weights_whose_scales_are_far_apart(kind, to, first):
    """Several tiles and depths; the emulator has them in test_hopper_codes.py, quicker."""
    for m, n, k in ((1, 33, 96), (3, 70, 360) if "fake" in kind else (150, 130, 1000)):
        for scale in scales_far_apart(n, -(-k // 32)).values():
            x, w = pair((first, "mxfp4", (m, n, k)))
            w = with_scales(w, scale)
            check_on_gpu(host(cq.linear(to(x), cq.prepack(to(w)))), x, w)


def test_prepacked_experts(to):
    """By offsets, by counts and by a number for each row."""
    x, w = cq.quantize(normal((30, 64)), "fp8_e4m3"), cq.quantize(normal((4, 9, 64)), "mxfp4")
    packed, ids = cq.prepack(to(w)), np.repeat([0, 2, 3], [7, 20, 3])
    wanted = np.einsum("tk,tnk->tn", values(x), values(w)[ids])
    for given in ({"offsets": np.array([0, 7, 7, 27, 30])}, {"experts": ids}):
        (name, numbers), *_ = given.items()
        y = host(cq.grouped_linear(to(x), packed, **{name: to(numbers)}))
        np.testing.assert_allclose(y, wanted, rtol=1e-3, atol=1e-2)
    x = cq.quantize(normal((4, 6, 64)), "fp8_e4m3")
    wanted = np.einsum("emk,enk->emn", values(x), values(w))
    counts = np.array([6, 0, 3, 1])
    wanted[np.arange(6)[None] >= counts[:, None]] = 0
    y = host(cq.grouped_linear(to(x), packed, counts=to(counts)))
    np.testing.assert_allclose(y, wanted, rtol=1e-3, atol=1e-2)
