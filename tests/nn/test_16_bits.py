"""Layers and models converted to bf16 or fp16, and 16-bit inputs to fp32 layers."""

import copy

import pytest
import torch
from mixers import BIDIRECTIONAL, CAUSAL, EVERY, SMALL, UsersMixer
from support import DEVICE, assert_close, in_chunks, in_steps
from torch.utils._pytree import tree_leaves

from dlrnn.models import LanguageConfig, LanguageModel, ModelConfig, build_model
from dlrnn.nn import Experts

BF16 = torch.bfloat16
TOLERANCE = 2e-2  # bf16 has 8 bits
HELD = [form for form in BIDIRECTIONAL if form.options.get("hold")]
"""Under autocast a tape rounds the linear map of its first inputs, which turns its addresses."""
KERNELS = [form for form in CAUSAL if form.kind.kernel_parameters]
WITH_KERNEL = [name for name, make in SMALL.items() if make.func.kernel_parameters]


def dtypes(tree):
    return {leaf.dtype for leaf in tree_leaves(tree) if leaf.is_floating_point()}


def pair(form):
    """A layer, the same in bf16, and an input that both can read."""
    layer = form.make(torch.float32)
    return layer, copy.deepcopy(layer).to(BF16), form.input(33, dtype=BF16)


@pytest.mark.parametrize("form", [form for form in EVERY if form not in HELD], ids=str)
def test_a_bf16_layer_computes_what_the_fp32_layer_does(form):
    layer, converted, x = pair(form)
    expected = layer(x.float())
    for each in (layer, converted):
        y = each(x)
        assert y.dtype == BF16
        assert_close(y, expected, TOLERANCE)
    converted(x).float().square().sum().backward()
    for p in converted.parameters():
        assert p.grad.dtype == p.dtype
        assert p.grad.isfinite().all()


@pytest.mark.parametrize("form", KERNELS, ids=str)
def test_a_bf16_layer_streams_with_states_in_fp32(form):
    layer, converted, x = pair(form)
    assert dtypes(converted.state_dict()) == {torch.float32}
    assert all(map(torch.equal, converted.parameters(), layer.parameters()))
    expected = layer(x.float())
    for read in (lambda: in_chunks(converted, x, [20, 13]), lambda: in_steps(converted, x)):
        y, state = read()
        assert y.dtype == BF16
        assert_close(y, expected, TOLERANCE)
        assert BF16 not in dtypes(state)


def test_the_router_of_bf16_experts_stays_in_fp32():
    layer = Experts(4, experts=3, d_ff=5, router="threshold").to(DEVICE, BF16)
    assert layer.up.dtype == BF16
    x = torch.randn(2, 9, 4, device=DEVICE, dtype=BF16)
    assert layer.log_probabilities(x).dtype == layer.threshold.dtype == torch.float32


@pytest.mark.parametrize("name", WITH_KERNEL)
def test_no_conversion_rounds_a_kernel(name):
    """Neither do gradients, the default dtype, or a state dict in bf16 that is assigned."""
    layer = SMALL[name]()
    layer(torch.randn(1, 9, 4)).square().sum().backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in layer.parameters()]
    layer.half().bfloat16().type(BF16).to(DEVICE, BF16)
    for p, (value, gradient) in zip(layer.parameters(), before, strict=True):
        assert torch.equal(p.cpu(), value)
        assert torch.equal(p.grad.cpu(), gradient)
    assert dtypes([*layer.double().parameters()]) == {torch.float64}
    default = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        made = SMALL[name]()
    finally:
        torch.set_default_dtype(default)
    kernel = [getattr(made, own) for own in made.kernel_parameters]
    assert dtypes(kernel) == {torch.float32}
    made.load_state_dict({k: v.to(BF16) for k, v in made.state_dict().items()}, assign=True)
    assert dtypes([getattr(made, own) for own in made.kernel_parameters]) == {torch.float32}
    assert made(torch.randn(1, 9, 4, dtype=BF16)).dtype == BF16


def test_a_users_mixer_becomes_bf16():
    layer = UsersMixer(3).to(BF16)
    assert layer.rate.dtype == BF16
    assert layer(torch.randn(1, 4, 3, dtype=BF16)).dtype == BF16


@pytest.mark.parametrize("mixer", [*WITH_KERNEL, "attention"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_bf16_model_trains_streams_and_resumes(mixer, norm):
    options = {k: v for k, v in SMALL[mixer].keywords.items() if k != "d_model"}
    config = ModelConfig(mixer, options, d_model=4, norm=norm)
    model = build_model(config, d_input=3, d_output=2).to(DEVICE, BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(2, 9, 3, device=DEVICE, dtype=BF16)
    model(x).float().square().sum().backward()
    optimizer.step()
    y = model.eval()(x)
    assert y.dtype == BF16
    assert_close(in_steps(model, x)[0], y, 2 * TOLERANCE)
    resumed = build_model(config, d_input=3, d_output=2).to(DEVICE, BF16).eval()
    resumed.load_state_dict(model.state_dict())
    assert torch.equal(resumed(x), y)


def test_a_bf16_language_model_gives_losses_in_fp32():
    config = LanguageConfig(
        mixer="dlr,attention", layers=2, d_model=6, d_embedding=5, d_ff=7, d_state=4, experts=2
    )
    model = LanguageModel(config).to(DEVICE, BF16)
    tokens = torch.randint(9, (2, 12), device=DEVICE)
    loss = model(tokens, targets=tokens)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
