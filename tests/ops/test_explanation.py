"""explain: what it names is what the rule chooses, for every format, without a GPU."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from in_turn import in_turn

import cuquant as cq
from cuquant.gpu.boards import BOARDS, board_of, parse_arch
from cuquant.ops.matmul.choose import PLAIN_ROWS, PLAIN_TILES, choose
from cuquant.ops.matmul.problem import Problem

OPERATIONS = ("linear", "matmul", "swiglu", "quantize", "dequantize")


@in_turn("fmt", cq.list_formats())
def test_every_format_on_every_board(fmt):
    for operation, board in product(OPERATIONS, BOARDS):
        found = cq.explain(operation, format=fmt, shape=(512, 1024), rows=4, arch=board.name)
        assert (found.gpu, found.arch) == (board.name, board.arch)
        assert found.floor_us > 0 and found.floor in ("memory", "arithmetic")
        by_weights = {c.weights for c in found.candidates}
        for weights in by_weights:
            same = [c for c in found.candidates if c.weights == weights]
            assert [c.is_chosen for c in same] == [True] + [False] * (len(same) - 1)
        assert str(found).count("\n") == len(found.candidates) + 2
        assert found.chosen.kernel in str(found)


@pytest.mark.parametrize("rows", [1, 16, 64, 512])
def test_the_chosen_kernel_is_the_rules(rows):
    for name, dtype in product(("int4", "nf4", "q4_k", "fp8_e4m3"), ("float16", "float32")):
        fmt, board = cq.get_format(name), board_of("H100")
        found = cq.explain("linear", format=fmt, shape=(4096, 14336), rows=rows, dtype=dtype,
                           arch="H100")  # fmt: skip
        packed = Problem(rows, 4096, 14336, fmt, "fragments/1", dtype, True, 90, 132, direct=True,
                         vendor=True, rates=board.rates)  # fmt: skip
        files = {"hopper": "matmul/hopper.cu", "stream": "matmul/stream.cu", "vendor": "cuBLAS",
                 "blocks": "matmul/ggml.cu", "plain_rows": "matmul/any.cu",
                 "plain_tiles": "matmul/any.cu"}  # fmt: skip
        assert found.chosen.kernel == files[choose(packed)]
        in_rows = next(c for c in found.candidates if c.is_chosen and c.weights == "as quantized")
        assert in_rows.kernel == files[choose(replace(packed, layout="rows/1"))]


def test_the_floor_is_that_of_bytes_or_of_operations():
    few = cq.explain("linear", format="int4", shape=(4096, 4096), arch="H100")
    many = cq.explain("linear", format="int4", shape=(4096, 4096), rows=4096, arch="H100")
    assert (few.floor, many.floor) == ("memory", "arithmetic")
    nbytes = cq.get_format("int4").nbytes((4096, 4096)) + 2 * (4096 + 4096)
    assert few.floor_us == pytest.approx(nbytes / board_of("H100").rates.read)
    assert many.floor_us == pytest.approx(2 * 4096**3 / board_of("H100").rates.tensor)
    made = cq.explain("quantize", format="nf4", shape=(4096, 4096), dtype="float32")
    nbytes = 4 * 4096**2 + cq.get_format("nf4").nbytes((4096, 4096))
    assert made.floor_us == pytest.approx(nbytes / board_of("H100").rates.read)


@in_turn("fmt", cq.list_formats())
def test_no_time_is_below_the_floor(fmt):
    shapes = (256, 256), (14336, 4096)
    for board, dtype, shape in product(BOARDS, ("float16", "float32"), shapes):
        for rows in (1, 16, 512):
            found = cq.explain("linear", format=fmt, shape=shape, rows=rows, dtype=dtype,
                               arch=board.name)  # fmt: skip
            assert all(c.estimated_us >= found.floor_us for c in found.candidates)


@in_turn("fmt", cq.list_formats())
def test_plain_kernels_read_the_weights(fmt):
    known, rates = cq.get_format(fmt), board_of("RTX 4090").rates
    few = Problem(1, 14336, 4096, known, "rows/1", "float32", True, 89, 128, rates=rates)
    assert PLAIN_ROWS.time_us(few) >= few.weights * known.bits / 8 / rates.read
    many = replace(few, rows=4096)
    assert PLAIN_TILES.time_us(many) > 4096 * few.weights * 2 / rates.float32


def test_experts_are_read_all():
    one = cq.explain("linear", format="mxfp4", shape=(4096, 4096), rows=8, arch="H100")
    all_ = cq.explain("grouped_linear", format="mxfp4", shape=(8, 4096, 4096), rows=64, arch="H100")
    assert all_.floor_us > 7 * one.floor_us
    assert all_.chosen.kernel == "matmul/hopper.cu"


def test_boards_and_architectures():
    assert [board.arch for board in BOARDS] == [75, 80, 86, 89, 90, 100, 120]
    assert board_of("h100") == board_of("H100") and board_of((8, 7)).name == "A10"
    assert board_of(103).arch == 103 and parse_arch("sm_90a") == 90
    for wrong in ("sm_70", "GTX", 7, (9, 0, 0), 10**9, "sm_1000", 91, (9, "a"), -90, True):
        with pytest.raises(ValueError, match=r"is no GPU; known are T4 \(sm_75\).*, sm_121$"):
            board_of(wrong)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"operation": "lineer"}, "did you mean 'linear'"),
        ({"dtype": "int9"}, "dtype 'int9' is unknown .*known are float32, .* 'fp8_e4m3:row'"),
        ({"dtype": "fp16"}, "dtype 'fp16' is of floats"),
        ({"dtype": "int8", "operation": "quantize"}, "dtype 'int8'.*takes float32, float16"),
        ({"dtype": "q4_k", "shape": (64, 100), "format": "int8"}, "multiple of 256"),
        ({"shape": (0, 256)}, r"shape is \(0, 256\)"),
        (
            {"shape": (), "format": "int8", "operation": "silu_mul_quantize"},
            r"^shape is \(\) \(0-d\)",
        ),
        ({"rows": 0}, "rows is 0"),
        ({"rows": 2.5}, "rows is 2.5"),
        ({"rows": True}, "rows is True"),
        ({"shape": (-64, -64)}, r"shape is \(-64, -64\); a tuple of positive ints is wanted"),
        ({"shape": (64.7, 64)}, r"shape is \(64.7, 64\); a tuple of positive ints"),
        ({"shape": 64}, "shape is 64; a tuple of positive ints"),
        ({"shape": "64x64"}, "shape is '64x64'; a tuple of positive ints"),
        ({"shape": np.array(64)}, r"shape is array\(64\); a tuple of positive ints"),
        ({"shape": None}, "shape is None; a tuple of positive ints"),
        ({"dtype": None}, "dtype None is unknown; known are float32, float16, bfloat16"),
        ({"dtype": 5}, "dtype 5 is unknown"),
        ({"dtype": np.float64}, "dtype .*float64.* is unknown"),
        ({"dtype": np.int8}, "dtype .*int8.* is unknown; known are float32"),
        (
            {"operation": "hadamard_quantize", "format": "int8", "shape": (64, 48)},
            "group must be a power of two, got 48",
        ),
        ({"shape": (64,)}, r"shape is \(64,\)"),
        ({"shape": (4, 100), "format": "q4_k"}, "multiple of 256"),
        (
            {"shape": (1024,), "format": "fp8_e4m3:128x128", "operation": "quantize"},
            r"^shape is \(1024,\); a block_size of \(128, 128\) needs two axes",
        ),
        ({"format": "int44"}, "unknown format"),
        ({"arch": "H1000"}, "no GPU"),
        ({"operation": "grouped_linear"}, r"\(E, N, K\)"),
    ],
)
def test_what_is_asked_wrongly_is_named(changed, why):
    asked = {"operation": "linear", "format": "int4", "shape": (64, 256), "arch": "H100", **changed}
    with pytest.raises(ValueError, match=why):
        cq.explain(asked.pop("operation"), **asked)


def test_numbers_and_dtypes_of_numpy_are_taken():
    asked = {"format": "int4", "arch": "H100"}
    wanted = str(cq.explain("linear", shape=(64, 256), rows=3, dtype="float16", **asked))
    for dtype in (np.float16, np.dtype("float16")):
        for rows in (np.int64(3), np.uint8(3)):
            for shape in ([64, 256], np.array([64, 256]), (np.int32(64), 256)):
                found = cq.explain("linear", shape=shape, rows=rows, dtype=dtype, **asked)
                assert str(found) == wanted
                assert type(found.rows) is int and type(found.shape[0]) is int
                assert found.dtype == "float16"


def test_dtypes_of_torch_are_taken():
    torch = pytest.importorskip("torch")
    found = cq.explain("quantize", format="nf4", shape=(64, 256), dtype=torch.bfloat16)
    assert found.dtype == "bfloat16"
