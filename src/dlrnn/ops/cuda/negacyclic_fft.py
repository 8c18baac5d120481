"""The plan of a negacyclic FFT (negacyclic_fft.cuh), and its tables."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.fft import roots

SHORTEST = 8  # log2 of a row's entries
LARGEST_RESIDUE = 4096


@dataclass(frozen=True)
class RowPlan:
    """How rows of up to `entries` real numbers are transformed, as N = `size` complex points.

    A team of M / 16 threads transforms a residue of M points, 16 of them in each thread. 512
    threads run on a multiprocessor: each has 128 registers, some of them for the spectrum of the
    kernel or the sum over the batch. A plan that is `staged` needs Hopper's shared memory; others
    have little more of it than the points.
    """

    size: int
    entries: int
    staged: bool = True

    @property
    def residue_size(self) -> int:
        """M."""
        return min(self.size, LARGEST_RESIDUE)

    @property
    def residues(self) -> int:
        """N / M."""
        return self.size // self.residue_size

    @property
    def team_size(self) -> int:
        """Threads of a team."""
        return self.residue_size // 16

    @property
    def teams(self) -> int:
        """Teams of a block."""
        return max(1, 128 // self.team_size) if self.one_team_per_row else 2

    @property
    def kernel_teams(self) -> int:
        """Teams of a block of kernel_spectrum.cu."""
        return self.teams if self.one_team_per_row else 1

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor."""
        return 512 // (self.teams * self.team_size)

    @property
    def multi_residue(self) -> bool:
        """More residues than teams: convolution_multi_residue.cu."""
        return self.residues > 2

    @property
    def one_team_per_row(self) -> bool:
        """A team transforms a whole row; else two teams share it."""
        return self.residues == 1

    def bytes(
        self,
        buffers: int,
        stages: int = 0,
        residues: int = 1,
        spectra: int = 0,
        large_tables: int = 0,
    ) -> int:
        """Shared memory: points, stages of rows, spectra of kernels, tables, barriers."""
        tables = 32 + residues * (self.residues + 36) + large_tables * 2 * self.team_size
        points = self.residue_size * (9 * buffers + 8 * spectra)
        return points + 4 * self.entries * stages + 16 * tables + 512

    @property
    def forward_bytes(self) -> int:
        """With two buffers for each team, so that two rows overlap; or with two stages."""
        if not self.staged:
            return self._unstaged_bytes()
        if self.multi_residue:
            return self.bytes(self.teams, 2, self.residues)
        stages, residues = (self.teams, 1) if self.one_team_per_row else (1, self.teams)
        return self.bytes(2 * self.teams, stages, residues)

    @property
    def backward_bytes(self) -> int:
        """With one buffer for each team, and the kernels' spectra; or with two stages."""
        if not self.staged:
            return self._unstaged_bytes(large_tables=2 if self.multi_residue else 0)
        if self.multi_residue:
            return self.bytes(self.teams, 2, self.residues, large_tables=2)
        stages, residues = (self.teams, 1) if self.one_team_per_row else (1, self.teams)
        return self.bytes(self.teams, stages, residues, residues, 1 + residues)

    def _unstaged_bytes(self, large_tables: int = 0) -> int:
        """With one buffer for each team."""
        return self.bytes(self.teams, residues=self.residues, large_tables=large_tables)


def plan_for(length: int, right: Tensor, left: Tensor) -> RowPlan:
    """The smallest plan for rows and kernels of these lengths.

    N is the length rounded up to a power of two. Beyond 8192 as few residues are used as possible:
    their 2 N real entries hold a row and what wraps around, which is as long as a kernel.
    """
    staged = is_staged(right.device)
    entries = 2 ** max(SHORTEST, (length - 1).bit_length())
    if entries <= 2 * LARGEST_RESIDUE:
        return RowPlan(entries, entries, staged)
    wraps = max(right.shape[1] - 1, left.shape[1])
    residues = max(2, -(-(length + wraps) // (2 * LARGEST_RESIDUE)))
    return RowPlan(residues * LARGEST_RESIDUE, entries, staged)


def is_staged(device: torch.device) -> bool:
    """Whether bulk copies load rows into shared memory, as on Hopper; it must be large enough."""
    return nvrtc.shared_memory_bytes(device) >= nvrtc.SHARED_MEMORY[9, 0]


@cache
def residue_tables(plan: RowPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    """`Tables` of negacyclic_fft.cuh, and the twists `conj(e(x j / M))`, j < M / 16, of each
    residue modulo `X^M - e(x)`; computed in float64.
    """
    members, middle = plan.team_size, plan.residue_size // 256
    j = torch.arange(members, dtype=torch.float64)
    small, large = [_seeds(-j[:16] / 16)], [_seeds(-16 * j / plan.residue_size)]
    factors, twists = [], []
    for residue in range(plan.residues):
        x = (0.25 + residue) / plan.residues
        sixteen = (x + j[:16]) / 16
        last = (sixteen[:, None] + j[:middle]) / middle
        segments = torch.arange(2 * plan.residues, dtype=torch.float64)
        small += [roots(x * segments).view(-1, 4), _seeds(x + j[:1]), _seeds(sixteen)]
        large.append(_seeds(last.flatten()))
        factors.append(_seeds(j[residue : residue + 1] / plan.residues / (16 * middle)))
        twists.append(roots(-x * j / plan.residue_size))
    tables = torch.cat(small + large + factors)
    return tables.float().to(device), torch.stack(twists).float().to(device)


def _seeds(x: Tensor) -> Tensor:
    """`e(x / 2), e(x / 4)` of all x, then `e(x / 8), e(x / 16)`."""
    return torch.cat(
        (roots(torch.stack((x / 2, x / 4), 1)), roots(torch.stack((x / 8, x / 16), 1)))
    ).flatten(1)
