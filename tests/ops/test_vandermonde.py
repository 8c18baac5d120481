"""The Vandermonde products: one lambda for all channels, and a lambda for each channel."""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    DEVICE,
    assert_agree,
    assert_close,
    gradients,
    random_modes,
    refused,
)

from dlrnn import ops
from dlrnn.bench.layer import bench_kernel, exact_kernel_and_gradients
from dlrnn.ops import reference

# (rows, H, N, L): length 1, odd sizes, more than one block, sizes of 1
SIZES = [
    (1, 1, 1, 1),
    (1, 3, 5, 1),
    (2, 2, 7, 15),
    (1, 3, 4, 16),
    (1, 3, 4, 17),
    (3, 1, 3, 130),
    (2, 5, 2, 700),
]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-13}


class Family(NamedTuple):
    """A product, its adjoint, and their references; W is [rows, H, N, 2] for both."""

    product: Callable
    adjoint: Callable
    reference: Callable
    reference_adjoint: Callable
    ops: tuple[str, str, str]

    def modes(self, rows, channels, states, dtype=torch.float64, seed=0):
        """W and log lambda, [N, 2] or [H, N, 2], with |lambda| in [0.99, 1]."""
        count = channels * states if self is EACH else states
        W, _ = random_modes(rows, channels * states, dtype, seed=seed)
        _, log_lambda = random_modes(1, count, seed=seed)
        if self is EACH:
            log_lambda = log_lambda.view(channels, states, 2)
        return W.view(rows, channels, states, 2), log_lambda


def in_tiles(W, log_lambda, length):
    """`ops.vandermonde` without its short way for small sizes."""
    module = import_module("dlrnn.ops.vandermonde")
    before, module.SMALL = module.SMALL, 0
    try:
        return ops.vandermonde(W, log_lambda, length)
    finally:
        module.SMALL = before


def family_of(product, adjoint, gradients):
    functions = [
        getattr(module, name) for module in (ops, reference) for name in (product, adjoint)
    ]
    return Family(*functions, (product, adjoint, gradients))


SHARED = family_of("vandermonde", "vandermonde_adjoint", "vandermonde_gradients")
EACH = family_of("channel_vandermonde", "channel_adjoint", "channel_gradients")
TILED = SHARED._replace(product=in_tiles)
families = pytest.mark.parametrize(
    "family", [SHARED, TILED, EACH], ids=["shared", "shared-in-tiles", "each"]
)


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


@families
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "channels", "states", "length"), SIZES)
def test_product_and_gradients_equal_the_reference(family, rows, channels, states, length, dtype):
    W, log_lambda = family.modes(rows, channels, states, dtype)
    inputs = W.requires_grad_(), log_lambda.requires_grad_()
    kernel = family.product(*inputs, length)
    assert kernel.dtype == dtype
    expected = family.reference(W.cpu(), log_lambda.cpu(), length)
    tolerance = TOLERANCE[dtype]
    have, _ = assert_agree(kernel, expected, inputs, tolerance, (tolerance, 10 * tolerance))
    if length == 1:  # there the kernel does not depend on lambda
        assert (have[1] == 0).all()


@families
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "channels", "states", "length"), SIZES)
def test_adjoint_and_gradients_equal_the_reference(family, rows, channels, states, length, dtype):
    _, log_lambda = family.modes(rows, channels, states)
    v = random(rows, channels, length, dtype=dtype)
    inputs = v.requires_grad_(), log_lambda.requires_grad_()
    expected = family.reference_adjoint(v.cpu(), log_lambda.cpu())
    tolerance = TOLERANCE[dtype]
    assert_agree(family.adjoint(*inputs), expected, inputs, tolerance, (tolerance, 10 * tolerance))


@families
@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.integers(1, 300))
def test_the_two_are_adjoint(family, rows, channels, states, length):
    """<Re(W P), v> = Re <W, v P^T> for every W and v."""
    W, log_lambda = family.modes(rows, channels, states, seed=length)
    v = random(rows, channels, length)
    left = (family.product(W, log_lambda, length) * v).sum()
    right = ops.pair_product(W, family.adjoint(v, log_lambda))[..., 0].sum()
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


@families
def test_leading_dimensions_are_kept(family):
    W, log_lambda = family.modes(6, 2, 5)
    kernel = family.product(W, log_lambda, 40)
    shaped = family.product(W.view(2, 3, 2, 5, 2), log_lambda, 40)
    assert torch.equal(shaped, kernel.view(2, 3, 2, 40))
    assert_close(family.product(W[1], log_lambda, 40), kernel[1], 1e-14)
    moments = family.adjoint(shaped, log_lambda)
    assert torch.equal(moments, family.adjoint(kernel, log_lambda).view(2, 3, 2, 5, 2))
    assert_close(family.adjoint(kernel[1], log_lambda), moments[0, 1], 1e-14)


@families
def test_second_derivatives(family):
    W, log_lambda = family.modes(1, 2, 3)
    v = random(1, 2, 20).requires_grad_()
    inputs = W.requires_grad_(), log_lambda.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda w, ll: family.product(w, ll, 20), inputs)
    assert torch.autograd.gradgradcheck(family.adjoint, (v, log_lambda))


@families
@pytest.mark.parametrize("workspace", [1, 7, 64, 300])
def test_small_tiles_give_the_same(monkeypatch, family, workspace):
    """Channels, rows, states and blocks cut into the smallest pieces.

    A phase of a channel's own lambda is the sum of other parts then: 300 steps of 6.3 times the
    rounding of float64.
    """
    tolerance = 2e-13 if family is EACH else 1e-14
    W, log_lambda = family.modes(3, 5, 6)
    kernel = family.product(W, log_lambda, 300)
    moments = family.adjoint(kernel, log_lambda)
    for module in ("dlrnn.ops.vandermonde", "dlrnn.ops.channel_vandermonde"):
        monkeypatch.setattr(import_module(module), "workspace", lambda _: workspace)
    assert_close(family.product(W, log_lambda, 300), kernel, tolerance)
    assert_close(family.adjoint(kernel, log_lambda), moments, tolerance)


@families
def test_nan_stays_in_its_row_and_a_batch_may_be_empty(family):
    W, log_lambda = family.modes(2, 2, 3)
    W[0, 1, 1, 0] = float("nan")
    kernel = family.product(W, log_lambda, 40)
    assert kernel[0, 1].isnan().all()
    assert kernel[1].isfinite().all()
    assert kernel[0, 0].isfinite().all()
    assert family.product(W[:0], log_lambda, 40).shape == (0, 2, 40)
    assert family.adjoint(kernel[:0], log_lambda).shape == (0, 2, 3, 2)


@families
def test_autocast_does_not_reach_the_products(family):
    W, log_lambda = family.modes(2, 3, 64, torch.float32)
    kernel = family.product(W, log_lambda, 100)
    moments = family.adjoint(kernel, log_lambda)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert torch.equal(family.product(W, log_lambda, 100), kernel)
        assert torch.equal(family.adjoint(kernel, log_lambda), moments)


@families
def test_custom_ops_are_sound(family):
    """PyTorch's own checks: schema, fake kernel, autograd registration, compiled call."""
    W, log_lambda = family.modes(2, 2, 3)
    v = random(2, 2, 20)
    if family is not EACH:
        W, v = W[:, 0], v[:, 0]
    product, adjoint, slopes = (getattr(torch.ops.dlrnn, name).default for name in family.ops)
    W, log_lambda, v = (t.clone().requires_grad_() for t in (W, log_lambda, v))
    torch.library.opcheck(product, (W, log_lambda, 20, False))
    torch.library.opcheck(adjoint, (v, log_lambda, False))
    torch.library.opcheck(slopes, (*(t.detach() for t in (v, W, log_lambda)), False))


def test_one_lambda_for_all_channels_gives_the_shared_product():
    W, log_lambda = random_modes(5, 9)
    own = log_lambda.expand(5, 9, 2)
    assert_close(ops.channel_vandermonde(W, own, 99), ops.vandermonde(W, log_lambda, 99), 1e-13)
    v = random(5, 99)
    assert_close(ops.channel_adjoint(v, own), ops.vandermonde_adjoint(v, log_lambda), 1e-13)


def test_the_complex_kernel_has_both_parts():
    W, log_lambda = random_modes(3, 6)
    re, im = ops.complex_vandermonde(W, log_lambda, 33)
    i_W = torch.stack((-W[..., 1], W[..., 0]), dim=-1)
    assert_close(re, reference.vandermonde(W.cpu(), log_lambda.cpu(), 33), 1e-13)
    assert_close(-im, reference.vandermonde(i_W.cpu(), log_lambda.cpu(), 33), 1e-13)


def test_wrong_shapes_are_refused(unchecked):
    W, log_lambda = EACH.modes(1, 2, 3)
    with refused("log_lambda", "[H, N, 2]", "[3, 2]"):
        ops.channel_vandermonde(W[0], log_lambda[0], 8)
    with refused("W", "[2, 3, 2]", "[1, 3, 2]"):
        ops.channel_vandermonde(W[0, :1], log_lambda, 8)
    with refused("v", "[2, L]", "[3, 8]"):
        ops.channel_adjoint(torch.ones(3, 8, device=DEVICE), log_lambda)
    with refused("length", "at least 1", "0"):
        ops.channel_vandermonde(W, log_lambda, 0)


# ---------------------------------------------------------------------------------- accuracy


def test_one_million_positions():
    """L = 2^20, N = 1024, H = 4, |lambda| near 1: kernel and gradients to 1e-5 in fp32."""
    result = bench_kernel(d_model=4, d_state=1024, length=2**20, device=str(DEVICE), repeats=1)
    assert set(result["errors"]) == {"kernel", "log_lambda_re", "log_lambda_im", "W"}
    assert max(result["errors"].values()) <= 1e-5
    assert result["naive"] > 1e-3, "phases in fp32 should have failed here"


@pytest.mark.parametrize("length", [1, 70])
def test_the_exact_kernel_of_the_benchmark_equals_the_reference(monkeypatch, length):
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


def test_one_million_positions_with_a_lambda_for_each_channel():
    """Kernel and gradients to 1e-5 in fp32, against those of the shared product in float64."""
    _, log_lambda = random_modes(1, 3 * 64, modulus=(1 - 1e-5, 1.0))
    log_lambda = log_lambda.view(3, 64, 2).requires_grad_()
    W = torch.randn(3, 64, 2, device=DEVICE, requires_grad=True)
    exact = W.double()
    rows = [ops.vandermonde(exact[h], log_lambda[h], 2**20) for h in range(3)]
    kernel = ops.channel_vandermonde(W, log_lambda, 2**20)
    assert_agree(kernel, torch.stack(rows), (W, log_lambda), 1e-5)
