"""Rotary position embedding: pairs of channels are rotated by the position."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlrnn.ops.checks import in_transform
from dlrnn.ops.dispatch import op, uses_fused
from dlrnn.ops.pairs import has_float64

BASE = 10000.0


def rotate(
    x: Float[Tensor, "B L heads d"], positions: Int[Tensor, "#B L"]
) -> Float[Tensor, "B L heads d"]:
    """Rotates channels i and i + d/2 of a head by the angle `position * BASE^(-2 i / d)`.

    The product of two rotated vectors then depends on the difference of their positions alone.
    Angles are float64: in fp32 a position of a million would be off by 0.03.
    """
    half = x.shape[-1] // 2
    device = x.device if has_float64(x.device) else torch.device("cpu")
    exponents = torch.arange(half, dtype=torch.float64, device=device) / half
    angles = positions.to(device)[..., None] * BASE**-exponents  # [B, L, d/2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (each.to(x.device, dtype) for each in (angles.cos(), angles.sin()))
    turned: Tensor = (_turned if _is_fused(x) else turn)(x, cos, sin)
    return turned


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition: `(a cos - b sin, a sin + b cos)` of the two halves a, b of a head."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def _is_fused(x: Tensor) -> bool:
    def supports() -> bool:
        if in_transform():
            return False
        from dlrnn.ops.triton import rotary as kernels

        return kernels.supports(x)

    return uses_fused("rotate", x, supports)


@op("dlrnn::rotate")
def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`turn` by the fused kernel."""
    from dlrnn.ops.triton import rotary as kernels

    return kernels.turn(x, cos, sin)


@_turned.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    del cos, sin
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[1:])


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
    """The inverse rotation; angles have no gradient, because positions are whole numbers."""
    cos, sin = ctx.saved_tensors
    return _turned(dout, cos, -sin), None, None


_turned.register_autograd(_gradient, setup_context=_setup)
