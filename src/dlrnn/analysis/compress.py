"""Compress a layer to fewer states by balanced truncation, with a bound on the error.

The kernel `K_k = Re(sum_n w_n lambda_n^k)` is a real linear system with the 2 N modes lambda and
conj(lambda). Its controllability Gramian is the Cauchy matrix `1 / (1 - lambda_m conj(lambda_n))`,
whose eigenvalues soon fall below rounding: a numerical square root would lose half of the digits.
But its square root is known. A chain of all-pass sections, one for each state,

    x_k  = A x_{k-1} + b v_k     [ A b ]   [ p/2 + r/2     e      g_+ ]    p = 2 Re lambda
    v'_k = c x_{k-1} + d v_k     [ c d ] = [    -e     p/2 - r/2  g_- ]    q = 1 - r = |lambda|^2
                                           [    g_+      -g_-      q  ]    e = |1 - lambda^2| / 2
    g_+ = sqrt(r/2) |1 - lambda|,   g_- = sqrt(r/2) |1 + lambda|

each driven by the output v' of the section before, has the same modes. These matrices are
orthogonal; therefore the chain is orthogonal too, and its Gramian is the identity (Kautz
functions). In its coordinates the Hankel operator of channel h is the matrix
`Re(T^T diag(w_h) T)`, where T gives the modes as combinations of the states. Its singular values
are as accurate as lambda and w.
"""

import copy
import math
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from dlrnn.analysis.systems import System, from_linear_rnn, log_pairs, write_modes
from dlrnn.nn import DLR
from dlrnn.ops.checks import require, require_finite

WORKSPACE = 2**22  # numbers in a temporary


class Balanced(NamedTuple):
    """`x_k = A x_{k-1} + B u_k`, `y_k = C x_k`: both Gramians are diag(singular_values)."""

    A: Float[Tensor, "n n"]
    B: Float[Tensor, " n"]
    C: Float[Tensor, "H n"]
    singular_values: Float[Tensor, " n"]

    def truncated(self, order: int) -> System:
        """The first `order` states, with one mode for each pair of conjugate eigenvalues.

        `w lambda^k + conj(w lambda^k) = Re(2 w lambda^k)`.
        """
        whole = from_linear_rnn(self.A[:order, :order], self.B[:order], self.C[:, :order])
        upper, twice = whole.lam.imag >= 0, torch.where(whole.lam.imag > 0, 2, 1)
        return System(whole.lam[upper], (twice * whole.w)[:, upper])

    def rank(self) -> int:
        """The number of singular values above rounding errors."""
        sigma = self.singular_values
        floor = sigma[0] * len(sigma) * torch.finfo(sigma.dtype).eps
        return int((sigma > floor).sum())


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
        pole, conjugate = log_lambda[n], log_lambda[n].conj()
        poles = torch.expm1(log_lambda + pole) * torch.expm1(log_lambda + conjugate)
        T[:, here] = (passed / poles)[:, None] * g[n] * numerators
        passed = passed * (lam - lam[n]) * (lam - lam[n].conj()) / poles
        output, gain = output * q[n], gain * q[n].item()
        output[here] = g[n] * g.new_tensor((1, -1))
    return A, B, T


def _hankel_root(T: Tensor, w: Tensor) -> Tensor:
    """The triangular R with `R^T R = sum_h M_h^T M_h`, `M_h = Re(T^T diag(w_h) T)`."""
    order = T.shape[1]
    if len(w) > order:  # 2 N combinations of the channels give the same sum
        w = torch.complex(*torch.linalg.qr(torch.cat((w.real, w.imag), 1)).R.chunk(2, dim=1))
    parts = torch.cat((T.real, T.imag)).T  # [2 N, 2 N]
    R = parts.new_zeros(0, order)
    for rows in w.split(max(1, WORKSPACE // order**2)):
        weighted = rows[:, :, None] * T
        M = parts @ torch.cat((weighted.real, -weighted.imag), dim=1)  # [h, 2 N, 2 N]
        R = torch.linalg.qr(torch.cat((R, M.reshape(-1, order))), mode="r").R
    return R


# ---------------------------------------------------------------------------------- compression


class Compression(NamedTuple):
    """A layer with fewer states, its error, and the 2 N singular values of the given layer."""

    layer: DLR
    bound: float
    error: float
    singular_values: Float[Tensor, " n"]


def compress(layer: DLR, d_state: int) -> Compression:
    """A layer with at most `d_state` states whose kernels are close to those of `layer`.

    The map from one input to all H kernels (2 H if bidirectional) is truncated in balanced
    coordinates and diagonalised again. A pair of conjugate modes is one state, and so is a real
    mode. With the transfer functions of the kernels, `G_h(omega) = sum_k K_hk e^(-i omega k)`:

        error = max_omega |G - G'|  <=  bound = 2 (sum of the singular values left out)

    where | | is the norm over the rows, so that for every input and channel
    `|y_h - y'_h| <= bound |u_h|` before the activation (sqrt(2) bound if bidirectional). `error` is
    measured on a grid of frequencies. Both hold for kernels without a kernel_length, in float64
    (whose rounding is about 1e-10 of the largest singular value), before the new lambda and W are
    rounded to the layer's dtype. Rounding to fp32 changes the phase of a state that remembers 1000
    positions by up to 1e-4: compress `layer.double()` where that is too much.

    Options, D, `out` and dtype stay, except that a layer with real=True becomes complex, because
    its reduced modes may be complex. States that contribute nothing are removed even when d_state
    has room for them. If no state can be removed, the result is a copy. The cost is O(H N^3).
    """
    require(isinstance(layer, DLR), f"compress takes a DLR layer, not a {type(layer).__name__}")
    advice = "make one of a DLR-prod with layer_of(prod_as_dlr(system_of(layer)))"
    require(layer.cast == "real", f"compress takes a layer with cast='real': {advice}")
    given: object = d_state
    between = f"between 1 and the layer's {layer.d_state}"
    fits = isinstance(given, int) and 1 <= given <= layer.d_state
    require(fits, f"d_state must be {between}, not {d_state!r}")
    for name in layer.kernel_parameters:
        if (parameter := getattr(layer, name)) is not None:
            require_finite(name, parameter)
    W, pairs, _ = (values.detach().cpu().double().contiguous() for values in layer.modes())
    log_lambda, w = torch.view_as_complex(pairs), torch.view_as_complex(W)
    endless = int((log_lambda.real.exp() == 1).sum())
    require(
        endless == 0,
        f"compress needs |lambda| < 1, and {endless} of the {layer.d_state} states have"
        " |lambda| = 1: they never decay, and no bound holds for all lengths",
    )
    whole = balance(log_lambda, w)
    reduced, order = _reduce(whole, d_state)
    sigma = whole.singular_values
    if len(reduced.lam) >= layer.d_state:
        return Compression(copy.deepcopy(layer), 0.0, 0.0, sigma)
    error = _largest_gain(
        torch.cat((log_lambda, torch.view_as_complex(log_pairs(reduced.lam)))),
        torch.cat((w, -reduced.w), dim=1),
    )
    return Compression(_rebuilt(layer, reduced), 2 * sigma[order:].sum().item(), error, sigma)


def _reduce(whole: Balanced, d_state: int) -> tuple[System, int]:
    """The truncated system with `K = Re(w P)` of the largest order that fits d_state states.

    An order whose A cannot be diagonalised safely is skipped; order 1 always can be.
    """
    for order in range(min(whole.rank(), 2 * d_state), 1, -1):
        try:
            reduced = whole.truncated(order)
        except ValueError:
            continue
        if len(reduced.lam) <= d_state and reduced.lam.abs().max() < 1:
            return reduced, order
    return whole.truncated(1), 1


def _largest_gain(log_lambda: Complex[Tensor, " N"], w: Complex[Tensor, "H N"]) -> float:
    """`max_omega |G(omega)|`, on a grid that is finer near the phases of the lambdas."""
    offsets = torch.linspace(-4, 4, 33, dtype=torch.float64).sinh()  # in widths, up to 27
    width = -log_lambda.real[:, None].clamp(min=-1)
    near = (log_lambda.imag[:, None] + width * offsets).flatten()
    omega = torch.cat((near, torch.linspace(0, math.pi, 4097, dtype=torch.float64)))
    parts = omega.split(max(1, 2**20 // len(log_lambda)))
    return max(_gain(log_lambda, w, part).max().item() for part in parts)


def _gain(log_lambda: Tensor, w: Tensor, omega: Tensor) -> Tensor:
    """The norm over the rows of G.

    `G = sum_n (w_n / 2) / (1 - lambda_n e^(-i omega))` + the same with conj(w), conj(lambda).
    """
    turn = 1j * omega[:, None]
    plus, minus = torch.expm1(log_lambda - turn), torch.expm1(log_lambda.conj() - turn)
    G = -((1 / plus) @ w.T + (1 / minus) @ w.T.conj()) / 2  # [omega, H]
    gain: Tensor = torch.linalg.norm(G, dim=1)
    return gain


def _rebuilt(layer: DLR, system: System) -> DLR:
    """A copy of the layer with other modes."""
    options = layer.options() | {"d_state": len(system.lam), "real": False}
    with torch.device("meta"):  # draws no random numbers
        new = DLR(**options)
    new.to(layer.W.dtype).to_empty(device=layer.W.device)
    write_modes(new, system)
    with torch.no_grad():
        new.D.copy_(layer.D)
    if layer.out is not None:
        new.out = copy.deepcopy(layer.out)
    return new.train(layer.training)
