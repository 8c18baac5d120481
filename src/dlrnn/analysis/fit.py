"""The weights that give a kernel, and how large they must be."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dlrnn import ops
from dlrnn.analysis.systems import log_pairs
from dlrnn.ops.checks import require, require_shape, require_tensor


class KernelFit(NamedTuple):
    """`w` [H, N], complex128 or float64 like lambda; `|fit - K| / |K|`; the condition number."""

    w: Tensor
    residual: float
    condition: float


def fit_kernel(kernel: Tensor, lam: Tensor) -> KernelFit:
    """The w that best solves `Re(w P) = K` (`w P = K` for a real lam), where `P_nk = lambda_n^k`.

    The solution of least squares by the singular values of P (of `[Re P; -Im P]`, 2 N x L, for a
    complex lam); of several solutions the one of least norm. K is [H, L] or [L], lam [N].
    The condition number is the ratio of the largest to the smallest of its min(2 N, L) or min(N, L)
    singular values: infinite if one is 0. Above 1e16 it only says that one is nearly 0.
    """
    require_tensor("kernel", kernel)
    expected = "kernel must have the shape [H, L] or [L] and not be empty"
    fits = kernel.dim() in (1, 2) and kernel.numel() >= 1
    require(fits, f"{expected}, not {list(kernel.shape)}")
    require(not kernel.is_complex(), "kernel must be real: fit its real and imaginary parts apart")
    require_shape("lam", lam, ("N",))
    require(lam.numel() >= 1, "lam is empty: a kernel needs at least one state")
    target = kernel.detach().cpu().double().reshape(-1, kernel.shape[-1])
    rows = _rows(lam.detach().cpu(), target.shape[1])  # [N or 2 N, L]
    finite = bool(rows.isfinite().all()) and bool(target.isfinite().all())
    require(finite, "kernel, lam and lam^(L-1) must be finite: is some |lambda| above 1?")
    U, sigma, V_t = torch.linalg.svd(rows, full_matrices=False)
    used = sigma > sigma[0] * max(rows.shape) * torch.finfo(torch.float64).eps
    flat = (target @ V_t.T)[:, used] / sigma[used] @ U[:, used].T  # [H, N or 2 N]
    error, norm = (torch.linalg.norm(x).item() for x in (flat @ rows - target, target))
    low, high = sigma[-1].item(), sigma[0].item()
    w = torch.complex(*flat.chunk(2, dim=1)) if lam.is_complex() else flat
    return KernelFit(w, error / norm if norm else 0.0, high / low if low else math.inf)


def _rows(lam: Tensor, length: int) -> Tensor:
    position = torch.arange(length)
    if not lam.is_complex():
        return lam.double()[:, None] ** position
    P = ops.powers(log_pairs(lam.to(torch.complex128))[:, None], position)
    return torch.cat((P[..., 0], -P[..., 1]))


class ShiftWeights(NamedTuple):
    """The weights with which N states shift by N - 1: `log2 max |w|` and the condition number."""

    N: int
    log2_real: float
    log2_complex: float
    condition_real: float
    condition_complex: float


def shift_weight_norms(sizes: Iterable[int]) -> list[ShiftWeights]:
    """The weights of the one-hot kernel at k = N - 1, N = L, for real and for complex lambda.

    Real: for any lambda in [0, 1], `w_i = 1 / prod_{j != i} (lambda_i - lambda_j)`. Since
    `sum_i w_i p(lambda_i)` is the leading coefficient of any p of degree N - 1, the Chebyshev
    polynomial (at most 1 on [0, 1], leading coefficient 2^(2N - 3)) shows for N >= 2 that
    `max |w| >= 2^(2N - 3) / N`. The Chebyshev points taken here come within 1 bit of that:
    `max |w| = 2^(2N - 2) / N` for odd N, a little less for even N. Computed as a sum of logarithms,
    far beyond the range of float64. Complex: `lambda = exp(2 pi i n / N)` and `max |w| = 1 / N`.
    """
    rows = []
    for size in sizes:
        require(size >= 1, f"a size is a number of states, at least 1, not {size}")
        one_hot, points = torch.eye(size, dtype=torch.float64)[-1], chebyshev_points(size)
        phase = 2 * math.pi / size * torch.arange(size, dtype=torch.float64)
        real = fit_kernel(one_hot, points)
        dft = fit_kernel(one_hot, torch.polar(torch.ones_like(phase), phase))
        logs = float(log2_shift_weights(points).max()), math.log2(dft.w.abs().max().item())
        rows.append(ShiftWeights(size, *logs, real.condition, dft.condition))
    return rows


def chebyshev_points(size: int) -> Tensor:
    """The zeros in [0, 1] of the Chebyshev polynomial of this degree."""
    angle = (torch.arange(size, dtype=torch.float64) + 0.5) * (math.pi / size)
    return (1 + angle.cos()) / 2


def log2_shift_weights(lam: Tensor) -> Tensor:
    """`log2 |w_i| = -sum_{j != i} log2 |lambda_i - lambda_j|`, see `shift_weight_norms`."""
    distance = (lam[:, None] - lam).abs()
    return -distance.fill_diagonal_(1).log2().sum(dim=1)
