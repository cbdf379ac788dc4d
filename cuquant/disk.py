"""Files that others may plant, change or be writing: read within bounds, replaced whole."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


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
        parts, left = [], limit + 1
        while left > 0 and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    if left <= 0:
        raise OSError(errno.EFBIG, f"is larger than {limit} bytes", str(path))
    return b"".join(parts)


def is_owned(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to the user who runs this; always on Windows."""
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def is_shared(status: os.stat_result) -> bool:
    """Whether the group or the world may write to it; never on Windows."""
    return os.name == "posix" and bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def is_folder(path: Path) -> bool:
    """`path.is_dir()`, and False where it cannot be asked."""
    try:
        return path.is_dir()
    except OSError:
        return False
