"""The operators as torch checks, compiles and computes them again."""

import subprocess
import sys
from functools import partial

import pytest
from in_turn import in_turn

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from torch_models import (  # noqa: E402
    EXPERTS,
    NAMES,
    VARIANTS,
    arguments,
    assert_close,
    quantized,
    random,
    trained,
    wanting,
)

from cuquant.torch import QuantLinear, op  # noqa: E402
from cuquant.torch.functions import _described, _weight  # noqa: E402
from cuquant.torch.operators import TABLE  # noqa: E402

F = torch.nn.functional


def _factor(q):
    """An array as operators take it that look at its axes."""
    parts, fmt, _, shape, _ = _described(q, q.stored_shape)
    return parts, fmt, shape, q.axes


def calls():
    """By operator, arguments of which some require gradients."""
    q, stack = quantized(24, 256)[0], quantized(4, 24, 64, fmt="int8")[0]
    rows = arguments(QuantLinear(q))
    finish = wanting(24, seed=1), "gelu", wanting(3, 24, seed=2), torch.bfloat16
    of_experts = *_weight(stack, "w", 3), "experts", EXPERTS
    return {
        "linear": (wanting(3, 256), *rows, *finish),
        "linear_grad_x": (wanting(3, 24), *rows, torch.float16),
        "dequantize": rows,
        "quantize": (wanting(64, 3), "nf4", 0, "propagate"),
        "embedding": (EXPERTS, *_factor(q), torch.bfloat16),
        "matmul": (wanting(5, 24), *_factor(stack), torch.float32, False),
        "swiglu": (wanting(3, 256), *_weight(q), *_weight(q)),
        "grouped_linear": (wanting(5, 64), *of_experts),
        "quantized_linear": (wanting(3, 256), *rows, "int8", None, wanting(24, seed=1), "silu"),
        "quantized_grouped_linear": (wanting(5, 64), *of_experts, "int8", None),
        "grouped_linear_grad_x": (wanting(5, 24), *of_experts),
    }


def test_every_operator_is_checked():
    assert calls().keys() == TABLE.keys()


@pytest.mark.parametrize("name", TABLE)
def test_opcheck(name):
    """As torch has it: schema, autograd, fakes, and what torch.compile makes of it."""
    args = calls()[name]
    close = {"atol": 1e-2, "rtol": 1e-2}  # results in bfloat16 and float16
    torch.library.opcheck(TABLE[name].overload, args, **close)
    with torch.no_grad():
        plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    torch.library.opcheck(TABLE[name].overload, tuple(plain), **close)


def gradients(model, run, x):
    model.zero_grad()
    x = x.detach().requires_grad_()
    run(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_compile_forward_and_backward(dynamic):
    model, x = trained(), random(3, 64)
    wanted = gradients(model, model, x)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for a, b in zip(gradients(model, compiled, x), wanted, strict=True):
        assert_close(a, b)
    gradients(model, compiled, random(4, 64))
    assert not torch._dynamo.utils.counters["graph_break"]


LAYER = QuantLinear(cq.quantize(random(24, 256), "int4"))
CALLS = {
    "linear": lambda x, q, p, stack: cq.linear(x, q, activation="silu"),
    "of a packed weight": lambda x, q, p, stack: cq.linear(x, p),
    "of a layer": lambda x, q, p, stack: cq.linear(x, LAYER),
    "matmul": lambda x, q, p, stack: cq.matmul(x, q.T, out_dtype="float16"),
    "operator": lambda x, q, p, stack: x @ q.T,
    "as stored": lambda x, q, p, stack: x[:, :24] @ q,
    "on the left": lambda x, q, p, stack: q @ x.T,
    "torch.matmul": lambda x, q, p, stack: torch.matmul(x, q.T),
    "F.linear": lambda x, q, p, stack: F.linear(x, q),
    "F.linear of a packed weight": lambda x, q, p, stack: F.linear(x, p),
    "swiglu": lambda x, q, p, stack: cq.swiglu(x, q, w_up=p),
    "grouped_linear": lambda x, q, p, stack: cq.grouped_linear(x[:, :64], stack, EXPERTS[:3]),
    "a stack": lambda x, q, p, stack: x[:, :24] @ stack,
}


@pytest.mark.parametrize("name", CALLS)
def test_compile_sees_operators_in_what_is_called(name):
    """No graph ends; weights are arguments, and another format is another graph."""
    call = CALLS[name]
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for fmt in ("int4", "nf4"):
        q, stack = quantized(24, 256, fmt=fmt)[0], quantized(4, 24, 64, fmt=fmt)[0]
        args = q, cq.prepack(q), stack
        x = wanting(3, 256)
        wanted, found = call(x, *args), compiled(x, *args)
        assert torch.equal(found, wanted)
        mine, theirs = (
            torch.autograd.grad(y.float().square().sum(), x)[0] for y in (found, wanted)
        )
        assert torch.equal(mine, theirs)
    assert not torch._dynamo.utils.counters["graph_break"]


QUANTIZED = {
    "alone": lambda x: cq.quantize(x, "int4", block_size=32, axis=0),
    "by a format": lambda x: cq.quantize(x, VARIANTS["double"], nonfinite="propagate"),
    "by options": lambda x: cq.quantize(x, "k3", levels="linear").dequantize(),
    "to another dtype": lambda x: cq.dequantize(cq.quantize(x, "int8:32"), "bfloat16"),
    "across": lambda x: cq.quantize(x, "q8_0", axis=0).dequantize(torch.float16),
    "and looked up": lambda x: cq.embedding(EXPERTS, cq.quantize(x, "nf4"), dtype="float16"),
    "looked up across": lambda x: cq.embedding(EXPERTS[None], cq.quantize(x, "int8:32", axis=0)),
    "and multiplied": lambda x: cq.linear(x, cq.quantize(x, "mxfp4"), activation="relu"),
}


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_sees_an_operator_in_quantize(name, dynamic):
    call = QUANTIZED[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (32, 96):
        x = random(rows, 256)
        found, wanted = compiled(x), call(x)
        if isinstance(wanted, cq.QuantArray):
            assert cq.array_equal(found, wanted) and found.dtype == wanted.dtype
            assert torch.equal(found.packed, wanted.packed)
        else:
            assert torch.equal(found, wanted)
    assert not cq.quantize(x.requires_grad_(), "nf4").dequantize().requires_grad


def test_what_quantize_is_told_that_no_operator_takes():
    """The graph ends before the call."""
    x = random(8, 64)
    for named in ({"scale": torch.ones(8, 1)}, {"stochastic": True, "seed": 7}):
        call = partial(cq.quantize, format="int8", **named)
        compiled = torch.compile(lambda x, call=call: call(x * 2), backend="aot_eager")
        assert cq.array_equal(compiled(x), call(x * 2))


@in_turn("fmt", NAMES)
def test_opcheck_of_quantize(fmt):
    torch.library.opcheck(TABLE["quantize"].overload, (wanting(24, 256), fmt, -1, "propagate"))


def test_a_graph_ends_before_what_no_operator_takes():
    q, x = quantized(24, 256)[0], random(3, 256)
    call = lambda x: cq.linear(x + 1, q, batch_invariant=True) * 2  # noqa: E731
    assert torch.equal(torch.compile(call, backend="aot_eager")(x), call(x))
    host = q.numpy()
    call = lambda x: cq.linear(x + 1, host) * 2  # noqa: E731
    assert torch.equal(torch.compile(call, backend="aot_eager")(x), call(x))


def test_torch_compile_exchanges_no_factors():
    """Dynamo hands over q @ x and x @ q alike, where both are right."""
    q, x = quantized(64, 64)[0], random(64, 64)
    for call in (lambda x: q @ x * 1, lambda x: x @ q * 1, lambda x: q @ x[0], lambda x: x[0] @ q):
        assert torch.equal(torch.compile(call, backend="aot_eager")(x), call(x))
    call = torch.compile(lambda x: cq.matmul(q, x), fullgraph=True, backend="aot_eager")
    assert torch.equal(call(x), q @ x)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_products(strict):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = quantized(64, 64)[0]

        def forward(self, x):
            return x @ self.q + cq.linear(x, self.q)

    model, x = Model(), random(64, 64)
    program = torch.export.export(model, (x,), strict=strict)
    assert "cuquant.matmul.default" in str(program.graph)
    assert torch.equal(program.module()(x), model(x))


def test_compile_needs_no_import_of_its_own():
    code = (
        "import torch, cuquant as cq, sys\n"
        "q, x = cq.quantize(torch.ones(8, 64), 'int8'), torch.ones(2, 64)\n"
        "f = torch.compile(lambda x: x @ q.T, fullgraph=True, backend='aot_eager')\n"
        "assert 'cuquant.torch' not in sys.modules and torch.equal(f(x), x @ q.T)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_checkpoints():
    """Reentrant, not, and selective, which multiplies once."""
    model, x = trained(), random(3, 64)
    wanted = gradients(model, model, x)
    contexts = partial(create_selective_checkpoint_contexts, [op.LINEAR])
    for options in (
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"use_reentrant": False, "context_fn": contexts},
    ):
        for run in (model, torch.compile(model, backend="aot_eager")):
            found = gradients(model, lambda v, o=options, r=run: checkpoint(r, v, **o), x)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_selective_checkpoints_multiply_once(monkeypatch):
    model, x = trained(), random(3, 64)
    seen = []
    product = op._product
    monkeypatch.setattr(op, "_product", lambda *a, **k: seen.append(1) or product(*a, **k))
    contexts = partial(create_selective_checkpoint_contexts, [op.LINEAR])
    for options, times in (({}, 4), ({"context_fn": contexts}, 2)):
        seen.clear()
        gradients(model, lambda v, o=options: checkpoint(model, v, use_reentrant=False, **o), x)
        assert len(seen) == times
