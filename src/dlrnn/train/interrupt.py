"""Ctrl-C, and SIGTERM of a cluster that wants its machine back, end a run after its step."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ONE_WISH = 2.0
"""Seconds within which signals say the same thing: `timeout` signals a command and then its group,
and who started several processes passes on what a terminal has sent to all of them."""


@contextmanager
def asked_to_stop() -> Iterator[list[float]]:
    """A list, empty until a signal asks; one that asks again, later, interrupts at once.

    Only the main thread can listen.
    """
    asked: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(*_: Any) -> None:
        asked.append(time.monotonic())
        if asked[-1] - asked[0] > ONE_WISH:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
