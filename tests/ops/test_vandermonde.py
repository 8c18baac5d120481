from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import DEVICE, assert_close, gradients, random_modes, relative_error

from dlrnn import ops
from dlrnn.ops import reference

# (rows, N, L): length 1, odd sizes, more than one block, rows or states of 1
SIZES = [(1, 1, 1), (3, 5, 1), (2, 7, 15), (3, 4, 16), (3, 4, 17), (1, 3, 130), (5, 2, 700)]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-13}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "states", "length"), SIZES)
def test_product_and_gradients(rows, states, length, dtype):
    W, log_lambda = random_modes(rows, states, dtype)
    inputs = W.requires_grad_(), log_lambda.requires_grad_()
    kernel, expected = (
        ops.vandermonde(*inputs, length),
        reference.vandermonde(W.cpu(), log_lambda.cpu(), length),
    )
    assert kernel.dtype == dtype
    assert_close(kernel, expected, TOLERANCE[dtype])
    grad = torch.randn(expected.shape, dtype=torch.float64)
    dW, d_log = gradients(kernel, inputs, grad)
    dW_expected, d_log_expected = gradients(expected, inputs, grad)
    assert_close(dW, dW_expected, TOLERANCE[dtype])
    if length > 1:  # at length 1 the kernel does not depend on lambda
        assert_close(d_log, d_log_expected, 10 * TOLERANCE[dtype])
    else:
        assert (d_log == 0).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "states", "length"), SIZES)
def test_adjoint_and_gradients(rows, states, length, dtype):
    _, log_lambda = random_modes(rows, states)
    v = torch.randn(rows, length, dtype=dtype, device=DEVICE)
    inputs = v.requires_grad_(), log_lambda.requires_grad_()
    moments = ops.vandermonde_adjoint(*inputs)
    expected = reference.vandermonde_adjoint(v.cpu(), log_lambda.cpu())
    assert_close(moments, expected, TOLERANCE[dtype])
    grad = torch.randn(expected.shape, dtype=torch.float64)
    dv, d_log = gradients(moments, inputs, grad)
    dv_expected, d_log_expected = gradients(expected, inputs, grad)
    assert_close(dv, dv_expected, TOLERANCE[dtype])
    assert_close(d_log, d_log_expected, 10 * TOLERANCE[dtype])


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 300), st.integers(0, 99))
def test_they_are_adjoint(rows, states, length, seed):
    """<Re(W P), v> = Re <W, v P^T> for every W and v."""
    W, log_lambda = random_modes(rows, states, seed=seed)
    v = torch.randn(rows, length, dtype=torch.float64, device=DEVICE)
    left = (ops.vandermonde(W, log_lambda, length) * v).sum()
    right = ops.pair_product(W, ops.vandermonde_adjoint(v, log_lambda))[..., 0].sum()
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def test_leading_dimensions_are_kept():
    W, log_lambda = random_modes(6, 5)
    kernel = ops.vandermonde(W, log_lambda, 40)
    shaped = ops.vandermonde(W.view(2, 3, 5, 2), log_lambda, 40)
    assert torch.equal(shaped, kernel.view(2, 3, 40))
    moments = ops.vandermonde_adjoint(kernel, log_lambda)
    assert torch.equal(ops.vandermonde_adjoint(shaped, log_lambda), moments.view(2, 3, 5, 2))


def test_complex_kernel_is_both_parts():
    W, log_lambda = random_modes(3, 6)
    re, im = ops.complex_vandermonde(W, log_lambda, 33)
    i_W = torch.stack((-W[..., 1], W[..., 0]), dim=-1)
    assert_close(re, reference.vandermonde(W.cpu(), log_lambda.cpu(), 33), 1e-13)
    assert_close(-im, reference.vandermonde(i_W.cpu(), log_lambda.cpu(), 33), 1e-13)


def test_second_derivative():
    W, log_lambda = random_modes(2, 3)
    v = torch.randn(2, 20, dtype=torch.float64, device=DEVICE)
    assert torch.autograd.gradgradcheck(
        lambda w, ll: ops.vandermonde(w, ll, 20), (W.requires_grad_(), log_lambda.requires_grad_())
    )
    assert torch.autograd.gradgradcheck(ops.vandermonde_adjoint, (v.requires_grad_(), log_lambda))


@pytest.mark.parametrize("workspace", [1, 7, 64])
def test_tiles_give_the_same(monkeypatch, workspace):
    """Rows, blocks and states cut into the smallest pieces."""
    W, log_lambda = random_modes(5, 6)
    kernel = ops.vandermonde(W, log_lambda, 300)
    moments = ops.vandermonde_adjoint(kernel, log_lambda)
    monkeypatch.setattr(import_module("dlrnn.ops.vandermonde"), "_workspace", lambda _: workspace)
    assert_close(ops.vandermonde(W, log_lambda, 300), kernel, 1e-14)
    assert_close(ops.vandermonde_adjoint(kernel, log_lambda), moments, 1e-14)


def test_one_million_positions():
    """L = 2^20, N = 1024, H = 4, |lambda| near 1: kernel and gradients to 1e-5 in fp32.

    The expected values are float64 sums over blocks of positions, phases by exp alone.
    """
    length, states, rows, block = 2**20, 1024, 4, 2**12
    generator = torch.Generator().manual_seed(1)
    re = (torch.rand(states, generator=generator) * 1e-6).sqrt()  # |lambda| > 1 - 1e-6
    im = 2 * torch.pi * torch.rand(states, generator=generator)
    W = torch.randn(rows, states, 2, generator=generator) / states
    dK = torch.randn(rows, length, generator=generator)
    leaves = [p.to(DEVICE).requires_grad_() for p in (re, im, W)]
    log_lambda = torch.stack((-(leaves[0].double() ** 2), leaves[1].double()), dim=-1)
    kernel = ops.vandermonde(leaves[2], log_lambda, length)
    d_re, d_im, dW = gradients(kernel, leaves, dK)

    re, im, W, dK = (tensor.double().to(DEVICE) for tensor in (re, im, W, dK))
    log_lambda, W = torch.complex(-(re**2), im), torch.complex(W[..., 0], W[..., 1])
    inner = torch.exp(log_lambda[:, None] * torch.arange(block, device=DEVICE))  # [N, block]
    moments, slopes = torch.zeros_like(W), torch.zeros_like(W)
    expected = torch.empty(rows, length, dtype=torch.float64, device=DEVICE)
    for start in range(0, length, block):
        outer = torch.exp(log_lambda * start)
        expected[:, start : start + block] = ((W * outer) @ inner).real
        piece = dK[:, start : start + block]
        position = torch.arange(start, start + block, device=DEVICE)
        both = torch.cat((piece, piece * position)).to(inner.dtype) @ inner.mT * outer
        moments, slopes = moments + both[:rows], slopes + both[rows:]
    slope = (W * slopes).sum(0)
    assert_close(kernel, expected, 1e-5)
    assert_close(torch.complex(dW[..., 0], dW[..., 1]).abs(), moments.conj().abs(), 1e-5)
    assert_close(dW, torch.view_as_real(moments.conj().resolve_conj()), 1e-5)
    assert_close(d_re, -2 * re * slope.real, 1e-5)
    assert_close(d_im, -slope.imag, 1e-5)

    naive = torch.exp((log_lambda.cfloat())[:, None] * torch.arange(length - 64, length).to(DEVICE))
    naive = (W.cfloat() @ naive).real
    assert relative_error(naive, expected[:, -64:]) > 1e-3, "fp32 phases should have failed here"


def test_nan_and_empty_batch():
    W, log_lambda = random_modes(2, 3)
    W[0, 1, 0] = float("nan")
    kernel = ops.vandermonde(W, log_lambda, 40)
    assert kernel[0].isnan().all()
    assert kernel[1].isfinite().all(), "a NaN stays in its row"
    assert ops.vandermonde(W[:0], log_lambda, 40).shape == (0, 40)
    assert ops.vandermonde_adjoint(kernel[:0], log_lambda).shape == (0, 3, 2)


def test_autocast_does_not_reach_the_product():
    W, log_lambda = random_modes(2, 64, torch.float32)
    expected = ops.vandermonde(W, log_lambda, 100)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert torch.equal(ops.vandermonde(W, log_lambda, 100), expected)


def test_custom_ops_are_sound():
    """PyTorch's own checks: schema, fake kernel, autograd registration, compiled call."""
    W, log_lambda = random_modes(2, 3)
    arguments = W.requires_grad_(), log_lambda.requires_grad_()
    torch.library.opcheck(torch.ops.dlrnn.vandermonde.default, (*arguments, 20))
    v = torch.randn(2, 20, dtype=torch.float64, device=DEVICE, requires_grad=True)
    torch.library.opcheck(torch.ops.dlrnn.vandermonde_adjoint.default, (v, log_lambda))
