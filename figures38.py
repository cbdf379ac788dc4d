"""Figures of a Llama-8B-shaped model: decode step (M = 1), QLoRA step, host time of a layer's call.

    python3 figures38.py [--tests] [--layers 32] [--train-layers 32] [--tiny]

One process, all ways interleaved, ten rounds, medians. Outputs and gradients are checked against
decoded weights first. A decode step is all of it: norms, attention over 512 tokens, head. A QLoRA
step is forward and backward of the layers (no head, no optimizer), 2 x 1024 tokens, LoRA of rank 16
on all linear layers, bf16. `--tiny` runs small shapes on the CPU, for its logic alone.
bitsandbytes comes from the folders .whl and .whlbnb, if they are there.
"""

import argparse, copy, gc, glob, os, statistics, subprocess, sys, time

START = time.time()
WHEELS = "/tmp/whl"
found = glob.glob(".whl/*.whl") + glob.glob(".whlbnb/*.whl")
if found and not os.path.isdir(WHEELS):
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", WHEELS, *found], check=False)
sys.path[:0] = [os.getcwd()]
sys.path.append(WHEELS)

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--tests", action="store_true")
parser.add_argument("--tiny", action="store_true")
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--train-layers", type=int, default=32)
parser.add_argument("--rounds", type=int, default=10)
parser.add_argument("--skip", default="", help="of: decode, host, train")
A = parser.parse_args()

if A.tiny:
    A.layers = A.train_layers = 1
    A.rounds = 2
    dev, H, I, V, NH, KV, HD, CTX, TOKENS, RANK = "cpu", 256, 512, 512, 4, 2, 64, 16, (2, 8), 4
else:
    import cupy  # noqa: F401
    dev, H, I, V, NH, KV, HD, CTX, TOKENS, RANK = "cuda", 4096, 14336, 128256, 32, 8, 128, 512, (2, 1024), 16

import cuquant as cq  # noqa: E402
import cuquant.torch as ct  # noqa: E402

try:
    import bitsandbytes as bnb
except Exception as error:  # whatever a peer may lack
    bnb = None
    print("# no bitsandbytes:", str(error)[:150])


def say(*words):
    print(*words, flush=True)


def sync():
    if dev == "cuda":
        torch.cuda.synchronize()


def free():
    gc.collect()
    if dev == "cuda":
        torch.cuda.empty_cache()


# ---- the model ----------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, dt):
        super().__init__()
        lin = lambda i, o: nn.Linear(i, o, bias=False, device=dev, dtype=dt)
        self.q, self.k, self.v, self.o = lin(H, NH * HD), lin(H, KV * HD), lin(H, KV * HD), lin(NH * HD, H)
        self.gate, self.up, self.down = lin(H, I), lin(H, I), lin(I, H)
        one = lambda: nn.Parameter(torch.ones(H, device=dev, dtype=dt), requires_grad=False)
        self.n1, self.n2, self.cache = one(), one(), None

    def forward(self, x, causal):
        b, t, _ = x.shape
        h = F.rms_norm(x, (H,), self.n1)
        q, k, v = (f(h).view(b, t, -1, HD).transpose(1, 2) for f in (self.q, self.k, self.v))
        if not causal:
            kc, vc = self.cache
            kc[:b, :, -1:].copy_(k)
            vc[:b, :, -1:].copy_(v)
            k, v = kc[:b], vc[:b]
        a = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, NH * HD))
        h = F.rms_norm(x, (H,), self.n2)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, layers, dt, head=True):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dt) for _ in range(layers))
        self.head = nn.Linear(H, V, bias=False, device=dev, dtype=dt) if head else None
        self.n = nn.Parameter(torch.ones(H, device=dev, dtype=dt), requires_grad=False)
        self.checkpointed = False
        with torch.no_grad():
            for p in self.parameters():
                if p.dim() == 2:
                    p.normal_(0, 0.02)
        self.requires_grad_(False)

    def forward(self, x, causal=False):
        for layer in self.layers:
            x = checkpoint(layer, x, causal, use_reentrant=False) if self.checkpointed else layer(x, causal)
        return x if self.head is None else self.head(F.rms_norm(x[:, -1:], (H,), self.n))

    def fill(self, dt):
        for layer in self.layers:
            layer.cache = tuple(torch.randn(1, KV, CTX, HD, device=dev, dtype=dt) for _ in "kv")


def linears(model):
    return [(m, name, c) for m in model.modules() for name, c in m.named_children() if isinstance(c, nn.Linear)]


def bnb_linear(c, kind, dt):
    i, o = c.in_features, c.out_features
    if kind == "bnb-nf4":
        new = bnb.nn.Linear4bit(i, o, bias=False, compute_dtype=dt, quant_type="nf4", device="meta")
        new.weight = bnb.nn.Params4bit(c.weight.data, requires_grad=False, quant_type="nf4").to(dev)
        return new
    new = bnb.nn.Linear8bitLt(i, o, bias=False, has_fp16_weights=False, threshold=6.0, device="meta")
    weight = bnb.nn.Int8Params(c.weight.data.half(), requires_grad=False, has_fp16_weights=False)
    new.weight = weight._quantize(torch.device(dev))  # where it lies, and not by way of the host
    return new


def swapped(model, kind, dt):
    """A copy of the model, in a kind."""
    model = copy.deepcopy(model)
    if kind.startswith("cuquant"):
        _, fmt, *rows = kind.split("-")
        return ct.quantize_(model, "llm_int8" if fmt == "int8" else fmt, prepack=False if rows else None)
    if kind.startswith("bnb"):
        for parent, name, c in linears(model):
            setattr(parent, name, bnb_linear(c, kind, dt))
    return model


def values(layer, kind):
    """float32 values of a layer's weight."""
    if kind == "bnb-nf4":
        return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    if kind == "bnb-int8":
        state = layer.state
        codes = layer.weight.data if state.CB is None else state.CB
        scb = state.SCB if state.SCB is not None else layer.weight.SCB
        return codes.float() * scb.float()[:, None] / 127
    return layer.weight.detach().float()


def gap(found, wanted):
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def kinds_of(*names):
    return [n for n in names if bnb is not None or not n.startswith("bnb")]


def check_outputs(kinds, dt):
    """Every shape of layer, in every kind, against decoded weights."""
    model = Model(1, dt)
    worst = {}
    with torch.no_grad():
        for kind in kinds:
            new = swapped(model, kind, dt)
            for (_, name, c) in linears(new):
                for rows in (1, 5):
                    x = torch.randn(rows, c.in_features, device=dev, dtype=dt)
                    if "int8" in kind:
                        x[0, 3] = 20.0
                    y = c(x)  # first: bitsandbytes moves its weight then
                    far = gap(y, x.float() @ values(c, kind).T)
                    worst[kind] = max(worst.get(kind, 0), far)
            new = None
            limit = 3e-2 if "int8" in kind else 1e-2 if dt is torch.bfloat16 else 3e-3
            say(f"check outputs  {kind:18} {worst[kind]:.1e} of the norm {'ok' if worst[kind] < limit else 'WRONG'}")
    free()


# ---- timing -------------------------------------------------------------------------------------


def steps_ms(f, n):
    sync()
    t = time.perf_counter()
    for _ in range(n):
        f()
    sync()
    return (time.perf_counter() - t) / n * 1e3


def graph_of(f):
    if dev != "cuda":
        return f
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        f(), f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            f()
    except Exception as error:
        torch.cuda.synchronize()
        say("# no graph:", str(error)[:120])
        return None
    return graph.replay


def interleaved(runs, n):
    """Median milliseconds of each, of rounds in which all take turns."""
    for run in runs.values():
        run(), run()
    times = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    for _ in range(A.rounds):
        for name, run in runs.items():
            times[name].append(steps_ms(run, n))
    gc.enable()
    return {name: (statistics.median(t), min(t), max(t)) for name, t in times.items()}


def warm():
    """Compile the kernels of all shapes side by side."""
    from concurrent.futures import ThreadPoolExecutor
    shapes = [(H, H), (H, KV * HD), (H, I), (I, H), (H, V)]
    jobs = [(f, torch.float16, (1, 5), s, None) for s in shapes for f in ("int4", "nf4", "llm_int8")]
    jobs += [("nf4", torch.bfloat16, (1, 5, TOKENS[0] * TOKENS[1]), s, p) for s in shapes[:4] for p in (None, False)]

    def job(given):
        fmt, dt, rows, (i, o), prepack = given
        with torch.cuda.stream(torch.cuda.Stream()):
            q = ct.quantize_(nn.Sequential(nn.Linear(i, o, bias=False, device=dev, dtype=dt)), fmt, prepack=prepack)
            for m in rows:
                x = torch.randn(m, i, device=dev, dtype=dt, requires_grad=m > 5)
                y = q(x)
                if m > 5:
                    y.sum().backward()
            torch.cuda.current_stream().synchronize()
    with ThreadPoolExecutor(12) as pool:
        for got in [pool.submit(job, g) for g in jobs]:
            try:
                got.result()
            except Exception as error:
                say("# warm:", repr(error)[:200])
    cq.release_workspace() if hasattr(cq, "release_workspace") else None
    free()


# ---- decode -------------------------------------------------------------------------------------


def decode():
    dt = torch.float16
    kinds = kinds_of("fp16", "cuquant-int4", "cuquant-nf4", "cuquant-int8", "bnb-nf4", "bnb-int8")
    check_outputs(kinds[1:], dt)
    base = Model(A.layers, dt)
    models = {}
    for kind in kinds:
        t = time.time()
        models[kind] = base if kind == "fp16" else swapped(base, kind, dt)
        models[kind].fill(dt)
        free()
        sync()
        say(f"# {kind}: made in {time.time() - t:.1f} s; at {time.time() - START:.0f} s")
    x = torch.randn(1, 1, H, device=dev, dtype=dt)
    with torch.inference_mode():
        runs = {kind: (lambda m=m: m(x)) for kind, m in models.items()}
        eager = interleaved(runs, 3)
        # bitsandbytes' LLM.int8() waits for the number of outliers: no graph has it.
        replays = {k: graph_of(run) for k, run in runs.items() if k != "bnb-int8"}
        graphs = interleaved({k: r for k, r in replays.items() if r is not None}, 5)
    say(f"decode step, {A.layers} layers and head, M = 1, fp16 activations; ms, median (least-most)")
    for kind in kinds:
        e, g = eager[kind], graphs.get(kind)
        line = f"  {kind:14} eager {e[0]:8.3f} ({e[1]:.2f}-{e[2]:.2f})  {e[0] / eager['fp16'][0]:5.2f} x fp16"
        if g:
            line += f"   graph {g[0]:8.3f} ({g[1]:.2f}-{g[2]:.2f})  {graphs['fp16'][0] / g[0]:5.2f} x faster than fp16"
        say(line)
    models.clear()
    replays = runs = base = None
    free()


# ---- host ---------------------------------------------------------------------------------------


def host_us(f, n):
    for _ in range(5):
        f()
    best = 1e9
    for _ in range(7):
        sync()
        s = time.perf_counter()
        for _ in range(n):
            f()
        best = min(best, (time.perf_counter() - s) / n * 1e6)
    sync()
    return best


def host():
    dt, n = torch.float16, 3 if A.tiny else 150  # launches that a queue takes without waiting
    lin = nn.Linear(H, H, bias=False, device=dev, dtype=dt).requires_grad_(False)
    x = torch.randn(1, H, device=dev, dtype=dt)
    one = {"fp16": lin}
    for kind in kinds_of("cuquant-int4", "cuquant-nf4", "cuquant-int8", "bnb-nf4", "bnb-int8"):
        one[kind] = swapped(nn.Sequential(lin), kind, dt)[0]
    cases = {kind: (lambda m=m: m(x)) for kind, m in one.items()}
    zero = copy.deepcopy(one["cuquant-int8"])
    zero.threshold = 0.0
    cases["cuquant-int8 threshold 0"] = lambda: zero(x)
    codes, scb = zero.quantized.packed, zero.quantized.components["scale"].view(-1).clone()
    cases["torch.ops llm_int8"] = lambda: torch.ops.cuquant.llm_int8(x, codes, scb, 6.0, None)
    say("host us a call, 4096 x 4096, M = 1, eager; inference_mode | grad mode, nothing requires grad | x does; graph us")
    for name, f in cases.items():
        with torch.inference_mode():
            a = host_us(f, n)
            t = "-"
            if name != "bnb-int8" and dev == "cuda":
                g = graph_of(f)
                t = f"{steps_ms(g, 200) * 1e3:.1f}" if g else "-"
        b = host_us(f, n)
        x.requires_grad_(True)
        try:
            c = f"{host_us(f, n):8.1f}"
        except Exception as error:
            c = str(error)[:40]
        x.requires_grad_(False)
        say(f"  {name:26} {a:8.1f} {b:8.1f} {c}   {t}")
    if dev != "cuda":
        return
    say("LLM.int8() 4096 x 4096, us in a graph, threshold 0 and 6 (no outliers, then a column of them)")
    for rows in (1, 16, 64, 512, 4096):
        x = torch.randn(rows, H, device=dev, dtype=dt).clamp(-5, 5)
        found = []
        with torch.inference_mode():
            for m in (zero, one["cuquant-int8"]):
                found.append(steps_ms(graph_of(lambda: m(x)), 50) * 1e3)
            x[:, 7] = 9
            found.append(steps_ms(graph_of(lambda: one["cuquant-int8"](x)), 50) * 1e3)
            if "bnb-int8" in one:
                found.append(steps_ms(lambda: one["bnb-int8"](x), 20) * 1e3)
        say(f"  M {rows:5}: " + "  ".join(f"{t:8.1f}" for t in found) + "  (last: bitsandbytes eager, with outliers)")


# ---- QLoRA --------------------------------------------------------------------------------------


class LoRA(nn.Module):
    def __init__(self, base, dt):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features, device=dev, dtype=dt) / base.in_features**0.5)
        self.b = nn.Parameter(torch.randn(base.out_features, RANK, device=dev, dtype=dt) * 0.01)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def adapted(model, dt):
    torch.manual_seed(1)
    for parent, name, c in linears(model):
        setattr(parent, name, LoRA(c, dt))
    return model


def check_gradients(kinds, dt):
    base = Model(1, dt, head=False)
    for kind in kinds:
        new = swapped(base, kind, dt)
        worst = 0.0
        for parent, name, c in linears(new):
            layer = LoRA(c, dt)
            x = torch.randn(*TOKENS, c.in_features, device=dev, dtype=dt, requires_grad=True)
            g = torch.randn(*TOKENS, c.out_features, device=dev, dtype=dt)
            layer(x).backward(g)
            x2, a2, b2 = (t.detach().float().requires_grad_() for t in (x, layer.a, layer.b))
            (x2 @ values(c, kind).T + x2 @ a2.T @ b2.T).backward(g.float())
            pairs = (x.grad, x2.grad), (layer.a.grad, a2.grad), (layer.b.grad, b2.grad)
            worst = max(worst, *(gap(*pair) for pair in pairs))
        say(f"check gradients {kind:18} {worst:.1e} of the norm {'ok' if worst < 2e-2 else 'WRONG'}")
        new = None
    free()


def train():
    dt = torch.bfloat16
    kinds = kinds_of("bf16", "cuquant-nf4", "cuquant-nf4-rows", "bnb-nf4")
    check_outputs(kinds[1:], dt)
    check_gradients(kinds[1:], dt)
    base = Model(A.train_layers, dt, head=False)
    models = {k: adapted(copy.deepcopy(base) if k == "bf16" else swapped(base, k, dt), dt) for k in kinds}
    base = None
    free()
    x = torch.randn(*TOKENS, H, device=dev, dtype=dt, requires_grad=True)
    g = torch.randn_like(x)
    say(f"# QLoRA models made; at {time.time() - START:.0f} s")

    def step(model, backward=True):
        x.grad = None
        for p in model.parameters():
            p.grad = None
        y = model(x, True)
        if backward:
            y.backward(g)

    for checkpointed in (False, True):
        for m in models.values():
            m.checkpointed = checkpointed
        runs = {k: (lambda m=m: step(m)) for k, m in models.items()}
        if not checkpointed:
            runs |= {f"{k} forward": (lambda m=m: step(m, False)) for k, m in models.items()}
        try:
            times = interleaved(runs, 1)
        except torch.OutOfMemoryError as error:
            say("# out of memory:", str(error)[:100])
            free()
            continue
        how = "with gradient checkpointing" if checkpointed else "no checkpointing"
        say(f"QLoRA step, {A.train_layers} layers, {TOKENS[0]} x {TOKENS[1]} tokens, rank {RANK}, bf16, {how}; ms")
        for kind in kinds:
            t, f = times[kind], times.get(f"{kind} forward")
            line = f"  {kind:18} {t[0]:8.1f} ({t[1]:.1f}-{t[2]:.1f})"
            line += f"  forward {f[0]:8.1f}" if f else ""
            if "bnb-nf4" in times:
                line += f"  {times['bnb-nf4'][0] / t[0]:5.2f} x as fast as bitsandbytes"
            say(line)
    models.clear()
    free()


if __name__ == "__main__":
    say("#", torch.__version__, torch.cuda.get_device_name(0) if dev == "cuda" else "cpu",
        "bitsandbytes", getattr(bnb, "__version__", None), "cuquant", cq.__version__)
    torch.manual_seed(0)
    if dev == "cuda":
        warm()
        say(f"# kernels compiled; at {time.time() - START:.0f} s")
    for part in (host, decode, train):
        if part.__name__ in A.skip.split(","):
            continue
        try:
            part()
        except Exception:
            import traceback
            traceback.print_exc(limit=6)
        free()
        say(f"# {part.__name__} done; at {time.time() - START:.0f} s")
    if A.tests:
        files = ["tests/torch/test_gpu_torch.py", "tests/torch/test_gpu_torch_kinds.py"]
        env = os.environ | {"PYTHONPATH": f"{WHEELS}:{os.getcwd()}"}
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rf", *files], env=env)
        say(f"# pytest: {done.returncode}; at {time.time() - START:.0f} s")
