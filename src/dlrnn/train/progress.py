"""What a person sees of a run: a bar in a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from dlrnn.common.untrusted import printable


class Silent:
    """Nothing to see."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, step: int, values: dict[str, Any]) -> None:
        """Loss or metrics of a step."""

    def say(self, text: str) -> None:
        """Print a line."""

    def warn(self, text: str) -> None:
        """Print a line that is shown in any case."""
        print(printable(text), file=sys.stderr)


class Shown(Silent):
    """A rich bar where there is a terminal, else a line every few seconds."""

    def __init__(self, name: str, start: int, steps: int, device: torch.device) -> None:
        self.name, self.start, self.steps, self.device = name, start, steps, device
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[values]}"),
                TimeRemainingColumn(),
            )
            hour = 3600  # a slow run is heard of once a minute: its rate is still known
            self.bar = Progress(*columns, console=self.console, speed_estimate_period=hour)
            self.task = self.bar.add_task(name, total=steps, completed=start, values="")
        self.began, self.last_line = time.perf_counter(), 0.0
        self.waiting = ""  # a line that has not been printed yet: the last one is, at the end
        self.values: dict[str, str] = {}

    def __enter__(self) -> "Shown":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.waiting:
            print(self.waiting, file=sys.stderr)

    def show(self, step: int, values: dict[str, Any]) -> None:
        """Loss, metric, steps a second, device memory; the bar adds the time left."""
        now = time.perf_counter()
        rate = (step - self.start) / max(now - self.began, 1e-9)
        self.values |= {k: f"{v:.4g}" for k, v in values.items() if isinstance(v, float)}
        words = [f"{name} {value}" for name, value in self.values.items()]
        words.append(f"{rate:.3g} steps/s")
        if self.device.type == "cuda":
            words.append(f"{torch.cuda.max_memory_allocated(self.device) / 2**30:.2g} GiB")
        text = "  ".join(words)
        if self.bar is not None:
            self.bar.update(self.task, completed=step, values=text)
            return
        left = (self.steps - step) / max(rate, 1e-9)
        self.waiting = f"{self.name}  {step}/{self.steps}  {text}  {left:.0f} s left"
        if now - self.last_line > 5 and step < self.steps:
            print(self.waiting, file=sys.stderr)
            self.last_line, self.waiting = now, ""

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(Text(printable(text)), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a line above the bar."""
        self.say(text)
