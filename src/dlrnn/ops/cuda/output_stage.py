"""The output stage after a convolution, activation and linear map of the channels, with backward.

    out = act(y) weight^T + bias ,   dy = (dout weight) act'(y) ,
    d_weight = dout^T act(y) ,       d_bias = sum dout .

One kernel each way on tensor cores (output_stage_forward.cu, output_stage_backward.cu) handles at
most 128 channels and columns; wider matrices are split into parts, whose results are added. Each
part reads y once. act(y) is never stored, and no result is added atomically. An infinity makes all
results of its position NaN.

y is in channel-major rows [B, H, stride] (`in_rows`) or [B, L, H]. y, out and their gradients are
in fp32, bf16 or fp16; weight, bias and their gradients, and all sums, in fp32.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dlrnn.common.device import multiprocessors
from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.convolution import STORAGE
from dlrnn.ops.cuda.nvrtc import ceil_div

WIDTH = 128  # channels and columns of a part
SHARED_BYTES = 232448  # of a multiprocessor, for one block
MOST_STAGES = 8
HEADERS = "device.cuh", "wgmma.cuh", "output_stage.cuh"


def supports(y: Tensor) -> bool:
    """fp32, bf16 or fp16 on a Hopper GPU. Channels and columns must be multiples of 16."""
    return y.dtype in STORAGE and nvrtc.runs_on(y)


def forward(
    y: Tensor, length: int, weight: Tensor, bias: Tensor, activation: str, *, in_rows: bool
) -> Tensor:
    """The output [B, L, columns]."""
    y, weight, bias = nvrtc.aligned(y), nvrtc.aligned(weight), bias.contiguous()
    out = y.new_empty(y.shape[0], length, weight.shape[0])
    for part, o, h in _parts(y, weight, activation, in_rows, is_forward=True):
        plan = forward_plan(part)
        tiles = y.shape[0] * ceil_div(length, plan.positions)
        _kernel("forward", "output_stage_forward.cu", part, plan, y.device)(
            *(min(tiles, multiprocessors(y.device)), 128 * (plan.groups + 1)),
            *(_from(y, h, in_rows), _from(weight, h)[o:], bias[o:], _from(out, o)),
            *(length, tiles, y.shape[2]),
        )
    return out


def backward(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, *, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients dy (in the layout of y), d_weight and d_bias."""
    length, device = dout.shape[1], y.device
    dout, y, weight = nvrtc.aligned(dout), nvrtc.aligned(y), nvrtc.aligned(weight)
    dy, d_weight = torch.empty_like(y), torch.empty_like(weight)
    d_bias = weight.new_empty(weight.shape[0])

    for part, o, h in _parts(y, weight, activation, in_rows, is_forward=False):
        plan = backward_plan(part)
        tiles = y.shape[0] * ceil_div(length, plan.positions)
        blocks, entries = min(tiles, multiprocessors(device)), part.columns * (part.channels + 1)
        sums = weight.new_empty(blocks * part.tiles_at_a_time, entries)
        _kernel("backward", "output_stage_backward.cu", part, plan, device)(
            *(blocks, 384, _from(dout, o), _from(y, h, in_rows), _from(weight, h)[o:]),
            *(_from(dy, h, in_rows), sums, length, tiles, y.shape[2]),
        )
        _kernel("sum_partials", "output_stage_backward.cu", part, plan, device)(
            *(ceil_div(entries, 128), 256, sums, _from(d_weight, h)[o:]),
            *(d_bias[o:], sums.shape[0]),
        )
    return dy, d_weight, d_bias


def _parts(
    y: Tensor, weight: Tensor, activation: str, in_rows: bool, *, is_forward: bool
) -> Iterator[tuple["Part", int, int]]:
    """The parts of a matrix, each with its first column and its first channel."""
    columns, channels = weight.shape
    for o in range(0, columns, WIDTH):
        for h in range(0, channels, WIDTH):
            widths = min(WIDTH, channels - h), min(WIDTH, columns - o), channels, columns
            accumulate = h > 0 if is_forward else o > 0
            yield Part(*widths, in_rows, activation == "gelu", accumulate, y.dtype), o, h


class Part(NamedTuple):
    """Sizes and options for which a kernel is compiled."""

    channels: int
    columns: int
    all_channels: int
    all_columns: int
    in_rows: bool
    gelu: bool
    accumulate: bool
    dtype: torch.dtype = torch.float32

    @property
    def tiles_at_a_time(self) -> int:
        """Tiles that a block of the backward kernel processes at a time."""
        return 1 if self.channels > WIDTH // 2 else 2

    @property
    def size(self) -> int:
        """Bytes of a number: of y, and of an operand, which for fp32 has two fp16 parts."""
        return self.dtype.itemsize

    def stage(self, positions: int) -> int:
        """Bytes of a stage, which holds a tile of y; rows are padded by 32 bytes."""
        return self.channels * (self.size * positions + 32 * self.in_rows)


class Plan(NamedTuple):
    """Positions of a tile; consumer groups of four warps; stages of y and of dout."""

    positions: int
    groups: int
    stages: int
    gradients: int
    bytes: int


@cache
def forward_plan(part: Part) -> Plan:
    """Narrow kernels have registers for more consumer groups."""
    groups = 2 if max(part.channels, part.columns) > WIDTH // 2 else 4
    used = part.size * part.channels * part.columns + 4 * part.columns + 128
    return _filled(Plan(64, groups, 0, 0, used), part, groups)


@cache
def backward_plan(part: Part) -> Plan:
    """Each tile in work has a stage of dout and prefetches one.

    Up to 32 channels there are registers for longer tiles.
    """
    is_narrow, tiles = max(part.channels, part.columns) <= WIDTH // 4, part.tiles_at_a_time
    positions, gradients = 128 if is_narrow else 64, 2 * tiles
    used = 64 * part.size * part.columns * (2 // tiles) + 16 * part.columns + 128
    used += gradients * (positions * (part.size * part.columns + 4) + 16)
    return _filled(Plan(positions, 2, 0, gradients, used), part, tiles)


def _filled(plan: Plan, part: Part, tiles: int) -> Plan:
    """The plan with as many stages of y as fit in shared memory, with 16 bytes of mbarriers each.

    The number of stages is a multiple of the `tiles` in work at a time: then a stage always serves
    the same consumers, which cannot be one phase ahead of its mbarriers.
    """
    stage = part.stage(plan.positions) + 16
    stages = min((SHARED_BYTES - plan.bytes) // stage, MOST_STAGES) // tiles * tiles
    return plan._replace(stages=stages, bytes=plan.bytes + stages * stage)


def _from(x: Tensor, first: int, in_rows: bool = False) -> Tensor:
    """The part of x from this channel on."""
    if first == 0:
        return x
    return x[:, first:] if in_rows else x[..., first:]


@cache
def _defines(part: Part, plan: Plan) -> nvrtc.Defines:
    """The constants of the sources."""
    return (
        *STORAGE[part.dtype],
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
