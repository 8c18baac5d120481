"""Options and printing that several commands share."""

import argparse
import json
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from dlrnn.common.untrusted import printable

IN_USE = 75
"""The exit status if another process uses the run: try again later."""


def command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    """Add a command with the option `--json`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def device_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--device`."""
    parser.add_argument("--device", default=None, help="cpu or cuda; default: cuda if available")


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
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


def say(text: str) -> None:
    """Print a line to stdout; control characters are escaped."""
    print(printable(text))


def warn(text: str) -> None:
    """Print a line to stderr; control characters are escaped."""
    print(printable(text), file=sys.stderr)


def trust_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--trust`."""
    text = "import the mixer that the run's files name, which runs its code (SECURITY.md)"
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
    for name, value in rows[0].items():
        justify: Any = "left" if isinstance(value, str) else "right"
        table.add_column(
            Text(name), justify=justify, overflow="fold"
        )  # names are wrapped, not truncated
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
