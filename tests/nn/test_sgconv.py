"""What SGConv has beside the contract: scales, a norm that stays, and a longest input."""

import pytest
import torch
from mixers import Form
from support import DEVICE, assert_close, in_steps, refused
from torch.nn import functional as F

from dlrnn.nn import SGConv
from dlrnn.nn.sgconv import upsample


def make(**options):
    return Form(SGConv, {"length": 70, **options}).make()


@pytest.mark.parametrize("factor", [1, 2, 8])
@pytest.mark.parametrize("entries", [1, 2, 7])
def test_upsampling_equals_pytorchs(factor, entries):
    values, size = torch.randn(3, entries, dtype=torch.float64), factor * entries
    expected = F.interpolate(values[None], size=size, mode="linear", align_corners=False)[0]
    assert_close(upsample(values, factor), expected, 1e-14)


@pytest.mark.parametrize(
    ("length", "d_kernel", "scales"),
    [(2**18, 4096, 7), (2**14, 4096, 3), (2**13, 4096, 1), (100, 4096, 1), (1, 1, 1), (70, 4, 6)],
)
def test_the_number_of_scales_covers_the_length(length, d_kernel, scales):
    assert SGConv(1, length=length, d_kernel=d_kernel).scales == scales


def test_zeros_where_the_scales_end_before_the_input():
    """The paper's count of scales can fall short of the length by less than d."""
    kernel = make(length=9).kernel(9)  # two scales: 8 entries
    assert (kernel[:, :8] != 0).all()
    assert (kernel[:, 8:] == 0).all()


def test_the_norm_is_saved_with_the_weights():
    layer, again = make(), make()
    assert "kernel_norm" not in dict(layer.named_parameters())
    assert not torch.equal(again.kernel_norm, layer.kernel_norm)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.kernel(70), layer.kernel(70))


def test_the_norm_stays_while_the_kernel_is_trained():
    layer = make()
    kernel = layer.kernel(70)
    with torch.no_grad():
        layer.sub_kernels *= 3
    assert_close(layer.kernel(70), 3 * kernel, 1e-14)


def test_an_input_longer_than_the_layer_was_built_for_is_refused():
    layer, x = make(length=20), torch.randn(1, 21, 3, dtype=torch.float64, device=DEVICE)
    layer(x[:, :20])
    _, state = layer(x[:, :13], return_state=True)
    layer(x[:, 13:20], state)
    _, full = layer(x[:, :20], return_state=True)
    for call in (
        lambda: layer(x),
        lambda: layer(x, return_state=True),
        lambda: layer(x[:, 13:], state),
        lambda: layer.step(x[:, 20], full),
        lambda: in_steps(layer, x),
        lambda: layer.kernel(21),
    ):
        with refused("SGConv", "length=20", "21"):
            call()
