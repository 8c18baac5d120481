"""Linear maps between a few numbers and many channels: encoders and decoders.

    linear(x, weight, bias) = x weight^T + bias

is torch.nn.functional.linear, which runs wherever the fused kernels do not take the tensors.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dlrnn.ops.checks import in_transform
from dlrnn.ops.dispatch import op, uses_fused


def linear(
    x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "*B O"]:
    """PyTorch's linear, faster on a GPU if one side has at most 16 numbers and there is a bias.

    There it stays fp32 under autocast: it reads and writes more than it computes.
    """
    if not uses_fused("thin_linear", x, lambda: _fits(x, weight, bias)) or bias is None:
        return F.linear(x, weight, bias)
    out: Tensor = _linear(x.float().flatten(0, -2), weight, bias)
    return out.view(*x.shape[:-1], -1)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if bias is None or x.dim() < 2 or in_transform():
        return False
    if not all(t.is_cuda and t.dtype == torch.float32 for t in (weight, bias)):
        return False
    half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
    if not x.is_cuda or x.dtype not in (torch.float32, half):
        return False
    from dlrnn.ops.triton import thin_linear as kernels

    return kernels.supports(x, weight)


@op("dlrnn::thin_linear")
def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from dlrnn.ops.triton import thin_linear as kernels

    if weight.shape[0] < weight.shape[1]:
        return kernels.gather(x, weight, bias)
    return kernels.spread(x, weight.t(), bias)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@op("dlrnn::thin_linear_input_gradient")
def _input_gradient(dout: Tensor, weight: Tensor) -> Tensor:
    from dlrnn.ops.triton import thin_linear as kernels

    if weight.shape[0] < weight.shape[1]:
        return kernels.spread(dout, weight, None)
    return kernels.gather(dout, weight.t(), None)


@_input_gradient.register_fake
def _(dout: Tensor, weight: Tensor) -> Tensor:
    return dout.new_empty(dout.shape[0], weight.shape[1])


@op("dlrnn::thin_linear_weight_gradients")
def _weight_gradients(dout: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias."""
    from dlrnn.ops.triton import thin_linear as kernels

    if dout.shape[1] < x.shape[1]:
        product, sums, _ = kernels.outer(dout, x)
    else:
        product, _, sums = kernels.outer(x, dout)
        product = product.t()
    return product.clone(memory_format=torch.contiguous_format), sums.clone()


@_weight_gradients.register_fake
def _(dout: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return dout.new_empty(dout.shape[1], x.shape[1]), dout.new_empty(dout.shape[1])


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wants_x, *wants_weight = ctx.needs_input_grad
    if torch.is_grad_enabled():  # for second derivatives
        return dout @ weight if wants_x else None, dout.t() @ x, dout.sum(0)
    dx = _input_gradient(dout, weight) if wants_x else None
    if not any(wants_weight):
        return dx, None, None
    d_weight, d_bias = _weight_gradients(dout, x)
    return dx, d_weight, d_bias


_linear.register_autograd(_gradients, setup_context=_setup)
