"""Whole, in chunks, step by step, padded: the same answer."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import DEVICE, assert_close, gradients

from dlrnn import DLR, ops
from dlrnn.bench.step import bench_step
from dlrnn.nn.dlr import PROD_PAIRS_UP_TO
from dlrnn.ops import OnlineState

MANY = PROD_PAIRS_UP_TO + 1  # from here on DLR-prod streams by online convolution
OPTIONS = [
    {},
    {"cast": "prod"},
    {"cast": "prod", "d_state": MANY},
    {"kernel_length": 70},
    {"kernel_length": 3},
    {"kernel_length": 1},
    {"cast": "prod", "kernel_length": 70},
    {"cast": "prod", "d_state": MANY, "kernel_length": 70},
    {"glu": True},
    {"real": True},
    {"project": False},
]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def make(dtype=torch.float64, **options):
    """|lambda| between 0.99 and 1: what was read is not forgotten."""
    options = {"d_state": 9, "dt_min": 1e-6, "dt_max": 1e-2, **options}
    return DLR(5, **options).to(DEVICE, dtype)


def in_chunks(layer, x, sizes):
    state, outputs = None, []
    for chunk in x.split(sizes, dim=1):
        y, state = layer(chunk, state, return_state=True)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def in_steps(layer, x, state=None):
    outputs = []
    for x_t in x.unbind(1):
        y, state = layer.step(x_t, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_whole_is_chunks_is_steps(options, dtype):
    layer = make(dtype, **options)
    x = torch.randn(2, 200, 5, dtype=dtype, device=DEVICE)
    whole = layer(x)
    assert_close(in_chunks(layer, x, [1, 7, 64, 128])[0], whole, TOLERANCE[dtype])
    assert_close(in_steps(layer, x)[0], whole, TOLERANCE[dtype])


@given(st.data())
def test_any_mixture_of_chunks_and_steps(data):
    layer = make(**data.draw(st.sampled_from(OPTIONS)))
    x = torch.randn(1, data.draw(st.integers(1, 90)), 5, dtype=torch.float64, device=DEVICE)
    state, outputs, t = None, [], 0
    while t < x.shape[1]:
        size = data.draw(st.integers(1, x.shape[1] - t))
        if data.draw(st.booleans()):
            y, state = layer(x[:, t : t + size], state, return_state=True)
        else:
            y, state = in_steps(layer, x[:, t : t + size], state)
        outputs.append(y)
        t += size
    assert_close(torch.cat(outputs, dim=1), layer(x), 1e-10)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_go_through_the_state(options):
    layer = make(**options)
    x = torch.randn(2, 40, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    inputs = (x, *layer.parameters())
    grad = torch.randn(2, 40, 5, dtype=torch.float64)
    expected = gradients(layer(x), inputs, grad)
    for streamed in (in_chunks(layer, x, [1, 7, 32])[0], in_steps(layer, x)[0]):
        for have, want in zip(gradients(streamed, inputs, grad), expected, strict=True):
            assert_close(have, want, 1e-9)


def test_state_alone_continues():
    """`state` without `return_state` gives the output only."""
    layer = make()
    x = torch.randn(2, 20, 5, dtype=torch.float64, device=DEVICE)
    _, state = layer(x[:, :9], return_state=True)
    assert_close(layer(x[:, 9:], state), layer(x)[:, 9:], 1e-12)
    assert_close(layer(x, layer.initial_state(2)), layer(x), 1e-12)


def test_a_state_is_not_changed_by_using_it():
    for options in OPTIONS:
        layer = make(**options)
        x = torch.randn(1, 80, 5, dtype=torch.float64, device=DEVICE)
        _, state = in_steps(layer, x)
        before = copy.deepcopy(torch.utils._pytree.tree_map(lambda t: t.detach(), state))
        layer.step(x[:, 0], state)
        layer(x, state, return_state=True)
        leaves = torch.utils._pytree.tree_leaves
        for now, then in zip(leaves(state), leaves(before), strict=True):
            assert torch.equal(now, then)


def test_an_input_buffer_can_be_used_again():
    for options in OPTIONS:
        layer = make(**options)
        x = torch.randn(1, 40, 5, dtype=torch.float64, device=DEVICE)
        buffer, state, outputs = torch.empty(1, 5, dtype=torch.float64, device=DEVICE), None, []
        for t in range(20):
            buffer.copy_(x[:, t])
            y, state = layer.step(buffer, state)
            outputs.append(y)
        buffer = x[:, 20:30].clone()
        y, state = layer(buffer, state, return_state=True)
        buffer.fill_(7.0)
        rest, _ = layer(x[:, 30:], state, return_state=True)
        together = torch.cat((torch.stack(outputs, dim=1), y, rest), dim=1)
        assert_close(together, layer(x), 1e-10)


def test_a_state_does_not_keep_the_prefix_alive():
    for options in OPTIONS:
        if options.get("d_state") == MANY and "kernel_length" not in options:
            continue  # there the prefix is the state
        layer = make(**options)
        with torch.no_grad():
            _, state = layer(torch.randn(1, 5000, 5, device=DEVICE).double(), return_state=True)
        held = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in torch.utils._pytree.tree_leaves(state)
        }
        assert sum(held.values()) < 5000 * 5 * 8 / 2


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


def test_a_state_without_gradients_does_not_take_them_away():
    """Made under no_grad, or detached for truncated backpropagation: the same for every form."""
    for options in OPTIONS:
        layer = make(**options)
        x = torch.randn(2, 60, 5, dtype=torch.float64, device=DEVICE)
        grad = torch.randn(2, 20, 5, dtype=torch.float64)
        with torch.no_grad():
            _, state = layer(x[:, :40], return_state=True)
        parameters = list(layer.parameters())
        expected = gradients(layer(x[:, 40:], state), parameters, grad)
        stepped, _ = in_steps(layer, x[:, 40:], state)
        chunked = torch.cat(
            [in_steps(layer, x[:, 40:41], state)[0], *_chunks(layer, x[:, 40:], state)], dim=1
        )
        for have, want in zip(gradients(stepped, parameters, grad), expected, strict=True):
            assert_close(have, want, 1e-9)
        for have, want in zip(gradients(chunked, parameters, grad), expected, strict=True):
            assert_close(have, want, 1e-9)


def test_gradients_from_an_initial_state_made_without_them():
    for options in OPTIONS:
        layer = make(**options)
        x = torch.randn(2, 40, 5, dtype=torch.float64, device=DEVICE)
        grad = torch.randn(2, 40, 5, dtype=torch.float64)
        with torch.no_grad():
            state = layer.initial_state(2)
        parameters = list(layer.parameters())
        expected = gradients(layer(x), parameters, grad)
        stepped, _ = in_steps(layer, x, state)
        for have, want in zip(gradients(stepped, parameters, grad), expected, strict=True):
            assert_close(have, want, 1e-9)


def _chunks(layer, x, state):
    """Outputs 1 .. end in short chunks, after one step."""
    _, state = layer.step(x[:, 0], state)
    outputs = []
    for chunk in x[:, 1:].split([2, 1, 16], dim=1):
        y, state = layer(chunk, state, return_state=True)
        outputs.append(y)
    return outputs


def test_short_chunks_of_a_long_window_are_steps():
    layer = make(kernel_length=100)
    x = torch.randn(2, 30, 5, dtype=torch.float64, device=DEVICE)
    _, state = layer(x[:, :10], return_state=True)
    y, state = layer(x[:, 10:13], state, return_state=True)
    assert state.oldest.item() == 3, "three steps of the ring, not a ring made anew"
    rest = layer(x[:, 13:], state)
    assert_close(torch.cat((y, rest), dim=1), layer(x)[:, 10:], 1e-12)


def test_which_state_serves_which_layer():
    assert isinstance(make(cast="prod", d_state=MANY).initial_state(1), OnlineState)
    small = make(cast="prod", d_state=PROD_PAIRS_UP_TO).initial_state(1)
    assert small.x.shape == (1, 5, PROD_PAIRS_UP_TO * (PROD_PAIRS_UP_TO + 1) // 2, 2)


def test_a_restricted_kernel_keeps_its_accuracy_in_fp32():
    """What leaves the window is taken out; what rounding leaves behind stays small."""
    layer = make(torch.float32, d_state=64, kernel_length=100, dt_min=1e-6, dt_max=1e-6)
    x = torch.randn(1, 2500, 5, device=DEVICE)
    with torch.no_grad():
        assert_close(in_steps(layer, x)[0], layer(x), 1e-4)


# ---------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize("options", [*OPTIONS, {"bidirectional": True}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_padded_is_each_alone(options, dtype):
    layer = make(dtype, **options)
    lengths = torch.tensor([60, 1, 33, 0, 60], device=DEVICE)
    x = torch.randn(5, 60, 5, dtype=dtype, device=DEVICE)
    x[torch.arange(60, device=DEVICE) >= lengths[:, None]] = float(
        "nan"
    )  # padding may hold anything
    y = layer(x, lengths=lengths)
    for b, n in enumerate(lengths.tolist()):
        assert (y[b, n:] == 0).all()
        if n:
            tolerance = 1e-12 if dtype == torch.float64 else 1e-5
            assert_close(y[b, :n], layer(x[b : b + 1, :n])[0], tolerance)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_padded_states_are_each_alone(options):
    """Two padded chunks after each other, then a step."""
    layer = make(**options)
    first, second = torch.tensor([40, 3, 0, 17]), torch.tensor([0, 30, 30, 12])
    x = torch.randn(4, 71, 5, dtype=torch.float64, device=DEVICE)
    state = None
    for start, lengths in ((0, first), (40, second)):
        chunk = x[:, start : start + 40][:, : 40 if start == 0 else 30]
        y, state = layer(chunk, state, return_state=True, lengths=lengths.to(DEVICE))
    last, _ = layer.step(x[:, 70], state)
    for b, (n, m) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        alone = torch.cat((x[b, :n], x[b, 40 : 40 + m], x[b, 70:]))[None]
        expected = layer(alone)[0]
        assert_close(y[b, :m], expected[n : n + m], 1e-10)
        assert_close(last[b], expected[-1], 1e-10)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32]
)
def test_lengths_of_any_integer_type(dtype):
    layer = make()
    x = torch.randn(2, 300, 5, dtype=torch.float64, device=DEVICE)
    lengths = torch.tensor([100, 10], device=DEVICE)
    y, state = layer(x, return_state=True, lengths=lengths.to(dtype))
    expected, expected_state = layer(x, return_state=True, lengths=lengths)
    assert torch.equal(y, expected)
    assert torch.equal(state.x, expected_state.x)


# ---------------------------------------------------------------------------------- cost


def test_cost_of_a_step_is_flat_in_the_position():
    """Of 4000 steps the last 400 cost what the first 400 do, within 10%; of 10000, N 1024, H 64,
    `dlrnn bench step` tells. One of three times must: a cost that grows does so each time.
    """
    sizes = {"batch": 1, "d_model": 64, "d_state": 256, "steps": 4000}
    results = (bench_step(**sizes, device=str(DEVICE)) for _ in range(3))
    assert any(abs(result["last_over_first"] - 1) < 0.1 for result in results)
