import pytest
import torch
from support import refused
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from dlrnn import DLR, param_groups


def test_kernel_parameters_have_no_decay_and_their_own_rate():
    model = nn.Sequential(nn.Linear(3, 4), DLR(4, 6), nn.LayerNorm(4), DLR(4, 6, real=True))
    other, kernel = param_groups(model, lr=1e-3, weight_decay=0.1, kernel_lr=1e-4)
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
    other, kernel = param_groups(layer, lr=1e-3, weight_decay=0.1)
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
