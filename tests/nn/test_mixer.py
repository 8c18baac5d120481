"""A user's mixer: a subclass of `Mixer` gets the whole contract from the methods it defines."""

import pytest
import torch
from support import DEVICE, assert_close, in_chunks, in_steps, refused
from torch import nn

from dlrnn.nn import Mixer


class Decaying(Mixer[torch.Tensor]):
    """`s_t = (s_{t-1} + u_t) / 2`."""

    def __init__(self, d_model, *, bidirectional=False):
        super().__init__()
        self.d_model, self.bidirectional = d_model, bidirectional
        self.rate = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def _parameter(self):
        return self.rate

    def _whole(self, u, lengths):
        return self._chunk(u, None, lengths)[0]

    def _chunk(self, u, state, lengths):
        before = self._initial_state(len(u)) if state is None else state
        states = [before]
        for u_t in u.unbind(1):
            states.append(self.rate * (states[-1] + u_t))
        every = torch.stack(states, dim=1)  # [B, L + 1, H]
        last = every[:, -1] if lengths is None else every[range(len(u)), lengths]
        return every[:, 1:], last

    def _step(self, u, state):
        y, state = self._chunk(u[:, None], state, None)
        return y[:, 0], state

    def _initial_state(self, batch_size):
        return self.rate.new_zeros(batch_size, self.d_model)

    def _check_state(self, state, batch):
        if state.shape != (batch, self.d_model):
            raise ValueError(f"state: expected {[batch, self.d_model]}, got {list(state.shape)}")


@pytest.fixture
def layer():
    return Decaying(3).to(DEVICE)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE)


def test_whole_equals_chunks_and_steps(layer):
    x = random(2, 7, 3)
    whole = layer(x)
    assert_close(in_chunks(layer, x, [4, 3])[0], whole, 1e-14)
    _, state = layer(x[:, :4], return_state=True)
    assert_close(layer(x[:, 4:], state), whole[:, 4:], 1e-14)
    assert_close(in_steps(layer, x[:, 4:], state)[0], whole[:, 4:], 1e-14)


def test_a_padded_batch_equals_single_sequences(layer):
    x, lengths = random(2, 7, 3), torch.tensor([7, 4], device=DEVICE)
    x[1, 4:] = float("nan")
    y, state = layer(x, lengths=lengths, return_state=True)
    alone, after = layer(x[1:, :4], return_state=True)
    assert_close(y[1:, :4], alone, 1e-14)
    assert_close(state[1:], after, 1e-14)
    assert not y[1, 4:].any()


def test_the_contract_refuses_bad_input(layer):
    ahead = Decaying(3, bidirectional=True).to(DEVICE)
    x = random(2, 7, 3)
    for call, keywords in (
        (lambda: ahead(x, return_state=True), ("reads the future",)),
        (lambda: ahead.step(x[:, 0]), ("reads the future",)),
        (lambda: layer(x[..., :2]), ("x", "[B, L, 3]", "[2, 7, 2]")),
        (lambda: layer(x, random(5, 3)), ("state", "[2, 3]", "[5, 3]")),
        (lambda: layer.initial_state(-1), ("batch_size", "at least 0", "-1")),
    ):
        with refused(*keywords):
            call()


def test_an_incomplete_mixer_is_refused():
    class Half(Decaying):
        _step = Mixer._step

    with refused("abstract", "_step", error=TypeError):
        Half(3)
