"""Comparisons of kernels with plain PyTorch and with float64."""

import math
import sys
from types import SimpleNamespace

import torch
from support import DEVICE, relative_error
from torch.nn import functional as F

from dlrnn import ops
from dlrnn.ops.convolution import with_skip


def random(*shapes, dtype=torch.float64, grad=False):
    """A random tensor of each shape."""
    return [torch.randn(s, dtype=dtype, device=DEVICE).requires_grad_(grad) for s in shapes]


def gelu_linear(y, weight, bias):
    """The output stage with GELU, in PyTorch."""
    return F.linear(F.gelu(y), weight, bias)


def answers(function, inputs, grad, dtype=None):
    """The function's value at copies of the inputs, in this dtype, and its gradients for `grad`."""
    own = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    y = function(*own)
    return [y.detach(), *torch.autograd.grad(y, own, grad.to(y))]


def assert_same_bits(have, again):
    for one, other in zip(have, again, strict=True):
        assert torch.equal(one, other), "not deterministic"


def assert_twice_the_error(fast, plain, exact):
    """Of plain PyTorch against float64, at most."""
    for have, other, want in zip(fast, plain, exact, strict=True):
        assert relative_error(have, want) <= 2 * relative_error(other, want) + 1e-7


def replayed(function):
    """What a CUDA graph of the function computes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function()
    for each in captured:
        each.detach().fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    return captured


def convolution_inputs(batch, length, channels, right, left, device=DEVICE):
    """u and dy [B, L, H], a right and a left kernel of so many entries; fp32."""
    u, dy = torch.randn(2, batch, length, channels, device=device)
    right = torch.randn(channels, right, device=device)
    return u, dy, right, torch.randn(channels, left, device=device)


def plain_torch():
    """`ops.convolution`'s own functions; float64 never leaves them."""
    module = sys.modules["dlrnn.ops.convolution"]
    return SimpleNamespace(
        forward=lambda u, right, left: module._convolution(u, right, left, None),
        backward=lambda dy, u, right, left: module._backward(dy, u, right, left, True),
    )


class PlainRows:
    """The channel-major layout of ops/cuda/convolution.py: rows with NaN beyond the length."""

    PADDING = math.nan

    @staticmethod
    def supports(u, right, left):
        return False  # so that `plain_torch` is used on a GPU too

    @staticmethod
    def row_stride(length):
        return -(-length // 8) * 8

    @classmethod
    def to_rows(cls, x):
        return F.pad(x.mT, (0, -x.shape[1] % 8), value=cls.PADDING).contiguous()

    @staticmethod
    def from_rows(rows, length, dtype):
        return (
            rows[..., :length]
            .transpose(1, 2)
            .to(dtype)
            .clone(memory_format=torch.contiguous_format)
        )

    @classmethod
    def forward_rows(cls, u, right, left, skip, dtype, keep=False):
        kept = u.new_zeros(cls.spectra_shape(u, right, left) if keep else 0, dtype=dtype)
        u = u.to(dtype)
        y = plain_torch().forward(u, with_skip(right, skip), left)
        return cls.to_rows(y), cls.to_rows(u), kept

    @staticmethod
    def spectra_shape(u, right, left):
        return u.shape[0], u.shape[2], 256, 2

    @classmethod
    def backward_of_rows(cls, dy, rows_u, right, left, skip):
        u = cls.from_rows(rows_u, dy.shape[1], dy.dtype)
        return plain_torch().backward(dy, u, with_skip(right, skip), left)

    @classmethod
    def backward_rows(cls, rows_dy, rows_u, kept, length, right, left, skip, dtype):
        dy, u = (cls.from_rows(rows, length, rows.dtype) for rows in (rows_dy, rows_u))
        rows_dy.fill_(cls.PADDING)
        du, *others = plain_torch().backward(dy, u, with_skip(right, skip), left)
        return du.to(dtype), *others


def results(kernels, u, dy, right, left):
    return [kernels.forward(u, right, left), *kernels.backward(dy, u, right, left)]


def assert_twice_the_error_of_plain_pytorch(kernels, arguments):
    """At most; and the same bits twice."""
    with ops.use_backend("torch"):
        plain = results(plain_torch(), *arguments)
    exact = results(plain_torch(), *(x.double() for x in arguments))
    fast = results(kernels, *arguments)
    assert_twice_the_error(fast, plain, exact)
    assert_same_bits(fast, results(kernels, *arguments))


def assert_16_bit_inputs_are_right(kernels, u, dy, right, left, dtype):
    arguments = u.to(dtype), dy.to(dtype), right, left
    exact = results(plain_torch(), *(x.double() for x in arguments))
    for have, want in zip(results(kernels, *arguments), exact, strict=True):
        allowed = 1e-6 if have.dtype == torch.float32 else torch.finfo(dtype).eps
        assert relative_error(have, want) < allowed
