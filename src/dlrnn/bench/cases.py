"""Layers at many sizes: `dlrnn bench layer --all`, `dlrnn bench conv`, `dlrnn bench lengths`.

Forward + backward. On a GPU a time is that of the replay of a CUDA graph. `ceiling` is the time
that the bytes and the products would take at the rates of one H200.
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlrnn import ops
from dlrnn.bench.listing import ListingDLR
from dlrnn.bench.measure import (
    announced,
    forward_backward,
    machine,
    median_ms,
    relative_error,
    replayed,
    require_right,
    seconds,
)
from dlrnn.nn import DLR, DSS, S4, S4D, Attention, AttentionFF, LocalAttention, SGConv
from dlrnn.ops import dispatch

TOLERANCE = 1e-5
BANDWIDTH, PRODUCTS = 4.3e12, 790e12 / 3  # bytes a second; FLOP a second in three 16-bit products
ATTENTION_UP_TO = 2**15  # positions: above, it would take seconds


class Case(NamedTuple):
    """One layer of the paper; times in ms on an H200."""

    name: str
    batch: int
    channels: int
    states: int
    length: int
    kernel: int
    two_sided: bool = False
    goal: float | None = None
    authors: float | None = None

    def smaller(self, factor: int) -> "Case":
        """This case at a fraction of its length and states, without published times."""
        sizes = {name: max(2, getattr(self, name) // factor) for name in ("states", "length")}
        kernel = max(2, self.kernel // factor)
        batch = min(self.batch, 2)
        return self._replace(**sizes, kernel=kernel, batch=batch, goal=None, authors=None)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the DLR layer."""
        limit = self.kernel if self.kernel < self.length else None
        return {"bidirectional": self.two_sided, "kernel_length": limit}

    @property
    def ceiling(self) -> float:
        """Ms of five passes over the activations and three products of 2 N x L for each kernel."""
        rows = self.channels * (2 if self.two_sided else 1)
        passes = 5 * 4 * self.batch * self.length * self.channels / BANDWIDTH
        return 1e3 * (passes + 3 * 4 * rows * self.states * self.kernel / PRODUCTS)


CASES = (
    Case("atomic", 16, 128, 4096, 4096, 4096, goal=0.5, authors=3.85),
    Case("listops-subtrees", 32, 128, 1024, 8192, 8192, goal=1.0, authors=6.15),
    Case("pathfinder-128", 16, 128, 1024, 16384, 8192, two_sided=True, goal=1.2, authors=6.67),
    Case("pathfinder-256", 18, 128, 1024, 65536, 32768, two_sided=True, goal=6, authors=30.8),
    Case("shift-16K", 4, 32, 4096, 2**14, 2**14, authors=4.38),
    Case("shift-256K", 4, 32, 4096, 2**18, 2**18, goal=6, authors=60.7),
    Case("shift-1M", 4, 32, 4096, 2**20, 2**20, goal=25, authors=251),
)


def bench_cases(*, device: str, repeats: int, factor: int = 1) -> dict[str, Any]:
    """The times of every layer of the paper: our backends, the paper's listing, attention."""
    where = torch.device(device)
    cases = announced([case if factor == 1 else case.smaller(factor) for case in CASES], name_of)
    rows = [layer_row(case, where, repeats) for case in cases]
    return result_of(where, factor, rows)


def bench_conv(*, device: str, repeats: int, factor: int = 1) -> dict[str, Any]:
    """The long convolution alone, against torch.fft (the backend `torch`)."""
    where = torch.device(device)
    short = (Case("512", 64, 128, 0, 512, 512), Case("2048", 32, 128, 0, 2048, 2048))
    cases = [case if factor == 1 else case.smaller(factor) for case in (*short, *CASES)]
    rows = [_convolution(case, where, repeats) for case in announced(cases, name_of)]
    return result_of(where, factor, rows)


def name_of(case: Case) -> str:
    """The name of a case in progress messages."""
    return f"{case.name}: B {case.batch}, L {case.length}"


def layer_row(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """The times of DLR by every backend, of the paper's listing, and of attention.

    Raises if an answer is wrong.
    """
    torch.manual_seed(0)
    before = allocated(device)
    layer = DLR(case.channels, case.states, **case.options).to(device)
    shape = case.batch, case.length, case.channels
    x, dy = torch.randn(shape, device=device), torch.randn(shape, device=device)
    exact = deepcopy(layer).double(), x[:1].double(), dy[:1].double()
    one, full = (layer, x[:1], dy[:1]), (layer, x, dy)
    errors, functions = _by_backend(forward_backward, exact, one, full, device)
    del exact
    row: dict[str, Any] = {"case": case.name, "B": case.batch, "L": case.length, **errors}
    listing = ListingDLR(case.channels, case.states, bidirectional=case.two_sided).to(device)
    if case.kernel == case.length:  # the listing cannot cut kernels
        functions["listing"] = partial(forward_backward, listing, x, dy)
    if device.type == "cuda" and case.length <= ATTENTION_UP_TO:
        functions["attention bf16"] = partial(_attention, x)
    row |= times(functions, device, repeats, before)
    known = {"goal": case.goal, "authors": case.authors}
    row |= {name: value for name, value in known.items() if value is not None}
    return {**row, "ceiling": _rounded(case.ceiling)}


def _convolution(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    before = allocated(device)
    u = torch.randn(case.batch, case.length, case.channels, device=device)
    rows = 2 if case.two_sided else 1
    kernels = torch.randn(rows, case.channels, case.kernel, device=device) / case.kernel**0.5
    exact = u[:1].double(), *kernels.double().unbind()
    one, full = (u[:1], *kernels.unbind()), (u, *kernels.unbind())
    errors, functions = _by_backend(_convolve, exact, one, full, device)
    del exact
    row = {"case": case.name, **errors, **times(functions, device, repeats, before)}
    return {**row, "ceiling": _rounded(5e3 * 4 * u.numel() / BANDWIDTH)}


def _by_backend(
    run: Callable[..., list[Tensor]],
    exact: tuple[Any, ...],
    one: tuple[Any, ...],
    full: tuple[Any, ...],
    device: torch.device,
) -> tuple[dict[str, float], dict[str, Callable[[], object]]]:
    """The error of each backend on `one` sequence, and the call that runs it on the `full` batch.

    Raises if an error is too large. `exact` are the arguments in float64.
    """
    truth = _with("torch", run, *exact)
    errors: dict[str, float] = {}
    functions: dict[str, Callable[[], object]] = {}
    for name in _backends("convolution", device):
        pairs = zip(_with(name, run, *one), truth, strict=True)
        found = {f"{name} {k}": relative_error(*pair) for k, pair in enumerate(pairs)}
        require_right(found, TOLERANCE)
        errors[f"{name} error"] = max(found.values())
        functions[name] = partial(_with, name, run, *full)
    return errors, functions


def times(
    functions: dict[str, Callable[[], object]], device: torch.device, repeats: int, before: int
) -> dict[str, float | None]:
    """Ms by name, and the peak memory on a GPU; None where the memory is too small."""
    found: dict[str, float | None] = {}
    for name, function in functions.items():
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                ms = median_ms(replayed(function, repeats))
                peak = torch.cuda.max_memory_allocated(device) - before
                found[f"{name} GiB"] = _rounded(peak / 2**30)
            else:
                ms = median_ms(seconds({name: function}, device, repeats)[name])
            found[name] = _rounded(ms)
        except torch.OutOfMemoryError:
            found[name] = None
        if device.type == "cuda":
            gc.collect()  # a graph's memory
            torch.cuda.empty_cache()
    return found


def allocated(device: torch.device) -> int:
    """The bytes that are allocated on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _backends(op: str, device: torch.device) -> list[str]:
    fused = op in dispatch.FUSED and device.type == "cuda" and dispatch.prefers_fused()
    return ["fused", "torch"] if fused else ["torch"]


def _with(backend: str, function: Callable[..., Any], *arguments: Any) -> Any:
    if backend == "fused":
        return function(*arguments)  # the default, which leaves to torch what it does not support
    with ops.use_backend(backend):
        return function(*arguments)


def _convolve(u: Tensor, right: Tensor, left: Tensor | None = None) -> list[Tensor]:
    given = (u, right) if left is None else (u, right, left)
    inputs = [t.detach().requires_grad_() for t in given]
    y = ops.convolution(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, u)]


def _attention(x: Tensor, heads: int = 4) -> list[Tensor]:
    """Causal attention in bf16 without projections: the alternative a user would choose."""
    split = x.detach().bfloat16().unflatten(-1, (heads, -1)).transpose(1, 2)
    query, key, value = (split.clone().requires_grad_() for _ in range(3))
    y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return [y.detach(), *torch.autograd.grad(y, (query, key, value), torch.ones_like(y))]


def result_of(device: torch.device, factor: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A result with these rows."""
    sizes = "full" if factor == 1 else f"1/{factor}"
    case = {"forward + backward": "ms", "sizes": sizes}
    return {"case": case, **machine(device), "cases": rows}


def _rounded(ms: float) -> float:
    return float(f"{ms:.4g}")


# ---------------------------------------------------------------------------------- every mixer

CHECKED = 4096  # positions, at most, that are compared with float64
COARSE = 2e-2  # the tolerance of bf16


class Peer(NamedTuple):
    """Another mixer than DLR: how to make it for a case."""

    make: Callable[[Case], nn.Module]
    attends: bool = False
    up_to: int | None = None


PEERS = {
    "dss": Peer(lambda case: DSS(case.channels, case.states)),
    "s4d": Peer(lambda case: S4D(case.channels, 64)),
    "s4": Peer(lambda case: S4(case.channels, 64)),
    "sgconv": Peer(lambda case: SGConv(case.channels, length=case.length)),
    "attention": Peer(lambda case: Attention(case.channels), True, ATTENTION_UP_TO),
    "attention-ff": Peer(lambda case: AttentionFF(case.channels), True, ATTENTION_UP_TO),
    "local-attention": Peer(lambda case: LocalAttention(case.channels), True),
}


def bench_lengths(*, device: str, repeats: int, factor: int = 1) -> dict[str, Any]:
    """The time of a layer of every mixer against the length: a row for each length.

    H 128, N 1024 (64 in S4 and S4D, as their authors have it), 2^16 positions in sequences of 2^8
    to 2^16, or one sequence up to 2^18. DLR runs with each backend; attention runs in bf16 on a
    GPU, as one would use it, and everything else in fp32. The columns of the other mixers are
    called "layer NAME".
    """
    where = torch.device(device)
    lengths = [2**k for k in range(8, 19)]
    cases = [Case(str(L), max(1, 2**16 // L), 128, 1024, L, L) for L in lengths]
    cases = [case if factor == 1 else case.smaller(factor) for case in cases]
    rows = [
        layer_row(case, where, repeats) | _peers(case, where, repeats)
        for case in announced(cases, name_of)
    ]
    return result_of(where, factor, rows)


def _peers(case: Case, device: torch.device, repeats: int) -> dict[str, float | None]:
    """The ms of each; a mixer whose answer is wrong gets its error and no time."""
    torch.manual_seed(0)
    before = allocated(device)
    shape = case.batch, case.length, case.channels
    x, dy = torch.randn(shape, device=device), torch.randn(shape, device=device)
    row: dict[str, float | None] = {}
    for kind, peer in PEERS.items():
        if peer.up_to is not None and case.length > peer.up_to:
            continue
        coarse = peer.attends and device.type == "cuda"
        layer = peer.make(case).to(device)
        run = partial(
            forward_backward, layer, precision=partial(precision_of, device, coarse=coarse)
        )
        name = f"layer {kind} bf16" if coarse else f"layer {kind}"
        error = error_of(layer, run, x[:1, :CHECKED], dy[:1, :CHECKED])
        row[f"{name} error"] = error
        if error <= (COARSE if coarse else TOLERANCE):
            row |= times({name: partial(run, x, dy)}, device, repeats, before)
    return row


def precision_of(device: torch.device, *, coarse: bool) -> AbstractContextManager[Any]:
    """Autocast to bf16, if `coarse`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=coarse)


def error_of(
    layer: nn.Module, run: Callable[[Tensor, Tensor], list[Tensor]], x: Tensor, dy: Tensor
) -> float:
    """The relative error of the output and of its gradient by x, against float64."""
    exact, answer = deepcopy(layer).double(), run(x, dy)
    given = x.double().requires_grad_()
    with ops.use_backend("torch"):
        y = exact(given)
    truth = (y.detach(), *torch.autograd.grad(y, given, dy.double()))
    return max(relative_error(*pair) for pair in zip(answer[:2], truth, strict=True))
