"""What DLR has beside the contract: the order of dropout, autocast, and the cost of streaming."""

import pytest
import torch
from mixers import MANY_STATES, Form
from support import DEVICE, assert_close, in_chunks, in_steps

from dlrnn import DLR, ops
from dlrnn.bench.layer import bench_step
from dlrnn.nn.dlr import PROD_PAIRS_UP_TO
from dlrnn.ops import OnlineState


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


def test_an_outlier_leaves_the_window_without_a_trace():
    layer = DLR(5, 64, kernel_length=50, dt_min=1e-6, dt_max=1e-6).to(DEVICE)
    x = torch.randn(1, 400, 5, device=DEVICE)
    x[:, 60] = 1e6
    with torch.no_grad():
        stepped = in_steps(layer, x)[0][:, 200:]
        assert_close(stepped, layer(x[:, 100:])[:, 100:], 1e-5)


def test_short_chunks_after_a_long_prefix_are_cheap(monkeypatch):
    """Online convolution: no chunk of 8 transforms the whole prefix again, on average."""
    form = Form(DLR, {"cast": "prod", "d_state": MANY_STATES})
    layer, x = form.make(), form.input(4096 + 64, batch=1)
    with torch.no_grad():
        _, state = layer(x[:, :4096], return_state=True)
        work, convolution = 0, ops.convolution

        def counting(u, kernel):
            nonlocal work
            work += u.shape[1]
            return convolution(u, kernel)

        monkeypatch.setattr("dlrnn.ops.online.convolution", counting)
        monkeypatch.setattr("dlrnn.ops.convolution", counting)
        y, _ = in_chunks(layer, x[:, 4096:], 8, state)
        monkeypatch.undo()
        assert work < 1000
        assert_close(y, layer(x)[:, 4096:], 1e-10)


def test_short_chunks_of_a_long_window_are_steps():
    form = Form(DLR, {"kernel_length": 100})
    layer, x = form.make(), form.input(30)
    _, state = layer(x[:, :10], return_state=True)
    y, state = layer(x[:, 10:13], state, return_state=True)
    assert state.oldest.item() == 3, "three steps of the buffer, not a new buffer"
    rest = layer(x[:, 13:], state)
    assert_close(torch.cat((y, rest), dim=1), layer(x)[:, 10:], 1e-12)


def test_dlr_prod_streams_by_pairs_while_they_are_few():
    assert isinstance(DLR(5, MANY_STATES, cast="prod").initial_state(1), OnlineState)
    small = DLR(5, PROD_PAIRS_UP_TO, cast="prod").initial_state(1)
    assert small.x.shape == (1, 5, PROD_PAIRS_UP_TO * (PROD_PAIRS_UP_TO + 1) // 2, 2)


def test_cost_of_a_step_is_flat_in_the_position():
    """Of 4000 steps the last 400 cost what the first 400 do, within 10%; of 10000, N 1024, H 64,
    `dlrnn bench step` tells. One of three times must: a cost that grows does so each time.
    """
    sizes = {"batch": 1, "d_model": 64, "d_state": 256, "steps": 4000}
    results = (bench_step(**sizes, device=str(DEVICE)) for _ in range(3))
    assert any(abs(result["last_over_first"] - 1) < 0.1 for result in results)
