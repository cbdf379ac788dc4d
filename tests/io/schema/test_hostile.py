"""Checkpoints that are damaged or lie: FormatError, or arrays that fit; nothing else."""

import copy
import json
import random
from pathlib import Path

import numpy as np
import pytest

import cuquant as cq
from cuquant.cli.inspection import _as_json, _metadata, _row, _warnings
from cuquant.io.container.safetensors import SafetensorsReader, SafetensorsWriter

ROOT = Path("tests/data/checkpoints")
KINDS = (
    "awq-autoawq-gemm", "awq-autoawq-gemv", "awq-autoawq-gemv_fast", "bitsandbytes-layers",
    "bitsandbytes-int8", "comfyui-layers", "comfyui-scaled-fp8", "ct-layers", "ct-fp8-block",
    "ct-nvfp4", "ct-old-actorder", "ct-old-sparse24", "fbgemm-fp8", "gptq-3bit",
    "gptq-4bit-actorder", "gptq-autogptq-layers", "hf-fp8-ragged", "hf-mxfp4-gpt-oss", "hqq-layers",
    "mlx-affine-mixed", "mlx-nvfp4", "modelopt-int4", "modelopt-nvfp4", "quanto-layers",
    "quanto-qint4", "torchao-layers",
)  # fmt: skip
# The only ones of their kind.
ALONE = ("ct-old-sparse24", "hf-mxfp4-gpt-oss", "hqq-layers", "torchao-layers")
SAME_SIZE = (
    ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL"), ("I16", "F16", "BF16", "U16"),
    ("I32", "F32", "U32"), ("I64", "F64"),
)  # fmt: skip
JUNK = (None, True, -1, 0, 3, 2**70, 1.5, "", "gptq", "x" * 3000, [], [-1, 0], {}, {"a": None})
MUTATIONS, MANY = 20, 5_000  # of each set; of most kinds there are two


def stored(folder):
    """The tensors of a set: dtype, shape and bytes; and its configuration and metadata."""
    tensors, metadata = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with SafetensorsReader(path) as reader:
            metadata |= reader.metadata
            for name, info in reader.tensors.items():
                if info.nbytes <= 1 << 14:
                    tensors[name] = (info.dtype, info.shape, reader.raw(name))
    path = folder / "config.json"
    return tensors, json.loads(path.read_text()) if path.exists() else {}, metadata


def leaves(value, path=()):
    """Where the values of a configuration are."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    yield path


def mutated(rng, tensors, config, metadata):
    """One or two changes: of a tensor's name, dtype, shape or bytes, or of a value in JSON."""
    tensors, config, metadata = dict(tensors), copy.deepcopy(config), dict(metadata)
    for _ in range(rng.randint(1, 2)):
        way, name = rng.randrange(8), rng.choice(sorted(tensors))
        dtype, shape, data = tensors[name]
        if way == 0:
            del tensors[name]
        elif way == 1:
            family = next((f for f in SAME_SIZE if dtype in f), (dtype,))
            tensors[name] = (rng.choice(family), shape, data)
        elif way == 2:
            n = int(np.prod(shape))
            shapes = [(n,), (1, n), (n, 1), shape[::-1], (*shape, 1), (1, *shape)]
            tensors[name] = (dtype, rng.choice(shapes), data)
        elif way == 3:
            tensors[name] = (dtype, (0, *shape[1:]), data[:0])
        elif way == 4:
            noise = np.frombuffer(rng.randbytes(data.nbytes), np.uint8)
            tensors[name] = (dtype, shape, noise % 2 if dtype == "BOOL" else noise)
        elif way == 5 and metadata:
            metadata[rng.choice(sorted(metadata))] = json.dumps(rng.choice(JUNK))
        else:
            places = [path for path in leaves(config) if path]
            if places:
                *before, key = rng.choice(places)
                part = config
                for step in before:
                    part = part[step]
                part[key] = copy.deepcopy(rng.choice(JUNK))
        if not tensors:
            break
    return tensors, config, metadata


def write(folder, tensors, config, metadata):
    specs = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
    with SafetensorsWriter(folder / "model.safetensors", specs, metadata) as writer:
        for name, (_, _, data) in tensors.items():
            writer.write_raw(name, data)
    (folder / "config.json").write_text(json.dumps(config))


def listing(file):
    """What `cuquant inspect --json` prints of a file."""
    rows = [_row(entry) for entry in file.values()]
    found = _as_json(file, rows, _warnings(file), _metadata(file))
    assert len(json.loads(json.dumps(found))["arrays"]) == len(file)


def tried(folder):
    """How many arrays can be read, of a folder that may be damaged."""
    read = 0
    try:
        file = cq.open(folder)
    except cq.FormatError:
        return 0
    with file:
        listing(file)
        for entry in file.values():
            try:
                value = entry.read()
            except cq.FormatError:
                continue
            assert tuple(value.shape) == entry.shape
            if isinstance(value, cq.QuantArray):
                value.check()
                value.dequantize()
            read += len(entry.tensors) > 1
    return read


def check(folder, kind, count):
    """Mutations of a set, of which some can be read."""
    given = stored(ROOT / kind)
    rng, read = random.Random(kind), 0
    write(folder, *given)
    assert tried(folder)  # as it is
    for _ in range(count):
        write(folder, *mutated(rng, *given))
        read += tried(folder)
    assert read


@pytest.mark.parametrize("kind", KINDS)
def test_mutations_are_refused_or_fit(kind, tmp_path):
    check(tmp_path, kind, MUTATIONS)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutations_are_refused_or_fit(kind, tmp_path):
    check(tmp_path, kind, MANY if kind not in ALONE else 2 * MANY)
