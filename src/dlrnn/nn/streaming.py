"""Reading a sequence in chunks or step by step, with the same answer as reading it whole.

There are these states:
- `RecurrentState`: N complex numbers a channel, which `lambda` carries on. With a restricted
  kernel also the window of the last `kernel_length` inputs: one that leaves it also leaves x.
- `InPlaceState`: the same in tensors that every step overwrites, for `CapturedSteps`.
- `OnlineState` (from ops): the inputs themselves, for kernels that have no small state.
"""

from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlrnn import ops
from dlrnn.ops.checks import require
from dlrnn.ops.pairs import has_float64

SHORT = 16
"""A chunk is read step by step if the inputs to convolve again are so many times longer."""


class Modes(NamedTuple):
    """A DLR: `y = conv(K, u) + D u` with `K_k = Re(sum_n W_n lambda_n^k)`, pairs.

    lambda is shared by the channels, [N, 2], or each channel's own, [H, N, 2].
    """

    W: Float[Tensor, "H N 2"]
    log_lambda: Float[Tensor, "N 2"] | Float[Tensor, "H N 2"]
    D: Float[Tensor, " H"]


class StepModes(NamedTuple):
    """The same for a step, which takes DLR's parameters as they are."""

    W: Float[Tensor, "H N 2"]
    log_lambda: Float[Tensor, "N 2"] | Float[Tensor, "H N 2"] | ops.DLRExponents
    D: Float[Tensor, " H"]


class RecurrentState(NamedTuple):
    """The state of a layer that streams; tensors of fixed shapes, so that it can be exported.

    With a kernel restricted to `window` entries, `past` [B, window, H] holds the last inputs, and
    `oldest` [1] the place of the oldest; x is then float64, so that an input leaves without a trace
    when it leaves the window. Without: `past` has length 0, and x is of the layer's dtype.
    """

    x: Float[Tensor, "B H N 2"]
    past: Float[Tensor, "B window H"]
    oldest: Int[Tensor, "1"]


class InPlaceState(NamedTuple):
    """A `RecurrentState` in tensors that a step overwrites; it has no gradients."""

    x: Float[Tensor, "B H N 2"]
    past: Float[Tensor, "B window H"]
    oldest: Int[Tensor, "1"]


StepState = TypeVar("StepState", RecurrentState, InPlaceState)


def initial_state(modes: Modes, batch: int, window: int | None) -> RecurrentState:
    """The state before the first position: all zeros."""
    W = modes.W
    channels, states, _ = W.shape
    require(
        window is None or has_float64(W.device),
        f"a layer with kernel_length streams in float64, which {W.device.type} lacks: stream on the"
        " CPU (layer.cpu()), or without kernel_length",
    )
    return RecurrentState(
        W.new_zeros(batch, channels, states, 2, dtype=torch.float64 if window else W.dtype),
        W.new_zeros(batch, window or 0, channels),
        W.new_zeros(1, dtype=torch.int64),
    )


def read_chunk(
    u: Float[Tensor, "B L H"],
    modes: Modes,
    kernel_of: ops.KernelOf,
    state: RecurrentState | None,
    *,
    lengths: Int[Tensor, " B"] | None,
    window: int | None,
) -> tuple[Float[Tensor, "B L H"], RecurrentState]:
    """Convolve a chunk that follows `state`, None at the start of a sequence.

    `kernel_of` gives the modes' kernel with D in its entry 0.
    """
    if window is not None:
        return _read_chunk_windowed(u, modes, kernel_of, state, lengths=lengths, window=window)
    y, x = ops.convolution(u, kernel_of(u.shape[1])), None
    if state is not None:
        x = state.x
        y = y + ops.response(modes.W, modes.log_lambda, x, u.shape[1])
    ends = u if lengths is None else ops.align_right(u, lengths)
    x = ops.advance(ends, modes.log_lambda, x, lengths)
    nothing = initial_state(modes, u.shape[0], window)
    return y, RecurrentState(x, nothing.past, nothing.oldest)


def _read_chunk_windowed(
    u: Tensor,
    modes: Modes,
    kernel_of: ops.KernelOf,
    state: RecurrentState | None,
    *,
    lengths: Tensor | None,
    window: int,
) -> tuple[Tensor, RecurrentState]:
    """As `read_chunk` with a restricted kernel: convolves the window together with the chunk."""
    if state is not None and lengths is None and SHORT * u.shape[1] < window:
        outputs = []
        for u_t in u.unbind(1):
            y_t, state = read_step(u_t, modes, state)
            outputs.append(y_t)
        return torch.stack(outputs, dim=1), state
    start = initial_state(modes, u.shape[0], window)
    before = start.past[:, :0] if state is None else _in_order(state)
    whole = torch.cat((before, u), dim=1)
    kernel = kernel_of(min(window, whole.shape[1]))
    y = ops.convolution(whole, kernel)[:, before.shape[1] :]
    if lengths is not None:
        whole = ops.align_right(whole, lengths + before.shape[1])
    last = whole[:, -window:]
    past = torch.cat((start.past[:, : window - last.shape[1]], last), dim=1)
    return y, RecurrentState(ops.advance(last.double(), modes.log_lambda), past, start.oldest)


def _in_order(state: RecurrentState) -> Tensor:
    """The inputs in the ring, oldest first."""
    window = state.past.shape[1]
    return state.past[:, (state.oldest + torch.arange(window, device=state.past.device)) % window]


def attached(state: RecurrentState, modes: Modes) -> RecurrentState:
    """Computes the x of a windowed state again, from its inputs, so that it has gradients.

    Steps then have the same gradients as chunks, which read these inputs anyway.
    """
    x = ops.advance(_in_order(state).double(), modes.log_lambda)
    return RecurrentState(x, state.past, state.oldest)


def read_chunk_online(
    u: Float[Tensor, "B L H"],
    kernel_of: ops.KernelOf,
    state: ops.OnlineState | None,
    *,
    lengths: Int[Tensor, " B"] | None,
    window: int | None,
) -> tuple[Float[Tensor, "B L H"], ops.OnlineState]:
    """`read_chunk` for kernels that have no small state."""
    seen = 0 if state is None else state.seen()
    if state is not None and lengths is None and SHORT * u.shape[1] < seen:
        outputs = []  # steps cost less than convolving all earlier inputs again
        for u_t in u.unbind(1):
            y, state = ops.online_step(u_t, state, kernel_of, window)
            outputs.append(y)
        return torch.stack(outputs, dim=1), state
    whole = u if state is None or not seen else torch.cat((state.history(), u), dim=1)
    y = ops.convolution(whole, kernel_of(min(whole.shape[1], window or whole.shape[1])))[:, seen:]
    if lengths is not None:
        whole = ops.align_right(whole, lengths + seen)
    return y, ops.online_start(whole, kernel_of, window)


def read_step(
    u: Float[Tensor, "B H"], modes: Modes | StepModes, state: StepState
) -> tuple[Float[Tensor, "B H"], StepState]:
    """One step of the recurrence."""
    if isinstance(state, InPlaceState):
        return ops.step_in_place(u, modes.W, modes.log_lambda, *state, skip=modes.D), state
    x, past, oldest = state  # not state._replace(...): torch 2.11 cannot compile that
    if past.shape[1] == 0:
        y, x = ops.step(u, modes.W, modes.log_lambda, x, skip=modes.D)
        return y, RecurrentState(x, past, oldest)
    y, x, past, oldest = ops.windowed_step(
        u, modes.W, modes.log_lambda, x, past, oldest, skip=modes.D
    )
    return y, RecurrentState(x, past, oldest)
