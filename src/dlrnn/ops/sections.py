"""Sums of second-order sections at the frequencies of a real transform, and that transform.

S4's kernel (ops/dplr.py) consists of them, in float64. The custom ops are each other's derivatives.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlrnn.ops.dispatch import op


@op("dlrnn::sections")
def section_sums(weights: Tensor, a: Tensor, b: Tensor, length: int, order: int) -> Tensor:
    """`sum_n weights_n / q_n^order` with `q = b c^2 - s^2 - 2 i s c a`; [H, W, M] -> [H, W, F, 2].

    The F = L // 2 + 1 frequencies of a real transform.
    """
    sums = weights.new_empty(*weights.shape[:2], length // 2 + 1, 2)
    cos, sin = half_angles(length, a.device)
    for h, f in _tiles(a, length):
        table = _table(a[h], b[h], cos[f], sin[f], order)
        products = weights[h] @ table.flatten(2)
        sums[h, :, f] = products.unflatten(-1, (2, -1)).transpose(-1, -2)
    return sums


@op("dlrnn::sections_adjoint")
def section_adjoint(values: Tensor, a: Tensor, b: Tensor, length: int, order: int) -> Tensor:
    """`Re sum_k values*_k / q_nk^order`; [H, W, F, 2] -> [H, W, M]."""
    weights = values.new_zeros(*values.shape[:2], a.shape[1])
    cos, sin = half_angles(length, a.device)
    for h, f in _tiles(a, length):
        table = _table(a[h], b[h], cos[f], sin[f], order)
        weights[h] += values[h, :, f].transpose(-1, -2).flatten(2) @ table.flatten(2).mT
    return weights


@section_sums.register_fake
def _(weights: Tensor, a: Tensor, b: Tensor, length: int | torch.SymInt, order: int) -> Tensor:
    return weights.new_empty(*weights.shape[:2], length // 2 + 1, 2)


@section_adjoint.register_fake
def _(values: Tensor, a: Tensor, b: Tensor, length: int | torch.SymInt, order: int) -> Tensor:
    return values.new_empty(*values.shape[:2], a.shape[1])


def half_angles(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
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
    """Pieces of channels and frequencies whose table fits a CPU's cache, or 256 MiB on a GPU."""
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
    cos, sin = half_angles(ctx.length, a.device)
    slope = 2 * sin * cos
    by_a = torch.stack((slope * values[..., 1], -slope * values[..., 0]), dim=-1)
    by_b = -cos.square()[:, None] * values
    moments = section_adjoint(torch.cat((by_a, by_b), dim=1), a, b, ctx.length, ctx.order + 1)
    d_a, d_b = (ctx.order * (weights * part).sum(1) for part in moments.chunk(2, dim=1))
    return d_a, d_b


def _sections_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    weights, a, b = ctx.saved_tensors
    d_weights = section_adjoint(grad, a, b, ctx.length, ctx.order)
    return d_weights, *_pole_gradients(ctx, weights, grad, a, b), None, None


def _adjoint_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    values, a, b = ctx.saved_tensors
    d_values = section_sums(grad, a, b, ctx.length, ctx.order)
    return d_values, *_pole_gradients(ctx, grad, values, a, b), None, None


section_sums.register_autograd(_sections_backward, setup_context=_setup_sections)
section_adjoint.register_autograd(_adjoint_backward, setup_context=_setup_sections)


# ---------------------------------------------------------------------------------- transforms


@op("dlrnn::to_kernel")
def to_kernel(spectrum: Tensor, length: int) -> Tensor:
    """The inverse real Fourier transform of pairs, [..., F, 2] -> [..., L]."""
    kernel: Tensor = torch.fft.irfft(torch.view_as_complex(spectrum.contiguous()), n=length)
    return kernel


@op("dlrnn::to_kernel_adjoint")
def to_spectrum(kernel: Tensor) -> Tensor:
    """The adjoint of `to_kernel`: the transform over L, doubled where there is a conjugate."""
    length = kernel.shape[-1]
    spectrum = torch.fft.rfft(kernel, norm="forward")
    spectrum[..., 1 : (length + 1) // 2] *= 2
    return torch.view_as_real(spectrum)


@to_kernel.register_fake
def _(spectrum: Tensor, length: int | torch.SymInt) -> Tensor:
    return spectrum.new_empty(*spectrum.shape[:-2], length)


@to_spectrum.register_fake
def _(kernel: Tensor) -> Tensor:
    return kernel.new_empty(*kernel.shape[:-1], kernel.shape[-1] // 2 + 1, 2)


def _setup_length(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.length = inputs[0].shape[-1]


to_kernel.register_autograd(lambda _, grad: (to_spectrum(grad), None))
to_spectrum.register_autograd(
    lambda ctx, grad: to_kernel(grad, ctx.length), setup_context=_setup_length
)
