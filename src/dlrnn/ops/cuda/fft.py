"""What fft.cuh wants to know: how transforms of N points are spread, and their tables."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc


@dataclass(frozen=True)
class Plan:
    """How transforms of N points are spread: one a block, blocks a multiprocessor."""

    log2_size: int
    threads: int
    blocks: int

    @property
    def size(self) -> int:
        """N."""
        return 1 << self.log2_size

    @property
    def defines(self) -> nvrtc.Defines:
        """What the sources want to know at compile time."""
        return (
            ("STORAGE_BITS", 32),
            ("LOG2N", self.log2_size),
            ("CHANNELS", 1),
            ("THREADS", self.threads),
            ("BLOCKS", self.blocks),
        )


def middle_radices(log2_size: int) -> tuple[int, int]:
    """N = 16 A B 16, as in fft.cuh."""
    first = 16 if log2_size == 12 else min(8, 2 ** (log2_size - 8))
    return first, 2 ** (log2_size - 8) // first


@cache
def tables(log2_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`(w_M^i, w_M^4i)` of each pass, `w_M = exp(-2 pi i / M)`, and `w_4N^i`; made in float64."""
    size, blocks = 2**log2_size, 2**log2_size
    powers = []
    for radix in (16, *middle_radices(log2_size)):
        stride = blocks // radix
        i = torch.arange(stride, dtype=torch.float64)
        powers.append(torch.cat((roots(i / blocks), roots(4 * i / blocks)), dim=1))
        blocks = stride
    twist = roots(torch.arange(size // 16, dtype=torch.float64) / (4 * size))
    return torch.cat(powers).float().to(device), twist.float().to(device)


def roots(turns: Tensor) -> Tensor:
    """`e(turns) = exp(-2 pi i turns)` as pairs."""
    angle = -2 * torch.pi * turns
    return torch.stack((angle.cos(), angle.sin()), dim=-1)
