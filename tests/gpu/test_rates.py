"""What a GPU does in a microsecond: measured, reckoned from its properties, or an H100's."""

import sys
from types import SimpleNamespace

import pytest

from cuquant.gpu import rates
from cuquant.gpu.rates import H100, rates_of, reckoned

A100 = {13: 1_410_000, 16: 108, 36: 1_215_000, 37: 5120, 75: 8, 76: 0}


@pytest.fixture
def device(monkeypatch):
    """A device of a name and attributes, in CuPy's place."""

    def make(name, attributes):
        runtime = SimpleNamespace(
            getDeviceProperties=lambda _: {"name": name.encode()},
            deviceGetAttribute=lambda number, _: attributes.get(number, 0),
        )
        fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
        monkeypatch.setitem(sys.modules, "cupy", fake)
        rates_of.cache_clear()
        return rates_of(0)

    yield make
    rates_of.cache_clear()


def test_a_measured_gpu_has_the_rates_of_the_table(device):
    for name, found in rates.MEASURED.items():
        assert device(name, {}) == found


def test_another_gpu_has_rates_by_its_clocks(device):
    """An A100 of 40 GB: 1.56 TB/s, 312 and 19.5 TFLOP/s by its data sheet."""
    found = device("NVIDIA A100-SXM4-40GB", A100)
    assert found.read == pytest.approx(0.94 * 1.555e6, rel=0.01)
    assert found.tensor == pytest.approx(0.68 * 312e6, rel=0.01)
    assert found.float32 == pytest.approx(0.66 * 19.5e6, rel=0.01)


@pytest.mark.parametrize("missing", [13, 16, 36, 37])
def test_a_gpu_that_does_not_tell_is_taken_for_an_h100(device, missing):
    assert device("a slice", {**A100, missing: 0}) == H100


def test_an_h100_by_its_clocks_is_near_to_what_was_measured():
    found = reckoned(1_980_000, 132, 2_619_000, 5120, 90)
    for name in ("read", "tensor", "float32"):
        assert getattr(found, name) == pytest.approx(getattr(H100, name), rel=0.1)
    assert found.tiles.memory == pytest.approx(H100.tiles.memory, rel=0.1)


def test_a_gpu_with_fewer_multiprocessors_reads_weights_as_fast():
    """An H100 PCIe has 114 of them, and memory of 2.04 TB/s by its data sheet."""
    found = reckoned(1_755_000, 114, 1_593_000, 5120, 90)
    assert found.tiles.memory / H100.tiles.memory == pytest.approx(found.read / H100.read)


@pytest.mark.parametrize("arch", [75, 80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_every_architecture_has_rates(arch):
    assert reckoned(1_500_000, 100, 1_000_000, 1024, arch).tensor > 0
