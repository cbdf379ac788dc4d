"""Gradients through frozen quantized weights: those of autograd on the decoded weights."""

from functools import partial

import pytest
from in_turn import in_turn

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from torch_models import (  # noqa: E402
    CLOSE,
    DTYPES,
    EXPERTS,
    NAMES,
    VARIANTS,
    assert_close,
    components,
    linear,
    quantized,
    random,
    trained,
    wanting,
)

from cuquant.torch import QuantLinear  # noqa: E402

F = torch.nn.functional
ACTIVATIONS = {None: lambda z: z, "relu": torch.relu, "gelu": F.gelu, "silu": F.silu}
WITH_ACTIVATION = 2e-5  # whose derivative takes such sums, and is as steep as 1.1
INTEGERS = {  # by what says so: the expert of each of five rows
    "experts": ({"experts": EXPERTS}, [0, 3, 1, 0, 0]),
    "offsets": ({"offsets": [0, 2, 2, 3, 5]}, [0, 0, 2, 3, 3]),
}


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


def test_weights_of_numpy_and_parts_of_others():
    rows, stack = cq.quantize(random(48, 256), "nf4")[::2], cq.quantize(random(4, 24, 256), "int4")
    host = cq.quantize(random(24, 256).numpy(), "nf4")
    for q in (rows, stack[1], host, cq.prepack(host)):
        w = torch.as_tensor(q.dequantize())
        assert_gradients_equal(lambda x, q=q: cq.linear(x, q), lambda x, w=w: x @ w.T, wanting(256))


def test_no_rows():
    x, bias = wanting(0, 256), wanting(24)
    cq.linear(x, quantized(24, 256)[0], bias, activation="gelu").sum().backward()
    assert x.grad.shape == x.shape and not bias.grad.any()


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


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_llm_int8_linear(threshold):
    """Those of the decoded weight's product, from which the result itself differs by x's codes."""
    codes, absmax, _ = cq.functional.quantize_llm_int8(random(24, 256), 0)
    w = codes.float() * (absmax / 127)[:, None]
    x, bias = wanting(2, 3, 256, times=3), wanting(24, seed=1)
    mine = partial(cq.functional.llm_int8_linear, threshold=threshold)
    y = mine(x, codes, absmax, bias)
    assert_close(y, F.linear(x, w, bias), 0.02)
    assert not y._is_view()
    g = random(2, 3, 24, seed=3).requires_grad_()
    found = torch.autograd.grad(y, (x, bias), g, create_graph=True)
    wanted = torch.autograd.grad(F.linear(x, w, bias), (x, bias), g, create_graph=True)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b)
    again, theirs = (
        torch.autograd.grad(d[0].square().sum() + d[1].square().sum(), g) for d in (found, wanted)
    )
    assert_close(again[0], theirs[0], 4 * CLOSE)
    for dtype in DTYPES:
        x = wanting(5, 256, dtype=dtype, times=3)
        y = mine(x, codes, absmax, bias)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert y.dtype == dx.dtype == dtype


@in_turn("dtype", DTYPES)
def test_gradients_of_llm_int8_are_those_of_its_owner(dtype):
    """bitsandbytes decodes to x's dtype; ours are rounded once."""
    bnb = pytest.importorskip("bitsandbytes")
    codes, absmax, _ = cq.functional.quantize_llm_int8(random(24, 256), 0)
    x, bias = wanting(5, 256, dtype=dtype, times=3), wanting(24, dtype=dtype, seed=1)
    state = bnb.MatmulLtState()
    state.threshold, state.has_fp16_weights, state.CB, state.SCB = 6.0, False, codes, absmax
    theirs = bnb.autograd._functions.MatMul8bitLt.apply(x, codes, None, bias, state)
    mine = cq.functional.llm_int8_linear(x, codes, absmax, bias)
    g = random(5, 24, seed=3).to(dtype)
    pair = (torch.autograd.grad(y, (x, bias), g) for y in (mine, theirs))
    eps = torch.finfo(dtype).eps
    for a, b in zip(*pair, strict=True):
        assert_close(a, b, 4e-6 + 2 * eps)


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
    assert not any(p.requires_grad for p in layer.parameters())
    layer(x).sum().backward()
    assert layer.bias.grad is None and all(p.grad is None for _, p in components(layer))


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
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(layer)(x)


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
