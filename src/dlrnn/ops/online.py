"""Convolution one step at a time for kernels that have no small state: exact, in quasi-linear time.

After t inputs, the inputs are held in blocks whose sizes are the binary digits of t (13 = 8 + 4 +
1). When a block of size p is completed, one transform computes its contribution to the next p
outputs, so that output t is `K_0 u_t` plus one number from each block. A block of size p is made
every 2 p steps at a cost of p log p: L log^2 L for a whole generation instead of L^2.
This is relaxed multiplication (van der Hoeven, 2002) with one factor known beforehand.

A state is never changed in place: it can be kept, branched from and differentiated through.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dlrnn.ops.convolution import convolution

KernelOf = Callable[[int], Tensor]
"""`kernel(L)` gives the first L entries, [H, L]."""


class Block(NamedTuple):
    """p consecutive inputs, and what they add to the p outputs after them; both [B, p, H]."""

    inputs: Tensor
    outputs: Tensor


class OnlineState(NamedTuple):
    """The blocks, oldest and largest first, and the entries of the kernel known so far [H, K].

    `blocks` are the binary digits of the number of inputs seen.
    """

    kernel: Tensor
    blocks: tuple[Block, ...]

    def seen(self) -> int:
        """The number of inputs that the state holds."""
        return sum(block.inputs.shape[1] for block in self.blocks)

    def history(self) -> Float[Tensor, "B t H"]:
        """The inputs that later outputs depend on, in order."""
        return torch.cat([block.inputs for block in self.blocks], dim=1)


def online_start(
    history: Float[Tensor, "B t H"], kernel_of: KernelOf, window: int | None = None
) -> OnlineState:
    """The state after `history` (which may be empty) has been read.

    A restricted kernel is zero from entry `window` on, and inputs that old are dropped.
    """
    _, seen, channels = history.shape
    if window is not None and seen > _largest(window):  # earlier inputs are out of reach
        history = history[:, seen - _largest(window) :]
        seen = history.shape[1]
    state = OnlineState(_enlarge(history.new_empty(channels, 0), kernel_of, 16, window), ())
    start = 0
    for digit in reversed(range(seen.bit_length())):
        if seen >> digit & 1:
            inputs = history[:, start : start + 2**digit].clone()  # a view would keep all of it
            state = _append(state, inputs, kernel_of, window)
            start += 2**digit
    return state


def online_step(
    u: Float[Tensor, "B H"], state: OnlineState, kernel_of: KernelOf, window: int | None = None
) -> tuple[Float[Tensor, "B H"], OnlineState]:
    """`y_t = sum_j K_j u_{t-j}` and the next state; see `online_start`."""
    seen = state.seen()
    y = state.kernel[:, 0] * u
    for block in state.blocks:
        y = y + block.outputs[:, seen % block.inputs.shape[1]]
    blocks, inputs = list(state.blocks), u[:, None].clone()  # u may be the caller's buffer
    while blocks and blocks[-1].inputs.shape[1] == inputs.shape[1]:
        older = blocks.pop().inputs
        if window is None or inputs.shape[1] < _largest(window):
            inputs = torch.cat((older, inputs), dim=1)
    rest = OnlineState(state.kernel, tuple(blocks))
    return y.to(u.dtype), _append(rest, inputs, kernel_of, window)


def _append(
    state: OnlineState, inputs: Tensor, kernel_of: KernelOf, window: int | None
) -> OnlineState:
    """Add a completed block: its outputs are entries p .. 2p-1 of `K * inputs`."""
    size = inputs.shape[1]
    kernel = _enlarge(state.kernel, kernel_of, 2 * size, window)
    padded = torch.nn.functional.pad(inputs, (0, 0, 0, size))  # [B, 2 p, H]
    outputs = convolution(padded, kernel[:, : 2 * size])[:, size:].clone()
    return OnlineState(kernel, (*state.blocks, Block(inputs, outputs)))


def _largest(window: int) -> int:
    """The size at which a block is replaced by the next one instead of joined to it."""
    return 1 << max(0, window - 1).bit_length()


def _enlarge(kernel: Tensor, kernel_of: KernelOf, length: int, window: int | None) -> Tensor:
    """At least `length` entries: twice as many as needed now, zero from `window` on."""
    if kernel.shape[1] >= length:
        return kernel
    known = kernel_of(min(2 * length, window or 2 * length))
    return torch.nn.functional.pad(known, (0, 2 * length - known.shape[1]))
