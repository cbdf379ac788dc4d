"""A sample of cases that starts every kernel, for compute-sanitizer: each array is an allocation
of its own, so that nothing lies beside it.

    compute-sanitizer --tool memcheck python -m pytest -m "gpu and sanitize"
    compute-sanitizer --tool racecheck python -m pytest -m "gpu and sanitize and not named_barriers"
"""

import gc
from unittest import mock

import kernel_cases as cases
import numpy as np
import prepack_cases
import pytest
from emulator import Recorder
from gpu_products import check
from kernel_cases import Case, differences, same_values
from on_emulator import OnEmulator
from products import CASES, normal, weight

import cuquant as cq
from cuquant.ops.matmul import coded_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]


def started(case: Case) -> set[tuple]:
    """Of each kernel a case starts: its entry, and of the format what matters to it."""
    recorder = Recorder()
    run = OnEmulator(recorder)
    q = run.case(case)
    run.dequantize(q), run.codes(q), run.effective(q, "scale")
    rule = case.fmt.scale.rule if case.fmt.scale else ""
    codec = type(case.fmt.codec).__name__
    return {(p.file, p.entry, codec, rule, case.fmt.row_packing.order) for p in recorder.programs}


def sample() -> list[Case]:
    """Small cases that together start each kernel with each codec, scale rule and packing."""
    small = [case for case in cases.ALL if np.prod(case.shape) <= 8192]
    starts = {case: started(case) for case in small}
    seen: set[tuple] = set()
    picked = []
    for case in sorted(small, key=lambda case: -len(starts[case])):
        if not starts[case] <= seen:
            seen |= starts[case]
            picked.append(case)
    return picked


SAMPLE = sample()


@pytest.fixture(autouse=True)
def unpooled(gpu):
    """Memory from the driver, given back at once."""
    gpu.cuda.set_allocator(None)
    yield
    gc.collect()
    gpu.cuda.set_allocator(gpu.get_default_memory_pool().malloc)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_each_kernel(case, gpu):
    x, wanted = case.view(gpu.asarray(case.base)), case.expected()
    q = cq.quantize(x, case.fmt, **case.arguments)
    assert not differences(q.numpy(), wanted)
    assert same_values(q.dequantize().get(), wanted.dequantize())
    assert (q.codes().get() == wanted.codes()).all()
    if wanted.scale is not None:
        assert same_values(q.scale.get(), np.asarray(wanted.scale))


@pytest.mark.parametrize("layout", ["whole", "crooked rows", "reversed"])
def test_the_search_for_nan(layout, gpu):
    case = Case("nf4", shape=(5, 131), layout=layout, nonfinite="raise")
    with pytest.raises(ValueError, match="flat index"):
        cq.quantize(case.view(gpu.asarray(case.base)), "nf4", nonfinite="raise")


@pytest.mark.parametrize("layout", cases.WRITABLE)
def test_values_that_go_anywhere(layout, gpu):
    wanted = Case("nf4", shape=(24, 256), data="normal").expected()
    where = cases.LAYOUTS[layout]
    base = gpu.asarray(np.zeros(where.base(wanted.shape), np.float16))
    out = where.view(base, wanted.shape)
    wanted.to("cuda").dequantize(out=out)
    assert same_values(where.view(base.get(), wanted.shape), wanted.dequantize())


# Each operand of products that kernels read, ragged and strided; both kernels.
PRODUCTS = [case for case in CASES if case.shape[1] <= 200][::3] + CASES[:66:4]


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products(case, gpu):
    shape = (*case.lead, case.shape[1])
    x = cases.LAYOUTS[case.layout].view(gpu.asarray(case.base), shape)
    check(cq.linear(x, case.weight.to("cuda")), case.x, case.weight, x)


@pytest.mark.parametrize("rows", [3, 70])
def test_gated_units_experts_and_batches(rows, gpu):
    x, stacked = gpu.asarray(normal((rows, 64))), cq.quantize(normal((4, 9, 64)), "int4").to("cuda")
    gate, up = (weight(name, (70, 64)).to("cuda") for name in ("nf4", "int4"))
    assert cq.swiglu(x, gate, up).shape == (rows, 70)
    experts = gpu.asarray(np.arange(rows) % 5)  # one of them does not exist
    lost = gpu.isnan(cq.grouped_linear(x, stacked, experts)).any(1)
    assert bool((lost == (experts == 4)).all())
    batch = gpu.asarray(normal((3, 1, rows, 64)))
    columns = cq.quantize(normal((4, 64, 9)), "int4", axis=1).to("cuda")
    assert cq.matmul(batch, columns).shape == (3, 4, rows, 9)


@pytest.mark.parametrize("shape", [(3, 33, 5), (130, 64, 70), (17, 300, 129)], ids=str)
def test_plain_products(shape, gpu):
    """Rows of bytes of every kind, products of them, and what becomes of float sums."""
    m, k, n = shape
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, s, np.int8) for s in ((m, k), (k, n)))
    wanted = a.astype(np.int64) @ b.astype(np.int64)
    functions = cq.functional
    for left, right in ((a, b), (a.T.copy().T, b.T.copy().T)):
        x, w = gpu.asarray(left), gpu.asarray(right)
        assert (functions.int8_matmul(x, w, zero_point_b=0).get() == wanted).all()
        functions.int8_matmul(x[::2, 1:], w[1:, ::-1], 0.5, zero_point_a=3)
    packed = functions.pack_int4(a % 8), functions.pack_int4(b % 8, axis=0)
    functions.int4_matmul(*map(gpu.asarray, packed), k)
    floats = [gpu.asarray(each.astype(np.float16)) for each in (a, b)]
    signs = (np.where(x < 0, -1, 1).astype(np.int64) for x in (a, b))
    wanted = np.matmul(*signs)
    for left, right in (floats, (x, w), [each.astype(np.float32).T.copy().T for each in floats]):
        assert (functions.binary_matmul(left, right).get() == wanted).all()
        with mock.patch.object(coded_kernels, "is_hoppers", lambda *_: False):  # as elsewhere
            assert (functions.binary_matmul(left, right).get() == wanted).all()
    functions.fp16_gemm(*floats, floats[1][0], 2, 3)
    functions.matmul_bias_relu(*floats, floats[1][0], 0.5, out_dtype="float32")


@pytest.mark.parametrize("channels", [3, 32])
def test_convolutions(channels, gpu):
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-128, 128, (n, channels, 5, 4), np.int8) for n in (3, 7))
    y = cq.functional.int8_conv2d(gpu.asarray(x), gpu.asarray(w[:, :, :3, :2]), 2, 3)
    assert (y.get() == cq.functional.int8_conv2d(x, w[:, :, :3, :2], 2, 3)).all()


@pytest.mark.parametrize("case", prepack_cases.DECODED[::8], ids=str)
def test_values_of_prepacked_weights(case, gpu):
    """Of random bits, so that some overflow."""
    q = case.weight()
    p = cq.prepack(q.to("cuda"))
    for dtype in ("float32", "float16"):
        assert np.array_equal(p.dequantize(dtype).get(), q.dequantize(dtype), equal_nan=True)
