"""What PyTorch does to modules: meta devices, fake tensors, checkpointing, saving."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from mixers import SMALL, STREAMING
from support import assert_close, refused
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from dlrnn import tasks
from dlrnn.analysis import fit_kernel, from_linear_rnn, layer_of, plot_kernel, prod_as_dlr
from dlrnn.models import LanguageConfig, LanguageModel, ModelConfig, build_model
from dlrnn.nn import (
    DLR,
    S4D,
    Experts,
    save_model,
)

LANGUAGE = LanguageConfig(
    mixer="attention", layers=1, d_model=6, d_embedding=5, d_ff=7, vocabulary=23, experts=2
)


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


MODELS = SMALL | {
    "language attention": partial(LanguageModel, LANGUAGE),
    "language dlr": partial(LanguageModel, replace(LANGUAGE, mixer="dlr", d_state=4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_reset_parameters_fills_a_model_from_meta(name):
    """`to_empty` and `reset_parameters` set what the constructor sets, of the same distribution."""
    with torch.device("meta"):
        model = MODELS[name]()
    model.to_empty(device="cpu")
    assert_reset(model, lambda: model.apply(reset), MODELS[name])
    if name in SMALL:  # the layer resets its parts
        assert_reset(model, model.reset_parameters, MODELS[name])


def assert_reset(model, reset_all, make):
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan)
    reset_all()
    fresh = make().state_dict()
    for name, tensor in model.state_dict().items():
        other = fresh[name]
        assert tensor.isfinite().all(), name
        if other.numel() == 1 or other.std() == 0:
            assert_close(tensor, other, 1e-6)
        else:
            assert 0.3 < (tensor.norm() / other.norm()).item() < 3, name


@pytest.mark.parametrize("name", STREAMING)
def test_fake_tensors_have_the_right_shapes(name):
    """Fake tensors have no values to look at."""
    with FakeTensorMode():
        layer = STREAMING[name]()
        for mode in (layer.train(), layer.eval()):
            assert mode(torch.randn(2, 9, 4)).shape == (2, 9, 4)
            assert mode(torch.randn(2, 9, 4), lengths=torch.tensor([9, 3])).shape == (2, 9, 4)


def test_a_model_of_fake_tensors_has_the_right_shape():
    with FakeTensorMode():
        model = build_model(ModelConfig("dlr", {"d_state": 4}, d_model=4), vocabulary=5, d_output=2)
        assert model(torch.zeros(2, 9, dtype=torch.long)).shape == (2, 9, 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_experts_choose_the_same_under_checkpointing(reentrant):
    """A forward that is made again chooses the same experts, and learns nothing a second time."""
    torch.manual_seed(0)
    one, two = (Experts(4, 3, 5).double() for _ in range(2))
    two.load_state_dict(one.state_dict())
    x = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    one(x).square().sum().backward()
    checkpoint(two, x, use_reentrant=reentrant).square().sum().backward()
    assert_close(two.threshold, one.threshold, 1e-12)
    for mine, other in zip(one.parameters(), two.parameters(), strict=True):
        assert_close(other.grad, mine.grad, 1e-12)
    causal = Experts(4, 3, 5, router="threshold").double()
    y = checkpoint(causal, x, use_reentrant=reentrant)
    with refused("router='threshold'", "gradient checkpointing"):
        y.square().sum().backward()
    causal.eval()  # a threshold that stays
    checkpoint(causal, x, use_reentrant=reentrant).square().sum().backward()


def test_saving_what_is_no_model_or_has_no_values_is_refused(tmp_path, unchecked):
    path = tmp_path / "a.safetensors"
    with refused("save_model", "model", "OrderedDict"):
        save_model(DLR(2, 2).state_dict(), path)
    with refused("weight", "meta"):
        save_model(nn.Linear(2, 2, device="meta"), path)
    assert not path.exists()


def test_analysis_refuses_other_types(unchecked):
    for call, keywords in (
        (lambda: layer_of(DLR(2, 2)), ("layer_of", "DLR", "system_of")),
        (lambda: prod_as_dlr(DLR(2, 2)), ("prod_as_dlr", "DLR")),
        (lambda: from_linear_rnn([[1.0]], [1.0], [1.0]), ("A", "torch tensor", "list")),
        (lambda: fit_kernel([1.0], torch.ones(1)), ("kernel", "torch tensor", "list")),
        (lambda: plot_kernel(S4D(4, 4), 7), ("plot_kernel", "DLR layer", "S4D")),
    ):
        with refused(*keywords):
            call()


def test_a_sharded_tensor_is_not_saved(tmp_path):
    """Of a model whose parameters are shared among processes."""

    class Part(torch.Tensor):
        def full_tensor(self):
            return self

    model = nn.Linear(2, 2)
    model.register_buffer("piece", torch.ones(2).as_subclass(Part))
    with refused("piece", "Part", "full_tensor"):
        save_model(model, tmp_path / "a.safetensors")


def test_models_take_an_empty_batch():
    model = build_model(ModelConfig("dlr", {"d_state": 4}, d_model=4), vocabulary=5, d_output=2)
    assert model(torch.zeros(0, 9, dtype=torch.long)).shape == (0, 9, 2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dlr", {"dt_min": 1e-3, "dropout": 0.25}),
        ("dss", {"dt_max": 0.1, "frequency_step": 2}),
        ("s4", {"dt_min": 1e-3}),
        ("sgconv", {"decay": 0.5}),
        ("attention", {"dropout": 0.25}),
    ],
)
def test_options_become_python_numbers(name, options, unchecked):
    made = SMALL[name](**{option: np.float32(value) for option, value in options.items()})
    assert json.loads(json.dumps(made.options())) == made.options()


def test_metrics_keep_no_graph():
    task = tasks.get("shift", length=16)
    batch = task.sample(2)
    output = torch.zeros(2, task.input_length, task.d_output, requires_grad=True)
    assert not task.metrics(output, batch)["R2"].requires_grad
    assert task.loss(output, batch).requires_grad


def test_targets_must_be_tokens(unchecked):
    tokens = torch.zeros(1, 4, dtype=torch.long)
    for targets in (tokens.float(), tokens.bool()):
        with refused("targets", "whole numbers"):
            LanguageModel(LANGUAGE)(tokens, targets=targets)
