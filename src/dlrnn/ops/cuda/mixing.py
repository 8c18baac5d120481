"""Activation and linear map of the channels behind a convolution, with backward, on tensor cores.

    out = act(y) weight^T + bias ,   dy = (dout weight) act'(y) ,
    d_weight = dout^T act(y) ,       d_bias = sum dout .

One kernel each way (mixing_forward.cu and mixing_backward.cu say how), of 128 channels and columns
at most: wider matrices are done in parts, which add to each other. y is read once a part, act(y) is
never stored, and nothing is added atomically. An infinity makes its position NaN.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc

WIDTH = 128  # channels and columns of a part
SHARED_BYTES = 232448  # of a multiprocessor, for one block
MOST_STAGES = 8
HEADERS = "device.cuh", "tensor_cores.cuh", "products.cuh", "mixing.cuh"


def supports(y: Tensor) -> bool:
    """fp32 on a Hopper GPU; channels and columns are multiples of 16."""
    return (
        y.is_cuda
        and y.dtype == torch.float32
        and y.numel() > 0
        and torch.cuda.get_device_capability(y.device) == (9, 0)
        and nvrtc.available()
    )


def forward(
    y: Tensor, length: int, weight: Tensor, bias: Tensor, activation: str, *, in_rows: bool
) -> Tensor:
    """From y, [B, H, .] in rows or [B, L, H], to out [B, L, columns]."""
    (columns, channels), bias = weight.shape, bias.contiguous()
    y, weight = _aligned(y), _aligned(weight)
    out = y.new_empty(y.shape[0], length, columns)
    for o in _parts(columns):
        for h in _parts(channels):
            widths = len(h), len(o), channels, columns
            part = Part(*widths, in_rows, activation == "gelu", adds=h.start > 0)
            plan = forward_plan(part)
            tiles = y.shape[0] * -(-length // plan.positions)
            _kernel("forward", "mixing_forward.cu", part, plan, y.device)(
                *(min(tiles, _processors(y.device)), 128 * (plan.groups + 1)),
                *(_of(y, h, in_rows), weight[o.start :, h.start :], bias[o.start :]),
                *(out[..., o.start :], length, tiles, y.shape[2]),
            )
    return out


def backward(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, *, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dy, laid out as y; d_weight; d_bias."""
    (columns, channels), length, device = weight.shape, dout.shape[1], y.device
    dout, y, weight = _aligned(dout), _aligned(y), _aligned(weight)
    dy, d_weight, d_bias = torch.empty_like(y), torch.empty_like(weight), weight.new_empty(columns)
    for o in _parts(columns):
        for h in _parts(channels):
            widths = len(h), len(o), channels, columns
            part = Part(*widths, in_rows, activation == "gelu", adds=o.start > 0)
            plan = backward_plan(part)
            tiles = y.shape[0] * -(-length // plan.positions)
            blocks, entries = min(tiles, _processors(device)), len(o) * (len(h) + 1)
            partial = y.new_empty(blocks * part.teams, entries)
            _kernel("backward", "mixing_backward.cu", part, plan, device)(
                *(blocks, 384, dout[..., o.start :], _of(y, h, in_rows)),
                *(weight[o.start :, h.start :], _of(dy, h, in_rows), partial),
                *(length, tiles, y.shape[2]),
            )
            _kernel("add_up", "mixing_backward.cu", part, plan, device)(
                *(-(-entries // 128), 256, partial, d_weight[o.start :, h.start :]),
                *(d_bias[o.start :], partial.shape[0]),
            )
    return dy, d_weight, d_bias


class Part(NamedTuple):
    """What a kernel is compiled for."""

    channels: int
    columns: int
    all_channels: int
    all_columns: int
    in_rows: bool
    gelu: bool
    adds: bool

    @property
    def teams(self) -> int:
        """Tiles that a block works at, at a time, in backward."""
        return 1 if self.channels > WIDTH // 2 else 2

    def stage(self, positions: int) -> int:
        """Bytes of a tile of y."""
        return 4 * self.channels * (positions + 8 * self.in_rows)


class Plan(NamedTuple):
    """Positions of a tile; groups of four warps that multiply; stages of y and of dout."""

    positions: int
    groups: int
    stages: int
    gradients: int
    bytes: int


def forward_plan(part: Part) -> Plan:
    """Of narrow ones more groups, which need fewer registers."""
    groups = 2 if max(part.channels, part.columns) > WIDTH // 2 else 4
    used = 4 * part.channels * part.columns + 4 * part.columns + 128
    return _filled(Plan(64, groups, 0, 0, used), part, teams=groups)


def backward_plan(part: Part) -> Plan:
    """Of narrow ones longer tiles; each team has a stage of dout that it uses and one ahead."""
    positions = 64 if max(part.channels, part.columns) > WIDTH // 4 else 128
    gradients = 2 * part.teams
    used = 256 * part.columns * (2 // part.teams) + 16 * part.columns + 128
    used += gradients * (4 * positions * (part.columns + 1) + 16)
    return _filled(Plan(positions, 2, 0, gradients, used), part, teams=part.teams)


def _filled(plan: Plan, part: Part, teams: int) -> Plan:
    """With as many stages of y as fit beside what is used; 16 bytes of barriers each.

    A stage always serves the same team, which so cannot be a round ahead of its barrier.
    """
    stage = part.stage(plan.positions) + 16
    stages = min((SHARED_BYTES - plan.bytes) // stage, MOST_STAGES) // teams * teams
    return plan._replace(stages=stages, bytes=plan.bytes + stages * stage)


def _parts(width: int) -> list[range]:
    return [range(first, min(first + WIDTH, width)) for first in range(0, width, WIDTH)]


def _of(y: Tensor, channels: range, in_rows: bool) -> Tensor:
    return y[:, channels.start :] if in_rows else y[..., channels.start :]


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@cache
def _processors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def defines(part: Part, plan: Plan) -> dict[str, int]:
    """What the sources want to know at compile time."""
    return {
        "STORAGE_BITS": 32,
        "CHANNELS": part.channels,
        "COLUMNS": part.columns,
        "ALL_CHANNELS": part.all_channels,
        "ALL_COLUMNS": part.all_columns,
        "IN_ROWS": int(part.in_rows),
        "GELU": int(part.gelu),
        "ADDS": int(part.adds),
        "POSITIONS": plan.positions,
        "GROUPS": plan.groups,
        "STAGES": plan.stages,
        "GRADIENTS": plan.gradients,
        "SHARED_BYTES": plan.bytes,
    }


@cache
def _kernel(name: str, file: str, part: Part, plan: Plan, device: torch.device) -> nvrtc.Kernel:
    known = tuple(defines(part, plan).items())
    shared = 0 if name == "add_up" else plan.bytes
    return nvrtc.load((*HEADERS, file), name, known, shared, device.index)
