"""`ops.linear`: PyTorch's; its kernels in the interpreter and on a GPU."""

import sys

import pytest
import torch
from support import DEVICE, assert_close, relative_error, run_interpreted
from torch.nn import functional as F

from dlrnn import ops
from dlrnn.ops import dispatch

module = sys.modules["dlrnn.ops.thin_linear"]

INTERPRETED = """
from dlrnn.ops.triton import thin_linear as kernels

def error(have, want):
    return ((have.double() - want).norm() / want.norm()).item()

torch.manual_seed(0)
for rows, count, channels in [(1, 1, 32), (37, 3, 128), (100, 16, 48), (70, 8, 500)]:
    thin, wide = torch.randn(rows, count), torch.randn(rows, channels)
    for matrix in (torch.randn(count, channels), torch.randn(channels, count).t()):
        for bias in (torch.randn(channels), torch.randn(2 * channels)[::2], None):
            have = kernels.spread(thin, matrix, bias)
            want = thin.double() @ matrix.double() + (0 if bias is None else bias)
            assert error(have, want) < 4e-7
        for bias in (torch.randn(count), torch.randn(2 * count)[::2], None):
            have = kernels.gather(wide, matrix, bias)
            want = wide.double() @ matrix.double().t() + (0 if bias is None else bias)
            assert error(have, want) < 4e-7
    product, thin_sum, wide_sum = kernels.outer(thin, wide)
    assert error(product, thin.double().t() @ wide.double()) < 4e-7
    assert error(thin_sum, thin.double().sum(0)) < 4e-7
    assert error(wide_sum, wide.double().sum(0)) < 4e-7
print("right")
"""


def test_linear_equals_pytorchs():
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    assert_close(ops.linear(x, weight, bias), F.linear(x, weight, bias), 1e-7)
    assert_close(ops.linear(x, weight), F.linear(x, weight), 1e-7)


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    assert "right" in run_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "columns"),
    [((16, 4096, 3), 128), ((16, 4096, 128), 8), ((7, 128), 1), ((3, 1000, 16), 48), ((9, 1), 500)],
)
def test_accuracy_on_a_gpu(shape, columns):
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = shape, (columns, shape[-1]), (columns,)
    inputs = [torch.randn(s, generator=generator, device=DEVICE).requires_grad_() for s in shapes]
    with dispatch.recorded() as choices:
        ops.linear(*inputs)
    assert [choice.backend for choice in choices] == ["fused"]
    dout = torch.randn(*shape[:-1], columns, device=DEVICE)

    def answers(linear, dtype):
        own = [t.detach().to(dtype).requires_grad_() for t in inputs]
        out = linear(*own)
        return out, *torch.autograd.grad(out, own, dout.to(dtype))

    have = answers(ops.linear, torch.float32)
    for one, other in zip(have, answers(ops.linear, torch.float32), strict=True):
        assert torch.equal(one, other)
    exact, plain = answers(F.linear, torch.float64), answers(F.linear, torch.float32)
    for mine, theirs, right in zip(have, plain, exact, strict=True):
        assert mine.is_contiguous()
        assert relative_error(mine, right) < 2 * max(relative_error(theirs, right), 1e-7)


@pytest.mark.gpu
def test_second_derivatives_and_the_custom_op_on_a_gpu():
    x = torch.randn(6, 3, device=DEVICE, requires_grad=True)
    weight = torch.randn(32, 3, device=DEVICE, requires_grad=True)
    bias = torch.randn(32, device=DEVICE, requires_grad=True)
    torch.library.opcheck(module._linear.library_op, (x, weight, bias))

    def twice(linear, dtype):
        own = [t.detach().to(dtype).requires_grad_() for t in (x, weight, bias)]
        (dx,) = torch.autograd.grad(linear(*own).sin().sum(), own[0], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), own)

    for mine, right in zip(
        twice(ops.linear, torch.float32), twice(F.linear, torch.float64), strict=True
    ):
        assert relative_error(mine, right) < 1e-5
