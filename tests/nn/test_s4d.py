import math

import pytest
import torch
from support import DEVICE, assert_close, gradients

from dlrnn.nn import S4D


def by_definition(layer, x):
    """The full system of N states (each Lambda and its conjugate) run step by step, in float64."""
    a, b, log_dt, W, D, x = (
        t.double().cpu()
        for t in (layer.log_decay, layer.frequency, layer.log_dt, layer.W, layer.D, x)
    )
    Lambda, W = torch.complex(-a.exp(), b), torch.complex(W[..., 0], W[..., 1])
    Lambda = torch.cat((Lambda, Lambda.conj()), dim=-1)  # [H, N]
    W = torch.cat((W, W.conj()), dim=-1)  # [H or 2 H, N]
    z = log_dt.exp()[:, None] * Lambda
    A = torch.exp(z)  # B: (A - 1) / Lambda as its series, whose derivatives lose no digits
    B = log_dt.exp()[:, None] * sum(z**j / float(math.factorial(j + 1)) for j in range(30))
    H, length = layer.d_model, x.shape[1]

    def impulse(weight):
        state, kernel = B, []
        for _ in range(length):
            kernel.append((weight * state).sum(-1).real)
            state = A * state
        K = torch.stack(kernel, dim=-1)
        cut = torch.arange(length) < (layer.kernel_length or length)
        return torch.where(cut, K, 0)

    right = impulse(W[:H])
    y = [sum(right[:, i - j] * x[:, j] for j in range(i + 1)) for i in range(length)]
    if layer.bidirectional:
        left = impulse(W[H:])
        for i in range(length):
            y[i] = sum((left[:, j - i - 1] * x[:, j] for j in range(i + 1, length)), start=y[i])
    y = torch.stack(y, dim=1) + D * x
    if not layer.project:
        return y
    y = torch.nn.functional.gelu(y)
    y = y @ layer.out.weight.double().cpu().T + layer.out.bias.double().cpu()
    return y[..., :H] * y[..., H:].sigmoid() if layer.glu else y


OPTIONS = [
    {},
    {"kernel_length": 5},
    {"glu": True},
    {"project": False},
    {"bidirectional": True, "kernel_length": 9},
    {"d_state": 2, "dt_min": 1e-5, "dt_max": 1e-4},
]


@pytest.mark.parametrize("length", [1, 2, 33])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layer_is_its_definition_gradients_included(options, length):
    layer = S4D(4, **{"d_state": 6, **options}).to(DEVICE, torch.float64)
    x = torch.randn(2, length, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    y, expected = layer(x), by_definition(layer, x)
    assert_close(y, expected, 1e-12)
    inputs, grad = (x, *layer.parameters()), torch.randn_like(expected)
    want = gradients(expected, inputs, grad)
    for have, wanted in zip(gradients(y, inputs, grad), want, strict=True):
        assert_close(have, wanted, 1e-11)


def test_fp32_at_a_long_length():
    """dt_max 0.1 and the highest frequency turn 128 rad a step: phases of 8e6 are reduced."""
    layer = S4D(4).to(DEVICE)
    exact = S4D(4).to(DEVICE).double()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(1, 2**16, 4, device=DEVICE)
    assert_close(layer.kernel(2**16), exact.kernel(2**16), 1e-5)
    assert_close(layer(x), exact(x.double()), 1e-5)


def test_initialisation_is_the_inverse_law():
    layer = S4D(512, 64)
    expected = [64 / math.pi * (64 / (2 * n + 1) - 1) for n in range(32)]
    torch.testing.assert_close(layer.frequency.detach(), torch.tensor(expected).expand(512, 32))
    assert torch.equal(layer.log_decay, torch.full((512, 32), math.log(0.5)))
    dt = layer.log_dt.double().exp()
    assert dt.min() >= 1e-3 * (1 - 1e-5)
    assert dt.max() <= 0.1 * (1 + 1e-5)
    assert layer.W.square().sum(-1).mean().item() == pytest.approx(1, rel=0.03)


def test_state_dict_keys_and_shapes():
    keys = {"log_decay", "frequency", "log_dt", "W", "D", "out.weight", "out.bias"}
    assert set(S4D(4, 6).state_dict()) == keys
    both = S4D(4, 6, bidirectional=True)
    assert (both.W.shape, both.frequency.shape, both.log_dt.shape) == ((8, 3, 2), (4, 3), (4,))
    assert S4D(4).d_state == 64
    assert sum(p.numel() for p in S4D(4).parameters()) == 4 * 32 * 4 + 4 + 4 + 4 * 4 + 4


def test_options_make_the_layer_again():
    options = {
        **{"d_model": 4, "d_state": 6, "bidirectional": True, "kernel_length": 9, "dt_min": 1e-2},
        **{"dt_max": 0.1, "glu": True, "activation": "silu", "dropout": 0.25, "project": True},
    }
    assert S4D(**options).options() == options


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"d_state": 7}, r"d_state must be even \(conjugate pairs\), not 7"),
        ({"d_state": 0}, "d_state must be a whole number of at least 1, not 0"),
        ({"d_model": "4"}, "d_model must be a whole number of at least 1, not '4'"),
        ({"dt_min": 0.2}, "0 < dt_min <= dt_max must hold, not 0.2 and 0.1"),
        ({"activation": "glue"}, "activation must be one of gelu, silu, relu, identity"),
    ],
    ids=str,
)
def test_bad_options(options, sentence, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        S4D(**{"d_model": 4, "d_state": 6, **options})


def test_unknown_option():
    with pytest.raises(TypeError, match="unexpected keyword argument 'bilinear'"):
        S4D(4, 6, bilinear=True)
