import cmath
from fractions import Fraction

import pytest
import torch
from support import DEVICE, assert_close, gradients

from dlrnn import ops

RADII = [0.0, 1e-300, 1e-12, 1e-5, 2**-6 * (1 - 1e-9), 2**-6 * (1 + 1e-9), 0.3, 2.0, 50.0]


def integral(z, m):
    """`integral_0^1 t^m exp(z t) dt`: its power series in exact fractions, the quotient far out."""
    if abs(z) > 3:
        value = (cmath.exp(z) - 1) / z  # no cancellation here
        return value if m == 0 else (cmath.exp(z) - value) / z
    re, im = Fraction(0), Fraction(0)
    power_re, power_im, factorial = Fraction(1), Fraction(0), 1
    x, y = Fraction(z.real), Fraction(z.imag)
    for j in range(40):
        factorial *= max(j, 1)
        re += power_re / (factorial * (j + m + 1))
        im += power_im / (factorial * (j + m + 1))
        power_re, power_im = power_re * x - power_im * y, power_re * y + power_im * x
    return complex(float(re), float(im))


@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("angle", [1.6, 2.5, 3.141592653589793])
def test_gain_and_derivative_equal_the_series(radius, angle):
    """At every |z|, 0 included; the quotient's derivative loses at most 1 / NEAR of its digits."""
    z = cmath.rect(radius, angle)
    Lambda = torch.tensor([[z.real, z.imag]], dtype=torch.float64, device=DEVICE).requires_grad_()
    dt = torch.ones(1, dtype=torch.float64, device=DEVICE)
    log_lambda, gain = ops.zero_order_hold(Lambda, dt)
    assert torch.equal(log_lambda[0], Lambda)
    value, slope = integral(z, 0), integral(z, 1)
    assert abs(complex(*gain[0, 0].tolist()) - value) <= 1e-14 * abs(value)
    (d_re,) = gradients(gain[..., 0].sum(), Lambda, torch.ones(()))
    assert abs(complex(*d_re[0].tolist()) - slope.conjugate()) <= 1e-13 * abs(slope)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0])
def test_second_derivatives(scale):
    Lambda = scale * torch.randn(2, 3, 2, dtype=torch.float64, device=DEVICE)
    dt = torch.tensor([0.5, 1.5], dtype=torch.float64, device=DEVICE)
    inputs = Lambda.requires_grad_(), dt.requires_grad_()
    assert torch.autograd.gradcheck(ops.zero_order_hold, inputs)
    assert torch.autograd.gradgradcheck(ops.zero_order_hold, inputs)


def test_one_step_solves_the_differential_equation():
    """`x' = Lambda x + u` with a constant u: one step equals many fine Runge-Kutta steps."""
    Lambda = torch.tensor([[-0.5, 3.0], [-2.0, 0.1]], dtype=torch.float64)
    dt = torch.tensor([0.7], dtype=torch.float64)
    log_lambda, gain = (torch.view_as_complex(t) for t in ops.zero_order_hold(Lambda, dt))
    start, u, slopes = torch.tensor([1 + 2j, -1j]), 1.5, torch.view_as_complex(Lambda)
    x, h = start, 0.7 / 1000
    for _ in range(1000):
        k1 = slopes * x + u
        k2 = slopes * (x + h / 2 * k1) + u
        k3 = slopes * (x + h / 2 * k2) + u
        k4 = slopes * (x + h * k3) + u
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    expected = log_lambda.exp() * start + gain * u
    assert_close(torch.view_as_real(x), torch.view_as_real(expected[0]), 1e-12)
