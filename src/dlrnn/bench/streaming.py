"""`dlrnn bench step --peers`: a step of one layer, beside attention over a full cache."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlrnn.bench.measure import announced, device_ms, machine, median_ms, seconds
from dlrnn.nn import DLR

H, N, HEADS, D_HEAD, CACHE = 384, 512, 8, 64, 4096  # a block of the paper's language model
BATCHES = 1, 64
CALLS = 100  # timed together: a loop that generates text does not wait for each


class CachedAttention(nn.Module):
    """One position of attention over a cache that is full, with its projections."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(H, 3 * HEADS * D_HEAD)
        self.out = nn.Linear(HEADS * D_HEAD, H)
        self.cache: Tensor
        self.register_buffer("cache", torch.randn(2, batch, HEADS, CACHE, D_HEAD))

    def forward(self, x: Tensor) -> Tensor:
        """[B, H] to [B, H]; key and value replace the last ones of the cache."""
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, 1, D_HEAD).unbind(1)
        self.cache[0, :, :, -1:], self.cache[1, :, :, -1:] = k, v
        y = F.scaled_dot_product_attention(q, self.cache[0], self.cache[1])
        mapped: Tensor = self.out(y.flatten(1))
        return mapped


@torch.no_grad()
def bench_peers(*, device: str, repeats: int, factor: int = 1) -> dict[str, Any]:
    """Microseconds of a step in a Python loop, and on a GPU in a CUDA graph with state in place.

    DLR without its linear map, as in the language model, and with a restricted kernel; attention
    in bf16. `factor` divides the batch of 64.
    """
    where, rows = torch.device(device), []
    for batch in announced([max(1, b // factor) for b in BATCHES], "batch {}".format):
        torch.manual_seed(0)
        x = torch.randn(batch, H, device=where)
        for window in (None, CACHE):
            layer = DLR(H, N, kernel_length=window, project=False).to(where).eval()
            name = "DLR, fp32" + (f", kernel of {window}" if window else "")
            rows.append(_row(name, batch, _loop(layer, x), _in_place(layer, x), where, repeats))
        attention = CachedAttention(batch).to(where, torch.bfloat16)
        run = partial(attention, x.bfloat16())
        name = f"attention, bf16, {CACHE} positions"
        rows.append(_row(name, batch, run, run, where, repeats))
    return {"case": {"H": H, "N": N}, **machine(where), "steps": rows}


def _loop(layer: DLR, x: Tensor) -> Callable[[], None]:
    """A step after the state of the last one."""
    state = layer.initial_state(len(x))

    def run() -> None:
        nonlocal state
        _, state = layer.step(x, state)

    return run


def _in_place(layer: DLR, x: Tensor) -> Callable[[], object]:
    return partial(layer.step, x, layer.in_place(layer.initial_state(len(x)), CALLS))


def _row(  # noqa: PLR0917
    name: str,
    batch: int,
    loop: Callable[[], object],
    captured: Callable[[], object],
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    calls = CALLS if device.type == "cuda" else 5
    eager = median_ms(seconds({name: loop}, device, repeats, calls)[name])
    row: dict[str, Any] = {"layer": name, "B": batch, "eager us": round(1e3 * eager, 1)}
    if device.type == "cuda":
        row["graph us"] = round(1e3 * device_ms({name: captured}, device, repeats)[name], 1)
    return row
