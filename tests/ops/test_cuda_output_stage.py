"""The kernels of the output stage, for Hopper and for all other GPUs, emulated on a CPU."""

import ctypes

import pytest
import torch
from kernels import answers, gelu_linear
from support import relative_error
from torch.nn import functional as F

from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda import output_stage as kernels
from dlrnn.ops.cuda import output_stage_plans as plans

HOPPER, PORTABLE = (9, 0), (8, 0)


@pytest.fixture
def gpu(request, monkeypatch):
    """The compute capability of an emulated GPU."""
    monkeypatch.setattr(nvrtc, "capability", lambda _: request.param)


@pytest.mark.parametrize(
    ("gpu", "batch", "length", "channels", "columns", "activation", "in_rows"),
    [
        (HOPPER, 1, 1, 16, 16, "gelu", True),
        (HOPPER, 2, 129, 48, 48, "gelu", False),
        (HOPPER, 3, 65, 32, 16, "gelu", True),
        (HOPPER, 2, 70, 16, 32, "identity", True),
        (HOPPER, 4, 70, 128, 128, "gelu", True),
        (HOPPER, 5, 65, 80, 32, "gelu", False),
        (HOPPER, 1, 5, 16, 272, "gelu", True),
        (HOPPER, 1, 5, 272, 16, "gelu", False),
        (PORTABLE, 2, 129, 16, 16, "gelu", False),
        (PORTABLE, 5, 70, 32, 80, "identity", True),
        (PORTABLE, 1, 70, 16, 256, "gelu", True),
        (PORTABLE, 1, 5, 256, 32, "gelu", False),
    ],
    indirect=["gpu"],
)
@pytest.mark.usefixtures("emulated", "gpu")
def test_values(batch, length, channels, columns, activation, in_rows):
    torch.manual_seed(0)
    size = 10.0 ** torch.linspace(-4, 4, length)[None, :, None]  # a scale for each position
    y = torch.randn(batch, length, channels) * size
    dout = torch.randn(batch, length, columns) / size
    if length > 1:
        y[0, 0], dout[0, -1] = 1e-30, 0
    weight, bias = torch.randn(columns, channels) / channels, torch.randn(columns)
    plain = gelu_linear if activation == "gelu" else F.linear
    exact = answers(plain, (y, weight, bias), dout, torch.float64)
    if in_rows:  # what lies beyond the length is not read
        rows = torch.full((batch, channels, -(-length // 4) * 4), float("nan"))
        rows[..., :length] = y.transpose(1, 2)
        y = rows
    out = kernels.forward(y, length, weight, bias, activation, in_rows=in_rows)
    dy, d_weight, d_bias = kernels.backward(dout, y, weight, activation, in_rows=in_rows)
    if in_rows:
        dy = dy[..., :length].transpose(1, 2)
    for have, exactly in zip((out, dy, d_weight, d_bias), exact, strict=True):
        assert have.shape == exactly.shape
        assert relative_error(have, exactly) < 4e-7


@pytest.mark.parametrize(
    ("gpu", "half", "batch", "length", "channels", "columns", "activation", "in_rows"),
    [
        *(
            (HOPPER, half, *size)
            for half in (torch.bfloat16, torch.float16)
            for size in [
                (1, 1, 16, 16, "gelu", True),
                (2, 129, 48, 48, "gelu", False),
                (3, 65, 32, 16, "gelu", True),
                (2, 70, 16, 32, "identity", True),
                (9, 70, 128, 128, "gelu", True),
                (5, 65, 80, 32, "gelu", False),
                (2, 77, 144, 272, "gelu", True),
            ]
        ),
        (PORTABLE, torch.bfloat16, 9, 70, 128, 128, "gelu", True),
        (PORTABLE, torch.float16, 3, 65, 48, 80, "gelu", False),
    ],
    indirect=["gpu"],
)
@pytest.mark.usefixtures("emulated", "gpu")
def test_16_bit_values(half, batch, length, channels, columns, activation, in_rows):
    y = torch.randn(batch, length, channels).to(half)
    dout = torch.randn(batch, length, columns).to(half)
    weight, bias = torch.randn(columns, channels) / channels**0.5, torch.randn(columns)

    def plain(dtype):
        each = [x.to(dtype).requires_grad_() for x in (y, weight, bias)]
        out = F.linear(F.gelu(each[0]) if activation == "gelu" else each[0], *each[1:])
        return out, *torch.autograd.grad(out, each, dout.to(dtype))

    rows = y
    if in_rows:  # what lies beyond the length is not read
        rows = torch.full((batch, channels, -(-length // 8) * 8), float("nan"), dtype=half)
        rows[..., :length] = y.transpose(1, 2)
    out = kernels.forward(rows, length, weight, bias, activation, in_rows=in_rows)
    dy, *of_weights = kernels.backward(dout, rows, weight, activation, in_rows=in_rows)
    dy = dy[..., :length].transpose(1, 2) if in_rows else dy
    assert out.dtype == dy.dtype == half
    assert all(x.dtype == torch.float32 for x in of_weights)
    have = out, dy, *of_weights
    for mine, other, want in zip(have, plain(half), plain(torch.float64), strict=True):
        assert relative_error(mine, want) <= 2 * relative_error(other, want)
    assert relative_error(of_weights[1], dout.double().sum((0, 1))) < 1e-6


@pytest.mark.parametrize("gpu", [HOPPER, PORTABLE], indirect=True)
@pytest.mark.usefixtures("emulated", "gpu")
def test_16_bit_nan_reaches_what_depends_on_it():
    y, weight, bias = torch.randn(1, 70, 16), torch.randn(16, 16), torch.randn(16)
    y[0, 3, 5], y[0, 66, 2] = float("nan"), float("inf")
    y = y.bfloat16()
    out = kernels.forward(y, 70, weight, bias, "gelu", in_rows=False)
    assert out.isnan().all(2)[0].nonzero().flatten().tolist() == [3, 66]
    assert out.isnan().any(2).sum() == 2
    y = torch.randn(1, 70, 16).bfloat16()
    y[0, 3, 5] = float("nan")
    dout = torch.randn(1, 70, 32).bfloat16()
    dout[0, 7, 1] = float("nan")
    weight = torch.randn(32, 16)
    dy, d_weight, d_bias = kernels.backward(dout, y, weight, "gelu", in_rows=False)
    assert dy[0, 7].isnan().all()
    assert dy.isnan().nonzero()[:, 1].unique().tolist() == [3, 7]
    assert dy[0, 3].isnan().nonzero().flatten().tolist() == [5]
    assert d_weight[1].isnan().all()
    assert d_weight[:, 5].isnan().all()
    assert d_weight.isnan().sum() == 16 + 32 - 1
    assert d_bias.isnan().nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("gpu", [HOPPER, PORTABLE], indirect=True)
@pytest.mark.usefixtures("emulated", "gpu")
def test_nan_stays_in_its_position():
    y, weight, bias = torch.randn(1, 70, 16), torch.randn(16, 16), torch.randn(16)
    y[0, 3, 5], y[0, 66, 2] = float("nan"), float("inf")
    out = kernels.forward(y, 70, weight, bias, "gelu", in_rows=False)
    assert out.isnan().all(2)[0].nonzero().flatten().tolist() == [3, 66]
    out[0, 7, 1] = float("nan")
    y = torch.randn(1, 70, 16)
    dy, d_weight, d_bias = kernels.backward(out, y, weight, "gelu", in_rows=False)
    assert dy.isnan().all(2)[0].nonzero().flatten().tolist() == [3, 7, 66]
    assert d_weight.isnan().all()
    assert d_bias.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", range(16, 129, 16))
@pytest.mark.parametrize("columns", range(16, 129, 16))
def test_plans_fit_in_shared_memory(channels, columns, dtype):
    for in_rows in (False, True):
        part = plans.Part(channels, columns, channels, columns, in_rows, True, False, dtype)
        for plan_of in (plans.forward_plan, plans.backward_plan):
            plan, portable = plan_of(part, HOPPER), plan_of(part, PORTABLE)
            stages = plan.constants["STAGES"]
            assert plan.bytes <= nvrtc.SHARED_MEMORY[HOPPER]
            assert stages >= 2
            assert stages % plan.teams == plan.constants.get("GRADIENTS", 0) % plan.teams == 0
            assert portable.bytes <= nvrtc.LEAST_SHARED_MEMORY
            assert portable.threads % 32 == 0


def test_parts_that_do_not_add_share_a_launch(monkeypatch):
    names = []

    def load(_, name, *rest):
        names.append(name)
        return nvrtc.Kernel(ctypes.c_void_p(), 0, 0)

    monkeypatch.setattr(nvrtc, "load", load)
    monkeypatch.setattr(nvrtc.Kernel, "__call__", lambda *_: None)
    y, weight = torch.zeros(1, 256, 8), torch.zeros(256, 256)
    out = kernels.forward(y, 8, weight, weight[0], "gelu", in_rows=True)
    kernels.backward(out, y, weight, "gelu", in_rows=True)
    assert names == ["forward"] * 2 + ["backward", "sum_partials"] * 2
