"""`dlrnn bench layer`: the layer against the paper's listing, forward + backward.

Correctness first: no number is given unless outputs and gradients agree with float64.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlrnn.bench.listing import ListingDLR
from dlrnn.bench.measure import (
    median_ms,
    peak_bytes,
    relative_error,
    replayed,
    require_right,
    seconds,
)
from dlrnn.nn import DLR

TOLERANCE = 1e-5
SHORT = 1024  # so many positions are checked against the listing in float64, all against ours


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

    short = slice(0, min(length, SHORT))
    require_right(_errors(ours, ListingDLR, x[:1, short], dy[:1, short]), TOLERANCE)
    errors = {name: _errors(layer, DLR, x, dy) for name, layer in _named(ours, listing)}
    require_right(errors["dlrnn"], TOLERANCE)
    functions = {name: partial(_run, layer, x, dy) for name, layer in _named(ours, listing)}
    times = seconds(functions, where, repeats)
    kept = sum(t.numel() * t.element_size() for t in _run(ours, x, dy))
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


def _replayed_ms(
    function: Callable[[], object], device: torch.device, repeats: int
) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    return {"captured_ms": round(median_ms(replayed(function, repeats)), 3)}


def _named(ours: DLR, listing: DLR) -> list[tuple[str, DLR]]:
    return [("dlrnn", ours), ("listing", listing)]


def _run(layer: DLR, x: Tensor, dy: Tensor) -> list[Tensor]:
    inputs = (x.detach().requires_grad_(), *layer.parameters())
    y = layer(inputs[0])
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def _errors(layer: DLR, kind: type[DLR], x: Tensor, dy: Tensor) -> dict[str, float]:
    """Relative errors of output and gradients, against a layer of this kind in float64."""
    exact = kind(layer.d_model, layer.d_state).to(x.device).double()
    exact.load_state_dict(layer.state_dict())
    names = ["y", "x", *(name for name, _ in layer.named_parameters())]
    pairs = zip(names, _run(layer, x, dy), _run(exact, x.double(), dy.double()), strict=True)
    return {name: relative_error(have, want) for name, have, want in pairs}
