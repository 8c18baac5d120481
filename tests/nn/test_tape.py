"""The tape: parameters set by hand that solve tasks exactly, DLR as a special case, and growing."""

import copy
import math

import pytest
import torch
from support import DEVICE, assert_close, in_steps, refused

from dlrnn import tasks
from dlrnn.nn import DLR, SGConv, TapeDLR, param_groups
from dlrnn.nn.tape import low_pass


def tape(d_model, length, *, z, value=None, **options):
    """A float64 layer with these maps, zero elsewhere, whose output is what its heads read."""
    heads = len(z)
    options = {"heads": heads, "d_head": 1, "kernels": 1, **options}
    layer = TapeDLR(d_model, length, **options).to(DEVICE).double()
    value = [[1.0] + [0.0] * (d_model - 1)] * heads if value is None else value
    with torch.no_grad():
        for parameter in (*layer.value.parameters(), *layer.out.parameters()):
            parameter.zero_()
        layer.c.copy_(low_pass(length, 1))
        layer.value.weight.copy_(torch.tensor(value))
        layer.z.weight.copy_(torch.tensor(z).view(-1, d_model))
        layer.out.weight[:heads].copy_(torch.eye(heads))
    return layer


def constant(angle, d_model, channel):
    """The rows of z that give this angle at every position whose `channel` is 1."""
    rows = [[0.0] * d_model, [0.0] * d_model]
    rows[0][channel], rows[1][channel] = math.cos(angle), math.sin(angle)
    return rows


def turn(angle, d_model, at):
    """The rows of z that turn the point of the circle in channels `at` and `at + 1` by an angle."""
    rows = [[0.0] * d_model, [0.0] * d_model]
    rows[0][at], rows[0][at + 1] = math.cos(angle), -math.sin(angle)
    rows[1][at], rows[1][at + 1] = math.sin(angle), math.cos(angle)
    return rows


def with_ones(x):
    return torch.cat((x.double(), torch.ones_like(x[..., :1]).double()), dim=-1)


# ---------------------------------------------------------------------------------- constructions


def test_lags_of_eight_heads_solve_shift():
    task = tasks.get("shift", length=64)
    batch = task.sample(3)
    x = torch.nn.functional.pad(with_ones(batch.inputs), (0, 4))  # x, position, 1: channel 3
    heads = [constant(2 * math.pi * j / 8, 8, 3) for j in range(8)]
    assert_close(tape(8, 64, z=heads, lag_heads=8)(x), batch.targets, 1e-12)


@pytest.mark.parametrize("length", [9, 64])
def test_a_lag_from_the_first_two_inputs_solves_context_shift(length):
    task = tasks.get("context-shift", length=length)
    batch = task.sample(5)
    layer = tape(5, length, z=[turn(0, 5, 3)], lag_heads=1, hold=2)
    with torch.no_grad():  # channels 3 and 4 are the first input and the second, from then on
        for parameter in layer.held.parameters():
            parameter.zero_()
        layer.held.weight[3, 0] = layer.held.weight[4, 5] = 1
    x = torch.nn.functional.pad(batch.inputs.double(), (0, 2))
    for y in (layer(x), in_steps(layer, x)[0]):
        assert_close(y[:, 2:, :1], batch.targets[:, 2:], 2e-6)  # the task's shift is fp32


def test_an_address_that_runs_backwards_solves_reverse():
    """The read angle is that of place `2 L - 1 - k`: the conjugate of the position's point."""
    task = tasks.get("reverse", length=33)
    batch = task.sample(3)
    layer = tape(3, 66, z=[turn(2 * math.pi / 66, 3, 1)], lag_heads=0)
    assert_close(
        layer(batch.inputs.double())[:, 33:, :1], batch.targets, 1e-6
    )  # positions are fp32


def test_two_factors_read_twice_as_fast():
    """At position k the place 2 k, of a tape of P: known from k = P / 2 on, as place 2 k - P."""
    P, rows = 32, turn(0, 3, 1)
    rows = [*rows, *rows]  # z^2
    rows[1] = [-value for value in rows[1]]
    rows[3] = [-value for value in rows[3]]
    layer = tape(3, P, z=[rows], factors=2, lag_heads=0)
    k = torch.arange(P)
    angle = 2 * math.pi * k.double() / P
    x = torch.stack((torch.randn(P).double(), angle.cos(), angle.sin()), dim=-1)
    read = layer(x[None])[0, P // 2 :, 0]
    assert_close(read, x[2 * k[P // 2 :] - P, 0], 1e-12)


def test_a_clock_that_counts_marks_solves_select():
    """Marked numbers are written to the places 0, 1, ...; a lag of M places reads them again."""
    task = tasks.get("select", length=50, marked=8)
    M, batch = task.marked, task.sample(4)
    reading = torch.zeros_like(batch.inputs[..., :1])
    reading[:, -M:] = 1  # a feature that says where the answer is written
    x = with_ones(torch.cat((batch.inputs, reading), dim=-1))  # x, mark, position, reading, 1
    layer = tape(6, 2 * M, z=[constant(math.pi, 6, 5)], lag_heads=1, clock="shared", gate=True)
    with torch.no_grad():
        for linear in (layer.delta, layer.beta):
            linear.weight.zero_()
        layer.delta.weight[0, 1] = layer.delta.weight[0, 4] = 1
        layer.delta.bias.zero_()
        layer.beta.weight[0, 1] = 160
        layer.beta.bias.fill_(-80)
    for y in (layer(x), in_steps(layer, x)[0]):
        assert_close(y[:, -M:, :1], batch.targets, 1e-12)


def test_dlr_is_a_tape_read_without_a_head():
    """|lambda| = 1 at the P-th roots of unity: pairs of conjugates are one harmonic."""
    P, H = 12, 3
    dlr = DLR(H, P, project=False).to(DEVICE).double()
    with torch.no_grad():
        dlr.log_lambda_re.zero_()
        dlr.log_lambda_im.copy_(2 * math.pi * torch.arange(P).double() / P)
        dlr.D.zero_()
        dlr.W.normal_()
        layer = TapeDLR(H, P, heads=1, d_head=H, kernels=H).to(DEVICE).double()
        for linear in (layer.value, layer.out):
            linear.weight.copy_(torch.eye(H))
            linear.bias.zero_()
        layer.z.weight.zero_()
        layer.c.copy_(dlr.W[None, :, : P // 2 + 1])
        mirrored = dlr.W[:, P // 2 + 1 :].flip(1) * torch.tensor([1.0, -1.0]).to(dlr.W)
        layer.c[0, :, 1 : P // 2] += mirrored
    x = torch.randn(2, 100, H, dtype=torch.float64, device=DEVICE)
    assert_close(layer(x), dlr(x), 1e-12)


# ---------------------------------------------------------------------------------- growing


def test_a_grown_tape_solves_the_task_at_the_new_length():
    """The angle is a part of the circle: a shift by a quarter stays one."""
    layer = tape(4, 16, z=[constant(math.pi / 2, 4, 3)], lag_heads=1)
    layer.grow(256)
    x = with_ones(torch.randn(1, 256, 3, device=DEVICE))
    expected = torch.nn.functional.pad(x[:, :-64, :1], (0, 0, 64, 0))
    assert_close(layer(x)[..., :1], expected, 1e-12)


def test_growing_keeps_what_was_learned():
    layer = TapeDLR(4, 16, bidirectional=True, kernels=2).double()
    with torch.no_grad():
        layer.c[:, 0].normal_()
        layer.c[:, 1] *= -3
    layer.c.requires_grad_(False)
    old = layer.c.clone()
    layer.grow(64)
    fresh = TapeDLR(4, 64, bidirectional=True, kernels=2).double()
    assert_close(layer.c[:, 0, :9], old[:, 0] / 4, 1e-12)  # a kernel four times as long
    assert_close(layer.c[:, 0, 9:], fresh.c[:, 0, 9:], 1e-12)
    assert_close(layer.c[:, 1], -3 * fresh.c[:, 1], 1e-7)
    assert not layer.c.requires_grad
    assert type(layer)(**layer.options()).c.shape == layer.c.shape
    assert layer.harmonics == 33


def test_a_grown_parameter_is_a_kernel_parameter():
    layer = TapeDLR(4, 16)
    layer.grow(64)
    kernel = [g["params"] for g in param_groups(layer, lr=1e-3) if g["role"] == "kernel"]
    assert len(kernel) == 1
    assert kernel[0][0] is layer.c
    layer(torch.randn(1, 9, 4)).sum().backward()
    assert layer.c.grad.abs().sum() > 0


def test_a_tape_does_not_shrink_and_takes_no_state_of_a_shorter_one():
    layer = TapeDLR(4, 16)
    _, state = layer(torch.randn(1, 9, 4), return_state=True)
    with refused("grow", "16", "8"):
        layer.grow(8)
    layer.grow(32)
    with refused("state.tape", "[1, 4, 16, 17, 2]"):
        layer.step(torch.randn(1, 4), state)


def test_other_mixers_do_not_change_as_the_length_grows():
    layer = DLR(4, 6)
    before = copy.deepcopy(layer.state_dict())
    layer.grow(100)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    with refused("length", "at least 1", "0"):
        layer.grow(0)


def test_a_grown_sgconv_has_the_same_kernel_and_more_of_it():
    layer = SGConv(4, length=16, d_kernel=4).double()
    before = layer.kernel(16)
    layer.grow(64)
    assert layer.scales == SGConv(4, length=64, d_kernel=4).scales
    assert_close(layer.kernel(16), before, 1e-12)
    assert layer.kernel(64)[:, 40:].abs().sum() > 0
    assert layer(torch.randn(1, 64, 4).double()).shape == (1, 64, 4)


# ---------------------------------------------------------------------------------- precision


def test_fp32_of_a_long_tape_is_close_to_float64():
    """The addresses are float64, so that the highest harmonic is as exact as the first."""
    layer = TapeDLR(4, 512, heads=2, d_head=2, kernels=2, clock="own").to(DEVICE)
    x = torch.randn(1, 2**12, 4, device=DEVICE)
    with torch.no_grad():
        assert_close(layer(x), copy.deepcopy(layer).double()(x.double()), 1e-5)


def test_an_input_of_zeros_has_finite_gradients():
    """z is 0 / 0 there, and read as 1."""
    layer = TapeDLR(4, 8, factors=2)
    x = torch.zeros(1, 5, 4, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
