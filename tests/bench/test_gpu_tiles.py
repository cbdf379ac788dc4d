"""Ways to divide a product that are timed give the product, each of them."""

import numpy as np
import pytest
from fragment_products import Expected
from products import normal, weight

import cuquant as cq
from cuquant.bench import tiles
from cuquant.gpu.rates import H100_TILES
from cuquant.ops.matmul.hopper_tiles import Decoding, Work

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", tiles.FORMATS)
@pytest.mark.parametrize("rows", [40, 300])
def test_every_likely_way_multiplies(rows, name, gpu):
    device = gpu.cuda.Device()
    if device.compute_capability != "90":
        pytest.skip("matmul/hopper.cu is for Hopper")
    q, x = weight(name, (1000, 2048)), normal((rows, 2048), "float16")
    p, moved = cq.prepack(q.to("cuda")), gpu.asarray(x)
    processors = device.attributes["MultiProcessorCount"]
    work = Work(*q.shape, Decoding.of(q.format, 2048), processors, H100_TILES)
    case, wanted = tiles.likely(rows, work), Expected.of(x, q)
    assert len(case.ways) > 2
    for shape in case.ways:
        y = gpu.full((rows, 1000), np.nan, "float16")
        (call,) = tiles.calls_of(shape, moved, [p], y)
        call()
        assert wanted.admits(y.get(), 2048, on_gpu=True), shape
