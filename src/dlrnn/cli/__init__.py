"""The command `dlrnn`. torch and the modules of other commands are imported only if needed."""

import argparse
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module

from dlrnn._version import __version__
from dlrnn.cli.shared import IN_USE, is_rank_zero, user_line, warn
from dlrnn.common.untrusted import brief

COMMANDS = {
    **{"doctor": "doctor", "tasks": "tasks", "data": "tasks"},
    **dict.fromkeys(("train", "eval", "recipes", "reproduce", "sweep"), "training"),
    **{"generate": "language", "export": "language", "bench": "bench"},
    **{"results": "report", "report": "report"},
}
"""The module of each command, inside dlrnn.cli."""

EXPECTED = (ValueError, OSError, ArithmeticError, RuntimeError, MemoryError)
"""Errors that end a command with one sentence; others are bugs of ours and show a traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; bad input ends in one sentence and exit status 2."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = _parser(words[0] if words else "")
    if not words:
        parser.print_help()
        return 2
    given, rest = parser.parse_known_args(arguments)
    if rest and not getattr(given, "takes_overrides", False):
        given.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    given.overrides = rest
    try:
        _prepare(is_command=arguments is None)
        _import_torch()
        status: int = given.run(given)
        print(end="", flush=True)
    except KeyboardInterrupt:
        again = given.command in ("reproduce", "sweep")
        hint = "; the same command continues it" if again else ""
        if is_rank_zero():
            print(f"\ndlrnn {given.command}: stopped{hint}", file=sys.stderr)
        return 130
    except Exception as error:
        where = user_line(error)
        if not isinstance(error, EXPECTED) and not where:
            raise  # a bug of ours
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            return 1
        message = brief(error, 1000) or type(error).__name__
        if isinstance(error, MemoryError):
            message = f"there is not enough memory: {message}"
        if where and not isinstance(error, ValueError | OSError):
            message = ": ".join(dict.fromkeys((type(error).__name__, message)))
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        if isinstance(error, NotADirectoryError):
            message = f"{error.filename}: there is a file where a folder was expected"
        if isinstance(error, FileExistsError):
            message = f"{error.filename} is a file; a folder was expected"
        warn(f"dlrnn {given.command}: {message}{where}")
        return _status(error)
    return status


def _status(error: Exception) -> int:
    """2 for bad input, 75 if another process trains the run, 1 for NaN and out of memory."""
    if type(error).__name__ == "InUseError":
        return IN_USE
    return 2 if isinstance(error, ValueError | OSError) else 1


def _prepare(*, is_command: bool) -> None:
    """Check that the current folder exists, without which libraries fail in unclear ways.

    Processes that the command starts do not import from the current folder.
    """
    if is_command:
        os.environ["PYTHONSAFEPATH"] = os.environ.get("PYTHONSAFEPATH") or "1"
    try:
        os.getcwd()
    except OSError:
        raise ValueError("the current folder no longer exists: change to another") from None


def _import_torch() -> None:
    """Import torch, which a KeyboardInterrupt can break: meanwhile Ctrl-C ends the process at once.

    A handler other than Python's default stays.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import_module("torch")
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stdout_is_closed() -> bool:
    """Whether the reader of stdout has closed its pipe, as `| head` does; the rest is discarded."""
    try:
        handle = sys.stdout.fileno()
    except (AttributeError, OSError):
        return False
    poll = select.poll()
    poll.register(handle, select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), handle)
    return True


def _parser(command: str) -> argparse.ArgumentParser:
    """The parser of one command, or of all if there is no such command."""
    text = "Train, test and measure diagonal linear RNNs and other sequence mixers."
    parser = argparse.ArgumentParser(prog="dlrnn", description=text, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"dlrnn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = [COMMANDS[command]] if command in COMMANDS else dict.fromkeys(COMMANDS.values())
    for module in modules:
        import_module(f"dlrnn.cli.{module}").add(commands)
    return parser
