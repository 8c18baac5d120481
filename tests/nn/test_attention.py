"""The three attention mixers: each equals its definition; what they share is in test_contract."""

import copy

import pytest
import torch
from support import DEVICE, assert_agree, assert_close
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlrnn import ops
from dlrnn.nn import Attention, AttentionFF, LocalAttention

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
def test_values_and_gradients_equal_the_definition(kind, options, length):
    layer = make(kind, options)
    x = random(2, length, H, requires_grad=True)
    inputs = (x, *layer.parameters())
    negligible = 1e-12 if length == 1 else 0.0  # one key: its score does not matter
    expected = by_definition(layer, x)
    assert_agree(layer(x), expected, inputs, 1e-12, 1e-11, negligible=negligible)


@pytest.mark.parametrize(("kind", "options"), CAUSAL + BOTH_WAYS, ids=named)
def test_fp32_is_close_to_float64(kind, options):
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


def test_parameters_and_initialisation():
    layer = Attention(128)
    assert layer.temperature.item() == pytest.approx(32**-0.5)
    assert sum(p.numel() for p in layer.parameters()) == 5 * (128 * 128 + 128) + 1
    assert AttentionFF(128).d_ff == 2048
    assert all(kind.kernel_parameters == () for kind in (Attention, AttentionFF, LocalAttention))


@pytest.mark.parametrize(("kind", "options"), CAUSAL + BOTH_WAYS, ids=named)
def test_pytorchs_fused_kernel_serves_every_form(kind, options, monkeypatch):
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
