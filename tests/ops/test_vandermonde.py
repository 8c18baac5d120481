from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import DEVICE, assert_close, gradients, random_modes

from dlrnn import ops
from dlrnn.bench.layer import bench_kernel, exact_kernel_and_gradients
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
    """L = 2^20, N = 1024, H = 4, |lambda| near 1: kernel and gradients to 1e-5 in fp32."""
    result = bench_kernel(d_model=4, d_state=1024, length=2**20, device=str(DEVICE), repeats=1)
    assert set(result["errors"]) == {"kernel", "log_lambda_re", "log_lambda_im", "W"}
    assert max(result["errors"].values()) <= 1e-5
    assert result["naive"] > 1e-3, "phases in fp32 should have failed here"


@pytest.mark.parametrize("length", [1, 70])
def test_the_truth_of_that_test_is_the_oracle(monkeypatch, length):
    monkeypatch.setattr("dlrnn.bench.layer.BLOCK", 16)
    re, im, W = (
        torch.rand(*shape, dtype=torch.float64).requires_grad_()
        for shape in ((5,), (5,), (3, 5, 2))
    )
    expected = reference.vandermonde(W, torch.stack((-(re**2), im), dim=-1), length)
    dK = torch.randn(3, length, dtype=torch.float64)
    truth = exact_kernel_and_gradients(re, im, W, dK)
    for have, want in zip(truth, (expected, *gradients(expected, (re, im, W), dK)), strict=True):
        assert_close(have, want, 1e-12)


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
    arguments = v.detach(), W.detach(), log_lambda.detach()
    torch.library.opcheck(torch.ops.dlrnn.vandermonde_gradients.default, arguments)
