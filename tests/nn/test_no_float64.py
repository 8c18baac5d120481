"""Layers on a device without float64, as Apple's GPUs (MPS) are: tables come from the CPU."""

import sys

import pytest
import torch
from mixers import STREAMING
from support import assert_close, refused
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dlrnn import ops
from dlrnn.nn import DLR
from dlrnn.ops import pairs, reference

FAKE = "lazy"  # a device that this PyTorch cannot run, but fake tensors can lie on
WIDE = torch.float64, torch.complex128
# The router of experts asks for autocast, which the fake device has not; a tape needs float64.
LAYERS = {form: make for form, make in STREAMING.items() if form not in {"experts", "tape"}} | {
    "prod": lambda **_: DLR(4, 3, cast="prod"),
    "real": lambda **_: DLR(4, 6, real=True),
    "bidirectional": lambda **_: DLR(4, 6, bidirectional=True),
}


@pytest.fixture
def without():
    """Declares that a type of devices has no float64 numbers."""
    before = set(pairs.NO_FLOAT64)
    yield pairs.NO_FLOAT64.add
    pairs.NO_FLOAT64.clear()
    pairs.NO_FLOAT64.update(before)


class RefusesFloat64(TorchDispatchMode):
    """Raises where an operation gives a float64 tensor on the fake device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == FAKE:
                assert leaf.dtype not in WIDE, f"{function} gives float64"
        return result


def test_the_mode_can_fail():
    with FakeTensorMode(), RefusesFloat64(), pytest.raises(AssertionError, match="float64"):
        torch.zeros(3, device=FAKE).double()


@pytest.mark.parametrize("form", LAYERS)
def test_forward_backward_chunks_and_steps_need_none(form, without):
    without(FAKE)
    with FakeTensorMode(), RefusesFloat64(), torch.device(FAKE):
        layer = LAYERS[form]().eval()
        x = torch.randn(2, 15, 4, requires_grad=True)
        layer(x).sum().backward()
        assert all(p.grad is None or p.grad.device.type == FAKE for p in layer.parameters())
        if not layer.bidirectional:
            _, state = layer(x[:, :7], return_state=True)
            _, state = layer(x[:, 7:], state, return_state=True)
            y, state = layer.step(x[:, 0], state)
            assert {t.device.type for t in tree_leaves((y, state))} == {FAKE}


@pytest.mark.parametrize("form", ["dlr", "dss", "s4d", "prod"])
def test_the_answers_are_right(form, without):
    torch.manual_seed(0)
    layer = LAYERS[form]().eval()
    x = torch.randn(2, 40, 4)
    wanted = layer.double()(x.double())
    without("cpu")
    state, outputs = None, []
    layer.float()
    assert_close(layer(x), wanted, 1e-5)
    for x_t in x.unbind(1):
        y, state = layer.step(x_t, state)
        outputs.append(y)
    assert_close(torch.stack(outputs, dim=1), wanted, 1e-5)


def test_ten_thousand_steps_keep_their_phase(without):
    """With plain fp32 products the error is 2e-4."""
    without("cpu")
    torch.manual_seed(0)
    log_lambda = torch.stack((torch.zeros(4), torch.tensor([0.1, 1.0, 2.0, 3.0])), dim=-1)
    W, state = torch.randn(1, 4, 2), torch.randn(1, 1, 4, 2)
    exact = tree_map_only(torch.Tensor, torch.Tensor.double, state)
    for _ in range(10000):
        _, state = ops.step(torch.zeros(1, 1), W, log_lambda.double(), state)
    lam = torch.exp(10000 * torch.view_as_complex(log_lambda.double()))
    assert_close(state, torch.view_as_real(lam * torch.view_as_complex(exact)), 5e-6)


def test_a_tape_is_refused(without):
    tape = STREAMING["tape"]()
    without("cpu")
    with refused("TapeDLR", "float64", "CUDA"):
        tape(torch.randn(1, 5, 4))


def test_a_restricted_kernel_streams_elsewhere(without):
    without("cpu")
    layer = DLR(4, 6, kernel_length=5)
    assert torch.isfinite(layer(torch.randn(1, 9, 4))).all()
    with refused("kernel_length", "float64", "CPU"):
        layer.initial_state(1)


def test_gradients_are_right(monkeypatch, without):
    torch.manual_seed(0)
    W, log_lambda = torch.randn(3, 5, 2), torch.rand(5, 2) * torch.tensor([-0.01, 6.0])
    given = [t.requires_grad_() for t in (W, log_lambda)]
    exact = [t.detach().double().requires_grad_() for t in given]
    dK = torch.randn(3, 300)
    want = torch.autograd.grad(reference_product(*exact), exact, dK.double())
    without("cpu")
    monkeypatch.setattr(sys.modules["dlrnn.ops.vandermonde"], "SMALL", 0)
    have = torch.autograd.grad(ops.vandermonde(*given, 300), given, dK)
    for mine, other in zip(have, want, strict=True):
        assert_close(mine, other, 1e-5)


def reference_product(W, log_lambda):
    position = torch.arange(300)
    P = torch.exp(torch.view_as_complex(log_lambda)[:, None] * position)
    kernel = (torch.view_as_complex(W) @ P).real
    assert_close(kernel.detach(), reference.vandermonde(W.detach(), log_lambda.detach(), 300), 1e-9)
    return kernel
