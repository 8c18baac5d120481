import math

import pytest
import torch

from dlrnn.analysis.compress import balance, orthonormal_states


def modes(kind, states, channels=2):
    """log lambda [N] and w [H, N]."""
    g = torch.Generator().manual_seed(states)
    uniform = torch.rand(states, generator=g, dtype=torch.float64)
    phase = 2 * math.pi * torch.rand(states, generator=g, dtype=torch.float64)
    decay = 0.1 + uniform
    if kind == "long":  # |lambda| = 1 - 1e-3 .. 1 - 1e-9, some of them close together
        decay = 10 ** (-3 - 6 * uniform)
        phase = phase.round(decimals=0) + decay
    elif kind == "alternating":  # close to -1
        decay = 10 ** (-3 - 6 * uniform)
        phase = math.pi - decay
    elif kind == "real":
        phase = torch.zeros_like(phase)
    elif kind == "zero":
        decay[-1] = 1024
    elif kind == "twice":
        decay[-1], phase[-1] = decay[0], phase[0]
    w = torch.randn(channels, states, generator=g, dtype=torch.complex128)
    return torch.complex(-decay, phase), w


def rounding(log_lambda):
    """What lambda, rounded to float64, leaves of 1 - |lambda|."""
    return 2e-16 / -torch.expm1(log_lambda.real.max()).item()


KINDS = ["short", "long", "alternating", "real", "zero", "twice"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", [1, 2, 7, 20])
def test_the_chain_is_orthonormal_and_has_the_right_modes(kind, states):
    log_lambda, _ = modes(kind, states)
    A, B, T = orthonormal_states(log_lambda)
    identity = torch.eye(2 * states, dtype=torch.float64)
    assert (A @ A.T + torch.outer(B, B) - identity).abs().max() < 1e-14
    lam = log_lambda.exp()
    scale = torch.linalg.norm(T, dim=1, keepdim=True)
    ones = torch.ones(states, dtype=torch.complex128)
    size = 1e-14 + 10 * rounding(log_lambda)
    assert ((T @ A.to(T.dtype) - lam[:, None] * T) / scale).abs().max() < size
    assert ((T @ B.to(T.dtype) - ones) / scale[:, 0]).abs().max() < size


@pytest.mark.parametrize("kind", ["short", "real", "zero", "twice"])
@pytest.mark.parametrize(("states", "channels"), [(1, 1), (3, 1), (4, 2), (2, 9), (12, 3)])
def test_singular_values_are_those_of_the_hankel_matrix(kind, states, channels):
    """Down to rounding: a Gramian's square root by eigenvalues would be right to 1e-8 only."""
    log_lambda, w = modes(kind, states, channels)
    position = torch.arange(400)
    powers = torch.exp(log_lambda[:, None] * torch.arange(800))
    kernel = (w @ powers).real
    hankel = torch.cat([row[position[:, None] + position] for row in kernel])
    expected = torch.linalg.svdvals(hankel)[: 2 * states]
    whole = balance(log_lambda, w)
    sigma = whole.singular_values
    assert sigma.shape == (2 * states,)
    torch.testing.assert_close(sigma, expected, rtol=0, atol=1e-13 * expected[0].item())
    if kind == "real":
        assert whole.rank() <= states


@pytest.mark.parametrize("kind", ["short", "long"])
def test_balanced_coordinates_have_both_gramians_diagonal_and_the_same_kernel(kind):
    log_lambda, w = modes(kind, 3)
    A, B, C, sigma = balance(log_lambda, w)
    P = torch.diag(sigma)
    assert (A @ P @ A.T + torch.outer(B, B) - P).abs().max() < 1e-11 * sigma[0]
    assert (A.T @ P @ A + C.T @ C - P).abs().max() < 1e-11 * sigma[0]
    x = B
    for k in range(20):
        expected = (w * (log_lambda * k).exp()).sum(-1).real
        torch.testing.assert_close(C @ x, expected, rtol=0, atol=1e-12)
        x = A @ x
