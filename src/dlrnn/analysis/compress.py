"""Fewer states for the same kernel, with a bound on what is lost: balanced truncation."""

import copy
import math
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from dlrnn.analysis.hankel import Balanced, balance
from dlrnn.analysis.systems import System, from_linear_rnn, log_pairs, write_modes
from dlrnn.nn import DLR
from dlrnn.ops.checks import require, require_finite


class Compression(NamedTuple):
    """`layer` has fewer states; see `compress` for `bound` and `error`.

    `singular_values` [2 N] are the Hankel singular values of the layer that was given.
    """

    layer: DLR
    bound: float
    error: float
    singular_values: Float[Tensor, " n"]


def compress(layer: DLR, d_state: int) -> Compression:
    """The layer with at most `d_state` states whose kernels are close to this layer's.

    Balanced truncation of the map from one input to all H kernels (2 H if bidirectional), then
    diagonalised again; a pair of conjugate modes is one state, and so is a real mode. With `G` the
    transfer functions of the kernels, `G_h(omega) = sum_k K_hk e^(-i omega k)`:

        error = max_omega |G - G'|  <=  bound = 2 (sum of the singular values left out)

    where | | is the norm over the rows, so that for every input and channel
    `|y_h - y'_h| <= bound |u_h|` before the activation (sqrt(2) bound if bidirectional). `error` is
    measured on a grid of frequencies. Both are about kernels that no kernel_length cuts, in float64
    (whose rounding is about 1e-10 of the largest singular value), before the new lambda and W are
    rounded to the layer's dtype. Rounding a phase to fp32 turns a state that remembers 1000
    positions by up to 1e-4: compress `layer.double()` where that is too much.

    Options, D, `out` and dtype stay, save that a layer with real=True comes back complex: its
    reduced modes may be. States that add nothing are left out even when d_state has room for
    them; where no state can be spared, a copy of the layer comes back. Costs O(H N^3).
    """
    require(isinstance(layer, DLR), f"compress takes a DLR layer, not a {type(layer).__name__}")
    require(
        layer.cast == "real",
        "compress takes a layer with cast='real': make one of a DLR-prod with"
        " layer_of(prod_as_dlr(system_of(layer)))",
    )
    given: object = d_state
    require(
        isinstance(given, int) and 1 <= given <= layer.d_state,
        f"d_state must be between 1 and the layer's {layer.d_state}, not {d_state!r}",
    )
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
    """The largest order that d_state states can hold, as a system with `K = Re(w P)`.

    An order whose A cannot be diagonalised safely is passed over; order 1 always can.
    """
    for order in range(min(whole.rank(), 2 * d_state), 1, -1):
        try:
            reduced = _merge_conjugates(from_linear_rnn(*whole.truncated(order)))
        except ValueError:
            continue
        if len(reduced.lam) <= d_state and reduced.lam.abs().max() < 1:
            return reduced, order
    return _merge_conjugates(from_linear_rnn(*whole.truncated(1))), 1


def _merge_conjugates(system: System) -> System:
    """`w lambda^k + conj(w lambda^k) = Re(2 w lambda^k)`: one state for a pair of modes."""
    upper = system.lam.imag >= 0
    twice = torch.where(system.lam.imag > 0, 2, 1)
    return System(system.lam[upper], (twice * system.w)[:, upper])


def _largest_gain(log_lambda: Complex[Tensor, " N"], w: Complex[Tensor, "H N"]) -> float:
    """`max_omega |G(omega)|`, on a grid that is dense and denser where a lambda resonates."""
    offsets = torch.linspace(-4, 4, 33, dtype=torch.float64).sinh()  # in widths: 27 at the ends
    width = -log_lambda.real[:, None].clamp(min=-1)
    near = (log_lambda.imag[:, None] + width * offsets).flatten()
    omega = torch.cat((near, torch.linspace(0, math.pi, 4097, dtype=torch.float64)))
    block = max(1, 2**20 // len(log_lambda))
    return max(
        _gain(log_lambda, w, omega[start : start + block]).max().item()
        for start in range(0, len(omega), block)
    )


def _gain(log_lambda: Tensor, w: Tensor, omega: Tensor) -> Tensor:
    """The norm over the rows of `G = sum_n (w_n / 2) / (1 - lambda_n e^(-i omega))` + its mirror
    image with conj(w), conj(lambda).
    """
    turn = 1j * omega[:, None]
    plus, minus = torch.expm1(log_lambda - turn), torch.expm1(log_lambda.conj() - turn)
    G = -((1 / plus) @ w.T + (1 / minus) @ w.T.conj()) / 2  # [omega, H]
    gain: Tensor = torch.linalg.norm(G, dim=1)
    return gain


def _rebuilt(layer: DLR, system: System) -> DLR:
    """The layer with other modes."""
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
