"""Names and shapes of parameters, their initialisation, and the options that a layer shows."""

import math

import pytest
import torch
from mixers import SMALL
from support import DEVICE, assert_close

from dlrnn import nn as layers
from dlrnn.nn import param_groups

PROJECTED = {"D": (4,), "out.weight": (4, 4), "out.bias": (4,)}
DLR_SHAPES = {"log_lambda_re": (6,), "log_lambda_im": (6,), "W": (4, 6, 2), "D": (4,)}
SHARED = {"log_decay": (6,), "frequency": (6,), "log_dt": (4,)}
OWN = {"log_decay": (4, 3), "frequency": (4, 3), "log_dt": (4,)}
LEGS = {"log_decay": (3,), "frequency": (3,), "log_dt": (4,), "P": (3, 2), "B": (3, 2)}


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (layers.DLR(4, 6), DLR_SHAPES | PROJECTED),
        (layers.DLR(4, 6, project=False), DLR_SHAPES),
        (layers.DLR(4, 6, bidirectional=True), DLR_SHAPES | PROJECTED | {"W": (8, 6, 2)}),
        (
            layers.DLR(4, 6, real=True, glu=True),
            {"log_lambda_re": (6,), "W": (4, 6, 1), "D": (4,)}
            | {"out.weight": (8, 4), "out.bias": (8,)},
        ),
        (
            layers.GatedDLR(4, 6, bidirectional=True, glu=True),
            {f"dlr.{name}": shape for name, shape in (DLR_SHAPES | {"W": (8, 6, 2)}).items()}
            | {"qkv.weight": (12, 4), "qkv.bias": (12,), "out.weight": (8, 4), "out.bias": (8,)},
        ),
        (layers.DSS(4, 6), SHARED | PROJECTED | {"W": (4, 6, 2)}),
        (layers.DSS(4, 6, bidirectional=True), SHARED | PROJECTED | {"W": (8, 6, 2)}),
        (layers.S4D(4, 6), OWN | PROJECTED | {"W": (4, 3, 2)}),
        (layers.S4D(4, 6, bidirectional=True), OWN | PROJECTED | {"W": (8, 3, 2)}),
        (layers.S4(4, 6), LEGS | PROJECTED | {"C": (4, 3, 2)}),
        (layers.S4(4, 6, bidirectional=True), LEGS | PROJECTED | {"C": (8, 3, 2)}),
        (
            layers.SGConv(4, length=70, d_kernel=4),
            {"sub_kernels": (4, 6, 4), "kernel_norm": (4,)} | PROJECTED,
        ),
        (
            layers.TapeDLR(4, 10, heads=2, d_head=6, kernels=3, bidirectional=True),
            {"c": (4, 3, 6, 2), "value.weight": (12, 4), "value.bias": (12,), "z.weight": (4, 4)}
            | {"out.weight": (4, 12), "out.bias": (4,)},
        ),
        (
            layers.TapeDLR(
                4, 9, heads=3, d_head=1, kernels=1, factors=2, clock="own", gate=True, hold=2
            ),
            {"c": (3, 1, 5, 2), "value.weight": (3, 4), "value.bias": (3,), "z.weight": (12, 4)}
            | {"delta.weight": (3, 4), "delta.bias": (3,), "beta.weight": (3, 4), "beta.bias": (3,)}
            | {"held.weight": (4, 8), "held.bias": (4,), "out.weight": (4, 3), "out.bias": (4,)},
        ),
        (
            layers.Attention(4, heads=2),
            {"temperature": (1,), "qkv.weight": (12, 4), "qkv.bias": (12,)}
            | {"merge.weight": (4, 4), "merge.bias": (4,), "out.weight": (4, 4), "out.bias": (4,)},
        ),
    ],
    ids=repr,
)
def test_names_and_shapes_in_the_state_dict(layer, shapes):
    assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == shapes


KERNEL_PARAMETERS = {
    "dlr": {"log_lambda_re", "log_lambda_im", "W"},
    "gated-dlr": {"dlr.log_lambda_re", "dlr.log_lambda_im", "dlr.W"},
    "dss": {"log_decay", "frequency", "log_dt", "W"},
    "s4d": {"log_decay", "frequency", "log_dt", "W"},
    "s4": {"log_decay", "frequency", "log_dt", "P", "B", "C"},
    "sgconv": {"sub_kernels"},
    "tape": {"c"},
}


@pytest.mark.parametrize("name", SMALL)
def test_kernel_parameters_get_no_weight_decay(name):
    layer = SMALL[name]()
    groups = param_groups(layer, lr=1e-3, weight_decay=0.1, decay_all=True)
    names = {parameter: name for name, parameter in layer.named_parameters()}
    decays = {names[p]: group["weight_decay"] for group in groups for p in group["params"]}
    kernel = KERNEL_PARAMETERS.get(name, set())
    assert decays == {own: 0.0 if own in kernel else 0.1 for own in names.values()}


# ---------------------------------------------------------------------------------- options


PROJECTION = {"glu": True, "activation": "silu", "dropout": 0.25, "project": True}
CONVOLUTION = {"d_model": 4, "bidirectional": True, "kernel_length": 9, **PROJECTION}
STATES = {"d_state": 6, "dt_min": 1e-2, "dt_max": 0.1, **CONVOLUTION}
ATTENTION = {"d_model": 8, "heads": 2, "bidirectional": True, "glu": True, "dropout": 0.1}


@pytest.mark.parametrize(
    ("kind", "options", "shown"),
    [
        (layers.DLR, {**STATES, "cast": "prod", "real": False}, ", d_state=6, cast='prod'"),
        (layers.DSS, {**STATES, "frequency_step": 6.0}, ", d_state=6"),
        (layers.S4, STATES, ", d_state=6"),
        (layers.S4D, STATES, ", d_state=6"),
        (
            layers.SGConv,
            {**CONVOLUTION, "length": 50, "d_kernel": 4, "decay": 0.5},
            ", length=50, d_kernel=4, scales=5",
        ),
        (
            layers.TapeDLR,
            {**ATTENTION, "length": 9, "d_head": 6, "kernels": 3, "lag_heads": 0, "factors": 2}
            | {"clock": "shared", "gate": True, "hold": 1, "activation": "silu"},
            ", length=9, d_head=6, lag_heads=0",
        ),
        (layers.Attention, ATTENTION, ""),
        (layers.AttentionFF, {**ATTENTION, "d_ff": 3}, ""),
        (layers.LocalAttention, {**ATTENTION, "chunk": 3}, ", chunk=3"),
    ],
)
def test_options_are_told_by_options_and_by_print(kind, options, shown):
    layer = kind(**options)
    assert layer.options() == options
    first = "d_model=8, heads=2" if "heads" in options else "d_model=4"
    limit = ", kernel_length=9" if "kernel_length" in options else ""
    assert f"{first}, bidirectional, glu{limit}{shown}" in repr(layer)


# ---------------------------------------------------------------------------------- initialisation


def assert_log_uniform(values, low, high, middle=0.2):
    values = values.detach().double()
    assert values.min() >= low * (1 - 1e-5)
    assert values.max() <= high * (1 + 1e-5)
    expected = (math.log(low) + math.log(high)) / 2
    assert values.log().mean().item() == pytest.approx(expected, abs=middle)


def test_initialisation_of_dlr_is_the_papers():
    layer = layers.DLR(64, 4096, dt_min=1e-3, dt_max=0.1)
    assert_log_uniform(2 * layer.log_lambda_re.double() ** 2, 1e-3, 0.1, middle=0.1)  # e^r
    spaced = 2 * math.pi * torch.arange(4096) / 4096
    torch.testing.assert_close(layer.log_lambda_im.detach(), spaced)
    assert layer.W.std().item() == pytest.approx(1 / 4096, rel=0.02)
    assert layers.DLR(4096, 4).D.std().item() == pytest.approx(1, rel=0.1)
    equal = layers.DLR(4, 64, dt_min=1e-5, dt_max=1e-5).log_lambda_re
    torch.testing.assert_close(equal.detach(), torch.full((64,), math.sqrt(1e-5 / 2)))


def test_float64_phases_are_float64():
    layer = layers.DLR(2, 6).double()
    layer.reset_parameters()
    expected = 2 * math.pi * torch.arange(6, dtype=torch.float64) / 6
    assert torch.equal(layer.log_lambda_im.detach(), expected)


def test_initialisation_of_dss():
    layer = layers.DSS(512, 64, dt_min=1e-3, dt_max=0.1)
    assert torch.equal(layer.log_decay, torch.full((64,), math.log(0.5)))
    n = torch.arange(64).double()
    torch.testing.assert_close(layer.frequency.detach(), (math.pi * n).float())
    papers = layers.DSS(2, 64, frequency_step=2 * math.pi).frequency.detach()
    torch.testing.assert_close(papers, (2 * math.pi * n).float())
    assert_log_uniform(layer.log_dt.double().exp(), 1e-3, 0.1)
    assert layer.W.std().item() == pytest.approx(1, rel=0.02)


def test_initialisation_of_s4d_is_the_inverse_law():
    layer = layers.S4D(512)
    expected = [64 / math.pi * (64 / (2 * n + 1) - 1) for n in range(32)]
    torch.testing.assert_close(layer.frequency.detach(), torch.tensor(expected).expand(512, 32))
    assert torch.equal(layer.log_decay, torch.full((512, 32), math.log(0.5)))
    assert_log_uniform(layer.log_dt.double().exp(), 1e-3, 0.1)
    assert layer.W.square().sum(-1).mean().item() == pytest.approx(1, rel=0.03)


def test_initialisation_of_s4():
    layer = layers.S4(512)
    assert_log_uniform(layer.log_dt.double().exp(), 1e-3, 0.1)
    assert layer.C.square().sum(-1).mean().item() == pytest.approx(1, rel=0.05)
    torch.testing.assert_close(layer.log_decay.detach(), torch.full((32,), math.log(0.5)))
    assert (layer.frequency > 0).all()
    assert layer.P[:, 0].min() > 0.1


def test_initialisation_of_sgconv_is_the_papers():
    layer = layers.SGConv(8, length=2**12, d_kernel=256, decay=0.5).to(DEVICE)
    assert layer.sub_kernels.std().item() == pytest.approx(1 / 256, rel=0.02)
    assert_close(layer.kernel(2**12).norm(dim=-1), torch.ones(8), 1e-6)


@pytest.mark.parametrize("length", [1, 2, 15, 16])
def test_initialisation_of_a_tape_is_low_pass_filters(length):
    """The widest kernel is 1 at place 0 and 0 at the others; the narrowest has two harmonics."""
    layer = layers.TapeDLR(4, length, d_head=6, kernels=3)
    n, places = torch.arange(length // 2 + 1), 2 * math.pi * torch.arange(length)[:, None] / length
    K = (layer.c[0, -1, :, 0] * (places * n).cos()).sum(-1)
    assert_close(K, torch.eye(length)[0], 1e-6)
    assert (layer.c[:, 0, 3:] == 0).all()
    assert (layer.c[:, :, 0] == layer.c[0, 0, 0]).all()  # the same mean


def test_initialisation_of_attention():
    assert layers.Attention(128).temperature.item() == pytest.approx(32**-0.5)
    assert layers.AttentionFF(128).d_ff == 2048
