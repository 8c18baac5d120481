"""Shared by the tests."""

import os
import subprocess
import sys

import torch
from torch import Tensor

DEVICE = torch.device(os.environ.get("DLRNN_TEST_DEVICE", "cpu"))


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||, absolute where the reference is exactly 0.

    NaN never passes a comparison.
    """
    value, reference = value.detach().cpu().double(), reference.detach().cpu().double()
    assert value.shape == reference.shape
    size = reference.norm().item()
    return (value - reference).norm().item() / (size if size else 1)


def assert_close(value: Tensor, reference: Tensor, tolerance: float) -> None:
    error = relative_error(value, reference)
    assert error <= tolerance, f"relative error {error:.2e}, allowed {tolerance:.0e}"


def random_modes(rows, states, dtype=torch.float64, modulus=(0.99, 1.0), seed=0):
    """W [rows, N, 2] and log lambda [N, 2] (float64) with |lambda| in the given range."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(rows, states, 2, generator=generator, dtype=torch.float64).to(dtype)
    low, high = modulus
    radius = low + (high - low) * torch.rand(states, generator=generator, dtype=torch.float64)
    phase = 6.3 * torch.rand(states, generator=generator, dtype=torch.float64)
    log_lambda = torch.stack((radius.log(), phase), dim=-1)
    return W.to(DEVICE), log_lambda.to(DEVICE)


def gradients(output, inputs, grad):
    return torch.autograd.grad(output, inputs, grad.to(output), materialize_grads=True)


def run_python(code: str, *arguments: str) -> str:
    """Run code in a fresh interpreter (no shape checker installed) and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:dlrnn", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
