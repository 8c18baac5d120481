"""Steps at fixed addresses, which a CUDA graph replays, give the answers of plain steps."""

import pytest
import torch
from mixers import STREAMING, UsersMixer
from support import DEVICE, assert_close, refused

from dlrnn.models import LanguageConfig, LanguageModel
from dlrnn.nn import DLR, Attention, CapturedSteps
from dlrnn.nn.attention import KeyValueBuffer
from dlrnn.nn.streaming import InPlaceState

PROMPT, STEPS, BATCH = 5, 9, 3
GROWS = {"sgconv"}
LAYERS = {name: make for name, make in STREAMING.items() if DEVICE == "cpu" or name not in GROWS}
LAYERS |= {
    "windowed dlr": lambda: DLR(4, 6, kernel_length=4),
    "prod": lambda: DLR(4, 3, cast="prod"),
    "real": lambda: DLR(4, 6, real=True),
    "users": lambda: UsersMixer(4),
}


def plain_steps(layer, x, state):
    outputs = []
    for x_t in x.unbind(1):
        y, state = layer.step(x_t, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("form", LAYERS)
@torch.no_grad()
def test_they_give_the_answers_of_plain_steps(form):
    torch.manual_seed(0)
    layer = LAYERS[form]().to(DEVICE).eval()
    x = torch.randn(BATCH, PROMPT + STEPS, 4, device=DEVICE)
    lengths = torch.tensor([PROMPT, 2, 0], device=DEVICE)
    _, state = layer(x[:, :PROMPT], return_state=True, lengths=lengths)
    y, _ = plain_steps(layer, x[:, PROMPT:], state)
    step = CapturedSteps(layer, state, STEPS)
    outputs = [step(x_t).clone() for x_t in x[:, PROMPT:].unbind(1)]
    assert_close(torch.stack(outputs, dim=1), y, 1e-6)
    again, _ = plain_steps(layer, x[:, PROMPT:], state)
    assert torch.equal(again, y)  # the given state is not overwritten


@pytest.mark.parametrize("mixer", ["dlr", "attention"])
@torch.no_grad()
def test_a_language_model_decodes_in_place(mixer):
    torch.manual_seed(0)
    sizes = {"layers": 2, "d_model": 8, "d_state": 6, "d_embedding": 4, "d_ff": 8}
    config = LanguageConfig(
        mixer, 2, **sizes, vocabulary=11, router="threshold", kernel_length=4, heads=2, d_head=4
    )
    model = LanguageModel(config).to(DEVICE).eval()
    tokens = torch.randint(11, (BATCH, PROMPT + STEPS), device=DEVICE)
    _, state = model(tokens[:, :PROMPT], return_state=True)
    step = CapturedSteps(model, state, STEPS)
    outputs = [step(token).clone() for token in tokens[:, PROMPT:].unbind(1)]
    assert_close(torch.stack(outputs, dim=1), model(tokens)[:, PROMPT:], 1e-5)


@torch.no_grad()
def test_the_state_is_overwritten():
    for layer, kind in ((DLR(4, 6), InPlaceState), (Attention(4, heads=2), KeyValueBuffer)):
        layer.to(DEVICE).eval()
        step = CapturedSteps(layer, layer.initial_state(2), steps=2)
        assert isinstance(step.state, kind)
        before = step.state[0].data_ptr(), step.state[0].clone()
        step(torch.ones(2, 4, device=DEVICE))
        assert step.state[0].data_ptr() == before[0]
        assert not torch.equal(step.state[0], before[1])


def test_what_cannot_be_captured_is_refused():
    layer = DLR(4, 6).to(DEVICE)
    state = layer.initial_state(1)
    with refused("eval"):
        CapturedSteps(layer, state, 3)
    step = CapturedSteps(layer.eval(), state, 1)
    x = torch.zeros(1, 4, device=DEVICE)
    step(x)
    with refused("1", "positions", "steps"):
        step(x)
    with refused("gradients", "no_grad"):
        layer.step(x, layer.in_place(state, 1))
    attention = Attention(4, heads=2).to(DEVICE)
    room = attention.in_place(attention.initial_state(1), 3)
    with refused("in place", "steps"):
        attention(x[:, None], room, return_state=True)
