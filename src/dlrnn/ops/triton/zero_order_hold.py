"""`I_0(z)` of ops/zero_order_hold.py and its derivative in float64, one kernel each.

PyTorch needs a hundred small kernels for both: 0.4 ms at 128 x 4096 on an H200.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrnn.common.device import on_its_device

BLOCK = 256


@on_its_device
def integral(z: Tensor, zero: float) -> Tensor:
    """`I_0 = (exp z - 1) / z` of float64 pairs; if |z| < `zero`, Re z becomes `zero`."""
    z, result = z.contiguous(), torch.empty_like(z, memory_format=torch.contiguous_format)
    count = z.numel() // 2
    _integral[(triton.cdiv(count, BLOCK),)](z, result, count, zero, BLOCK)
    return result


@on_its_device
def gradient(z: Tensor, grad: Tensor, zero: float, near: float) -> Tensor:
    """`grad conj(I_1(z))`; for |z| below `near` by the series."""
    z, result = z.contiguous(), torch.empty_like(z, memory_format=torch.contiguous_format)
    count = z.numel() // 2
    _gradient[(triton.cdiv(count, BLOCK),)](z, grad.contiguous(), result, count, zero, near, BLOCK)
    return result


@triton.jit
@no_type_check
def _expm1(x):
    """`exp x - 1`; up to |x| = 1/2 by its series, whose next term is below 2^-60."""
    series = tl.zeros_like(x)
    for j in tl.static_range(16, 1, -1):
        series = (series + 1.0) * x / j
    return tl.where(tl.abs(x) < 0.5, (series + 1.0) * x, tl.exp(x) - 1.0)


@triton.jit
@no_type_check
def _quotient(re, im, zero):
    """`exp z - 1` and `I_0 = (exp z - 1) / z`."""
    re = tl.where(re * re + im * im < zero * zero, zero, re)
    rise = _expm1(re)
    sine = tl.sin(im * 0.5)
    twice = 2.0 * (rise + 1.0) * sine
    power_re, power_im = rise - twice * sine, twice * tl.cos(im * 0.5)
    size = re * re + im * im
    result_re = (power_re * re + power_im * im) / size
    return power_re, power_im, result_re, (power_im * re - power_re * im) / size


@triton.jit
@no_type_check
def _integral(z, result, count, zero: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    re = tl.load(z + 2 * i, mask=i < count, other=-1.0)
    im = tl.load(z + 2 * i + 1, mask=i < count, other=0.0)
    _, _, value_re, value_im = _quotient(re, im, zero)
    tl.store(result + 2 * i, value_re, mask=i < count)
    tl.store(result + 2 * i + 1, value_im, mask=i < count)


@triton.jit
@no_type_check
def _gradient(  # noqa: PLR0917
    z, grad, result, count, zero: tl.constexpr, near: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    re = tl.load(z + 2 * i, mask=i < count, other=-1.0)
    im = tl.load(z + 2 * i + 1, mask=i < count, other=0.0)
    # I_1 = sum_j z^j / (j! (j + 2)) as 1/2 + z (1/3 + z/2 (1/4 + z/3 (...)))
    one = tl.zeros_like(re) + 1.0  # a Python number would be rounded to fp32
    sum_re, sum_im = tl.zeros_like(re), tl.zeros_like(im)
    for j in tl.static_range(7, -1, -1):
        more = one / (j + 2) + (sum_re * re - sum_im * im) / (j + 1)
        sum_im = (sum_re * im + sum_im * re) / (j + 1)
        sum_re = more
    # (exp z - I_0) / z
    is_near = re * re + im * im < near * near
    far_re, far_im = tl.where(is_near, 1.0, re), tl.where(is_near, 1.0, im)
    power_re, power_im, zero_re, zero_im = _quotient(far_re, far_im, zero)
    top_re, top_im = power_re + 1.0 - zero_re, power_im - zero_im
    size = far_re * far_re + far_im * far_im
    sum_re = tl.where(is_near, sum_re, (top_re * far_re + top_im * far_im) / size)
    sum_im = tl.where(is_near, sum_im, (top_im * far_re - top_re * far_im) / size)
    d_re = tl.load(grad + 2 * i, mask=i < count, other=0.0)
    d_im = tl.load(grad + 2 * i + 1, mask=i < count, other=0.0)
    tl.store(result + 2 * i, d_re * sum_re + d_im * sum_im, mask=i < count)
    tl.store(result + 2 * i + 1, d_im * sum_re - d_re * sum_im, mask=i < count)
