"""Rotary position embedding: pairs of channels turn with the position."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

BASE = 10000.0


def rotate(
    x: Float[Tensor, "B L heads d"], positions: Int[Tensor, "#B L"]
) -> Float[Tensor, "B L heads d"]:
    """Turn channels i and i + d/2 of a head by the angle `position * BASE^(-2 i / d)`.

    The product of two rotated vectors then depends on the difference of their positions alone.
    Angles are float64: in fp32 a position of a million would be off by 0.03.
    """
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float64, device=x.device) / half
    angles = positions[..., None, None] * BASE**-exponents  # [B, L, 1, d/2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
