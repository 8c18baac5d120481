"""The CUDA kernels of the Vandermonde products: at most twice the error of plain PyTorch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import answers, assert_same_bits, replayed
from support import DEVICE, random_modes, relative_error, tf32

from dlrnn import ops
from dlrnn.ops.cuda import channel_vandermonde, vandermonde
from dlrnn.ops.cuda.nvrtc import ceil_div

ROUNDING = 2**-22  # of a product of two numbers that have two fp16 halves each

SIZES = [  # rows, N, L
    (1, 1, 1),
    (3, 5, 7),
    (20, 33, 129),
    (130, 70, 1025),
    (128, 1024, 4096),
    (256, 100, 5000),
    (32, 600, 2**17 + 1),
    (4, 16, 2**20),
]
CHANNEL_SIZES = [  # rows, H, N, L
    (1, 1, 1, 1),
    (2, 3, 5, 7),
    (1, 1, 300, 9000),
    (3, 5, 130, 5000),
    (1, 128, 64, 4096),
    (2, 6, 1000, 4097),
    (32, 2, 20, 300),
    (1, 3, 16, 2**20),
]


@given(st.integers(1, 2**14), st.integers(1, 300), st.integers(1, 10**9))
def test_a_sum_is_cut_into_parts_that_cover_it(steps, tiles, size):
    for longest in (2**30, vandermonde.STEPS):
        share, parts = vandermonde.split_sum(steps, 132, lambda n: tiles * n, size, longest)
        assert (parts - 1) * share < steps <= parts * share
        assert parts <= vandermonde.PIECES
        assert share <= longest or parts == vandermonde.PIECES


def test_the_sizes_of_the_paper_fill_an_h200():
    for states, rows, steps in [(4096, 256, 64), (1024, 256, 128), (4096, 64, 4096)]:
        tiles = states // vandermonde.WIDTH

        def blocks(parts, tiles=tiles, rows=rows):
            return tiles * ceil_div(rows * parts, vandermonde.ROWS)

        size = 16 * rows * states
        share, parts = vandermonde.split_sum(steps, 132, blocks, size, vandermonde.STEPS)
        waves = ceil_div(blocks(parts), 132)
        assert tiles * rows / vandermonde.ROWS * steps > 0.9 * 132 * waves * share


def test_cpu_tensors_are_not_supported():
    W, log_lambda = random_modes(2, 3, torch.float32)
    assert not vandermonde.supports(W.cpu(), log_lambda)
    assert not channel_vandermonde.supports(W.cpu()[:, None], log_lambda)


def shared(rows, states, length):
    """The op with one lambda for all rows, its kernels, and arguments for both."""
    W, log_lambda = random_modes(rows, states, torch.float32)
    dK = torch.randn(rows, length, device=DEVICE)
    return vandermonde.vandermonde, vandermonde, ops.vandermonde, W, log_lambda, dK


def own(rows, channels, states, length):
    """The same where each channel has its own."""
    W, log_lambda = random_modes(rows, channels * states, torch.float32)
    W, log_lambda = W.view(rows, channels, states, 2), log_lambda.view(channels, states, 2)
    dK = torch.randn(rows, channels, length, device=DEVICE)
    kernels = channel_vandermonde
    return kernels.product, kernels, ops.channel_vandermonde, W, log_lambda, dK


def with_gradients(op, W, log_lambda, dK):
    return answers(lambda *both: op(*both, dK.shape[-1]), (W, log_lambda), dK)


@pytest.mark.gpu
class TestOnAGPU:
    @pytest.mark.parametrize("case", [shared, own])
    def test_supported_inputs(self, case):
        _, kernels, _, W, log_lambda, _ = case(*(CHANNEL_SIZES[1] if case is own else SIZES[1]))
        assert kernels.supports(W, log_lambda)
        assert not kernels.supports(W.double(), log_lambda)
        assert not kernels.supports(W[:0], log_lambda)

    @pytest.mark.parametrize("size", [*SIZES, *CHANNEL_SIZES], ids=str)
    def test_at_most_twice_the_error_of_plain_pytorch(self, size):
        _, kernels, op, W, log_lambda, dK = (shared if len(size) == 3 else own)(*size)
        have = with_gradients(op, W, log_lambda, dK)
        with ops.use_backend("torch"):
            plain = with_gradients(op, W, log_lambda, dK)
            truth = with_gradients(op, W.double(), log_lambda, dK.double())
        for ours, theirs, exact in zip(have, plain, truth, strict=True):
            assert ours.dtype == theirs.dtype
            allowed = max(2 * relative_error(theirs, exact), ROUNDING)
            assert relative_error(ours, exact) <= min(allowed, 1e-5)
        assert_same_bits(have, with_gradients(op, W, log_lambda, dK))
        moments = kernels.adjoint(dK, log_lambda)
        assert relative_error(ops.conjugate(moments), truth[1]) <= max(1e-6, ROUNDING)

    @pytest.mark.parametrize("size", [(128, 1024, 4096), (3, 5, 130, 5000)], ids=str)
    def test_tf32_is_used_if_pytorch_allows_it(self, size):
        _, _, op, W, log_lambda, dK = (shared if len(size) == 3 else own)(*size)
        with ops.use_backend("torch"):
            truth = with_gradients(op, W.double(), log_lambda, dK.double())
        before = with_gradients(op, W, log_lambda, dK)
        with tf32():
            errors = list(map(relative_error, with_gradients(op, W, log_lambda, dK), truth))
        assert max(errors) < 1e-3
        assert min(errors[len(size) - 3 :]) > 1e-5, "the channels' product has no tensor cores"
        assert_same_bits(before, with_gradients(op, W, log_lambda, dK))

    @pytest.mark.parametrize("case", [shared, own])
    def test_every_row_has_its_own_scale_and_nan(self, case):
        product, kernels, op, W, log_lambda, dK = case(
            *((1, 9, 40, 500) if case is own else (9, 40, 500))
        )
        size = 10.0 ** torch.linspace(-20, 20, 9, device=DEVICE)
        W, dK = W * size[:, None, None], dK * size[:, None]
        dK[..., 0, :] = 0
        have = product(W, log_lambda, 500), kernels.adjoint(dK, log_lambda)
        with ops.use_backend("torch"):
            adjoint = ops.channel_adjoint if case is own else ops.vandermonde_adjoint
            truth = op(W.double(), log_lambda, 500), adjoint(dK.double(), log_lambda)
        for ours, exact in zip(have, truth, strict=True):
            for row, wanted in zip(ours.view(9, -1), exact.view(9, -1), strict=True):
                assert relative_error(row, wanted) < 1e-6
        W[..., 3, 5, 0], dK[..., 3, 7] = float("nan"), float("nan")
        for ours in (product(W, log_lambda, 500), kernels.adjoint(dK, log_lambda).flatten(-2)):
            wrong = ours.isnan().flatten(0, -2).any(1).nonzero().flatten().tolist()
            assert wrong == [3], "a NaN stays in its row"

    def test_unaligned_inputs_and_second_derivatives(self):
        _, _, op, W, log_lambda, dK = shared(5, 40, 300)
        shifted = torch.empty(W.numel() + 1, device=DEVICE)[1:].view_as(W).copy_(W)
        assert torch.equal(op(shifted, log_lambda, 300), op(W, log_lambda, 300))
        inputs = W.requires_grad_(), log_lambda.requires_grad_()
        once = torch.autograd.grad(op(*inputs, 300), inputs, dK, create_graph=True)
        (twice,) = torch.autograd.grad(once[1].sum(), inputs[0])
        assert relative_error(once[0], with_gradients(op, *inputs, dK)[1]) < 1e-6
        assert twice.isfinite().all()

    def test_a_cuda_graph_repeats_the_answer(self):
        _, _, op, W, log_lambda, dK = shared(32, 64, 700)
        expected = with_gradients(op, W, log_lambda, dK)
        assert_same_bits(expected, replayed(lambda: with_gradients(op, W, log_lambda, dK)))
