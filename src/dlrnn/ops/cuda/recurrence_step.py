"""One step of the recurrence of `ops.recurrence`, by one kernel: recurrence_step.cu.

The state is read once and written once. Any CUDA GPU of compute capability 8.0 or later.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dlrnn.common.device import multiprocessors
from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.nvrtc import aligned, ceil_div

FILES = ("recurrence_step.cu",)
BLOCKS = 2  # for each multiprocessor, where there are many rows
MOST_SUMS = 2048  # of a block, in shared memory: one for each row and warp of its team
FAST_FLOAT64 = (8, 0), (9, 0), (10, 0)
"""Compute capabilities with at least half as many float64 units as fp32 units."""


class Plan(NamedTuple):
    """The sizes of a launch; see recurrence_step.cu."""

    team: int
    unroll: int
    pairs: bool
    threads: int
    groups: int
    parts: int
    share: int

    @property
    def most_threads(self) -> int:
        """Of a block with the same constants."""
        return 1024 if self.unroll == 1 else max(256, self.team)

    def shared_bytes(self, window: bool) -> int:
        """The table of lambda (and lambda^window), and a sum for each row and warp of a team."""
        chunk = self.team * self.unroll * (2 if self.pairs else 1)
        return 16 * chunk * (2 if window else 1) + 4 * self.share * ceil_div(self.team, 32)


def supports(
    u: Tensor, W: Tensor, log_lambda: Tensor, x: Tensor, past: Tensor | None = None
) -> bool:
    """fp32 inputs and weights, fp32 or float64 states, compute capability 8.0 or later.

    Sizes that do not fit are left to PyTorch, which broadcasts or raises.
    """
    (batch, channels), inner = u.shape, W.shape[1:]
    return (
        u.dtype == W.dtype == torch.float32
        and x.dtype in (torch.float32, torch.float64)
        and W.shape[0] == channels
        and x.shape == (batch, channels, *inner)
        and log_lambda.shape in (W.shape, inner, inner[:1])
        and (past is None or (past.shape[0], past.shape[-1]) == (batch, channels))
        and u.device == W.device == log_lambda.device == x.device
        and x.numel() > 0
        and max(u.numel(), 0 if past is None else past.numel()) < 2**31
        and nvrtc.runs_on(u)
    )


def step(  # noqa: PLR0917
    u: Tensor,
    W: Tensor,
    log_lambda: Tensor,
    phase: Tensor | None,
    x: Tensor,
    skip: Tensor | None,
    leaving: Tensor | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """`y = Re(W x') + skip u` and `x' = lambda x + u - lambda^window leaving`.

    With `phase`, log lambda is `-log_lambda^2 + i phase` of fp32 numbers, else it is float64 pairs.
    """
    ring = None if leaving is None else _Ring(aligned(leaving), 1)
    return _launch(u, W, log_lambda, phase, x, skip, ring, window)


def step_in_place(  # noqa: PLR0917
    u: Tensor,
    W: Tensor,
    log_lambda: Tensor,
    phase: Tensor | None,
    x: Tensor,
    skip: Tensor | None,
    past: Tensor,
    oldest: Tensor,
) -> Tensor:
    """y; x' replaces x, and u the oldest of the ring `past`, which may be empty."""
    window = past.shape[1]
    ring = _Ring(past, window, oldest, past) if window else None
    return _launch(u, W, log_lambda, phase, x, skip, ring, window, in_place=True)[0]


def windowed_step(  # noqa: PLR0917
    u: Tensor,
    W: Tensor,
    log_lambda: Tensor,
    phase: Tensor | None,
    x: Tensor,
    skip: Tensor | None,
    past: Tensor,
    oldest: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same where the input that leaves is the oldest of the ring `past`; also the new ring."""
    window = past.shape[1]
    new_past, new_oldest = past.new_empty(past.shape), oldest.new_empty(1)
    ring = _Ring(aligned(past), window, oldest, new_past, new_oldest)
    return *_launch(u, W, log_lambda, phase, x, skip, ring, window), new_past, new_oldest


class _Ring(NamedTuple):
    """Inputs of which one leaves the state, [B, length, H]; with `new_oldest` they are copied."""

    past: Tensor | None
    length: int
    oldest: Tensor | None = None
    new_past: Tensor | None = None
    new_oldest: Tensor | None = None


def _launch(  # noqa: PLR0917
    u: Tensor,
    W: Tensor,
    log_lambda: Tensor,
    phase: Tensor | None,
    x: Tensor,
    skip: Tensor | None,
    ring: _Ring | None,
    window: int,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    (batch, channels), states, device = u.shape, x.shape[2], u.device
    past, length, oldest, new_past, new_oldest = _Ring(None, 0) if ring is None else ring
    plan, defines, shared_bytes, copies = prepared(
        (batch, channels, states, 0 if new_oldest is None else length),
        (phase is None and log_lambda.dim() == 3, x.dtype == torch.float64),
        (past is not None, phase is not None),
        multiprocessors(device),
        nvrtc.capability(device),
    )
    kernel = nvrtc.load(FILES, "recurrence_step", defines, shared_bytes, device.index)
    u, x = aligned(u), x if in_place else aligned(x)
    y, new_x = u.new_empty(u.shape), x if in_place else x.new_empty(x.shape)
    place, *new_ring = (0 if each is None else each for each in (oldest, new_past, new_oldest))
    kernel(
        *(plan.groups * plan.parts + copies, plan.threads, u, aligned(W), aligned(log_lambda)),
        *(0 if phase is None else phase.contiguous(), 0 if skip is None else skip.contiguous(), x),
        *(0 if past is None else past, place, y, new_x, *new_ring),
        *(batch, channels, states, plan.groups, plan.parts, plan.share, window, length),
    )
    return y, new_x


@cache
def prepared(
    sizes: tuple[int, int, int, int],
    kinds: tuple[bool, bool],
    options: tuple[bool, bool],
    count: int,
    capability: tuple[int, int],
) -> tuple[Plan, nvrtc.Defines, int, int]:
    """The plan for `count` multiprocessors, constants, shared memory, and blocks for the ring."""
    (batch, channels, states, ring), (own, wide), (window, parameters) = sizes, kinds, options
    pairs = not wide and not window and states % 2 == 0
    plan = make_plan(batch, channels, states, own=own, pairs=pairs, multiprocessors=count)
    two_floats = not (wide or window or capability in FAST_FLOAT64)
    defines = (
        *(("TEAM", plan.team), ("UNROLL", plan.unroll), ("THREADS", plan.most_threads)),
        *(("PAIRS", int(plan.pairs)), ("WIDE", int(wide)), ("WINDOW", int(window))),
        *(("PARAMETERS", int(parameters)), ("TWO_FLOATS", int(two_floats))),
    )
    units = batch * ring * channels // (1 if channels % 4 else 4)
    copies = min(ceil_div(units, 4 * plan.threads), 4 * count)
    return plan, defines, plan.shared_bytes(window), copies


def make_plan(
    batch: int, channels: int, states: int, *, own: bool, pairs: bool, multiprocessors: int
) -> Plan:
    """Blocks for every multiprocessor, each with rows that share the evaluation of lambda.

    A thread has four vectors of 16 bytes of a row, or fewer where rows are few.
    """
    vectors = states // 2 if pairs else states
    rows, useful = batch * channels, min(512, _power_of_two(vectors))
    team = min(256, _power_of_two(ceil_div(vectors, 4)))
    while team < useful and rows * team < 512 * multiprocessors:
        team *= 2
    unroll = min(4, ceil_div(vectors, team))
    groups, group_rows = (channels, batch) if own else (1, rows)
    most = Plan(team, unroll, pairs, 0, 0, 0, 0).most_threads
    teams = min(most // team, group_rows, ceil_div(rows, multiprocessors))
    teams = max(1 << teams.bit_length() - 1, 32 // team)
    parts = max(1, min(ceil_div(group_rows, teams), ceil_div(BLOCKS * multiprocessors, groups)))
    most_rows = max(teams, MOST_SUMS // ceil_div(team, 32))
    share = min(most_rows, ceil_div(ceil_div(group_rows, parts), teams) * teams)
    parts = ceil_div(group_rows, share)
    return Plan(team, unroll, pairs, team * teams, groups, parts, share)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
