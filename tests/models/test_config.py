"""A configuration that exists can be built; one that cannot is one sentence."""

import json
import re
from dataclasses import asdict

import pytest
import torch
from torch import nn

from dlrnn import DLR
from dlrnn import nn as mixers
from dlrnn.models import MIXERS, ModelConfig, build_model
from dlrnn.models.config import foreign_mixers, is_built_in, mixer_class

STATES = {"d_state": 6}


def test_a_config_makes_its_mixer():
    config = ModelConfig("dlr", STATES | {"dropout": 0.25}, d_model=4)
    layer = config.make_mixer()
    assert isinstance(layer, DLR)
    assert (layer.d_model, layer.d_state, layer.dropout_p) == (4, 6, 0.25)
    assert ModelConfig("dlrnn.nn.DLR", STATES).make_mixer().d_model == 128


def test_a_config_is_plain_data():
    config = ModelConfig("attention", {"heads": 2}, d_model=8, layers=3, norm="pre", pooling="last")
    assert ModelConfig(**json.loads(json.dumps(asdict(config)))) == config


def test_options_are_not_shared_with_the_caller():
    options = dict(STATES)
    config = ModelConfig("dlr", options)
    options["d_stat"] = 7
    assert config.mixer_options == STATES


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mixer": "dlrr"}, "there is no mixer 'dlrr': did you mean 'dlr'"),
        ({"mixer": "Attention_FF"}, "did you mean 'attention-ff'"),
        ({"mixer": "qwx"}, "no mixer 'qwx': it can be dlr, dss, s4d, s4, sgconv, attention,"),
        ({"mixer": 3}, "mixer must be a name or an import path, not 3"),
        ({"mixer": "nowhere.MyLayer"}, "'nowhere.MyLayer' cannot be imported: No module"),
        ({"mixer": "dlrnn.nn.DLRR"}, "'dlrnn.nn.DLRR' cannot be imported: module 'dlrnn.nn'"),
        ({"mixer": "dlrnn.ops.vandermonde"}, "must be a class of torch modules"),
        ({"mixer": "collections.OrderedDict"}, "must be a class of torch modules"),
        ({"mixer_options": {}}, "'dlr' needs the option d_state"),
        ({"mixer_options": {"d_stat": 6}}, "no option 'd_stat': did you mean 'd_state'"),
        ({"mixer_options": STATES | {"zzz": 6}}, "no option 'zzz': it can be d_state, bidirec"),
        ({"mixer_options": STATES | {"d_model": 6}}, "d_model is set for the model"),
        ({"mixer": "attention", "mixer_options": {"chunk": 6}}, "no option 'chunk': it can be h"),
        ({"mixer_options": None}, "mixer_options must be a dict"),
        ({"d_model": 0}, "d_model must be a whole number of at least 1, not 0"),
        ({"layers": 1.5}, "layers must be a whole number of at least 1, not 1.5"),
        ({"norm": "both"}, "norm must be one of pre, post, not 'both'"),
        ({"mixer": "dlr,tapes", "layers": 2, "mixer_options": {"dlr": STATES}}, "no mixer 'tapes'"),
        ({"mixer": "dlr,", "layers": 2, "mixer_options": {"dlr": STATES}}, "no mixer ''"),
        ({"mixer": "dlr,attention", "layers": 2}, "for dlr, attention; got 'd_state'"),
        ({"mixer": "dlr,attention", "layers": 2, "mixer_options": {"dlr": 6}}, "are no dict but i"),
        (
            {"mixer": "dlr,attention", "layers": 2, "mixer_options": {"attention": {"headz": 2}}},
            "the mixer 'dlr' needs the option d_state",
        ),
        (
            {
                "mixer": "attention,sgconv",
                "layers": 2,
                "mixer_options": {"attention": {"headz": 2}},
            },
            "the mixer 'attention' has no option 'headz': did you mean 'heads'",
        ),
        (
            {"mixer": "attention,attention-ff", "mixer_options": {}},
            "layers must be at least 2, the",
        ),
        ({"pooling": "min"}, "pooling must be one of max, mean, last, not 'min'"),
    ],
    ids=str,
)
def test_wrong_arguments_raise(arguments, sentence, unchecked):
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        ModelConfig(**{"mixer": "dlr", "mixer_options": STATES, **arguments}).make_mixer()
    assert "\n" not in str(caught.value)


def test_incompatible_sizes_raise_the_mixers_error():
    config = ModelConfig("attention", d_model=12)
    with pytest.raises(ValueError, match=r"^d_model must be a multiple of 2 \* heads"):
        build_model(config, d_input=3, d_output=8)


@pytest.mark.parametrize("name", MIXERS)
def test_every_name_is_a_mixer(name):
    assert mixer_class(name) is getattr(mixers, MIXERS[name].removeprefix("dlrnn.nn."))


PATTERN = {"tape": {"length": 8, "heads": 2}, "dlr": STATES}


def test_a_pattern_of_mixers_is_repeated_to_the_depth():
    config = ModelConfig("tape,dlr,attention", PATTERN, d_model=8, layers=5)
    kinds = [
        type(block.mixer).__name__ for block in build_model(config, d_input=1, d_output=1).blocks
    ]
    assert kinds == ["TapeDLR", "DLR", "Attention", "TapeDLR", "DLR"]
    assert ModelConfig(**json.loads(json.dumps(asdict(config)))) == config
    assert {"tape.length", "dlr.d_state", "attention.heads"} <= set(config.option_types())
    assert config.given_options() == {"tape.length": 8, "tape.heads": 2, "dlr.d_state": 6}


def test_every_foreign_name_of_a_pattern_is_found():
    assert foreign_mixers("tape,dlrnn.nn.DLR") == []
    assert foreign_mixers("dlrnn.nn.DLR,evil.Layer,tape") == ["evil.Layer"]
    assert not is_built_in("dlrnn.nn.DLR,evil.Layer")


# ---------------------------------------------------------------------------------- a user's mixer

MY_LAYER = """
import torch
from torch import nn
from dlrnn.nn import DLR

class MyLayer(nn.Module):
    def __init__(self, d_model, *, width=3, **more):
        super().__init__()
        self.mix = nn.Conv1d(d_model, d_model, width, padding=width - 1)

    def forward(self, x):
        return torch.relu(self.mix(x.mT)[..., : x.shape[1]]).mT

class Constant(nn.Module):
    pass

class TooShort(MyLayer):
    def forward(self, x):
        return x[:, 1:]

class Pair(MyLayer):
    def forward(self, x):
        return x, x

class Scaled(DLR):
    def __init__(self, *arguments, scale=2.0, **options):
        super().__init__(*arguments, **{"d_state": 6, **options})
        self.scale = scale

    def forward(self, *arguments, **options):
        y = super().forward(*arguments, **options)
        return (self.scale * y[0], y[1]) if isinstance(y, tuple) else self.scale * y

class Masked(MyLayer):
    def forward(self, u, mask, lengths=None):
        return super().forward(u)

class Renamed(Masked):
    def __init__(self, channels, **options):
        super().__init__(channels, **options)

    def forward(self, v, **options):
        return super().forward(v, mask=None, **options)

class Assigned(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.forward = self.fast

    def fast(self, x, lengths=None):
        return x
"""


@pytest.fixture
def my_package(tmp_path, monkeypatch):
    (tmp_path / "my_package.py").write_text(MY_LAYER)
    (tmp_path / "broken_package.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_users_mixer_is_named_by_its_import_path(my_package):
    config = ModelConfig("my_package.MyLayer", {"width": 5}, d_model=4, layers=2)
    model = build_model(config, d_input=3, d_output=2)
    assert model(torch.randn(2, 9, 3)).shape == (2, 9, 2)
    assert model.causal
    assert isinstance(model.blocks[1].mixer.mix, nn.Conv1d)


def test_a_misspelt_built_in_mixer_raises_at_once():
    for arguments in (("dlrr", STATES), ("dlr", {"d_stat": 4})):
        with pytest.raises(ValueError, match="did you mean"):
            ModelConfig(*arguments)


def test_kwargs_do_not_accept_a_misspelt_option(my_package):
    sentence = "^the mixer 'my_package.MyLayer' has no option 'widht': did you mean 'width'"
    with pytest.raises(ValueError, match=sentence):
        ModelConfig("my_package.MyLayer", {"widht": 5}).make_mixer()


def test_options_of_base_classes_are_known(my_package):
    """`*arguments, **options`, in its constructor and in its forward."""
    with pytest.raises(ValueError, match="has no option 'd_stat': did you mean 'd_state'"):
        ModelConfig("my_package.Scaled", {"d_stat": 4}).make_mixer()
    for name, sentence in (
        ("Scaled", "d_model is set for the model, not in mixer_options"),
        ("Renamed", "has no option 'd_model': it can be width"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ModelConfig(f"my_package.{name}", {"d_model": 4}).make_mixer()
    lengths = torch.tensor([9, 4])
    for name in ("Renamed", "Assigned"):
        model = build_model(ModelConfig(f"my_package.{name}", d_model=8), d_input=3, d_output=2)
        assert model(torch.randn(2, 9, 3), lengths).shape == (2, 9, 2)
    made = ModelConfig("my_package.Scaled", {"d_state": 4, "scale": 3.0}, d_model=8).make_mixer()
    assert (made.d_model, made.d_state, made.scale) == (8, 4, 3.0)
    model = build_model(ModelConfig("my_package.Scaled", d_model=8), d_input=3, d_output=2)
    x = torch.randn(2, 9, 3)
    whole = model(x)
    first, state = model(x[:, :5], return_state=True)
    torch.testing.assert_close(first, whole[:, :5])
    torch.testing.assert_close(model(x[:, 5:], state=state, return_state=True)[0], whole[:, 5:])


def test_missing_abilities_of_a_users_mixer_are_named(my_package):
    x = torch.randn(2, 9, 3)

    def model(name):
        return build_model(ModelConfig(f"my_package.{name}", d_model=4), d_input=3, d_output=2)

    mine = model("MyLayer")
    for call, sentence in (
        (lambda: mine(x, torch.tensor([9, 4])), "the mixer MyLayer cannot do this: it takes no l"),
        (lambda: mine(x, return_state=True), "the mixer MyLayer cannot do this: it takes no state"),
        (
            lambda: mine.initial_state(2),
            "the mixer MyLayer cannot do this: it has no initial_state",
        ),
        (lambda: mine.step(x[:, 0]), "the mixer MyLayer cannot do this: it has no step"),
        (
            lambda: model("TooShort")(x),
            r"the mixer TooShort must give the shape of its input, \[2, 9, 4\], and gave \[2, 8, 4",
        ),
        (lambda: model("Pair")(x), "the mixer Pair must give a tensor, not a tuple"),
        (
            lambda: model("Constant"),
            "the mixer 'my_package.Constant' must take d_model first, and it takes nothing",
        ),
        (
            lambda: ModelConfig("broken_package.MyLayer").make_mixer(),
            "the mixer 'broken_package.MyLayer' cannot be imported: division by zero",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}"):
            call()
