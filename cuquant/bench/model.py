"""What quantized weights give a whole decoder: memory, tokens, prompts and training, one row each.

The JSON of a run, schema "cuquant.bench.model/1":

    schema, command   as in cuquant/bench/report.py
    device            what ran, with versions
    notes             texts: what was timed, and why a peer is absent
    rows              a list, the float weights first, of
        weights       a dtype, a format as it was asked for, or a library and its format
        gigabytes     10^9 bytes of the model
        problem       what is wrong with the results; null where they are right
        eager_ms      milliseconds of a step of one token a sequence
        graph_ms      of the same step as a CUDA graph; null where none could be captured
        prefill_ms    of a prompt
        train_ms      of forward and backward of adapters; null where it was not asked for
"""

import json
from dataclasses import dataclass

from cuquant.bench.report import Comparison
from cuquant.bench.timing import MIN_REPEATS
from cuquant.errors import clipped, did_you_mean

FORMATS = ("int4", "nf4")
RANK = 16  # of an adapter
STEPS_OF = ("eager", "graph", "prefill", "train")


@dataclass(frozen=True)
class Sizes:
    """Of a decoder; `head` is the width of a head of attention."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    heads: int
    key_heads: int
    head: int


MODELS = {
    "llama-8b": Sizes(4096, 14336, 32, 128256, 32, 8, 128),
    "llama-1b": Sizes(2048, 8192, 16, 128256, 32, 8, 64),
    "tiny": Sizes(256, 512, 2, 512, 4, 2, 64),
}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes
    ----------
    sizes
        Of the model.
    formats, peers
        Weights beside the float ones, by what was typed, and other libraries.
    dtype
        Of the float weights and of all that is computed.
    rows
        Sequences of a step of one token.
    context, prompt
        Tokens that such a step looks back on, and tokens of a prompt.
    batch
        Sequences of a training step, and tokens of each.
    train
        Whether adapters are trained.
    repeats
        Rounds, in which every kind of weights has its turn; the median counts.
    """

    sizes: Sizes
    formats: tuple[str, ...] = FORMATS
    peers: tuple[str, ...] = ()
    dtype: str = "float16"
    rows: int = 1
    context: int = 512
    prompt: int = 2048
    batch: tuple[int, int] = (2, 1024)
    train: bool = True
    repeats: int = MIN_REPEATS

    def notes(self) -> list[str]:
        """What the columns are."""
        told = [
            f"eager, graph: a step of one token for each of {self.rows} sequences, behind "
            f"{self.context} tokens; prefill: a prompt of {self.prompt}; weights are random"
        ]
        if self.train:
            told.append(
                f"train: forward and backward of {self.batch[0]} x {self.batch[1]} tokens, with "
                f"LoRA of rank {RANK} beside every linear layer"
            )
        return told


def sizes_of(name: str) -> Sizes:
    """Sizes by a model's name; ValueError for an unknown one."""
    if name not in MODELS:
        near = did_you_mean(name, MODELS)
        raise ValueError(f"model {clipped(name)} is unknown{near}; known are {', '.join(MODELS)}")
    return MODELS[name]


@dataclass(frozen=True)
class ModelRow:
    """One kind of weights; see the schema above."""

    weights: str
    gigabytes: float
    problem: str | None
    eager_ms: float | None
    graph_ms: float | None
    prefill_ms: float | None
    train_ms: float | None

    def milliseconds(self, step: str) -> float | None:
        """Of one of STEPS_OF."""
        return getattr(self, f"{step}_ms")


@dataclass(frozen=True)
class ModelResults(Comparison):
    """All of one run; the first row is the float weights'."""

    SCHEMA = "cuquant.bench.model/1"

    rows: tuple[ModelRow, ...]

    @property
    def right(self) -> bool:
        """Whether all results are those of the decoded weights, within rounding."""
        return all(row.problem is None for row in self.rows)

    @classmethod
    def from_json(cls, text: str) -> "ModelResults":
        """What `to_json` wrote."""
        told = json.loads(text)
        rows = tuple(ModelRow(**row) for row in told["rows"])
        return cls(told["command"], told["device"], tuple(told["notes"]), rows)


# ---- the table ----------------------------------------------------------------------------------


def _measured(results: ModelResults) -> list[str]:
    return [what for what in STEPS_OF if results.rows[0].milliseconds(what) is not None]


def headings(results: ModelResults) -> tuple[str, ...]:
    """The columns of the table."""
    times = [(f"{what}, ms", f"{what}, faster") for what in _measured(results)]
    return ("weights", "GB", *(name for names in times for name in names))


def rows(results: ModelResults) -> list[tuple[str, ...]]:
    """The table, as texts: milliseconds, and how many times as fast as the float weights."""
    steps, first = _measured(results), results.rows[0]
    return [
        (
            row.weights,
            f"{row.gigabytes:.3g}",
            *(c for step in steps for c in _cells(row, first, step)),
        )
        for row in results.rows
    ]


def _cells(row: ModelRow, first: ModelRow, step: str) -> tuple[str, str]:
    own, whole = row.milliseconds(step), first.milliseconds(step)
    if own is None or whole is None:
        return "", ""
    return f"{own:.2f}", f"{whole / own:.2f}x"
