"""The three attention mixers: each is its definition; whole = chunks = steps; padded = alone."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import DEVICE, assert_close, gradients, run_python
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlrnn import ops
from dlrnn.nn import Attention, AttentionFF, KeyValueState, LocalAttention, RecurrentState

H = 8
CAUSAL = [
    (Attention, {}),
    (Attention, {"heads": 1, "glu": True}),
    (AttentionFF, {"d_ff": 5}),
    (LocalAttention, {"chunk": 7}),
    (LocalAttention, {"chunk": 1}),
    (LocalAttention, {"chunk": 1000, "glu": True}),
]
BOTH_WAYS = [(kind, options | {"bidirectional": True}) for kind, options in CAUSAL]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def named(value):
    return getattr(value, "__name__", str(value))


def make(kind, options, dtype=torch.float64):
    """Queries and keys large enough that a softmax is far from a mean."""
    layer = kind(H, **{"heads": 2, **options}).to(DEVICE, dtype)
    with torch.no_grad():
        layer.qkv.weight.mul_(4)
    return layer


def random(*shape, dtype=torch.float64, **options):
    return torch.randn(*shape, dtype=dtype, device=DEVICE, **options)


# ---------------------------------------------------------------------------------- definition


def sees(layer, t, s):
    chunk = getattr(layer, "chunk", None)
    near = chunk is None or abs(t // chunk - s // chunk) <= 1
    return near and (layer.bidirectional or s <= t)


def turned(x, position):
    """[d] as d/2 complex numbers, each times its own `exp(i angle)`."""
    half = len(x) // 2
    angles = [position * 10000.0 ** (-2 * i / len(x)) for i in range(half)]
    angle = torch.tensor(angles, dtype=torch.float64)
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag))


def by_definition(layer, x):
    """From the raw parameters, one softmax at a time."""
    parameters = {name: p.cpu() for name, p in layer.named_parameters()}
    x, d = x.cpu(), H // layer.heads

    def linear(name, x):
        return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]

    samples = []
    for u in x:
        q, k, v = linear("qkv", u).split(H, dim=-1)
        rows = []
        for t in range(len(u)):
            heads = []
            for h in (slice(i, i + d) for i in range(0, H, d)):
                known = [s for s in range(len(u)) if sees(layer, t, s)]
                query = turned(q[t, h], t)
                scores = torch.stack([query @ turned(k[s, h], s) for s in known])
                weights = (scores * parameters["temperature"]).exp()
                heads.append(weights @ v[known, h] / weights.sum())
            rows.append(torch.cat(heads))
        samples.append(torch.stack(rows))
    o = linear("merge", torch.stack(samples))
    if isinstance(layer, AttentionFF):
        for i in range(2):
            name = f"feed_forward.{i}."
            mean, variance = o.mean(-1, keepdim=True), o.var(-1, keepdim=True, correction=0)
            normal = (o - mean) / (variance + 1e-5).sqrt()
            normal = normal * parameters[name + "0.weight"] + parameters[name + "0.bias"]
            o = o + linear(name + "3", F.gelu(linear(name + "1", normal)))
    y = linear("out", x + F.gelu(o))
    return y[..., :H] * y[..., H:].sigmoid() if layer.glu else y


@pytest.mark.parametrize("length", [1, 2, 16, 21, 25])
@pytest.mark.parametrize(("kind", "options"), CAUSAL + BOTH_WAYS, ids=named)
def test_layer_is_its_definition_gradients_included(kind, options, length):
    layer = make(kind, options)
    x = random(2, length, H, requires_grad=True)
    y, expected = layer(x), by_definition(layer, x)
    assert_close(y, expected, 1e-12)
    inputs, grad = (x, *layer.parameters()), torch.randn_like(expected)
    want = gradients(expected, inputs, grad)
    for have, wanted in zip(gradients(y, inputs, grad), want, strict=True):
        if length == 1 and wanted.norm() < 1e-12:  # one key: its score does not matter
            assert have.norm() < 1e-12
        else:
            assert_close(have, wanted, 1e-11)


@pytest.mark.parametrize(("kind", "options"), CAUSAL + BOTH_WAYS, ids=named)
def test_fp32_is_float64(kind, options):
    exact = make(kind, options)
    x = random(2, 300, H)
    layer = copy.deepcopy(exact).float()
    exact.load_state_dict(layer.state_dict())
    assert_close(layer(x.float()), exact(x.float().double()), 1e-5)


def test_scores_depend_on_differences_of_positions_alone():
    """Also far away: an angle in fp32 would be wrong there."""
    q, k = random(1, 1, 3, 4, dtype=torch.float32), random(1, 1, 3, 4, dtype=torch.float32)

    def score(a, b):
        a, b = (torch.tensor([[position]], device=DEVICE) for position in (a, b))
        return (ops.rotate(q, a) * ops.rotate(k, b)).sum(-1)

    assert_close(score(2**20 + 17, 2**20 + 4), score(13, 0), 1e-6)
    assert_close(score(5, 5), (q * k).sum(-1), 1e-6)


def test_parameters_and_their_start():
    layer = Attention(128)
    assert layer.temperature.item() == pytest.approx(32**-0.5)
    assert sum(p.numel() for p in layer.parameters()) == 5 * (128 * 128 + 128) + 1
    assert AttentionFF(128).d_ff == 2048
    assert all(kind.kernel_parameters == () for kind in (Attention, AttentionFF, LocalAttention))
    built = LocalAttention(8, heads=2, chunk=3, glu=True, dropout=0.1, bidirectional=True)
    assert type(built)(**built.options()).options() == built.options()
    assert AttentionFF(**AttentionFF(8).options()).options() == AttentionFF(8).options()
    assert "d_model=8, heads=2, bidirectional, glu, chunk=3" in repr(built)


def test_dropout_only_in_training():
    layer = make(Attention, {"dropout": 0.5})
    x = random(2, 9, H)
    assert not torch.equal(layer.train()(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize(("kind", "options"), CAUSAL + BOTH_WAYS, ids=named)
def test_an_empty_batch(kind, options):
    layer = make(kind, options)
    assert layer(random(0, 21, H)).shape == (0, 21, H)


@pytest.mark.parametrize(("kind", "options"), [*CAUSAL[:4:3], *BOTH_WAYS[:4:3]], ids=named)
def test_second_derivatives_where_the_kernel_has_them(kind, options):
    layer = kind(4, heads=1, **options).to(DEVICE).double()
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(layer, random(1, 9, 4, requires_grad=True))


# ---------------------------------------------------------------------------------- streaming


def in_chunks(layer, x, sizes, state=None):
    outputs = []
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
@pytest.mark.parametrize(("kind", "options"), CAUSAL, ids=named)
def test_whole_is_chunks_is_steps(kind, options, dtype):
    layer = make(kind, options, dtype)
    x = random(2, 100, H, dtype=dtype)
    whole = layer(x)
    assert_close(in_chunks(layer, x, [1, 7, 64, 28])[0], whole, TOLERANCE[dtype])
    assert_close(in_steps(layer, x)[0], whole, TOLERANCE[dtype])
    assert_close(layer(x, layer.initial_state(2)), whole, TOLERANCE[dtype])


@given(st.data())
def test_any_mixture_of_chunks_and_steps(data):
    kind = data.draw(st.sampled_from([Attention, LocalAttention]))
    size = {"chunk": data.draw(st.integers(1, 40))} if kind is LocalAttention else {}
    layer = make(kind, size)
    x = random(1, data.draw(st.integers(1, 60)), H)
    state, outputs, t = None, [], 0
    while t < x.shape[1]:
        size = data.draw(st.integers(1, x.shape[1] - t))
        read = in_steps if data.draw(st.booleans()) else in_chunks
        arguments = () if read is in_steps else (size,)
        y, state = read(layer, x[:, t : t + size], *arguments, state=state)
        outputs.append(y)
        t += size
    assert_close(torch.cat(outputs, dim=1), layer(x), 1e-10)


@pytest.mark.parametrize(("kind", "options"), CAUSAL, ids=named)
def test_gradients_go_through_the_state(kind, options):
    layer = make(kind, options)
    x = random(2, 24, H, requires_grad=True)
    inputs, grad = (x, *layer.parameters()), torch.randn(2, 24, H, dtype=torch.float64)
    expected = gradients(layer(x), inputs, grad)
    for streamed in (in_chunks(layer, x, [1, 7, 16])[0], in_steps(layer, x)[0]):
        for have, want in zip(gradients(streamed, inputs, grad), expected, strict=True):
            assert_close(have, want, 1e-9)


@pytest.mark.parametrize(("kind", "options"), CAUSAL, ids=named)
def test_a_state_belongs_to_nobody_else(kind, options):
    """Using it does not change it, and the buffer of the inputs can be used again."""
    layer = make(kind, options)
    x = random(1, 30, H)
    buffer = x[:, :10].clone()
    with torch.no_grad():
        _, state = layer(buffer, return_state=True)
        buffer.fill_(7.0)
        before = copy.deepcopy(state)
        layer.step(x[:, 0], state)
        layer(x, state, return_state=True)
        assert all(torch.equal(now, then) for now, then in zip(state, before, strict=True))
        assert_close(layer(x[:, 10:], state), layer(x)[:, 10:], 1e-10)


# ---------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kind", "options"), CAUSAL + BOTH_WAYS, ids=named)
def test_padded_is_each_alone(kind, options, dtype):
    layer = make(kind, options, dtype)
    lengths = torch.tensor([40, 1, 23, 0, 40], device=DEVICE)
    x = random(5, 40, H, dtype=dtype)
    x[torch.arange(40, device=DEVICE) >= lengths[:, None]] = float("nan")
    y = layer(x, lengths=lengths)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    for b, n in enumerate(lengths.tolist()):
        assert (y[b, n:] == 0).all()
        if n:
            tolerance = 1e-12 if dtype == torch.float64 else 1e-5
            assert_close(y[b, :n], layer(x[b : b + 1, :n])[0], tolerance)


@pytest.mark.parametrize(("kind", "options"), CAUSAL, ids=named)
def test_padded_states_are_each_alone(kind, options):
    """Two padded chunks after each other, then a chunk and a step."""
    layer = make(kind, options)
    first, second = torch.tensor([20, 3, 0, 17]), torch.tensor([0, 15, 15, 6])
    x = random(4, 40, H)
    _, state = layer(x[:, :20], return_state=True, lengths=first.to(DEVICE))
    y, state = layer(x[:, 20:35], state, return_state=True, lengths=second.to(DEVICE))
    z, state = layer(x[:, 35:39], state, return_state=True)
    last, state = layer.step(x[:, 39], state)
    assert state.seen.tolist() == (first + second + 5).tolist()
    for b, (n, m) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        alone = torch.cat((x[b, :n], x[b, 20 : 20 + m], x[b, 35:]))[None]
        expected = layer(alone)[0]
        assert_close(y[b, :m], expected[n : n + m], 1e-10)
        assert_close(torch.cat((z[b], last[b : b + 1])), expected[n + m :], 1e-10)


# ---------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "options"), CAUSAL[:4], ids=named)
def test_autocast(kind, options, dtype):
    layer = kind(H, **{"heads": 2, **options}).to(DEVICE)
    x = random(2, 20, H, dtype=torch.float32)
    with torch.autocast(DEVICE.type, dtype=dtype):
        y, state = layer(x, return_state=True)
        y_half, state = layer(x.to(dtype), state, return_state=True)
        y_step, state = layer.step(x[:, 0].to(dtype), state)
    assert y.dtype == y_half.dtype == y_step.dtype == dtype
    assert state.keys.dtype == state.values.dtype == torch.float32
    assert_close(y, layer(x), 2e-2)  # bf16 has 8 bits
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize(("kind", "options"), CAUSAL + BOTH_WAYS, ids=named)
def test_a_fused_kernel_serves_every_form(kind, options, monkeypatch):
    """Where the last dimension lies apart in memory, PyTorch writes down every score."""
    plain = F.scaled_dot_product_attention

    def checked(q, k, v, **more):
        assert all(t.stride(-1) == 1 for t in (q, k, v))
        return plain(q, k, v, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    layer, x = make(kind, options, torch.float32), random(2, 30, H, dtype=torch.float32)
    lengths = torch.tensor([30, 7], device=DEVICE)
    fused = SDPBackend.FLASH_ATTENTION if DEVICE.type == "cpu" else SDPBackend.EFFICIENT_ATTENTION
    with sdpa_kernel(fused):
        layer(x, lengths=lengths).sum().backward()
        if not layer.bidirectional:
            _, state = layer(x, return_state=True, lengths=lengths)
            layer.step(x[:, 0], state)
            layer(x, state).sum().backward()


def test_compiled_without_breaks():
    code = f"""
import torch
from dlrnn.nn import LocalAttention
torch.manual_seed(0)
device = torch.device({str(DEVICE)!r})
for layer in (LocalAttention(8, chunk=7, bidirectional=True), LocalAttention(8, chunk=7)):
    torch._dynamo.reset()
    layer = layer.to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, lengths = torch.randn(2, 20, 8, device=device), torch.tensor([20, 9], device=device)
    torch.testing.assert_close(compiled(x, lengths=lengths), layer(x, lengths=lengths))
    if not layer.bidirectional:
        y, state = compiled(x, return_state=True)
        step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(step(x[:, 0], state)[0], layer.step(x[:, 0], state)[0])
print("ok")
"""
    assert "ok" in run_python(code)


# ---------------------------------------------------------------------------------- errors


@pytest.fixture
def unchecked(monkeypatch):
    """Without the shape checker that only tests install: what a user sees."""
    import jaxtyping

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        (Attention, {"d_model": 0}, "d_model must be a whole number of at least 1, not 0"),
        (Attention, {"bidirectional": "no"}, "bidirectional must be True or False, not 'no'"),
        (Attention, {"heads": 0}, "heads must be a whole number of at least 1, not 0"),
        (
            Attention,
            {"d_model": 12},
            r"d_model must be a multiple of 2 \* heads .*, and 12 is not one of 2 \* 4",
        ),
        (Attention, {"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1.0"),
        (AttentionFF, {"d_ff": 0}, "d_ff must be a whole number of at least 1, not 0"),
        (LocalAttention, {"chunk": 2.5}, "chunk must be a whole number of at least 1, not 2.5"),
    ],
    ids=named,
)
def test_bad_options(kind, options, sentence, unchecked):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        kind(**{"d_model": 8, **options})


def test_bad_input(unchecked):
    layer = make(Attention, {}, torch.float32)
    x = random(2, 10, H, dtype=torch.float32)
    for wrong, sentence in (
        (x[0], r"x must have the shape \[B, L, 8\], not \[10, 8\]"),
        (x[:, :0], "x has length 0: give it at least one position"),
        (x.double(), "x must be float32, not float64"),
        (x.bfloat16(), "x is bfloat16: convert it"),
        (x.tolist(), "x must be a torch tensor, not a list"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}"):
            layer(wrong)
    with pytest.raises(ValueError, match=r"^x must have the shape \[B, 8\], not \[2, 10, 8\]"):
        layer.step(x)
    with pytest.raises(ValueError, match=r"^lengths must be whole numbers, not float32"):
        layer(x, lengths=torch.ones(2, device=DEVICE))
    if DEVICE.type == "cpu":
        x[1, 3, 2] = float("nan")
        with pytest.raises(ValueError, match=r"^x holds nan at \[1, 3, 2\]"):
            layer(x)


@pytest.mark.parametrize("kind", [Attention, AttentionFF, LocalAttention])
def test_bidirectional_cannot_stream(kind, unchecked):
    layer = make(kind, {"bidirectional": True})
    x, nothing = random(2, 10, H), random(2, 0, H)
    state = KeyValueState(nothing, nothing, torch.zeros(2, dtype=torch.int64))
    for call in (
        lambda: layer.step(x[:, 0]),
        lambda: layer(x, return_state=True),
        lambda: layer(x, state),
        lambda: layer.initial_state(2),
    ):
        with pytest.raises(ValueError, match=r"^a bidirectional layer reads the future: it has no"):
            call()


def test_states_that_cannot_be(unchecked):
    layer, local = make(Attention, {}), make(LocalAttention, {"chunk": 7})
    x = random(2, 10, H)
    _, state = layer(x, return_state=True)
    with pytest.raises(ValueError, match=r"^state.keys must have the shape \[1, S, 8\]"):
        layer.step(x[:1, 0], state)
    with pytest.raises(ValueError, match=r"^state.keys must have the shape \[2, 14, 8\]"):
        local.step(x[:, 0], state)
    with pytest.raises(ValueError, match=r"^state.values must be float64, not float32"):
        layer.step(x[:, 0], state._replace(values=state.values.float()))
    with pytest.raises(ValueError, match=r"^state.keys is on meta, the layer on"):
        layer(x, state._replace(keys=state.keys.to("meta")))
    with pytest.raises(ValueError, match=r"^state.seen must have the shape \[2\], not \[1\]"):
        layer(x, state._replace(seen=state.seen[:1]))
    with pytest.raises(
        ValueError, match=r"^this layer's state is a KeyValueState, not a Recurrent"
    ):
        layer.step(x[:, 0], RecurrentState(x, x, x))
    for size in (-1, 2.0, "2"):
        with pytest.raises(ValueError, match=r"^batch_size must be a whole number of at least 0"):
            layer.initial_state(size)
