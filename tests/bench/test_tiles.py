"""What tiles take, from times that are known."""

import numpy as np
import pytest
from fake_bench import FakeGpu

import cuquant as cq
from cuquant.bench import tiles
from cuquant.gpu.rates import H100_TILES
from cuquant.ops.matmul.hopper_tiles import Decoding, Work, divide, time_us


def work(name="int4:128", columns=4096, depth=4096):
    return Work(columns, depth, Decoding.of(cq.get_format(name), depth), 132, H100_TILES)


def timed(costs):
    """Every case, as long as these costs say."""
    for name in tiles.FORMATS[:2]:
        for columns, depth in tiles.LAYERS[::2]:
            for rows in tiles.ROWS[::3]:
                case = tiles.likely(rows, work(name, columns, depth))
                own = case.work._replace(costs=costs)
                yield tiles.Timed(case, tuple(time_us(s, rows, own) for s in case.ways))


@pytest.mark.parametrize("name", tiles.FORMATS)
def test_the_way_that_is_chosen_is_one_of_the_likely_ones(name):
    for columns, depth in tiles.LAYERS:
        case = tiles.likely(128, work(name, columns, depth))
        assert case.ways[0] == divide(128, case.work)
        assert len(set(case.ways)) == len(case.ways) <= tiles.MOST_WAYS


def test_every_kind_of_decoding_is_measured():
    kinds = {Decoding.of(cq.get_format(name), 4096).kind for name in tiles.FORMATS}
    assert kinds == {"computed", "looked_up", "heavy", "blocks"}


def test_costs_are_found_from_times():
    """Of a GPU whose memory is faster and whose blocks hand sums over more slowly."""
    true = H100_TILES._replace(memory=3600.0, handing=4500.0, looked_up=(130.0, 60.0))
    measured = list(timed(true))
    assert tiles.loss(measured, true) == 0
    before = tiles.loss(measured, H100_TILES)
    found = tiles.fit(measured, H100_TILES)
    assert tiles.loss(measured, found) < before / 20
    assert found.handing == pytest.approx(true.handing, rel=0.1)
    assert found.looked_up == pytest.approx(true.looked_up, rel=0.1)
    assert found.memory == pytest.approx(true.memory, rel=0.1)


def test_numbers_of_costs_are_those_of_their_fields():
    numbers = tiles._numbers(H100_TILES)
    assert tiles._costs(numbers, H100_TILES) == H100_TILES
    assert len(numbers) == sum(np.size(field) for field in H100_TILES)


def test_all_ways_are_compiled_and_then_timed(monkeypatch):
    """With NumPy in the GPU's place, where calls do nothing."""
    compiled, called = set(), []
    monkeypatch.setattr(tiles, "LAYERS", ((256, 512), (128, 1024)))
    monkeypatch.setattr(tiles, "ROWS", (24, 160))
    monkeypatch.setattr(tiles.jit, "compiled", lambda program, arch: compiled.add(program))

    def calls_of(shape, x, weights, y):
        called.append((shape, len(x), len(weights)))
        assert y.shape == (len(x), weights[0].shape[0])
        return [lambda: None]

    monkeypatch.setattr(tiles, "calls_of", calls_of)
    texts, gpu = [], FakeGpu()
    found = list(tiles.measure_tiles(gpu, 132, H100_TILES, 10, texts.append))
    assert len(found) == len(tiles.FORMATS) * 2 * 2
    assert [shape for case, _ in found for shape in case.ways] == [shape for shape, *_ in called]
    assert all(len(us) == len(case.ways) and min(us) > 0 for case, us in found)
    assert len(compiled) >= len({shape for shape, *_ in called}) and "nf4 256x512" in texts
    assert all(count >= 2 for *_, count in called)
