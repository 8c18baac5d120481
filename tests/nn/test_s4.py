import math

import pytest
import torch
from support import DEVICE, assert_close, gradients, run_python
from torch.nn import functional as F

from dlrnn.nn import S4, RecurrentState, param_groups
from dlrnn.nn.s4 import FEW
from dlrnn.ops import OnlineState, reference

OPTIONS = [
    {},
    {"kernel_length": 9},
    {"kernel_length": 1},
    {"glu": True},
    {"project": False},
    {"bidirectional": True},
    {"bidirectional": True, "kernel_length": 9, "glu": True, "activation": "silu"},
]
CAUSAL = [options for options in OPTIONS if "bidirectional" not in options]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def make(dtype=torch.float64, **options):
    """P and B with imaginary parts, decays that differ: as after training."""
    layer = S4(3, **{"d_state": 6, **options}).to(DEVICE, dtype)
    with torch.no_grad():
        for parameter in (layer.P, layer.B, layer.log_decay, layer.frequency):
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def complex_(pairs):
    return torch.complex(pairs[..., 0].double().cpu(), pairs[..., 1].double().cpu())


def discretised(A, B, dt):
    """The bilinear rule, by dense inverses."""
    identity = torch.eye(len(A), dtype=A.dtype)
    inverse = torch.linalg.inv(identity - dt / 2 * A)
    return inverse @ (identity + dt / 2 * A), dt * (inverse @ B)


def kernel_by_definition(layer, length):
    """The dense complex system of all N states, iterated: nothing diagonal, nothing transformed."""
    decay, frequency = layer.log_decay.double().cpu().exp(), layer.frequency.double().cpu()
    Lambda, P, B, C = torch.complex(-decay, frequency), *map(complex_, (layer.P, layer.B, layer.C))
    Lambda, P, B, C = (torch.cat((half, half.conj()), dim=-1) for half in (Lambda, P, B, C))
    A = torch.diag(Lambda) - torch.outer(P, P.conj())
    dt = layer.log_dt.double().cpu().exp().repeat(len(C) // layer.d_model)
    rows = []
    for row in range(len(C)):
        A_bar, x = discretised(A, B, dt[row])
        entries = []
        for _ in range(min(length, layer.kernel_length or length)):
            entries.append(C[row] @ x)
            x = A_bar @ x
        rows.append(torch.stack(entries))
    kernel = torch.stack(rows)
    assert kernel.imag.abs().max() < 1e-10
    return kernel.real


def by_definition(layer, x):
    x, H = x.double().cpu(), layer.d_model
    K = kernel_by_definition(layer, x.shape[1])
    y = reference.convolution(x, K[:H], K[H:] if layer.bidirectional else None)
    y = y + layer.D.double().cpu() * x
    if not layer.project:
        return y
    y = {"gelu": F.gelu, "silu": F.silu}[layer.activation](y)
    y = y @ layer.out.weight.double().cpu().T + layer.out.bias.double().cpu()
    return y[..., :H] * y[..., H:].sigmoid() if layer.glu else y


@pytest.mark.parametrize("length", [1, 2, 3, 33, 64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layer_is_its_definition_gradients_included(options, length):
    """A short kernel hardly depends on Lambda: that gradient has the rounding of larger ones."""
    layer, x = make(**options), random(2, length, 3).requires_grad_()
    y, expected = layer(x), by_definition(layer, x)
    assert_close(y, expected, 1e-12)
    inputs, grad = (x, *layer.parameters()), torch.randn_like(expected)
    have, want = gradients(y, inputs, grad), gradients(expected, inputs, grad)
    together = (torch.cat([part.flatten().cpu() for part in parts]) for parts in (have, want))
    assert_close(*together, 1e-12)
    for part, wanted in zip(have, want, strict=True):
        assert_close(part, wanted, 1e-9)


@pytest.mark.parametrize("states", [2, 6, 64])
def test_at_the_start_it_is_the_dense_legs_system(states):
    """From HiPPO's formula alone: A is real, lower triangular and far from normal.

    C lives in the coordinates of the layer; any other coordinates see it through the Markov
    parameters: the kernel read out along the state that an impulse makes is `B^T Abar^k Bbar`,
    which no change to unitary coordinates changes.
    """
    n = torch.arange(states, dtype=torch.float64)
    B = (2 * n + 1).sqrt()
    A = -(torch.outer(B, B).tril(-1) + torch.diag(n + 1))
    layer = S4(2, states, dt_min=1e-2, dt_max=1e-1).to(DEVICE).double()
    layer.reset_parameters()
    with torch.no_grad():
        layer.C.copy_(layer.B * torch.tensor([1.0, -1.0]).to(layer.B))  # C = B^*
    for dt, kernel in zip(layer.log_dt.exp().tolist(), layer.kernel(100), strict=True):
        A_bar, x = discretised(A, B, dt)
        expected = []
        for _ in range(100):
            expected.append(B @ x)
            x = A_bar @ x
        assert_close(kernel, torch.stack(expected), 1e-11)


@pytest.mark.parametrize("length", [100, 1001])
def test_fp32_against_the_dense_recurrence(length):
    layer = S4(4).to(DEVICE)
    x = random(1, length, 4, dtype=torch.float32)
    assert_close(layer.kernel(length), kernel_by_definition(layer, length), 1e-6)
    exact = S4(4).to(DEVICE).double()
    exact.load_state_dict(layer.state_dict())
    assert_close(layer(x), exact(x.double()), 1e-5)


def test_a_kernel_is_the_beginning_of_a_longer_one():
    layer = S4(4).to(DEVICE).double()
    kernel = layer.kernel(2000)
    for length in (1, 2, 7, 1000, 1999):
        assert_close(layer.kernel(length), kernel[:, :length], 1e-11)


def test_fp32_at_a_long_length():
    layer = S4(2, 16, dt_min=1e-5, dt_max=1e-4).to(DEVICE)
    exact = S4(2, 16).to(DEVICE).double()
    exact.load_state_dict(layer.state_dict())
    assert_close(layer.kernel(2**16), exact.kernel(2**16), 1e-6)


def test_stable_whatever_is_learned():
    layer = make(d_state=8)
    with torch.no_grad():
        layer.P *= 30
        layer.log_decay -= 20
        layer.frequency *= 100
    assert layer.kernel(5000).isfinite().all()
    _, state = layer(random(1, 5000, 3), return_state=True)
    assert state.x.isfinite().all()


def test_state_dict_and_groups():
    layer = S4(3, 6)
    kernel = {"log_decay", "frequency", "P", "B", "C", "log_dt"}
    assert set(layer.state_dict()) == kernel | {"D", "out.weight", "out.bias"}
    assert set(layer.kernel_parameters) == kernel
    assert not any(p.is_complex() for p in layer.parameters())
    _, group = param_groups(layer, lr=1e-3, weight_decay=0.1)
    assert (len(group["params"]), group["weight_decay"]) == (6, 0.0)
    both = S4(3, 6, bidirectional=True)
    assert both.C.shape == (6, 3, 2)
    assert both.log_dt.shape == (3,)


def test_parameter_count():
    """Per channel C (N real numbers), Delta and D; once Lambda, P and B, N each; the linear map."""
    have = sum(p.numel() for p in S4(128, 64).parameters())
    assert have == 128 * (64 + 2) + 3 * 64 + 128 * 129


def test_initialisation():
    torch.manual_seed(1)
    layer = S4(512, 64)
    assert math.log(1e-3) <= layer.log_dt.min() <= layer.log_dt.max() <= math.log(0.1)
    assert layer.log_dt.mean().item() == pytest.approx(math.log(1e-2), abs=0.2)
    assert layer.C.square().sum(-1).mean().item() == pytest.approx(1, rel=0.05)
    torch.testing.assert_close(layer.log_decay.detach(), torch.full((32,), math.log(0.5)))
    assert (layer.frequency > 0).all()
    assert layer.P[:, 0].min() > 0.1


def test_second_derivative_through_the_layer():
    layer, x = make(d_state=2, activation="silu"), random(1, 4, 3).requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradgradcheck(call, (x, *parameters))


def test_autocast_keeps_kernel_and_state_in_fp32():
    layer, x = make(torch.float32), random(2, 33, 3, dtype=torch.float32)
    kernel = layer.kernel(33)
    _, expected = layer(x, return_state=True)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert torch.equal(layer.kernel(33), kernel)
        y, state = layer(x, return_state=True)
        y_step, state_step = layer.step(x[:, 0].bfloat16(), state)
    assert y.dtype == y_step.dtype == torch.bfloat16
    assert state.x.dtype == state_step.x.dtype == torch.float32
    assert torch.equal(state.x, expected.x)


def test_options_make_the_layer_again():
    options = {
        **{"d_model": 4, "d_state": 6, "bidirectional": True, "kernel_length": 9},
        **{"dt_min": 1e-3, "dt_max": 1e-2, "glu": True, "activation": "silu", "dropout": 0.25},
        **{"project": True},
    }
    assert S4(**options).options() == options
    assert "d_model=4, bidirectional, glu, kernel_length=9, d_state=6" in repr(S4(**options))


def test_a_model_on_meta():
    with torch.device("meta"):
        assert S4(4, 6).C.is_meta


# ---------------------------------------------------------------------------------- streaming


def in_chunks(layer, x, sizes):
    state, outputs = None, []
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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [*CAUSAL, {"d_state": 64}], ids=str)
def test_whole_is_chunks_is_steps(options, dtype):
    layer, x = make(dtype, **options), random(2, 300, 3, dtype=dtype)
    whole = layer(x)
    assert_close(in_chunks(layer, x, [1, 7, FEW, FEW + 1, 200, 59]), whole, TOLERANCE[dtype])
    assert_close(in_steps(layer, x), whole, TOLERANCE[dtype])


@pytest.mark.parametrize("options", CAUSAL, ids=str)
def test_gradients_go_through_the_state(options):
    layer, x = make(**options), random(2, 90, 3).requires_grad_()
    inputs, grad = (x, *layer.parameters()), random(2, 90, 3)
    expected = gradients(layer(x), inputs, grad)
    for streamed in (in_chunks(layer, x, [1, 7, 20, 62]), in_steps(layer, x)):
        for have, want in zip(gradients(streamed, inputs, grad), expected, strict=True):
            assert_close(have, want, 1e-9)


def test_fp32_keeps_its_accuracy_over_many_steps():
    layer = S4(2, dt_max=1e-3, project=False).to(DEVICE)
    x = random(1, 2000, 2, dtype=torch.float32)
    with torch.no_grad():
        assert_close(in_steps(layer, x), layer(x), 1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_padded_is_each_alone(options):
    layer, x = make(**options), random(4, 60, 3)
    lengths = torch.tensor([60, 1, 33, 0], device=DEVICE)
    x[torch.arange(60, device=DEVICE) >= lengths[:, None]] = float("nan")
    y = layer(x, lengths=lengths)
    for b, n in enumerate(lengths.tolist()):
        assert (y[b, n:] == 0).all()
        if n:
            assert_close(y[b, :n], layer(x[b : b + 1, :n])[0], 1e-12)


@pytest.mark.parametrize("options", CAUSAL, ids=str)
def test_padded_states_are_each_alone(options):
    """Two padded chunks after each other, then a step."""
    layer, x = make(**options), random(4, 171, 3)
    first, second = torch.tensor([140, 3, 0, 17]), torch.tensor([0, 30, 30, 12])
    _, state = layer(x[:, :140], return_state=True, lengths=first.to(DEVICE))
    y, state = layer(x[:, 140:170], state, return_state=True, lengths=second.to(DEVICE))
    last, _ = layer.step(x[:, 170], state)
    for b, (n, m) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        expected = layer(torch.cat((x[b, :n], x[b, 140 : 140 + m], x[b, 170:]))[None])[0]
        assert_close(y[b, :m], expected[n : n + m], 1e-10)
        assert_close(last[b], expected[-1], 1e-10)


def test_which_state_serves_which_layer():
    state = make().initial_state(2)
    assert isinstance(state, RecurrentState)
    assert state.x.shape == (2, 3, 3, 2)
    assert isinstance(make(kernel_length=9).initial_state(2), OnlineState)
    layer, x = make(), random(2, 40, 3)
    assert_close(layer(x, state), layer(x), 1e-12)
    assert layer(x[:0], return_state=True)[1].x.shape == (0, 3, 3, 2)


def test_a_state_is_not_changed_by_using_it():
    layer, x = make(), random(1, 80, 3)
    _, state = layer(x, return_state=True)
    before = state.x.clone()
    layer.step(x[:, 0], state)
    layer(x, state, return_state=True)
    assert torch.equal(state.x, before)
    assert state.x.untyped_storage().nbytes() < 80 * 3 * 8


# ---------------------------------------------------------------------------------- errors


@pytest.fixture
def unchecked(monkeypatch):
    """Without the shape checker that only tests install: what a user sees."""
    import jaxtyping

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"d_state": 0}, "d_state must be a whole number of at least 1, not 0"),
        ({"d_state": 7}, r"d_state must be even \(conjugate pairs\), not 7"),
        ({"dt_min": 0.2}, "0 < dt_min <= dt_max must hold, not 0.2 and 0.1"),
        ({"dt_min": 0.0}, "0 < dt_min <= dt_max must hold, not 0.0 and 0.1"),
    ],
    ids=str,
)
def test_bad_options(options, sentence, unchecked):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        S4(**{"d_model": 4, **options})


def test_bad_states(unchecked):
    layer, x = make(), random(2, 20, 3)
    _, state = layer(x, return_state=True)
    with pytest.raises(ValueError, match=r"^state.x must have the shape \[1, 3, 3, 2\]"):
        layer.step(x[:1, 0], state)
    with pytest.raises(ValueError, match=r"^this layer's state is a OnlineState, not a Recurrent"):
        make(kernel_length=9).step(x[:, 0], state)
    with pytest.raises(ValueError, match=r"^state.x must be float32, not float64"):
        make(torch.float32).step(x[:, 0].float(), state)
    for size in (-1, 2.0, "2"):
        with pytest.raises(ValueError, match=r"^batch_size must be a whole number of at least 0"):
            layer.initial_state(size)
    both = make(bidirectional=True)
    for call in (lambda: both.initial_state(2), lambda: both.step(x[:, 0])):
        with pytest.raises(ValueError, match=r"^a bidirectional layer reads the future"):
            call()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="values on a GPU are not read back")
def test_not_finite():
    layer = make()
    with torch.no_grad():
        layer.C[1, 2, 0] = float("nan")
    with pytest.raises(ValueError, match=r"^C holds nan at \[1, 2, 0\]"):
        layer(random(2, 20, 3))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_transforms_of_torch_func(unchecked):
    layer, x = make(), random(2, 20, 3)
    with pytest.raises(ValueError, match=r"^dlrnn cannot be used inside torch.func's jvp"):
        torch.func.jvp(layer, (x,), (x,))


PRELUDE = f"""
import torch
from dlrnn.nn import S4, RecurrentState
device = {str(DEVICE)!r}
def close(a, b):
    assert ((a - b).norm() <= 1e-5 * b.norm()).item(), (a - b).norm() / b.norm()
"""


def test_one_graph_without_breaks_serves_many_lengths():
    code = """
layer = S4(4, 6).to(device)
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
for length in (140, 200, 300):  # on a GPU up to 128 positions are another graph
    x = torch.randn(2, length, 4, device=device, requires_grad=True)
    y, expected = compiled(x), layer(x)
    close(y, expected)
    grad, inputs = torch.randn_like(y), (x, *layer.parameters())
    have, want = (torch.autograd.grad(output, inputs, grad) for output in (y, expected))
    for a, b in zip(have, want):
        close(a, b)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, torch._dynamo.utils.counters
print("ok")
"""
    assert "ok" in run_python(PRELUDE + code)


def test_a_chunk_is_a_whole_graph():
    code = """
torch.set_grad_enabled(False)
layer = S4(4, 6).to(device)
chunk = torch.compile(layer, fullgraph=True, backend="aot_eager")
x = torch.randn(2, 50, 4, device=device)
_, state = layer(x[:, :25], return_state=True)
y, state = chunk(x[:, 25:50], state, return_state=True)
close(y, layer(x)[:, 25:50])
print("ok")
"""
    assert "ok" in run_python(PRELUDE + code)


def test_the_step_can_be_exported():
    code = """
class Step(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
    def forward(self, x, *state):
        y, state = self.layer.step(x, RecurrentState(*state))
        return y, *state
layer = S4(4, 6).to(device).eval()
x, state = torch.randn(3, 4, device=device), layer.initial_state(3)
program = torch.export.export(Step(layer), (x, *state))
assert not [n for n in program.graph.nodes if "dlrnn" in str(n.target)], "plain PyTorch alone"
close(program.module()(x, *state)[0], layer.step(x, state)[0])
print("ok")
"""
    assert "ok" in run_python(PRELUDE + code)
