"""Stop a run after its current step when Ctrl-C or SIGTERM asks for it."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

REPEAT_SECONDS = 2.0
"""Signals within this time of the first one count as one request."""

PAIR_SECONDS = 0.05
"""`timeout` sends two signals, one to the command and one to its group, within this time."""


@contextmanager
def stop_requests() -> Iterator[list[float]]:
    """A list of the times at which SIGINT or SIGTERM arrived; it is empty until the first one.

    A later Ctrl-C (more than `REPEAT_SECONDS` after the first) raises KeyboardInterrupt at once.
    Outside the main thread no handler can be installed, and the list stays empty.
    """
    requests: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def handle(number: int, _: Any) -> None:
        requests.append(time.monotonic())
        if number == signal.SIGINT and requests[-1] - requests[0] > REPEAT_SECONDS:
            raise KeyboardInterrupt
        if len(requests) == 1:
            # Python would otherwise run the handler of the second signal of a pair only after a
            # long operation, when it no longer counts as a repetition.
            time.sleep(PAIR_SECONDS)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
