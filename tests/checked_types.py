# pyright: reportUnnecessaryTypeIgnoreComment=true
"""What a type checker knows of the public functions; pyright reads this file, nothing runs it."""

from typing import TYPE_CHECKING

import numpy as np

import cuquant as cq
from cuquant import functional

if TYPE_CHECKING:
    import torch
    from typing_extensions import assert_type

    from cuquant.torch import QuantLinear, quantize_

    numbers = np.ones((4, 64), np.float32)
    tensor = torch.ones(4, 64)
    q, t = cq.quantize(numbers, "nf4"), cq.quantize(tensor, "nf4:32+dq")

    assert_type(q, cq.QuantArray[np.ndarray])
    assert_type(q.dequantize("float16"), np.ndarray)
    assert_type(cq.dequantize(q.T[:2]), np.ndarray)
    assert_type(cq.embedding([3, 1], t, dtype="float16"), torch.Tensor)
    assert_type(cq.unpack(cq.prepack(t)).dequantize(), torch.Tensor)

    assert_type(cq.linear(numbers, q, activation="silu"), np.ndarray)
    assert_type(cq.linear(tensor, cq.prepack(t)), torch.Tensor)
    assert_type(cq.linear(t, t), torch.Tensor)
    assert_type(cq.matmul(numbers, q.T), np.ndarray)
    assert_type(cq.swiglu(tensor, t, t), torch.Tensor)

    class Block(torch.nn.Module): ...

    assert_type(quantize_(Block(), "nf4:32", double_quant=True), Block)
    layer = QuantLinear.from_linear(torch.nn.Linear(64, 64), "nf4")
    assert_type(layer, QuantLinear)
    assert_type(layer.weight, torch.Tensor)

    found = cq.load("model.safetensors")["weight"]
    if isinstance(found, cq.PackedWeight):
        found = cq.unpack(found)
    found.dequantize()

    cq.quantize([[1.0] * 64], "int4").codes()
    for levels in ("normal", [-1, 0.5], (-1.0, 1.0), np.ones(4), tensor):
        cq.get_format("k4", levels=levels, packing="planes", block_size=(8, 8), scale_dtype=None)
        functional.quantize_kbit(numbers, 4, levels)
    cq.get_format("k4", **cq.get_format("k4", packing="word").options)
    cq.get_format("NF4:32+dq", block_size="row", double_quant=False)  # strings are open
    cq.linear(numbers, q, activation="swish")  # pyright: ignore[reportArgumentType]
    cq.linear(numbers, numbers)  # pyright: ignore[reportArgumentType]
    cq.load("model.safetensors", library="jax")  # pyright: ignore[reportArgumentType]
    cq.save("model.safetensors", {}, nonfinite="clamp")  # pyright: ignore[reportArgumentType]
    QuantLinear(t, activation="swish")  # pyright: ignore[reportArgumentType]
    cq.get_format("k4", packing="bits")  # pyright: ignore[reportArgumentType]
    cq.get_format("k4", levels="loyd")  # pyright: ignore[reportArgumentType]
    cq.get_format("nf4", block_size="rows")  # pyright: ignore[reportArgumentType]
    cq.get_format("int4", scale_dtype="float64")  # pyright: ignore[reportArgumentType]
    cq.get_format("int4", blocksize=32)  # pyright: ignore[reportCallIssue]
    quantize_(Block(), "nf4", double_qant=True)  # pyright: ignore[reportCallIssue]
    functional.quantize_kbit(numbers, 4, packing="bits")  # pyright: ignore[reportArgumentType]
    functional.quantize_q8_1(numbers, sum="codes")  # pyright: ignore[reportArgumentType]
    q.dequantise()  # pyright: ignore[reportAttributeAccessIssue]
