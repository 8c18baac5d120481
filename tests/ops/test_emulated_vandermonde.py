"""The CUDA kernels of Vandermonde products on a CPU: Hopper's and the portable ones."""

import pytest
import torch
from kernels import answers, assert_same_bits
from support import relative_error, tf32

from dlrnn.ops import reference
from dlrnn.ops.cuda import channel_vandermonde, nvrtc, vandermonde
from dlrnn.ops.cuda.replay import Replayed


@pytest.fixture(autouse=True, params=[(9, 0), (8, 6)], ids=["hopper", "portable"])
def capability(request, emulated, monkeypatch):
    """The kernels of these GPUs run on three multiprocessors."""
    monkeypatch.setattr(nvrtc, "capability", lambda _: request.param)
    return request.param


def test_the_gpu_decides_which_kernels_run(capability):
    have = vandermonde.kernels_for(torch.device("cpu"))
    assert have == (vandermonde.HOPPER if capability == (9, 0) else vandermonde.PORTABLE)


def test_shared_memory_fits_the_gpu(capability, monkeypatch):
    used, load = [], nvrtc.load

    def note(files, name, defines, shared_bytes, device):
        used.append(shared_bytes)
        return load(files, name, defines, shared_bytes, device)

    monkeypatch.setattr(nvrtc, "load", note)
    W, log_lambda, dK = problem(1, 5, 7)
    vandermonde.vandermonde(W, log_lambda, 7)
    vandermonde.gradients(dK, W, log_lambda)
    channel_vandermonde.product(W[:, None], log_lambda[None], 7)
    channel_vandermonde.gradients(dK[:, None], W[:, None], log_lambda[None])
    assert max(used) <= nvrtc.SHARED_MEMORY.get(capability, nvrtc.LEAST_SHARED_MEMORY)


SIZES = [  # rows, states, positions
    (1, 1, 1),
    (3, 5, 7),
    (33, 40, 130),  # two tiles of rows, two chunks of states
    (3, 300, 70),  # three tiles of states; the product in three parts of up to four chunks
    (70, 5, 600),  # two tiles of positions; the moments in parts of several steps
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_vandermonde(size):
    rows, states, length = size
    W, log_lambda, dK = torch.randn(rows, states, 2), modes(states), torch.randn(rows, length)
    have = vandermonde.vandermonde(W, log_lambda, length)
    moments = vandermonde.adjoint(dK, log_lambda) * torch.tensor([1, -1])
    found = have, *vandermonde.gradients(dK, W, log_lambda)
    _, d_W, _ = assert_right(found, reference.vandermonde, W, log_lambda, dK)
    assert relative_error(moments, d_W) < 5e-7


def test_positions_beyond_the_fine_table_of_powers():
    W, log_lambda = torch.randn(1, 2, 2), modes(2)
    have = vandermonde.vandermonde(W, log_lambda, 33000)
    assert relative_error(have, reference.vandermonde(W.double(), log_lambda, 33000)) < 5e-7


@pytest.mark.parametrize(
    "size", [(1, 1, 1, 1), (1, 3, 5, 7), (2, 2, 70, 700), (1, 1, 40, 4200)], ids=str
)
def test_channel_vandermonde(size):
    rows, channels, states, length = size
    W, dK = torch.randn(rows, channels, states, 2), torch.randn(rows, channels, length)
    log_lambda = modes(channels, states)
    have = channel_vandermonde.product(W, log_lambda, length)
    moments = channel_vandermonde.adjoint(dK, log_lambda) * torch.tensor([1, -1])
    found = have, *channel_vandermonde.gradients(dK, W, log_lambda)
    _, d_W, _ = assert_right(found, reference.channel_vandermonde, W, log_lambda, dK)
    assert relative_error(moments, d_W) < 5e-7


def modes(*shape):
    """log lambda of random modes; the first is on the unit circle, the others inside."""
    real = -torch.rand(shape, dtype=torch.float64) * torch.linspace(0, 0.7, shape[-1])
    return torch.stack((real, 6 * torch.rand(shape, dtype=torch.float64)), -1)


def assert_right(have, definition, W, log_lambda, dK):
    """The product and its gradients equal those of the definition, which are returned."""
    inputs = W.double(), log_lambda
    exact = answers(lambda *both: definition(*both, dK.shape[-1]), inputs, dK)
    for ours, wanted in zip(have, exact, strict=True):
        assert relative_error(ours, wanted) < 5e-7
    return exact


def problem(rows, states, length):
    """W, log lambda and dK."""
    W, dK = torch.randn(rows, states, 2), torch.randn(rows, length)
    return W, modes(states), dK


def test_nan_and_scale_of_a_row_stay_in_it():
    W, log_lambda, dK = problem(9, 40, 200)
    W, dK = (x * 10.0 ** torch.linspace(-20, 20, 9).view(-1, *[1] * (x.dim() - 1)) for x in (W, dK))
    W[3, 5, 0] = dK[3, 7] = torch.nan
    clean = [row for row in range(9) if row != 3]
    have = vandermonde.vandermonde(W, log_lambda, 200)
    moments = vandermonde.adjoint(dK, log_lambda)
    assert have[3].isnan().all()
    assert moments[3].isnan().all()
    exact = reference.vandermonde(W[clean].double(), log_lambda, 200)
    d_W = vandermonde.gradients(dK, W.nan_to_num(0), log_lambda)[0]
    assert torch.equal(moments[clean], d_W[clean] * torch.tensor([1, -1]))
    for row, wanted in zip(have[clean], exact, strict=True):
        assert relative_error(row, wanted) < 1e-6
    d_log_lambda = vandermonde.gradients(dK, W.nan_to_num(0), log_lambda)[1]
    assert d_log_lambda.isnan().all()


def test_one_product_of_halves_if_pytorch_allows_tf32():
    W, log_lambda, dK = problem(3, 40, 130)
    exact = answers(lambda *both: reference.vandermonde(*both, 130), (W.double(), log_lambda), dK)
    with tf32():
        have = (
            vandermonde.vandermonde(W, log_lambda, 130),
            *vandermonde.gradients(dK, W, log_lambda),
        )
    for ours, wanted in zip(have, exact, strict=True):
        assert 1e-5 < relative_error(ours, wanted) < 1e-3


def test_calls_can_be_replayed(capability):
    def both(dK, W, log_lambda):
        return (
            vandermonde.vandermonde(W, log_lambda, dK.shape[-1]),
            *vandermonde.gradients(dK, W, log_lambda),
        )

    function = Replayed(both, lambda: capability)
    for _ in range(3):
        W, log_lambda, dK = problem(3, 40, 70)
        have = function(dK, W, log_lambda)
    assert_same_bits(have, both(dK, W, log_lambda))
