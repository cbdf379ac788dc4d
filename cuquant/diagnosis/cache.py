"""The folder in the user's cache directory where compiled kernels are kept."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VARIABLE = "CUQUANT_CACHE_DIR"
PATTERNS = ("*.cubin", ".*.cubin.*.tmp")  # finished, and half-written before the rename


class CacheSize(NamedTuple):
    """How much the cache holds."""

    files: int
    nbytes: int


def cache_folder() -> Path:
    """Where compiled kernels go: CUQUANT_CACHE_DIR, or "cuquant" in the user's cache directory.

    It need not exist.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("cuquant", appauthor=False))


def cache_size() -> CacheSize:
    """Files of ours in the cache and the bytes in them."""
    sizes = [path.lstat().st_size for path in _files(cache_folder())]
    return CacheSize(len(sizes), sum(sizes))


def clear_cache() -> CacheSize:
    """Remove the files of ours in the cache, and nothing else; returns what was removed.

    Raises
    ------
    PermissionError
        Where the folder belongs to another user.
    ValueError
        Where it is a symbolic link.
    """
    folder = cache_folder()
    if folder.is_symlink():
        raise ValueError(
            f"{folder} is a symbolic link, and those are not followed; "
            f"set {VARIABLE} to the folder it points to"
        )
    if folder.exists() and not is_owned(folder.stat()):
        raise PermissionError(
            f"{folder} belongs to another user; set {VARIABLE} to a folder of yours"
        )
    files = nbytes = 0
    for path in _files(folder):
        size = path.lstat().st_size
        path.unlink()
        files, nbytes = files + 1, nbytes + size
    return CacheSize(files, nbytes)


def is_owned(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to the user who runs this; always on Windows."""
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def _files(folder: Path) -> Iterator[Path]:
    """Regular files (no links) in the folder itself that bear names of ours."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        ours = any(path.match(pattern) for pattern in PATTERNS)
        if ours and stat.S_ISREG(path.lstat().st_mode):
            yield path
