"""explain of two quantized sides: what a product launches, and the numbers of its rule."""

from itertools import product

import fake_gpu
import numpy as np
import pytest
from emulator import Recorder
from gpu_products import moves
from in_turn import in_turn

import cuquant as cq
from cuquant.array.fragments import takes
from cuquant.formats import get_format
from cuquant.gpu import arrays
from cuquant.gpu.boards import BOARDS, board_of
from cuquant.ops.matmul import dense, hopper_codes_tiles
from cuquant.ops.matmul.dense import Work
from cuquant.ops.programs import Plan

F32 = np.float32
# Formats of x and of the weights: each kernel, each kind, what is made before, and no pair at all.
PAIRS = (
    ("int8:row", "int8:row"), ("int8:row", "int4:row"), ("int8", "uint8"), ("int4", "int2"),
    ("fp8_e4m3:row", "fp8_e4m3:row"), ("fp8_e5m2", "fp8_e4m3"), ("mxfp8", "mxfp8"),
    ("mxfp8", "mxfp4"), ("fp8_e4m3:row", "fp4_e2m1:row"), ("fp8_e4m3:1x128", "fp8_e4m3:128x128"),
    ("int8:64", "int8:64"), ("int8:16", "int8:row"), ("int1:row", "int1:row"),
    ("int8:row", "nf4"), ("nf4", "nf4"), ("int8:row", "q4_k"),
)  # fmt: skip
# What brings operands into another form, before a product.
BEFORE = (
    "matmul/codes.cu", "matmul/code_rows.cu", "dequantize/dequantize.cu", "dequantize/ggml.cu",
    "layout/prepack.cu", "layout/pack.cu", "matmul/gather.cu", "matmul/experts.cu",
)  # fmt: skip


def quantized(name: str, *shape: int) -> cq.QuantArray:
    return cq.quantize(np.random.default_rng(0).standard_normal(shape, F32), get_format(name))


@pytest.fixture
def launched(monkeypatch):
    """Files of the products that a call launches on a GPU of an architecture."""
    calls = []
    monkeypatch.setattr(arrays.Gpu, "tensor_map", lambda *_: bytes(128), raising=False)
    monkeypatch.setattr(arrays.Gpu, "gemm", lambda *_: calls.append("cuBLAS"))

    def run(arch: int, call) -> list[str]:
        recorder = Recorder(board_of(arch).multiprocessors, arch, vendor=True)
        to = moves(fake_gpu.install("cupy", monkeypatch, recorder))
        calls.clear()
        call(to)
        files = [launch.program.file for launch in recorder.launches]
        return [file for file in files if file not in BEFORE] + calls

    return run


def layouts(w: cq.QuantArray) -> dict:
    """What makes a weight of each layout of one on a GPU."""
    found = {"as quantized": lambda there: there}
    return found | ({"prepacked": cq.prepack} if takes(w.format.plain, w.shape) else {})


def chosen(found: cq.Explanation, words: str) -> str:
    return next(c.kernel for c in found.candidates if c.is_chosen and c.weights == words)


@in_turn("pair", PAIRS)
def test_the_kernel_is_what_a_product_launches(pair, launched):
    x_format, w_format = pair
    x, w = quantized(x_format, 40, 512), quantized(w_format, 256, 512)
    calls = {
        "linear": lambda to, laid: cq.linear(to(x), laid(to(w))),
        "swiglu": lambda to, laid: cq.swiglu(to(x), laid(to(w)), laid(to(w))),
    }
    for arch, (words, laid), (operation, call) in product(
        (80, 90, 120), layouts(w).items(), calls.items()
    ):
        files = launched(arch, lambda to, call=call, laid=laid: call(to, laid))
        asked = {"format": w_format, "shape": w.shape, "rows": 40, "dtype": x_format}
        found = cq.explain(operation, **asked, arch=arch)
        assert files[-1] == chosen(found, words), (arch, words, operation, files)


def test_what_is_made_before_every_product():
    for weights, codes, sums in (("int8:row", False, False), ("int4", True, False),
                                 ("uint8:row", False, True)):  # fmt: skip
        found = cq.explain(
            "linear", format=weights, shape=(256, 512), rows=8, dtype="int8:row", arch="H100"
        )
        note = next(c.note for c in found.candidates if c.weights == "as quantized")
        assert ("become bytes first" in note, "added up first" in note) == (codes, sums)


def test_matmul_keeps_the_larger_side(launched):
    for rows in (8, 300):
        x, w = quantized("nf4", rows, 512), quantized("nf4", 64, 512)
        files = launched(80, lambda to, x=x, w=w: cq.matmul(to(x), to(w).T))
        found = cq.explain("matmul", format="nf4", shape=(64, 512), rows=rows, dtype="nf4", arch=80)
        assert files[-1] == chosen(found, "as quantized")
        which = "weights decoded" if rows > 64 else "x decoded"
        assert all(which in c.note for c in found.candidates)


@in_turn("pair", [("int8:row", "int8:row"), ("mxfp8", "mxfp4"), ("int8:row", "nf4")])
def test_experts(pair, launched):
    x_format, w_format = pair
    x, w = quantized(x_format, 40, 512), quantized(w_format, 2, 256, 512)
    asked = {"format": w_format, "shape": w.shape, "rows": 40, "dtype": x_format}
    for arch, (words, laid) in product((80, 90), layouts(w).items()):

        def call(to, laid=laid):
            return cq.grouped_linear(to(x), laid(to(w)), offsets=np.array([0, 30, 40]))

        files = launched(arch, call)
        found = cq.explain("grouped_linear", **asked, arch=arch)
        assert files[-1] == chosen(found, words), (arch, words, files)


# Formats of both sides, what is multiplied, bytes of K of a scale, how scales are told, and rows.
RULES = {
    "int8:row": ("int8", 0, 0, 1),
    "fp8_e4m3:row": ("fp8_e4m3", dense.RUN, 0, 1),
    "int1:row": ("bits", 0, 0, 1),
    "int8:128": ("int8", 128, 1, 1),
    "mxfp8": ("fp8_e4m3", 32, 2, 1),
    "fp8_e4m3:128x128": ("fp8_e4m3", 128, 1, 128),
}


@in_turn("name", RULES)
def test_times_are_those_of_the_rule_of_dense_cu(name):
    kind, promote, scaled, tall = RULES[name]
    for rows, columns, depth in ((128, 4096, 4096), (512, 14336, 4096), (4096, 4096, 14336)):
        lines = depth // dense.LINE // (8 if kind == "bits" else 1)
        work = Work(rows, columns, lines, (kind, kind), promote, scaled, tall)
        tile = dense.tile_of(work)
        for operation, times in (("linear", 1), ("swiglu", 2)):
            found = cq.explain(
                operation, format=name, shape=(columns, depth), rows=rows, dtype=name, arch="H100"
            )
            *_, own, other = found.candidates
            assert (own.kernel, other.kernel) == ("matmul/dense.cu", "matmul/dense_warps.cu")
            assert own.is_chosen and own.estimated_us == times * dense.time_us(tile, work)
            assert f"{kind} by wgmma, tiles of 128 x {tile.columns}" in own.note


@pytest.mark.parametrize("rows", [1, 64, 700])
def test_times_are_those_of_the_rule_of_hoppers_codes(rows):
    x, w, (columns, depth) = get_format("int8:row"), get_format("int4"), (8192, 4096)
    given = {"format": w, "dtype": "int8:row", "rows": rows, "arch": "H100"}
    found = cq.explain("linear", shape=(columns, depth), **given).chosen
    assert (found.kernel, found.weights) == ("matmul/hopper.cu", "prepacked")
    work = hopper_codes_tiles.work_of(Plan(), columns, depth)
    scales = hopper_codes_tiles.scales_of(x, w, depth)
    shape = hopper_codes_tiles.divide(rows, work, scales)
    times = {s: us for us, s in hopper_codes_tiles.ways(rows, work, scales)}
    assert found.estimated_us == times[shape]
    experts = cq.explain("grouped_linear", shape=(8, columns, depth), **given).chosen
    assert experts.kernel == "matmul/hopper.cu" and experts.estimated_us > found.estimated_us / 8


@in_turn("fmt", [f for f in cq.list_formats() if get_format(f).bits < 16])
def test_every_format_on_every_board(fmt):
    for board in BOARDS:
        found = cq.explain("linear", format="int8", shape=(512, 1024), rows=4, dtype=fmt,
                           arch=board.name)  # fmt: skip
        assert found.dtype == fmt and found.floor_us > 0
        for weights in {c.weights for c in found.candidates}:
            same = [c.is_chosen for c in found.candidates if c.weights == weights]
            assert same == [True] + [False] * (len(same) - 1)


def test_the_floor():
    asked = {"format": "fp8_e4m3:row", "dtype": "fp8_e4m3:row", "shape": (4096, 8192)}
    rates = board_of("H100").rates
    few, many = (cq.explain("linear", **asked, rows=rows, arch="H100") for rows in (4, 8192))
    assert (few.floor, many.floor) == ("memory", "arithmetic")
    fmt = get_format("fp8_e4m3:row")
    assert few.moved_bytes == fmt.nbytes((4096, 8192)) + fmt.nbytes((4, 8192)) + 4 * 4 * 4096
    assert many.floor_us == pytest.approx(2 * 4096 * 8192**2 / rates.codes)
    bits = cq.explain(
        "linear", format="int1:row", dtype="int1:row", shape=(8192, 8192), rows=8192, arch="H100"
    )
    assert bits.floor_us == pytest.approx(2 * 8192**3 / (8 * rates.codes))
