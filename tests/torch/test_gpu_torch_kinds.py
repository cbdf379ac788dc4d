"""Tables, filters, experts and quantized inputs on a GPU."""

import copy

import pytest

import cuquant as cq

pytestmark = pytest.mark.gpu


@pytest.fixture
def layers(torch):
    """The module cuquant.torch."""
    import cuquant.torch

    return cuquant.torch


@pytest.fixture
def random(torch):
    """random(*shape, dtype=, seed=): numbers on the GPU, which the CPU makes."""

    def make(*shape, dtype=torch.float16, seed=0):
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return numbers.to(dtype).cuda()

    return make


@pytest.fixture
def replayed(torch):
    """replayed(run): what a CUDA graph of run gives."""

    def make(run):
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = run()
        graph.replay()
        torch.cuda.synchronize()
        return y

    return make


@pytest.mark.parametrize("fmt", ["nf4", "int8", "q4_k", "mxfp4"])
def test_a_table_and_its_head(fmt, torch, layers, random, replayed):
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(600, 512), "head": torch.nn.Linear(512, 600, bias=False)}
    )
    model = model.half().cuda()
    model["head"].weight = model["embed"].weight
    layers.quantize_(model, {"embed": fmt, "head": fmt})
    embed, head = model["embed"], model["head"]
    assert embed._parts()[0] is head._parts()[0] and not head.is_prepacked
    ids = torch.tensor([[3, 599, 0], [7, 7, 1]], device="cuda")
    values = embed.weight.detach()
    assert torch.equal(embed(ids), values[ids])
    assert torch.equal(replayed(lambda: embed(ids)), values[ids])
    x = random(3, 512)
    torch.testing.assert_close(head(x), x @ values.T, rtol=2e-2, atol=2e-1)


def test_filters(torch, layers, random):
    conv = torch.nn.Conv2d(32, 64, 3, padding=1).half().cuda()
    layer = layers.QuantConv2d.from_conv(conv, "int8")
    with torch.no_grad():
        conv.weight.copy_(layer.weight.detach())
        x = random(2, 32, 16, 16)
        torch.testing.assert_close(layer(x), conv(x))


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("fmt", ["int4", "mxfp4", "int8"])
def test_experts(fmt, prepack, torch, layers, random, replayed):
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.act_fn = torch.nn.SiLU()
            self.gate_up_proj = torch.nn.Parameter(random(8, 512, 256) / 16)
            self.gate_up_proj_bias = torch.nn.Parameter(random(8, 512, seed=3))
            self.down_proj = torch.nn.Parameter(random(8, 256, 256, seed=1) / 16)

    model = torch.nn.ModuleDict({"experts": Experts()})
    experts = layers.quantize_(model, fmt, prepack=prepack)["experts"]
    same = layers.dequantize_(copy.deepcopy(model))["experts"]
    for tokens in (1, 5, 200):
        x = random(tokens, 256, seed=2)
        scores = random(tokens, 8, dtype=torch.float32, seed=4).softmax(-1)
        weights, index = scores.topk(2, -1)
        index[0, 1] = 8  # no expert
        half = weights.half()
        y = experts(x, index, half)
        wanted = torch.zeros(tokens, 256, device="cuda")
        with torch.no_grad():
            for e in range(8):
                share = (weights * (index == e)).sum(1, keepdim=True)
                inner = x.float() @ same.gate_up_proj[e].float().T + same.gate_up_proj_bias[e]
                gate, up = inner.chunk(2, -1)
                gated = torch.nn.functional.silu(gate) * up
                wanted += share * (gated @ same.down_proj[e].float().T)
        torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=2e-2)
        again = replayed(lambda x=x, i=index, w=half: experts(x, i, w))
        torch.testing.assert_close(again, y, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scale", [None, 0.04])
@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_quantized_inputs(fmt, prepack, scale, torch, layers, random, replayed):
    plain = torch.nn.Linear(512, 256).half().cuda()
    of_input = "int8" if scale is None else "int8:tensor"
    layer = layers.QuantLinear.from_linear(
        plain, fmt, activations=of_input, input_scale=scale, prepack=prepack
    )
    for rows in (1, 17, 300):
        x = random(rows, 512)
        q = cq.quantize(x, of_input, scale=scale)
        wanted = cq.linear(q, layer.quantized, layer.bias.detach(), out_dtype="float16")
        assert torch.equal(layer(x), wanted)
        assert torch.equal(replayed(lambda x=x: layer(x)), wanted)
    leaf = x.clone().requires_grad_()
    layer(leaf).float().sum().backward()
    values = layer.weight.detach().float().sum(0).expand(300, 512)
    torch.testing.assert_close(leaf.grad.float(), values, rtol=2e-2, atol=2e-2)


def test_fp8_inputs(torch, layers, random):
    layer = layers.QuantLinear.from_linear(
        torch.nn.Linear(512, 256).bfloat16().cuda(), "fp8_e4m3", activations="fp8_e4m3"
    )
    x = random(33, 512, dtype=torch.bfloat16)
    wanted = x.float() @ layer.weight.detach().float().T + layer.bias.detach().float()
    error = (layer(x).float() - wanted).norm() / wanted.norm()
    assert error < 0.04  # e4m3 rounds to 3 bits: 2^-4 at most, half of that in the mean


def test_llm_int8(torch, layers, random):
    plain = torch.nn.Linear(512, 256).half().cuda()
    layer, host = (
        layers.LLMInt8Linear.from_float(plain),
        layers.LLMInt8Linear.from_float(plain.cpu()),
    )
    for key, part in host.state_dict().items():
        assert torch.equal(layer.state_dict()[key].cpu(), part)
    x = random(9, 512)
    x[2, 5] = 20.0
    torch.testing.assert_close(layer(x).cpu(), host(x.cpu()), rtol=1e-2, atol=1e-2)
