"""Tables of the complex FFT in fft.cuh."""

from functools import cache

import torch
from torch import Tensor


def middle_radices(log2_size: int) -> tuple[int, int]:
    """RADIX_A and RADIX_B of fft.cuh: N = 16 A B 16."""
    first = 16 if log2_size == 12 else min(8, 2 ** (log2_size - 8))
    return first, 2 ** (log2_size - 8) // first


@cache
def tables(log2_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`(w_M^i, w_M^4i)` of each pass, `w_M = exp(-2 pi i / M)`, and `w_4N^i`; from float64."""
    size, blocks = 2**log2_size, 2**log2_size
    powers = []
    for radix in (16, *middle_radices(log2_size)):
        stride = blocks // radix
        i = torch.arange(stride, dtype=torch.float64)
        powers.append(torch.cat((roots(i / blocks), roots(4 * i / blocks)), dim=1))
        blocks = stride
    twist = roots(torch.arange(size // 16, dtype=torch.float64) / (4 * size))
    return torch.cat(powers).float().to(device), twist.float().to(device)


def roots(x: Tensor) -> Tensor:
    """`e(x) = exp(-2 pi i x)` as pairs."""
    angle = -2 * torch.pi * x
    return torch.stack((angle.cos(), angle.sin()), dim=-1)
