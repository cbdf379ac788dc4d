"""A decoder of Llama's shape with random weights, and what a user of PyTorch does with it.

It stands for the models that linear layers are swapped in: a step counts whole, with norms,
attention and head. torch is imported here by name; nothing else of the benchmarks needs it.
"""

import gc
import importlib
import importlib.metadata
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import nn
from torch.nn import functional as F

import cuquant.torch
from cuquant.bench.model import RANK, STEPS_OF, ModelRow, Settings, Sizes
from cuquant.bench.peers import reason
from cuquant.bench.timing import Call
from cuquant.errors import BackendUnavailable

VERSION = torch.__version__
STEPS = 4  # of the eager model between two looks at the clock
BOUND = 0.02  # of the outputs' norm: the rounding of float16 in all layers; codes gone wrong give 1
Caches = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Block(nn.Module):
    """Attention with grouped keys, and a gated layer, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        wide, narrow = sizes.heads * sizes.head, sizes.key_heads * sizes.head

        def linear(ins: int, outs: int) -> nn.Linear:
            return nn.Linear(ins, outs, bias=False)

        self.q, self.o = linear(sizes.hidden, wide), linear(wide, sizes.hidden)
        self.k, self.v = (linear(sizes.hidden, narrow) for _ in range(2))
        self.gate, self.up = (linear(sizes.hidden, sizes.intermediate) for _ in range(2))
        self.down = linear(sizes.intermediate, sizes.hidden)
        self.norms = nn.ParameterList(torch.ones(sizes.hidden) for _ in range(2))

    def forward(
        self, x: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """x [B, T, hidden] + both layers of it; T is 1 where there is a cache, else causal."""
        width = (self.sizes.hidden,)
        heads = (*x.shape[:2], -1, self.sizes.head)
        h = F.rms_norm(x, width, self.norms[0])
        q, k, v = (f(h).view(heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        if cache is not None:
            for kept, new in zip(cache, (k, v), strict=True):
                kept[:, :, -1:] = new
            k, v = cache
        a = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = F.rms_norm(x, width, self.norms[1])
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Blocks, a norm and a head: from hidden states [B, T, hidden] to logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.Parameter(torch.ones(sizes.hidden))
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(
        self, x: torch.Tensor, caches: Caches | None = None, last: bool = False
    ) -> torch.Tensor:
        """Logits of all tokens, or of each sequence's last one."""
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        return self.head(F.rms_norm(x[:, -1:] if last else x, self.norm.shape, self.norm))


class Adapted(nn.Module):
    """A frozen layer and LoRA beside it."""

    def __init__(self, base: nn.Linear, like: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(like.new_empty(RANK, base.in_features).normal_(0, 0.02))
        self.up = nn.Parameter(like.new_zeros(base.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """base(x) + up(down(x))."""
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def build(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder, always of the same numbers."""
    with torch.device("meta"):
        model = Decoder(sizes).to(dtype)
    model.to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for p in model.parameters():
        if p.dim() == 2:
            p.normal_(0, 0.02, generator=generator)
        else:
            p.fill_(1)
    return model


def _swap_(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put something else in the place of each linear layer, the head's too."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, make(layer))


def adapt_(model: nn.Module, like: torch.Tensor) -> list[nn.Parameter]:
    """Give each linear layer an adapter of `like`'s dtype; what learns."""
    _swap_(model, lambda layer: Adapted(layer, like))
    return [p for p in model.parameters() if p.requires_grad]


# ---- other libraries ----------------------------------------------------------------------------


def _bitsandbytes(model: nn.Module, dtype: torch.dtype) -> str:
    """Swap the linear layers as transformers does; the library's name for a row."""
    library = importlib.import_module("bitsandbytes")

    def quantized(layer: nn.Linear) -> nn.Module:
        made = library.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, compute_dtype=dtype,
            quant_type="nf4", device="meta",
        )  # fmt: skip
        weight = library.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
        made.weight = weight.to(layer.weight.device)
        return made

    _swap_(model, quantized)
    return f"bitsandbytes {importlib.metadata.version('bitsandbytes')}, nf4+dq"


# By the name that selects it: the module that must be installed, and what swaps the layers.
PEERS: Mapping[str, tuple[str, Callable[[nn.Module, torch.dtype], str]]] = {
    "bitsandbytes": ("bitsandbytes", _bitsandbytes)
}


# ---- timing -------------------------------------------------------------------------------------


class Subject:
    """One kind of weights: its model, what it does, and how long that took."""

    def __init__(self, name: str, model: nn.Module, nbytes: int, own: bool) -> None:
        self.name, self.model, self.nbytes, self.own = name, model, nbytes, own
        self.took: dict[str, list[float]] = {}
        self.calls: dict[str, Call] = {}

    def median(self, what: str) -> float | None:
        """Milliseconds; None where it was not measured."""
        return statistics.median(self.took[what]) if what in self.took else None


class Bench:
    """Inputs that all models share, on one device."""

    def __init__(self, settings: Settings, device: str) -> None:
        self.settings, self.device = settings, torch.device(device)
        self.dtype = getattr(torch, settings.dtype)
        self.cuda = self.device.type == "cuda"
        if self.cuda and not torch.cuda.is_available():
            raise BackendUnavailable("PyTorch finds no GPU; pip install a torch with CUDA")
        sizes, rows = settings.sizes, settings.rows
        generator = torch.Generator(self.device).manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, generator=generator, device=self.device)
            return made.to(self.dtype)

        kept = (rows, sizes.key_heads, settings.context, sizes.head)
        self.caches = [(random(*kept), random(*kept)) for _ in range(sizes.layers)]
        self.token = random(rows, 1, sizes.hidden)
        self.prompt = random(1, settings.prompt, sizes.hidden)
        self.batch = random(*settings.batch, sizes.hidden)
        self.targets = torch.randint(
            sizes.vocabulary, settings.batch, generator=generator, device=self.device
        )

    def subject(self, name: str) -> Subject:
        """A model with weights of a dtype, a format or a library."""
        before = self._held()
        model = build(self.settings.sizes, self.device, self.dtype)
        own = name in self.settings.formats
        if own:
            cuquant.torch.quantize_(model, name)
        elif name in PEERS:
            name = PEERS[name][1](model, self.dtype)
        parts = (*model.parameters(), *model.buffers())
        nbytes = self._held() - before if self.cuda else sum(p.nbytes for p in parts)
        return Subject(name, model, nbytes, own)

    def decode(self, subjects: Sequence[Subject], begin: Callable[[str], None]) -> None:
        """Steps of one token a sequence, eager and as a graph, and a prompt."""
        with torch.inference_mode():
            for subject in subjects:
                begin(f"{subject.name}: decoding")
                model = subject.model

                def step(model: nn.Module = model) -> torch.Tensor:
                    return model(self.token, self.caches, last=True)

                def prefill(model: nn.Module = model) -> torch.Tensor:
                    return model(self.prompt, last=True)

                subject.calls = {"eager": step, "prefill": prefill}
                if self.cuda:
                    with suppress(RuntimeError):  # what cannot be captured has no time
                        subject.calls["graph"] = self._captured(step)
            self._rounds(subjects, begin)

    def train(self, subjects: Sequence[Subject], begin: Callable[[str], None]) -> None:
        """Forward and backward of adapters beside every linear layer."""
        for subject in subjects:
            model = subject.model
            learned = adapt_(model, self.token)

            def step(model: nn.Module = model, learned: Sequence[nn.Parameter] = learned) -> None:
                logits = model(self.batch.detach().requires_grad_())
                loss = F.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())
                loss.backward()
                for p in learned:
                    p.grad = None

            subject.calls = {"train": step}
        self._rounds(subjects, begin)

    def wrong(self, subject: Subject) -> str | None:
        """What is wrong with the results: they are compared with the decoded weights'."""
        with torch.inference_mode():
            found = subject.model(self.token, self.caches, last=True).double()
        cuquant.torch.dequantize_(subject.model)
        with torch.inference_mode():
            wanted = subject.model(self.token, self.caches, last=True).double()
        error = ((found - wanted).norm() / wanted.norm()).item()
        return None if error < BOUND else f"{error:.2g} away from the decoded weights' result"

    def _rounds(self, subjects: Sequence[Subject], begin: Callable[[str], None]) -> None:
        """Every call of every model in turn, so that what changes with time meets all alike."""
        names = dict.fromkeys(what for subject in subjects for what in subject.calls)
        for what in names:
            for turn in range(-1, self.settings.repeats):  # the first warms up
                begin(f"{what}: round {max(turn, 0) + 1} of {self.settings.repeats}")
                for subject in (one for one in subjects if what in one.calls):
                    took = self._milliseconds(subject.calls[what], 1 if what == "train" else STEPS)
                    if turn >= 0:
                        subject.took.setdefault(what, []).append(took)

    def _milliseconds(self, call: Call, steps: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(steps):
            call()
        self._wait()
        return (time.perf_counter() - start) / steps * 1e3

    def _captured(self, step: Call) -> Call:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        self._wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def _held(self) -> int:
        """Bytes of all tensors on the GPU; a library keeps some beside its parameters."""
        if not self.cuda:
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(self.device)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)


def run(
    settings: Settings, device: str, begin: Callable[[str], None] = lambda text: None
) -> tuple[list[ModelRow], list[str]]:
    """Measure every kind of weights, and compare what was timed with the decoded weights.

    Parameters
    ----------
    settings
        What to measure.
    device
        "cpu", "cuda" or "cuda:N".
    begin
        Called with a text before each step.

    Returns
    -------
    A row for each kind that could be made, and why others could not.

    Raises
    ------
    BackendUnavailable
        For a GPU that torch does not find.
    """
    bench = Bench(settings, device)
    subjects, notes = [], []
    for name in (settings.dtype, *settings.formats, *settings.peers):
        begin(f"{name}: making the model")
        if name in PEERS and importlib.util.find_spec(PEERS[name][0]) is None:
            notes.append(f"{name}: {PEERS[name][0]} is not installed")
            continue
        try:
            subjects.append(bench.subject(name))
        except Exception as error:
            if name not in PEERS:  # whatever another library raises is no reason to stop
                raise
            notes.append(f"{name} cannot be used: {reason(error)}")
    bench.decode(subjects, begin)
    if settings.train:
        try:
            bench.train(subjects, begin)
        except torch.OutOfMemoryError:  # what was measured before is kept
            notes.append(f"train: {device} has too little memory for all models")
            for subject in subjects:
                subject.took.pop("train", None)
    rows = []
    while subjects:
        subject = subjects.pop(0)
        begin(f"{subject.name}: checking")
        problem = bench.wrong(subject) if subject.own else None
        times = {f"{what}_ms": subject.median(what) for what in STEPS_OF}
        rows.append(ModelRow(subject.name, subject.nbytes / 1e9, problem, **times))
    return rows, notes
