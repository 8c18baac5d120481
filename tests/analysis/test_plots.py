import pytest
import torch
from support import refused

from dlrnn.analysis import plot_kernel, plot_spectrum
from dlrnn.nn import DLR

LAYERS = [
    {"d_model": 1, "d_state": 1},
    {"d_model": 3, "d_state": 33},
    {"d_model": 5, "d_state": 8, "bidirectional": True},
    {"d_model": 2, "d_state": 6, "real": True},
    {"d_model": 2, "d_state": 6, "cast": "prod", "kernel_length": 12},
]


def saved(figure, path):
    figure.savefig(path, dpi=60)  # any warning is an error
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


@pytest.mark.parametrize("options", LAYERS)
def test_spectrum(options, tmp_path):
    layer = DLR(**options)
    figure = plot_spectrum(layer)
    saved(figure, tmp_path / "spectrum.png")
    circle, memory = figure.axes[:2]
    lam = circle.collections[0].get_offsets()
    assert lam.shape == (layer.d_state, 2)
    drawn = torch.tensor(lam.data).square().sum(1).sqrt().sort().values
    expected = torch.exp(-layer.log_lambda_re.detach().double().square()).sort().values
    torch.testing.assert_close(drawn, expected)
    assert memory.get_yscale() == "log"
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in (circle, memory))


def test_spectrum_of_states_without_decay_without_memory_and_without_weight(tmp_path):
    layer = DLR(2, 4)
    layer.log_lambda_re.data[:2] = torch.tensor([0.0, 32.0])
    layer.W.data[:, 2] = 0
    figure = plot_spectrum(layer)
    saved(figure, tmp_path / "some.png")
    memory = sorted(figure.axes[1].collections[0].get_offsets().data[:, 1].tolist())
    assert (memory[0], memory[-1]) == pytest.approx((0.01, 1e9))
    assert all(1 < value < 1e5 for value in memory[1:-1])
    torch.nn.init.zeros_(layer.W)
    saved(plot_spectrum(layer), tmp_path / "none.png")


@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("length", [1, 50])
def test_kernel(options, length, tmp_path):
    layer = DLR(**options)
    figure = plot_kernel(layer, length)
    saved(figure, tmp_path / "kernel.png")
    image = next(axes for axes in figure.axes if axes.images).images[0]
    kernel = layer.kernel(length).detach().double()
    if layer.bidirectional:
        right, left = kernel.chunk(2)
        kernel = torch.cat((left.flip(1), right), dim=1)
        assert image.get_extent()[:2] == [-length - 0.5, length - 0.5]
    torch.testing.assert_close(torch.tensor(image.get_array().data), kernel)
    first = torch.tensor(figure.axes[0].lines[-1].get_ydata())
    torch.testing.assert_close(first, kernel[0])


def test_kernel_of_zeros_and_of_length_zero(tmp_path):
    layer = DLR(2, 3)
    torch.nn.init.zeros_(layer.W)
    saved(plot_kernel(layer, 9), tmp_path / "zeros.png")
    with refused("length", "at least 1", "0"):
        plot_kernel(layer, 0)
