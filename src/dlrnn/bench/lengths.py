"""`dlrnn bench lengths`: a layer of every mixer against the length, forward + backward.

H 128, N 1024 (64 in S4 and S4D, as their authors have it), 2^16 positions in sequences of 2^8 to
2^16, or one sequence up to 2^18. DLR by each backend; attention in bf16 on a GPU, as one would use
it, all else in fp32.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dlrnn import ops
from dlrnn.bench.cases import (
    ATTENTION_UP_TO,
    TOLERANCE,
    Case,
    allocated,
    layer_row,
    machine,
    name_of,
    times,
)
from dlrnn.bench.measure import relative_error, told
from dlrnn.nn import DSS, S4, S4D, Attention, AttentionFF, LocalAttention, SGConv

CHECKED = 4096  # positions, at most, that are compared with float64
COARSE = 2e-2  # what bf16 may be off by


class Peer(NamedTuple):
    """A mixer beside DLR, made for a case."""

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
    """A row a length: ms by name, "layer NAME" for the mixers beside DLR."""
    where = torch.device(device)
    lengths = [2**k for k in range(8, 19)]
    cases = [Case(str(L), max(1, 2**16 // L), 128, 1024, L, L) for L in lengths]
    cases = [case if factor == 1 else case.smaller(factor) for case in cases]
    rows = [
        layer_row(case, where, repeats) | _peers(case, where, repeats)
        for case in told(cases, name_of)
    ]
    return {**machine(where, factor), "cases": rows}


def _peers(case: Case, device: torch.device, repeats: int) -> dict[str, float | None]:
    """Ms of each; one whose answer is wrong has an error, and no time."""
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
        run = partial(_run, layer, precision=partial(_precision, device, coarse=coarse))
        name = f"layer {kind} bf16" if coarse else f"layer {kind}"
        error = _error(layer, run, x[:1, :CHECKED], dy[:1, :CHECKED])
        row[f"{name} error"] = error
        if error <= (COARSE if coarse else TOLERANCE):
            row |= times({name: partial(run, x, dy)}, device, repeats, before)
    return row


def _precision(device: torch.device, *, coarse: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16, enabled=coarse)


def _run(
    layer: nn.Module, x: Tensor, dy: Tensor, *, precision: Callable[[], AbstractContextManager[Any]]
) -> list[Tensor]:
    """The output and every gradient, the input's first."""
    inputs = (x.detach().requires_grad_(), *layer.parameters())
    with precision():
        y = layer(inputs[0])
    return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))]


def _error(
    layer: nn.Module, run: Callable[[Tensor, Tensor], list[Tensor]], x: Tensor, dy: Tensor
) -> float:
    """Of the output and its gradient by x, against float64."""
    exact, answer = deepcopy(layer).double(), run(x, dy)
    given = x.double().requires_grad_()
    with ops.use_backend("torch"):
        y = exact(given)
    truth = (y.detach(), *torch.autograd.grad(y, given, dy.double()))
    return max(relative_error(*pair) for pair in zip(answer[:2], truth, strict=True))
