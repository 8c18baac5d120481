import math

import pytest
import torch
from mixers import convolved
from support import DEVICE, assert_agree, assert_close, in_steps, refused
from torch.nn import functional as F

from dlrnn.nn import SGConv, save_model
from dlrnn.nn.sgconv import upsample
from dlrnn.ops import OnlineState

LENGTH, D_KERNEL = 70, 4  # 6 scales: 128 entries
OPTIONS = [
    {},
    {"decay": 0.5},
    {"length": 100, "d_kernel": 200},
    {"kernel_length": 9},
    {"bidirectional": True},
    {"bidirectional": True, "kernel_length": 20, "glu": True},
    {"project": False},
]


def make(dtype=torch.float64, **options):
    """With a norm that is not that of the kernel any more, as after training."""
    layer = SGConv(3, **{"length": LENGTH, "d_kernel": D_KERNEL, **options}).to(DEVICE, dtype)
    with torch.no_grad():
        layer.sub_kernels.normal_(std=0.3)
    return layer


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def interpolated(values, factor):
    """Entry by entry: the straight line between the two nearest old entries."""
    entries = []
    for j in range(factor * len(values)):
        place = (j + 0.5) / factor - 0.5
        left = math.floor(place)
        ends = [values[min(max(k, 0), len(values) - 1)] for k in (left, left + 1)]
        entries.append(ends[0] * (left + 1 - place) + ends[1] * (place - left))
    return torch.stack(entries)


def kernel_by_definition(layer, length):
    rows = []
    for sub_kernels, norm in zip(layer.sub_kernels.double().cpu(), layer.kernel_norm, strict=True):
        pieces = [sub_kernels[0]]
        for i, sub_kernel in enumerate(sub_kernels[1:], start=1):
            pieces.append(layer.decay**i * interpolated(sub_kernel, 2 ** (i - 1)))
        entries = torch.cat(pieces) / norm.item()
        entries = torch.cat((entries, torch.zeros(length, dtype=torch.float64)))
        rows.append(entries[: min(length, layer.kernel_length or length)])
    return torch.stack(rows)


def by_definition(layer, x):
    return convolved(layer, x, kernel_by_definition(layer, x.shape[1]))


@pytest.mark.parametrize("length", [1, 2, 33, 70])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients_equal_the_definition(options, length):
    layer, x = make(**options), random(2, length, 3).requires_grad_()
    inputs = (x, *layer.parameters())
    assert_agree(layer(x), by_definition(layer, x), inputs, 1e-12, 1e-11)


@pytest.mark.parametrize("factor", [1, 2, 8])
@pytest.mark.parametrize("entries", [1, 2, 7])
def test_upsampling_equals_pytorchs(factor, entries):
    values = random(3, entries).cpu()
    size = factor * entries
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
    kernel = make(length=9, d_kernel=4).kernel(9)  # two scales: 8 entries
    assert (kernel[:, :8] != 0).all()
    assert (kernel[:, 8:] == 0).all()


def test_parameter_count_of_table_2():
    """L = 2^18, H = 32; Shift's encoder takes 3 features to 32, its decoder 32 to 8."""
    layer = SGConv(32, length=2**18)
    have = sum(p.numel() for p in layer.parameters()) + 3 * 32 + 32 + 2 * 32 + 32 * 8 + 8
    assert abs(have - 920_000) < 1000


def test_initialisation_is_the_papers():
    torch.manual_seed(1)
    layer = SGConv(8, length=2**12, d_kernel=256, decay=0.5)
    assert layer.sub_kernels.std().item() == pytest.approx(1 / 256, rel=0.02)
    assert_close(layer.kernel(2**12).norm(dim=-1), torch.ones(8), 1e-6)
    assert layer.kernel_parameters == ("sub_kernels",)


def test_the_norm_is_saved_with_the_weights():
    layer = make()
    assert "kernel_norm" in layer.state_dict()
    assert "kernel_norm" not in dict(layer.named_parameters())
    again = SGConv(**layer.options()).to(DEVICE).double()
    assert not torch.equal(again.kernel(70), layer.kernel(70))
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.kernel(70), layer.kernel(70))


def test_the_norm_is_in_a_file(tmp_path):
    from safetensors.torch import load_file

    layer = make(torch.float32)
    save_model(layer, tmp_path / "layer.safetensors")
    again = SGConv(**layer.options())
    again.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(again.kernel(70), layer.cpu().kernel(70))


def test_the_norm_stays_while_the_kernel_is_trained():
    layer = make()
    kernel = layer.kernel(70)
    with torch.no_grad():
        layer.sub_kernels *= 3
    assert_close(layer.kernel(70), 3 * kernel, 1e-14)


def test_fp32_at_a_long_length():
    layer = SGConv(4, length=2**16, d_kernel=256).to(DEVICE)
    exact = SGConv(**layer.options()).to(DEVICE).double()
    exact.load_state_dict(layer.state_dict())
    x = random(1, 2**16, 4, dtype=torch.float32)
    assert_close(layer(x), exact(x.double()), 1e-5)


def test_an_input_longer_than_the_layer_was_built_for_is_refused():
    layer, x = make(length=20), random(1, 21, 3)
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


def test_a_cut_kernel_reads_inputs_of_any_length():
    layer, x = make(length=20, kernel_length=20), random(1, 50, 3)
    assert_close(layer(x), by_definition(layer, x), 1e-12)
    assert_close(in_steps(layer, x)[0], layer(x), 1e-10)
    assert isinstance(layer.initial_state(2), OnlineState)
