"""`ops.layer_norm`: PyTorch's of a sum; its kernels in the interpreter and on a GPU."""

import sys

import pytest
import torch
from support import DEVICE, assert_agree, assert_close, refused, relative_error, run_interpreted
from torch.nn import functional as F

from dlrnn import ops

module = sys.modules["dlrnn.ops.layer_norm"]

INTERPRETED = """
from torch.nn import functional as F
from dlrnn.ops.triton import layer_norm as kernels

def error(have, want):
    return ((have.double() - want).norm() / want.norm().clamp(min=1e-300)).item()

torch.manual_seed(0)
for rows, channels, adds, step in [
    (1, 1, True, 1), (37, 16, True, 1), (5, 100, False, 1), (300, 128, True, 1),
    (7, 24, False, 3), (7, 24, True, 2),  # of every third number: all tensors have strides
]:
    x, added, dout = (torch.randn(3, rows, step * channels) * 3 + 1)[..., ::step]
    weight, bias = torch.randn(2, step * channels)[:, ::step]
    out, total = kernels.forward(x, added if adds else None, weight, bias, 1e-5)
    d_total, both = kernels.backward(dout, total if adds else x, weight, 1e-5)
    assert (total == (x + added if adds else x)).all()
    exact = [t.double().requires_grad_() for t in (total, weight, bias)]
    want = F.layer_norm(exact[0], (channels,), *exact[1:], 1e-5)
    wanted = torch.autograd.grad(want, exact, dout.double())
    for have, exactly in zip((out, d_total, *both), (want, *wanted)):
        assert have.shape == exactly.shape
        assert channels == 1 or error(have, exactly) < 4e-7, (rows, error(have, exactly))
        assert channels > 1 or (have - exactly).abs().max() < 1e-6
print("right")
"""


def made(*shape, dtype=torch.float64, device="cpu"):
    generator = torch.Generator(device).manual_seed(0)
    shapes = shape, shape, shape[-1:], shape[-1:]
    return [
        torch.randn(s, generator=generator, dtype=dtype, device=device).requires_grad_()
        for s in shapes
    ]


def test_layer_norm_equals_pytorchs_of_the_sum():
    x, added, weight, bias = made(2, 3, 5)
    want = F.layer_norm(x + added, (5,), weight, bias, 1e-3)
    have = ops.layer_norm(x, weight, bias, eps=1e-3, added=added)
    assert_agree(have, want, (x, added, weight, bias), 1e-12)
    want = F.layer_norm(x, (5,), weight, bias)
    assert_agree(ops.layer_norm(x, weight, bias), want, (x, weight, bias), 1e-12)


def test_added_must_have_the_shape_of_x():
    x, added, weight, bias = made(2, 3, 5)
    with refused("added", "[2, 3, 5]"):
        ops.layer_norm(x, weight, bias, added=added[:1])


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    assert "right" in run_interpreted(INTERPRETED)


def test_differentiable_gradients_equal_pytorchs():
    """What second derivatives are made of, against PyTorch's own."""
    x, dout, weight, bias = made(4, 3, 5)
    want = torch.autograd.grad(F.layer_norm(x, (5,), weight, bias), (x, weight, bias), dout)
    d_total, both = module._plain_backward(dout, x, weight, 1e-5)
    for have, exactly in zip((d_total, *both), want, strict=True):
        assert_close(have, exactly, 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("shape", [(16, 4096, 128), (3, 1000, 48), (2, 70, 1000), (5, 256)])
def test_accuracy_on_a_gpu(shape, adds):
    x, added, weight, bias = made(*shape, dtype=torch.float32, device=DEVICE)
    inputs = [x, added, weight, bias] if adds else [x, weight, bias]
    dout = torch.randn_like(x)

    def answers(dtype):
        own = [t.detach().to(dtype).requires_grad_() for t in inputs]
        total = own[0] + own[1] if adds else own[0]
        out = F.layer_norm(total, shape[-1:], *own[-2:])
        return out, *torch.autograd.grad(out, own, dout.to(dtype))

    out = ops.layer_norm(x, weight, bias, added=added if adds else None)
    have = out, *torch.autograd.grad(out, inputs, dout)
    again = ops.layer_norm(x, weight, bias, added=added if adds else None)
    for one, other in zip(have, (again, *torch.autograd.grad(again, inputs, dout)), strict=True):
        assert torch.equal(one, other)
    for mine, plain, exact in zip(
        have, answers(torch.float32), answers(torch.float64), strict=True
    ):
        assert relative_error(mine, exact) < 2 * max(relative_error(plain, exact), 1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "strided",
    [
        lambda wide: wide.transpose(0, 1),
        lambda wide: wide[:1].expand(40, 30, 64),
        lambda wide: wide[..., ::2],
    ],
    ids=["transposed", "expanded", "every other channel"],
)
def test_strides_on_a_gpu(strided):
    x = strided(torch.randn(40, 30, 64, device=DEVICE)).requires_grad_()
    weight, bias = torch.randn(2, 3 * x.shape[-1], device=DEVICE)[:, ::3]
    dout = torch.randn(x.shape[::-1], device=DEVICE).permute(2, 1, 0)
    have, want = ops.layer_norm(x, weight, bias), F.layer_norm(x, weight.shape, weight, bias)
    assert_close(have, want, 1e-6)
    assert_close(*(torch.autograd.grad(y, x, dout)[0] for y in (have, want)), 1e-5)


@pytest.mark.gpu
def test_second_derivatives_and_the_custom_op_on_a_gpu():
    x, added, weight, bias = made(2, 3, 16, dtype=torch.float32, device=DEVICE)
    torch.library.opcheck(module._normed.library_op, (x, added, weight, bias, 1e-5))
    torch.library.opcheck(module._normed.library_op, (x, None, weight, bias, 1e-5))

    def twice(norm, dtype):
        own = [t.detach().to(dtype).requires_grad_() for t in (x, added, weight, bias)]
        (dx,) = torch.autograd.grad(norm(*own).sin().sum(), own[0], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), own)

    have = twice(lambda a, b, w, c: ops.layer_norm(a, w, c, added=b), torch.float32)
    want = twice(lambda a, b, w, c: F.layer_norm(a + b, (16,), w, c), torch.float64)
    for mine, exact in zip(have, want, strict=True):
        assert relative_error(mine, exact) < 1e-5
