"""Snapshots: the layers of a model as numbers that JSON can hold."""

import json
import math

import pytest
import torch
from support import DEVICE, refused

from dlrnn.analysis.snapshot import snapshot
from dlrnn.models import ModelConfig, build_model


def model_of(mixer, layers=1, channels=8, **options):
    made = build_model(ModelConfig(mixer, options, channels, layers), d_input=1, d_output=1)
    return made.to(DEVICE)


@pytest.mark.parametrize(
    ("mixer", "options", "eigenvalues"),
    [
        ("dlr", {"d_state": 16}, 16),
        ("dlr", {"d_state": 16, "real": True}, 16),
        ("dlr", {"d_state": 16, "cast": "prod"}, 16),
        ("dlr", {"d_state": 16, "bidirectional": True}, 16),
        ("dss", {"d_state": 16}, 8 * 16),
        ("s4d", {"d_state": 16}, 8 * 8),
    ],
)
def test_every_kind_of_layer(mixer, options, eigenvalues):
    model = model_of(mixer, **options)
    taken = snapshot(model, 7, 100)
    assert taken == json.loads(json.dumps(taken, allow_nan=False))
    (layer,) = taken["layers"]
    assert (taken["step"], layer["name"]) == (7, "blocks.0.mixer")
    assert layer["eigenvalues_of"] == len(layer["eigenvalues"]) == eigenvalues
    assert all(size <= 0 and abs(phase) < math.pi + 1e-3 for size, phase in layer["eigenvalues"])
    assert [kernel["channel"] for kernel in layer["kernels"]] == [0, 2, 5, 7]
    truth = model.blocks[0].mixer.kernel(100)
    for kernel in layer["kernels"]:
        expected = truth[kernel["channel"]].double().cpu()
        assert torch.tensor(kernel["values"]).sub(expected).norm() <= 1e-3 * expected.norm()
    assert (layer["stride"], len(layer["response"])) == (1, 100)


def test_the_response_is_that_of_the_layer():
    """A unit impulse through the layer itself, without its activation and linear map."""
    model = model_of("dlr", d_state=16, project=False)
    mixer = model.blocks[0].mixer
    impulse = torch.zeros(1, 50, 8, device=DEVICE)
    impulse[0, 0] = 1
    truth = mixer(impulse)[0].square().mean(1).sqrt().double().cpu()
    response = torch.tensor(snapshot(model, 0, 50)["layers"][0]["response"], dtype=torch.float64)
    assert torch.allclose(response, truth, rtol=1e-3, atol=1e-6)


def test_a_long_kernel_keeps_its_peaks():
    model = model_of("dlr", d_state=1000)
    (layer,) = snapshot(model, 0, 5000)["layers"]
    assert (len(layer["eigenvalues"]), layer["eigenvalues_of"]) == (256, 1000)
    assert (layer["stride"], layer["kernel_length"]) == (10, 5000)
    truth = model.blocks[0].mixer.kernel(5000)[0].double().cpu()
    shown = torch.tensor(layer["kernels"][0]["values"], dtype=torch.float64)
    assert len(shown) == 500
    peaks = truth.view(500, 10).abs().amax(1)
    assert torch.allclose(shown.abs(), peaks, rtol=1e-3, atol=1e-9)


def test_a_snapshot_names_its_layers():
    model = model_of("dlr", layers=2, d_state=4)
    taken = snapshot(model, 10, 32)
    assert (taken["step"], taken["length"]) == (10, 32)
    assert [each["name"] for each in taken["layers"]] == ["blocks.0.mixer", "blocks.1.mixer"]
    assert snapshot(model_of("attention", heads=2), 0, 32)["layers"] == []
    with refused("length", "at least 1"):
        snapshot(model, 0, 0)
