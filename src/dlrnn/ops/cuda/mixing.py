"""Activation and linear map of the channels behind a convolution, with backward, on tensor cores.

    out = act(y) weight^T + bias ,   dy = (dout weight) act'(y) ,
    d_weight = dout^T act(y) ,       d_bias = sum dout .

One kernel each way (mixing_forward.cu and mixing_backward.cu say how), of 128 channels and columns
at most: wider matrices are done in parts, which add to each other. y is read once a part, act(y) is
never stored, and nothing is added atomically. An infinity makes its position NaN.
"""

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from dlrnn.ops import tuning
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
    y, weight = nvrtc.aligned(y), nvrtc.aligned(weight)
    out = y.new_empty(y.shape[0], length, columns)

    def launch(part: Part, o: range, h: range, is_trial: bool, plan: Plan) -> None:
        to = torch.empty_like(out) if is_trial else out
        tiles = y.shape[0] * -(-length // plan.positions)
        _kernel("forward", "mixing_forward.cu", part, plan, y.device)(
            *(min(tiles, _processors(y.device)), 128 * (plan.groups + 1)),
            *(_of(y, h, in_rows), weight[o.start :, h.start :], bias[o.start :]),
            *(to[..., o.start :], length, tiles, y.shape[2]),
        )

    for o in _parts(columns):
        for h in _parts(channels):
            widths = len(h), len(o), channels, columns
            part = Part(*widths, in_rows, activation == "gelu", adds=h.start > 0)
            sizes, plans = part.sizes(y.shape[0] * length), forward_plans(part)
            trial = partial(launch, part, o, h, True)
            launch(part, o, h, False, tuning.choose("mixing.forward", sizes, plans, trial, y))
    return out


def backward(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, *, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dy, laid out as y; d_weight; d_bias."""
    (columns, channels), length, device = weight.shape, dout.shape[1], y.device
    dout, y, weight = nvrtc.aligned(dout), nvrtc.aligned(y), nvrtc.aligned(weight)
    dy, d_weight, d_bias = torch.empty_like(y), torch.empty_like(weight), weight.new_empty(columns)

    def launch(part: Part, o: range, h: range, is_trial: bool, plan: Plan) -> None:
        to = torch.empty_like(dy) if is_trial else dy
        tiles = y.shape[0] * -(-length // plan.positions)
        blocks, entries = min(tiles, _processors(device)), len(o) * (len(h) + 1)
        sums = y.new_empty(blocks * part.teams, entries)
        _kernel("backward", "mixing_backward.cu", part, plan, device)(
            *(blocks, 384, dout[..., o.start :], _of(y, h, in_rows)),
            *(weight[o.start :, h.start :], _of(to, h, in_rows), sums),
            *(length, tiles, y.shape[2]),
        )
        _kernel("add_up", "mixing_backward.cu", part, plan, device)(
            *(-(-entries // 128), 256, sums, d_weight[o.start :, h.start :]),
            *(d_bias[o.start :], sums.shape[0]),
        )

    for o in _parts(columns):
        for h in _parts(channels):
            widths = len(h), len(o), channels, columns
            part = Part(*widths, in_rows, activation == "gelu", adds=o.start > 0)
            sizes, plans = part.sizes(y.shape[0] * length), backward_plans(part)
            trial = partial(launch, part, o, h, True)
            launch(part, o, h, False, tuning.choose("mixing.backward", sizes, plans, trial, y))
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

    def sizes(self, positions: int) -> tuple[int, int, int, int]:
        """What plans are chosen by."""
        return self.channels, self.columns, self.in_rows, tuning.size_class(positions)

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


@cache
def forward_plans(part: Part) -> tuple[Plan, ...]:
    """The default first. Narrow ones have a choice: they have registers for more groups."""
    is_wide = max(part.channels, part.columns) > WIDTH // 2
    used = 4 * part.channels * part.columns + 4 * part.columns + 128
    pairs = [(64, 2)] if is_wide else [(64, 4), (64, 2), (128, 4)]
    plans = [Plan(positions, groups, 0, 0, used) for positions, groups in pairs]
    return _filled(plans, part, [plan.groups * 64 // plan.positions for plan in plans])


@cache
def backward_plans(part: Part) -> tuple[Plan, ...]:
    """The default first: a team has a stage of dout that it uses and one ahead.

    Two teams may have two ahead; up to 32 channels there are registers for longer tiles.
    """
    pairs = [(64, 2)] if part.teams == 1 else [(64, 2), (64, 3)]
    if part.channels <= WIDTH // 4:
        pairs.insert(0 if part.columns <= WIDTH // 4 else 2, (128, 2))
    plans = []
    for positions, each in pairs:
        used = 256 * part.columns * (2 // part.teams) + 16 * part.columns + 128
        used += each * part.teams * (4 * positions * (part.columns + 1) + 16)
        plans.append(Plan(positions, 2, 0, each * part.teams, used))
    return _filled(plans, part, [part.teams] * len(plans))


def _filled(plans: list[Plan], part: Part, teams: list[int]) -> tuple[Plan, ...]:
    """With as many stages of y as fit beside what is used; 16 bytes of barriers each.

    A stage always serves the same team, which so cannot be a round ahead of its barrier. Plans
    that have no place for a stage in use and one ahead are left out.
    """
    filled = []
    for plan, count in zip(plans, teams, strict=True):
        stage = part.stage(plan.positions) + 16
        stages = min((SHARED_BYTES - plan.bytes) // stage, MOST_STAGES) // count * count
        if stages >= 2:
            filled.append(plan._replace(stages=stages, bytes=plan.bytes + stages * stage))
    return tuple(filled)


def _parts(width: int) -> list[range]:
    return [range(first, min(first + WIDTH, width)) for first in range(0, width, WIDTH)]


def _of(y: Tensor, channels: range, in_rows: bool) -> Tensor:
    return y[:, channels.start :] if in_rows else y[..., channels.start :]


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
