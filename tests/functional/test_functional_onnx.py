"""The functions of `functional` that name ONNX give the results of its own node tests."""

import importlib
from collections.abc import Iterator

import numpy as np
import pytest
from functional_inputs import F32

import cuquant.functional as F

node = pytest.importorskip("onnx.backend.test.case.node", reason="onnx is not installed")


def cases(operator: str) -> Iterator[tuple[str, list[np.ndarray], list[np.ndarray]]]:
    """Name, inputs and outputs of each of ONNX's tests of an operator, without its expansions."""
    importlib.import_module(f"{node.__name__}.{operator.lower()}")  # which makes them
    for case in node._NodeTestCases:
        own = case.model.graph.node[0].op_type == operator and "_expanded" not in case.name
        for inputs, outputs in case.data_sets if own else ():
            yield case.name, list(inputs), list(outputs)


def params(operator: str) -> list:
    found = [pytest.param(*arrays, id=name) for name, *arrays in cases(operator)]
    assert found, f"onnx brings no tests of {operator}"
    return found


@pytest.mark.parametrize(("inputs", "outputs"), params("DynamicQuantizeLinear"))
def test_dynamic_quantize(inputs, outputs):
    found = F.dynamic_quantize(*inputs)
    for part, wanted in zip(found, outputs, strict=True):
        assert part.dtype == wanted.dtype and part.shape == wanted.shape
        assert (part == wanted).all()


def test_dynamic_quantize_divides():
    """-2.5 / 0.019607844 is -127.499995 in float32; by the reciprocal it is -127.5."""
    q, _, zero_point = F.dynamic_quantize(np.array([0, 2, -3, -2.5, 1.34, 0.5], F32))
    assert q.tolist() == [153, 255, 0, 26, 221, 179] and zero_point == 153


@pytest.mark.parametrize("seed", range(4))
def test_dynamic_quantize_as_the_reference_of_onnx(seed):
    ops = pytest.importorskip("onnx.reference.ops.op_dynamic_quantize_linear")
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((64, 512)) * 10 ** rng.uniform(-5, 5)).astype(F32)
    wanted = ops.DynamicQuantizeLinear._run(None, x)
    for part, want in zip(F.dynamic_quantize(x), wanted, strict=True):
        assert part.dtype == want.dtype and (part == want).all()


@pytest.mark.parametrize(("inputs", "outputs"), params("MatMulInteger"))
def test_int8_matmul(inputs, outputs):
    a, b, *points = inputs
    names = ("zero_point_a", "zero_point_b")
    given = {name: point.item() for name, point in zip(names, points, strict=False)}
    assert (F.int8_matmul(a, b, **given) == outputs[0]).all()


def plain(operator: str) -> list:
    """Those of 8-bit integers and one float32 scale."""
    return [
        param
        for param in params(operator)
        if all(x.dtype in (F32, np.int8, np.uint8) for x in (*param.values[0], *param.values[1]))
        and all(x.size == 1 or x.ndim == 2 for x in param.values[0])
    ]


@pytest.mark.parametrize(("inputs", "outputs"), plain("QLinearMatMul"))
def test_int8_matmul_with_scales(inputs, outputs):
    """QLinearMatMul rounds to 8 bits what int8_matmul leaves in float32."""
    a, scale_a, point_a, b, scale_b, point_b, scale_y, point_y = inputs
    values = F.int8_matmul(a, b, scale_a, scale_b, 1.0, point_a.item(), point_b.item())
    limits = np.iinfo(outputs[0].dtype)
    y = np.clip(np.rint(values / scale_y) + point_y, limits.min, limits.max)
    assert (y == outputs[0]).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_nibbles_are_those_of_onnx(axis):
    """Its tensors of int4 hold two elements a byte in row-major order, the first one low."""
    onnx = pytest.importorskip("onnx")
    x = np.random.default_rng(0).integers(-8, 8, (6, 8)).astype(np.int8)
    turned = np.ascontiguousarray(np.moveaxis(x, axis, -1))
    kind = onnx.TensorProto.INT4
    tensor = onnx.helper.make_tensor("x", kind, turned.shape, turned.reshape(-1).tolist())
    raw = bytes(tensor.raw_data) or bytes(v & 255 for v in tensor.int32_data)
    packed = np.moveaxis(F.pack_int4(x, axis), axis, -1)
    assert np.ascontiguousarray(packed).tobytes() == raw
    assert (np.moveaxis(F.unpack_int4(F.pack_int4(x, axis), axis=axis), axis, -1) == turned).all()
