"""Progress on stderr: a bar in a terminal, otherwise a line every few seconds."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from dlrnn.common.untrusted import printable

LINE_SECONDS = 5.0


class Progress:
    """Shows how much of a task is done, its rate and the time that is left.

        with Progress("build", "samples", quiet_seconds=10) as progress:
            progress.update(done, total)

    `start` is the count at the beginning. Outside of a terminal nothing is printed until
    `quiet_seconds` have passed.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        total: int | None = None,
        start: int = 0,
        *,
        quiet_seconds: float = 0.0,
    ) -> None:
        self.name, self.unit, self.total, self.start = name, unit, total, start
        self.quiet_seconds = quiet_seconds
        self.console = Console(stderr=True)
        self._bar: RichProgress | None = None
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[values]}", markup=False),
                TimeRemainingColumn(),
            )
            # An hour: a slow run reports once a minute, and its rate must still be known.
            self._bar = RichProgress(*columns, console=self.console, speed_estimate_period=3600)
            self._task = self._bar.add_task(name, total=total, completed=start, values="")
        self._began, self._last_line = time.perf_counter(), -LINE_SECONDS
        self._pending = ""  # a line that is printed at the end unless a later one replaces it

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            if self._bar.live.is_started:
                self._bar.stop()
        elif self._pending:
            print(self._pending, file=sys.stderr)

    def begin(self) -> None:
        """Show the bar before the first update."""
        if self._bar is not None:
            self._bar.start()

    def update(self, done: int, total: int | None = None, text: str = "") -> None:
        """Show the count, `text` and the rate. An error before the first update shows no bar."""
        self.total = self.total if total is None else total
        elapsed = time.perf_counter() - self._began
        rate = (done - self.start) / max(elapsed, 1e-9)
        values = f"{text}  {rate:.3g} {self.unit}/s".strip()
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._task, completed=done, total=self.total, values=values)
            return
        if elapsed < self.quiet_seconds:
            return
        if self.total is None:
            self._pending = f"{self.name}  {done}  {values}"
        else:
            left = (self.total - done) / max(rate, 1e-9)
            self._pending = f"{self.name}  {done}/{self.total}  {values}  {left:.0f} s left"
        if elapsed - self._last_line > LINE_SECONDS and done != self.total:
            print(self._pending, file=sys.stderr)
            self._last_line, self._pending = elapsed, ""

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(Text(printable(text)), soft_wrap=True)
