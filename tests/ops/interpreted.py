"""The Triton kernels in Triton's interpreter, which test_triton.py starts: a function for each."""

import sys

import torch
from support import assert_close
from torch.nn import functional as F

from dlrnn.ops import dplr, rotary
from dlrnn.ops.triton import dplr_weights, sections, thin_linear
from dlrnn.ops.triton import layer_norm as norm_kernels
from dlrnn.ops.triton import rotary as rotary_kernels
from dlrnn.ops.triton import zero_order_hold as hold_kernels


def layer_norm():
    for rows, channels, adds, step in [
        *((1, 1, True, 1), (37, 16, True, 1), (5, 100, False, 1), (300, 128, True, 1)),
        *((7, 24, False, 3), (7, 24, True, 2)),  # of every third number: all tensors have strides
    ]:
        x, added, dout = (torch.randn(3, rows, step * channels) * 3 + 1)[..., ::step]
        weight, bias = torch.randn(2, step * channels)[:, ::step]
        out, total = norm_kernels.forward(x, added if adds else None, weight, bias, 1e-5)
        d_total, both = norm_kernels.backward(dout, total if adds else x, weight, 1e-5)
        assert (total == (x + added if adds else x)).all()
        exact = [t.double().requires_grad_() for t in (total, weight, bias)]
        want = F.layer_norm(exact[0], (channels,), *exact[1:], 1e-5)
        wanted = torch.autograd.grad(want, exact, dout.double())
        for have, exactly in zip((out, d_total, *both), (want, *wanted), strict=True):
            if channels > 1:
                assert_close(have, exactly, 4e-7)
            else:
                assert (have - exactly).abs().max() < 1e-6


def rotate():
    for batch, length, heads, d, own, wide in [
        *((1, 1, 1, 2, False, 1), (2, 37, 3, 6, False, 1), (3, 5, 4, 32, True, 1)),
        *((2, 130, 8, 32, False, 3), (1, 3, 5, 2, True, 2), (3, 7, 1, 4096, False, 1)),
    ]:
        x = torch.randn(batch, length, wide * heads, d)[:, :, :heads]  # a part of wider rows
        angles = torch.randn(batch if own else 1, length, d // 2)
        turning = angles.cos(), angles.sin()
        for dtype, allowed in ((torch.float32, 1e-6), (torch.float16, 2e-3)):
            assert rotary_kernels.supports(x.to(dtype))
            have = rotary_kernels.turn(x.to(dtype), *turning)
            want = rotary.turn(x.to(dtype), *turning)
            assert have.dtype == dtype
            assert have.is_contiguous()
            torch.testing.assert_close(have, want, rtol=0, atol=allowed)
            strided = x.to(dtype).transpose(2, 3).contiguous().transpose(2, 3)
            assert (rotary_kernels.turn(strided, *turning) == have).all()
    x, angles = torch.randn(2, 5, 3, 6).requires_grad_(), torch.randn(2, 5, 3)
    dout, turning = torch.randn(x.shape), (angles.cos(), angles.sin())
    one, other = (
        torch.autograd.grad(turn(x, *turning), x, dout)[0] for turn in (rotary._turned, rotary.turn)
    )
    assert (one - other).abs().max() < 1e-6
    torch.library.opcheck(rotary._turned.library_op, (x, *turning))
    for refused in (torch.zeros(1, 1, 1, 3), torch.zeros(1, 0, 1, 4), x.detach().double()):
        assert not rotary_kernels.supports(refused)


def linear():
    for rows, count, channels in [(1, 1, 32), (37, 3, 128), (100, 16, 48), (70, 8, 500)]:
        thin, wide = torch.randn(rows, count), torch.randn(rows, channels)
        for matrix in (torch.randn(count, channels), torch.randn(channels, count).t()):
            for bias in (torch.randn(channels), torch.randn(2 * channels)[::2], None):
                want = thin.double() @ matrix.double() + (0 if bias is None else bias)
                assert_close(thin_linear.spread(thin, matrix, bias), want, 4e-7)
            for bias in (torch.randn(count), torch.randn(2 * count)[::2], None):
                want = wide.double() @ matrix.double().t() + (0 if bias is None else bias)
                assert_close(thin_linear.gather(wide, matrix, bias), want, 4e-7)
        product, thin_sum, wide_sum = thin_linear.outer(thin, wide)
        assert_close(product, thin.double().t() @ wide.double(), 4e-7)
        assert_close(thin_sum, thin.double().sum(0), 4e-7)
        assert_close(wide_sum, wide.double().sum(0), 4e-7)


def zero_order_hold():
    plain = sys.modules["dlrnn.ops.zero_order_hold"]
    for scale in (0.0, 1e-300, 1e-8, 1e-2, 2.0**-6, 1.0, 100.0):
        z = scale * torch.randn(300, 2, dtype=torch.float64)
        z[:, 0] = -z[:, 0].abs()
        grad = torch.randn_like(z)
        have, want = hold_kernels.integral(z, plain.ZERO), plain._integral(z)
        assert (have - want).abs().max() < 4e-15, scale
        have = hold_kernels.gradient(z, grad, plain.ZERO, plain.NEAR)
        want = plain.pair_product(grad, plain.conjugate(plain._derivative(z)))
        assert (have - want).abs().max() < 4e-14, scale


def dplr_kernel():
    sections.FREQUENCIES, sections.STATES = 8, 4
    sections.SHORTEST, sections.CHUNKS, sections.ROOM = 3, 3, 100
    largest = dplr_weights.LARGEST
    for outputs, channels, pairs, length, dplr_weights.LARGEST in [
        *((1, 1, 1, 1, 64), (1, 2, 5, 2, 64), (2, 2, 9, 27, 64), (2, 2, 3, 20, 0))
    ]:
        Lambda = torch.randn(pairs, 2).double() * 5
        Lambda[:, 0] = -Lambda[:, 0].abs() / 50 - 0.01
        P, B = torch.randn(2, pairs, 2).double()
        C, dt = torch.randn(outputs, channels, pairs, 2).double(), torch.rand(channels).double()
        system = dplr.DPLR(*(t.requires_grad_() for t in (Lambda, P, B, C, dt + 0.01)))
        have, want = dplr._fused_tile(system, length), dplr.dplr_kernel(system, length)
        grad = torch.randn_like(want)
        both = ((kernel, *torch.autograd.grad(kernel, system, grad)) for kernel in (have, want))
        for one, other in zip(*both, strict=True):
            assert (one - other).norm() < 1e-11 * other.norm() or (one - other).abs().max() < 1e-12
    dplr_weights.LARGEST = largest
    small = [t.detach().requires_grad_() for t in (Lambda[:1], P[:1], B[:1], C[:1, :1, :1], dt[:1])]
    fixed = [t.detach() for t in small]

    def of_outputs(C):
        return dplr._fused_tile(dplr.DPLR(*fixed[:3], C, fixed[4]), 2).square()

    torch.autograd.gradgradcheck(lambda *t: dplr._fused_tile(dplr.DPLR(*t), 2), small)
    torch.autograd.gradgradcheck(of_outputs, small[3])
