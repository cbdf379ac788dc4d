"""Compiled kernels on disk: the folder in the user's cache directory, and how a file is trusted.

A file holds the cubin, what NVRTC said about it, and a checksum over both and over the key, at the
end: the driver, which reads an ELF file from its start, takes such a file as it is.
"""

import hashlib
import os
import re
import stat
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cuquant.disk import is_owned, is_shared, is_unheld, open_regular, read_rest, replace_file
from cuquant.errors import BackendUnavailable, FormatError
from cuquant.gpu.elf import disassembled
from cuquant.interop import CACHE_VARIABLE

VARIABLE = CACHE_VARIABLE
EXPORTS = "CUQUANT_CUBINS"
MAX_ENTRY_BYTES = 1 << 28  # no kernel comes near; a larger file is not one
# Half-written, before the rename; those of version 0.1.0 have eight other characters.
_HALF = re.compile(r"\..+\.([0-9a-f]{16}|cubin\.[a-z0-9_]{8})\.tmp", re.DOTALL)
_STARTS = (b"\x7fELF", b"//")  # of a cubin, and of PTX

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
    exposed: Path | None = None  # a folder above it whose entries anybody may exchange


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
    exposed = next((above for above in nearest.resolve().parents if _is_open(above.stat())), None)
    if nearest != path:
        if exposed is None and _is_open(nearest.stat()):
            exposed = nearest
        return Folder(path, exists=False, writable=writable, exposed=exposed)
    status = path.stat()
    return Folder(path, True, writable, is_owned(status), is_shared(status), exposed)


def _is_open(status: os.stat_result) -> bool:
    """Whether anybody may put files in the place of others' (in /tmp, which is sticky, not)."""
    writable = os.name == "posix" and bool(status.st_mode & stat.S_IWOTH)
    return writable and not status.st_mode & stat.S_ISVTX


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


def write(path: Path, key: str, compiled: Compiled, mode: int | None = None) -> None:
    """Write a file; readers find all of it, or none.

    Raises
    ------
    OSError
        Where that is not possible; nothing is left behind.
    """
    replace_file(path, sealed(key, compiled), mode=mode, durable=False)


def exported(name: str) -> Compiled | None:
    """The kernel that the folder CUQUANT_CUBINS has; None where it is not set, or has none.

    Whoever sets the variable trusts the folder's owner. A folder or a file that everybody may
    write is not used, nor a file of somebody else: a warning says so, once.

    Raises
    ------
    FormatError
        Where the file is damaged, or is no regular file.
    BackendUnavailable
        Where there is no such folder.
    """
    chosen = os.environ.get(EXPORTS)
    if not chosen:
        return None
    folder = Path(chosen)
    if not folder.is_dir():
        raise BackendUnavailable(f"{EXPORTS}={folder} is no folder")
    file, above = folder / f"{name}.cubin", folder.stat()
    try:
        with open_regular(file) as opened:
            status = os.fstat(opened.fileno())
            if _written_by_all(above) or _written_by_all(status):
                everybody = folder if _written_by_all(above) else file
                _warn_once(f"{EXPORTS}: {everybody} can be written by everybody; chmod o-w it")
                return None
            if not is_owned(status) and status.st_uid not in (0, above.st_uid):
                _warn_once(f"{EXPORTS}: {file} belongs to another user than its folder; copy it")
                return None
            return unsealed(name, read_rest(opened, MAX_ENTRY_BYTES))
    except FileNotFoundError:
        return None
    except FormatError as error:
        raise FormatError(f"{file}: {error}; make it again: precompile(export=...)") from error
    except OSError as error:
        reason = error.strerror or error
        raise FormatError(f"{file}: {reason}; make it again: precompile(export=...)") from error


def _written_by_all(status: os.stat_result) -> bool:
    return os.name == "posix" and bool(status.st_mode & stat.S_IWOTH)


def dump(folder: Path, stem: str, text: str, ptx: bytes, code: bytes) -> None:
    """Write all there is to see of a kernel: STEM.cu, .ptx, .cubin and, with a tool, .sass."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"cu": text.encode(), "ptx": ptx.rstrip(b"\0"), "cubin": code}
    if sass := disassembled(code):
        files["sass"] = sass.encode()
    for suffix, data in files.items():
        replace_file(folder / f"{stem}.{suffix}", data, durable=False)


# ---- the cache ----------------------------------------------------------------------------------


def find(name: str) -> Compiled | None:
    """The kernel that the cache has under a name; None for none, or one that is damaged.

    What is no regular file, or another user may have written, is none: it is compiled again.
    """
    folder = _trusted_folder()
    if folder is None:
        return None
    file = folder / f"{name}.cubin"
    try:
        with open_regular(file, follow=False) as opened:
            status = os.fstat(opened.fileno())
            if is_shared(status) or not is_owned(status):
                return None
            return unsealed(name, read_rest(opened, MAX_ENTRY_BYTES))
    except (OSError, FormatError):
        return None


def keep(name: str, compiled: Compiled) -> bool:
    """Put a kernel into the cache; False, and a warning once, where that is not possible."""
    folder = _trusted_folder()
    if folder is None:
        return False
    file = folder / f"{name}.cubin"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not stat.S_ISREG(_mode(file)):  # a link or a FIFO that was put there
            file.unlink(missing_ok=True)
        write(file, name, compiled, 0o600)
    except OSError as error:
        _warn_once(_NOT_KEPT.format(f"{folder}: {error.strerror or error}"))
        return False
    return True


def _mode(path: Path) -> int:
    """Of the file itself, not of what it links to; that of a regular file where there is none."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return stat.S_IFREG


_NOT_KEPT = f"compiled kernels are not kept: {{}}; set {VARIABLE} to a folder of yours"


def _trusted_folder() -> Path | None:
    """The cache, unless somebody else could plant kernels in it."""
    try:
        folder = examine_folder(cache_folder())
    except (OSError, RuntimeError) as error:  # RuntimeError: a home directory that is not known
        _warn_once(_NOT_KEPT.format(error))
        return None
    problem = None
    if not folder.owned:
        problem = f"{folder.path} belongs to another user"
    elif folder.shared:
        problem = f"{folder.path} can be written by others"
    elif folder.exposed is not None:
        problem = f"{folder.path} can be exchanged by others, who can write {folder.exposed}"
    if problem is not None:
        _warn_once(_NOT_KEPT.format(problem))
        return None
    return folder.path


_warned = False


def _warn_once(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
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
    """Regular files (no links) in the folder itself that we have written, by name and content."""
    if not folder.is_dir():
        return
    yield from (path for path in sorted(folder.iterdir()) if _is_ours(path))


def _is_ours(path: Path) -> bool:
    try:
        if path.name.endswith(".cubin"):
            return _has_mark(path)
        return _HALF.fullmatch(path.name) is not None and _is_half(path)
    except OSError:  # no regular file, or one that may not be read
        return False


def _has_mark(path: Path) -> bool:
    """Whether a file ends as `sealed` ends it; reads no more than that end."""
    with open_regular(path, follow=False) as file:
        body = os.fstat(file.fileno()).st_size - _TRAILER.size
        if body < 0:
            return False
        file.seek(body)
        _, log_size, mark = _TRAILER.unpack(file.read(_TRAILER.size))
    return mark == _MARK and log_size <= body


def _is_half(path: Path) -> bool:
    """Whether a file starts as a kernel does (or has nothing yet), and no process writes it."""
    with open_regular(path, follow=False) as file:
        start = file.read(4) or b""
        return (not start or start.startswith(_STARTS)) and is_unheld(file)
