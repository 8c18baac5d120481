"""The output stage is one op with the convolution only where that is the same computation."""

import pytest
import torch
from support import DEVICE, assert_close
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from dlrnn import DLR
from dlrnn.nn.layers import is_unmodified


def plain():
    return nn.Linear(4, 4)


def with_patched_forward():
    module = plain()
    module.forward = lambda x: 2 * nn.Linear.forward(module, x)  # as accelerate's offloading does
    return module


def with_hook():
    module = plain()
    module.register_forward_hook(lambda module, inputs, y: 2 * y)
    return module


def with_pre_hook():
    module = plain()
    module.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    return module


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Weight(torch.Tensor):
    pass


def with_weight_of_another_class():
    module = plain()
    del module.weight
    module.register_parameter("weight", nn.Parameter(torch.randn(4, 4).as_subclass(Weight)))
    return module


CHANGED = {
    "forward": with_patched_forward,
    "hook": with_hook,
    "pre-hook": with_pre_hook,
    "class": lambda: Doubled(4, 4),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_linear_map_is_not_taken_for_pytorchs(name):
    assert not is_unmodified(CHANGED[name](), nn.Linear)


def test_a_plain_linear_map_is_recognised():
    assert is_unmodified(plain(), nn.Linear)
    assert not is_unmodified(None, nn.Linear)


def test_weights_of_another_tensor_class_are_not_plain():
    assert not is_unmodified(with_weight_of_another_class(), nn.Linear)


def test_a_hook_on_all_modules_is_seen():
    handle = register_module_forward_hook(lambda module, inputs, y: None)
    try:
        assert not is_unmodified(plain(), nn.Linear)
    finally:
        handle.remove()
    assert is_unmodified(plain(), nn.Linear)


@pytest.mark.parametrize("name", CHANGED)
def test_whole_and_steps_agree_with_a_changed_output_map(name):
    layer = DLR(4, 6)
    layer.out = CHANGED[name]()
    layer = layer.to(DEVICE)
    x = torch.randn(2, 9, 4, device=DEVICE)
    state, outputs = None, []
    for x_t in x.unbind(1):
        y_t, state = layer.step(x_t, state)
        outputs.append(y_t)
    assert_close(layer(x), torch.stack(outputs, dim=1), 1e-4)
