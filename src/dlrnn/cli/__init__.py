"""The command `dlrnn`: parsing and printing only. torch is imported when a command runs."""

import argparse
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module

from dlrnn._version import __version__
from dlrnn.cli import bench, language, layer, report, tasks, training
from dlrnn.cli.shared import IN_USE, own_line, speaks, warn
from dlrnn.common.untrusted import brief

EXPECTED = (ValueError, OSError, ArithmeticError, RuntimeError, MemoryError)
"""What ends a command with a sentence; anything else is our mistake and shows its traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; bad input ends in one sentence and exit status 2."""
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
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
        on = "; the same command goes on" if given.command in ("reproduce", "sweep") else ""
        if speaks():
            print(f"\ndlrnn {given.command}: stopped{on}", file=sys.stderr)
        return 130
    except Exception as error:
        told = isinstance(error, EXPECTED)
        where = own_line(error)
        if not told and not where:
            raise  # a mistake of ours
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 1
        said = brief(error, 1000) or type(error).__name__
        if isinstance(error, MemoryError):
            said = f"there is not enough memory: {said}"
        if where and not isinstance(error, ValueError | OSError):
            said = ": ".join(dict.fromkeys((type(error).__name__, said)))
        if isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}"
        if isinstance(error, NotADirectoryError):
            said = f"{error.filename}: there is a file where a folder was expected"
        if isinstance(error, FileExistsError):
            said = f"{error.filename} is a file; a folder was expected"
        warn(f"dlrnn {given.command}: {said}{where}")
        return _status(error)
    return status


def _status(error: Exception) -> int:
    """2 for bad input, 75 for a run that another process trains, 1 for NaN and out of memory."""
    if type(error).__name__ == "InUseError":
        return IN_USE
    return 2 if isinstance(error, ValueError | OSError) else 1


def _prepare(*, is_command: bool) -> None:
    """Keep the current folder out of the import path of the processes that the command starts, and
    refuse one that is gone, where libraries would end the process without a sentence.
    """
    if is_command:
        os.environ["PYTHONSAFEPATH"] = os.environ.get("PYTHONSAFEPATH") or "1"
    try:
        os.getcwd()
    except OSError:
        raise ValueError("the current folder does not exist any more: change to another") from None


def _import_torch() -> None:
    """Nearly every command does, and it does not stand a KeyboardInterrupt meanwhile: until it is
    there Ctrl-C ends the process at once, unless somebody else decided what it does.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import_module("torch")
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _nobody_reads() -> bool:
    """What is printed goes into a pipe whose reader has gone, as in `| head`: to nowhere, then."""
    try:
        handle = sys.stdout.fileno()
    except (AttributeError, OSError):  # closed, or no file at all
        return False
    end = select.poll()
    end.register(handle, select.POLLOUT)
    if not any(event & select.POLLERR for _, event in end.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), handle)
    return True


def _parser() -> argparse.ArgumentParser:
    text = "Diagonal linear RNNs: `from dlrnn import DLR`."
    parser = argparse.ArgumentParser(prog="dlrnn", description=text, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"dlrnn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for part in (layer, tasks, training, language, bench, report):
        part.add(commands)
    return parser
