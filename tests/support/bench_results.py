"""What `cuquant bench` writes, of made-up times."""

from dataclasses import replace

from fake_bench import MACHINE

from cuquant.bench import (
    gemm,
    matmul,
    quantize,
)
from cuquant.bench.gemm_report import GemmMeasurement, GemmResults
from cuquant.bench.matmul_report import ProductMeasurement, ProductResults
from cuquant.bench.quantize_report import (
    Measurement,
    Results,
)
from cuquant.bench.report import Ceilings, PeerTiming
from cuquant.bench.timing import Timing


def quantize_results(**changes):
    took = Timing(50.0, 49.0, 52.0, True, 20, 8)
    quantized = Measurement(
        "nf4", "float16", (4096, 14336), 150_000_000, took, "quantize", True,
        PeerTiming("other 1.0", replace(took, microseconds=600.0)),
    )  # fmt: skip
    back = replace(quantized, operation="dequantize", peer=PeerTiming("other 1.0", None, "broken"))
    slow = Timing(75.0, 75.0, 75.0, False, 10, 8)
    plain = replace(quantized, format="int8", timing=slow, peer=None, exact=False)
    larger = replace(quantized, shape=(16384, 16384), nbytes=687_000_000, timing=slow, peer=None)
    found = Results(
        MACHINE, Ceilings(2.5, 3.0, 3.2), quantize.FORMULA, (quantized, back, plain, larger),
        "cuquant bench quantize", ("a note",),
    )  # fmt: skip
    return replace(found, **changes)


def product_results(**changes):
    took = Timing(10.0, 9.0, 12.0, True, 20, 17)
    first = ProductMeasurement(
        "int4", "float16", (4096, 4096), 8_667_136, took, 11.25, True,
        (
            PeerTiming("cuBLAS (torch 2.11.0)", replace(took, microseconds=20.0)),
            PeerTiming("humming 0.1.19", replace(took, microseconds=15.0)),
            PeerTiming("gemlite 0.6.0", None, "no triton"),
        ),
        1, "fragments/1",
    )  # fmt: skip
    slow = Timing(400.0, 400.0, 400.0, False, 10, 8)
    second = replace(
        first, batch=4096, nbytes=75_759_616, timing=slow, right=False, peers=first.peers[:1]
    )
    third = replace(first, format="nf4", peers=())
    found = ProductResults(
        MACHINE, Ceilings(2.5, 3.0, 3.2), matmul.FORMULA, (first, second, third),
        "cuquant bench matmul", ("a note",), {"float16": 800.0},
    )  # fmt: skip
    return replace(found, **changes)


def gemm_results(**changes):
    took = Timing(10.0, 9.0, 12.0, True, 20, 17)
    first = GemmMeasurement(
        "int8", "bfloat16", (64, 14336, 4096), 60_000_000, took, 21.25, True,
        (
            PeerTiming("cuBLAS (torch 2.11.0)", replace(took, microseconds=40.0)),
            PeerTiming("_int_mm (torch 2.11.0, int32 sums alone)", replace(took, microseconds=25)),
            PeerTiming("humming 0.1.19", None, "no nvcc"),
        ),
    )  # fmt: skip
    second = replace(first, format="fp8_e4m3@int4", right=False, peers=first.peers[:1])
    found = GemmResults(
        MACHINE, Ceilings(2.5, 3.0, 3.2), gemm.FORMULA, (first, second),
        "cuquant bench gemm", ("a note",),
    )  # fmt: skip
    return replace(found, **changes)
