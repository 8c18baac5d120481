"""DSS and S4D, whose channels have a lambda each: streaming, padding, compilers."""

import pytest
import torch
from support import DEVICE, assert_close, gradients, run_python

from dlrnn.nn import DSS, S4D, param_groups
from dlrnn.ops import reference

OPTIONS = [{}, {"kernel_length": 70}, {"kernel_length": 3}, {"glu": True}, {"project": False}]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
both = pytest.mark.parametrize("mixer", [DSS, S4D])
every = pytest.mark.parametrize("options", OPTIONS, ids=str)


def make(mixer, dtype=torch.float64, **options):
    return mixer(5, 10, **options).to(DEVICE, dtype)


def in_chunks(layer, x, sizes, state=None):
    outputs = []
    for chunk in x.split(sizes, dim=1):
        y, state = layer(chunk, state, return_state=True)
        outputs.append(y)
    return torch.cat(outputs, dim=1)


def in_steps(layer, x, state=None):
    outputs = []
    for x_t in x.unbind(1):
        y, state = layer.step(x_t, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1)


@both
@every
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_whole_is_chunks_is_steps(mixer, options, dtype):
    layer = make(mixer, dtype, **options)
    x = torch.randn(2, 200, 5, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        whole = layer(x)
        assert_close(in_chunks(layer, x, [1, 7, 64, 128]), whole, TOLERANCE[dtype])
        assert_close(in_steps(layer, x), whole, TOLERANCE[dtype])


@both
@every
def test_gradients_go_through_the_state(mixer, options):
    layer = make(mixer, **options)
    x = torch.randn(2, 40, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    inputs, grad = (x, *layer.parameters()), torch.randn(2, 40, 5, dtype=torch.float64)
    expected = gradients(layer(x), inputs, grad)
    for streamed in (in_chunks(layer, x, [1, 7, 32]), in_steps(layer, x)):
        for have, want in zip(gradients(streamed, inputs, grad), expected, strict=True):
            assert_close(have, want, 1e-9)


@both
def test_modes_are_a_recurrence(mixer):
    layer = make(mixer, project=False)
    x = torch.randn(2, 30, 5, dtype=torch.float64, device=DEVICE)
    W, log_lambda, D = layer.modes()
    assert log_lambda.dtype == torch.float64
    assert log_lambda.shape == W.shape == (5, 10 if mixer is DSS else 5, 2)
    y, last = reference.recurrence(x.cpu(), W.cpu(), log_lambda.cpu())
    have, state = layer(x, return_state=True)
    assert_close(have, y + D.cpu() * x.cpu(), 1e-12)
    assert_close(state.x, last, 1e-12)
    assert layer.initial_state(3).x.shape == (3, *W.shape)


@both
@pytest.mark.parametrize("options", [{}, {"kernel_length": 9}, {"bidirectional": True}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_padded_is_each_alone(mixer, options, dtype):
    layer = make(mixer, dtype, **options)
    lengths = torch.tensor([60, 1, 33, 0], device=DEVICE)
    x = torch.randn(4, 60, 5, dtype=dtype, device=DEVICE)
    x[torch.arange(60, device=DEVICE) >= lengths[:, None]] = float("nan")
    y = layer(x, lengths=lengths)
    for b, n in enumerate(lengths.tolist()):
        assert (y[b, n:] == 0).all()
        if n:
            tolerance = 1e-12 if dtype == torch.float64 else 1e-5
            assert_close(y[b, :n], layer(x[b : b + 1, :n])[0], tolerance)


@both
@pytest.mark.parametrize("options", [{}, {"kernel_length": 9}], ids=str)
def test_padded_states_are_each_alone(mixer, options):
    """Two padded chunks after each other, then a step."""
    layer = make(mixer, **options)
    first, second = torch.tensor([40, 3, 0, 17]), torch.tensor([0, 30, 30, 12])
    x = torch.randn(4, 71, 5, dtype=torch.float64, device=DEVICE)
    _, state = layer(x[:, :40], return_state=True, lengths=first.to(DEVICE))
    y, state = layer(x[:, 40:70], state, return_state=True, lengths=second.to(DEVICE))
    last, _ = layer.step(x[:, 70], state)
    for b, (n, m) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        expected = layer(torch.cat((x[b, :n], x[b, 40 : 40 + m], x[b, 70:]))[None])[0]
        assert_close(y[b, :m], expected[n : n + m], 1e-10)
        assert_close(last[b], expected[-1], 1e-10)


@both
def test_a_long_walk_keeps_its_phase(mixer):
    """2000 steps in fp32, against the whole in float64."""
    layer = mixer(2, 64, project=False, dt_min=1e-6, dt_max=1e-5).to(DEVICE)
    exact = mixer(**layer.options()).to(DEVICE).double()
    exact.load_state_dict(layer.state_dict())
    x, state = torch.randn(1, 2000, 2, device=DEVICE), None
    with torch.no_grad():
        for x_t in x.unbind(1):
            _, state = layer.step(x_t, state)
        _, expected = exact(x.double(), return_state=True)
    assert_close(state.x, expected.x, 1e-5)


@both
def test_bidirectional_cannot_stream(mixer):
    layer = make(mixer, bidirectional=True)
    with pytest.raises(ValueError, match=r"^a bidirectional layer reads the future"):
        layer.initial_state(2)


@both
def test_second_derivative_through_the_layer(mixer):
    layer = mixer(2, 4, activation="silu", dt_min=0.1, dt_max=0.5).to(DEVICE).double()
    x = torch.randn(1, 5, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradgradcheck(call, (x, *parameters))


@both
def test_autocast_keeps_kernel_and_state_in_fp32(mixer):
    layer = make(mixer, torch.float32)
    kernel, x = layer.kernel(33), torch.randn(2, 33, 5, device=DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert torch.equal(layer.kernel(33), kernel)
        y, state = layer(x, return_state=True)
    assert y.dtype == torch.bfloat16
    assert state.x.dtype == torch.float32
    assert_close(y, layer(x), 1e-2)  # bf16 has 8 bits
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@both
def test_what_gets_no_weight_decay(mixer):
    layer = make(mixer)
    other, kernel = param_groups(layer, lr=1e-3, weight_decay=0.1)
    assert {id(p) for p in kernel["params"]} == {
        id(p) for p in (layer.log_decay, layer.frequency, layer.log_dt, layer.W)
    }
    assert kernel["weight_decay"] == 0
    assert len(other["params"]) == 3


@both
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_errors(mixer, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    layer, x = make(mixer), torch.randn(2, 5, 5, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match=r"^dlrnn cannot be used inside torch.func's jvp"):
        torch.func.jvp(layer, (x,), (x,))
    with pytest.raises(ValueError, match=r"^state.x must have the shape \[3, 5, "):
        layer(torch.cat((x, x[:1])), layer.initial_state(2))
    with pytest.raises(ValueError, match=r"^the parameters of a layer must be float32 or float64"):
        layer.bfloat16()(x.bfloat16())
    if DEVICE.type == "cpu":
        layer = make(mixer)
        with torch.no_grad():
            layer.log_dt[1] = float("nan")
        with pytest.raises(ValueError, match=r"^log_dt holds nan at \[1\]"):
            layer(x)


def test_compiled_and_exported():
    """One graph for whole, state and step; an exported step is plain PyTorch."""
    code = f"""
import torch
from dlrnn.nn import DSS, S4D, RecurrentState
torch.manual_seed(0)
device = torch.device({str(DEVICE)!r})
def close(a, b):
    error = ((a - b).norm() / b.norm()).item()
    assert error <= 1e-5, error
class Step(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
    def forward(self, x, *state):
        y, state = self.layer.step(x, RecurrentState(*state))
        return y, *state
for layer in (DSS(4, 6), S4D(4, 6, bidirectional=True)):
    torch._dynamo.reset()
    layer = layer.to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 50, 4, device=device, requires_grad=True)
    y, expected = compiled(x), layer(x)
    close(y, expected)
    grad, inputs = torch.randn_like(y), (x, *layer.parameters())
    have, want = (torch.autograd.grad(output, inputs, grad) for output in (y, expected))
    for a, b in zip(have, want):
        close(a, b)
    if layer.bidirectional:
        continue
    y, state = compiled(x, return_state=True)
    close(state.x, layer(x, return_state=True)[1].x)
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    close(step(x[:, 0], state)[0], layer.step(x[:, 0], state)[0])
    state = layer.initial_state(2)
    program = torch.export.export(Step(layer.eval()), (x[:, 0].detach(), *state))
    assert not [n for n in program.graph.nodes if "dlrnn" in str(n.target)], "plain PyTorch alone"
    close(program.module()(x[:, 0].detach(), *state)[0], layer.step(x[:, 0], state)[0])
print("ok")
"""
    assert "ok" in run_python(code)
