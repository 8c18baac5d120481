import math

import pytest
import torch
from support import DEVICE, assert_close, gradients
from torch.nn import functional as F

from dlrnn import DLR
from dlrnn.ops import reference


def layer_and_input(batch=2, length=33, dtype=torch.float64, **options):
    layer = DLR(4, 6, **options).to(DEVICE, dtype)
    x = torch.randn(batch, length, 4, dtype=dtype, device=DEVICE, requires_grad=True)
    return layer, x


def by_definition(layer, x):
    """The layer as the paper's equations say it, from the raw parameters alone, in float64."""
    re, D = layer.log_lambda_re.double().cpu(), layer.D.double().cpu()
    W, x = layer.W.double().cpu(), x.double().cpu()
    im = torch.zeros_like(re) if layer.real else layer.log_lambda_im.double().cpu()
    W = torch.complex(W[..., 0], torch.zeros_like(W[..., 0]) if layer.real else W[..., 1])
    lam = torch.exp(torch.complex(-(re**2), im))
    length = min(x.shape[1], layer.kernel_length or x.shape[1])
    K = torch.stack([(W * lam**k).sum(-1) for k in range(length)], dim=-1)
    K = K.real * K.imag if layer.cast == "prod" else K.real
    H = layer.d_model
    y = reference.convolution(x, K[:H], K[H:] if layer.bidirectional else None) + D * x
    if not layer.project:
        return y
    y = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "identity": lambda v: v}[layer.activation](
        y
    )
    y = y @ layer.out.weight.double().cpu().T + layer.out.bias.double().cpu()
    return y[..., :H] * y[..., H:].sigmoid() if layer.glu else y


OPTIONS = [
    {},
    {"cast": "prod"},
    {"real": True},
    {"kernel_length": 5},
    {"kernel_length": 1},
    {"glu": True},
    {"project": False},
    {"bidirectional": True},
    {"bidirectional": True, "cast": "prod", "kernel_length": 9, "glu": True},
    {"activation": "silu"},
    {"activation": "relu"},
    {"activation": "identity"},
]


@pytest.mark.parametrize("length", [1, 2, 33])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layer_is_its_definition_gradients_included(options, length):
    layer, x = layer_and_input(length=length, **options)
    y, expected = layer(x), by_definition(layer, x)
    assert_close(y, expected, 1e-12)
    inputs = (x, *layer.parameters())
    grad = torch.randn_like(expected)
    want = gradients(expected, inputs, grad)
    for have, wanted in zip(gradients(y, inputs, grad), want, strict=True):
        assert_close(have, wanted, 1e-11)


def test_fp32_at_a_long_length():
    layer = DLR(4, 256, dt_min=1e-5, dt_max=1e-5).to(DEVICE)
    x = torch.randn(1, 2**16, 4, device=DEVICE)
    exact = DLR(4, 256).to(DEVICE).double()
    exact.load_state_dict(layer.state_dict())
    assert_close(layer(x), exact(x.double()), 1e-5)


def test_state_dict_keys():
    keys = ["log_lambda_re", "log_lambda_im", "W", "D", "out.weight", "out.bias"]
    assert set(DLR(4, 6).state_dict()) == set(keys)
    assert set(DLR(4, 6, real=True).state_dict()) == {keys[0], *keys[2:]}
    assert set(DLR(4, 6, project=False).state_dict()) == set(keys[:4])
    assert DLR(4, 6, bidirectional=True).W.shape == (8, 6, 2)
    assert not any(p.is_complex() for p in DLR(4, 6).parameters())


@pytest.mark.parametrize(
    ("options", "count"), [({}, 272_000), ({"real": True}, 137_000), ({"d_state": 512}, 35_000)]
)
def test_parameter_counts_of_table_2(options, count):
    """H = 32, N = 4096; Shift's encoder takes 3 features to 32, its decoder 32 to 8."""
    layer = DLR(32, **{"d_state": 4096, **options})
    have = sum(p.numel() for p in layer.parameters()) + 3 * 32 + 32 + 2 * 32 + 32 * 8 + 8
    assert abs(have - count) < 500


def test_initialisation_is_the_papers():
    torch.manual_seed(1)
    layer = DLR(64, 4096, dt_min=1e-3, dt_max=0.1)
    decay = 2 * layer.log_lambda_re.double() ** 2  # e^r
    assert decay.min() >= 1e-3 * (1 - 1e-5)
    assert decay.max() <= 0.1 * (1 + 1e-5)
    middle = decay.log().mean().item()
    assert middle == pytest.approx((math.log(1e-3) + math.log(0.1)) / 2, abs=0.1)
    spaced = 2 * math.pi * torch.arange(4096) / 4096
    torch.testing.assert_close(layer.log_lambda_im.detach(), spaced)
    assert layer.W.std().item() == pytest.approx(1 / 4096, rel=0.02)
    assert DLR(4096, 4).D.std().item() == pytest.approx(1, rel=0.1)
    equal = DLR(4, 64, dt_min=1e-5, dt_max=1e-5).log_lambda_re
    torch.testing.assert_close(equal.detach(), torch.full((64,), math.sqrt(1e-5 / 2)))


def test_dropout_only_in_training():
    layer, x = layer_and_input(dropout=0.5)
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu", "identity"])
def test_dropout_before_the_activation_is_dropout_behind_it(activation):
    """On the CPU both orders draw the same mask, so that they can be compared."""
    layer, x = layer_and_input(dropout=0.3, activation=activation, glu=True, bidirectional=True)
    layer, x = layer.cpu().train(), x.cpu()

    def answers():
        torch.manual_seed(0)
        y = layer(x)
        return y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    have = answers()
    layer.out.register_forward_hook(lambda *_: None)  # who looks at the map gets the plain order
    for mine, plain in zip(have, answers(), strict=True):
        assert_close(mine, plain, 1e-10)


def test_dropout_drops_and_enlarges():
    layer = DLR(32, 8, dropout=0.25, activation="identity").to(DEVICE).train()
    with torch.no_grad():
        layer.out.weight.copy_(torch.eye(32))
        layer.out.bias.zero_()
    x = torch.randn(4, 300, 32, device=DEVICE)
    y, whole = layer(x), layer.eval()(x)
    kept = y != 0
    assert 0.7 < kept.double().mean() < 0.8
    assert_close(y[kept], whole[kept] / 0.75, 1e-5)


def test_a_later_input_never_changes_an_earlier_output():
    layer, x = layer_and_input(dtype=torch.float32)
    changed = x.detach().clone()
    changed[:, 20:] += 1
    assert_close(layer(changed)[:, :20], layer(x)[:, :20], 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_kernel_and_state_in_fp32(dtype):
    layer, x = layer_and_input(dtype=torch.float32)
    kernel = layer.kernel(33)
    with torch.autocast(DEVICE.type, dtype=dtype):
        assert torch.equal(layer.kernel(33), kernel)
        y, state = layer(x, return_state=True)
        y_half, state_half = layer(x.to(dtype), return_state=True)
        y_step, state_step = layer.step(x[:, 0].to(dtype), state_half)
    assert y.dtype == y_half.dtype == y_step.dtype == dtype
    assert state.x.dtype == state_half.x.dtype == state_step.x.dtype == torch.float32
    assert_close(y, layer(x), 1e-2)  # bf16 has 8 bits
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_autocast_does_not_round_what_is_not_a_projection():
    """The linear layer gives the same with and without: whole, in chunks and in steps."""
    layer = DLR(4, 64, project=False).to(DEVICE)
    with torch.no_grad():
        layer.D.zero_()
    x = torch.randn(2, 20, 4, device=DEVICE)
    expected = layer(x)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        _, state = layer(x[:, :10], return_state=True)
        chunk, _ = layer(x[:, 10:], state, return_state=True)
        y, _ = layer.step(x[:, 10], state)
    assert_close(chunk, expected[:, 10:], 1e-6)
    assert_close(y, expected[:, 10], 1e-6)


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"kernel_length": 3}], ids=str)
def test_second_derivative_through_the_layer(options):
    layer = DLR(2, 3, activation="silu", **options).to(DEVICE).double()
    x = torch.randn(1, 7, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradgradcheck(call, (x, *parameters))


def test_options_make_the_layer_again():
    options = {
        **{"d_model": 4, "d_state": 6, "bidirectional": True, "cast": "prod", "real": False},
        **{"kernel_length": 9, "dt_min": 1e-3, "dt_max": 1e-2, "glu": True, "activation": "silu"},
        **{"dropout": 0.25, "project": True},
    }
    assert DLR(**options).options() == options
    assert DLR(**DLR(4, 6, real=True).options()).options() == DLR(4, 6, real=True).options()


def test_float64_phases_are_float64():
    layer = DLR(2, 6).double()
    layer.reset_parameters()
    expected = 2 * math.pi * torch.arange(6, dtype=torch.float64) / 6
    assert torch.equal(layer.log_lambda_im.detach(), expected)


def test_print_shows_what_it_is():
    shown = repr(DLR(4, 6, glu=True, kernel_length=9, cast="prod"))
    assert "d_model=4, glu, kernel_length=9, d_state=6, cast='prod'" in shown


def test_hooks_of_the_linear_map_are_called():
    """Whole as in chunks: whoever looks at `out`, or changes its weight, is not passed by."""
    layer, x = DLR(6, 8).to(DEVICE), torch.randn(2, 12, 6, device=DEVICE)
    whole = layer(x)
    seen = []
    hook = layer.out.register_forward_hook(lambda module, inputs, y: seen.append(y.shape) or 2 * y)
    assert_close(layer(x), 2 * whole, 1e-6)
    assert_close(layer(x, return_state=True)[0], 2 * whole, 1e-5)
    assert len(seen) == 2
    hook.remove()
    assert_close(layer(x), whole, 1e-6)
