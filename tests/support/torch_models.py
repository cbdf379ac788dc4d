"""Models for the tests of cuquant.torch, formats to quantize them to, arrays for gradients."""

import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

import cuquant.torch  # noqa: E402

nn = torch.nn
NAMES = cq.list_formats()
FEW = ("nf4", "k3", "int4", "uint4", "int8", "mxfp4", "nvfp4", "fp16", "bf16", "q4_0", "q4_k")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VARIANTS = {
    "double": cq.get_format("nf4", double_quant=True),
    "levels": cq.get_format("k3", levels=(-1.0, -0.25, 0.0, 0.1, 0.7)),
    "words": cq.get_format("k3", packing="word"),
    "pair": cq.get_format("fp8_e4m3", block_size=(128, 128)),
    "tensor": cq.get_format("int8", block_size="tensor"),
    "flat": cq.get_format("nf4:flat4096"),
    "permuted": cq.get_format("int4+permuted"),
    "absmax": cq.get_format("int8+absmax"),
}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(n=24, k=256, bias=True, seed=0, dtype=torch.float32):
    made = nn.Linear(k, n, bias=bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(random(n, k, seed=seed))
        if bias:
            made.bias.copy_(random(n, seed=seed + 1))
    return made


class Block(nn.Module):
    """A transformer's MLP, with a norm and a head; the head may be the embedding's weight."""

    def __init__(self, tied=False, width=64, hidden=96, words=40):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mlp = nn.ModuleDict(
            {"gate": nn.Linear(width, hidden, bias=False), "down": nn.Linear(hidden, width)}
        )
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, words, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.mlp["down"](nn.functional.silu(self.mlp["gate"](x)))
        return self.lm_head(self.norm(x))


def kinds(model):
    return {n: type(m).__name__ for n, m in model.named_modules() if "Linear" in type(m).__name__}


def buffers_equal(a, b):
    mine, others = a.state_dict(), b.state_dict()
    return list(mine) == list(others) and all(
        v.dtype == others[k].dtype and torch.equal(v, others[k]) for k, v in mine.items()
    )


def components(layer):
    """Names and tensors of what a layer's weight is stored in."""
    return [(n, p) for n, p in layer.named_parameters() if p.dtype == torch.uint8]


def arguments(layer):
    """What the layer hands to the operator behind x."""
    return layer._parts(), *layer._words


# ---- gradients ----------------------------------------------------------------------------------

# Of a sum of 256 products whose order differs, of the largest: 2^-24 * sqrt(256) and some more.
CLOSE = 4e-6
EXPERTS = torch.tensor([0, 3, 1, 0, 0])  # of five rows


def wanting(*shape, dtype=torch.float32, seed=0, times=1):
    return (random(*shape, seed=seed) * times).to(dtype).requires_grad_()


def quantized(*shape, fmt="int4", seed=0):
    q = cq.quantize(random(*shape, seed=seed), fmt)
    return q, q.dequantize()


def assert_close(found, wanted, tolerance=CLOSE):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    found, wanted = found.double(), wanted.double()
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-30)


def trained():
    """A model between whose layers gradients flow, and its parameters that learn."""
    model = nn.Sequential(linear(32, 64), nn.LayerNorm(32), linear(16, 32, seed=3))
    cuquant.torch.quantize_(model, "int4", include=["0", "2"])
    model[2].bias.requires_grad_()
    return model
