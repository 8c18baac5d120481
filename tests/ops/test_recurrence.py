import sys
from types import SimpleNamespace

import pytest
import torch
from support import DEVICE, assert_agree, assert_close, random_modes
from torch._dynamo.testing import EagerAndRecordGraphs

from dlrnn import DLR, ops
from dlrnn.ops import dispatch, reference

B, L, H, N = 2, 37, 3, 5


def problem(dtype=torch.float64):
    W, log_lambda = random_modes(H, N, dtype)
    u = torch.randn(B, L, H, dtype=dtype, device=DEVICE)
    state = torch.randn(B, H, N, 2, dtype=dtype, device=DEVICE)
    return tuple(t.requires_grad_() for t in (u, W, log_lambda, state))


def test_steps_follow_the_recurrence():
    u, W, log_lambda, state = problem()
    expected, last = reference.recurrence(*(t.cpu() for t in (u, W, log_lambda, state)))
    outputs = []
    for k in range(L):
        y, state = ops.step(u[:, k], W, log_lambda, state)
        outputs.append(y)
    assert_close(torch.stack(outputs, dim=1), expected, 1e-13)
    assert_close(state, last, 1e-13)


def test_a_chunk_equals_its_steps_gradients_included():
    inputs = u, W, log_lambda, state = problem()
    expected, last = reference.recurrence(*(t.cpu() for t in inputs))
    kernel = ops.vandermonde(W, log_lambda, L)
    y = ops.convolution(u, kernel) + ops.response(W, log_lambda, state, L)
    x = ops.advance(u, log_lambda, state)
    assert_close(y, expected, 1e-13)
    assert_close(x, last, 1e-13)
    have, want = (torch.cat([t.flatten() for t in pair]) for pair in ((y, x), (expected, last)))
    assert_agree(have, want, inputs, 1e-13, 1e-12)


def test_an_input_that_leaves_the_window_is_forgotten():
    """After `window` steps more, the state is that of the last `window` inputs alone."""
    u, W, log_lambda, _ = (t.detach() for t in problem())
    window, state = 7, torch.zeros(B, H, N, 2, dtype=torch.float64, device=DEVICE)
    for k in range(L):
        leaving = u[:, k - window] if k >= window else torch.zeros_like(u[:, 0])
        _, state = ops.step(u[:, k], W, log_lambda, state, leaving=leaving, window=window)
    assert_close(state, ops.advance(u[:, -window:], log_lambda), 1e-13)


def test_a_long_walk_keeps_its_phase():
    """6000 steps in fp32 with |lambda| = 1 - 1e-7: a rounded lambda would be off by 6e-5."""
    W, log_lambda = random_modes(1, 256, torch.float32, modulus=(1 - 2e-7, 1 - 1e-7))
    u = torch.randn(6000, 1, 1, device=DEVICE)
    state, rounded = torch.zeros(2, 1, 1, 256, 2, device=DEVICE)
    exact = torch.zeros(1, 1, 256, dtype=torch.complex128, device=DEVICE)
    lam = torch.exp(torch.complex(*log_lambda.unbind(-1)))
    lam_rounded = torch.view_as_real(lam).float()
    one = torch.tensor([1.0, 0.0], device=DEVICE)
    with torch.no_grad():
        for u_k in u:
            _, state = ops.step(u_k, W, log_lambda, state)
            exact = lam * exact + u_k[..., None]
            rounded = ops.pair_product(lam_rounded, rounded) + u_k[..., None, None] * one
    assert_close(state, torch.view_as_real(exact), 3e-6)
    with pytest.raises(AssertionError):
        assert_close(rounded, torch.view_as_real(exact), 3e-5)


def test_align_right_moves_padding_to_the_front():
    u = torch.arange(1.0, 9.0).view(2, 4, 1)
    moved = ops.align_right(u, torch.tensor([2, 0]))
    assert moved[..., 0].tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]
    assert torch.equal(ops.align_right(u, torch.tensor([4, 4])), u)


def test_advance_with_lengths_decays_by_each_length():
    u, _, log_lambda, state = problem()
    lengths = torch.tensor([L, 11], device=DEVICE)
    x = ops.advance(ops.align_right(u, lengths), log_lambda, state, lengths)
    assert_close(x[0], ops.advance(u[:1], log_lambda, state[:1])[0], 1e-13)
    assert_close(x[1], ops.advance(u[1:, :11], log_lambda, state[1:])[0], 1e-13)


@pytest.mark.parametrize("states", [1, 2, 7])
def test_prod_modes_make_the_prod_kernel(states):
    W, log_lambda = random_modes(H, states)
    re, im = ops.complex_vandermonde(W, log_lambda, 50)
    W_pairs, log_pairs = ops.prod_modes(W, log_lambda)
    assert log_pairs.shape == (states * (states + 1) // 2, 2)
    assert_close(ops.vandermonde(W_pairs, log_pairs, 50), re * im, 1e-12)


@pytest.mark.parametrize("windowed", [False, True])
def test_compilers_see_one_op(windowed):
    u, W, log_lambda, x = (t.detach().float() for t in problem())
    given = u[:, 0], W, log_lambda.double(), None, x.double() if windowed else x, u[0, 0]
    if windowed:
        ring = torch.randn(B, 5, H, device=DEVICE), torch.tensor([4], device=DEVICE)
        torch.library.opcheck(torch.ops.dlrnn.windowed_step.default, (*given, *ring))
    else:
        torch.library.opcheck(torch.ops.dlrnn.step.default, (*given, None, 0))
        torch.library.opcheck(torch.ops.dlrnn.step.default, (*given, u[:, 1], 3))


def test_a_compiled_layer_streams_without_breaks(monkeypatch, unchecked):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(sys.modules["dlrnn.ops.recurrence"], "may_fuse", lambda *_: True)
    for options in ({}, {"kernel_length": 3}):
        layer = DLR(4, 6, **options).to(DEVICE).eval()
        backend = EagerAndRecordGraphs()
        step = torch.compile(layer.step, fullgraph=True, backend=backend)
        with torch.no_grad():
            state = expected_state = layer.initial_state(2)
            for x in torch.randn(5, 2, 4, device=DEVICE):
                y, state = step(x, state)
                expected_y, expected_state = layer.step(x, expected_state)
                assert_close(y, expected_y, 1e-6)
                assert_close(state.x, expected_state.x, 1e-6)
        assert any("dlrnn" in str(node.target) for node in backend.graphs[0].graph.nodes)


@pytest.mark.usefixtures("unchecked")
def test_the_kernel_is_not_for_recorded_gradients_nor_for_the_cpu():
    may_fuse = sys.modules["dlrnn.ops.recurrence"].may_fuse
    plain, leaf = (SimpleNamespace(is_cuda=True, requires_grad=each) for each in (False, True))
    on_cpu = SimpleNamespace(is_cuda=False, requires_grad=False)
    assert may_fuse(plain, None, plain)
    for given in ((plain, leaf), (leaf, plain), (plain, on_cpu), (on_cpu, plain)):
        assert not may_fuse(*given)
    with torch.no_grad():
        assert may_fuse(plain, leaf)


def test_gradients_through_a_state_are_those_of_pytorch():
    """Where gradients are recorded, the kernel does not run."""
    layer = DLR(4, 6).to(DEVICE)
    x = torch.randn(2, 4, device=DEVICE, requires_grad=True)
    with dispatch.recorded() as choices:
        y, state = layer.step(x)
        y, _ = layer.step(x, state)
    assert {choice.backend for choice in choices if choice.op == "step"} == {"torch"}
    wanted = layer.double()(torch.stack((x, x), 1).double())[:, 1]
    assert_close(y, wanted, 1e-5)
    have, want = (torch.autograd.grad(each.sum(), x)[0] for each in (y, wanted))
    assert_close(have, want, 1e-5)
