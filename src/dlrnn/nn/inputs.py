"""What every mixer asks of its input, in sentences."""

import torch
from torch import Tensor

from dlrnn.ops.checks import may_read, require, require_device, require_dtype, require_shape


def check_input(x: Tensor, shape: tuple[int | str, ...], parameter: Tensor) -> None:
    """X has the shape, and the device and dtype of the parameter (half precision in autocast)."""
    require_dtype("the parameters of a layer", parameter)
    require_shape("x", x, shape)
    require_device("x", x, parameter.device)
    if x.dtype not in (torch.bfloat16, torch.float16) or parameter.dtype == torch.float64:
        require_dtype("x", x, (parameter.dtype,))
    elif not torch.is_autocast_enabled(x.device.type):
        half = str(x.dtype).removeprefix("torch.")
        raise ValueError(f"x is {half}: convert it to the layer's dtype or use torch.autocast")
    if x.dim() == 3 and x.shape[1] == 0:
        raise ValueError("x has length 0: give it at least one position")


def checked_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    """As int64. On a GPU values are not read back: what is out of range is clamped."""
    require_shape("lengths", lengths, (x.shape[0],))
    whole = not (lengths.is_floating_point() or lengths.is_complex())
    name = str(lengths.dtype).removeprefix("torch.")
    require(whole and lengths.dtype != torch.bool, f"lengths must be whole numbers, not {name}")
    require_device("lengths", lengths, x.device)
    lengths = lengths.long()
    if may_read(lengths):
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > x.shape[1]:
            raise ValueError(
                f"lengths must lie between 0 and {x.shape[1]}, the length of x, and not"
                f" between {low} and {high}"
            )
    return lengths.clamp(0, x.shape[1])


def beyond(x: Tensor, lengths: Tensor) -> Tensor:
    """[B, L, 1], true where a position lies beyond its sequence."""
    return (torch.arange(x.shape[1], device=x.device) >= lengths[:, None])[..., None]
