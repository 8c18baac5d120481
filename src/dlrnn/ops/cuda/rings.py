"""What rings.cuh wants to know: how rows are done in rings, and their tables."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dlrnn.ops.cuda.fft import roots

SHORTEST = 8  # log2 of a row's entries
LARGEST_RING = 4096


@dataclass(frozen=True)
class Rows:
    """How rows of up to so many entries are done, in rings that have N points together.

    16 points a thread, M / 16 threads a team, and 512 threads a multiprocessor: every thread has
    128 registers, for the kernel or the sum over the batch.
    """

    size: int
    entries: int

    @property
    def ring(self) -> int:
        """M."""
        return min(self.size, LARGEST_RING)

    @property
    def rings(self) -> int:
        """N / M."""
        return self.size // self.ring

    @property
    def members(self) -> int:
        """Threads of a team."""
        return self.ring // 16

    @property
    def teams(self) -> int:
        """Of a block."""
        return max(1, 128 // self.members) if self.alone else 2

    @property
    def kernel_teams(self) -> int:
        """Of a block that makes kernels' spectra, or their gradients."""
        return self.teams if self.alone else 1

    @property
    def blocks(self) -> int:
        """Of a multiprocessor."""
        return 512 // (self.teams * self.members)

    @property
    def many(self) -> bool:
        """More rings than teams: many_rings.cu."""
        return self.rings > 2

    @property
    def alone(self) -> bool:
        """A team has a row; else two teams have one, with a ring each."""
        return self.rings == 1

    def bytes(
        self, buffers: int, boxes: int = 0, rings: int = 1, spectra: int = 0, long_tables: int = 0
    ) -> int:
        """Shared memory: points, rows that come in, kernels, tables, barriers."""
        tables = 32 + rings * (self.rings + 36) + long_tables * 2 * self.members
        return (
            self.ring * (9 * buffers + 8 * spectra) + 4 * self.entries * boxes + 16 * tables + 512
        )

    @property
    def forward_bytes(self) -> int:
        """Two places for the points of each team, so that rows overlap; or two rows."""
        if self.many:
            return self.bytes(self.teams, 2, self.rings)
        boxes, rings = (self.teams, 1) if self.alone else (1, self.teams)
        return self.bytes(2 * self.teams, boxes, rings)

    @property
    def backward_bytes(self) -> int:
        """One place, and the kernels; or two rows."""
        if self.many:
            return self.bytes(self.teams, 2, self.rings, long_tables=2)
        boxes, rings = (self.teams, 1) if self.alone else (1, self.teams)
        return self.bytes(self.teams, boxes, rings, rings, 1 + rings)

    @property
    def largest_bytes(self) -> int:
        """Of a block of any of the kernels: a later GPU may have less than a Hopper one."""
        return max(self.forward_bytes, self.backward_bytes, self.bytes(self.kernel_teams))


def rows_for(length: int, right: Tensor, left: Tensor) -> Rows:
    """N = L rounded up to a power of two. Beyond 8192 as few rings as do: their 2 N real entries
    hold a row and what wraps around, which is as long as a kernel.
    """
    entries = 2 ** max(SHORTEST, (length - 1).bit_length())
    if entries <= 2 * LARGEST_RING:
        return Rows(entries, entries)
    wraps = max(right.shape[1] - 1, left.shape[1])
    rings = max(2, -(-(length + wraps) // (2 * LARGEST_RING)))
    return Rows(rings * LARGEST_RING, entries)


@cache
def ring_tables(plan: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """What `Tables` of rings.cuh has, and `conj(e(x j / M))` of each ring X^M = e(x), j < M / 16;
    made in float64.
    """
    members, middle = plan.members, plan.ring // 256
    j = torch.arange(members, dtype=torch.float64)
    short, long, starts = [_entries(-j[:16] / 16)], [_entries(-16 * j / plan.ring)], []
    more = []
    for ring in range(plan.rings):
        x = (0.25 + ring) / plan.rings
        sixteen = (x + j[:16]) / 16
        last = (sixteen[:, None] + j[:middle]) / middle
        short.append(roots(x * torch.arange(2 * plan.rings, dtype=torch.float64)).view(-1, 4))
        short += [_entries(x + j[:1]), _entries(sixteen)]
        long.append(_entries(last.flatten()))
        more.append(_entries(j[ring : ring + 1] / plan.rings / (16 * middle)))
        starts.append(roots(-x * j / plan.ring))
    return torch.cat(short + long + more).float().to(device), torch.stack(starts).float().to(device)


def _entries(x: Tensor) -> Tensor:
    """`e(x / 2), e(x / 4)` of all x, then `e(x / 8), e(x / 16)`."""
    return torch.cat(
        (roots(torch.stack((x / 2, x / 4), 1)), roots(torch.stack((x / 8, x / 16), 1)))
    ).flatten(1)
