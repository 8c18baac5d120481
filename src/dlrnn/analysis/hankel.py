"""Balanced coordinates of a DLR, from a closed form of the square root of its Gramian.

The kernel `K_k = Re(sum_n w_n lambda_n^k)` is a real linear system with the 2 N modes lambda and
conj(lambda). Its controllability Gramian is the Cauchy matrix `1 / (1 - lambda_m conj(lambda_n))`,
whose eigenvalues soon fall below rounding: a numerical square root would lose half of the digits.
Its square root is known, though: a chain of all-pass sections, one for each state,

    x_k  = A x_{k-1} + b v_k     [ A b ]   [ p/2 + r/2     e      g_+ ]    p = 2 Re lambda
    v'_k = c x_{k-1} + d v_k     [ c d ] = [    -e     p/2 - r/2  g_- ]    q = 1 - r = |lambda|^2
                                           [    g_+      -g_-      q  ]    e = |1 - lambda^2| / 2
    g_+ = sqrt(r/2) |1 - lambda|,   g_- = sqrt(r/2) |1 + lambda|

each driven by the output v' of the one before, has the same modes. As these matrices are orthogonal
so is that of the chain, and its Gramian is the identity (Kautz functions). In its coordinates the
Hankel operator of channel h is the matrix `Re(T^T diag(w_h) T)`, where T gives the modes as
combinations of the states; its singular values come out as right as lambda and w are.
"""

from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

WORKSPACE = 2**22  # numbers in a temporary


class Balanced(NamedTuple):
    """`x_k = A x_{k-1} + B u_k`, `y_k = C x_k`: both Gramians are diag(singular_values)."""

    A: Float[Tensor, "n n"]
    B: Float[Tensor, " n"]
    C: Float[Tensor, "H n"]
    singular_values: Float[Tensor, " n"]

    def truncated(self, order: int) -> tuple[Tensor, Tensor, Tensor]:
        """A, B, C of the first `order` states."""
        return self.A[:order, :order], self.B[:order], self.C[:, :order]

    def rank(self) -> int:
        """How many singular values stand out of rounding; at least 1."""
        sigma = self.singular_values
        floor = sigma[0] * len(sigma) * torch.finfo(sigma.dtype).eps
        return max(1, int((sigma > floor).sum()))


def balance(log_lambda: Complex[Tensor, " N"], w: Complex[Tensor, "H N"]) -> Balanced:
    """The system of 2 N real states whose kernel is `Re(w P)`; |lambda| < 1. O(H N^3)."""
    A, B, T = orthonormal_states(log_lambda)
    _, sigma, U_t = torch.linalg.svd(_hankel_root(T, w))
    scale = torch.where(sigma > 0, sigma, 1).sqrt()
    U = U_t.T
    return Balanced(
        (U_t @ A @ U) * scale[:, None] / scale,
        (U_t @ B) * scale,
        (w @ T).real @ U / scale,
        sigma,
    )


def orthonormal_states(log_lambda: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A [2N, 2N] and B [2N] of the chain, and the modes T [N, 2N] in its coordinates."""
    states, lam = len(log_lambda), log_lambda.exp()
    p, q = 2 * lam.real, (2 * log_lambda.real).exp()
    r = -torch.expm1(2 * log_lambda.real)
    plus, minus = 1 + lam, 1 - lam
    g = (r / 2).sqrt()[:, None] * torch.stack((minus.abs(), plus.abs()), dim=1)  # [N, 2]
    e = (plus * minus).abs() / 2
    numerators = torch.stack((plus, minus), dim=1)
    A = r.new_zeros(2 * states, 2 * states)
    B, T = r.new_zeros(2 * states), lam.new_zeros(states, 2 * states)
    output, gain = r.new_zeros(2 * states), 1.0  # v' = output . x_{k-1} + gain u_k
    passed = torch.ones_like(lam)  # the same at each lambda
    for n in range(states):
        here = slice(2 * n, 2 * n + 2)
        A[here] = g[n, :, None] * output
        A[here, here] = torch.stack((p[n] + r[n], 2 * e[n], -2 * e[n], p[n] - r[n])).view(2, 2) / 2
        B[here] = g[n] * gain
        own, conjugate = log_lambda[n], log_lambda[n].conj()
        poles = torch.expm1(log_lambda + own) * torch.expm1(log_lambda + conjugate)
        T[:, here] = (passed / poles)[:, None] * g[n] * numerators
        passed = passed * (lam - lam[n]) * (lam - lam[n].conj()) / poles
        output, gain = output * q[n], gain * q[n].item()
        output[here] = g[n] * g.new_tensor((1, -1))
    return A, B, T


def _hankel_root(T: Tensor, w: Tensor) -> Tensor:
    """The triangular R with `R^T R = sum_h M_h^T M_h`, `M_h = Re(T^T diag(w_h) T)`."""
    order = T.shape[1]
    if len(w) > order:  # 2 N combinations of the channels have the same sum
        w = torch.complex(*torch.linalg.qr(torch.cat((w.real, w.imag), 1)).R.chunk(2, dim=1))
    parts = torch.cat((T.real, T.imag)).T  # [2 N, 2 N]
    R = parts.new_zeros(0, order)
    block = max(1, WORKSPACE // order**2)
    for h in range(0, len(w), block):
        weighted = w[h : h + block, :, None] * T
        M = parts @ torch.cat((weighted.real, -weighted.imag), dim=1)  # [h, 2 N, 2 N]
        R = torch.linalg.qr(torch.cat((R, M.reshape(-1, order))), mode="r").R
    return R
