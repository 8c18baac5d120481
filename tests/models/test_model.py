"""Networks: the paper's sizes, padding, pooling, pairs, streaming; the language model, too."""

import copy
from dataclasses import replace

import pytest
import torch
from support import DEVICE, assert_close, in_steps
from torch import nn
from torch.nn import functional as F

from dlrnn.models import LanguageConfig, LanguageModel, ModelConfig, build_model
from dlrnn.tasks import TASKS

STATES = {"d_state": 6, "dt_min": 1e-3}
SMALL = [
    ModelConfig("dlr", STATES, d_model=8, layers=2),
    ModelConfig("dlr", STATES | {"glu": True}, d_model=8, layers=2, norm="pre"),
    ModelConfig("attention", d_model=8, layers=2),
    ModelConfig("attention-ff", {"d_ff": 5}, d_model=8, norm="pre"),
    ModelConfig("local-attention", {"chunk": 5}, d_model=8, layers=2, norm="pre"),
    ModelConfig("tape", {"length": 12, "heads": 2, "d_head": 4, "hold": 1}, d_model=8),
    ModelConfig("gated-dlr", STATES, d_model=8),
]
PATTERN = ModelConfig(
    "dlr,tape,attention", {"dlr": STATES, "tape": {"length": 9}}, d_model=8, layers=4, norm="pre"
)
BOTH_WAYS = [replace(c, mixer_options={**c.mixer_options, "bidirectional": True}) for c in SMALL]
LANGUAGE = LanguageConfig(
    **{"d_model": 6, "d_state": 4, "d_embedding": 5, "d_ff": 7, "vocabulary": 23, "layers": 2},
    **{"kernel_length": 11, "heads": 2, "d_head": 8, "experts": 3},
)
CAUSAL_LANGUAGE = [
    replace(LANGUAGE, mixer=mixer, norm=norm, **experts)
    for mixer in ("dlr", "attention")
    for norm in ("pre", "post")
    for experts in ({"router": "threshold"}, {"experts": 1})
]
CAUSAL_LANGUAGE.append(
    replace(LANGUAGE, mixer="tape,attention", layers=3, experts=1, tape_length=12)
)
TOP = [replace(LANGUAGE, mixer=mixer) for mixer in ("dlr", "attention")]
STREAMING = [*SMALL, PATTERN, *CAUSAL_LANGUAGE]
ALL = STREAMING + BOTH_WAYS + TOP


def make(config, **sizes):
    if isinstance(config, LanguageConfig):
        return LanguageModel(config).to(DEVICE).double().eval()
    model = build_model(config, **{"d_input": 3, "d_output": 2, **sizes})
    return model.to(DEVICE).double()


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE)


def sample(config, batch, length):
    """Random input of a model: tokens or vectors."""
    if isinstance(config, LanguageConfig):
        return torch.randint(23, (batch, length), device=DEVICE)
    return random(batch, length, 3)


def shown(config):
    if isinstance(config, LanguageConfig):
        return f"language-{config.mixer}-{config.norm}-{config.experts}-{config.router}"
    return f"{config.mixer}-{config.norm}"


# ---------------------------------------------------------------------------------- the paper


def count(mixer, task, *, d_model=128, layers=1, **options):
    config = ModelConfig(mixer, options, d_model=d_model, layers=layers)
    with torch.device("meta"):
        model = build_model(config, d_input=TASKS[task]().d_input, d_output=TASKS[task]().d_output)
    return sum(p.numel() for p in model.parameters())


def as_printed(parameters):
    """Two digits of a million, or whole thousands."""
    return f"{parameters / 1e6:.1f}M" if parameters >= 1e6 else f"{parameters / 1e3:.0f}K"


@pytest.mark.parametrize(
    ("paper", "mixer", "options"),
    [
        ("1.1M", "dlr", {"d_state": 4096}),
        ("6.4M", "dlr", {"d_state": 4096, "layers": 6}),
        ("1.1M", "dss", {"d_state": 4096}),
        ("83K", "attention", {"task": "cumsum"}),
        ("166K", "attention", {"task": "cumsum", "layers": 2}),
        ("1.1M", "attention-ff", {}),
        ("272K", "dlr", {"d_model": 32, "d_state": 4096}),
        ("272K", "dlr", {"d_model": 32, "d_state": 4096, "cast": "prod"}),
        ("272K", "dss", {"d_model": 32, "d_state": 4096}),
        ("35K", "dlr", {"d_model": 32, "d_state": 512}),
        ("137K", "dlr", {"d_model": 32, "d_state": 4096, "real": True}),
    ],
    ids=str,
)
def test_parameter_counts_of_tables_1_2_and_6(paper, mixer, options):
    """On Shift, which has 8 outputs; the paper's figures of attention are those of one output."""
    assert as_printed(count(mixer, **{"task": "shift", **options})) == paper


def test_sgconv_at_262144():
    """919K: the paper prints 920K, perhaps with two digits."""
    assert round(count("sgconv", "shift", d_model=32, length=2**18), -4) == 920_000


def test_two_layers_of_attention_ff():
    """2.27M, which would round to 2.3M: the paper's 2.2M may be twice its 1.1M."""
    have = count("attention-ff", "shift", layers=2)
    assert have == pytest.approx(2 * count("attention-ff", "shift"), rel=1e-3)
    assert int(have / 1e5) == 22


# ---------------------------------------------------------------------------------- definition


def test_the_network_equals_its_definition():
    for config in SMALL:
        model, x = make(config), random(2, 9, 3)
        h = F.linear(x, model.encoder.weight, model.encoder.bias)
        for block in model.blocks:
            norm, mixer = block.norm, block.mixer
            h = h + mixer(norm(h)) if config.norm == "pre" else norm(h + mixer(h))
        h = F.layer_norm(h, (8,)) if config.norm == "pre" else h  # the final norm, as it starts
        expected = F.linear(h, model.decoder.weight, model.decoder.bias)
        assert_close(model(x), expected, 1e-12)


def test_tokens_are_embedded():
    model = make(SMALL[0], d_input=None, vocabulary=11)
    tokens = torch.randint(11, (2, 9), device=DEVICE)
    assert model(tokens).shape == (2, 9, 2)
    assert torch.equal(model(tokens), model(tokens.to(torch.uint8)))
    assert make(SMALL[0], d_input=None, vocabulary=10**4).encoder.weight.std().item() > 0.98
    y_t, _ = model.step(tokens[:, 0])
    assert_close(y_t, model(tokens)[:, 0], 1e-10)


@pytest.mark.parametrize("config", ALL, ids=shown)
def test_causal_matches_the_dependence_on_later_positions(config):
    model, x = make(config), sample(config, 8, 12)
    changed = torch.cat((x[:, :6], sample(config, 8, 6)), dim=1)
    same = (model(changed)[:, :6] - model(x)[:, :6]).abs().max() < 1e-9
    assert model.causal == bool(same) == (config in STREAMING)


# ---------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("config", ALL, ids=shown)
def test_padded_batch_equals_single_sequences(config):
    x, lengths = sample(config, 4, 20), torch.tensor([20, 1, 13, 0], device=DEVICE)
    padding = torch.arange(20, device=DEVICE) >= lengths[:, None]
    x[padding] = float("nan") if x.is_floating_point() else -100
    can_pool = config in SMALL + BOTH_WAYS
    for pooled in (False, True) if can_pool else (False,):
        model = make(config, pooled=pooled)
        y = model(x, lengths)
        y.sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        for b, n in enumerate(lengths.tolist()[:3]):
            own = y[b] if pooled else y[b, :n]
            assert_close(own, model(x[b : b + 1, :n])[0], 1e-10)
            assert pooled or (y[b, n:] == 0).all()


@pytest.mark.parametrize("config", SMALL + BOTH_WAYS, ids=shown)
def test_gradients_of_a_padded_batch_equal_those_of_single_sequences(config):
    model, x = make(config), random(2, 20, 3)
    dout, lengths = random(2, 20, 2), torch.tensor([20, 11], device=DEVICE)
    parameters = list(model.parameters())
    have = torch.autograd.grad((model(x, lengths) * dout).sum(), parameters)
    alone = [(model(x[b : b + 1, :n])[0] * dout[b, :n]).sum() for b, n in enumerate((20, 11))]
    for one, other in zip(have, torch.autograd.grad(sum(alone), parameters), strict=True):
        assert_close(one, other, 1e-9)


@pytest.mark.parametrize("config", SMALL + BOTH_WAYS, ids=shown)
def test_only_mixers_affected_by_padding_receive_lengths(config):
    model, x = make(config), random(2, 9, 3)
    given = []
    for block in model.blocks:
        block.mixer.register_forward_pre_hook(
            lambda _, __, options: given.append("lengths" in options), with_kwargs=True
        )
    lengths = torch.tensor([9, 4], device=DEVICE)
    model(x, lengths)
    both = config.mixer_options.get("bidirectional", False)
    assert given == [both] * config.layers
    if not both:  # a state ends where its sequence does
        model(x, lengths, return_state=True)
        assert given[config.layers :] == [True] * config.layers


@pytest.mark.parametrize("pooling", ["max", "mean", "last"])
def test_pooling(pooling):
    config = ModelConfig("dlr", STATES, d_model=8, pooling=pooling)
    model, x = make(config, pooled=True), random(3, 9, 3)
    everywhere = copy.deepcopy(model)
    everywhere.pooling, everywhere.decoder = None, nn.Identity()
    lengths = torch.tensor([9, 4, 0], device=DEVICE)
    features = everywhere(x, lengths)
    pooled = {
        "max": lambda h: h.max(0).values,
        "mean": lambda h: h.sum(0) / len(h),
        "last": lambda h: h[-1],
    }[pooling]
    expected = [pooled(features[0]), pooled(features[1, :4]), torch.zeros_like(features[0, 0])]
    assert_close(model(x, lengths), model.decoder(torch.stack(expected)), 1e-12)
    assert_close(model(x[:1]), model.decoder(expected[0])[None], 1e-12)


# ---------------------------------------------------------------------------------- pairs


def test_pair_model_equals_its_definition():
    model = make(BOTH_WAYS[0], d_input=None, vocabulary=11, pair=True)
    tokens = torch.randint(11, (3, 2, 9), device=DEVICE)
    lengths = torch.tensor([[9, 4], [1, 9], [5, 5]], device=DEVICE)
    y = model(tokens, lengths)
    one = make(BOTH_WAYS[0], d_input=None, vocabulary=11, pooled=True)
    one.load_state_dict(model.state_dict(), strict=False)
    one.decoder = nn.Identity()
    for row, pair, sizes in zip(y, tokens, lengths.tolist(), strict=True):
        a, b = (one(document[None, :n])[0] for document, n in zip(pair, sizes, strict=True))
        assert_close(row, model.decoder(torch.cat((a, b, a * b, a - b))), 1e-10)
    assert make(BOTH_WAYS[0], pair=True)(random(3, 2, 9, 3)).shape == (3, 2)


# ---------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("config", STREAMING, ids=shown)
def test_whole_equals_chunks_equals_steps(config):
    model, x = make(config), sample(config, 2, 30)
    whole = model(x)
    state, outputs = None, []
    for chunk in x[:, :20].split([1, 6, 13], dim=1):
        y, state = model(chunk, state=state, return_state=True)
        outputs.append(y)
    steps, _ = in_steps(model, x[:, 20:], state)
    assert_close(torch.cat((*outputs, steps), dim=1), whole, 1e-10)
    assert_close(model(x[:, 20:], state=state), whole[:, 20:], 1e-10)
    assert_close(model.step(x[:, 0], model.initial_state(2))[0], whole[:, 0], 1e-10)


@pytest.mark.parametrize("config", STREAMING, ids=shown)
def test_states_of_a_padded_batch_equal_those_of_single_sequences(config):
    model, x = make(config), sample(config, 2, 12)
    lengths = torch.tensor([11, 4], device=DEVICE)
    _, state = model(x[:, :11], lengths, return_state=True)
    y, _ = model.step(x[:, 11], state)
    assert_close(y[:1], model(x[:1])[:, -1], 1e-10)
    alone = torch.cat((x[1:, :4], x[1:, 11:]), dim=1)
    assert_close(y[1:], model(alone)[:, -1], 1e-10)


# ---------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"d_input": None}, "give either d_input or vocabulary, not d_input=None and vocab.*=None"),
        ({"vocabulary": 5}, "give either d_input or vocabulary, not d_input=3 and vocabulary=5"),
        ({"d_output": 0}, "d_output must be a whole number of at least 1, not 0"),
        ({"d_input": 0}, "d_input must be a whole number of at least 1, not 0"),
        ({"d_input": None, "vocabulary": 0}, "vocabulary must be a whole number of at least 1"),
    ],
    ids=str,
)
def test_wrong_sizes_raise(sizes, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        make(SMALL[0], **sizes)


def test_bad_input_raises():
    real, words = make(SMALL[0]), make(SMALL[0], d_input=None, vocabulary=5)
    pooled, pair = make(SMALL[0], pooled=True), make(SMALL[0], pair=True)
    both = make(BOTH_WAYS[0])
    x, tokens = random(2, 9, 3), torch.ones(2, 9, dtype=torch.int64, device=DEVICE)
    for call, sentence in (
        (lambda: real(x[0]), r"x must have the shape \[B, L, 3\], not \[9, 3\]"),
        (lambda: real(x.float()), "x must be float64, not float32"),
        (lambda: real(x[:, :0]), "x has length 0: give it at least one position"),
        (lambda: real.step(x), r"x must have the shape \[B, 3\], not \[2, 9, 3\]"),
        (lambda: real(x, tokens[:, 0] * 9.0), "lengths must be whole numbers, not float32"),
        (lambda: real(x, state=(None,)), "this model has 2 states"),
        (lambda: words(x), r"x must have the shape \[B, L\], not \[2, 9, 3\]"),
        (lambda: words(x[..., 0]), "x must hold tokens, whole numbers, not float64"),
        (lambda: words(tokens[:, :0]), "x has length 0: give it at least one position"),
        (lambda: words(tokens.to("meta")), "x is on meta, the layer on"),
        (lambda: pooled(x, return_state=True), "a pooled model gives one output"),
        (lambda: pooled.step(x[:, 0]), "a pooled model gives one output"),
        (lambda: pooled.initial_state(2), "a pooled model gives one output"),
        (lambda: pair(x), r"x must have the shape \[B, 2, L, 3\], not \[2, 9, 3\]"),
        (lambda: pair(x[:, None].expand(2, 2, 9, 3), tokens[:, 0]), r"lengths must have the shape"),
        (lambda: both.step(x[:, 0]), "a bidirectional layer reads the future"),
        (lambda: both(x, return_state=True), "a bidirectional layer reads the future"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}"):
            call()
    if DEVICE.type == "cpu":
        for wrong, low, high in ((tokens + 4, 5, 5), (tokens - 2, -1, -1)):
            sentence = f"^tokens must lie between 0 and 4, not between {low} and {high}"
            with pytest.raises(ValueError, match=sentence):
                words(wrong)
