"""Compiled kernels on disk: the folder in the user's cache directory, and how a file is trusted.

A file holds the cubin, what NVRTC said about it, and a checksum over both and over the key, at the
end: the driver, which reads an ELF file from its start, takes such a file as it is.
"""

import hashlib
import os
import stat
import struct
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cuquant.elf import disassembled
from cuquant.errors import BackendUnavailable, FormatError

VARIABLE = "CUQUANT_CACHE_DIR"
EXPORTS = "CUQUANT_CUBINS"
PATTERNS = ("*.cubin", ".*.cubin.*.tmp")  # finished, and half-written before the rename

_TRAILER = struct.Struct("<32sQ8s")  # sha256, bytes of the log, mark
_MARK = b"cuquant1"


class Compiled(NamedTuple):
    """A kernel: a cubin, or PTX for a GPU that NVRTC does not know; and what NVRTC said."""

    code: bytes
    log: str = ""
    fresh: bool = False  # compiled just now, not found


class CacheSize(NamedTuple):
    """How much the cache holds."""

    files: int
    nbytes: int


class CacheWarning(RuntimeWarning):
    """Compiled kernels cannot be kept: each process compiles its own."""


@dataclass(frozen=True)
class Folder:
    """The cache directory; `writable` is about the nearest parent where it does not exist."""

    path: Path
    exists: bool = True
    writable: bool = True
    owned: bool = True
    shared: bool = False  # the group or the world may write


def cache_folder() -> Path:
    """Where compiled kernels go: CUQUANT_CACHE_DIR, or "cuquant" in the user's cache directory.

    It need not exist.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("cuquant", appauthor=False))


def examine_folder(path: Path) -> Folder:
    """Ownership and permissions of a folder that may not exist yet."""
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    if nearest != path:
        return Folder(path, exists=False, writable=writable)
    status = path.stat()
    shared = os.name == "posix" and bool(status.st_mode & 0o022)
    return Folder(path, True, writable, is_owned(status), shared)


def is_owned(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to the user who runs this; always on Windows."""
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


# ---- single files -------------------------------------------------------------------------------


def sealed(key: str, compiled: Compiled) -> bytes:
    """A file's bytes."""
    log = compiled.log.encode()
    return compiled.code + log + _TRAILER.pack(_digest(key, compiled), len(log), _MARK)


def unsealed(key: str, data: bytes) -> Compiled:
    """The kernel in a file.

    Raises
    ------
    FormatError
        Where the file is damaged, or was made for another key.
    """
    body = len(data) - _TRAILER.size
    if body < 0:
        raise FormatError("a compiled kernel that was cut off")
    digest, log_size, mark = _TRAILER.unpack_from(data, body)
    if mark != _MARK or log_size > body:
        raise FormatError("no compiled kernel of cuquant, or one that was cut off")
    log = data[body - log_size : body].decode(errors="replace")
    compiled = Compiled(data[: body - log_size], log)
    if digest != _digest(key, compiled):
        raise FormatError("a compiled kernel whose checksum is wrong")
    return compiled


def _digest(key: str, compiled: Compiled) -> bytes:
    parts = (key.encode(), compiled.code, compiled.log.encode())
    return hashlib.sha256(b"".join(struct.pack("<Q", len(p)) + p for p in parts)).digest()


def write(path: Path, key: str, compiled: Compiled) -> None:
    """Write a file under a temporary name and rename it: readers find all of it, or none.

    Raises
    ------
    OSError
        Where that is not possible; nothing is left behind.
    """
    handle, temporary = tempfile.mkstemp(".tmp", f".{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(sealed(key, compiled))
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def exported(name: str) -> Compiled | None:
    """The kernel that the folder CUQUANT_CUBINS has; None where it is not set, or has none.

    Raises
    ------
    FormatError
        Where the file is damaged.
    BackendUnavailable
        Where there is no such folder.
    """
    folder = os.environ.get(EXPORTS)
    if not folder:
        return None
    if not Path(folder).is_dir():
        raise BackendUnavailable(f"{EXPORTS}={folder} is no folder")
    file = Path(folder, f"{name}.cubin")
    try:
        return unsealed(name, file.read_bytes())
    except FileNotFoundError:
        return None
    except FormatError as error:
        raise FormatError(f"{file}: {error}; make it again: precompile(export=...)") from error


def dump(folder: Path, stem: str, text: str, ptx: bytes, code: bytes) -> None:
    """Write all there is to see of a kernel: STEM.cu, .ptx, .cubin and, with a tool, .sass."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"cu": text.encode(), "ptx": ptx.rstrip(b"\0"), "cubin": code}
    if sass := disassembled(code):
        files["sass"] = sass.encode()
    for suffix, data in files.items():
        (folder / f"{stem}.{suffix}").write_bytes(data)


# ---- the cache ----------------------------------------------------------------------------------


def find(name: str) -> Compiled | None:
    """The kernel that the cache has under a name; None for none, or one that is damaged."""
    folder = _trusted_folder()
    if folder is None:
        return None
    try:
        return unsealed(name, (folder / f"{name}.cubin").read_bytes())
    except (OSError, FormatError):
        return None


def keep(name: str, compiled: Compiled) -> bool:
    """Put a kernel into the cache; False, and a warning once, where that is not possible."""
    folder = _trusted_folder()
    if folder is None:
        return False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(folder / f"{name}.cubin", name, compiled)
    except OSError as error:
        _warn_once(f"{folder}: {error.strerror or error}")
        return False
    return True


def _trusted_folder() -> Path | None:
    """The cache, unless somebody else could plant kernels in it."""
    try:
        folder = examine_folder(cache_folder())
    except (OSError, RuntimeError) as error:  # RuntimeError: a home directory that is not known
        _warn_once(str(error))
        return None
    if not folder.owned:
        _warn_once(f"{folder.path} belongs to another user")
        return None
    if folder.shared:
        _warn_once(f"{folder.path} can be written by others")
        return None
    return folder.path


_warned = False


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        message = f"compiled kernels are not kept: {reason}; set {VARIABLE} to a folder of yours"
        warnings.warn(message, CacheWarning, stacklevel=2)


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
        path.unlink(missing_ok=True)
        files, nbytes = files + 1, nbytes + size
    return CacheSize(files, nbytes)


def _files(folder: Path) -> Iterator[Path]:
    """Regular files (no links) in the folder itself that bear names of ours."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        ours = any(path.match(pattern) for pattern in PATTERNS)
        if ours and stat.S_ISREG(path.lstat().st_mode):
            yield path
