"""The kernels of the output stage: for which sizes they are compiled, and how they are launched.

There are kernels for Hopper (wgmma) and for every other GPU since compute capability 8.0 (mma).
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.convolution import STORAGE

WIDTH = 128  # channels and columns of a part
MOST_STAGES = 8
FORWARD_WARPS, BACKWARD_WARPS = 12, 8  # of a block of the portable kernels
HOPPER = (9, 0)
HOPPER_HEADERS = "device.cuh", "wgmma.cuh", "output_stage.cuh", "output_stage_tiles.cuh"
PORTABLE_HEADERS = "device.cuh", "wgmma.cuh", "mma.cuh", "output_stage.cuh"

Widths = tuple[int, int, int]
"""First number, width and count of parts that follow each other."""


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
    def size(self) -> int:
        """Bytes of a number: of y, and of an operand, which for fp32 has two fp16 parts."""
        return self.dtype.itemsize

    def stage(self, positions: int) -> int:
        """Bytes of a stage, which holds a tile of y; rows are padded by 32 bytes."""
        return self.channels * (self.size * positions + 32 * self.in_rows)

    @property
    def defines(self) -> nvrtc.Defines:
        """The constants that all kernels have."""
        return (
            *STORAGE[self.dtype],
            ("CHANNELS", self.channels),
            ("COLUMNS", self.columns),
            ("ALL_CHANNELS", self.all_channels),
            ("ALL_COLUMNS", self.all_columns),
            ("CHANNEL_MAJOR", int(self.in_rows)),
            ("GELU", int(self.gelu)),
            ("ACCUMULATE", int(self.accumulate)),
        )


class Plan(NamedTuple):
    """How a kernel is launched: a block has `teams`, each with a tile of y or a part of it."""

    files: tuple[str, ...]
    positions: int  # of a tile
    threads: int
    teams: int
    bytes: int  # of shared memory
    constants: dict[str, int]  # that this kernel has alone

    def kernel(self, name: str, part: Part, device: torch.device) -> nvrtc.Kernel:
        """The kernel, compiled at first use."""
        own = {"POSITIONS": self.positions, **self.constants, "SHARED_BYTES": self.bytes}
        defines = *part.defines, *own.items()
        return nvrtc.load(self.files, name, defines, self.bytes, device.index)


def launches(added: int, independent: int) -> Iterator[tuple[tuple[int, int], Widths]]:
    """First number and width of each part of a sum, and the other dimension's parts for a launch.

    The parts of a sum add to the same result: they are launched one after the other.
    """
    for first, width, count in _widths(added):
        for start in range(first, first + width * count, width):
            for parts in _widths(independent):
                yield (start, width), parts


def _widths(size: int) -> Iterator[Widths]:
    """The parts of `size` channels or columns: the wide ones, and the rest."""
    if count := size // WIDTH:
        yield 0, WIDTH, count
    if rest := size % WIDTH:
        yield size - rest, rest, 1


@cache
def forward_plan(part: Part, capability: tuple[int, int]) -> Plan:
    """The forward kernel on a GPU of this compute capability."""
    return _hopper_forward(part) if capability == HOPPER else _portable_forward(part)


@cache
def backward_plan(part: Part, capability: tuple[int, int]) -> Plan:
    """The backward kernel; each team writes a row of partial sums."""
    return _hopper_backward(part) if capability == HOPPER else _portable_backward(part)


# ---------------------------------------------------------------------------------- Hopper


def _hopper_forward(part: Part) -> Plan:
    """Consumer groups of four warps and four producer warps.

    Narrow kernels have registers for more consumer groups.
    """
    groups = 2 if max(part.channels, part.columns) > WIDTH // 2 else 4
    used = part.size * part.channels * part.columns + 4 * part.columns + 128
    stages, used = _with_stages(part, 64, groups, used)
    files = *HOPPER_HEADERS, "output_stage_forward.cu"
    return Plan(files, 64, 128 * (groups + 1), groups, used, {"GROUPS": groups, "STAGES": stages})


def _hopper_backward(part: Part) -> Plan:
    """Each tile in work has a stage of dout and prefetches one.

    Up to 32 channels there are registers for longer tiles.
    """
    is_narrow = max(part.channels, part.columns) <= WIDTH // 4
    tiles = 1 if part.channels > WIDTH // 2 else 2
    positions, gradients = 128 if is_narrow else 64, 2 * tiles
    used = 64 * part.size * part.columns * (2 // tiles) + 16 * part.columns + 128
    used += gradients * (positions * (part.size * part.columns + 4) + 16)
    stages, used = _with_stages(part, positions, tiles, used)
    files = *HOPPER_HEADERS, "output_stage_backward.cu"
    return Plan(files, positions, 384, tiles, used, {"STAGES": stages, "GRADIENTS": gradients})


def _with_stages(part: Part, positions: int, teams: int, used: int) -> tuple[int, int]:
    """As many stages of y as fit in shared memory, with 16 bytes of mbarriers each, and all bytes.

    The number of stages is a multiple of the `teams`: then a stage always serves the same
    consumers, which cannot be one phase ahead of its mbarriers.
    """
    stage = part.stage(positions) + 16
    most = min((nvrtc.SHARED_MEMORY[HOPPER] - used) // stage, MOST_STAGES)
    stages = most // teams * teams
    return stages, used + stages * stage


# ---------------------------------------------------------------------------------- portable


def _portable_forward(part: Part) -> Plan:
    """Each warp has a tile; the whole weight is in shared memory."""
    warps, positions = FORWARD_WARPS, 64 // part.size
    used = part.size * part.channels * part.columns + 4 * part.columns + 128
    files = *PORTABLE_HEADERS, "output_stage_portable_forward.cu"
    return Plan(files, positions, 32 * warps, warps, used, {"WARPS": warps})


def _portable_backward(part: Part) -> Plan:
    """A team of a warp for each 16 channels has 32 positions; a second stage of dout if it fits."""
    team = part.channels // 16
    teams = min(BACKWARD_WARPS // team, 4)
    positions, warps = 32 * teams, team * teams
    stage = positions * (part.size * (part.columns + 8) + 4)
    used = 4 * part.columns * warps + 128
    stages = 2 if used + 2 * stage <= nvrtc.LEAST_SHARED_MEMORY else 1
    files = *PORTABLE_HEADERS, "output_stage_portable_backward.cu"
    constants = {"STAGES": stages}
    return Plan(files, positions, 32 * warps, teams, used + stages * stage, constants)
