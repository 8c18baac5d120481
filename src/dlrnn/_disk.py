"""Files that are whole or as they were, whatever happens and whoever else writes them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Beside, fsync, rename."""
    beside = path.with_name(f"{path.name}.part")
    with exclusive(path.parent) as folder:
        try:
            with open(beside, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException as error:
            beside.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno and error.filename is None:
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise
        os.fsync(folder)  # the rename too


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[int]:
    """A folder that one thread of one process has at a time; the others wait. Not to be nested."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system that does not lock folders
            lock(handle, wait=True)
        yield handle
    finally:
        os.close(handle)


def lock(handle: int, *, wait: bool) -> None:
    """An open file or folder, until it is closed; without `wait` BlockingIOError if it is taken."""
    try:
        import fcntl
    except ImportError:  # on Windows there is none
        return
    fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
