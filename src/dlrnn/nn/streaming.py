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


class Modes(NamedTuple):
    """A DLR: `K_k = Re(sum_n W_n lambda_n^k)`, pairs."""

    W: Float[Tensor, "H N 2"]
    log_lambda: Float[Tensor, "N 2"]


class RecurrentState(NamedTuple):
    """The state of a layer that streams; tensors of fixed shapes, so that it can be exported.

    With a kernel of `window` entries, `past` [B, window, H] is a ring of the last inputs, and
    `oldest` [1] the place of the oldest; x is then float64, so that an input leaves without a trace
    when it leaves the window. Without: `past` has length 0, and x is of the layer's dtype.
    """

    x: Float[Tensor, "B H N 2"]
    past: Float[Tensor, "B window H"]
    oldest: Int[Tensor, "1"]


def initial_state(modes: Modes, batch: int, window: int | None) -> RecurrentState:
    """All zeros: nothing was read."""
    W = modes.W
    channels, states, _ = W.shape
    return RecurrentState(
        W.new_zeros(batch, channels, states, 2, dtype=torch.float64 if window else W.dtype),
        W.new_zeros(batch, window or 0, channels),
        W.new_zeros(1, dtype=torch.int64),
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
    if window is None:
        y, x = ops.convolution(u, kernel), None
        if state is not None:
            x = state.x
            y = y + ops.response(*modes, x, u.shape[1])
        ends = u if lengths is None else ops.align_right(u, lengths)
        x = ops.advance(ends, modes.log_lambda, x, lengths)
        nothing = initial_state(modes, u.shape[0], window)
        return y, RecurrentState(x, nothing.past, nothing.oldest)
    state = initial_state(modes, u.shape[0], window) if state is None else state
    order = (state.oldest + torch.arange(window, device=u.device)) % window
    whole = torch.cat((state.past[:, order], u), dim=1)
    y = ops.convolution(whole, kernel)[:, window:]
    if lengths is not None:
        whole = ops.align_right(whole, lengths + window)
    past = whole[:, -window:].clone()  # a view would keep the whole chunk
    x = ops.advance(past.double(), modes.log_lambda)
    return y, RecurrentState(x, past, torch.zeros_like(state.oldest))


def read_chunk_online(
    u: Float[Tensor, "B L H"],
    kernel_of: ops.KernelOf,
    state: ops.OnlineState | None,
    *,
    lengths: Int[Tensor, " B"] | None,
    window: int | None,
) -> tuple[Float[Tensor, "B L H"], ops.OnlineState]:
    """The same for kernels that have no small state."""
    history = state.history() if state and state.blocks else u[:, :0]
    if state and lengths is None and 16 * u.shape[1] < history.shape[1]:
        outputs = []  # a short chunk: steps cost less than all that went before
        for u_t in u.unbind(1):
            y, state = ops.online_step(u_t, state, kernel_of, window)
            outputs.append(y)
        return torch.stack(outputs, dim=1), state
    whole = torch.cat((history, u), dim=1)
    kernel = kernel_of(min(whole.shape[1], window or whole.shape[1]))
    y = ops.convolution(whole, kernel)[:, history.shape[1] :]
    if lengths is not None:
        whole = ops.align_right(whole, lengths + history.shape[1])
    return y, ops.online_start(whole, kernel_of, window)


def read_step(
    u: Float[Tensor, "B H"], modes: Modes, state: RecurrentState
) -> tuple[Float[Tensor, "B H"], RecurrentState]:
    """One step of the recurrence."""
    x, past, oldest = state  # not state._replace(...): torch 2.11 cannot compile that
    window = past.shape[1]
    if window == 0:
        y, x = ops.step(u, *modes, x)
        return y, RecurrentState(x, past, oldest)
    leaving = past.index_select(1, oldest)[:, 0]
    y, x = ops.step(u, *modes, x, leaving=leaving, window=window)
    return y, RecurrentState(x, past.index_copy(1, oldest, u[:, None]), (oldest + 1) % window)
