"""A decoder with float and with quantized layers, small enough for a CPU."""

import dataclasses
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

from cuquant.bench import model
from cuquant.bench.markdown import markdown
from cuquant.cli import app
from cuquant.errors import BackendUnavailable

torch = pytest.importorskip("torch")
decoder = pytest.importorskip("cuquant.bench.decoder")
import cuquant.torch  # noqa: E402

SIZES = model.Sizes(64, 128, 2, 96, 4, 2, 16)
SETTINGS = model.Settings(
    SIZES, ("int8", "nf4"), (), "float32", rows=3, context=5, prompt=7, batch=(2, 6), repeats=2
)
HERE = ("--model", "tiny", "--device", "cpu", "--peers", "none")


def command(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "model", *map(str, arguments)])


def test_every_kind_of_weights_does_every_step_and_is_right():
    said = []
    rows, notes = decoder.run(SETTINGS, "cpu", said.append)
    assert [row.weights for row in rows] == ["float32", "int8", "nf4"] and notes == []
    assert all(row.problem is None and row.graph_ms is None for row in rows)
    assert all(row.eager_ms > 0 and row.prefill_ms > 0 and row.train_ms > 0 for row in rows)
    assert rows[0].gigabytes > rows[1].gigabytes > rows[2].gigabytes
    assert "train: round 2 of 2" in said


def test_a_step_with_a_cache_is_the_last_token_of_a_prompt():
    net = decoder.build(SIZES, torch.device("cpu"), torch.float64)
    x = torch.randn(2, 5, SIZES.hidden, dtype=torch.float64)
    caches = [
        tuple(torch.zeros(2, SIZES.key_heads, 5, SIZES.head, dtype=torch.float64) for _ in "kv")
        for _ in net.blocks
    ]
    seen = []

    def note(block, inputs):
        seen.append(inputs[0])

    hooks = [block.register_forward_pre_hook(note) for block in net.blocks]
    wanted = net(x, last=True)
    for hook in hooks:
        hook.remove()
    for block, cache, inputs in zip(net.blocks, caches, seen, strict=True):
        h = torch.nn.functional.rms_norm(inputs, (SIZES.hidden,), block.norms[0])
        for kept, layer in zip(cache, (block.k, block.v), strict=True):
            kept[:, :, :-1] = layer(h).view(2, 5, -1, SIZES.head).transpose(1, 2)[:, :, :-1]
    torch.testing.assert_close(net(x[:, -1:], caches), wanted)


def test_adapters_are_beside_every_layer_and_alone_learn():
    net = decoder.build(SIZES, torch.device("cpu"), torch.float32)
    x = torch.randn(1, 4, SIZES.hidden)
    before = net(x)
    cuquant.torch.quantize_(net, "int8")
    learned = decoder.adapt_(net, x)
    assert len(learned) == 2 * (7 * SIZES.layers + 1)
    assert (net(x) - before).norm() < 0.1 * before.norm()  # they begin at zero
    net(x).square().sum().backward()
    assert all(p.grad is not None for p in learned)


def test_wrong_codes_are_told(monkeypatch):
    bench = decoder.Bench(SETTINGS, "cpu")
    subject = bench.subject("nf4")

    def nothing(self, x):
        return x.new_zeros(*x.shape[:-1], self.out_features)

    monkeypatch.setattr(cuquant.torch.QuantLinear, "forward", nothing)
    assert "decoded weights" in bench.wrong(subject)


def test_a_peer_that_is_absent_or_fails_is_a_note(monkeypatch):
    settings = dataclasses.replace(SETTINGS, formats=(), peers=("bitsandbytes",), train=False)
    monkeypatch.setattr(decoder.importlib.util, "find_spec", lambda name: None)
    rows, notes = decoder.run(settings, "cpu")
    assert notes == ["bitsandbytes: bitsandbytes is not installed"]
    assert [row.weights for row in rows] == ["float32"] and rows[0].train_ms is None
    monkeypatch.setattr(decoder.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    rows, notes = decoder.run(settings, "cpu")
    assert len(rows) == 1 and notes[0].startswith("bitsandbytes cannot be used: ")


def test_a_step_that_does_not_fit_leaves_the_others(monkeypatch):
    def full(self, subjects, begin):
        subjects[0].took["train"] = [1.0]
        raise torch.OutOfMemoryError

    monkeypatch.setattr(decoder.Bench, "train", full)
    rows, notes = decoder.run(dataclasses.replace(SETTINGS, formats=()), "cpu")
    assert rows[0].eager_ms > 0 and rows[0].train_ms is None
    assert notes == ["train: cpu has too little memory for all models"]


def test_a_gpu_that_torch_does_not_find_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="torch with CUDA"):
        decoder.run(SETTINGS, "cuda:0")


def test_a_peer_swaps_every_linear_layer(monkeypatch):
    class Linear4bit(torch.nn.Linear):
        def __init__(self, ins, outs, *, bias, compute_dtype, quant_type, device):
            super().__init__(ins, outs, bias=bias, device=device, dtype=compute_dtype)
            assert (quant_type, device) == ("nf4", "meta")

    def params(data, *, requires_grad, quant_type):
        return torch.nn.Parameter(data, requires_grad)

    library = SimpleNamespace(nn=SimpleNamespace(Linear4bit=Linear4bit, Params4bit=params))
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    monkeypatch.setattr(decoder.importlib.metadata, "version", lambda name: "0.9")
    subject = decoder.Bench(SETTINGS, "cpu").subject("bitsandbytes")
    assert subject.name == "bitsandbytes 0.9, nf4+dq" and not subject.own
    swapped = [m for m in subject.model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(swapped) == 15 and all(type(m) is Linear4bit for m in swapped)


def test_a_step_that_cannot_be_captured_has_no_time():
    bench = decoder.Bench(SETTINGS, "cpu")
    one, other = (decoder.Subject(name, None, 0, False) for name in "ab")
    one.calls, other.calls = {"eager": int, "graph": int}, {"eager": int}
    bench._rounds([one, other], lambda text: None)
    assert one.median("graph") is not None and other.median("graph") is None
    cells = model.rows(results(graph_ms=None))[1]
    assert cells == ("int4", "3.88", "10.00", "1.20x", "", "", "47.00", "1.09x")


def results(problem=None, graph_ms=3.5):
    rows = (
        model.ModelRow("float16", 15.0, None, 12.0, 7.0, 51.0, None),
        model.ModelRow("int4", 3.875, problem, 10.0, graph_ms, 47.0, None),
    )
    return model.ModelResults("cuquant bench model", "a device", ("a note",), rows)


def test_the_table_has_times_beside_the_float_weights():
    assert model.headings(results()) == (
        "weights", "GB", "eager, ms", "eager, faster", "graph, ms", "graph, faster",
        "prefill, ms", "prefill, faster",
    )  # fmt: skip
    assert model.rows(results())[1] == (
        "int4", "3.88", "10.00", "1.20x", "3.50", "2.00x", "47.00", "1.09x",
    )  # fmt: skip
    page = markdown(results().to_json())
    assert page.startswith("a device:\n`cuquant bench model`.\na note\n\n| weights | GB |")
    with pytest.raises(ValueError, match="are wrong"):
        markdown(results("off").to_json())


def test_the_json_says_what_its_module_tells():
    described = json.loads(results().to_json())
    assert described["schema"] == model.ModelResults.SCHEMA
    for name in [*described, *described["rows"][0]]:
        assert name in model.__doc__, name
    assert model.ModelResults.from_json(results().to_json()) == results()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(model.MODELS, "tiny", SIZES)
    made = model.Settings
    monkeypatch.setattr(
        model, "Settings",
        lambda *a, **k: dataclasses.replace(made(*a, **k), context=5, prompt=7, batch=(2, 6)),
    )  # fmt: skip


def test_the_command_prints_and_writes_the_table(small, tmp_path):
    out = tmp_path / "model.json"
    ran = command(*HERE, "-f", "int4:32", "--rows", 3, "-o", out)
    assert ran.exit_code == 0, ran.output
    assert (
        "each of 3" in ran.output
        and "of 7" in ran.output
        and "2 x 6 tokens" in ran.output
        and "1.00x" in ran.output
    )
    rows = json.loads(out.read_text())["rows"]
    assert [row["weights"] for row in rows] == ["float32", "int4:32"]


def test_the_command_ends_with_1_where_results_are_wrong(small, monkeypatch):
    monkeypatch.setattr(decoder, "BOUND", 0)
    ran = command(*HERE, "-f", "nf4", "--no-train")
    assert ran.exit_code == 1 and "error: nf4: " in ran.stderr


@pytest.mark.parametrize(
    "arguments, code, text",
    [
        (["--model", "llama-8"], 1, "did you mean 'llama-8b'"),
        (["-f", "nf5"], 1, "did you mean 'nf4'"),
        (["--peers", "bitsandbyte"], 1, "did you mean 'bitsandbytes'"),
        (["--device", "gpu9"], 2, "is no device"),
        (["--rows", "0"], 2, "--rows"),
        (["--json", "none/x.json"], 2, "none"),
    ],
)
def test_wrong_usage_is_refused_before_the_work(arguments, code, text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(decoder, "run", None)
    ran = command(*arguments)
    assert ran.exit_code == code and isinstance(ran.exception, SystemExit), ran.output
    assert text in " ".join(ran.output.replace("│", " ").split())


def test_without_torch_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sys.modules["cuquant.cli.bench"], "find_spec", lambda name: None)
    ran = command()
    assert ran.exit_code == 1 and "[torch]" in ran.output


@pytest.mark.gpu
def test_a_gpu_replays_graphs_and_is_right(torch):
    settings = dataclasses.replace(SETTINGS, dtype="float16", formats=("int4:32", "nf4"))
    rows, _ = decoder.run(settings, "cuda:0")
    assert [row.problem for row in rows] == [None] * 3
    assert all(row.graph_ms > 0 and row.train_ms > 0 for row in rows)
