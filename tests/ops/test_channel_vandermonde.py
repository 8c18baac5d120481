from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import DEVICE, assert_close, gradients, random_modes, refused

from dlrnn import ops
from dlrnn.ops import reference

# (rows, H, N, L): length 1, odd sizes, more than one block, sizes of 1
SIZES = [(1, 1, 1, 1), (1, 3, 5, 1), (2, 2, 7, 15), (1, 3, 4, 17), (3, 1, 3, 130), (2, 5, 2, 700)]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-13}


def channel_modes(rows, channels, states, dtype=torch.float64, seed=0):
    """W [rows, H, N, 2] and log lambda [H, N, 2], |lambda| in [0.99, 1]."""
    W, log_lambda = random_modes(rows, channels * states, dtype, seed=seed)
    return W.view(rows, channels, states, 2), log_lambda.view(channels, states, 2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "channels", "states", "length"), SIZES)
def test_product_and_gradients(rows, channels, states, length, dtype):
    W, log_lambda = channel_modes(rows, channels, states, dtype)
    inputs = W.requires_grad_(), log_lambda.requires_grad_()
    kernel = ops.channel_vandermonde(*inputs, length)
    expected = reference.channel_vandermonde(W.cpu(), log_lambda.cpu(), length)
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
@pytest.mark.parametrize(("rows", "channels", "states", "length"), SIZES)
def test_adjoint_and_gradients(rows, channels, states, length, dtype):
    _, log_lambda = channel_modes(rows, channels, states)
    v = torch.randn(rows, channels, length, dtype=dtype, device=DEVICE)
    inputs = v.requires_grad_(), log_lambda.requires_grad_()
    moments = ops.channel_adjoint(*inputs)
    expected = reference.channel_adjoint(v.cpu(), log_lambda.cpu())
    assert_close(moments, expected, TOLERANCE[dtype])
    grad = torch.randn(expected.shape, dtype=torch.float64)
    dv, d_log = gradients(moments, inputs, grad)
    dv_expected, d_log_expected = gradients(expected, inputs, grad)
    assert_close(dv, dv_expected, TOLERANCE[dtype])
    assert_close(d_log, d_log_expected, 10 * TOLERANCE[dtype])


def test_one_lambda_for_all_is_the_shared_product():
    W, log_lambda = random_modes(5, 9)
    own = log_lambda.expand(5, 9, 2)
    assert_close(ops.channel_vandermonde(W, own, 99), ops.vandermonde(W, log_lambda, 99), 1e-13)
    v = torch.randn(5, 99, dtype=torch.float64, device=DEVICE)
    assert_close(ops.channel_adjoint(v, own), ops.vandermonde_adjoint(v, log_lambda), 1e-13)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.integers(1, 300))
def test_they_are_adjoint(rows, channels, states, length):
    """<Re(W P), v> = Re <W, v P^T> for every W and v."""
    W, log_lambda = channel_modes(rows, channels, states)
    v = torch.randn(rows, channels, length, dtype=torch.float64, device=DEVICE)
    left = (ops.channel_vandermonde(W, log_lambda, length) * v).sum()
    right = ops.pair_product(W, ops.channel_adjoint(v, log_lambda))[..., 0].sum()
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def test_leading_dimensions_are_kept():
    W, log_lambda = channel_modes(6, 2, 5)
    kernel = ops.channel_vandermonde(W, log_lambda, 40)
    shaped = ops.channel_vandermonde(W.view(2, 3, 2, 5, 2), log_lambda, 40)
    assert torch.equal(shaped, kernel.view(2, 3, 2, 40))
    assert_close(ops.channel_vandermonde(W[1], log_lambda, 40), kernel[1], 1e-14)
    moments = ops.channel_adjoint(shaped, log_lambda)
    assert moments.shape == (2, 3, 2, 5, 2)
    assert_close(ops.channel_adjoint(kernel[1], log_lambda), moments[0, 1], 1e-14)


def test_second_derivative():
    W, log_lambda = channel_modes(1, 2, 3)
    v = torch.randn(1, 2, 20, dtype=torch.float64, device=DEVICE)
    assert torch.autograd.gradgradcheck(
        lambda w, ll: ops.channel_vandermonde(w, ll, 20),
        (W.requires_grad_(), log_lambda.requires_grad_()),
    )
    assert torch.autograd.gradgradcheck(ops.channel_adjoint, (v.requires_grad_(), log_lambda))


@pytest.mark.parametrize("workspace", [1, 7, 64, 300])
def test_tiles_give_the_same(monkeypatch, workspace):
    """Channels, rows and blocks cut into the smallest pieces.

    A phase is the sum of other parts then: 300 steps of 6.3 times the rounding of float64.
    """
    W, log_lambda = channel_modes(3, 5, 6)
    kernel = ops.channel_vandermonde(W, log_lambda, 300)
    moments = ops.channel_adjoint(kernel, log_lambda)
    for module in ("dlrnn.ops.vandermonde", "dlrnn.ops.channel_vandermonde"):
        monkeypatch.setattr(import_module(module), "_workspace", lambda _: workspace)
    assert_close(ops.channel_vandermonde(W, log_lambda, 300), kernel, 2e-13)
    assert_close(ops.channel_adjoint(kernel, log_lambda), moments, 2e-13)


def test_one_million_positions():
    """L = 2^20, |lambda| near 1: kernel and gradients to 1e-5 in fp32, of the shared product."""
    _, log_lambda = random_modes(1, 3 * 64, modulus=(1 - 1e-5, 1.0))
    log_lambda = log_lambda.view(3, 64, 2).requires_grad_()
    W = torch.randn(3, 64, 2, device=DEVICE, requires_grad=True)
    grad = torch.randn(3, 2**20, device=DEVICE)
    exact = W.double()
    rows = [ops.vandermonde(exact[h], log_lambda[h], 2**20) for h in range(3)]
    expected, kernel = torch.stack(rows), ops.channel_vandermonde(W, log_lambda, 2**20)
    assert_close(kernel, expected, 1e-5)
    have, want = (gradients(K, (W, log_lambda), grad) for K in (kernel, expected))
    for a, b in zip(have, want, strict=True):
        assert_close(a, b, 1e-5)


def test_nan_and_empty_batch():
    W, log_lambda = channel_modes(2, 2, 3)
    W[0, 1, 1, 0] = float("nan")
    kernel = ops.channel_vandermonde(W, log_lambda, 40)
    assert kernel[0, 1].isnan().all()
    assert kernel[1].isfinite().all()
    assert kernel[0, 0].isfinite().all(), "a NaN stays in its row"
    assert ops.channel_vandermonde(W[:0], log_lambda, 40).shape == (0, 2, 40)
    assert ops.channel_adjoint(kernel[:0], log_lambda).shape == (0, 2, 3, 2)


def test_autocast_does_not_reach_the_product():
    W, log_lambda = channel_modes(2, 3, 64, torch.float32)
    kernel = ops.channel_vandermonde(W, log_lambda, 100)
    moments = ops.channel_adjoint(kernel, log_lambda)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert torch.equal(ops.channel_vandermonde(W, log_lambda, 100), kernel)
        assert torch.equal(ops.channel_adjoint(kernel, log_lambda), moments)


def test_custom_ops_are_sound():
    """PyTorch's own checks: schema, fake kernel, autograd registration, compiled call."""
    W, log_lambda = channel_modes(2, 2, 3)
    arguments = W.requires_grad_(), log_lambda.requires_grad_()
    torch.library.opcheck(torch.ops.dlrnn.channel_vandermonde.default, (*arguments, 20))
    v = torch.randn(2, 2, 20, dtype=torch.float64, device=DEVICE, requires_grad=True)
    torch.library.opcheck(torch.ops.dlrnn.channel_adjoint.default, (v, log_lambda))
    arguments = v.detach(), W.detach(), log_lambda.detach()
    torch.library.opcheck(torch.ops.dlrnn.channel_gradients.default, arguments)


def test_wrong_shapes_are_refused(unchecked):
    W, log_lambda = channel_modes(1, 2, 3)
    with refused("log_lambda", "[H, N, 2]", "[3, 2]"):
        ops.channel_vandermonde(W[0], log_lambda[0], 8)
    with refused("W", "[2, 3, 2]", "[1, 3, 2]"):
        ops.channel_vandermonde(W[0, :1], log_lambda, 8)
    with refused("v", "[2, L]", "[3, 8]"):
        ops.channel_adjoint(torch.ones(3, 8, device=DEVICE), log_lambda)
    with refused("length", "at least 1", "0"):
        ops.channel_vandermonde(W, log_lambda, 0)
