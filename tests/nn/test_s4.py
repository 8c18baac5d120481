import math

import pytest
import torch
from mixers import convolved
from support import DEVICE, assert_agree, assert_close, in_steps

from dlrnn.nn import S4, RecurrentState, param_groups
from dlrnn.ops import OnlineState

OPTIONS = [
    {},
    {"kernel_length": 9},
    {"kernel_length": 1},
    {"glu": True},
    {"project": False},
    {"bidirectional": True},
    {"bidirectional": True, "kernel_length": 9, "glu": True, "activation": "silu"},
]


def make(dtype=torch.float64, **options):
    """P and B with imaginary parts, decays that differ: as after training."""
    layer = S4(3, **{"d_state": 6, **options}).to(DEVICE, dtype)
    with torch.no_grad():
        for parameter in (layer.P, layer.B, layer.log_decay, layer.frequency):
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def complex_(pairs):
    return torch.complex(pairs[..., 0].double().cpu(), pairs[..., 1].double().cpu())


def discretised(A, B, dt):
    """The bilinear rule, by dense inverses."""
    identity = torch.eye(len(A), dtype=A.dtype)
    inverse = torch.linalg.inv(identity - dt / 2 * A)
    return inverse @ (identity + dt / 2 * A), dt * (inverse @ B)


def kernel_by_definition(layer, length):
    """The dense complex system of all N states, iterated: nothing diagonal, nothing transformed."""
    decay, frequency = layer.log_decay.double().cpu().exp(), layer.frequency.double().cpu()
    Lambda, P, B, C = torch.complex(-decay, frequency), *map(complex_, (layer.P, layer.B, layer.C))
    Lambda, P, B, C = (torch.cat((half, half.conj()), dim=-1) for half in (Lambda, P, B, C))
    A = torch.diag(Lambda) - torch.outer(P, P.conj())
    dt = layer.log_dt.double().cpu().exp().repeat(len(C) // layer.d_model)
    rows = []
    for row in range(len(C)):
        A_bar, x = discretised(A, B, dt[row])
        entries = []
        for _ in range(min(length, layer.kernel_length or length)):
            entries.append(C[row] @ x)
            x = A_bar @ x
        rows.append(torch.stack(entries))
    kernel = torch.stack(rows)
    assert kernel.imag.abs().max() < 1e-10
    return kernel.real


def by_definition(layer, x):
    return convolved(layer, x, kernel_by_definition(layer, x.shape[1]))


@pytest.mark.parametrize("length", [1, 2, 3, 33, 64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients_equal_the_definition(options, length):
    """A short kernel hardly depends on Lambda: that gradient has the rounding of larger ones."""
    layer, x = make(**options), random(2, length, 3).requires_grad_()
    inputs = (x, *layer.parameters())
    both = assert_agree(layer(x), by_definition(layer, x), inputs, 1e-12, 1e-9)
    together = (torch.cat([part.flatten().cpu() for part in parts]) for parts in both)
    assert_close(*together, 1e-12)


@pytest.mark.parametrize("states", [2, 6, 64])
def test_the_initial_layer_is_the_dense_legs_system(states):
    """From HiPPO's formula alone: A is real, lower triangular and far from normal.

    C lives in the coordinates of the layer; any other coordinates see it through the Markov
    parameters: the kernel read out along the state that an impulse makes is `B^T Abar^k Bbar`,
    which no change to unitary coordinates changes.
    """
    n = torch.arange(states, dtype=torch.float64)
    B = (2 * n + 1).sqrt()
    A = -(torch.outer(B, B).tril(-1) + torch.diag(n + 1))
    layer = S4(2, states, dt_min=1e-2, dt_max=1e-1).to(DEVICE).double()
    layer.reset_parameters()
    with torch.no_grad():
        layer.C.copy_(layer.B * torch.tensor([1.0, -1.0]).to(layer.B))  # C = B^*
    for dt, kernel in zip(layer.log_dt.exp().tolist(), layer.kernel(100), strict=True):
        A_bar, x = discretised(A, B, dt)
        expected = []
        for _ in range(100):
            expected.append(B @ x)
            x = A_bar @ x
        assert_close(kernel, torch.stack(expected), 1e-11)


@pytest.mark.parametrize("length", [100, 1001])
def test_fp32_against_the_dense_recurrence(length):
    layer = S4(4).to(DEVICE)
    x = random(1, length, 4, dtype=torch.float32)
    assert_close(layer.kernel(length), kernel_by_definition(layer, length), 1e-6)
    exact = S4(4).to(DEVICE).double()
    exact.load_state_dict(layer.state_dict())
    assert_close(layer(x), exact(x.double()), 1e-5)


def test_a_kernel_is_the_beginning_of_a_longer_one():
    layer = S4(4).to(DEVICE).double()
    kernel = layer.kernel(2000)
    for length in (1, 2, 7, 1000, 1999):
        assert_close(layer.kernel(length), kernel[:, :length], 1e-11)


def test_fp32_at_a_long_length():
    layer = S4(2, 16, dt_min=1e-5, dt_max=1e-4).to(DEVICE)
    exact = S4(2, 16).to(DEVICE).double()
    exact.load_state_dict(layer.state_dict())
    assert_close(layer.kernel(2**16), exact.kernel(2**16), 1e-6)


def test_every_parameter_value_is_stable():
    layer = make(d_state=8)
    with torch.no_grad():
        layer.P *= 30
        layer.log_decay -= 20
        layer.frequency *= 100
    assert layer.kernel(5000).isfinite().all()
    _, state = layer(random(1, 5000, 3), return_state=True)
    assert state.x.isfinite().all()


def test_state_dict_keys_and_parameter_groups():
    layer = S4(3, 6)
    kernel = {"log_decay", "frequency", "P", "B", "C", "log_dt"}
    assert set(layer.state_dict()) == kernel | {"D", "out.weight", "out.bias"}
    assert set(layer.kernel_parameters) == kernel
    assert not any(p.is_complex() for p in layer.parameters())
    _, group = param_groups(layer, lr=1e-3, weight_decay=0.1)
    assert (len(group["params"]), group["weight_decay"]) == (6, 0.0)
    both = S4(3, 6, bidirectional=True)
    assert both.C.shape == (6, 3, 2)
    assert both.log_dt.shape == (3,)


def test_parameter_count():
    """Per channel C (N real numbers), Delta and D; once Lambda, P and B, N each; the linear map."""
    have = sum(p.numel() for p in S4(128, 64).parameters())
    assert have == 128 * (64 + 2) + 3 * 64 + 128 * 129


def test_initialisation():
    torch.manual_seed(1)
    layer = S4(512, 64)
    assert math.log(1e-3) <= layer.log_dt.min() <= layer.log_dt.max() <= math.log(0.1)
    assert layer.log_dt.mean().item() == pytest.approx(math.log(1e-2), abs=0.2)
    assert layer.C.square().sum(-1).mean().item() == pytest.approx(1, rel=0.05)
    torch.testing.assert_close(layer.log_decay.detach(), torch.full((32,), math.log(0.5)))
    assert (layer.frequency > 0).all()
    assert layer.P[:, 0].min() > 0.1


def test_a_layer_on_meta_needs_no_values():
    with torch.device("meta"):
        assert S4(4, 6).C.is_meta


def test_fp32_keeps_its_accuracy_over_many_steps():
    layer = S4(2, dt_max=1e-3, project=False).to(DEVICE)
    x = random(1, 2000, 2, dtype=torch.float32)
    with torch.no_grad():
        assert_close(in_steps(layer, x)[0], layer(x), 1e-5)


def test_a_cut_kernel_streams_by_online_convolution():
    state = make().initial_state(2)
    assert isinstance(state, RecurrentState)
    assert state.x.shape == (2, 3, 3, 2)
    assert isinstance(make(kernel_length=9).initial_state(2), OnlineState)
