"""One DLR layer: `dlrnn bench layer`, `dlrnn bench kernel` and `dlrnn bench step`.

No time is given unless the answer agrees with float64.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import truediv
from typing import Any

import torch
from torch import Tensor

from dlrnn import ops
from dlrnn.bench.listing import ListingDLR
from dlrnn.bench.measure import (
    forward_backward,
    machine,
    median_ms,
    peak_bytes,
    relative_error,
    replayed,
    require_right,
    seconds,
    synchronize,
)
from dlrnn.nn import DLR

TOLERANCE = 1e-5
STEP_TOLERANCE = 1e-4
LISTING_TOLERANCE = 1e-4  # of a tiny layer: the listing rounds phases
SHORT = 1024  # so many positions are checked against the listing in float64, all against ours
BLOCK = 2**12  # positions of one block of the float64 kernel

TINY = {"batch": 2, "d_model": 16, "d_state": 16, "length": 64}
"""A layer so small that its time is that of Python and of the launches of PyTorch's functions."""

# ---------------------------------------------------------------------------------- the layer


def bench_layer(
    *, batch: int, d_model: int, d_state: int, length: int, device: str, repeats: int
) -> dict[str, Any]:
    """Forward + backward of our layer and of the paper's listing, with the same parameters.

    `ms` are median times. `extra_mib` is the memory beyond inputs, outputs, parameters and their
    gradients. `error` is the largest relative error of output and gradients. On a GPU
    `captured_ms` is the time of a CUDA graph's replay, which has no launches. `ratio` is our time
    over the listing's: the median over the rounds, in each of which both are timed.
    """
    where = torch.device(device)
    torch.manual_seed(0)
    ours = DLR(d_model, d_state).to(where)
    listing = ListingDLR(d_model, d_state).to(where)
    listing.load_state_dict(ours.state_dict())
    x = torch.randn(batch, length, d_model, device=where)
    dy = torch.randn(batch, length, d_model, device=where)

    short = slice(0, min(length, SHORT))
    require_right(_errors(ours, ListingDLR, x[:1, short], dy[:1, short]), TOLERANCE)
    layers: dict[str, DLR] = {"dlrnn": ours, "listing": listing}
    errors = {name: _errors(layer, DLR, x, dy) for name, layer in layers.items()}
    require_right(errors["dlrnn"], TOLERANCE)
    functions = {name: partial(forward_backward, layer, x, dy) for name, layer in layers.items()}
    times = seconds(functions, where, repeats)
    kept = sum(t.numel() * t.element_size() for t in forward_backward(ours, x, dy))
    rows = {
        name: {
            "ms": round(median_ms(times[name]), 3),
            **_replayed_ms(function, where, repeats),
            "extra_mib": round((peak_bytes(function, where) - kept) / 2**20, 2),
            "error": float(f"{max(errors[name].values()):.2e}"),
        }
        for name, function in functions.items()
    }
    return {
        "case": {"B": batch, "H": d_model, "N": d_state, "L": length},
        **machine(where),
        "repeats": repeats,
        **rows,
        "ratio": round(statistics.median(map(truediv, times["dlrnn"], times["listing"])), 3),
        "faster": round(rows["listing"]["ms"] / rows["dlrnn"]["ms"], 2),
        "memory_fraction": round(
            rows["dlrnn"]["extra_mib"] / max(rows["listing"]["extra_mib"], 0.01), 4
        ),
    }


def bench_tiny(*, repeats: int) -> dict[str, Any]:
    """`bench_layer` for the sizes of TINY on one thread of the CPU."""
    with _one_thread():
        result = bench_layer(**TINY, device="cpu", repeats=repeats)
    require_right({"listing": result["listing"]["error"]}, LISTING_TOLERANCE)
    return result


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _replayed_ms(
    function: Callable[[], object], device: torch.device, repeats: int
) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    return {"captured_ms": round(median_ms(replayed(function, repeats)), 3)}


def _errors(layer: DLR, kind: type[DLR], x: Tensor, dy: Tensor) -> dict[str, float]:
    """Relative errors of output and gradients, against a layer of this kind in float64."""
    exact = kind(layer.d_model, layer.d_state).to(x.device).double()
    exact.load_state_dict(layer.state_dict())
    names = ["y", "x", *(name for name, _ in layer.named_parameters())]
    pairs = zip(
        names,
        forward_backward(layer, x, dy),
        forward_backward(exact, x.double(), dy.double()),
        strict=True,
    )
    return {name: relative_error(have, want) for name, have, want in pairs}


# ---------------------------------------------------------------------------------- the kernel


def bench_kernel(
    *, d_model: int, d_state: int, length: int, device: str, repeats: int
) -> dict[str, Any]:
    """Relative errors of the kernel and its gradients in fp32, and median ms of both together.

    |lambda| is above 1 - 1e-6. The truth is float64: sums over blocks of positions, with every
    phase from one exponential. `naive` is the error of `exp(k log lambda)` in fp32 over the last
    positions.
    """
    where = torch.device(device)
    generator = torch.Generator().manual_seed(1)
    re = (torch.rand(d_state, generator=generator) * 1e-6).sqrt()
    im = 2 * torch.pi * torch.rand(d_state, generator=generator)
    W = torch.randn(d_model, d_state, 2, generator=generator) / d_state
    dK = torch.randn(d_model, length, generator=generator).to(where)
    re, im, W = (p.to(where).requires_grad_() for p in (re, im, W))

    def run() -> tuple[Tensor, ...]:
        log_lambda = torch.stack((-(re.double() ** 2), im.double()), dim=-1)
        kernel = ops.vandermonde(W, log_lambda, length)
        return kernel.detach(), *torch.autograd.grad(kernel, (re, im, W), dK)

    truth = exact_kernel_and_gradients(re, im, W, dK)
    names = ("kernel", "log_lambda_re", "log_lambda_im", "W")
    errors = {
        name: relative_error(have, want)
        for name, have, want in zip(names, run(), truth, strict=True)
    }
    require_right(errors, TOLERANCE)
    tail = torch.arange(max(0, length - 64), length, device=where)
    return {
        "case": {"H": d_model, "N": d_state, "L": length},
        **machine(where),
        "ms": round(median_ms(seconds({"run": run}, where, repeats)["run"]), 3),
        "errors": {name: float(f"{error:.2e}") for name, error in errors.items()},
        "naive": relative_error(_naive(re, im, W, tail), truth[0][:, tail]),
    }


@torch.no_grad()
def exact_kernel_and_gradients(
    re: Tensor, im: Tensor, W: Tensor, dK: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K [H, L] and the gradients of re, im and W for the incoming gradient dK, all in float64."""
    re, im, W, dK = (t.double() for t in (re, im, W, dK))
    log_lambda, w = torch.complex(-(re**2), im), torch.view_as_complex(W)
    length, device = dK.shape[1], dK.device
    inner = torch.exp(log_lambda[:, None] * torch.arange(min(BLOCK, length), device=device))
    kernel, moments, slopes = torch.empty_like(dK), torch.zeros_like(w), torch.zeros_like(w)
    for start in range(0, length, BLOCK):
        outer = torch.exp(log_lambda * start)
        piece = dK[:, start : start + BLOCK]
        P = inner[:, : piece.shape[1]]
        kernel[:, start : start + BLOCK] = ((w * outer) @ P).real
        position = torch.arange(start, start + piece.shape[1], device=device)
        moments += piece.to(P.dtype) @ P.mT * outer
        slopes += (piece * position).to(P.dtype) @ P.mT * outer
    slope = (w * slopes).sum(0)
    dW = torch.stack((moments.real, -moments.imag), dim=-1)
    return kernel, -2 * re * slope.real, -slope.imag, dW


@torch.no_grad()
def _naive(re: Tensor, im: Tensor, W: Tensor, position: Tensor) -> Tensor:
    P = torch.exp(torch.complex(-(re**2), im)[:, None] * position)
    return (torch.view_as_complex(W) @ P).real


# ---------------------------------------------------------------------------------- a step


def bench_step(
    *, batch: int, d_model: int, d_state: int, steps: int, device: str
) -> dict[str, Any]:
    """Median microseconds of the first and the last tenth of the steps, and their ratio.

    The steps of the two tenths are timed in turn, so that a noisy moment hits both.
    """
    where = torch.device(device)
    torch.manual_seed(0)
    layer = DLR(d_model, d_state).to(where).eval()
    x = torch.randn(steps, batch, d_model, device=where)
    tenth = max(1, steps // 10)
    times: dict[str, list[float]] = {"first": [], "last": []}
    outputs = []
    with torch.no_grad():
        states = {"first": layer.initial_state(batch), "last": layer.initial_state(batch)}
        for x_t in x[: steps - tenth]:
            _, states["last"] = layer.step(x_t, states["last"])
        for i in range(tenth):
            for name, position in (("first", i), ("last", steps - tenth + i)):
                synchronize(where)
                start = time.perf_counter()
                y, states[name] = layer.step(x[position], states[name])
                synchronize(where)
                times[name].append(time.perf_counter() - start)
                outputs.append(y)
        whole = layer(x[:tenth].transpose(0, 1)).double()
        error = relative_error(torch.stack(outputs[::2], dim=1), whole)
    require_right({"steps against the whole": error}, STEP_TOLERANCE)
    first, last = (1e6 * statistics.median(times[name]) for name in ("first", "last"))
    return {
        "case": {"B": batch, "H": d_model, "N": d_state, "steps": steps},
        **machine(where),
        "first_us": round(first, 1),
        "last_us": round(last, 1),
        "last_over_first": round(last / first, 3),
    }
