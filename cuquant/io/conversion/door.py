"""convert: any file or folder that is read, into any kind that is written."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cuquant.disk import replace_file
from cuquant.errors import FormatError
from cuquant.formats import Format
from cuquant.formats.names import Nonfinite
from cuquant.gpu.device import resolve
from cuquant.io.checkpoint import INDEX
from cuquant.io.container.closing import Closing
from cuquant.io.container.gguf import GgufWriter
from cuquant.io.container.safetensors import SafetensorsWriter
from cuquant.io.container.shards import by_size
from cuquant.io.conversion.folder import NewFolder, identity, new_folder
from cuquant.io.conversion.models import model_for
from cuquant.io.conversion.plan import (
    Step,
    Wish,
    configuration,
    names_of,
    plan,
    refuse_clashes,
    writer_of,
)
from cuquant.io.files import GGUF, Opened, open
from cuquant.io.quantized import metadata
from cuquant.io.schema import own
from cuquant.io.selection import Formats, Selection
from cuquant.io.state import format_text

SHARD_BYTES = 5_000_000_000
QUANTIZATION = ("quantization_config", "compression_config")  # keys of a configuration
# Files of a folder that are not copied: weights, and what says how they were quantized.
WEIGHTS = (
    ".safetensors",
    ".gguf",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".onnx",
    ".h5",
    ".msgpack",
    ".npz",
)
SETTINGS = {
    "config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json",
    "quanto_qmap.json",
}  # fmt: skip
Kind = Literal["cuquant", "gguf", "gptq", "awq", "compressed-tensors", "bitsandbytes", "mlx", "fp8"]


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: Kind,
    format: Formats | None = None,
    requantize: bool = False,
    *,
    resume: bool = False,
    device: object = None,
) -> list[Step]:
    """Write the arrays of a file or folder as another kind of files.

    Codes and scales stay as they are: what is written decodes to the same float32 numbers, bit for
    bit. An array that the kind cannot hold so is refused, before anything is written.

    Parameters
    ----------
    src
        What `open` reads.
    dst
        A .gguf file for "gguf"; a .safetensors file or a folder for "cuquant"; for other kinds a
        folder that is not there yet, or empty: shards of 5 GB, config.json, and what lies beside
        the tensors of a folder `src`. It appears when it is complete.
    to
        "cuquant", "gguf", "gptq", "awq", "compressed-tensors", "bitsandbytes", "mlx" or "fp8".
    format
        That plain weights are quantized to first: matrices of floats, in kinds of linear layers
        without embeddings and lm_head. Needs `requantize` for arrays that are quantized already.
        A dict has a format for each glob of names, of which the first that fits decides; None
        keeps an array: ``{"*.down_proj": "int8", "*.0.*": None, "*": "int4"}``.
    requantize
        Accept that arrays are rounded to `format`, or to the nearest one that the kind holds; one
        whose shape fits none is decoded, to float16 or what it was quantized from.
    resume
        Go on with what an attempt that failed, of the same files and arguments, finished: shards
        of 5 GB of a folder. The bytes are the same.
    device
        "cpu", "cuda" or "cuda:N", where arrays are quantized. None: a GPU where one is usable.

    Returns
    -------
    list of Step
        What became of each array: name, shape, was, becomes, bytes_in, bytes_out, rounds.

    Raises
    ------
    FormatError
        For a damaged file, or an array of it that cannot be read.
    ValueError
        For an array that would lose something, by name, for an unknown kind, and for a `dst` that
        is none of this kind.
    OSError
        As the system gives it.

    Warns
    -----
    UserWarning
        Where a GGUF file will not say what a model is, or config.json not all of it.

    Examples
    --------
    >>> import numpy as np, cuquant as cq, tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> w = cq.quantize(np.ones((32, 64), np.float32), "int4", block_size=32)
    >>> cq.save(folder / "w.safetensors", {"up.weight": w})
    >>> cq.convert(folder / "w.safetensors", folder / "gptq", to="gptq")[0].becomes
    '4 bits, groups of 32'
    >>> cq.load(folder / "gptq")["up.weight"]
    QuantArray(uint4:32, shape=(32, 64), dtype=float32, 4.75 bits/element, device=cpu)
    """
    with Conversion(src, dst, to, format, requantize, resume=resume, device=device) as work:
        for text in work.warnings:
            warnings.warn(text, stacklevel=2)
        for _ in work.run():
            pass
        return work.steps


class Conversion(Closing):
    """A conversion that is planned, and nothing of it done; arguments as `convert`'s.

    `include` and `exclude` are globs of what `format` is for; `nonfinite` as `quantize` has it.

    Attributes
    ----------
    steps
        What every array becomes.
    file
        What is read.
    target
        What is written.
    warnings
        What the target will not say, in words.
    """

    def __init__(
        self,
        src: str | os.PathLike[str],
        dst: str | os.PathLike[str],
        to: str,
        format: Formats | None = None,
        requantize: bool = False,
        *,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        nonfinite: Nonfinite = "raise",
        resume: bool = False,
        device: object = None,
    ) -> None:
        self.writer = writer_of(to)
        self.target = Path(dst)
        self.is_folder = _is_folder(self.target, to)
        chosen = None if format is None else Selection.of(format, include, exclude)
        rounds = chosen is not None or requantize
        self.device = resolve(device) if rounds else "cpu"
        self._resume, self._folder = resume, NewFolder(self.target)
        wish = Wish(chosen, requantize, self.device, nonfinite)
        self._asked = [_asked(chosen), requantize, nonfinite]
        self.file: Opened = open(src)
        try:
            self._model = model_for(self.file, to)
            self.warnings = self._model.warnings
            if resume and not self.is_folder:
                self.warnings.append("one file is written from its start: only folders are resumed")
            if chosen is not None:
                entries = self._model.entries
                chosen.refuse_unused({e.name: names_of(e) for e in entries.values()}, src)
            self.steps = self._planned(wish)
            if self.writer.KIND not in (GGUF, own.KIND) and not any(s.recipe for s in self.steps):
                self.warnings.append(
                    f"no array is quantized: what is written for {to} is a folder of plain floats; "
                    "quantize them on the way with a format"
                )
            entries = self._model.entries.values()
            kept = sum(isinstance(entry.format, Format) for entry in entries)
            if chosen is not None and kept and not any(step.rounds for step in self.steps):
                self.warnings.append(
                    f"the format is for plain arrays, and none is quantized to it: {kept} that are "
                    "quantized already stay as they are unless they may be requantized"
                )
            refuse_clashes(self.steps)
            self._said = configuration(self.writer, self.steps)
            self._json = self._configuration() if self.is_folder else b""
        except BaseException:
            self.close()
            raise

    def _planned(self, wish: Wish) -> list[Step]:
        try:
            return plan(self._model.entries, self.writer, wish)
        except FormatError as error:
            raise FormatError(f"{self.file.path}: {error}") from error

    def close(self) -> None:
        """Close what is read."""
        self.file.close()

    def run(self) -> Generator[Step, None, None]:
        """Convert; yields each step when it is done.

        Closed before the end, it leaves nothing but whole shards, for `resume`.
        """
        if self.writer.KIND == GGUF:
            yield from self._write_gguf()
        elif self.is_folder:
            with new_folder(self.target, self._told(), self._resume) as self._folder:
                yield from self._write_folder(self._folder)
        else:
            with self._writer(self.target, self.steps) as writer:
                yield from _written(writer, self.steps)

    @property
    def has_finished(self) -> bool:
        """Whether there are whole shards, which `resume` goes on with where it was stopped."""
        return self._folder.is_worth_keeping

    def _told(self) -> list[Any]:
        """What decides the bytes of a folder."""
        arrays = [(step.name, step.becomes, step.specs) for step in self.steps]
        path = self.file.path
        return [str(path.absolute()), identity(path), self.writer.KIND, arrays, self._asked]

    def _write_gguf(self) -> Iterator[Step]:
        specs = {name: spec for step in self.steps for name, spec in step.specs.items()}
        with GgufWriter(self.target, specs, self._gguf_metadata()) as writer:
            yield from _written(writer, self.steps)

    def _gguf_metadata(self) -> Mapping[str, Any]:
        found = dict(self._model.metadata)
        if any(step.rounds for step in self.steps):
            found.pop("general.file_type", None)  # of what it was
        if self.file.kind != GGUF and any(step.recipe for step in self.steps):
            found["general.quantization_version"] = np.uint32(2)  # of ggml's blocks since 2023
        return found

    def _writer(self, path: Path, steps: list[Step]) -> SafetensorsWriter:
        specs = {name: spec for step in steps for name, spec in step.specs.items()}
        entries = {}
        if self.writer is own:
            entries = {step.name: step.recipe.said for step in steps if step.recipe}
        return SafetensorsWriter(path, specs, metadata(entries) if entries else {"format": "pt"})

    def _write_folder(self, new: NewFolder) -> Iterator[Step]:
        folder, weight_map = new.path, {}
        shards = by_size(self.steps, lambda step: step.bytes_out, SHARD_BYTES)
        for number, steps in enumerate(shards, 1):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            weight_map |= dict.fromkeys((key for step in steps for key in step.specs), name)
            writer = self._writer(folder / name, steps)
            if new.has(name, writer.nbytes):
                yield from steps
                continue
            with writer:
                yield from _written(writer, steps)
            new.finished(name)
        if len(shards) > 1:
            size = sum(step.bytes_out for step in self.steps)
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            replace_file(folder / f"model{INDEX}", _json(index))
        if self._json:
            replace_file(folder / "config.json", self._json)
        self._copy_others(folder)

    def _configuration(self) -> bytes:
        try:
            return _json(self._config())
        except RecursionError as error:
            raise FormatError(f"{self.file.path}: config.json is nested too deeply") from error

    def _config(self) -> dict[str, Any]:
        """config.json of the source, with what it says of the quantization replaced."""
        found = _unquantized(self._model.metadata)
        if self._said and not found.keys() & {"torch_dtype", "dtype"}:
            dtypes = [step.dtype.name for step in self.steps if step.recipe]
            found["torch_dtype"] = max(dict.fromkeys(dtypes), key=dtypes.count)
        return {**found, **self._said}

    def _copy_others(self, folder: Path) -> None:
        """tokenizer.json and what else lies in the source's folder."""
        given = self.file.path
        source = given if given.is_dir() else given.parent if given.name.endswith(INDEX) else None
        if source is None:
            return
        for path in sorted(source.iterdir()):
            name = path.name
            is_weight = path.suffix.lower() in WEIGHTS or name.endswith(".index.json")
            if (
                path.is_file()
                and not name.startswith(".")
                and not is_weight
                and name not in SETTINGS
            ):
                shutil.copyfile(path, folder / name)


def _written(writer: GgufWriter | SafetensorsWriter, steps: list[Step]) -> Iterator[Step]:
    for step in steps:
        _write(writer, step)
        yield step


def _write(writer: GgufWriter | SafetensorsWriter, step: Step) -> None:
    """Write the tensors of one array; they are gone when the next one is read."""
    for name, part in step.make().items():
        if isinstance(part, Iterator):
            writer.write_raw(name, part)
        else:
            writer.write(name, part)


def _asked(chosen: Selection | None) -> list[Any]:
    """What is asked of plain arrays, in words: two formats may have the same name in a kind."""
    if chosen is None:
        return []
    return [[(glob, _words(fmt)) for glob, fmt in chosen.rules], chosen.include, chosen.exclude]


def _words(fmt: Format | None) -> str:
    try:
        return "" if fmt is None else format_text(fmt)
    except ValueError:  # one of the caller's own
        return repr(fmt)


def _is_folder(target: Path, kind: str) -> bool:
    """Whether a target is a folder; ValueError where it is none of this kind, or holds files."""
    suffix = target.suffix.lower()
    is_held = target.is_dir() and (os.path.ismount(target) or target.samefile(os.curdir))
    if kind != GGUF and is_held:  # it cannot be replaced
        raise ValueError(f"{target}: is in use; name a new folder in it")
    if kind == GGUF:
        if suffix != ".gguf" or target.is_dir():
            raise ValueError(
                f"{target}: GGUF is one file; call it {target.with_suffix('.gguf').name}"
            )
        return False
    if suffix == ".safetensors" and not target.is_dir():
        if kind != own.KIND:
            raise ValueError(f"{target}: {kind} has a config.json too; name a folder")
        return False
    if suffix == ".gguf":
        raise ValueError(f"{target}: {kind} is no GGUF file; name a folder")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target}: is there already; name a new folder")
    return True


def _unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what it says of a quantization, in its parts too."""
    kept = {key: value for key, value in config.items() if key not in QUANTIZATION}
    said = kept.get("quantization")
    if isinstance(said, dict) and said.keys() & {"bits", "group_size"}:
        del kept["quantization"]
    return {
        key: _unquantized(value) if isinstance(value, dict) and key.endswith("_config") else value
        for key, value in kept.items()
    }


def _json(value: Mapping[str, Any]) -> bytes:
    """An object as a file has it; nothing of an empty one."""
    if not value:
        return b""
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a character, which JSON's escapes can say
        return (json.dumps(value, indent=2) + "\n").encode()
