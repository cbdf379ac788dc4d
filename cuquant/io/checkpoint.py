"""A checkpoint as its files lie: tensors of all shards by name, and the JSON files beside them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cuquant.disk import read_bounded
from cuquant.errors import FormatError
from cuquant.io.container.closing import Closing
from cuquant.io.container.messages import known, quote
from cuquant.io.container.safetensors import SafetensorsReader, TensorInfo
from cuquant.io.container.safetensors.kinds import named

MAX_JSON_BYTES = 1 << 26  # of a file beside the tensors; real ones have some kB
MAX_SHARDS = 4096
MOST_OPEN = 64  # shards at a time
CHUNK_BYTES = 1 << 20  # of a tensor that are read at a time
INDEX = ".safetensors.index.json"


class Checkpoint(Closing):
    """The tensors of a safetensors file, or of all shards in a folder; headers are read at once.

    Parameters
    ----------
    path
        A file, a folder, or the index of shards in one.
    max_header_bytes
        A shard with a larger header is refused.

    Attributes
    ----------
    path, folder
        What was given, and where the JSON files lie.
    files
        The shards.
    tensors
        Of all shards, by name.
    metadata
        The `__metadata__` of all shards.

    Raises
    ------
    FormatError
        For damaged files, shards that are missing and names that two of them have.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_header_bytes: int = 100_000_000
    ) -> None:
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self.files = _shards(self.path)
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        self._limit = max_header_bytes
        self._where: dict[str, Path] = {}
        self._open: dict[Path, SafetensorsReader] = {}
        try:
            for file in self.files:
                self._add(file)
        except BaseException:
            self.close()
            raise
        self._config: dict[str, Any] | None = None

    def _add(self, file: Path) -> None:
        reader = self._reader(file)
        if twice := self.tensors.keys() & reader.tensors.keys():
            name = min(twice)
            raise FormatError(
                f"{self.path}: {quote(name)} lies in {self._where[name].name} and in {file.name}; "
                "give one of the files"
            )
        self.tensors |= reader.tensors
        self.metadata |= reader.metadata
        self._where |= dict.fromkeys(reader.tensors, file)

    def _reader(self, file: Path) -> SafetensorsReader:
        if file not in self._open:
            while len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[file] = SafetensorsReader(file, max_header_bytes=self._limit)
        return self._open[file]

    def close(self) -> None:
        """Close the files; what was read stays."""
        for reader in self._open.values():
            reader.close()
        self._open.clear()

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def info(self, name: str) -> TensorInfo:
        """What a tensor is; FormatError where there is none of this name."""
        if name not in self.tensors:
            raise FormatError(f"{self.path} has no tensor {quote(name)}; {known(self.tensors)}")
        return self.tensors[name]

    def read(self, name: str) -> np.ndarray:
        """A tensor, in memory of its own."""
        self.info(name)
        return self._reader(self._where[name]).read(name)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor of two axes or more, whose rows are whole bytes."""
        info = self.info(name)
        row = info.nbytes // max(info.shape[0], 1)
        stored = np.empty((stop - start) * row, np.uint8)
        self._reader(self._where[name]).read_into(name, stored, start * row)
        return stored.view(info.numpy_dtype).reshape(stop - start, *info.shape[1:])

    def transposed(self, name: str) -> np.ndarray:
        """A matrix with its axes swapped, in memory of its own; few of its rows are there twice."""
        rows, columns = self.info(name).shape
        turned = np.empty((columns, rows), self.info(name).numpy_dtype)
        step = max(CHUNK_BYTES // max(columns * turned.itemsize, 1), 1)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            turned[:, start:stop] = self.read_rows(name, start, stop).T
        return turned

    def file_of(self, name: str) -> Path:
        """The shard that a tensor lies in."""
        return self._where[name]

    def readers(self) -> Iterator[SafetensorsReader]:
        """Of each shard."""
        return map(self._reader, self.files)

    # ---- what lies beside the tensors -----------------------------------------------------------

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file beside the tensors; {} where there is none.

        Raises
        ------
        FormatError
            For a file that is no JSON object.
        """
        return read_json(self.folder / name)

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        if self._config is None:
            self._config = self.json("config.json")
        return self._config

    @property
    def quantization(self) -> Mapping[str, Any]:
        """What config.json says of the quantization; {} where it says nothing.

        The configuration of text in a model of several parts may hold it.
        """
        parts = [self.config, *(v for v in self.config.values() if isinstance(v, dict))]
        for key in ("quantization_config", "compression_config", "quantization"):
            for part in parts:
                if isinstance(found := part.get(key), dict) and found:
                    return found
        return {}

    @property
    def method(self) -> str:
        """quant_method of the configuration, in lower case; "" where there is none."""
        found = self.quantization.get("quant_method")
        return found.lower() if isinstance(found, str) else ""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is none.

    Raises
    ------
    FormatError
        For a file that is no JSON object.
    """
    try:
        found = json.loads(read_bounded(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is no JSON") from error
    except OSError as error:
        raise _as_damage(error, path) from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: holds no JSON object")
    return found


def _as_damage(error: OSError, path: Path) -> Exception:
    """FormatError where a path holds no file of a bounded size; other errors as they are."""
    is_damage = error.errno in (errno.EINVAL, errno.EISDIR, errno.EFBIG, errno.ELOOP)
    return FormatError(f"{path}: {error.strerror}") if is_damage else error


def _shards(path: Path) -> list[Path]:
    """The files that hold the tensors."""
    if path.name.endswith(INDEX):
        return _listed(path)
    if not path.is_dir():
        return [path]
    indices = sorted(path.glob(f"*{INDEX}"))
    if len(indices) == 1:
        return _listed(indices[0])
    found = sorted(path.glob("*.safetensors"))
    if not found:
        ggufs = {file.name for file in path.glob("*.gguf")}
        advice = f"; give a GGUF file in it: {named(ggufs)}" if ggufs else ""
        raise FormatError(f"{path}: is a folder without .safetensors files{advice}")
    if len(found) > MAX_SHARDS:
        raise FormatError(f"{path}: has {len(found)} .safetensors files; give one of them")
    return found


def _listed(index: Path) -> list[Path]:
    """The shards that an index names: plain names in its folder, which exist."""
    try:
        mapped = json.loads(read_bounded(index, MAX_JSON_BYTES))["weight_map"]
        names = {name for name in mapped.values() if isinstance(name, str)}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{index}: is no index of shards") from error
    except OSError as error:
        raise _as_damage(error, index) from error
    if not names or len(names) > MAX_SHARDS:
        raise FormatError(
            f"{index}: is an index of {len(names)} shards; 1 to {MAX_SHARDS} are wanted"
        )
    if strange := sorted(name for name in names if name != Path(name).name or name in ("", "..")):
        raise FormatError(f"{index}: lists {quote(strange[0])}, which is no name of a file")
    files = [index.with_name(name) for name in sorted(names)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise FormatError(
            f"{index}: {len(missing)} of {len(files)} shards are missing: {', '.join(missing[:5])}"
        )
    return files
