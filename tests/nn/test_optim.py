import jaxtyping
import pytest
import torch
from torch import nn

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


def test_shared_and_frozen_and_none():
    layer = DLR(4, 6)
    layer.D.requires_grad_(False)
    groups = param_groups(nn.Sequential(layer, layer), lr=1e-3)
    listed = [id(p) for group in groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == 5
    assert id(layer.D) not in listed
    assert groups[1]["lr"] == 1e-3
    assert [g["role"] for g in param_groups(nn.Linear(2, 2), lr=1.0)] == ["other"]


def test_parameters_are_no_model(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"^param_groups takes a model, not a generator"):
        param_groups(DLR(4, 6).parameters(), lr=1e-3)
