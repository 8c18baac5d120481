"""`ops.rotate`: its definition; its kernel in the interpreter and on a GPU."""

import sys

import pytest
import torch
from support import DEVICE, assert_agree, assert_close, relative_error, run_interpreted

from dlrnn import ops
from dlrnn.ops import reference

module = sys.modules["dlrnn.ops.rotary"]

INTERPRETED = """
from dlrnn.ops import rotary
from dlrnn.ops.triton import rotary as kernels

torch.manual_seed(0)
for batch, length, heads, d, own, wide in [
    (1, 1, 1, 2, False, 1), (2, 37, 3, 6, False, 1), (3, 5, 4, 32, True, 1),
    (2, 130, 8, 32, False, 3), (1, 3, 5, 2, True, 2), (3, 7, 1, 4096, False, 1),
]:
    x = torch.randn(batch, length, wide * heads, d)[:, :, :heads]  # a part of wider rows
    angles = torch.randn(batch if own else 1, length, d // 2)
    for dtype in (torch.float32, torch.float16):
        assert kernels.supports(x.to(dtype))
        have = kernels.turn(x.to(dtype), angles.cos(), angles.sin())
        want = rotary.turn(x.to(dtype), angles.cos(), angles.sin())
        assert have.dtype == dtype and have.shape == want.shape and have.is_contiguous()
        assert (have - want).abs().max() <= 1e-6 + 2e-3 * (dtype == torch.float16), (batch, dtype)
        strided = x.to(dtype).transpose(2, 3).contiguous().transpose(2, 3)
        assert (kernels.turn(strided, angles.cos(), angles.sin()) == have).all()
x, angles = torch.randn(2, 5, 3, 6).requires_grad_(), torch.randn(2, 5, 3)
dout = torch.randn(x.shape)
gradients = [
    torch.autograd.grad(turn(x, angles.cos(), angles.sin()), x, dout)[0]
    for turn in (rotary._turned, rotary.turn)
]
assert (gradients[0] - gradients[1]).abs().max() < 1e-6
torch.library.opcheck(rotary._turned.library_op, (x, angles.cos(), angles.sin()))
assert not kernels.supports(torch.zeros(1, 1, 1, 3))
assert not kernels.supports(torch.zeros(1, 0, 1, 4))
assert not kernels.supports(torch.zeros(1, 1, 1, 4).double())
print("right")
"""


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def positions_of(*rows):
    return torch.tensor(rows, device=DEVICE)


@pytest.mark.parametrize("far", [0, 2**20])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("heads", "d"), [(1, 2), (3, 6), (4, 32)])
def test_values_and_gradients_equal_the_definition(heads, d, own, far):
    x = random(2, 4, heads, d).requires_grad_()
    positions = positions_of([0, 1, 2, 3], [5, 6, 1000, 9])[: 2 if own else 1] + far
    # a frequency is known to its last bit or two, and a position multiplies what is wrong with it
    tolerance = (8 + int(positions.max())) * 2**-52
    assert_agree(ops.rotate(x, positions), reference.rotate(x, positions), (x,), tolerance)
    assert ops.rotate(x[:, :0], positions[:, :0]).shape == (2, 0, heads, d)


def test_the_dtype_is_kept_and_large_positions_are_exact():
    x, positions = random(1, 3, 2, 8, dtype=torch.float32), positions_of([2**20, 2**24, 2**30])
    have = ops.rotate(x, positions)
    assert have.dtype == torch.float32
    assert_close(have, reference.rotate(x, positions), 2e-7)
    half = ops.rotate(x.bfloat16(), positions)
    assert half.dtype == torch.bfloat16
    assert_close(half, reference.rotate(x.bfloat16(), positions), 2**-8)


def test_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    assert "right" in run_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("shape", [(16, 4096, 8, 32), (3, 1000, 2, 6), (1, 5, 3, 128)])
def test_accuracy_on_a_gpu(shape, own, dtype):
    wide = random(*shape[:2], shape[2] + 1, shape[3]).to(dtype)
    x = wide[:, :, :-1].requires_grad_()
    positions = torch.arange(shape[1], device=DEVICE).expand(shape[0] if own else 1, -1)
    dout = random(*shape).to(dtype)

    def answers(rotate):
        y = rotate(x, positions)
        return y, *torch.autograd.grad(y, x, dout)

    assert module._is_fused(x)
    with ops.use_backend("torch"):
        plain = answers(ops.rotate)
    for have, other, want in zip(
        answers(ops.rotate), plain, answers(reference.rotate), strict=True
    ):
        assert have.dtype == dtype
        assert relative_error(have, want) <= 2 * max(relative_error(other, want), 1e-7)


@pytest.mark.gpu
def test_second_derivatives_and_the_custom_op_on_a_gpu():
    x = random(2, 3, 2, 4, dtype=torch.float32).requires_grad_()
    angles = random(1, 3, 2, dtype=torch.float32)
    torch.library.opcheck(module._turned.library_op, (x, angles.cos(), angles.sin()))

    def twice(turn):
        (dx,) = torch.autograd.grad(
            turn(x, angles.cos(), angles.sin()).sin().sum(), x, create_graph=True
        )
        return torch.autograd.grad(dx.square().sum(), x)[0]

    assert_close(twice(module._turned), twice(module.turn), 1e-5)
