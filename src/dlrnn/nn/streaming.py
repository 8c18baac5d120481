"""Reading a sequence in chunks or step by step: the same answer as reading it whole.

Two ways to remember what was read:
- `RecurrentState`: N complex numbers a channel, which `lambda` carries on. With a restricted
  kernel also the last inputs, so that what leaves the window can be taken out of the state again.
- `OnlineState` (from ops): the inputs themselves, for kernels that have no small state.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlrnn import ops

FLUSH = 64  # so many steps are gathered before the window is moved on: its copy costs 1/64 a step


class Modes(NamedTuple):
    """A DLR: `K_k = Re(sum_n W_n lambda_n^k)`, pairs."""

    W: Float[Tensor, "H N 2"]
    log_lambda: Float[Tensor, "N 2"]


class RecurrentState(NamedTuple):
    """The state of a layer that streams; tensors only, so that it can be exported and saved.

    With a kernel of `window` entries, `past` [B, window, H] followed by `recent` [B, r, H] are the
    inputs read so far; only the last `window` of them are in `x`. Without: both have length 0.
    """

    x: Float[Tensor, "B H N 2"]
    past: Float[Tensor, "B window H"]
    recent: Float[Tensor, "B r H"]


def initial_state(modes: Modes, batch: int, window: int | None) -> RecurrentState:
    """All zeros: nothing was read."""
    channels, states, _ = modes.W.shape
    return RecurrentState(
        modes.W.new_zeros(batch, channels, states, 2),
        modes.W.new_zeros(batch, window or 0, channels),
        modes.W.new_zeros(batch, 0, channels),
    )


def read_chunk(
    u: Float[Tensor, "B L H"],
    modes: Modes,
    kernel: Float[Tensor, "H K"],
    state: RecurrentState | None,
    *,
    lengths: Int[Tensor, " B"] | None,
    window: int | None,
) -> tuple[Float[Tensor, "B L H"], RecurrentState]:
    """Convolve a chunk that follows `state`, None at the start of a sequence.

    Without a window K is L, with one K is the window.
    """
    nothing = u[:, :0]
    if window is None:
        y, x = ops.convolution(u, kernel), None
        if state is not None:
            x = state.x
            y = y + ops.response(*modes, x, u.shape[1])
        ends = u if lengths is None else ops.align_right(u, lengths)
        x = ops.advance(ends, modes.log_lambda, x, lengths)
        return y, RecurrentState(x, nothing, nothing)
    state = initial_state(modes, u.shape[0], window) if state is None else state
    whole = torch.cat((state.past, state.recent, u), dim=1)
    y = ops.convolution(whole, kernel)[:, -u.shape[1] :]
    if lengths is not None:
        whole = ops.align_right(whole, lengths + whole.shape[1] - u.shape[1])
    past = whole[:, -window:]
    return y, RecurrentState(ops.advance(past, modes.log_lambda), past, nothing)


def read_step(
    u: Float[Tensor, "B H"], modes: Modes, state: RecurrentState
) -> tuple[Float[Tensor, "B H"], RecurrentState]:
    """One step of the recurrence."""
    x, past, recent = state
    window = past.shape[1]
    if window == 0:
        y, x = ops.step(u, *modes, x)
        return y, RecurrentState(x, past, recent)  # torch 2.11 cannot compile _replace
    y, x = ops.step(u, *modes, x, leaving=past[:, recent.shape[1]], window=window)
    recent = torch.cat((recent, u[:, None]), dim=1)
    if recent.shape[1] == min(FLUSH, window):
        past, recent = torch.cat((past[:, recent.shape[1] :], recent), dim=1), recent[:, :0]
    return y, RecurrentState(x, past, recent)
