"""The layer with the listing's phases: the same layer where they are right, and wrong far out."""

import pytest
import torch
from support import assert_close, relative_error

from dlrnn.bench.listing import RoundedPhasesDLR
from dlrnn.nn import DLR


@pytest.fixture
def in_pieces(monkeypatch):
    monkeypatch.setattr(RoundedPhasesDLR, "positions", 16)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("options", [{}, {"cast": "prod"}, {"bidirectional": True}], ids=str)
def test_it_is_the_layer_where_phases_are_right(options):
    torch.manual_seed(0)
    layer = DLR(3, 5, **options)
    rounded = RoundedPhasesDLR(3, 5, **options)
    rounded.load_state_dict(layer.state_dict())
    x, dy = torch.randn(2, 2, 50, 3)
    found = [each(x) for each in (rounded, layer)]
    assert_close(*found, 1e-5)
    gradients = [
        torch.autograd.grad(y, list(each.parameters()), dy)
        for y, each in zip(found, (rounded, layer), strict=True)
    ]
    for have, want in zip(*gradients, strict=True):
        assert_close(have, want, 1e-4)


def test_phases_are_wrong_far_out():
    torch.manual_seed(0)
    layer = DLR(1, 8, dt_min=1e-6, dt_max=1e-6)
    rounded = RoundedPhasesDLR(1, 8)
    rounded.load_state_dict(layer.state_dict())
    length = 2**17
    with torch.no_grad():
        exact = layer.double().kernel(length)[:, -100:]
        have = layer.float().kernel(length)[:, -100:]
        wrong = rounded.kernel(length)[:, -100:]
    assert relative_error(have, exact) < 1e-5
    assert relative_error(wrong, exact) > 1e-3
