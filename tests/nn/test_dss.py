import math

import pytest
import torch
from support import DEVICE, assert_close, gradients

from dlrnn.nn import DSS
from dlrnn.ops import reference


def held(dt, Lambda):
    """`(exp(dt Lambda) - 1) / Lambda` as its series, whose derivatives lose no digits."""
    return dt * sum((dt * Lambda) ** j / float(math.factorial(j + 1)) for j in range(40))


def by_definition(layer, x):
    """The layer as the paper's equations say it, from the raw parameters alone, in float64."""
    a, b, log_dt, W, D, x = (
        t.double().cpu()
        for t in (layer.log_decay, layer.frequency, layer.log_dt, layer.W, layer.D, x)
    )
    Lambda, W = torch.complex(-a.exp(), b), torch.complex(W[..., 0], W[..., 1])
    dt = log_dt.exp().repeat(W.shape[0] // len(D))  # both directions have the channel's step
    length = min(x.shape[1], layer.kernel_length or x.shape[1])
    kernels = []
    for step, own in zip(dt, W, strict=True):
        weight = own * held(step, Lambda)
        rows = [(weight * torch.exp(step * Lambda * k)).sum().real for k in range(length)]
        kernels.append(torch.stack(rows))
    K, H = torch.stack(kernels), layer.d_model
    y = reference.convolution(x, K[:H], K[H:] if layer.bidirectional else None) + D * x
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
    {"frequency_step": 2 * math.pi, "dt_min": 1e-3, "dt_max": 0.1},
]


@pytest.mark.parametrize("length", [1, 2, 33])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layer_is_its_definition_gradients_included(options, length):
    layer = DSS(4, 6, **options).to(DEVICE, torch.float64)
    x = torch.randn(2, length, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    y, expected = layer(x), by_definition(layer, x)
    assert_close(y, expected, 1e-12)
    inputs, grad = (x, *layer.parameters()), torch.randn_like(expected)
    want = gradients(expected, inputs, grad)
    for have, wanted in zip(gradients(y, inputs, grad), want, strict=True):
        assert_close(have, wanted, 1e-11)


def test_a_lambda_of_zero_sums():
    """At Lambda = 0 the system is a sum: every entry of the kernel is `Delta Re W`."""
    layer = DSS(2, 1).to(DEVICE, torch.float64)
    with torch.no_grad():
        layer.log_decay.fill_(-1000)  # exp(-1000) is 0 in float64
    kernel = layer.kernel(20)
    assert_close(kernel, (layer.log_dt.exp() * layer.W[:, 0, 0])[:, None].expand(2, 20), 1e-13)
    parameters = [getattr(layer, name) for name in layer.kernel_parameters]
    for gradient in torch.autograd.grad(kernel.sum(), parameters):
        assert gradient.isfinite().all()


def test_fp32_at_a_long_length_gradients_included():
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


def test_state_dict_keys():
    keys = {"log_decay", "frequency", "log_dt", "W", "D", "out.weight", "out.bias"}
    assert set(DSS(4, 6).state_dict()) == keys
    both = DSS(4, 6, bidirectional=True)
    assert (both.W.shape, both.frequency.shape, both.log_dt.shape) == ((8, 6, 2), (6,), (4,))
    assert not any(p.is_complex() for p in both.parameters())


def test_parameter_counts_of_tables_1_and_2():
    """Beside the layer: a norm, an encoder and a decoder of a few features."""
    small = sum(p.numel() for p in DSS(32, 4096).parameters()) + 3 * 32 + 32 + 2 * 32 + 32 * 8 + 8
    assert abs(small - 272_000) < 500
    large = sum(p.numel() for p in DSS(128, 4096).parameters())
    assert large == 2 * 128 * 4096 + 2 * 4096 + 2 * 128 + 128 * 128 + 128
    assert round(large / 1e6, 1) == 1.1


def test_initialisation():
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


def test_options_make_the_layer_again():
    options = {
        **{"d_model": 4, "d_state": 6, "bidirectional": True, "kernel_length": 9, "dt_min": 1e-3},
        **{"dt_max": 0.1, "frequency_step": 6.0, "glu": True, "activation": "silu"},
        **{"dropout": 0.25, "project": True},
    }
    assert DSS(**options).options() == options
    assert "d_model=4, bidirectional, glu, kernel_length=9, d_state=6" in repr(DSS(**options))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"d_state": 0}, "d_state must be a whole number of at least 1, not 0"),
        ({"d_model": 2.5}, "d_model must be a whole number of at least 1, not 2.5"),
        ({"dt_min": 0.0}, "0 < dt_min <= dt_max must hold, not 0.0 and 0.01"),
        ({"dt_min": 0.1}, "0 < dt_min <= dt_max must hold, not 0.1 and 0.01"),
        ({"dt_max": math.inf}, "0 < dt_min <= dt_max must hold, not 0.0001 and inf"),
        ({"frequency_step": 0.0}, "frequency_step must be above 0 and finite, not 0.0"),
        ({"frequency_step": math.nan}, "frequency_step must be above 0 and finite, not nan"),
    ],
    ids=str,
)
def test_bad_options(options, sentence, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        DSS(**{"d_model": 4, "d_state": 6, **options})


def test_unknown_option():
    with pytest.raises(TypeError, match="unexpected keyword argument 'phase'"):
        DSS(4, 6, phase=1)
