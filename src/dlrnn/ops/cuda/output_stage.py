"""The output stage after a convolution, activation and linear map of the channels, with backward.

    out = act(y) weight^T + bias ,   dy = (dout weight) act'(y) ,
    d_weight = dout^T act(y) ,       d_bias = sum dout .

One kernel each way on tensor cores (output_stage_forward.cu, output_stage_backward.cu) handles at
most 128 channels and columns; wider matrices are split into parts, whose results are added. Each
part reads y once. act(y) is never stored, and no result is added atomically. An infinity makes all
results of its position NaN.

y is in channel-major rows [B, H, stride] (`in_rows`) or [B, L, H].
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from dlrnn.common.device import multiprocessors
from dlrnn.ops import tuning
from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.nvrtc import ceil_div

WIDTH = 128  # channels and columns of a part
SHARED_BYTES = 232448  # of a multiprocessor, for one block
MOST_STAGES = 8
HEADERS = "device.cuh", "wgmma.cuh", "output_stage.cuh"


def supports(y: Tensor) -> bool:
    """fp32 on a Hopper GPU. Channels and columns must be multiples of 16."""
    return y.dtype == torch.float32 and nvrtc.runs_on(y)


def forward(
    y: Tensor, length: int, weight: Tensor, bias: Tensor, activation: str, *, in_rows: bool
) -> Tensor:
    """The output [B, L, columns]."""
    y, weight, bias = nvrtc.aligned(y), nvrtc.aligned(weight), bias.contiguous()
    out = y.new_empty(y.shape[0], length, weight.shape[0])

    def launch(part: Part, o: range, h: range, is_trial: bool, plan: Plan) -> None:
        to = torch.empty_like(out) if is_trial else out
        tiles = y.shape[0] * ceil_div(length, plan.positions)
        _kernel("forward", "output_stage_forward.cu", part, plan, y.device)(
            *(min(tiles, multiprocessors(y.device)), 128 * (plan.groups + 1)),
            *(_of(y, h, in_rows), weight[o.start :, h.start :], bias[o.start :]),
            *(to[..., o.start :], length, tiles, y.shape[2]),
        )

    _run_parts("forward", launch, y, length, weight, activation, in_rows)
    return out


def backward(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, *, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients dy (in the layout of y), d_weight and d_bias."""
    length, device = dout.shape[1], y.device
    dout, y, weight = nvrtc.aligned(dout), nvrtc.aligned(y), nvrtc.aligned(weight)
    dy, d_weight = torch.empty_like(y), torch.empty_like(weight)
    d_bias = weight.new_empty(weight.shape[0])

    def launch(part: Part, o: range, h: range, is_trial: bool, plan: Plan) -> None:
        to = torch.empty_like(dy) if is_trial else dy
        tiles = y.shape[0] * ceil_div(length, plan.positions)
        blocks, entries = min(tiles, multiprocessors(device)), len(o) * (len(h) + 1)
        sums = y.new_empty(blocks * part.tiles_at_a_time, entries)
        _kernel("backward", "output_stage_backward.cu", part, plan, device)(
            *(blocks, 384, dout[..., o.start :], _of(y, h, in_rows)),
            *(weight[o.start :, h.start :], _of(to, h, in_rows), sums),
            *(length, tiles, y.shape[2]),
        )
        _kernel("sum_partials", "output_stage_backward.cu", part, plan, device)(
            *(ceil_div(entries, 128), 256, sums, d_weight[o.start :, h.start :]),
            *(d_bias[o.start :], sums.shape[0]),
        )

    _run_parts("backward", launch, y, length, weight, activation, in_rows)
    return dy, d_weight, d_bias


def _run_parts(  # noqa: PLR0917
    name: str,
    launch: "Launch",
    y: Tensor,
    length: int,
    weight: Tensor,
    activation: str,
    in_rows: bool,
) -> None:
    """Launch each part with its tuned plan; trials of plans write to other memory."""
    (columns, channels), is_forward = weight.shape, name == "forward"
    for o in _ranges(columns):
        for h in _ranges(channels):
            accumulate = h.start > 0 if is_forward else o.start > 0
            widths = len(h), len(o), channels, columns
            part = Part(*widths, in_rows, activation == "gelu", accumulate)
            plans = forward_plans(part) if is_forward else backward_plans(part)
            sizes, trial = part.sizes(y.shape[0] * length), partial(launch, part, o, h, True)
            plan = tuning.choose(f"mixing.{name}", sizes, plans, trial, y)
            launch(part, o, h, False, plan)


class Part(NamedTuple):
    """Sizes and options for which a kernel is compiled."""

    channels: int
    columns: int
    all_channels: int
    all_columns: int
    in_rows: bool
    gelu: bool
    accumulate: bool

    @property
    def tiles_at_a_time(self) -> int:
        """Tiles that a block of the backward kernel processes at a time."""
        return 1 if self.channels > WIDTH // 2 else 2

    def sizes(self, positions: int) -> tuple[int, int, int, int]:
        """The sizes on which the choice of a plan depends."""
        return self.channels, self.columns, self.in_rows, tuning.size_class(positions)

    def stage(self, positions: int) -> int:
        """Bytes of a stage, which holds a tile of y."""
        return 4 * self.channels * (positions + 8 * self.in_rows)


class Plan(NamedTuple):
    """Positions of a tile; consumer groups of four warps; stages of y and of dout."""

    positions: int
    groups: int
    stages: int
    gradients: int
    bytes: int


Launch = Callable[[Part, range, range, bool, Plan], None]


@cache
def forward_plans(part: Part) -> tuple[Plan, ...]:
    """The candidates, the default first. Narrow kernels have registers for more consumer groups."""
    is_wide = max(part.channels, part.columns) > WIDTH // 2
    used = 4 * part.channels * part.columns + 4 * part.columns + 128
    pairs = [(64, 2)] if is_wide else [(64, 4), (64, 2), (128, 4)]
    plans = [Plan(positions, groups, 0, 0, used) for positions, groups in pairs]
    return _filled(plans, part, [plan.groups * 64 // plan.positions for plan in plans])


@cache
def backward_plans(part: Part) -> tuple[Plan, ...]:
    """The candidates, the default first: each tile in work has a stage of dout and prefetches one.

    Two tiles at a time may prefetch two; up to 32 channels there are registers for longer tiles.
    """
    pairs = [(64, 2)] if part.tiles_at_a_time == 1 else [(64, 2), (64, 3)]
    if part.channels <= WIDTH // 4:
        pairs.insert(0 if part.columns <= WIDTH // 4 else 2, (128, 2))
    plans = []
    for positions, each in pairs:
        used = 256 * part.columns * (2 // part.tiles_at_a_time) + 16 * part.columns + 128
        used += each * part.tiles_at_a_time * (4 * positions * (part.columns + 1) + 16)
        plans.append(Plan(positions, 2, 0, each * part.tiles_at_a_time, used))
    return _filled(plans, part, [part.tiles_at_a_time] * len(plans))


def _filled(plans: list[Plan], part: Part, tiles: list[int]) -> tuple[Plan, ...]:
    """The plans with as many stages of y as fit in shared memory, with 16 bytes of mbarriers each.

    The number of stages is a multiple of the `tiles` in work at a time: then a stage always serves
    the same consumers, which cannot be one phase ahead of its mbarriers. Plans with room for fewer
    than two stages are left out.
    """
    filled = []
    for plan, count in zip(plans, tiles, strict=True):
        stage = part.stage(plan.positions) + 16
        stages = min((SHARED_BYTES - plan.bytes) // stage, MOST_STAGES) // count * count
        if stages >= 2:
            filled.append(plan._replace(stages=stages, bytes=plan.bytes + stages * stage))
    return tuple(filled)


def _ranges(width: int) -> list[range]:
    return [range(first, min(first + WIDTH, width)) for first in range(0, width, WIDTH)]


def _of(y: Tensor, channels: range, in_rows: bool) -> Tensor:
    return y[:, channels.start :] if in_rows else y[..., channels.start :]


@cache
def _defines(part: Part, plan: Plan) -> nvrtc.Defines:
    """The constants of the sources."""
    return (
        ("STORAGE_BITS", 32),
        ("CHANNELS", part.channels),
        ("COLUMNS", part.columns),
        ("ALL_CHANNELS", part.all_channels),
        ("ALL_COLUMNS", part.all_columns),
        ("CHANNEL_MAJOR", int(part.in_rows)),
        ("GELU", int(part.gelu)),
        ("ACCUMULATE", int(part.accumulate)),
        ("POSITIONS", plan.positions),
        ("GROUPS", plan.groups),
        ("STAGES", plan.stages),
        ("GRADIENTS", plan.gradients),
        ("SHARED_BYTES", plan.bytes),
    )


def _kernel(name: str, file: str, part: Part, plan: Plan, device: torch.device) -> nvrtc.Kernel:
    shared = 0 if name == "sum_partials" else plan.bytes
    return nvrtc.load((*HEADERS, file), name, _defines(part, plan), shared, device.index)
