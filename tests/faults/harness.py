"""Commands that run under guards, and what is expected of those that read a damaged file.

`run_command` calls `dlrnn.cli.main` in this process under a deadline and a memory limit, and
reports imports and processes that no file may cause.
"""

import contextlib
import io
import os
import re
import resource
import signal
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from dlrnn.cli import main

SECONDS = 10.0  # the longest that a command may work on a hostile file
MEMORY = 2**31  # bytes of address space that it may add
HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"

# ---------------------------------------------------------------------------------- guards


class TooSlowError(BaseException):
    """The deadline has passed; no handler of ordinary errors catches it."""


def _too_slow(*_: object) -> NoReturn:
    raise TooSlowError


@contextlib.contextmanager
def _timer(timer: int, number: int, seconds: float) -> Iterator[None]:
    before = signal.signal(number, _too_slow)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


@contextlib.contextmanager
def guarded(seconds: float = SECONDS, wall: float | None = None) -> Iterator[None]:
    """Raise after `seconds` of processor time or `wall` seconds; bound the memory.

    On a loaded machine a test may wait long without using the processor, so `wall` is ten times
    `seconds` by default. Allocations beyond MEMORY bytes of new address space fail.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        with (
            _timer(signal.ITIMER_PROF, signal.SIGPROF, seconds),
            _timer(signal.ITIMER_REAL, signal.SIGALRM, wall or 10 * seconds),
        ):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def opened_later(fifo: Path | None, seconds: float) -> Iterator[None]:
    """Open the other end of a pipe after the deadline, from another process.

    A library that waits for the pipe may hold the interpreter's lock, so no signal handler runs.
    """
    if fifo is None:
        yield
        return
    script = 'sleep "$1"; test -p "$2" && exec 3<>"$2" && sleep 1'
    command = ["sh", "-c", script, "sh", str(seconds + 1), str(fifo)]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


_PROCESSES = {
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"),
    *("pty.spawn", "socket.connect", "urllib.Request"),
}
_MODULES = ("canary", HANDLER, "dlrnn.__main__", "antigravity")
_events: list[str] | None = None  # None: events are not recorded


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _events is None or event not in _PROCESSES:
        return
    command = arguments[1] if event == "subprocess.Popen" else arguments
    first = command[0] if isinstance(command, list | tuple) and command else command
    if os.path.basename(str(first)) not in ("git", "uname"):  # the environment of a run
        _events.append(f"{event} {str(command)[:200]}")


sys.addaudithook(_audit)


class _Finder:
    """The first finder of modules: it records forbidden names, and finds no module."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if _events is not None and name.startswith(_MODULES):
            _events.append(f"import {name}")


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Collect imports of a canary, and started processes."""
    global _events  # noqa: PLW0603 (an audit hook cannot be removed)
    _events = found = []
    finder: Any = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield found
    finally:
        _events = None
        sys.meta_path.remove(finder)
        for name in [each for each in sys.modules if each.startswith("canary")]:
            del sys.modules[name]


# ---------------------------------------------------------------------------------- commands


class Done(NamedTuple):
    """What a command did."""

    status: int | str
    """Its exit status, or what it raised."""
    out: str
    err: str
    events: list[str]
    """Imports and processes that no file may cause."""

    @property
    def text(self) -> str:
        """Both outputs."""
        return self.out + self.err

    def faults(self) -> list[str]:
        """What no file may cause, whatever the command does."""
        found = [f"event {each}" for each in self.events]
        if isinstance(self.status, str):
            found.append(self.status)
        if "Traceback" in self.text:
            found.append("a traceback is printed")
        if any(line.startswith("injected") for line in self.text.splitlines()):
            found.append("text of a file begins a line")
        if raw := sorted({f"U+{ord(each):04X}" for each in self.text if is_control(each)}):
            found.append(f"raw control characters {raw}")
        return found


def is_control(character: str) -> bool:
    """Whether a terminal may act on it: C0, C1, DEL, bidirectional and other format controls."""
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf")


def run_command(
    arguments: Sequence[object], *, seconds: float = SECONDS, fifo: Path | None = None
) -> Done:
    """Run `dlrnn.cli.main` and collect its output; an exception becomes its status."""
    out, err = io.StringIO(), io.StringIO()
    status: int | str
    with (
        opened_later(fifo, seconds),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        watched() as events,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # which would hide what it warns of
        try:
            with guarded(seconds, wall=seconds if fifo else None):
                status = main([str(each) for each in arguments])
        except KeyboardInterrupt:
            raise
        except TooSlowError:
            status = f"not done after {seconds:.0f} s"
        except BaseException as error:
            status = f"{type(error).__name__}: {str(error)[:200]}"
    return Done(status, out.getvalue(), err.getvalue(), events.copy())


def run_well(arguments: Sequence[object]) -> Done:
    """Run a command that must succeed, and has more time for it."""
    outcome = run_command(arguments, seconds=60)
    assert outcome.status == 0, outcome
    assert not outcome.faults(), outcome
    return outcome


def assert_refused(outcome: Done, *names: object) -> None:
    """The command ended in one sentence that has these names, and did nothing forbidden."""
    assert outcome.status == 2, outcome
    assert not outcome.faults(), outcome
    assert outcome.err.count("\n") == 1, outcome.err
    for name in names:
        assert str(name) in outcome.err


@contextlib.contextmanager
def refusal(*names: object) -> Iterator[None]:
    """The guarded block must raise a ValueError: one short sentence that has these names."""
    with pytest.raises(ValueError, match=re.escape(str(names[0]))) as caught, guarded():
        yield
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 1000
    for name in names:
        assert str(name) in said
