"""What `cuquant bench gemm` and `bench formats` time on a GPU is right, and can be captured."""

import numpy as np
import pytest

import cuquant as cq
from cuquant.bench import formats, gemm, gemm_peers, matmul_peers
from cuquant.bench.gpu import CupyGpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", gemm.PAIRS)
@pytest.mark.parametrize("shape", [(64, 1024, 512), (300, 500, 1024)])
def test_every_pair_is_right_and_timed_as_a_graph(shape, name, gpu):
    settings = gemm.Settings(gemm.parse_pairs([name]), (shape,), 10)
    (found,) = gemm.run(CupyGpu(), settings)
    assert found.right and found.timing.graph


@pytest.mark.parametrize("peer", ["cublas", "int_mm", "scaled_mm", "scaled_mm_fast"])
def test_torchs_products_are_right(peer, torch):
    peers, notes = matmul_peers.find_product_peers([peer], gemm_peers.PEERS)
    assert len(peers) == 1, notes
    settings = gemm.Settings(gemm.parse_pairs(gemm.PAIRS[:4]), ((256, 1024, 1024),), 10)
    found = [p for m in gemm.run(CupyGpu(), settings, peers) for p in m.peers]
    assert found and not [p.problem for p in found if p.problem]


@pytest.mark.parametrize("name", [None, "fp16", "bf16", "fp8_e4m3", "int8", "int4", "int1"])
def test_the_demos_layers_are_timed(name, torch):
    layers = [np.ones(shape, np.float32) for shape in ((384, 384), (1536, 384), (384, 1536))]
    fmt = None if name is None else cq.get_format(name)
    assert formats.layers_time(CupyGpu(), layers, fmt, 32, 10) > 0
