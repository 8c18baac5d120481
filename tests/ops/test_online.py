import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import random
from support import assert_agree, assert_close

from dlrnn import ops
from dlrnn.ops import reference


def stream(u, kernel_of, start=0, window=None):
    """Read `start` inputs at once and the others one by one; outputs from `start` on."""
    state = ops.online_start(u[:, :start], kernel_of, window)
    outputs = []
    for t in range(start, u.shape[1]):
        y, state = ops.online_step(u[:, t], state, kernel_of, window)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


@given(st.integers(1, 70), st.data())
def test_steps_equal_the_convolution(length, data):
    start = data.draw(st.integers(0, length - 1))
    window = data.draw(st.none() | st.integers(1, 40))
    u, kernel = random((2, length, 3), (3, 300))
    y, _ = stream(u, lambda size: kernel[:, :size], start, window)
    kept = kernel[:, : min(length, window or length)]
    assert_close(y, reference.convolution(u.cpu(), kept.cpu())[:, start:], 1e-12)


def test_gradients_through_the_state():
    u, kernel = random((1, 23, 2), (2, 64), grad=True)
    y, _ = stream(u, lambda size: kernel[:, :size])
    expected = reference.convolution(u.cpu(), kernel.cpu()[:, :23])
    assert_agree(y, expected, (u, kernel), 1e-12)


def test_a_state_can_be_branched_from():
    u, kernel = random((1, 40, 2), (2, 128))
    kernel_of = lambda size: kernel[:, :size]  # noqa: E731
    _, state = stream(u[:, :21], kernel_of)
    first, _ = ops.online_step(u[:, 30], state, kernel_of)
    ops.online_step(u[:, 31], state, kernel_of)
    again, _ = ops.online_step(u[:, 30], state, kernel_of)
    assert torch.equal(first, again)


def test_the_number_of_blocks_is_logarithmic():
    u, kernel = random((1, 1000, 1), (1, 4096))
    _, state = stream(u, lambda size: kernel[:, :size], start=900)
    assert [b.inputs.shape[1] for b in state.blocks] == [512, 256, 128, 64, 32, 8]  # 1000 in binary
    assert torch.equal(state.history(), u)


def test_a_window_bounds_the_memory():
    u, kernel = random((1, 1000, 1), (1, 20))
    y, state = stream(u, lambda size: kernel[:, :size], window=20)
    assert state.history().shape[1] < 64
    assert state.kernel.shape[1] <= 128
    assert_close(y, ops.convolution(u, kernel), 1e-12)


def test_work_is_quasi_linear(monkeypatch):
    """Entries that go through a transform: at most L log2(2 L) for a whole generation."""
    work, length = 0, 2**10

    def counting(u, kernel):
        nonlocal work
        work += u.shape[1]
        return ops.convolution(u, kernel)

    monkeypatch.setattr("dlrnn.ops.online.convolution", counting)
    u, kernel = random((1, length, 1), (1, 4 * length), dtype=torch.float32)
    stream(u, lambda size: kernel[:, :size])
    assert work <= length * (length.bit_length() + 1)
