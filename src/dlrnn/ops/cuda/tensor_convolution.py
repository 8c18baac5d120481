"""The plan and the tables of the convolution on tensor cores (tensor_convolution.cu)."""

import os
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.fft import roots
from dlrnn.ops.cuda.negacyclic_fft import LARGEST_RESIDUE, RowPlan

# For measurements only: "off" selects the kernels without tensor cores, "wide" blocks of 16 warps.
_EXPERIMENT = os.environ.get("DLRNN_TENSOR_FFT", "")

FILES = ("device.cuh", "tensor_fft.cuh", "tensor_convolution.cu")


@dataclass(frozen=True)
class TensorPlan:
    """How the rows of a `RowPlan` are convolved: a block has `warps` and processes `slots` rows at
    a time, in backward half as many pairs of rows.
    """

    residues: int
    segments: int

    @property
    def warps(self) -> int:
        """Warps of a block; 16 run on a multiprocessor, with 128 registers for each thread."""
        return 8 if self.residues == 1 and _EXPERIMENT != "wide" else 16

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor."""
        return 16 // self.warps

    @property
    def slots(self) -> int:
        """Rows in shared memory."""
        if self.residues == 1:
            return self.warps // 2
        return 4 if self.residues == 2 else 2

    def rows(self, is_forward: bool) -> int:
        """Rows of u that a block processes at a time."""
        return self.slots if is_forward else self.slots // 2

    @property
    def shared_bytes(self) -> int:
        """Tiles, stages, the largest numbers that warps have found, an mbarrier."""
        tiles, stage = 16 * self.residues * (1024 + 16), 16 * self.segments * (512 + 16)
        return self.slots * (tiles + stage) + 12 * self.warps + 8

    @property
    def defines(self) -> nvrtc.Defines:
        """The constants of the source."""
        return (
            ("RESIDUES", self.residues),
            ("SEGMENTS", self.segments),
            ("SLOTS", self.slots),
            ("WARPS", self.warps),
            ("BLOCKS", self.blocks),
        )


def tensor_plan(plan: RowPlan, dtype: torch.dtype) -> TensorPlan | None:
    """The plan for rows in bf16 of more than 2048 entries on GPUs with Hopper's shared memory."""
    if (
        _EXPERIMENT == "off"
        or dtype != torch.bfloat16
        or not plan.staged
        or plan.residue_size < LARGEST_RESIDUE
    ):
        return None
    return TensorPlan(plan.residues, plan.entries // LARGEST_RESIDUE)


@cache
def tensor_tables(plan: TensorPlan, device: torch.device) -> Tensor:
    """The tables of tensor_convolution.cu: fp16 from float64, in the layout of mma's operand A."""
    i = torch.arange(16, dtype=torch.float64)
    columns = torch.arange(LARGEST_RESIDUE // 16, dtype=torch.float64)
    product = i[:, None] * i
    matrices, inverses, twiddles = [], [], []
    for residue in range(plan.residues):
        x = (0.25 + residue) / plan.residues
        for segment in range(plan.segments):
            fold = (0.25 + residue) * segment / plan.residues
            matrix = roots(fold + (x + i[:, None]) * i / 16) / 4  # rows: A
            matrices.append(_fragments(matrix))
            inverses.append(_fragments(matrix.transpose(0, 1)))
        of_tiles = (x + i[:, None]) * columns / LARGEST_RESIDUE  # (x + A) (16 p + q) / 4096
        twiddles += [_fragments(roots(tile.view(16, 16).T)) for tile in of_tiles]
    dft = _fragments(roots(product / 16) / 4)
    first = [dft, dft[..., [0, 2, 1, 3]], _fragments(roots(product / 256))]
    return torch.cat(first + matrices + inverses + twiddles).to(device)


def _fragments(matrix: Tensor) -> Tensor:
    """A complex matrix [16, 16, 2] as [2, 32, 4] pairs of fp16: real, imaginary parts of lanes."""
    halves = matrix.half().view(2, 8, 2, 4, 2, 2)  # row / 8, g, column / 8, t, column % 2, part
    order = halves.permute(5, 1, 3, 2, 0, 4)  # part, g, t, column / 8, row / 8, column % 2
    return order.contiguous().view(torch.int32).view(2, 32, 4)
