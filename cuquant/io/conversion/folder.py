"""A folder that appears whole under its name; files that were finished before are taken up again.

The folder is made beside the target as `.NAME.HASH.tmp`, where HASH is of all that decides its
bytes. Each file in it is whole. What fails leaves them, and who makes the same folder later, with
`resume`, goes on behind them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from cuquant.disk import is_owned, is_temporary, is_unheld, temporary_stem

LOCK = ".lock"  # held for as long as a process works on a folder
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def identity(source: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files of a source: a changed one is another source."""
    folder = source if source.is_dir() else source.parent
    stem = None if source.is_dir() else _PART.sub("", source.stem)
    found = []
    for path in sorted(folder.iterdir()):
        is_part = stem is None or _PART.sub("", path.stem) == stem or path.suffix == ".json"
        if is_part and path.is_file() and not path.name.startswith("."):
            status = path.stat()
            found.append((path.name, status.st_size, status.st_mtime_ns))
    return found


class NewFolder:
    """A folder that is being made.

    Attributes
    ----------
    path
        Where files are written until the folder has its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._done: set[str] = set()

    def has(self, name: str, nbytes: int) -> bool:
        """Whether a file of that size was finished before; it counts as finished now."""
        path = self.path / name
        if path.is_file() and path.stat().st_size == nbytes:
            self._done.add(name)
            return True
        return False

    def finished(self, name: str) -> None:
        """A file is whole, and worth keeping."""
        self._done.add(name)

    @property
    def is_worth_keeping(self) -> bool:
        """Whether a file of it is finished."""
        return bool(self._done)


@contextmanager
def new_folder(target: Path, told: Any, resume: bool) -> Iterator[NewFolder]:
    """A folder that appears under its name when it is complete.

    Parameters
    ----------
    target
        Its name; not there yet, or empty.
    told
        What decides the bytes of its files, as JSON has it.
    resume
        Keep the files that an earlier attempt with the same `told` finished.

    Raises
    ------
    OSError
        As the system gives it; EBUSY where another process makes the same folder.
    """
    whole = Path(os.path.realpath(target))  # a link stays
    if not whole.parent.is_dir():
        raise FileNotFoundError(2, "no such directory; create it first", str(target.parent))
    text = json.dumps(told, sort_keys=True, default=str)
    mark = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = whole.with_name(f"{temporary_stem(whole.name)}{mark}.tmp")
    _remove_others(whole, path if resume else None)
    path.mkdir(exist_ok=True)
    made = NewFolder(path)
    with _locked(path, target) as lock:
        try:
            if whole.exists() and any(whole.iterdir()):  # made by another process meanwhile
                raise FileExistsError(errno.EEXIST, "is there already", str(target))
            yield made
            if whole.is_dir():
                whole.rmdir()  # it is empty
            if os.name == "nt":  # which renames no folder of open files
                lock.unlink(missing_ok=True)
            os.rename(path, whole)
            with suppress(OSError):
                (whole / LOCK).unlink(missing_ok=True)
        except BaseException:
            lock.unlink(missing_ok=True)
            if not made.is_worth_keeping:
                shutil.rmtree(path, ignore_errors=True)
            raise


@contextmanager
def _locked(folder: Path, target: Path) -> Iterator[Path]:
    path = folder / LOCK
    with open(path, "ab") as file:
        if not is_unheld(file):
            raise OSError(errno.EBUSY, "another process is writing it", str(target))
        yield path


def _remove_others(target: Path, kept: Path | None) -> None:
    """Remove what earlier attempts left beside the target, but for what a process works on."""
    stem = temporary_stem(target.name)
    for path in target.parent.glob(f"{_escaped(stem)}*.tmp"):
        if not is_temporary(path.name) or path == kept or path.is_symlink() or not path.is_dir():
            continue
        with suppress(OSError):
            if is_owned(path.stat()) and _is_unheld(path / LOCK):
                shutil.rmtree(path, ignore_errors=True)


def _is_unheld(lock: Path) -> bool:
    if not lock.exists():
        return True
    file: BinaryIO
    with open(lock, "rb") as file:
        return is_unheld(file)


def _escaped(text: str) -> str:
    return re.sub(r"([\[\]*?])", r"[\1]", text)
