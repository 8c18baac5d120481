"""The one place that chooses which implementation of an op runs.

`torch` is there on every device; `fused`, our own kernels, for the tensors that they support: those
of ops/cuda on a Hopper GPU (the convolutions also on later ones), those of ops/triton on every GPU
that Triton knows. A backend that is asked for and not there is an error, never exchanged in
silence: ask with `use_backend("torch")`, or with the variable DLRNN_BACKEND before dlrnn is
imported. Asking for `fused` leaves ops without such a kernel alone.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

BACKENDS: dict[str, tuple[str, ...]] = {
    "vandermonde": ("fused", "torch"),
    "vandermonde_adjoint": ("fused", "torch"),
    "channel_vandermonde": ("fused", "torch"),
    "channel_adjoint": ("fused", "torch"),
    "convolution": ("fused", "torch"),
    "mix": ("fused", "torch"),
    "layer_norm": ("fused", "torch"),
    "thin_linear": ("fused", "torch"),
    "rotate": ("fused", "torch"),
    "zero_order_hold": ("fused", "torch"),
    "sections": ("fused", "torch"),
    "step": ("torch",),
}
"""For each op, the backends that implement it, best first."""

_HAS_TRITON = find_spec("triton") is not None  # asked once, here: a compiled graph cannot ask
_asked = [os.environ.get("DLRNN_BACKEND", "")]


def backend_for(op: str, device: torch.device | None = None) -> tuple[str, str]:
    """The backend that `op` uses (there, or on a GPU if there is one), and why."""
    asked = _asked[-1]
    fused = _fused_is_there() and (device is None or _is_hopper(device))
    available = [name for name in BACKENDS[op] if name != "fused" or fused]
    if not asked or (asked == "fused" and asked not in BACKENDS[op]):
        only = len(available) == 1
        return available[0], "the only one" if only else f"before {', '.join(available[1:])}"
    if asked not in available:
        raise ValueError(
            f"backend {asked!r} was asked for, and {op} has only: {', '.join(available)}"
        )
    return asked, "asked for"


def is_fused(op: str, *, supported: bool) -> bool:
    """Whether `op` runs our own kernels, which support these tensors or not."""
    backend, why = backend_for(op)
    if backend == "fused" and why == "asked for" and not supported:
        raise ValueError(
            f"backend 'fused' was asked for, and its {op} does not take these tensors: it wants"
            " fp32 on a Hopper GPU, and for a convolution lengths from 129 to 2^20"
        )
    return backend == "fused" and supported


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _fused_is_there() -> bool:
    """Asks for no device's properties: that would start CUDA in a process that may fork."""
    return _HAS_TRITON and torch.cuda.is_available()


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
