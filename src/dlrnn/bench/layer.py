"""One DLR layer: `dlrnn bench layer`, `dlrnn bench kernel` and `dlrnn bench step`.

No time is given unless the answer agrees with float64.
"""

import statistics
from copy import deepcopy
from functools import partial
from operator import truediv
from typing import Any

import torch
from torch import Tensor

from dlrnn import ops
from dlrnn.bench.listing import ListingDLR
from dlrnn.bench.measure import (
    LayerCall,
    device_ms,
    machine,
    median_ms,
    peak_bytes,
    relative_error,
    require_right,
    seconds,
    timed,
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
    x, dy = torch.randn(2, batch, length, d_model, device=where)
    short = slice(1), slice(SHORT)
    exact, exact_listing = deepcopy(ours).double(), deepcopy(listing).double()
    calls = {"dlrnn": LayerCall(ours), "listing": LayerCall(listing)}
    require_right(calls["dlrnn"].errors(x[short], dy[short], exact_listing), TOLERANCE)
    errors = {name: call.errors(x, dy, exact) for name, call in calls.items()}
    require_right(errors["dlrnn"], TOLERANCE)
    functions = {name: partial(call, x, dy) for name, call in calls.items()}
    times = seconds(functions, where, repeats)
    captured = device_ms(functions, where, repeats) if where.type == "cuda" else {}
    kept = sum(t.numel() * t.element_size() for t in functions["dlrnn"]())
    rows = {
        name: {
            "ms": round(median_ms(times[name]), 3),
            **({"captured_ms": round(captured[name], 3)} if captured else {}),
            "extra_mib": round((peak_bytes(function, where) - kept) / 2**20, 2),
            "error": float(f"{max(errors[name].values()):.2e}"),
        }
        for name, function in functions.items()
    }
    ours_mib, listing_mib = (rows[name]["extra_mib"] for name in rows)
    return {
        "case": {"B": batch, "H": d_model, "N": d_state, "L": length},
        **machine(where),
        "repeats": repeats,
        **rows,
        "ratio": round(statistics.median(map(truediv, times["dlrnn"], times["listing"])), 3),
        "faster": round(rows["listing"]["ms"] / rows["dlrnn"]["ms"], 2),
        "memory_fraction": round(ours_mib / max(listing_mib, 0.01), 4),
    }


def bench_tiny(*, repeats: int) -> dict[str, Any]:
    """`bench_layer` for the sizes of TINY on one thread of the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = bench_layer(**TINY, device="cpu", repeats=repeats)
    finally:
        torch.set_num_threads(threads)
    require_right({"listing": result["listing"]["error"]}, LISTING_TOLERANCE)
    return result


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
    errors = dict(zip(names, map(relative_error, run(), truth), strict=True))
    require_right(errors, TOLERANCE)
    tail = torch.arange(max(0, length - 64), length, device=where)
    return {
        "case": {"H": d_model, "N": d_state, "L": length},
        **machine(where),
        "ms": round(median_ms(seconds({"run": run}, where, repeats)["run"]), 3),
        "errors": {name: float(f"{error:.2e}") for name, error in errors.items()},
        "naive": relative_error(_naive(re, im, W, tail), truth[0][:, tail]),
    }


def exact_kernel_and_gradients(re: Tensor, im: Tensor, W: Tensor, dK: Tensor) -> tuple[Tensor, ...]:
    """K [H, L] and the gradients of re, im and W for the incoming gradient dK, all in float64."""
    re, im, W = exact = [t.detach().double().requires_grad_() for t in (re, im, W)]
    length, log_lambda = dK.shape[1], torch.complex(-(re**2), im)
    starts = torch.arange(0, length, BLOCK, device=dK.device)
    inner = torch.exp(log_lambda[:, None] * torch.arange(min(BLOCK, length), device=dK.device))
    outer = torch.exp(log_lambda * starts[:, None])  # [blocks, N]
    blocks = (torch.view_as_complex(W)[:, None] * outer @ inner).real  # [H, blocks, BLOCK]
    kernel = blocks.flatten(1)[:, :length]
    return kernel.detach(), *torch.autograd.grad(kernel, exact, dK.double())


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
    last_tenth = steps - tenth
    times: dict[str, list[float]] = {"first": [], "last": []}
    outputs = []
    with torch.no_grad():
        states = {"first": layer.initial_state(batch), "last": layer.initial_state(batch)}
        for x_t in x[:last_tenth]:
            _, states["last"] = layer.step(x_t, states["last"])
        for i in range(tenth):
            for name, x_t in (("first", x[i]), ("last", x[last_tenth + i])):
                spent, (y, states[name]) = timed(partial(layer.step, x_t, states[name]), where)
                times[name].append(spent)
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
