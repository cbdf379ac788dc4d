"""Messages stay short however long an argument is: they do not repeat it whole."""

import inspect
import warnings

import numpy as np
import pytest
from in_turn import in_turn
from typer.testing import CliRunner

import cuquant as cq
from cuquant.cli import app

torch = pytest.importorskip("torch")
import cuquant.torch  # noqa: E402

LONG = "x" * 10**6
X = np.ones((4, 64), np.float32)
Q = cq.quantize(X, "nf4")
LINEAR = torch.nn.Linear(64, 8)


def message(call) -> str | None:
    """Of the error or the warning that comes; None where neither does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            return str(error)
    return str(caught[-1].message) if caught else None


# A function and the first arguments that it needs; each of its parameters gets the long ones.
DOORS = {
    "quantize": (cq.quantize, (X, "nf4")),
    "get_format": (cq.get_format, ("k4",)),
    "dequantize": (cq.dequantize, (Q,)),
    "embedding": (cq.embedding, ([0], Q)),
    "Q.dequantize": (Q.dequantize, ()),
    "Q.astype": (Q.astype, ()),
    "Q.to": (Q.to, ()),
    "Q.__getitem__": (Q.__getitem__, ()),
    "load": (cq.load, ("w",)),
    "save": (cq.save, ("w", {"w": Q})),
    "linear": (cq.linear, (X, Q)),
    "error": (cq.error, (X, Q)),
    "precompile": (cq.precompile, ()),
    "quantize_": (cuquant.torch.quantize_, (torch.nn.Sequential(LINEAR),)),
    "from_linear": (cuquant.torch.QuantLinear.from_linear, (LINEAR,)),
    "QuantLinear": (cuquant.torch.QuantLinear, (cq.quantize(LINEAR.weight.detach(), "nf4"),)),
    **{
        f"functional.{name}": (function, (X,) * sum(
            p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
            for p in inspect.signature(function).parameters.values()
        ))
        for name in cq.functional.__all__
        for function in (getattr(cq.functional, name),)
    },
}  # fmt: skip

# These hand it to the system or to Python, whose messages they are; or belong to cuquant/ops.
NOT_OURS = {
    "path", "model", "format_options", "options", "stochastic",
}  # fmt: skip


VALUES = {"str": LONG, "list": [LONG], "dict": {LONG: LONG}, "tuple": (LONG, LONG)}


@pytest.mark.parametrize("door", DOORS)
@in_turn("value", VALUES)
def test_an_error_does_not_repeat_an_argument(door, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cq.save("w", {"w": Q})
    (call, arguments), value = DOORS[door], VALUES[value]
    for at, name in enumerate(inspect.signature(call).parameters):
        ours = door in ("QuantLinear", "from_linear") and name == "activation"
        if name in NOT_OURS and not ours:
            continue
        given = list(arguments)
        if at < len(given):
            given[at] = value
            text = message(lambda given=given: call(*given))
        else:
            text = message(lambda given=given, name=name: call(*given, **{name: value}))
        assert text is None or len(text) < 2000, (name, text[:100])


@pytest.mark.parametrize("name", ["k4", "nf4", "mxfp4", "q4_0"])
@pytest.mark.parametrize(
    "option", ["block_size", "levels", "packing", "scale_dtype", "double_quant", "another"]
)
def test_an_error_does_not_repeat_an_option(name, option):
    for value in (LONG, [LONG], [LONG] * 2, {LONG: LONG}, np.array([LONG])):
        with pytest.raises((TypeError, ValueError)) as caught:
            cq.get_format(name, **{option if option != "another" else LONG: value})
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "text", ["%s", "%s:32", "nf4:%s", "nf4+%s", "nf4:32+dq+%s", "nf4^%s", "nf4+hadamard%s"]
)
@pytest.mark.parametrize("part", [LONG, "1" * 10**6], ids=["letters", "digits"])
def test_an_error_does_not_repeat_a_format(text, part):
    with pytest.raises(ValueError) as caught:
        cq.get_format(text % part)
    assert len(str(caught.value)) < 2000


def test_an_error_does_not_repeat_names_of_layers():
    model = torch.nn.Module()
    model.add_module(LONG, torch.nn.Linear(3, 2))
    for arguments in (["nf4"], [{LONG + "y": "nf4"}], ["nf4", LONG + "y"]):
        text = message(lambda given=arguments: cuquant.torch.quantize_(model, *given))
        assert text is not None and len(text) < 2000


def test_an_error_does_not_repeat_fields_of_a_dtype():
    for dtype in ([(LONG, "f4")], "i4," * 10**4 + "i4"):
        x = np.zeros(64, dtype)
        for call in (cq.quantize, cq.functional.quantize_nf4):
            text = message(lambda call=call, x=x: call(x, "nf4"))
            assert text is not None and len(text) < 2000


COMMANDS = [
    ["quantize", LONG, "-o", "out"], ["quantize", "w", "-o", LONG],
    *(["quantize", "w", "-o", "out", option, LONG] for option in (
        "--device", "--format", "--include", "--block-size", "--levels", "--nonfinite", "--x"
    )),
    ["quantize", "w", "-o", "out", LONG], ["quantize", "w", "-o", "out", f"--{LONG}"],
    ["inspect", LONG], ["formats", LONG], [LONG], [f"--{LONG}"], ["bench", LONG],
    *(["bench", "quantize", option, LONG] for option in (
        "--shape", "--format", "--dtypes", "--size", "--plot", "--repeats", "--json"
    )),
    *(["bench", "matmul", option, LONG] for option in (
        "--shape", "--format", "--dtypes", "--batch", "--peers", "--plot", "--repeats", "--json"
    )),
    *(["bench", "gemm", option, LONG] for option in (
        "--shape", "--format", "--peers", "--repeats", "--json"
    )),
    *(["bench", "formats", option, LONG] for option in (
        "--format", "--rows", "--passages", "--device", "--json", "--repeats"
    )),
    ["bench", "table", LONG],
    *(["precompile", option, LONG] for option in (
        "--format", "--operations", "--dtypes", "--arch", "--model", "--shape"
    )),
]  # fmt: skip


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: " ".join(w[:12] for w in words))
def test_a_command_does_not_repeat_an_argument(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cq.save("w", {"weight": X})
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (1, 2) and not isinstance(result.exception, OSError)
    assert 0 < len(result.output) < 3000, result.output[:3000]
