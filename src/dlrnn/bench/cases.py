"""`dlrnn bench layer --all` and `bench conv`: every backend and peer in one run.

Forward + backward. On a GPU the times are its own, of calls in a CUDA graph. Beside each number the
ceiling: what the bytes and the products would take at the rates of one H200.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dlrnn import ops
from dlrnn.bench.listing import ListingDLR
from dlrnn.bench.measure import (
    median_ms,
    relative_error,
    replayed,
    require_right,
    seconds,
    told,
)
from dlrnn.nn import DLR
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
        """The same at a fraction of its length and states, of which nothing is known."""
        sizes = {name: max(2, getattr(self, name) // factor) for name in ("states", "length")}
        kernel = max(2, self.kernel // factor)
        batch = min(self.batch, 2)
        return self._replace(**sizes, kernel=kernel, batch=batch, goal=None, authors=None)

    @property
    def options(self) -> dict[str, Any]:
        """Of the DLR layer."""
        limit = self.kernel if self.kernel < self.length else None
        return {"bidirectional": self.two_sided, "kernel_length": limit}

    @property
    def ceiling(self) -> float:
        """Ms: five passes over the activations, three products of 2 N x L for each kernel."""
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
    """Every layer of the paper: our backends, the paper's listing, attention."""
    where = torch.device(device)
    cases = told([case if factor == 1 else case.smaller(factor) for case in CASES], name_of)
    rows = [layer_row(case, where, repeats) for case in cases]
    return {**machine(where, factor), "cases": rows}


def bench_conv(*, device: str, repeats: int, factor: int = 1) -> dict[str, Any]:
    """The long convolution alone, against torch.fft (the backend `torch`)."""
    where = torch.device(device)
    short = (Case("512", 64, 128, 0, 512, 512), Case("2048", 32, 128, 0, 2048, 2048))
    cases = [case if factor == 1 else case.smaller(factor) for case in (*short, *CASES)]
    rows = [_convolution(case, where, repeats) for case in told(cases, name_of)]
    return {**machine(where, factor), "cases": rows}


def name_of(case: Case) -> str:
    """To tell what is being measured."""
    return f"{case.name}: B {case.batch}, L {case.length}"


def layer_row(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """DLR by every backend, the paper's listing, attention; nothing if an answer is wrong."""
    torch.manual_seed(0)
    before = allocated(device)
    layer = DLR(case.channels, case.states, **case.options).to(device)
    shape = case.batch, case.length, case.channels
    x, dy = torch.randn(shape, device=device), torch.randn(shape, device=device)
    functions: dict[str, Callable[[], object]] = {}
    row: dict[str, Any] = {"case": case.name, "B": case.batch, "L": case.length}
    truth = _with("torch", _run, _in_float64(layer, case), x[:1].double(), dy[:1].double())
    for name in _backends("convolution", device):
        answer = _with(name, _run, layer, x[:1], dy[:1])
        pairs = zip(answer, truth, strict=True)
        errors = {f"{name} {k}": relative_error(*pair) for k, pair in enumerate(pairs)}
        require_right(errors, TOLERANCE)
        row[f"{name} error"] = max(errors.values())
        functions[name] = partial(_with, name, _run, layer, x, dy)
    del truth
    listing = ListingDLR(case.channels, case.states, bidirectional=case.two_sided).to(device)
    if case.kernel == case.length:  # the listing knows no restricted kernels
        functions["listing"] = partial(_run, listing, x, dy)
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
    one = [u[:1].double(), *kernels.double().unbind()]
    truth = _with("torch", _convolve, *one)
    functions: dict[str, Callable[[], object]] = {}
    row: dict[str, Any] = {"case": case.name}
    for name in _backends("convolution", device):
        answer = _with(name, _convolve, u[:1], *kernels.unbind())
        pairs = zip(answer, truth, strict=True)
        errors = {f"{name} {k}": relative_error(*pair) for k, pair in enumerate(pairs)}
        require_right(errors, TOLERANCE)
        row[f"{name} error"] = max(errors.values())
        functions[name] = partial(_with, name, _convolve, u, *kernels.unbind())
    row |= times(functions, device, repeats, before)
    return {**row, "ceiling": _rounded(5e3 * 4 * u.numel() / BANDWIDTH)}


def times(
    functions: dict[str, Callable[[], object]], device: torch.device, repeats: int, before: int
) -> dict[str, float | None]:
    """Ms by name, and the most memory at once; None where there is not enough of it."""
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
    """Bytes of a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _backends(op: str, device: torch.device) -> list[str]:
    fused = op in dispatch.FUSED and device.type == "cuda" and dispatch.prefers_fused()
    return ["fused", "torch"] if fused else ["torch"]


def _with(backend: str, function: Callable[..., Any], *arguments: Any) -> Any:
    if backend == "fused":
        return function(*arguments)  # the default, which leaves to torch what it does not support
    with ops.use_backend(backend):
        return function(*arguments)


def _run(layer: DLR, x: Tensor, dy: Tensor) -> list[Tensor]:
    inputs = (x.detach().requires_grad_(), *layer.parameters())
    y = layer(inputs[0])
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def _convolve(u: Tensor, right: Tensor, left: Tensor | None = None) -> list[Tensor]:
    given = (u, right) if left is None else (u, right, left)
    inputs = [t.detach().requires_grad_() for t in given]
    y = ops.convolution(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, u)]


def _attention(x: Tensor, heads: int = 4) -> list[Tensor]:
    """Causal, bf16, without its projections: what a user would pick instead."""
    split = x.detach().bfloat16().unflatten(-1, (heads, -1)).transpose(1, 2)
    query, key, value = (split.clone().requires_grad_() for _ in range(3))
    y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return [y.detach(), *torch.autograd.grad(y, (query, key, value), torch.ones_like(y))]


def _in_float64(layer: DLR, case: Case) -> DLR:
    exact = DLR(case.channels, case.states, **case.options).to(layer.W.device).double()
    exact.load_state_dict(layer.state_dict())
    return exact


def machine(device: torch.device, factor: int) -> dict[str, Any]:
    """What a result begins with."""
    return {
        "case": {"forward + backward": "ms", "sizes": "full" if factor == 1 else f"1/{factor}"},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _rounded(ms: float) -> float:
    return float(f"{ms:.4g}")
