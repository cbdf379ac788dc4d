"""Files that others may plant, change or be writing: read within bounds, replaced whole."""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows, which removes no file that is open: no lock is needed
    fcntl = None


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> BinaryIO:
    """Open a regular file for unbuffered reading; never waits, as opening a FIFO would.

    Parameters
    ----------
    path
        A FIFO, a device, a socket or a folder is refused.
    follow
        False: a symbolic link is refused too (Windows follows it).

    Raises
    ------
    OSError
        As the system gives it; EINVAL for what is no regular file.

    Examples
    --------
    >>> with open_regular(__file__) as file:
    ...     file.read(3)
    b'\"\"\"'
    """
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    flags |= getattr(os, "O_NONBLOCK", 0) | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is not a regular file; copy it to disk first", str(path))
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(path: str | os.PathLike[str], limit: int, *, follow: bool = True) -> bytes:
    """The bytes of a regular file that holds at most `limit` of them.

    Raises
    ------
    OSError
        As the system gives it; EINVAL for what is no regular file, EFBIG for a larger one.

    Examples
    --------
    >>> read_bounded(__file__, 10)
    Traceback (most recent call last):
    OSError: [Errno 27] is larger than 10 bytes: ...
    """
    with open_regular(path, follow=follow) as file:
        try:
            return read_rest(file, limit)
        except OSError as error:
            error.filename = str(path)
            raise


def read_rest(file: BinaryIO, limit: int) -> bytes:
    """What is left of an open file, at most `limit` bytes; OSError as `read_bounded`."""
    parts, left = [], limit + 1
    while left > 0 and (part := file.read(min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    if left <= 0:
        raise OSError(errno.EFBIG, f"is larger than {limit} bytes")
    return b"".join(parts)


def is_owned(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to the user who runs this; always on Windows."""
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def is_shared(status: os.stat_result) -> bool:
    """Whether the group or the world may write to it; never on Windows."""
    return os.name == "posix" and bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


class Replacement:
    """A file that appears whole under its name, or not at all.

    Bytes go to `file`, a temporary file beside the target, which replaces the target when the
    ``with`` block ends well; after any exception it is removed, and an older target is as it was.
    An older target hands on its permissions; a new file has those of the umask. What killed
    processes left behind, `.NAME.*.tmp`, is removed by the next one that replaces the file.

    Parameters
    ----------
    path
        A link stays, and the file that it points to is replaced.
    mode
        Permissions; None: as above.
    durable
        Wait until the file is on the disk, so that a power cut leaves the old one or the new one.

    Attributes
    ----------
    file
        Unbuffered: a buffer that could not be flushed would come back at close.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a")
    >>> with Replacement(path) as new:
    ...     new.write(b"all of it")
    >>> path.read_bytes()
    b'all of it'
    """

    def __init__(
        self, path: str | os.PathLike[str], *, mode: int | None = None, durable: bool = True
    ) -> None:
        self.path = Path(path)
        self._mode, self._durable = mode, durable
        self._target = self.path
        self._temporary: Path | None = None
        self.file: BinaryIO | None = None

    def __enter__(self) -> Replacement:
        if self.file is not None:
            raise ValueError(f"{self.path}: this file is open already; make another writer")
        self._target = Path(os.path.realpath(self.path))
        if self._target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory; name a file", str(self.path))
        if self.path.exists() and not self.path.is_file():  # a pipe has a path of no file
            raise OSError(errno.EINVAL, "is not a regular file; name another", str(self.path))
        if not self._target.parent.is_dir():
            folder = self._target.parent if self.path.is_symlink() else self.path.parent
            raise FileNotFoundError(errno.ENOENT, "no such directory; create it first", str(folder))
        remove_stale(self._target)
        try:
            self.file = self._create()
            self._hand_on_permissions(self.file.fileno())
        except BaseException:
            self.discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.finish()
            elif isinstance(error, OSError) and error.filename is None:
                error.filename = str(self.path)  # a full disk has no name by itself
        except OSError as problem:
            problem.filename = str(self.path)  # the name that the caller knows
            raise
        finally:
            self.discard()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        assert self.file is not None  # inside the with block
        write_all(self.file, data)

    def finish(self) -> None:
        """Put the file under its name."""
        assert self.file is not None and self._temporary is not None  # inside the with block
        if self._durable:
            os.fsync(self.file.fileno())
        if fcntl is None:  # Windows renames no file that is open
            self.file.close()
        os.replace(self._temporary, self._target)
        self._temporary = None
        if self._durable:
            _sync_directory(self._target.parent)

    def discard(self) -> None:
        """Close and remove what is left of the temporary file; after `finish` nothing is."""
        if self._temporary is not None and fcntl is not None:
            with suppress(OSError):  # the first error is the one to show
                self._temporary.unlink(missing_ok=True)
        if self.file is not None:
            with suppress(OSError):
                self.file.close()
            self.file = None
        if self._temporary is not None and fcntl is None:
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)
        self._temporary = None

    def _create(self) -> BinaryIO:
        """The temporary file, locked for as long as it is open: another process may not remove it.

        Its permissions are the user's own until it has those of the file that it will replace.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        flags |= getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        private = self._mode is not None or self._target.exists()
        while True:
            temporary = self._target.with_name(_temporary_name(self._target.name))
            file = os.fdopen(os.open(temporary, flags, 0o600 if private else 0o666), "wb", 0)
            self._temporary, self.file = temporary, file
            if _lock(file.fileno(), wait=True) is False:
                return file  # no locks on this file system: nobody takes it for a stale one
            if fcntl is None or temporary.exists():
                return file
            file.close()  # taken for a stale one between its creation and the lock

    def _hand_on_permissions(self, descriptor: int) -> None:
        if os.name != "posix":  # Windows: permissions come from the folder
            return
        if self._mode is not None:
            os.fchmod(descriptor, self._mode)
            return
        try:
            old = self._target.stat()
        except FileNotFoundError:
            return
        mode = stat.S_IMODE(old.st_mode) & 0o777
        for owner in (old.st_uid, -1):
            with suppress(OSError):
                os.fchown(descriptor, owner, old.st_gid)
                break
        if os.fstat(descriptor).st_gid != old.st_gid:
            mode &= ~stat.S_IRWXG  # they were another group's
        os.fchmod(descriptor, mode)


def replace_file(
    path: str | os.PathLike[str], data: bytes, *, mode: int | None = None, durable: bool = True
) -> None:
    """Write a file whole, or leave it as it was; as `Replacement`.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a")
    >>> replace_file(path, b"all of it")
    >>> path.read_bytes()
    b'all of it'
    """
    with Replacement(path, mode=mode, durable=durable) as new:
        new.write(data)


def replace_picture(path: Path, figure: Any) -> None:
    """Write a figure of matplotlib whole, in the kind that the file's name ends in."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lower().lstrip("."))
    replace_file(path, buffer.getvalue())


def remove_stale(target: Path) -> None:
    """Remove what killed processes left beside a target; files that a process holds stay."""
    try:
        names = [
            name
            for name in os.listdir(target.parent)
            if name.startswith(temporary_stem(target.name))
        ]
    except OSError:  # a folder that may be written, but not listed
        return
    for path in (target.with_name(name) for name in names if is_temporary(name)):
        with suppress(OSError):  # it is another's, or gone meanwhile
            if fcntl is None:  # Windows, which refuses where a process has it open
                path.unlink()
                continue
            with open_regular(path, follow=False) as file:
                if is_owned(os.fstat(file.fileno())) and is_unheld(file):
                    path.unlink()


def is_temporary(name: str) -> bool:
    """Whether a file has the name of a temporary file of ours.

    >>> is_temporary(".model.safetensors.0123456789abcdef.tmp"), is_temporary(".a.tmp")
    (True, False)
    """
    return re.fullmatch(r"\..+\.[0-9a-f]{16}\.tmp", name, re.DOTALL) is not None


def temporary_stem(name: str) -> str:
    """What the names of temporary files begin with, for a target of this name.

    >>> temporary_stem("model.safetensors")
    '.model.safetensors.'
    """
    # 40 characters are at most 160 bytes: with the rest within the 255 of a file name.
    return f".{name[:40]}."


def _temporary_name(name: str) -> str:
    return f"{temporary_stem(name)}{secrets.token_hex(8)}.tmp"


def is_unheld(file: BinaryIO) -> bool:
    """Whether no process writes this temporary file; from now on, and until it is closed."""
    return _lock(file.fileno())


def _lock(descriptor: int, wait: bool = False) -> bool:
    """Lock a file; False where another process has it, or the file system knows no locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write every byte: an unbuffered file may take a part (2 GiB a call on Linux)."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _sync_directory(directory: Path) -> None:
    """Make a rename durable where the system lets a directory be synced (Windows does not)."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
