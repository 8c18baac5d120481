"""A continuous system `x' = Lambda x + u`, sampled with its input constant over a step `dt`.

    x_k = exp(dt Lambda) x_{k-1} + gain u_k ,     gain = (exp(dt Lambda) - 1) / Lambda

The gain is `dt I_0(dt Lambda)` with `I_m(z) = integral_0^1 t^m exp(z t) dt`, smooth everywhere, and
the derivative of `I_0` is `I_1`. As quotients both are 0 / 0 at Lambda = 0, and near it `I_1` loses
its digits: there it is computed from its power series.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlrnn.ops.checks import require_no_transform
from dlrnn.ops.dispatch import uses_fused
from dlrnn.ops.pairs import conjugate, in_float64, pair_product, powers

ZERO = 1e-15  # a smaller |z| counts as this: I_0 is then 1 to the rounding of float64
NEAR = 2**-6  # below this |z| the series is used,
TERMS = 8  # of which the next term is below 2^-48 / 8!, beneath that rounding


def zero_order_hold(
    Lambda: Float[Tensor, "N 2"] | Float[Tensor, "H N 2"], dt: Float[Tensor, " H"]
) -> tuple[Float[Tensor, "H N 2"], Float[Tensor, "H N 2"]]:
    """`log lambda = dt Lambda` and the gain, float64 pairs; all channels share a Lambda [N, 2]."""
    require_no_transform()
    step = in_float64(dt)[:, None, None]
    log_lambda = step * in_float64(Lambda)
    gain: Tensor = step * _Integral.apply(log_lambda)  # type: ignore[no-untyped-call]
    return log_lambda, gain


class _Integral(torch.autograd.Function):
    """`I_0`; only z is kept for backward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        if _is_fused(z):
            from dlrnn.ops.triton import zero_order_hold as kernels

            return kernels.integral(z, ZERO)
        return _integral(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        if _is_fused(z) and not torch.is_grad_enabled():
            from dlrnn.ops.triton import zero_order_hold as kernels

            return kernels.gradient(z, grad, ZERO, NEAR)
        return pair_product(grad, conjugate(_derivative(z)))


def _is_fused(z: Tensor) -> bool:
    """Not under a compiler, which fuses these element-wise operations itself."""
    fits = z.numel() > 0 and not torch.compiler.is_compiling()
    return uses_fused("zero_order_hold", z, lambda: fits)


def _integral(z: Tensor) -> Tensor:
    """`I_0 = (exp z - 1) / z`, and `exp z - 1` without cancellation where Re z <= 0.

    It is `expm1(re) - 2 exp(re) sin^2(im / 2) + 2 i exp(re) sin(im / 2) cos(im / 2)`.
    """
    re, im = _parts(z)
    re = torch.where(re.square() + im.square() < ZERO**2, ZERO, re)
    rise, half = torch.expm1(re), im / 2
    sine = half.sin()
    twice = 2 * (rise + 1) * sine
    power_re, power_im = rise - twice * sine, twice * half.cos()
    size = re.square() + im.square()
    result_re = (power_re * re + power_im * im) / size
    return torch.stack((result_re, (power_im * re - power_re * im) / size), dim=-1)


def _derivative(z: Tensor) -> Tensor:
    """`I_1 = (exp z - I_0) / z`; near 0 the series `sum_j z^j / (j! (j + 2))`."""
    near = z.square().sum(-1, keepdim=True) < NEAR**2
    far = torch.where(near, 1.0, z)
    quotient = pair_product(powers(far, 1) - _integral(far), _inverse(far))
    return torch.where(near, _series(z), quotient)


def _series(z: Tensor) -> Tensor:
    re, im = _parts(z)
    sum_re, sum_im = torch.zeros_like(re), torch.zeros_like(im)
    for j in reversed(range(TERMS)):
        coefficient = 1 / (math.factorial(j) * (j + 2))
        sum_re, sum_im = coefficient + sum_re * re - sum_im * im, sum_re * im + sum_im * re
    return torch.stack((sum_re, sum_im), dim=-1)


def _parts(z: Tensor) -> tuple[Tensor, Tensor]:
    """Re and Im, each contiguous, which makes what follows twice as fast."""
    re, im = z.movedim(-1, 0).contiguous().unbind(0)
    return re, im


def _inverse(z: Tensor) -> Tensor:
    return conjugate(z) / z.square().sum(-1, keepdim=True)
