"""The output stage is one op with the convolution only where that is the same computation."""

import pytest
import torch
from support import DEVICE, assert_close, in_steps
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from dlrnn import DLR
from dlrnn.nn.layers import is_unmodified


def with_patched_forward():
    module = nn.Linear(4, 4)
    module.forward = lambda x: 2 * nn.Linear.forward(module, x)  # as accelerate's offloading does
    return module


def with_hook():
    module = nn.Linear(4, 4)
    module.register_forward_hook(lambda module, inputs, y: 2 * y)
    return module


def with_pre_hook():
    module = nn.Linear(4, 4)
    module.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    return module


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Weight(torch.Tensor):
    pass


def with_weight_of_another_class():
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Weight))
    return module


CHANGED = {
    "forward": with_patched_forward,
    "hook": with_hook,
    "pre-hook": with_pre_hook,
    "class": lambda: Doubled(4, 4),
    "weight": with_weight_of_another_class,
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_linear_map_is_called(name):
    """It is not taken for PyTorch's, and steps do the same."""
    layer, x = DLR(4, 6), torch.randn(2, 9, 4, device=DEVICE)
    layer.out = CHANGED[name]()
    assert not is_unmodified(layer.out, nn.Linear)
    layer = layer.to(DEVICE)
    assert_close(layer(x), in_steps(layer, x)[0], 1e-4)


def test_hooks_on_all_modules_are_seen():
    assert not is_unmodified(None, nn.Linear)
    assert is_unmodified(nn.Linear(4, 4), nn.Linear)
    handle = register_module_forward_hook(lambda module, inputs, y: None)
    try:
        assert not is_unmodified(nn.Linear(4, 4), nn.Linear)
    finally:
        handle.remove()
    assert is_unmodified(nn.Linear(4, 4), nn.Linear)


def test_hooks_of_the_linear_map_are_called():
    """Whole as in chunks: a hook that looks at `out`, or changes its output, runs."""
    layer, x = DLR(6, 8).to(DEVICE), torch.randn(2, 12, 6, device=DEVICE)
    whole = layer(x)
    seen = []
    hook = layer.out.register_forward_hook(lambda module, inputs, y: seen.append(y.shape) or 2 * y)
    assert_close(layer(x), 2 * whole, 1e-6)
    assert_close(layer(x, return_state=True)[0], 2 * whole, 1e-5)
    assert len(seen) == 2
    hook.remove()
    assert_close(layer(x), whole, 1e-6)
