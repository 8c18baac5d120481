import copy
import warnings

import pytest
import torch
from support import refused
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from dlrnn import DLR, check_optimizer, param_groups
from dlrnn.nn import Attention


def test_kernel_parameters_have_no_decay_and_their_own_rate():
    model = nn.Sequential(nn.Linear(3, 4), DLR(4, 6), nn.LayerNorm(4), DLR(4, 6, real=True))
    other, kernel = param_groups(model, lr=1e-3, weight_decay=0.1, kernel_lr=1e-4, decay_all=True)
    assert {id(p) for p in kernel["params"]} == {
        id(p)
        for p in (
            model[1].log_lambda_re,
            model[1].log_lambda_im,
            model[1].W,
            model[3].log_lambda_re,
            model[3].W,
        )
    }
    assert (kernel["lr"], kernel["weight_decay"]) == (1e-4, 0)
    assert (other["lr"], other["weight_decay"]) == (1e-3, 0.1)
    count = sum(len(group["params"]) for group in (other, kernel))
    assert count == len(list(model.parameters()))
    torch.optim.AdamW([other, kernel]).step()


def test_shared_parameters_count_once_and_frozen_ones_are_left_out():
    layer = DLR(4, 6)
    layer.D.requires_grad_(False)
    groups = param_groups(nn.Sequential(layer, layer), lr=1e-3)
    listed = [id(p) for group in groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == 5
    assert id(layer.D) not in listed
    assert groups[1]["lr"] == 1e-3
    assert [g["role"] for g in param_groups(nn.Linear(2, 2), lr=1.0)] == ["other"]


def test_param_groups_refuses_parameters(unchecked):
    with refused("param_groups", "model", "generator"):
        param_groups(DLR(4, 6).parameters(), lr=1e-3)


@pytest.mark.parametrize("how", ["parametrize", "prune", "old weight norm"])
def test_parametrised_kernel_parameters_have_no_decay(how):
    """`W` is then a computed tensor; the parameters that it is computed from have no decay."""
    layer = DLR(4, 6)
    if how == "parametrize":
        weight_norm(layer, "W")
    elif how == "prune":
        prune.random_unstructured(layer, "W", 0.5)
    else:
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(layer, "W")
    other, kernel = param_groups(layer, lr=1e-3, weight_decay=0.1, decay_all=True)
    optimizer = torch.optim.SGD([other, kernel], lr=1e-3)
    layer(torch.randn(1, 9, 4)).sum().backward()
    optimizer.step()
    found = {id(p) for group in (other, kernel) for p in group["params"]}
    assert found == {id(p) for p in layer.parameters()}
    assert {id(p) for p in other["params"]} == {
        id(p) for p in (layer.D, layer.out.weight, layer.out.bias)
    }


def test_unrelated_parameters_keep_their_weight_decay():
    """Frozen ones, parametrisations of others, a neighbour with a similar name; a wrong name."""
    layer = DLR(4, 6)
    register_parametrization(layer, "D", nn.Identity())
    weight_norm(layer, "W")
    layer.parametrizations.W.original1.requires_grad_(False)
    other, kernel = param_groups(layer, lr=1.0)
    assert any(p is layer.parametrizations.D.original for p in other["params"])
    assert all(p.requires_grad for p in kernel["params"])

    class Own(nn.Module):
        kernel_parameters = ("lam",)

        def __init__(self):
            super().__init__()
            self.inner, self.lam_v = nn.Linear(2, 2), nn.Parameter(torch.ones(1))

        @property
        def lam(self):
            return self.inner.weight

    own = Own()
    _, kernel = param_groups(own, lr=1.0)
    assert [id(p) for p in kernel["params"]] == [id(own.inner.weight)]
    Own.kernel_parameters = ("misspelt",)
    with refused("misspelt", error=AttributeError):
        param_groups(own, lr=1.0)


def test_norms_biases_and_embeddings_do_not_decay():
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm((4, 4)), nn.Conv1d(4, 4, 3), DLR(4, 6)
    )
    tagged = model[3].weight
    tagged._no_weight_decay = True
    decays = {
        id(p): group["weight_decay"]
        for group in param_groups(model, lr=1e-3, weight_decay=0.1)
        for p in group["params"]
    }
    named = dict(model.named_parameters())
    assert {name for name, p in named.items() if decays[id(p)]} == {"1.weight", "4.out.weight"}
    everything = param_groups(model, lr=1e-3, weight_decay=0.1, decay_all=True)
    assert [group["role"] for group in everything] == ["other", "kernel"]


def make_with_tags(model):
    """An optimizer as the example of the S4 repository makes it, from the tags alone."""
    plain = [p for p in model.parameters() if not hasattr(p, "_optim")]
    optimizer = torch.optim.AdamW(plain, lr=1e-2, weight_decay=0.1)
    tagged = [p for p in model.parameters() if hasattr(p, "_optim")]
    for p in tagged:
        optimizer.add_param_group({"params": [p], **p._optim})
    return optimizer


@pytest.mark.parametrize("how", ["new", "copied", "to_empty", "assigned", "moved"])
def test_kernel_parameters_carry_the_tags_of_mamba_and_s4(how):
    layer = DLR(4, 6)
    if how == "copied":
        layer = copy.deepcopy(layer)
    elif how == "to_empty":
        layer = layer.to("meta").to_empty(device="cpu")
    elif how == "assigned":
        layer.load_state_dict(DLR(4, 6).state_dict(), assign=True)
    elif how == "moved":
        layer = layer.double()
    tagged = {name for name, p in layer.named_parameters() if hasattr(p, "_no_weight_decay")}
    assert tagged == set(layer.kernel_parameters) == layer.no_weight_decay()
    assert layer.W._optim == {"lr": 1e-3, "weight_decay": 0.0}
    with warnings.catch_warnings(action="error"):
        check_optimizer(layer, make_with_tags(layer))


def test_tags_that_were_changed_stay():
    layer = DLR(4, 6)
    layer.W._optim = {"lr": 1e-4}
    assert layer.double().W._optim == {"lr": 1e-4}


def test_an_optimizer_that_spoils_the_kernels_is_warned_of():
    model = nn.Sequential(nn.Linear(3, 4), DLR(4, 6), Attention(4, heads=2))
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match="param_groups") as caught:
        check_optimizer(model, plain)
    assert len(caught) == 1
    for said in ("weight decay of 0.01", "rate 0.01, above 0.001", "kernel_lr"):
        assert said in str(caught[0].message)
    with pytest.warns(UserWarning, match="0.001") as caught:
        check_optimizer(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    assert "decay" not in str(caught[0].message)
    groups = param_groups(model, lr=1e-2, weight_decay=0.1, kernel_lr=1e-3)
    with warnings.catch_warnings(action="error"):
        check_optimizer(model, torch.optim.AdamW(groups))
        check_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        check_optimizer(model[2], torch.optim.AdamW(model[2].parameters(), lr=1e-2))


def test_check_optimizer_refuses_other_arguments(unchecked):
    layer = DLR(4, 6)
    with refused("check_optimizer", "model", "optimizer", "list"):
        check_optimizer(layer, param_groups(layer, lr=1e-3))
