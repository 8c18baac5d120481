"""The gated DLR: parameters set by hand that sum products, which no linear layer can."""

import torch
from support import DEVICE, assert_close, in_steps

from dlrnn import tasks
from dlrnn.nn import DLR, GatedDLR, load_layers, save_model


def sum_of_products(d_model, keys, values):
    """A float64 layer with `y_c = sum_{j <= t} x_j[keys[c]] x_j[values[c]]`, zero in the rest."""
    layer = GatedDLR(d_model, 1).to(DEVICE).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()  # lambda = exp(0) = 1
        layer.dlr.W[..., 0] = 1  # a kernel of ones
        layer.qkv.bias[:d_model] = 1  # q
        k, v = layer.qkv.weight[d_model : 2 * d_model], layer.qkv.weight[2 * d_model :]
        for channel, (key, value) in enumerate(zip(keys, values, strict=True)):
            k[channel, key] = v[channel, value] = layer.out.weight[channel, channel] = 1
    return layer


def test_it_sums_products_of_two_channels():
    layer, x = sum_of_products(3, [0], [1]), torch.randn(2, 200, 3, device=DEVICE).double()
    expected = (x[..., 0] * x[..., 1]).cumsum(1)
    for y in (layer(x), layer(-x), in_steps(layer, x)[0]):
        assert_close(y[..., 0], expected, 1e-12)
    linear = DLR(3, 8, project=False).to(DEVICE).double()
    assert_close(linear(-x), -linear(x), 1e-12)  # so it cannot give x and -x the same answer


def test_it_solves_systems_that_are_given_row_by_row():
    """Solve's X is `sum_i b_i a_i`, with (a_i, b_i) as the channels of position i."""
    task = tasks.get("solve", length=99)
    batch, N = task.sample(4), task.size
    rows = batch.inputs[:, : N * (N + 1), 0].unflatten(1, (N, N + 1)).double().to(DEVICE)
    layer = sum_of_products(N + 1, [N] * N, range(N))
    assert_close(layer(rows)[:, -1, :N], batch.targets[..., 0], 1e-6)  # a_i and b_i are fp32


def test_its_dlr_can_be_loaded_from_a_file(tmp_path):
    layer = GatedDLR(4, 6, kernel_length=9)
    save_model(layer, tmp_path / "layer.safetensors")
    (name, loaded), *others = load_layers(tmp_path / "layer.safetensors").items()
    assert (name, others) == ("dlr", [])
    assert torch.equal(loaded.kernel(20), layer.dlr.kernel(20))


def test_options_are_told_by_options_and_by_print():
    options = {"d_model": 4, "d_state": 6, "bidirectional": True, "cast": "prod", "real": False}
    options |= {"kernel_length": 9, "dt_min": 1e-2, "dt_max": 0.1, "glu": True, "dropout": 0.25}
    layer = GatedDLR(**options)
    assert layer.options() == options
    assert "d_model=4, glu\n" in repr(layer)
    assert "bidirectional, kernel_length=9, d_state=6, cast='prod'" in repr(layer)
