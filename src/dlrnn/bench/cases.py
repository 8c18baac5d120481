"""Layers at many sizes: `dlrnn bench layer --all` and `--eager`, `bench conv`, `bench lengths`.

Forward + backward. On a GPU a time is that of the replay of a CUDA graph, unless it is called
eager. `ceiling` is the time that the bytes and the products would take at the rates of one H200.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlrnn import ops
from dlrnn.bench.listing import ListingDLR
from dlrnn.bench.measure import (
    LayerCall,
    announced,
    device_ms,
    machine,
    median_ms,
    require_right,
    seconds,
)
from dlrnn.nn import DLR, DSS, S4, S4D, Attention, AttentionFF, LocalAttention, SGConv
from dlrnn.ops import dispatch

TOLERANCE = 1e-5
COARSE = 2e-2  # the tolerance of bf16, and of the listing, which rounds phases
BANDWIDTH, PRODUCTS = 4.3e12, 790e12 / 3  # bytes a second; FLOP a second in three 16-bit products
ATTENTION_UP_TO = 2**15  # positions: above, it would take seconds
CHECKED = 4096  # positions, at most, of mixers other than DLR that are compared with float64


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
        if factor == 1:
            return self
        names = ("states", "length", "kernel")
        sizes = {name: max(2, getattr(self, name) // factor) for name in names}
        return self._replace(**sizes, batch=min(self.batch, 2), goal=None, authors=None)

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

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random x and dy [B, L, H]."""
        shape = self.batch, self.length, self.channels
        return torch.randn(shape, device=device), torch.randn(shape, device=device)


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
    rows = [_layer_row(case, where, repeats) for case in _sized(CASES, factor)]
    return _result(where, factor, rows)


def bench_conv(*, device: str, repeats: int, factor: int = 1) -> dict[str, Any]:
    """The long convolution alone, against torch.fft (the backend `torch`)."""
    where = torch.device(device)
    short = (Case("512", 64, 128, 0, 512, 512), Case("2048", 32, 128, 0, 2048, 2048))
    rows = []
    for case in _sized((*short, *CASES), factor):
        before = _allocated(where)
        row = _by_backend(Convolution(case).to(where), case, where, repeats, before)
        rows.append(row | {"ceiling": _rounded(case._replace(states=0).ceiling)})
    return _result(where, factor, rows)


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
    rows = [
        _layer_row(case, where, repeats) | _peers(case, where, repeats)
        for case in _sized(cases, factor)
    ]
    return _result(where, factor, rows)


def _sized(cases: Sequence[Case], factor: int) -> Iterator[Case]:
    """The cases at 1 / `factor` of their sizes, named on stderr."""
    smaller = [case.smaller(factor) for case in cases]
    return announced(smaller, "{0.name}: B {0.batch}, L {0.length}".format)


def _result(device: torch.device, factor: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    sizes = "full" if factor == 1 else f"1/{factor}"
    case = {"forward + backward": "ms", "sizes": sizes}
    return {"case": case, **machine(device), "cases": rows}


def _layer_row(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """The times of DLR by every backend, of the paper's listing, and of attention."""
    before = _allocated(device)
    layer = DLR(case.channels, case.states, **case.options).to(device)
    row = _by_backend(layer, case, device, repeats, before)
    x, dy = case.inputs(device)
    if case.kernel == case.length:  # the listing cannot restrict kernels
        listing = ListingDLR(case.channels, case.states, bidirectional=case.two_sided).to(device)
        row |= _times("listing", partial(LayerCall(listing), x, dy), device, repeats, before)
    if device.type == "cuda" and case.length <= ATTENTION_UP_TO:
        row |= _times("attention bf16", partial(_attention, x), device, repeats, before)
    known = {"goal": case.goal, "authors": case.authors, "ceiling": _rounded(case.ceiling)}
    return row | {name: value for name, value in known.items() if value is not None}


def _by_backend(
    layer: nn.Module, case: Case, device: torch.device, repeats: int, before: int
) -> dict[str, Any]:
    """The error of each backend on one sequence, and its time; raises if an answer is wrong."""
    x, dy = case.inputs(device)
    row: dict[str, Any] = {"case": case.name, "B": case.batch, "L": case.length}
    fused = device.type == "cuda" and dispatch.prefers_fused()
    # the default leaves to torch what the kernels do not take
    calls = {"fused": LayerCall(layer), "torch": LayerCall(layer, "torch")}
    for name in ("fused", "torch") if fused else ("torch",):
        errors = calls[name].errors(x[:1], dy[:1])
        require_right({f"{name}, {of}": error for of, error in errors.items()}, TOLERANCE)
        row[f"{name} error"] = max(errors.values())
        row |= _times(name, partial(calls[name], x, dy), device, repeats, before)
    return row


def _times(
    name: str, function: Callable[[], object], device: torch.device, repeats: int, before: int
) -> dict[str, float | None]:
    """Ms by name, and the peak memory on a GPU; None where the memory is too small."""
    if device.type != "cuda":
        return {name: _rounded(device_ms({name: function}, device, repeats)[name])}
    torch.cuda.reset_peak_memory_stats(device)
    try:
        ms = device_ms({name: function}, device, repeats)[name]
        peak = torch.cuda.max_memory_allocated(device) - before
        return {f"{name} GiB": _rounded(peak / 2**30), name: _rounded(ms)}
    except torch.OutOfMemoryError:
        return {name: None}
    finally:
        gc.collect()  # a graph's memory
        torch.cuda.empty_cache()


def _allocated(device: torch.device) -> int:
    """The bytes that are allocated on a GPU, before a case; the random numbers start again."""
    torch.manual_seed(0)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _rounded(ms: float) -> float:
    return float(f"{ms:.4g}")


class Convolution(nn.Module):
    """The long convolution with random kernels of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        shape = (2 if case.two_sided else 1, case.channels, case.kernel)
        kernels = torch.randn(shape) / case.kernel**0.5
        self.kernels = nn.ParameterList(kernels.unbind())

    def forward(self, u: Tensor) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        return ops.convolution(u, *self.kernels)


def _attention(x: Tensor, heads: int = 4) -> list[Tensor]:
    """Causal attention in bf16 without projections: the alternative a user would choose."""
    split = x.detach().bfloat16().unflatten(-1, (heads, -1)).transpose(1, 2)
    query, key, value = (split.clone().requires_grad_() for _ in range(3))
    y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return [y.detach(), *torch.autograd.grad(y, (query, key, value), torch.ones_like(y))]


# ---------------------------------------------------------------------------------- every mixer


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


def _peers(case: Case, device: torch.device, repeats: int) -> dict[str, float | None]:
    """The ms of each; a mixer whose answer is wrong gets its error and no time."""
    before = _allocated(device)
    x, dy = case.inputs(device)
    row: dict[str, float | None] = {}
    for kind, peer in PEERS.items():
        if peer.up_to is not None and case.length > peer.up_to:
            continue
        coarse = peer.attends and device.type == "cuda"
        call = LayerCall(peer.make(case).to(device), bf16=coarse)
        name = f"layer {kind} bf16" if coarse else f"layer {kind}"
        row[f"{name} error"] = error = error_of(call, x, dy)
        if error <= (COARSE if coarse else TOLERANCE):
            row |= _times(name, partial(call, x, dy), device, repeats, before)
    return row


def error_of(call: LayerCall, x: Tensor, dy: Tensor) -> float:
    """The relative error of the output and of its gradient by x on one sequence.

    Not those of the parameters: attention does not depend on the bias of its keys.
    """
    errors = call.errors(x[:1, :CHECKED], dy[:1, :CHECKED])
    return max(errors["y"], errors["x"])


# ---------------------------------------------------------------------------------- eager calls

EAGER = (
    *(CASES[0], CASES[1]),
    Case("short", 64, 128, 4096, 512, 512),
    Case("wide", 8, 256, 64, 2048, 2048),
    *(CASES[5], CASES[2]),
)
CALLS = 10  # timed together: a user's loop does not wait for each
OTHERS_UP_TO = 2**13  # positions: above, only DLR is called


class Residual(nn.Module):
    """A block: LayerNorm, DLR with GLU, residual."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(case.channels)
        self.mixer = DLR(case.channels, case.states, glu=True)

    def forward(self, x: Tensor) -> Tensor:
        """`x + mixer(norm(x))`."""
        y: Tensor = x + self.mixer(self.norm(x))
        return y


def bench_eager(*, device: str, repeats: int, factor: int = 1) -> dict[str, Any]:
    """The ms of a call in a Python loop (`eager`), and on a GPU of one in a CUDA graph (`graph`).

    A row for each case and model. The paper's listing and attention (4 heads, with projections)
    run up to 8192 positions.
    """
    where = torch.device(device)
    rows = []
    for case in _sized(EAGER, factor):
        layer = DLR(case.channels, case.states, **case.options)
        calls = {
            "DLR, fp32": LayerCall(layer),
            "DLR, bf16": LayerCall(layer, bf16=True),
            "DLR, backend torch": LayerCall(layer, "torch"),
        }
        if case.length <= OTHERS_UP_TO // factor:
            calls["the paper's listing"] = LayerCall(ListingDLR(case.channels, case.states))
            calls["attention, bf16"] = LayerCall(Attention(case.channels, heads=4), bf16=True)
        rows += _eager_rows(case, calls, where, repeats)
    for case in _sized([CASES[0]._replace(name="4 blocks")], factor):
        stack = nn.Sequential(*(Residual(case) for _ in range(4)))
        calls = {"DLR, fp32": LayerCall(stack), "DLR, bf16": LayerCall(stack, bf16=True)}
        for mode in ("default", "reduce-overhead"):
            compiled: Any = torch.compile(stack, mode=mode, dynamic=False)
            calls[f"torch.compile, {mode}"] = LayerCall(compiled)
        rows += _eager_rows(case, calls, where, repeats)
    return _result(where, factor, rows)


def _eager_rows(
    case: Case, calls: dict[str, LayerCall], device: torch.device, repeats: int
) -> list[dict[str, Any]]:
    """The error and the times of each model; one whose answer is wrong gets no time."""
    x, dy = case.inputs(device)
    rows = []
    for name, call in calls.items():
        call.layer.to(device)
        rounds = call.bf16 or isinstance(call.layer, ListingDLR)
        error, run = error_of(call, x, dy), partial(call, x, dy)
        sizes = {"B": case.batch, "H": case.channels, "N": case.states, "L": case.length}
        row = {"case": case.name, **sizes, "model": name, "error": error}
        if error <= (COARSE if rounds else TOLERANCE):
            row["eager"] = _rounded(median_ms(seconds({name: run}, device, repeats, CALLS)[name]))
            if device.type == "cuda" and call.layer is call.plain:
                row["graph"] = _times("graph", run, device, repeats, 0)["graph"]
        rows.append(row)
    return rows
