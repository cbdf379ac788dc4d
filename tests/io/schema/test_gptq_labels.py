"""GPTQ files whose label does not say how zero points are stored: symmetric ones tell it."""

import json
import shutil

import numpy as np
import pytest

import cuquant as cq
from cuquant.formats.packing import Packing
from cuquant.io.container.safetensors import SafetensorsReader, SafetensorsWriter


@pytest.fixture(params=[2, 3, 4, 8])
def written(request, tmp_path):
    """A weight, and a folder of it that is stored as "gptq_v2"."""
    fmt = f"int{request.param}:32" + ("+float16" if request.param == 8 else "")
    x = np.random.default_rng(2).standard_normal((64, 128)).astype(np.float16)
    q = cq.quantize(x, fmt)
    cq.save(tmp_path / "w.safetensors", {"a.weight": q})
    cq.convert(tmp_path / "w.safetensors", tmp_path / "v2", "gptq")
    return q, tmp_path


def labelled(folder, **changed):
    """A copy whose configuration says something else."""
    shutil.copytree(folder / "v2", folder / "copy")
    path = folder / "copy" / "config.json"
    said = json.loads(path.read_text())
    said["quantization_config"] |= changed
    path.write_text(json.dumps(said))
    return folder / "copy"


def test_symmetric_zeros_of_the_second_version_labelled_as_the_first(written):
    q, folder = written
    path = labelled(folder, checkpoint_format="gptq")
    with pytest.warns(UserWarning, match="'a.weight': all zero points are"):
        found = cq.load(path)["a.weight"]
    np.testing.assert_array_equal(found.dequantize(np.float32), q.dequantize(np.float32))


def test_symmetric_zeros_of_the_first_version_labelled_as_the_second(written):
    """Each is stored less one."""
    q, folder = written
    bits = q.format.bits
    path = labelled(folder) / "model.safetensors"
    tensors = cq.load(path.parent)["a.weight"]
    assert (tensors.zero_point == 1 << (bits - 1)).all()
    with SafetensorsReader(path) as reader:
        parts = {name: reader.read(name) for name in reader.tensors}
    zeros = np.full((len(parts["a.qzeros"]), 64), (1 << (bits - 1)) - 1, np.uint8)
    parts["a.qzeros"] = np.ascontiguousarray(Packing(bits, "dense").pack(zeros, 0)).view(np.int32)
    specs = {name: (part.dtype, part.shape) for name, part in parts.items()}
    with SafetensorsWriter(path, specs, {}) as writer:
        for name, part in parts.items():
            writer.write(name, part)
    with pytest.warns(UserWarning, match="as sym is true"):
        found = cq.load(path.parent)["a.weight"]
    np.testing.assert_array_equal(found.dequantize(np.float32), q.dequantize(np.float32))


def test_the_label_of_others_is_believed(written):
    q, folder = written
    path = labelled(folder, checkpoint_format="gptq", sym=False)
    zero = cq.load(path)["a.weight"].zero_point
    assert (zero == (1 << (q.format.bits - 1)) + 1).all()
