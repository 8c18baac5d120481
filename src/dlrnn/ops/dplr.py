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

so that all sums are real matrix products with one table, made in tiles and again in backward.
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
from dlrnn.ops.matrix_power import matrix_power
from dlrnn.ops.pairs import conjugate, pair_product


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
    power = matrix_power(transition(system), length)
    c = readout(system)  # [R, H, N]
    c = c - torch.einsum("rhn,hmn->rhm", c, power)
    C = conjugate(c.unflatten(-1, (-1, 2))) / 2
    kernels: list[Tensor] = [
        checkpoint(_tile, DPLR(*system[:3], C[:, h], system.dt[h]), length, **_CHECKPOINT)
        for h in _channels(system.dt.shape[0], length)
    ]
    return torch.cat(kernels, dim=1)


_CHECKPOINT: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


def _channels(channels: int, length: int) -> Iterator[slice]:
    """A few at a time: the spectra of all could be larger than a batch of inputs."""
    if channels * length <= 2**20:
        yield slice(0, channels)
        return
    step = max(1, 2**20 // length)
    for start in range(0, channels, step):
        yield slice(start, min(start + step, channels))


def _tile(system: DPLR, length: int) -> Tensor:
    """Sums, Woodbury's correction and the inverse transform, for a C that is corrected for L."""
    Lambda, P, B, C, dt = system
    outputs = C.shape[0]
    mu = dt[:, None, None] / 2 * Lambda  # [H, M, 2]
    P_conj = conjugate(P).expand_as(mu)
    numerators = torch.stack(
        (*pair_product(C, B), *pair_product(C, P), pair_product(P_conj, B), pair_product(P_conj, P))
    )  # [2 R + 2, H, M, 2]
    weights = torch.cat((2 * numerators[..., 0], 2 * (numerators * mu).sum(-1)))
    sums = _sections(weights.transpose(0, 1), mu[..., 0], mu.square().sum(-1), length, 1)
    cos, sin = _half_angles(length, dt.device)
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
    kernel: Tensor = _to_kernel(pair_product(turn, CB - correction), length)
    return kernel.transpose(0, 1)  # [R, H, L]


# ---------------------------------------------------------------------------------- sections


@torch.library.custom_op("dlrnn::sections", mutates_args=())
def _sections(weights: Tensor, a: Tensor, b: Tensor, length: int, order: int) -> Tensor:
    """`sum_n weights_n / q_n^order` with `q = b c^2 - s^2 - 2 i s c a`; [H, W, M] -> [H, W, F, 2].

    The F = L // 2 + 1 frequencies of a real transform.
    """
    sums = weights.new_empty(*weights.shape[:2], length // 2 + 1, 2)
    cos, sin = _half_angles(length, a.device)
    for h, f in _tiles(a, length):
        table = _table(a[h], b[h], cos[f], sin[f], order)
        products = weights[h] @ table.flatten(2)
        sums[h, :, f] = products.unflatten(-1, (2, -1)).transpose(-1, -2)
    return sums


@torch.library.custom_op("dlrnn::sections_adjoint", mutates_args=())
def _adjoint(values: Tensor, a: Tensor, b: Tensor, length: int, order: int) -> Tensor:
    """`Re sum_k values*_k / q_nk^order`; [H, W, F, 2] -> [H, W, M]."""
    weights = values.new_zeros(*values.shape[:2], a.shape[1])
    cos, sin = _half_angles(length, a.device)
    for h, f in _tiles(a, length):
        table = _table(a[h], b[h], cos[f], sin[f], order)
        weights[h] += values[h, :, f].transpose(-1, -2).flatten(2) @ table.flatten(2).mT
    return weights


@_sections.register_fake
def _(weights: Tensor, a: Tensor, b: Tensor, length: int | torch.SymInt, order: int) -> Tensor:
    return weights.new_empty(*weights.shape[:2], length // 2 + 1, 2)


@_adjoint.register_fake
def _(values: Tensor, a: Tensor, b: Tensor, length: int | torch.SymInt, order: int) -> Tensor:
    return values.new_empty(*values.shape[:2], a.shape[1])


def _half_angles(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `theta / 2` at the frequencies `theta = 2 pi k / L` up to pi."""
    k = torch.arange(length // 2 + 1, dtype=torch.float64, device=device)
    return (k * (math.pi / length)).cos(), (k * (math.pi / length)).sin()


def _table(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor, order: int) -> Tensor:
    """`1 / q^order`, real and imaginary parts apart: [h, M, 2, f]."""
    re = torch.addcmul(-sin.square(), b[..., None], cos.square())
    im = a[..., None] * (2 * sin * cos)  # of the conjugate of q
    scale = (re * re).addcmul_(im, im).reciprocal_()
    inverse = torch.stack((re.mul_(scale), im.mul_(scale)), dim=-2)
    power = inverse
    for _ in range(order - 1):
        (x, y), (p, q) = inverse.unbind(-2), power.unbind(-2)
        power = torch.stack((x * p - y * q, x * q + y * p), dim=-2)
    return power


def _tiles(a: Tensor, length: int) -> Iterator[tuple[slice, slice]]:
    """Pieces of channels and frequencies whose table fits: the cache of a CPU, or 256 MiB."""
    channels, states = a.shape
    frequencies = length // 2 + 1
    numbers = 2**16 if a.device.type == "cpu" else 2**24
    f_step = min(frequencies, max(1, numbers // states))
    h_step = max(1, numbers // (states * f_step))
    for h in range(0, channels, h_step):
        for f in range(0, frequencies, f_step):
            yield slice(h, h + h_step), slice(f, f + f_step)


def _setup_sections(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.length, ctx.order = inputs
    ctx.save_for_backward(*tensors)


def _pole_gradients(
    ctx: Any, weights: Tensor, values: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """`sum_w weights d/d(a, b) of the adjoint of values`: the next order."""
    cos, sin = _half_angles(ctx.length, a.device)
    slope = 2 * sin * cos
    by_a = torch.stack((slope * values[..., 1], -slope * values[..., 0]), dim=-1)
    by_b = -cos.square()[:, None] * values
    moments = _adjoint(torch.cat((by_a, by_b), dim=1), a, b, ctx.length, ctx.order + 1)
    d_a, d_b = (ctx.order * (weights * part).sum(1) for part in moments.chunk(2, dim=1))
    return d_a, d_b


def _sections_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    weights, a, b = ctx.saved_tensors
    d_weights = _adjoint(grad, a, b, ctx.length, ctx.order)
    return d_weights, *_pole_gradients(ctx, weights, grad, a, b), None, None


def _adjoint_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    values, a, b = ctx.saved_tensors
    d_values = _sections(grad, a, b, ctx.length, ctx.order)
    return d_values, *_pole_gradients(ctx, grad, values, a, b), None, None


_sections.register_autograd(_sections_backward, setup_context=_setup_sections)
_adjoint.register_autograd(_adjoint_backward, setup_context=_setup_sections)


# ---------------------------------------------------------------------------------- transforms


@torch.library.custom_op("dlrnn::to_kernel", mutates_args=())
def _to_kernel(spectrum: Tensor, length: int) -> Tensor:
    """The inverse real transform of pairs, [..., F, 2] -> [..., L]."""
    kernel: Tensor = torch.fft.irfft(torch.view_as_complex(spectrum.contiguous()), n=length)
    return kernel


@torch.library.custom_op("dlrnn::to_kernel_adjoint", mutates_args=())
def _to_spectrum(kernel: Tensor) -> Tensor:
    """Its adjoint: the transform over L, twice where a frequency stands for itself and another."""
    length = kernel.shape[-1]
    spectrum = torch.fft.rfft(kernel, norm="forward")
    spectrum[..., 1 : (length + 1) // 2] *= 2
    return torch.view_as_real(spectrum)


@_to_kernel.register_fake
def _(spectrum: Tensor, length: int | torch.SymInt) -> Tensor:
    return spectrum.new_empty(*spectrum.shape[:-2], length)


@_to_spectrum.register_fake
def _(kernel: Tensor) -> Tensor:
    return kernel.new_empty(*kernel.shape[:-1], kernel.shape[-1] // 2 + 1, 2)


def _setup_length(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.length = inputs[0].shape[-1]


_to_kernel.register_autograd(
    lambda _, grad: (_to_spectrum(grad), None), setup_context=lambda ctx, inputs, output: None
)
_to_spectrum.register_autograd(
    lambda ctx, grad: _to_kernel(grad, ctx.length), setup_context=_setup_length
)
