"""The recurrence of a diagonal-plus-low-rank system: one step, or a chunk at once.

`x_k = Abar x_{k-1} + Bbar u_k`, `y_k = C x_k`, where C is the first output of the system.
A state is [B, H, M, 2], real pairs; inside it is a row of N = 2 M numbers. All is float64.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlrnn.ops.dplr import DPLR, readout, solve, transition
from dlrnn.ops.pairs import in_float64

BLOCK = 64
"""Positions that a chunk reads with one matrix product."""


def dplr_step(
    u: Float[Tensor, "B H"], system: DPLR, state: Float[Tensor, "B H M 2"]
) -> tuple[Float[Tensor, "B H"], Float[Tensor, "B H M 2"]]:
    """One step of the recurrence, `x' = Abar x + Bbar u`, `y = C x'`, in O(N)."""
    x, input_ = in_float64(state), in_float64(u)[..., None, None] * system.B
    x = solve(system, 2 * x + system.dt[:, None, None] * input_) - x
    y: Tensor = (readout(system)[0] * x.flatten(-2)).sum(-1)
    return y.to(u), x.to(state)


def dplr_advance(
    u: Float[Tensor, "B L H"],
    system: DPLR,
    state: Float[Tensor, "B H M 2"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B H M 2"]:
    """The state after a chunk: `Abar^L x + sum_j Abar^(L-1-j) Bbar u_j`.

    With `lengths`, u is aligned to the right (see `align_right`), and L is each sequence's own.
    Blocks are read at once; then neighbours are joined until one is left.
    """
    batch, length, _ = u.shape
    step, blocks = transition(system), _blocks(length)
    first = solve(system, system.dt[:, None, None] * system.B).flatten(-2)  # Bbar [H, N]
    reads, joined = _orbit(first[:, None], step, BLOCK)
    padded = torch.nn.functional.pad(in_float64(u), (0, 0, blocks * BLOCK - length, 0))
    inputs = padded.permute(2, 1, 0).unflatten(1, (blocks, BLOCK))  # [H, blocks, BLOCK, B]
    moments = inputs.transpose(-1, -2) @ reads.flip(1)[:, None]  # [H, blocks, B, N]
    while moments.shape[1] > 1:
        moments = moments[:, 0::2] @ joined[:, None] + moments[:, 1::2]
        joined = joined @ joined
    x: Tensor = moments[:, 0]  # [H, B, N]
    if state is not None:
        counts = torch.full((batch,), length) if lengths is None else lengths
        x = x + _carried(_rows(state), step, counts.to(step.device), length)
    state = x.transpose(0, 1).unflatten(-1, (-1, 2)).to(u)
    return state


def dplr_response(
    system: DPLR, state: Float[Tensor, "B H M 2"], length: int
) -> Float[Tensor, "B {length} H"]:
    """The contribution of a state to the next outputs: `C Abar^(k+1) x` for k = 0 .. length-1."""
    step, blocks = transition(system), _blocks(length)
    outputs, _ = _orbit(readout(system)[0][:, None], step.mT, BLOCK)  # [H, BLOCK, N]
    _, far = _orbit(outputs[:, :1], step, BLOCK)
    starts, _ = _orbit(_rows(state) @ step, far, blocks)  # [H, blocks B, N]
    y: Tensor = (starts @ outputs.mT).unflatten(1, (blocks, -1))  # [H, blocks, B, BLOCK]
    return y.permute(2, 1, 3, 0).flatten(1, 2)[:, :length].to(state)


def _rows(state: Tensor) -> Tensor:
    """[B, H, M, 2] -> [H, B, N]."""
    return in_float64(state).flatten(-2).transpose(0, 1)


def _orbit(rows: Tensor, step: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows, `rows @ step`, ... below each other, `count` times (a power of 2), and `step^count`."""
    while count > 1:
        rows = torch.cat((rows, rows @ step), dim=1)
        step = step @ step
        count //= 2
    return rows, step


def _carried(rows: Tensor, step: Tensor, counts: Tensor, longest: int) -> Tensor:
    """`rows[:, b] @ step^counts[b]`, by the binary digits of the counts."""
    digit = 1
    while digit <= longest:
        rows = torch.where((counts & digit > 0)[:, None], rows @ step, rows)
        step = step @ step
        digit *= 2
    return rows


def _blocks(length: int) -> int:
    """Blocks that hold `length` positions: a power of 2."""
    blocks = 1
    while blocks * BLOCK < length:
        blocks *= 2
    return blocks
