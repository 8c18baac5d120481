"""DSS and S4D, the diagonal state spaces: each equals its definition, and streams by its modes."""

import math

import pytest
import torch
from mixers import convolved
from support import DEVICE, assert_agree, assert_close, gradients

from dlrnn.nn import DSS, S4D, param_groups
from dlrnn.ops import reference

both = pytest.mark.parametrize("mixer", [DSS, S4D])


def make(mixer, dtype=torch.float64, **options):
    return mixer(5, 10, **options).to(DEVICE, dtype)


def series(dt, Lambda):
    """`(exp(dt Lambda) - 1) / Lambda` as its series, whose derivatives lose no digits."""
    return dt * sum((dt * Lambda) ** j / float(math.factorial(j + 1)) for j in range(40))


def parameters_of(layer):
    """dt [H], Lambda and W, complex, in float64."""
    names = ("log_dt", "log_decay", "frequency", "W")
    log_dt, a, b, W = (getattr(layer, name).double().cpu() for name in names)
    return log_dt.exp(), torch.complex(-a.exp(), b), torch.complex(W[..., 0], W[..., 1])


def dss_by_definition(layer, x):
    """The layer as the paper's equations say it, from the raw parameters alone."""
    dt, Lambda, W = parameters_of(layer)
    length = min(x.shape[1], layer.kernel_length or x.shape[1])
    kernels = []
    for step, own in zip(dt.repeat(len(W) // len(dt)), W, strict=True):
        weight = own * series(step, Lambda)
        rows = [(weight * torch.exp(step * Lambda * k)).sum().real for k in range(length)]
        kernels.append(torch.stack(rows))
    return convolved(layer, x, torch.stack(kernels))


def s4d_by_definition(layer, x):
    """The full system of N states (each Lambda and its conjugate) run step by step."""
    dt, Lambda, W = parameters_of(layer)
    Lambda = torch.cat((Lambda, Lambda.conj()), dim=-1)  # [H, N]
    W = torch.cat((W, W.conj()), dim=-1)  # [H or 2 H, N]
    A = torch.exp(dt[:, None] * Lambda)
    state, entries = series(dt[:, None], Lambda), []
    for _ in range(min(x.shape[1], layer.kernel_length or x.shape[1])):
        entries.append((W * state.repeat(len(W) // len(dt), 1)).sum(-1).real)
        state = A * state
    return convolved(layer, x, torch.stack(entries, dim=-1))


DSS_OPTIONS = [
    {},
    {"kernel_length": 5},
    {"glu": True},
    {"project": False},
    {"bidirectional": True, "kernel_length": 9},
    {"frequency_step": 2 * math.pi, "dt_min": 1e-3, "dt_max": 0.1},
]
S4D_OPTIONS = [
    {},
    {"kernel_length": 5},
    {"glu": True},
    {"project": False},
    {"bidirectional": True, "kernel_length": 9},
    {"d_state": 2, "dt_min": 1e-5, "dt_max": 1e-4},
]


@pytest.mark.parametrize("length", [1, 2, 33])
@pytest.mark.parametrize(
    ("mixer", "by_definition", "options"),
    [
        *((DSS, dss_by_definition, options) for options in DSS_OPTIONS),
        *((S4D, s4d_by_definition, options) for options in S4D_OPTIONS),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_values_and_gradients_equal_the_definition(mixer, by_definition, options, length):
    layer = mixer(4, **{"d_state": 6, **options}).to(DEVICE, torch.float64)
    x = torch.randn(2, length, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    inputs = (x, *layer.parameters())
    assert_agree(layer(x), by_definition(layer, x), inputs, 1e-12, 1e-11)


@both
def test_modes_are_a_recurrence(mixer):
    layer = make(mixer, project=False)
    x = torch.randn(2, 30, 5, dtype=torch.float64, device=DEVICE)
    W, log_lambda, D = layer.modes()
    assert log_lambda.dtype == torch.float64
    assert log_lambda.shape == W.shape == (5, 10 if mixer is DSS else 5, 2)
    y, last = reference.recurrence(x.cpu(), W.cpu(), log_lambda.cpu())
    have, state = layer(x, return_state=True)
    assert_close(have, y + D.cpu() * x.cpu(), 1e-12)
    assert_close(state.x, last, 1e-12)
    assert layer.initial_state(3).x.shape == (3, *W.shape)


@both
def test_a_long_walk_keeps_its_phase(mixer):
    """2000 steps in fp32, against the whole in float64."""
    layer = mixer(2, 64, project=False, dt_min=1e-6, dt_max=1e-5).to(DEVICE)
    exact = mixer(**layer.options()).to(DEVICE).double()
    exact.load_state_dict(layer.state_dict())
    x, state = torch.randn(1, 2000, 2, device=DEVICE), None
    with torch.no_grad():
        for x_t in x.unbind(1):
            _, state = layer.step(x_t, state)
        _, expected = exact(x.double(), return_state=True)
    assert_close(state.x, expected.x, 1e-5)


@both
def test_kernel_parameters_get_no_weight_decay(mixer):
    layer = make(mixer)
    other, kernel = param_groups(layer, lr=1e-3, weight_decay=0.1)
    assert {id(p) for p in kernel["params"]} == {
        id(p) for p in (layer.log_decay, layer.frequency, layer.log_dt, layer.W)
    }
    assert kernel["weight_decay"] == 0
    assert len(other["params"]) == 3


# ---------------------------------------------------------------------------------- DSS


def test_dss_with_a_lambda_of_zero_sums():
    """At Lambda = 0 the system is a sum: every entry of the kernel is `Delta Re W`."""
    layer = DSS(2, 1).to(DEVICE, torch.float64)
    with torch.no_grad():
        layer.log_decay.fill_(-1000)  # exp(-1000) is 0 in float64
    kernel = layer.kernel(20)
    assert_close(kernel, (layer.log_dt.exp() * layer.W[:, 0, 0])[:, None].expand(2, 20), 1e-13)
    parameters = [getattr(layer, name) for name in layer.kernel_parameters]
    for gradient in torch.autograd.grad(kernel.sum(), parameters):
        assert gradient.isfinite().all()


def test_fp32_of_dss_at_a_long_length_gradients_included():
    """Phases of up to 0.01 pi 512 a step, 65536 steps."""
    layer = DSS(3, 512).to(DEVICE)
    exact = DSS(3, 512).to(DEVICE).double()
    exact.load_state_dict(layer.state_dict())
    grad = torch.randn(3, 2**16)
    kernel, expected = layer.kernel(2**16), exact.kernel(2**16)
    assert_close(kernel, expected, 1e-5)
    names = layer.kernel_parameters
    have = gradients(kernel, [getattr(layer, name) for name in names], grad)
    want = gradients(expected, [getattr(exact, name) for name in names], grad)
    for a, b in zip(have, want, strict=True):
        assert_close(a, b, 1e-5)


def test_state_dict_keys_of_dss():
    keys = {"log_decay", "frequency", "log_dt", "W", "D", "out.weight", "out.bias"}
    assert set(DSS(4, 6).state_dict()) == keys
    both = DSS(4, 6, bidirectional=True)
    assert (both.W.shape, both.frequency.shape, both.log_dt.shape) == ((8, 6, 2), (6,), (4,))
    assert not any(p.is_complex() for p in both.parameters())


def test_parameter_counts_of_dss_in_tables_1_and_2():
    """Beside the layer: a norm, an encoder and a decoder of a few features."""
    small = sum(p.numel() for p in DSS(32, 4096).parameters()) + 3 * 32 + 32 + 2 * 32 + 32 * 8 + 8
    assert abs(small - 272_000) < 500
    large = sum(p.numel() for p in DSS(128, 4096).parameters())
    assert large == 2 * 128 * 4096 + 2 * 4096 + 2 * 128 + 128 * 128 + 128
    assert round(large / 1e6, 1) == 1.1


def test_initialisation_of_dss():
    layer = DSS(512, 64, dt_min=1e-3, dt_max=0.1)
    assert torch.equal(layer.log_decay, torch.full((64,), math.log(0.5)))
    n = torch.arange(64).double()
    torch.testing.assert_close(layer.frequency.detach(), (math.pi * n).float())
    papers = DSS(2, 64, frequency_step=2 * math.pi).frequency.detach()
    torch.testing.assert_close(papers, (2 * math.pi * n).float())
    dt = layer.log_dt.double().exp()
    assert dt.min() >= 1e-3 * (1 - 1e-5)
    assert dt.max() <= 0.1 * (1 + 1e-5)
    middle = (math.log(1e-3) + math.log(0.1)) / 2
    assert layer.log_dt.mean().item() == pytest.approx(middle, abs=0.2)
    assert layer.W.std().item() == pytest.approx(1, rel=0.02)


# ---------------------------------------------------------------------------------- S4D


def test_fp32_of_s4d_at_a_long_length():
    """dt_max 0.1 and the highest frequency turn 128 rad a step: phases of 8e6 are reduced."""
    layer = S4D(4).to(DEVICE)
    exact = S4D(4).to(DEVICE).double()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(1, 2**16, 4, device=DEVICE)
    assert_close(layer.kernel(2**16), exact.kernel(2**16), 1e-5)
    assert_close(layer(x), exact(x.double()), 1e-5)


def test_initialisation_of_s4d_is_the_inverse_law():
    layer = S4D(512, 64)
    expected = [64 / math.pi * (64 / (2 * n + 1) - 1) for n in range(32)]
    torch.testing.assert_close(layer.frequency.detach(), torch.tensor(expected).expand(512, 32))
    assert torch.equal(layer.log_decay, torch.full((512, 32), math.log(0.5)))
    dt = layer.log_dt.double().exp()
    assert dt.min() >= 1e-3 * (1 - 1e-5)
    assert dt.max() <= 0.1 * (1 + 1e-5)
    assert layer.W.square().sum(-1).mean().item() == pytest.approx(1, rel=0.03)


def test_state_dict_keys_and_shapes_of_s4d():
    keys = {"log_decay", "frequency", "log_dt", "W", "D", "out.weight", "out.bias"}
    assert set(S4D(4, 6).state_dict()) == keys
    both = S4D(4, 6, bidirectional=True)
    assert (both.W.shape, both.frequency.shape, both.log_dt.shape) == ((8, 3, 2), (4, 3), (4,))
    assert S4D(4).d_state == 64
    assert sum(p.numel() for p in S4D(4).parameters()) == 4 * 32 * 4 + 4 + 4 + 4 * 4 + 4
