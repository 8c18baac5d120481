"""Write files atomically, never through a link, with errors that name the file."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path

PART = ".part"
"""The suffix of a file while it is written; it is renamed when all of it is on the disk."""

_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash it has either its old or its new content.

    `path.part` is written, flushed to the disk and renamed. It is always a new file, and the rename
    replaces a link instead of following it.
    """
    with exclusive(path.parent):
        write_unlocked(path, content)


def write_unlocked(path: Path, content: bytes) -> None:
    """`write_whole` for a process that holds the lock of the folder (`exclusive`)."""
    part = path.with_name(path.name + PART)
    with naming(path):
        try:
            part.unlink(missing_ok=True)
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
            with open(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        sync(path.parent)  # the rename too


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    if os.name == "posix":
        with naming(folder):
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def create_new(path: Path) -> None:
    """Create an empty file; it replaces a file or a link of that name."""
    with naming(path):
        path.unlink(missing_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666))


def open_append(path: Path) -> BufferedRandom:
    """Open a file to append to it and to read it.

    Symbolic links, hard links and special files raise: appending to one would write elsewhere.
    """
    with naming(path):
        require_single(path)
        wait = getattr(os, "O_NONBLOCK", 0)  # a FIFO must not block us
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _NO_LINK | wait, 0o666)
        return open(handle, "ab+")


def require_regular(path: Path) -> os.stat_result | None:
    """Raise for a symbolic link or a special file; a file that does not exist is allowed."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        kind = "symbolic link" if stat.S_ISLNK(found.st_mode) else "folder or special file"
        raise ValueError(f"{path} is a {kind}; a regular file was expected: copy the file itself")
    return found


def require_own_folder(path: Path) -> None:
    """Raise for a folder that is a symbolic link: its files would be written elsewhere."""
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link, and a folder was expected: copy the folder")


def require_single(path: Path) -> None:
    """Raise for a file that is a symbolic link, or has a hard link elsewhere."""
    found = require_regular(path)
    if found is not None and found.st_nlink > 1:
        raise ValueError(
            f"{path} has a hard link elsewhere, and appending would change both: copy the file"
        )


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError, which a failed write or fsync does not name by itself."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link, which is not followed") from error
        parts = (None, str(path) + PART, str(path.parent))
        if error.filename in parts and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[int]:
    """Lock a folder; other threads and processes wait. Calls must not be nested."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot lock folders
            lock(handle, wait=True)
        yield handle
    finally:
        os.close(handle)


def lock(handle: int, *, wait: bool) -> None:
    """Lock an open file or folder until it is closed.

    Without `wait`, a file that another process has locked raises BlockingIOError.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl
        return
    fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
