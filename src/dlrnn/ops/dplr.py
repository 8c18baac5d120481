"""S4's kernel: a system with a diagonal-plus-low-rank matrix, sampled with the bilinear rule.

    x' = (Lambda - P P^*) x + B u ,   y = C x

of size N in conjugate pairs, of which one half, M = N / 2, is held. With a step Delta and
`mu = Delta Lambda / 2` the transform of the first L entries of its kernel is, at the frequency
`theta`, with `c, s = cos, sin(theta / 2)` and the Woodbury identity,

    Delta e^(i theta / 2) / 2 (R_CB - Delta c / 2  R_CP R_PB / (1 + Delta c / 2  R_PP)) ,
    R_vw = sum_n v_n w_n / (i s - mu_n c) + its conjugate pair ,

where C stands for `C (I - Abar^L)`: exact for every length, and no frequency is singular.
A pair is a section of second order with real weights,

    v / (i s - mu c) + v* / (i s - mu* c)
        = (2 Re(v) i s - 2 Re(v mu*) c) / (|mu|^2 c^2 - s^2 - 2 i s c Re(mu)) ,

so that all sums are real matrix products with one table, made in tiles and again in backward;
on a GPU one kernel makes the spectrum, and two its gradients (ops/triton/sections.py), from
weights that have kernels too (ops/triton/dplr_weights.py).
All is float64. As Re Lambda < 0, Abar is a contraction: nothing grows, in no power.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dlrnn.ops.checks import require_no_transform
from dlrnn.ops.dispatch import uses_fused
from dlrnn.ops.matrix_power import matrix_power, times_power
from dlrnn.ops.pairs import conjugate, pair_product
from dlrnn.ops.sections import half_angles, section_sums, to_kernel


class DPLR(NamedTuple):
    """The system: float64 pairs, R outputs for each of H channels, each with its own step."""

    Lambda: Float[Tensor, "M 2"]
    P: Float[Tensor, "M 2"]
    B: Float[Tensor, "M 2"]
    C: Float[Tensor, "R H M 2"]
    dt: Float[Tensor, " H"]


def legs(states: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lambda, P and B [N/2, 2] of HiPPO-LegS, in coordinates in which its normal part is diagonal.

    `A_nk = -sqrt((2 n + 1)(2 k + 1))` below the diagonal and `-(n + 1)` on it; with
    `P_n = sqrt(n + 1/2)`, `A + P P^T` is -1/2 plus a skew matrix, hence normal; `B = sqrt(2) P`.
    The phases of the coordinates are free, and such that P is positive.
    """
    P = (torch.arange(states, dtype=torch.float64, device="cpu") + 0.5).sqrt()
    outer = torch.outer(P, P)
    frequency, V = torch.linalg.eigh(1j * (outer.tril(-1) - outer.triu(1)))
    half = slice(states // 2, None)  # positive frequencies
    Lambda = torch.stack((torch.full_like(frequency, -0.5), frequency), dim=-1)[half]
    size = (V.mH @ P.to(V.dtype)).abs()[half]
    P = torch.stack((size, torch.zeros_like(size)), dim=-1)
    return Lambda, P, math.sqrt(2) * P


def solve(system: DPLR, v: Tensor) -> Tensor:
    """`(I - Delta/2 A)^-1 v`, by the Sherman-Morrison formula; v [..., H, M, 2]."""
    P, dt = system.P, system.dt
    mu = dt[:, None, None] / 2 * system.Lambda
    below = torch.stack((1 - mu[..., 0], -mu[..., 1]), dim=-1)
    inverse = conjugate(below) / below.square().sum(-1, keepdim=True)  # [H, M, 2]
    v = pair_product(inverse, v)
    gain = 1 + dt * (P.square().sum(-1) * inverse[..., 0]).sum(-1)  # [H]
    along = dt / gain * (P * v).sum((-1, -2))
    return v - along[..., None, None] * pair_product(inverse, P)


def transition(system: DPLR) -> Tensor:
    """Abar as a real matrix for rows, `x_next = x @ step`, [H, N, N]: what it does to a basis."""
    states = 2 * system.P.shape[0]
    basis = torch.eye(states, dtype=torch.float64, device=system.P.device).view(states, 1, -1, 2)
    return (2 * solve(system, basis) - basis).flatten(-2).transpose(0, 1)


def readout(system: DPLR) -> Tensor:
    """`2 Re(C x)` as a real row, [R, H, N]."""
    return 2 * conjugate(system.C).flatten(-2)


# ---------------------------------------------------------------------------------- the kernel


def dplr_kernel(system: DPLR, length: int) -> Float[Tensor, "R H {length}"]:
    """`K_k = C Abar^k Bbar` for k = 0 .. length-1."""
    require_no_transform()
    if _is_fused(system):
        tiles = _channels(system.dt.shape[0], length, 2**24)
        return torch.cat([_fused_tile(_part(system, h), length) for h in tiles], dim=1)
    system = _corrected(system, length)
    kernels: list[Tensor] = [
        checkpoint(_tile, _part(system, h), length, **_CHECKPOINT)
        for h in _channels(system.dt.shape[0], length)
    ]
    return torch.cat(kernels, dim=1)


def _corrected(system: DPLR, length: int) -> DPLR:
    """With `C (I - Abar^L)` for C."""
    power = matrix_power(transition(system), length)
    c = readout(system)  # [R, H, N]
    c = c - torch.einsum("rhn,hmn->rhm", c, power)
    return system._replace(C=conjugate(c.unflatten(-1, (-1, 2))) / 2)


def _part(system: DPLR, h: slice) -> DPLR:
    return system._replace(C=system.C[:, h], dt=system.dt[h])


_CHECKPOINT: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


def _channels(channels: int, length: int, numbers: int = 2**20) -> Iterator[slice]:
    """A few at a time: the spectra of all could be larger than a batch of inputs."""
    if channels * length <= numbers:
        yield slice(0, channels)
        return
    step = max(1, numbers // length)
    for start in range(0, channels, step):
        yield slice(start, min(start + step, channels))


def _tile(system: DPLR, length: int) -> Tensor:
    """Sums, Woodbury's correction and the inverse transform, for a C that is corrected for L."""
    kernel: Tensor = to_kernel(_spectrum(*_weights(system), system.dt, length), length)
    return kernel.transpose(0, 1)  # [R, H, L]


def _weights(system: DPLR) -> tuple[Tensor, Tensor, Tensor]:
    """Of the sections, [H, 4 R + 4, M]: CB, CP, PB, PP, even and odd; a and b, [H, M]."""
    Lambda, P, B, C, dt = system
    mu = dt[:, None, None] / 2 * Lambda  # [H, M, 2]
    P_conj = conjugate(P).expand_as(mu)
    numerators = torch.stack(
        (*pair_product(C, B), *pair_product(C, P), pair_product(P_conj, B), pair_product(P_conj, P))
    )  # [2 R + 2, H, M, 2]
    weights = torch.cat((2 * numerators[..., 0], 2 * (numerators * mu).sum(-1)))
    return weights.transpose(0, 1), mu[..., 0], mu.square().sum(-1)


def _spectrum(weights: Tensor, a: Tensor, b: Tensor, dt: Tensor, length: int) -> Tensor:
    """Of the kernel, [H, R, F, 2]."""
    outputs = weights.shape[1] // 4 - 1
    sums = section_sums(weights, a, b, length, 1)
    cos, sin = half_angles(length, dt.device)
    even, odd = sums.chunk(2, dim=1)  # [H, 2 R + 2, F, 2]
    R = torch.stack(
        (-sin * even[..., 1] - cos * odd[..., 0], sin * even[..., 0] - cos * odd[..., 1]), dim=-1
    )
    CB, CP, PB, PP = R[:, :outputs], R[:, outputs:-2], R[:, -2:-1], R[:, -1:]
    scale = (dt[:, None, None] / 2 * cos)[..., None]  # [H, 1, F, 1]
    scaled = scale * PP
    below = torch.stack((1 + scaled[..., 0], scaled[..., 1]), dim=-1)
    correction = pair_product(pair_product(CP, PB), conjugate(below))
    correction = scale * correction / below.square().sum(-1, keepdim=True)
    turn = torch.stack((cos, sin), dim=-1) * (dt[:, None, None, None] / 2)
    return pair_product(turn, CB - correction)


# ---------------------------------------------------------------------------------- on a GPU


def _is_fused(system: DPLR) -> bool:
    """Not in a compiled graph, which serves all lengths: the kernels go by a length's digits."""
    outputs, channels = system.C.shape[:2]
    fits = outputs <= 2 and channels < 2**16 and system.C.numel() > 0
    fits = fits and not torch.compiler.is_compiling()
    device = system.dt.device
    return uses_fused(
        "sections", system.dt, lambda: fits and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def _fused_tile(system: DPLR, length: int) -> Tensor:
    from dlrnn.ops.triton import dplr_weights

    if 2 * system.P.shape[0] <= dplr_weights.LARGEST:
        weights, a, b = _Weights.apply(*system, length)  # type: ignore[no-untyped-call]
    else:
        c = readout(system)
        rows = times_power(c.transpose(0, 1), transition(system).mT, length)
        c = c - rows.transpose(0, 1)
        weights, a, b = _weights(system._replace(C=conjugate(c.unflatten(-1, (-1, 2))) / 2))
    spectrum = _Spectrum.apply(weights, a, b, system.dt, length)  # type: ignore[no-untyped-call]
    kernel: Tensor = to_kernel(spectrum, length)
    return kernel.transpose(0, 1)


class _Weights(torch.autograd.Function):
    """`_weights` of the corrected system, by kernels of our own."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        from dlrnn.ops.triton import dplr_weights

        *system, ctx.length = inputs
        weights, a, b, corrected = dplr_weights.weights(_contiguous(system), ctx.length)
        ctx.save_for_backward(*system, corrected)
        return weights, a, b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from dlrnn.ops.triton import dplr_weights

        *system, corrected = ctx.saved_tensors
        if not torch.is_grad_enabled():
            found = dplr_weights.gradients(grads, _contiguous(system), corrected, ctx.length)
            return *found, None
        views = _views(system)
        defined = _weights(_corrected(DPLR(*views), ctx.length))
        return *_derivatives(defined, views, grads), None


class _Spectrum(torch.autograd.Function):
    """`_spectrum` by kernels of our own."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        from dlrnn.ops.triton import sections

        weights, a, b, dt, ctx.length = inputs
        angles = torch.stack(half_angles(ctx.length, dt.device))
        ctx.save_for_backward(weights, a, b, dt, angles)
        return sections.spectrum(weights, a, b, dt, angles)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from dlrnn.ops.triton import sections

        weights, a, b, dt, angles = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *sections.gradients(grad, weights, a, b, dt, angles), None
        weights, a, b, dt = views = _views([weights, a, b, dt])
        defined = _spectrum(weights, a, b, dt, ctx.length)
        return *_derivatives((defined,), views, (grad,)), None


def _contiguous(system: list[Tensor]) -> DPLR:
    return DPLR(*(part.contiguous() for part in system))


def _views(inputs: list[Tensor]) -> list[Tensor]:
    """Inputs may depend on each other elsewhere: that path is no part of an op's gradient."""
    return [tensor.view_as(tensor) for tensor in inputs]


def _derivatives(
    defined: tuple[Tensor, ...], inputs: list[Tensor], grads: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Gradients that have gradients."""
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    outputs, given = zip(
        *((value, grad) for value, grad in zip(defined, grads, strict=True) if value.requires_grad),
        strict=True,
    )
    found = iter(torch.autograd.grad(outputs, needed, given, create_graph=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]
