"""The operators as torch checks, compiles and computes them again."""

import subprocess
import sys
from functools import partial
from itertools import product

import pytest
from in_turn import in_turn
from samples import sampled

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

from cuquant.torch import QuantLinear, activations, llm_int8, op, products  # noqa: E402
from cuquant.torch.functions import _described, _weight  # noqa: E402
from cuquant.torch.operators import TABLE  # noqa: E402

F = torch.nn.functional


def _factor(q):
    """An array as operators take it that look at its axes."""
    parts, fmt, _, shape, _ = _described(q, q.stored_shape)
    return parts, fmt, shape, q.axes


def _rows(operation, other, weight=None, bias=None, eps=1e-6, group=None, format="int8"):
    """Arguments of quantize_rows behind x."""
    return operation, other, weight, bias, eps, group, format, -1, "propagate"


EIGHT = cq.functional.quantize_llm_int8(random(24, 256), 0)[:2]


def calls():
    """By operator, arguments of which some require gradients."""
    q, stack = quantized(24, 256)[0], quantized(4, 24, 64, fmt="int8")[0]
    rows = arguments(QuantLinear(q))
    vectors = random(64), random(64, seed=1)
    finish = wanting(24, seed=1), "gelu", wanting(3, 24, seed=2), torch.bfloat16
    of_experts = *_weight(stack, "w", 3), "experts", EXPERTS
    return {
        "linear": (wanting(3, 256), *rows, *finish),
        "linear_grad_x": (wanting(3, 24), *rows, torch.float16),
        "dequantize": rows,
        "quantize": (wanting(64, 3), "nf4", 0, "propagate"),
        "quantize_rows": (wanting(3, 64), *_rows("layernorm", None, *vectors, 1e-5)),
        "quantize_rows_with_sum": (random(3, 64), *_rows("add_rmsnorm", random(3, 64), vectors[0])),
        "llm_int8": (wanting(3, 256, times=3), *EIGHT, 6.0, wanting(24, seed=1)),
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
    "llm_int8_linear": lambda x, q, p, stack: cq.functional.llm_int8_linear(
        x * 3, *EIGHT, threshold=6.0
    ),
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


W = random(256)
QUANTIZED = {
    "an RMSNorm": lambda x: cq.functional.rmsnorm_quantize(x, W),
    "a sum's": lambda x: cq.functional.add_rmsnorm_quantize(x, x * 2, W, format="mxfp8"),
    "a LayerNorm": lambda x: cq.functional.layernorm_quantize(x, W, eps=1e-3, format="int4:32"),
    "a SwiGLU": lambda x: cq.functional.silu_mul_quantize(x, up=x, format="nf4", axis=0),
    "a GeGLU": lambda x: cq.functional.gelu_mul_quantize(gate=x, up=x).dequantize(),
    "a transform": lambda x: cq.functional.hadamard_quantize(x, group=16, signs=W.sign()),
    "and kept": lambda x: _with_sum(x)[0].dequantize() + _with_sum(x)[1],
    "alone": lambda x: cq.quantize(x, "int4", block_size=32, axis=0),
    "by a format": lambda x: cq.quantize(x, VARIANTS["double"], nonfinite="propagate"),
    "by options": lambda x: cq.quantize(x, "k3", levels="linear").dequantize(),
    "to another dtype": lambda x: cq.dequantize(cq.quantize(x, "int8:32"), "bfloat16"),
    "across": lambda x: cq.quantize(x, "q8_0", axis=0).dequantize(torch.float16),
    "and looked up": lambda x: cq.embedding(EXPERTS, cq.quantize(x, "nf4"), dtype="float16"),
    "looked up across": lambda x: cq.embedding(EXPERTS[None], cq.quantize(x, "int8:32", axis=0)),
    "and multiplied": lambda x: cq.linear(x, cq.quantize(x, "mxfp4"), activation="relu"),
}


def _with_sum(x):
    out = torch.empty_like(x)
    return cq.functional.add_rmsnorm_quantize(x, x * 2, W, residual_out=out), out


@pytest.mark.parametrize(
    ("name", "dynamic"),
    sampled(product(QUANTIZED, [None, True]), lambda name, _: name, lambda _, dynamic: dynamic),
)
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


# ---- every operator, one promise after the other ------------------------------------------------

DIFFERENTIABLE = [name for name, operator in TABLE.items() if operator.backward]
CODES = [name for name, operator in TABLE.items() if operator.is_codes]


def call_of(name):
    """The operator as a function of what requires gradients, and these tensors."""
    args = calls()[name]
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad]

    def call(*tensors):
        given = list(args)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        return TABLE[name].overload(*given)

    return call, [args[place].detach().requires_grad_() for place in places]


def of(made):
    """A number that depends on all that came out."""
    return sum(part.float().square().sum() for part in (made if isinstance(made, list) else [made]))


def flowing(call, tensors):
    return torch.autograd.grad(of(call(*tensors)), tensors)


def all_equal(a, b):
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_each_compiles_forward_and_backward(name):
    call, tensors = call_of(name)
    wanted = flowing(call, tensors)
    torch._dynamo.reset()  # of other operators, by the same code
    torch._dynamo.utils.counters.clear()
    for dynamic in (None, True):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        assert all_equal(flowing(compiled, tensors), wanted)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("name", [name for name in TABLE if name not in DIFFERENTIABLE])
def test_each_compiles_forward(name):
    args = calls()[name]
    call = lambda *args: TABLE[name].overload(*args)  # noqa: E731
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found, wanted = torch.compile(call, fullgraph=True, backend="aot_eager")(*args), call(*args)
    pair = (found, wanted) if isinstance(wanted, list) else ([found], [wanted])
    assert all_equal(*pair) and not torch._dynamo.utils.counters["graph_break"]


# What computes an operator, and may compute its gradients too.
DOORS = {
    "linear": (op, "_product"),
    "linear_grad_x": (op, "_matmul"),
    "matmul": (products, "_product"),
    "swiglu": (products, "_gated"),
    "grouped_linear": (products, "_of_experts"),
    "grouped_linear_grad_x": (products, "_of_experts"),
    "llm_int8": (llm_int8, "_product"),
    "quantized_linear": (activations, "_product"),
    "quantized_grouped_linear": (activations, "_of_experts"),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_each_under_checkpoints(name, monkeypatch):
    """Gradients are equal, and a selective checkpoint runs the forward once."""
    call, tensors = call_of(name)
    module, door = DOORS[name]
    ran, kernel = [], getattr(module, door)
    monkeypatch.setattr(module, door, lambda *a, **k: ran.append(1) or kernel(*a, **k))
    wanted = flowing(call, tensors)
    once = len(ran)
    contexts = partial(create_selective_checkpoint_contexts, [TABLE[name].overload])
    for options, more in (
        ({"use_reentrant": True}, 1),
        ({"use_reentrant": False}, 1),
        ({"use_reentrant": False, "context_fn": contexts}, 0),
    ):
        leaves = [t.detach().requires_grad_() for t in tensors]
        ran.clear()
        of(checkpoint(lambda *t: call(*t) * 1, *leaves, **options)).backward()
        assert all_equal([t.grad for t in leaves], wanted)
        assert len(ran) == once + more


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_each_has_no_forward_mode_and_no_transforms(name):
    call, tensors = call_of(name)
    plain = [t.detach() for t in tensors]
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(call, tuple(plain), tuple(plain))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(plain[0], torch.ones_like(plain[0]))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            call(dual, *plain[1:])
    with pytest.raises(RuntimeError, match=r"no gradient in torch\.func"):
        torch.func.grad(lambda x: of(call(x, *plain[1:])))(plain[0])
    mapped = torch.func.vmap(lambda x: call(x, *plain[1:]))
    if name == "llm_int8":  # which has no list of tensors: torch calls it one by one
        assert torch.equal(mapped(plain[0][None])[0], call(*plain))
    else:
        with pytest.raises(RuntimeError, match="Batching rule not implemented"):
            mapped(plain[0][None])


@pytest.mark.parametrize("name", TABLE)
def test_nothing_that_comes_out_is_a_view(name):
    made = TABLE[name].overload(*calls()[name])
    for part in made if isinstance(made, list) else [made]:
        assert not part._is_view()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_each_in_inference_mode(name):
    call, tensors = call_of(name)
    wanted = call(*tensors)
    with torch.inference_mode():
        found = call(*tensors)
        assert found.is_inference() and torch.equal(found, wanted)
    assert all_equal(flowing(call, tensors), flowing(call, tensors))  # training goes on


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_each_of_no_rows_of_more_axes_and_of_strides(name):
    """x [0, K], [2, 2, K], and with gaps: as of rows one by one."""
    args = calls()[name]
    x = args[0].detach()
    if "grouped" in name or name == "matmul":
        x = torch.stack([x, x], -1)[..., 0]
        assert not x.is_contiguous()
        wanted = TABLE[name].overload(args[0].detach(), *args[1:])
        assert torch.equal(TABLE[name].overload(x, *args[1:]), wanted)
        return
    args = [None if name == "linear" and i == 8 else a for i, a in enumerate(args)]
    four = torch.cat([x, x])[:4]
    wanted = four.clone().requires_grad_()
    y = TABLE[name].overload(wanted, *args[1:])
    (dx,) = torch.autograd.grad(of(y), wanted)
    for make in (
        lambda: torch.stack([four, four], 1)[:, 0],
        lambda: four.T.contiguous().T,
        lambda: four.reshape(2, 2, -1),
    ):
        other = make().detach().requires_grad_()
        found = TABLE[name].overload(other, *args[1:])
        assert not found._is_view() and found.shape == (*other.shape[:-1], y.shape[-1])
        assert_close(found.reshape(y.shape), y)
        (mine,) = torch.autograd.grad(of(found), other)
        assert_close(mine.reshape(dx.shape), dx)
    none = x[:0].clone().requires_grad_()
    (mine,) = torch.autograd.grad(of(TABLE[name].overload(none, *args[1:])), none)
    assert mine.shape == none.shape


@pytest.mark.parametrize("name", CODES)
def test_codes_are_made_of_what_requires_a_gradient(name):
    """As if it were detached."""
    args = calls()[name]
    made = TABLE[name].overload(*args)
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    assert all_equal(made, TABLE[name].overload(*plain))
    assert not any(part.requires_grad for part in made)


def test_what_has_no_gradient_refuses_what_requires_one():
    args = list(calls()["quantize_rows_with_sum"])
    args[0] = args[0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="x requires grad, and no gradient flows back"):
        TABLE["quantize_rows_with_sum"].overload(*args)
    x, out = wanting(3, 256), torch.empty(3, 256)
    with pytest.raises(RuntimeError, match="x requires grad, and no gradient flows back"):
        cq.functional.add_rmsnorm_quantize(x, random(3, 256), W, residual_out=out)
    cq.functional.add_rmsnorm_quantize(x, random(3, 256), W)
    codes, absmax = EIGHT
    with pytest.raises(RuntimeError, match="absmax requires grad"):
        cq.functional.llm_int8_linear(x, codes, absmax.clone().requires_grad_())


@pytest.mark.parametrize("name", [n for n in DIFFERENTIABLE if n != "matmul"])
def test_a_saved_weight_that_changes_is_an_error(name):
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in calls()[name]]
    args = [[p.clone() for p in a] if isinstance(a, list) else a for a in args]
    args[0] = args[0].detach().requires_grad_()
    y = TABLE[name].overload(*args)
    held = args[1] if isinstance(args[1], torch.Tensor) else args[1][0]
    held.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        of(y).backward()
