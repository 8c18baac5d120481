"""Ctrl-C, and SIGTERM of a cluster that wants its machine back, end a run after its step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def asked_to_stop(*, times: int) -> Iterator[list[int]]:
    """A list, empty until a signal asks; more than so many interrupt at once.

    Only the main thread can listen.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, _: Any) -> None:
        asked.append(number)
        if len(asked) > times:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
