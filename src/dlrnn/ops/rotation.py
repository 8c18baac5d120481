"""Pairs of channels that turn: the two halves of a head are the two coordinates.

    (a, b) -> (a cos - b sin, a sin + b cos)

That is the meaning, in fp32 at least, and what runs wherever our own kernel does not take the
tensors. Backward turns back.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlrnn.ops.backends import backend_for


def rotate(
    x: Float[Tensor, "B L heads d"],
    cos: Float[Tensor, "#B L half"],
    sin: Float[Tensor, "#B L half"],
) -> Float[Tensor, "B L heads d"]:
    """Turn channels i and i + d/2 of every head by the angle of position and i."""
    if _is_fused(x, cos, sin):
        result: Tensor = _rotated(x, cos, sin, False)
        return result
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def _is_fused(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """A compiler fuses by itself what is here."""
    if not x.is_cuda or not x.numel() or torch.compiler.is_compiling():
        return False
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    if x.dtype not in kinds or not cos.dtype == sin.dtype == torch.float32:
        return False
    return backend_for("rotate")[0] == "fused"


@torch.library.custom_op("dlrnn::rotate", mutates_args=())
def _rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    from dlrnn.ops.triton import rotation as kernels

    return kernels.rotate(x, cos, sin, back=back)


@_rotated.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _rotated(grad, *ctx.saved_tensors, not ctx.back), None, None, None


_rotated.register_autograd(_gradient, setup_context=_setup)
