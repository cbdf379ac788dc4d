"""Gradients through frozen quantized weights: those of autograd on the decoded weights."""

import subprocess
import sys
from functools import partial

import pytest
from in_turn import in_turn

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from torch_models import DTYPES, NAMES, VARIANTS, arguments, linear, random  # noqa: E402

from cuquant.torch import QuantLinear, op, quantize_  # noqa: E402
from cuquant.torch.functions import _described, _weight  # noqa: E402
from cuquant.torch.operators import TABLE  # noqa: E402

nn, F = torch.nn, torch.nn.functional
ACTIVATIONS = {None: lambda z: z, "relu": torch.relu, "gelu": F.gelu, "silu": F.silu}
# Of a sum of 256 products whose order differs, of the largest: 2^-24 * sqrt(256) and some more.
CLOSE = 4e-6
WITH_ACTIVATION = 2e-5  # whose derivative takes such sums, and is as steep as 1.1
EXPERTS = torch.tensor([0, 3, 1, 0, 0])
INTEGERS = {  # by what says so: the expert of each of five rows
    "experts": ({"experts": EXPERTS}, [0, 3, 1, 0, 0]),
    "offsets": ({"offsets": [0, 2, 2, 3, 5]}, [0, 0, 2, 3, 3]),
}


def wanting(*shape, dtype=torch.float32, seed=0):
    return random(*shape, dtype=dtype, seed=seed).requires_grad_()


def quantized(*shape, fmt="int4", seed=0):
    q = cq.quantize(random(*shape, seed=seed), fmt)
    return q, q.dequantize()


def assert_close(found, wanted, tolerance=CLOSE):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    found, wanted = found.double(), wanted.double()
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-30)


def assert_gradients_equal(function, reference, *inputs, tolerance=CLOSE, twice=True):
    """Values, gradients, and gradients of those: of what flows to the first input."""
    found, wanted = function(*inputs), reference(*inputs)
    assert not found._is_view()
    assert_close(found, wanted, tolerance)
    g = random(wanted.numel(), dtype=wanted.dtype, seed=8).reshape(wanted.shape).requires_grad_()
    mine, theirs = (torch.autograd.grad(y, inputs, g, create_graph=twice) for y in (found, wanted))
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, b, tolerance)
    if not twice:
        return
    mine, theirs = (
        torch.autograd.grad(d[0].square().sum(), (g, *inputs), allow_unused=True)
        for d in (mine, theirs)
    )
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None) or not torch.any(a if b is None else b)
        if a is not None and b is not None:
            assert_close(a, b, 4 * tolerance)


# ---- against autograd on the decoded weight -----------------------------------------------------


@pytest.mark.parametrize("fmt", [*NAMES, *VARIANTS])
@in_turn("prepack", [False, True])
def test_linear(fmt, prepack):
    q, w = quantized(24, 256, fmt=VARIANTS.get(fmt, fmt))
    layer = QuantLinear(cq.prepack(q) if prepack else q)
    assert_gradients_equal(layer, lambda x: F.linear(x, w), wanting(2, 3, 256))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bias_activation_and_residual(activation):
    q, w = quantized(24, 256)
    inputs = wanting(3, 256), wanting(24, seed=1), wanting(3, 24, seed=2)

    def reference(x, bias, residual):
        return ACTIVATIONS[activation](F.linear(x, w, bias)) + residual

    def mine(x, bias, residual):
        return cq.linear(x, q, bias, activation=activation, residual=residual)

    def product(x, bias, residual):
        return cq.matmul(x, q.T, bias=bias, activation=activation, residual=residual)

    assert_gradients_equal(mine, reference, *inputs, tolerance=WITH_ACTIVATION)
    assert_gradients_equal(product, reference, *inputs, tolerance=WITH_ACTIVATION)
    x, bias, _ = inputs
    y = cq.linear(x.detach(), q, bias, activation=activation)  # only the bias wants one
    y.sum().backward()
    assert bias.grad is not None and x.grad is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    """Gradients have their tensors' dtypes; a product's is rounded once, like F.linear's."""
    q, w = quantized(24, 256)
    x, bias = wanting(5, 256, dtype=dtype), wanting(24, seed=1)
    y = cq.linear(x, q, bias)
    g = random(5, 24, seed=3).to(dtype)
    mine = torch.autograd.grad(y, (x, bias), g)
    wide = x.detach().float().requires_grad_()
    theirs = torch.autograd.grad(F.linear(wide, w, bias), (wide, bias), g.float())
    assert [t.dtype for t in (y, *mine)] == [dtype, dtype, torch.float32]
    half_ulp = CLOSE if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_close(mine[0].float(), theirs[0], half_ulp)
    assert_close(mine[1], theirs[1])
    wider = cq.linear(x, q, out_dtype=torch.float32)
    assert torch.autograd.grad(wider.sum(), x)[0].dtype == dtype


def turned(q):
    """With the last two of three axes exchanged, which torch's transpose is told otherwise."""
    return q.transpose(0, 2, 1) if isinstance(q, cq.QuantArray) else q.mT


SHAPES = {
    "rows": ((2, 3, 256), (24, 256), lambda x, q: x @ q.T),
    "row": ((256,), (24, 256), lambda x, q: x @ q.T),
    "as stored": ((3, 24), (24, 256), lambda x, q: x @ q),
    "one as stored": ((24,), (24, 256), lambda x, q: x @ q),
    "left": ((4, 256, 5), (24, 256), lambda x, q: q @ x),
    "left of one": ((256,), (24, 256), lambda x, q: q @ x),
    "stack": ((4, 5, 64), (4, 24, 64), lambda x, q: torch.matmul(x, turned(q))),
    "broadcast": ((5, 24), (4, 24, 64), lambda x, q: x @ q),
    "one to a stack": ((24,), (4, 24, 64), lambda x, q: x @ q),
    "stack and one": ((64,), (4, 24, 64), lambda x, q: q @ x),
    "vector": ((3, 64), (64,), lambda x, q: x @ q),
    "dot": ((64,), (64,), lambda x, q: x @ q),
    "vector on the left": ((2, 64, 3), (64,), lambda x, q: q @ x),
    "empty": ((0, 256), (24, 256), lambda x, q: x @ q.T),
}


@pytest.mark.parametrize("name", SHAPES)
def test_matmul(name):
    of_x, of_q, product = SHAPES[name]
    q, w = quantized(*of_q, fmt="int8")
    x = wanting(*of_x)
    if not x.numel():
        (dx,) = torch.autograd.grad(product(x, q).sum(), x)
        assert dx.shape == x.shape
        return
    assert_gradients_equal(partial(product, q=q), partial(product, q=w), x)


def test_a_weight_whose_blocks_run_along_its_rows():
    w = random(64, 24)
    q = cq.quantize(w, "int4", axis=0)
    assert_gradients_equal(
        lambda x: cq.linear(x, q), lambda x: F.linear(x, q.dequantize()), wanting(3, 24)
    )


def test_swiglu():
    (gate, a), (up, b) = quantized(24, 256), quantized(24, 256, fmt="nf4", seed=1)
    reference = lambda x: F.silu(F.linear(x, a)) * F.linear(x, b)  # noqa: E731
    for pair in ((gate, up), (cq.prepack(gate), up), (QuantLinear(gate), QuantLinear(up))):
        mine = partial(cq.swiglu, w_gate=pair[0], w_up=pair[1])
        assert_gradients_equal(mine, reference, wanting(3, 256), tolerance=WITH_ACTIVATION)


@pytest.mark.parametrize("by", INTEGERS)
@pytest.mark.parametrize("prepack", [False, True])
def test_grouped_linear(by, prepack):
    q, w = quantized(4, 24, 64, fmt="int8")
    named, experts = INTEGERS[by]
    held = cq.prepack(q) if prepack else q
    assert_gradients_equal(
        lambda x: cq.grouped_linear(x, held, **named),
        lambda x: torch.einsum("tk,tnk->tn", x, w[experts]),
        wanting(5, 64),
    )


def test_grouped_linear_of_counts():
    q, w = quantized(4, 24, 64, fmt="int8")
    counts = torch.tensor([2, 0, 6, 3])
    counted = (torch.arange(6) < counts[:, None])[..., None]
    assert_gradients_equal(
        lambda x: cq.grouped_linear(x, q, counts=counts),
        lambda x: torch.einsum("emk,enk->emn", x, w) * counted,
        wanting(4, 6, 64),
    )


# ---- opcheck, compile, checkpoints --------------------------------------------------------------


def calls():
    """By operator, arguments of which some require gradients."""
    q, stack = quantized(24, 256)[0], quantized(4, 24, 64, fmt="int8")[0]
    parts, fmt, _, shape, dtype = _described(stack, stack.stored_shape)
    rows = arguments(QuantLinear(q))
    finish = wanting(24, seed=1), "gelu", wanting(3, 24, seed=2), torch.bfloat16
    of_experts = *_weight(stack, "w", 3), "experts", EXPERTS
    return {
        "linear": (wanting(3, 256), *rows, *finish),
        "linear_grad_x": (wanting(3, 24), *rows, torch.float16),
        "dequantize": rows,
        "quantize": (wanting(64, 3), "nf4", 0, "propagate"),
        "matmul": (wanting(5, 24), parts, fmt, shape, (0, 1, 2), dtype, False),
        "swiglu": (wanting(3, 256), *_weight(q), *_weight(q)),
        "grouped_linear": (wanting(5, 64), *of_experts),
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


def trained():
    """A model between whose layers gradients flow, and its parameters that learn."""
    model = nn.Sequential(linear(32, 64), nn.LayerNorm(32), linear(16, 32, seed=3))
    quantize_(model, "int4", include=["0", "2"])
    model[2].bias.requires_grad_()
    return model


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


# ---- what torch expects -------------------------------------------------------------------------


def test_autocast():
    """x takes autocast's dtype, which the user chooses, and gradients have their tensors' own."""
    model, x = trained(), random(3, 64)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            y = model[0](x.requires_grad_())
            assert y.dtype == dtype
            (inside,) = torch.autograd.grad(y.sum(), x)  # checkpointing runs backward in there
        y = model[0](x.to(dtype))
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], inside)
        assert inside.dtype == torch.float32


def test_outputs_are_no_views():
    """What follows may write to them, as to no output of F.linear's with three axes and a bias."""
    layer, x = QuantLinear.from_linear(linear(), "nf4"), wanting(2, 3, 256)
    y = layer(x)
    assert not y._is_view()
    y.mul_(2).sum().backward()
    assert x.grad is not None


def test_gradients_flow_where_they_are_wanted():
    layer = QuantLinear.from_linear(linear(), "nf4")
    x = wanting(2, 256)
    wanted = layer(x.detach())
    assert not wanted.requires_grad and torch.equal(layer(x), wanted)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = layer(x)
            assert not y.requires_grad and torch.equal(y, wanted)
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x), wanted)
    assert [p.requires_grad for p in layer.parameters()] == [False]
    layer(x).sum().backward()
    assert layer.bias.grad is None and all(b.grad is None for b in layer.buffers())


def test_a_layer_made_in_inference_mode_trains():
    with torch.inference_mode():
        layer = QuantLinear.from_linear(linear(), "nf4")
    x = wanting(2, 256)
    w = layer.quantized.dequantize().clone()
    layer(x).sum().backward()
    assert_close(x.grad, w.sum(0).expand(2, 256))


def test_a_weight_that_changes_before_backward_is_an_error():
    layer, x = QuantLinear.from_linear(linear(), "nf4"), wanting(2, 256)
    y = layer(x)
    layer.packed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_layer_keeps_no_x():
    """Without an activation nothing of x is needed again."""
    x = wanting(2, 256)
    inner = x * 1
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        QuantLinear.from_linear(linear(), "nf4")(inner)
    assert saved and not any(t.data_ptr() == inner.data_ptr() for t in saved)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", ["grad", "jvp", "jacrev", "jacfwd"])
def test_transforms_that_get_no_gradient_are_errors(way):
    """torch makes zeros of what it does not find."""
    layer, x = QuantLinear.from_linear(linear(), "nf4"), random(2, 256)
    ways = {
        "grad": lambda: torch.func.grad(lambda v: layer(v).sum())(x),
        "jvp": lambda: torch.func.jvp(layer, (x,), (x,)),
        "jacrev": lambda: torch.func.jacrev(layer)(x),
        "jacfwd": lambda: torch.func.jacfwd(layer)(x),
    }
    with pytest.raises(RuntimeError, match=r"no (gradient in torch.func|forward-mode)"):
        ways[way]()
    with torch.autograd.forward_ad.dual_level():
        for dual in (random(2, 256), wanting(2, 256)):
            dual = torch.autograd.forward_ad.make_dual(dual, torch.ones(2, 256))
            with pytest.raises(RuntimeError, match="no forward-mode derivative"):
                layer(dual)


def test_no_gradient_flows_through_where_a_result_goes():
    q, x = quantized(24, 256)[0], wanting(3, 256)
    for named in ({"out": torch.zeros(3, 24)}, {"batch_invariant": True}):
        with pytest.raises(RuntimeError, match=rf"takes no {next(iter(named))}=.*no_grad"):
            cq.linear(x, q, **named)
        with torch.no_grad():
            cq.linear(x, q, **named)
    with pytest.raises(RuntimeError, match="takes no out_scale="):
        cq.matmul(x, q.T, out_dtype="int8", out_scale=1.0)
    with pytest.raises(TypeError, match="out_dtype"):
        cq.linear(x, q, out_dtype=torch.float64)
    with pytest.raises(ValueError, match="its last axis must be 256"):
        cq.linear(wanting(3, 255), q)
    with pytest.raises(TypeError, match="must be a QuantArray"):
        cq.linear(x, random(24, 256))
