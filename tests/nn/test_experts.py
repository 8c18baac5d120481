"""Experts: values against a loop over tokens and experts, capacity, padding, thresholds."""

import math

import pytest
import torch
from support import DEVICE, assert_agree, assert_close, in_chunks, in_steps
from torch.nn import functional as F

from dlrnn.models.model import Block
from dlrnn.nn.experts import DENSE_TOKENS, THRESHOLD_RATE, Experts

KINDS = [("top", True), ("top", False), ("threshold", True), ("threshold", False)]


def make(experts=4, router="top", *, training=False, **options):
    layer = Experts(6, experts, 5, router=router, **options).to(DEVICE).double()
    return layer.train(training)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE)


def served(layer, p, n):
    """The tokens of each expert, by definition; p [n, N]."""
    log_p, N = p.log(), layer.experts
    if layer.router == "top":
        places = math.ceil(n * (1 if layer.training else 2) / N)
        return [sorted(range(n), key=lambda t: (-p[t, e].item(), t))[:places] for e in range(N)]
    places = math.ceil(2 * n / N) if layer.training else n
    passing = [[t for t in range(n) if log_p[t, e] > layer.threshold[e]] for e in range(N)]
    return [tokens[:places] for tokens in passing]


def by_definition(layer, x, lengths=None):
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        n = x.shape[1] if lengths is None else int(lengths[b])
        p = torch.softmax(x[b, :n] @ layer.scores.weight.T, dim=-1)
        for e, tokens in enumerate(served(layer, p, n)):
            for t in tokens:
                out = F.gelu(x[b, t] @ layer.up[e]) @ layer.down[e]
                place = torch.zeros_like(x[..., :1])
                place[b, t] = 1
                y = y + place * p[t, e] * out
    return y


@pytest.mark.parametrize(("router", "training"), KINDS)
@pytest.mark.parametrize(("experts", "length"), [(4, 11), (3, 9), (2, 1), (5, 3)])
def test_values_and_gradients_equal_the_loop(router, training, experts, length):
    layer, x = make(experts, router, training=training), random(2, length, 6).requires_grad_()
    expected = by_definition(layer, x)  # first: training moves the thresholds
    assert_agree(layer(x), expected, (x, *layer.parameters()), 1e-12)


@pytest.mark.parametrize(("router", "training"), KINDS)
def test_padding_uses_no_capacity(router, training):
    layer, x = make(3, router, training=training), random(4, 10, 6)
    lengths = torch.tensor([10, 1, 7, 0], device=DEVICE)
    expected = by_definition(layer, x, lengths)
    x[torch.arange(10, device=DEVICE) >= lengths[:, None]] = float("nan")
    y = layer(x, lengths=lengths)
    assert_close(y, expected, 1e-12)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def counts(layer, x):
    """Tokens of each expert: where its part of the output is not 0."""
    numbers = []
    for e in range(layer.experts):
        alone = torch.zeros_like(layer.down)
        alone[e] = layer.down[e].detach()
        y = torch.func.functional_call(layer, {"down": alone}, (x,))
        numbers.append(int((y.abs().amax(-1) > 0).sum()))
    return numbers


@pytest.mark.parametrize(("length", "training", "places"), [(10, True, 3), (10, False, 5)])
def test_capacity_is_rounded_up(length, training, places):
    layer = make(4, training=training)
    assert counts(layer, random(1, length, 6)) == [places] * 4


def test_the_earlier_of_equal_tokens_is_served():
    layer = make(2, training=True)
    y = layer(random(1, 1, 6).expand(1, 7, 6))
    assert (y[0, :4].abs().amax(-1) > 0).all()  # both experts take the first ceil(7 / 2)
    assert (y[0, 4:] == 0).all()


@pytest.mark.parametrize("router", ["top", "threshold"])
def test_one_expert_is_a_feed_forward_layer(router):
    layer, x = make(1, router, training=True), random(2, 7, 6)
    assert_close(layer(x), F.gelu(x @ layer.up[0]) @ layer.down[0], 1e-12)
    assert {name for name, _ in layer.named_parameters()} == {"up", "down"}
    assert not layer.bidirectional


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("router", ["top", "threshold"])
def test_only_the_top_router_reads_the_future(router, training):
    """The future is perturbed: the past of "top" changes, that of "threshold" does not."""
    layer, x = make(3, router, training=training), random(4, 12, 6)
    changed = x.clone()
    changed[:, 6:] += random(4, 6, 6)
    start = {name: value.clone() for name, value in layer.named_buffers()}
    before = layer(x)
    layer.load_state_dict(start, strict=False)
    after = layer(changed)
    same = torch.equal(before[:, :6], after[:, :6])
    assert same == (router == "threshold") == (not layer.bidirectional)


def test_tokens_served_in_several_batches_equal_chunks_and_steps():
    layer, x = make(4, "threshold"), random(2, DENSE_TOKENS // 2 + 9, 6)
    whole, state = layer(x, return_state=True)
    assert layer.initial_state(2) == state == ()
    pieces = in_chunks(layer, x[:, :20], [1, 6, 13])[0], in_steps(layer, x[:, 20:])[0]
    assert_close(torch.cat(pieces, dim=1), whole, 1e-10)


def test_thresholds_learn_to_serve_an_equal_share():
    layer, start = make(4, "threshold", training=True), make(4, "threshold").threshold
    layer(random(1, 8, 6))
    assert ((layer.threshold - start).abs() <= THRESHOLD_RATE * (1 + 1e-9)).all()
    for _ in range(400):
        layer(random(8, 32, 6))
    shares = (layer.log_probabilities(random(100, 100, 6)) > layer.threshold).double().mean((0, 1))
    assert ((shares - 1 / 4).abs() < 0.03).all()
    kept = layer.eval().threshold.clone()
    layer(random(2, 8, 6))
    assert torch.equal(layer.threshold, kept)
    assert "threshold" in layer.state_dict()


def test_both_routers_can_be_trained():
    for router in ("top", "threshold"):
        torch.manual_seed(0)
        layer, x = make(4, router, training=True), random(8, 16, 6)
        target, losses = x.abs(), []
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        for _ in range(150):
            loss = F.mse_loss(layer(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0], router


def test_half_precision_and_empty_batches():
    for router, training in KINDS:
        layer = Experts(8, 3, 5, router=router).to(DEVICE).train(training)
        x = torch.randn(2, 9, 8, device=DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = layer(x)
        assert y.dtype == torch.float32
        layer(x[:0]).sum().backward()
        assert layer(x[:0]).shape == (0, 9, 8)


# ---------------------------------------------------------------------------------- conversion


@pytest.mark.parametrize("padded", [False, True])
def test_a_layer_trained_with_top_has_the_thresholds_for_streaming(padded):
    """Its parameters behind thresholds serve 2 / N of the tokens, as it does in evaluation."""
    torch.manual_seed(3)
    layer = make(4, training=True)
    for _ in range(200):
        lengths = torch.tensor([40, 40, 0, 25], device=DEVICE) if padded else None
        layer(random(4, 40, 6), lengths=lengths)
    causal = make(4, "threshold")
    causal.load_state_dict(layer.state_dict())
    log_p = causal.log_probabilities(random(50, 40, 6))
    shares = (log_p > causal.threshold).double().mean((0, 1))
    assert (shares - 0.5).abs().max() < 0.04
    before = layer.threshold.clone()
    layer.eval()(random(4, 40, 6))
    layer.train()(random(0, 40, 6))
    assert torch.equal(layer.threshold, before)


@pytest.mark.parametrize("router", ["top", "threshold"])
def test_a_block_passes_lengths_to_experts(router):
    """They count tokens, with a causal router too; a single expert does not."""
    layers = [make(4, router, training=True) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x, lengths = random(2, 9, 6), torch.tensor([9, 4], device=DEVICE)
    other = x.clone()
    other[1, 4:] = random(5, 6)
    answers = []
    for layer, each in zip(layers, (x, other), strict=True):
        block = Block(layer, 6, "pre").to(DEVICE).double()
        answers.append(block(each, lengths=lengths)[0][1, :4])
    assert torch.equal(*answers)
    assert torch.equal(layers[0].threshold, layers[1].threshold)
    assert not make(1, router).sees_padding
