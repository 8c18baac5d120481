"""The one place that chooses which implementation of an op runs.

`torch` is there on every device. A backend that is asked for and not there is an error, never
exchanged in silence: ask with `use_backend("torch")`, or with the variable DLRNN_BACKEND before
dlrnn is imported.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

BACKENDS: dict[str, tuple[str, ...]] = {
    "vandermonde": ("torch",),
    "vandermonde_adjoint": ("torch",),
    "channel_vandermonde": ("torch",),
    "channel_adjoint": ("torch",),
    "convolution": ("torch",),
    "step": ("torch",),
}
"""For each op, the backends that implement it, best first."""

_asked = [os.environ.get("DLRNN_BACKEND", "")]


def backend_for(op: str) -> tuple[str, str]:
    """The backend that `op` uses, and why."""
    asked, available = _asked[-1], BACKENDS[op]
    if not asked:
        only = len(available) == 1
        return available[0], "the only one" if only else f"before {', '.join(available[1:])}"
    if asked not in available:
        raise ValueError(
            f"backend {asked!r} was asked for, and {op} has only: {', '.join(available)}"
        )
    return asked, "asked for"


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside the context every op uses this backend, or raises."""
    _asked.append(name)
    try:
        for op in BACKENDS:
            backend_for(op)
        yield
    finally:
        _asked.pop()
