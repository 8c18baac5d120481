"""The command `dlrnn`. torch and the modules of other commands are imported only if needed."""

import argparse
import json
import os
import re
import select
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from dlrnn._version import __version__
from dlrnn.common.suggestions import nearest
from dlrnn.common.untrusted import brief, printable

COMMANDS = {
    **{"doctor": "doctor", "tasks": "tasks", "data": "tasks"},
    **dict.fromkeys(("train", "eval", "generate", "export"), "training"),
    **dict.fromkeys(("recipes", "reproduce", "sweep"), "training"),
    **{"bench": "bench", "results": "report", "report": "report", "figure": "figure"},
}
"""The module of each command, inside dlrnn.cli."""

EXPECTED = (ValueError, OSError, ArithmeticError, RuntimeError, MemoryError)
"""Errors that end a command with one sentence; others are bugs of ours and show a traceback."""

IN_USE = 75
"""The exit status if another process uses the run: try again later."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; bad input ends in one sentence and exit status 2."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = _parser(words[0] if words else "")
    if not words:
        parser.print_help()
        return 2
    given, rest = parser.parse_known_args(arguments)
    if rest and not getattr(given, "takes_overrides", False):
        given.parser.error(f"unrecognized arguments: {rest[0]}")
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
        if isinstance(error, MemoryError) or "can't allocate memory" in message:
            message = f"there is not enough memory, so choose smaller sizes: {message}"
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


def user_line(error: BaseException) -> str:
    """The last line of the user's code in a traceback, as ` (FILE, line N)`; "" if there is none.

    Installed packages, the standard library and this package are not the user's code.
    """
    each: BaseException | None = error
    while each is not None:
        for frame in reversed(traceback.extract_tb(each.__traceback__)):
            if _is_user_code(frame.filename):
                return f" ({Path(frame.filename).name}, line {frame.lineno})"
        each = each.__cause__
    return ""


def _is_user_code(file: str) -> bool:
    path, installed = Path(file), {"site-packages", "dist-packages"}
    others = (sysconfig.get_path("stdlib"), Path(__file__).parents[1])
    generated = file.startswith("<") or "torchinductor_" in file
    elsewhere = any(path.is_relative_to(each) for each in others)
    return not (generated or elsewhere or installed & set(path.parts))


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


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage: expected, given, cure."""

    def error(self, message: str) -> NoReturn:
        """Print the sentence to stderr and exit with status 2."""
        options = re.findall(r"--\w[\w-]*", self.format_help())
        cure = f"see `{self.prog} --help`"
        self.exit(2, printable(f"{self.prog}: {_sentence(message, options, cure)}") + "\n")


_SENTENCES = {
    "the following arguments are required: (.*)": r"\1 must be given",
    r"argument (\S+): expected .*": r"\1 must have a value, and nothing was given",
    r"argument (\S+): invalid float value: (.*)": r"\1 must be a number, not \2",
    r"argument (\S+): invalid int value: (.*)": r"\1 must be a whole number, not \2",
    r"argument (\S+): (must .*)": r"\1 \2",
    "unrecognized arguments: (?P<wrong>.*)": r"there is no option or further argument \1",
    r"argument (\S+): invalid choice: (?P<wrong>.*) \(choose from (?P<known>.*)\)": (
        r"\1 must be one of \3, not \2"
    ),
}
"""What argparse says, and what is said instead."""


def _sentence(message: str, options: Iterable[str], cure: str) -> str:
    """The message of argparse in our words, with the nearest name or else the cure."""
    for pattern, said in _SENTENCES.items():
        if found := re.fullmatch(pattern, message, re.DOTALL):
            parts = found.groupdict()
            known = parts.get("known", " ".join(options)).replace("'", "").replace(",", "").split()
            near = nearest(parts["wrong"].strip("'\""), known) if "wrong" in parts else None
            return f"{found.expand(said)}; {f'did you mean {near}?' if near else cure}"
    return f"{message}; {cure}"


def _parser(command: str) -> argparse.ArgumentParser:
    """The parser of one command, or of all if there is no such command."""
    text = "Train, test and measure diagonal linear RNNs and other sequence mixers."
    parser = Parser(prog="dlrnn", description=text, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"dlrnn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = [COMMANDS[command]] if command in COMMANDS else dict.fromkeys(COMMANDS.values())
    for module in modules:
        import_module(f"dlrnn.cli.{module}").add(commands)
    return parser


# ---------------------------------------------------------------------------------- options


def command(
    commands: Any, name: str, run: Any, text: str, *, json: bool = True
) -> argparse.ArgumentParser:
    """Add a command, by default with the option `--json`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    parser.set_defaults(run=run, parser=parser)
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def device_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--device`."""
    parser.add_argument("--device", default=None, help="cpu or cuda; default: cuda if available")


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def resolve(device: str | None) -> str:
    """The given device, or by default cuda if it is available; a missing device raises."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"there is no device {device!r}: say cpu or cuda") from error
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not supported: say cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("cuda was asked for, and torch finds no CUDA device here")
    return device


def is_rank_zero() -> bool:
    """Whether this is the process that prints, of several that torchrun started."""
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0) == 0


def say(text: str) -> None:
    """Print a line to stdout; control characters are escaped."""
    print(printable(text))


def warn(text: str) -> None:
    """Print a line to stderr; control characters are escaped."""
    print(printable(text), file=sys.stderr)


def trust_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--trust`."""
    text = "import the mixer and the task that the run's files name, which runs them (SECURITY.md)"
    parser.add_argument("--trust", action="store_true", help=text)


def print_json(value: Any) -> int:
    """Print a value as JSON; returns the exit status 0."""
    print(json.dumps(value, indent=1))
    return 0


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table of rows that have the same keys."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name, value in rows[0].items():  # names are wrapped, not truncated
        justify: Any = "left" if isinstance(value, str) else "right"
        table.add_column(Text(name), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(value)) for value in row.values()))
    print(printable(title))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def shown(value: object) -> str:
    """A value as the text of a table cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "ok" if value else "FAILED"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-2 else f"{value:.4g}"
    return printable(str(value))
