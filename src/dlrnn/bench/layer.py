"""`dlrnn bench layer`: the layer against the paper's listing, forward + backward.

Correctness first: no number is given unless outputs and gradients agree with float64.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlrnn.bench.listing import ListingDLR
from dlrnn.bench.measure import (
    captured,
    median_ms,
    peak_bytes,
    relative_error,
    require_right,
    seconds,
)
from dlrnn.nn import DLR

TOLERANCE = 1e-5


def bench_layer(
    *, batch: int, d_model: int, d_state: int, length: int, device: str, repeats: int
) -> dict[str, Any]:
    """Times in ms (median), extra memory in MiB: what is alive beyond inputs, outputs, parameters
    and their gradients; `error` is the largest relative error of output and gradients. On a GPU
    `captured_ms` is the time of a CUDA graph's replay: without the launches.
    """
    where = torch.device(device)
    torch.manual_seed(0)
    ours = DLR(d_model, d_state).to(where)
    listing = ListingDLR(d_model, d_state).to(where)
    listing.load_state_dict(ours.state_dict())
    x = torch.randn(batch, length, d_model, device=where)
    dy = torch.randn(batch, length, d_model, device=where)

    def run(layer: DLR) -> list[Tensor]:
        inputs = (x.detach().requires_grad_(), *layer.parameters())
        y = layer(inputs[0])
        return [y.detach(), *torch.autograd.grad(y, inputs, dy)]

    errors = {name: _errors(layer, run, x, dy) for name, layer in _named(ours, listing)}
    require_right(errors["dlrnn"], TOLERANCE)
    functions = {name: partial(run, layer) for name, layer in _named(ours, listing)}
    times = seconds(functions, where, repeats)
    replays = {name: captured(f) for name, f in functions.items()} if where.type == "cuda" else {}
    replayed = seconds(replays, where, repeats)
    kept = sum(t.numel() * t.element_size() for t in run(ours))
    rows = {
        name: {
            "ms": round(median_ms(times[name]), 3),
            **({"captured_ms": round(median_ms(replayed[name]), 3)} if replays else {}),
            "extra_mib": round((peak_bytes(function, where) - kept) / 2**20, 2),
            "error": float(f"{max(errors[name].values()):.2e}"),
        }
        for name, function in functions.items()
    }
    return {
        "case": {"B": batch, "H": d_model, "N": d_state, "L": length},
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "repeats": repeats,
        **rows,
        "faster": round(rows["listing"]["ms"] / rows["dlrnn"]["ms"], 2),
        "memory_fraction": round(
            rows["dlrnn"]["extra_mib"] / max(rows["listing"]["extra_mib"], 0.01), 4
        ),
    }


def _named(ours: DLR, listing: DLR) -> list[tuple[str, DLR]]:
    return [("dlrnn", ours), ("listing", listing)]


def _errors(layer: DLR, run: Any, x: Tensor, dy: Tensor) -> dict[str, float]:
    """Relative errors of output and gradients, against our layer in float64."""
    exact = DLR(layer.d_model, layer.d_state).to(x.device).double()
    exact.load_state_dict(layer.state_dict())
    inputs = (x.double().requires_grad_(), *exact.parameters())
    y = exact(inputs[0])
    expected = [y.detach(), *torch.autograd.grad(y, inputs, dy.double())]
    names = ["y", "x", *(name for name, _ in layer.named_parameters())]
    return {
        name: relative_error(have, want)
        for name, have, want in zip(names, run(layer), expected, strict=True)
    }
