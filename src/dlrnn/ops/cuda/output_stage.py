"""The output stage after a convolution, activation and linear map of the channels, with backward.

    out = act(y) weight^T + bias ,   dy = (dout weight) act'(y) ,
    d_weight = dout^T act(y) ,       d_bias = sum dout .

One kernel each way on tensor cores handles at most 128 channels and columns: wider matrices are
split into parts, and their results are added. Parts that do not add to the same results share a
launch. act(y) is never stored, and no result is added atomically. An infinity makes all results of
its position NaN. output_stage_plans.py chooses the kernels for Hopper or for all other GPUs.

y is in channel-major rows [B, H, stride] (`in_rows`) or [B, L, H]. y, out and their gradients are
in fp32, bf16 or fp16; weight, bias and their gradients, and all sums, in fp32.
"""

import torch
from torch import Tensor

from dlrnn.common.device import multiprocessors
from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.convolution import STORAGE
from dlrnn.ops.cuda.nvrtc import ceil_div
from dlrnn.ops.cuda.output_stage_plans import Part, backward_plan, forward_plan, launches


def supports(y: Tensor) -> bool:
    """fp32, bf16 or fp16 since compute capability 8.0; sizes must be multiples of 16."""
    return y.dtype in STORAGE and nvrtc.runs_on(y)


def forward(
    y: Tensor, length: int, weight: Tensor, bias: Tensor, activation: str, *, in_rows: bool
) -> Tensor:
    """The output [B, L, columns]."""
    y, weight, bias = nvrtc.aligned(y), nvrtc.aligned(weight), bias.contiguous()
    out = y.new_empty(y.shape[0], length, weight.shape[0])
    columns, channels = weight.shape
    for (h, height), (o, width, count) in launches(channels, columns):
        sizes = height, width, channels, columns
        part = Part(*sizes, in_rows, activation == "gelu", h > 0, y.dtype)
        plan = forward_plan(part, nvrtc.capability(y.device))
        tiles = y.shape[0] * ceil_div(length, plan.positions)
        plan.kernel("forward", part, y.device)(
            *((_blocks(tiles, count, y.device), count, 1), plan.threads),
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

    columns, channels = weight.shape
    for (o, width), (h, height, count) in launches(columns, channels):
        sizes = height, width, channels, columns
        part = Part(*sizes, in_rows, activation == "gelu", o > 0, y.dtype)
        plan = backward_plan(part, nvrtc.capability(device))
        tiles = y.shape[0] * ceil_div(length, plan.positions)
        blocks, entries = _blocks(tiles, count, device), part.columns * (part.channels + 1)
        sums = weight.new_empty(count, blocks * plan.teams, entries)
        plan.kernel("backward", part, device)(
            *((blocks, count, 1), plan.threads, _from(dout, o), _from(y, h, in_rows)),
            *(_from(weight, h)[o:], _from(dy, h, in_rows), sums, length, tiles, y.shape[2]),
        )
        nvrtc.load(("output_stage_sums.cu",), "sum_partials", (), 0, device.index)(
            *((ceil_div(entries, 128), count, 1), 256, sums, _from(d_weight, h)[o:], d_bias[o:]),
            *(sums.shape[1], part.channels, part.columns, part.all_channels),
        )
    return dy, d_weight, d_bias


def _blocks(tiles: int, parts: int, device: torch.device) -> int:
    """Blocks of each part of a launch: one on each multiprocessor."""
    return min(tiles, max(multiprocessors(device) // parts, 1))


def _from(x: Tensor, first: int, in_rows: bool = False) -> Tensor:
    """The part of x from this channel on."""
    if first == 0:
        return x
    return x[:, first:] if in_rows else x[..., first:]
