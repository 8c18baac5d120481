"""The Triton kernels: their arithmetic in the interpreter, their speed's price on a GPU."""

import pytest
import torch
from support import DEVICE, random_modes, relative_error, run_python

from dlrnn import ops

pytest.importorskip("triton")

INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from dlrnn import ops
from dlrnn.ops.triton import vandermonde as kernels

torch.manual_seed(0)
for rows, states, length in [(1, 1, 1), (3, 5, 7), (8, 40, 500), (5, 70, 2500), (130, 3, 129)]:
    size = 10.0 ** torch.linspace(-20, 20, rows)[:, None]  # every row has its own scale
    W, v = torch.randn(rows, states, 2) * size[..., None], torch.randn(rows, length) * size
    v[0] = 0
    modulus, phase = 0.99 + 0.01 * torch.rand(states), 6.3 * torch.rand(states)
    log_lambda = torch.stack((modulus.log(), phase), dim=-1).double()
    K, M = kernels.vandermonde(W, log_lambda, length), kernels.adjoint(v, log_lambda)
    exact_K = ops.vandermonde(W.double(), log_lambda, length)
    exact_M = ops.vandermonde_adjoint(v.double(), log_lambda)
    for have, want in ((K, exact_K), (M, exact_M)):
        assert have.shape == want.shape
        have, want = have.double().flatten(1), want.flatten(1)
        error = ((have - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-300)).max().item()
        assert error < 1e-6, (rows, states, length, error)
print("right")
"""


def test_interpreted():
    assert run_python(INTERPRETED).strip() == "right"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: make test-gpu")
@pytest.mark.parametrize(
    ("rows", "states", "length"),
    [(1, 1, 1), (3, 5, 7), (20, 33, 129), (128, 1024, 4096), (256, 100, 5000), (4, 16, 2**20)],
)
def test_on_a_gpu(rows, states, length):
    from dlrnn.ops.triton import vandermonde as kernels

    W, log_lambda = random_modes(rows, states, torch.float32)
    v = torch.randn(rows, length, device=DEVICE)
    assert kernels.supports(W, log_lambda)
    assert not kernels.supports(W.double(), log_lambda)
    K, M = kernels.vandermonde(W, log_lambda, length), kernels.adjoint(v, log_lambda)
    assert relative_error(K, ops.vandermonde(W.double(), log_lambda, length)) < 1e-5
    assert relative_error(M, ops.vandermonde_adjoint(v.double(), log_lambda)) < 1e-5
    assert torch.equal(K, kernels.vandermonde(W, log_lambda, length)), "not deterministic"
    assert torch.equal(M, kernels.adjoint(v, log_lambda)), "not deterministic"
