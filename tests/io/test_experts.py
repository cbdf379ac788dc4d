"""Arrays of several experts, [E, N, K], in files of other kinds."""

import numpy as np
import pytest

import cuquant as cq
from cuquant.io.container.safetensors import SafetensorsReader

RNG = np.random.default_rng(5)
pytestmark = pytest.mark.filterwarnings("ignore:the architecture is not known")


def saved(path, fmt, shape=(3, 64, 96), name="experts.weight"):
    """A file of ours with an array of experts, and the array."""
    q = cq.quantize(RNG.standard_normal(shape).astype(np.float16), fmt)
    cq.save(path, {name: q})
    return q


def test_compressed_tensors_has_them_in_one_array(tmp_path):
    kinds = {
        "int4:32": "pack-quantized, 4 bits", "int3:row": "pack-quantized, 3 bits",
        "q4_0": "pack-quantized, 4 bits", "mxfp4": "mxfp4-pack-quantized",
        "mxfp8": "mxfp8-quantized", "fp8_e4m3": "float-quantized",
    }  # fmt: skip
    for i, (fmt, becomes) in enumerate(kinds.items()):
        q = saved(tmp_path / "in.safetensors", fmt)
        (step,) = cq.convert(tmp_path / "in.safetensors", tmp_path / f"{i}", "compressed-tensors")
        assert (step.becomes, step.rounds) == (becomes, False)
        found = cq.load(tmp_path / f"{i}")["experts.weight"]
        assert found.shape == q.shape
        np.testing.assert_array_equal(found.dequantize("float32"), q.dequantize("float32"), fmt)
        if "experts.weight_shape" in step.specs:
            with SafetensorsReader(tmp_path / f"{i}" / "model.safetensors") as reader:
                assert reader.read("experts.weight_shape").tolist() == list(q.shape)


@pytest.mark.parametrize(
    ("fmt", "why"),
    [("uint4:32", "zero points of experts"), ("nvfp4", "share"), ("fp8_e4m3:32x32", "share"),
     ("int8:tensor", "share")],
)  # fmt: skip
def test_what_experts_would_share_is_refused_by_name(tmp_path, fmt, why):
    saved(tmp_path / "in.safetensors", fmt)
    with pytest.raises(ValueError, match=rf"'experts\.weight'.*{why}"):
        cq.convert(tmp_path / "in.safetensors", tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()
    (step,) = cq.convert(
        tmp_path / "in.safetensors", tmp_path / "out", "compressed-tensors", requantize=True
    )
    assert step.rounds and step.recipe is not None
