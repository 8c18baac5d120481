import math

import pytest
import torch
from mixers import convolved
from support import DEVICE, assert_agree, assert_close, in_chunks, in_steps

from dlrnn import DLR, ops
from dlrnn.bench.layer import bench_step
from dlrnn.nn.dlr import PROD_PAIRS_UP_TO
from dlrnn.ops import OnlineState


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE)


def by_definition(layer, x):
    """The layer as the paper's equations say it, from the raw parameters alone, in float64."""
    re, W = layer.log_lambda_re.double().cpu(), layer.W.double().cpu()
    im = torch.zeros_like(re) if layer.real else layer.log_lambda_im.double().cpu()
    W = torch.complex(W[..., 0], torch.zeros_like(W[..., 0]) if layer.real else W[..., 1])
    lam = torch.exp(torch.complex(-(re**2), im))
    length = min(x.shape[1], layer.kernel_length or x.shape[1])
    K = torch.stack([(W * lam**k).sum(-1) for k in range(length)], dim=-1)
    return convolved(layer, x, K.real * K.imag if layer.cast == "prod" else K.real)


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
def test_values_and_gradients_equal_the_definition(options, length):
    layer, x = DLR(4, 6, **options).to(DEVICE).double(), random(2, length, 4).requires_grad_()
    inputs = (x, *layer.parameters())
    assert_agree(layer(x), by_definition(layer, x), inputs, 1e-12, 1e-11)


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


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu", "identity"])
def test_dropout_before_the_activation_is_dropout_behind_it(activation):
    """On the CPU both orders draw the same mask, so that they can be compared."""
    layer = DLR(4, 6, dropout=0.3, activation=activation, glu=True, bidirectional=True).double()
    x = torch.randn(2, 33, 4, dtype=torch.float64, requires_grad=True)

    def answers():
        torch.manual_seed(0)
        y = layer(x)
        return y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    have = answers()
    layer.out.register_forward_hook(lambda *_: None)  # a hooked map keeps its order
    for mine, plain in zip(have, answers(), strict=True):
        assert_close(mine, plain, 1e-10)


def test_dropout_zeroes_a_share_and_rescales_the_rest():
    layer = DLR(32, 8, dropout=0.25, activation="identity").to(DEVICE).train()
    with torch.no_grad():
        layer.out.weight.copy_(torch.eye(32))
        layer.out.bias.zero_()
    x = torch.randn(4, 300, 32, device=DEVICE)
    y, whole = layer(x), layer.eval()(x)
    kept = y != 0
    assert 0.7 < kept.double().mean() < 0.8
    assert_close(y[kept], whole[kept] / 0.75, 1e-5)


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


def test_float64_phases_are_float64():
    layer = DLR(2, 6).double()
    layer.reset_parameters()
    expected = 2 * math.pi * torch.arange(6, dtype=torch.float64) / 6
    assert torch.equal(layer.log_lambda_im.detach(), expected)


def test_hooks_of_the_linear_map_are_called():
    """Whole as in chunks: a hook that looks at `out`, or changes its output, runs."""
    layer, x = DLR(6, 8).to(DEVICE), torch.randn(2, 12, 6, device=DEVICE)
    whole = layer(x)
    seen = []
    hook = layer.out.register_forward_hook(lambda module, inputs, y: seen.append(y.shape) or 2 * y)
    assert_close(layer(x), 2 * whole, 1e-6)
    assert_close(layer(x, return_state=True)[0], 2 * whole, 1e-5)
    assert len(seen) == 2
    hook.remove()
    assert_close(layer(x), whole, 1e-6)


# ---------------------------------------------------------------------------------- streaming


MANY = PROD_PAIRS_UP_TO + 1  # from here on DLR-prod streams by online convolution


def make(dtype=torch.float64, **options):
    """|lambda| between 0.99 and 1: what was read is not forgotten."""
    options = {"d_state": 9, "dt_min": 1e-6, "dt_max": 1e-2, **options}
    return DLR(5, **options).to(DEVICE, dtype)


def test_many_small_chunks_keep_their_phase():
    """A decay rounded to fp32 would be off by 7e-6 after 600 chunks of one position."""
    layer = DLR(2, 64, dt_min=2e-7, dt_max=4e-7, project=False).to(DEVICE)
    x = torch.randn(1, 600, 2, device=DEVICE)
    exact = DLR(**layer.options()).to(DEVICE).double()
    exact.load_state_dict(layer.state_dict())
    with torch.no_grad():
        _, state = in_chunks(layer, x, 1)
        _, expected = exact(x.double(), return_state=True)
    assert_close(state.x, expected.x, 3e-6)


def test_an_outlier_leaves_the_window_without_a_trace():
    layer = make(torch.float32, d_state=64, kernel_length=50, dt_min=1e-6, dt_max=1e-6)
    x = torch.randn(1, 400, 5, device=DEVICE)
    x[:, 60] = 1e6
    with torch.no_grad():
        stepped = in_steps(layer, x)[0][:, 200:]
        assert_close(stepped, layer(x[:, 100:])[:, 100:], 1e-5)


def test_short_chunks_after_a_long_prefix_are_cheap(monkeypatch):
    """Online convolution: no chunk of 8 transforms the whole prefix again, on average."""
    layer = make(cast="prod", d_state=MANY)
    x = torch.randn(1, 4096 + 64, 5, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        _, state = layer(x[:, :4096], return_state=True)
        work, convolution = 0, ops.convolution

        def counting(u, kernel):
            nonlocal work
            work += u.shape[1]
            return convolution(u, kernel)

        monkeypatch.setattr("dlrnn.ops.online.convolution", counting)
        monkeypatch.setattr("dlrnn.ops.convolution", counting)
        outputs = []
        for chunk in x[:, 4096:].split(8, dim=1):
            y, state = layer(chunk, state, return_state=True)
            outputs.append(y)
        monkeypatch.undo()
        assert work < 1000
        assert_close(torch.cat(outputs, dim=1), layer(x)[:, 4096:], 1e-10)


def test_short_chunks_of_a_long_window_are_steps():
    layer = make(kernel_length=100)
    x = torch.randn(2, 30, 5, dtype=torch.float64, device=DEVICE)
    _, state = layer(x[:, :10], return_state=True)
    y, state = layer(x[:, 10:13], state, return_state=True)
    assert state.oldest.item() == 3, "three steps of the buffer, not a new buffer"
    rest = layer(x[:, 13:], state)
    assert_close(torch.cat((y, rest), dim=1), layer(x)[:, 10:], 1e-12)


def test_dlr_prod_streams_by_pairs_while_they_are_few():
    assert isinstance(make(cast="prod", d_state=MANY).initial_state(1), OnlineState)
    small = make(cast="prod", d_state=PROD_PAIRS_UP_TO).initial_state(1)
    assert small.x.shape == (1, 5, PROD_PAIRS_UP_TO * (PROD_PAIRS_UP_TO + 1) // 2, 2)


def test_a_restricted_kernel_keeps_its_accuracy_in_fp32():
    """What leaves the window is taken out; what rounding leaves behind stays small."""
    layer = make(torch.float32, d_state=64, kernel_length=100, dt_min=1e-6, dt_max=1e-6)
    x = torch.randn(1, 2500, 5, device=DEVICE)
    with torch.no_grad():
        assert_close(in_steps(layer, x)[0], layer(x), 1e-4)


def test_cost_of_a_step_is_flat_in_the_position():
    """Of 4000 steps the last 400 cost what the first 400 do, within 10%; of 10000, N 1024, H 64,
    `dlrnn bench step` tells. One of three times must: a cost that grows does so each time.
    """
    sizes = {"batch": 1, "d_model": 64, "d_state": 256, "steps": 4000}
    results = (bench_step(**sizes, device=str(DEVICE)) for _ in range(3))
    assert any(abs(result["last_over_first"] - 1) < 0.1 for result in results)
