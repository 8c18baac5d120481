"""Ctrl-C, and SIGTERM of a cluster that wants its machine back, end a run after its step."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ONE_WISH = 2.0
"""Seconds within which Ctrl-C is one wish, however often it comes."""

TWIN = 0.05
"""Seconds in which the second of two signals comes: `timeout` sends one to a command, one to its
group."""


@contextmanager
def asked_to_stop() -> Iterator[list[float]]:
    """A list, empty until a signal asks; Ctrl-C that asks again, later, interrupts at once.

    Only the main thread can listen.
    """
    asked: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, _: Any) -> None:
        asked.append(time.monotonic())
        if number == signal.SIGINT and asked[-1] - asked[0] > ONE_WISH:
            raise KeyboardInterrupt
        if len(asked) == 1:
            time.sleep(TWIN)  # else it were noted when an operation ends that may take long

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
