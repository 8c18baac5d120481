"""LayerNorm of a sum: `(x + added - mean) / sqrt(variance + eps) * weight + bias`.

This composition defines the op, and it runs wherever the fused kernels do not take the tensors.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dlrnn.ops.checks import in_transform, require
from dlrnn.ops.dispatch import op, uses_fused


def layer_norm(
    x: Float[Tensor, "*B H"],
    weight: Float[Tensor, " H"],
    bias: Float[Tensor, " H"],
    *,
    eps: float = 1e-5,
    added: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "*B H"]:
    """LayerNorm of x, or of `x + added`, over the last dimension."""
    require(
        added is None or added.shape == x.shape,
        f"added must have the shape of x, {list(x.shape)}, not {[*getattr(added, 'shape', ())]}",
    )
    if x.is_cuda and torch.is_autocast_enabled("cuda"):  # in fp32, as PyTorch's is there
        x, added = x.float(), None if added is None else added.float()
    if not _is_fused(x, added, weight, bias):
        total = x if added is None else x + added
        return F.layer_norm(total, weight.shape, weight, bias, eps)
    out: Tensor = _normed(x, added, weight, bias, eps)[0]
    return out


def _is_fused(*tensors: Tensor | None) -> bool:
    given = [t for t in tensors if t is not None]

    def supports() -> bool:
        if in_transform() or not all(t.is_cuda and t.dtype == torch.float32 for t in given):
            return False
        from dlrnn.ops.triton import layer_norm as kernels

        return kernels.supports(given[0])

    return uses_fused("layer_norm", given[0], supports)


@op("dlrnn::layer_norm")
def _normed(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm, and the sum, which backward needs (empty if nothing is added)."""
    from dlrnn.ops.triton import layer_norm as kernels

    out, total = kernels.forward(x, added, weight, bias, eps)
    return out, x.new_empty(0) if added is None else total


@_normed.register_fake
def _(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if added is None else x.shape)


@op("dlrnn::layer_norm_backward")
def _normed_backward(
    dout: Tensor, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradients of the sum, and of weight and bias, [2, H]."""
    from dlrnn.ops.triton import layer_norm as kernels

    return kernels.backward(dout, total, weight, eps)


@_normed_backward.register_fake
def _(dout: Tensor, total: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(2, *weight.shape)


def _plain_backward(
    dout: Tensor, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The same gradients in PyTorch, which can be differentiated again."""
    centred = total - total.mean(-1, keepdim=True)
    inverse = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed, d = centred * inverse, dout * weight
    slope = (d * normed).mean(-1, keepdim=True)
    d_total = (d - d.mean(-1, keepdim=True) - normed * slope) * inverse
    both = torch.stack((dout * normed, dout)).reshape(2, -1, weight.shape[0]).sum(1)
    return d_total, both


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, added, weight, _, ctx.eps = inputs
    ctx.adds = added is not None
    ctx.save_for_backward(output[1] if ctx.adds else x, weight)
    ctx.set_materialize_grads(False)
    if not ctx.adds:
        ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dout: Tensor | None, d_sum: Tensor | None) -> tuple[Any, ...]:
    """`d_sum` comes from second derivatives only."""
    total, weight = ctx.saved_tensors
    d_total, d_weight, d_bias = d_sum, None, None
    if dout is not None:
        way = _plain_backward if torch.is_grad_enabled() else _normed_backward
        d_total, (d_weight, d_bias) = way(dout, total, weight, ctx.eps)
        d_total = d_total if d_sum is None else d_total + d_sum
    return d_total, d_total if ctx.adds else None, d_weight, d_bias, None


_normed.register_autograd(_gradients, setup_context=_setup)
