"""Checks of arguments: a ValueError says what was expected and what was given."""

import math
from numbers import Real

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

REAL = (torch.float32, torch.float64)
HALF = (torch.bfloat16, torch.float16)
FLOATING = (*REAL, *HALF)


class NotFiniteError(ValueError):
    """A NaN or an infinity where there must be none."""


def require(condition: bool, sentence: str) -> None:
    """Raise ValueError with `sentence` unless `condition` holds.

    Not for sentences that name a tensor's sizes: writing one down fixes it in a compiled graph.
    """
    if not condition:
        raise ValueError(sentence)


def require_tensor(name: str, value: object) -> None:
    """The value is a torch tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch tensor, not a {type(value).__name__}")


def require_count(name: str, value: object) -> None:
    """The value is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def require_probability(name: str, value: object) -> None:
    """The value is a probability below 1."""
    if not (isinstance(value, Real) and 0 <= float(value) < 1):
        raise ValueError(f"{name} must be at least 0 and below 1, not {value!r}")


def require_positive(name: str, value: object, most: float = math.inf) -> None:
    """The value is a finite number above 0 and at most `most`."""
    number = float(value) if isinstance(value, Real) else math.nan
    fits = 0 < number <= most and number < math.inf
    bound = "finite" if most == math.inf else f"at most {most:g}"
    require(fits, f"{name} must be above 0 and {bound}, not {value!r}")


def require_steps(dt_min: object, dt_max: object) -> None:
    """`dt_min` and `dt_max` are bounds of a log-uniform distribution."""
    low = float(dt_min) if isinstance(dt_min, Real) else math.nan
    high = float(dt_max) if isinstance(dt_max, Real) else math.nan
    if not 0 < low <= high < math.inf:
        raise ValueError(
            f"dt_min and dt_max must satisfy 0 < dt_min <= dt_max; got {dt_min!r} and {dt_max!r}"
        )


def require_flags(**flags: object) -> None:
    """Each is True or False. Python would take any string for True, also "no"."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r}")


def in_transform() -> bool:
    """Whether this is forward-mode AD, or torch.func's jvp, vmap, grad and the like.

    A compiler cannot ask for torch.func.
    """
    if forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None


def require_no_transform() -> None:
    """Refuse transforms, which do not see into our ops: a jvp would silently be 0."""
    ask = torch._C._functorch.maybe_current_level
    if forward_ad._current_level >= 0 or not (torch.compiler.is_compiling() or ask() is None):
        raise ValueError(
            "dlrnn does not support torch.func's jvp, vmap, grad or jacobians, nor forward-mode AD:"
            " use torch.autograd's backward"
        )


def needs_autocast(x: object) -> bool:
    """Whether x is in 16 bits and autocast is off; under it layers compute with fp32 parameters."""
    if not isinstance(x, Tensor) or x.dtype not in HALF:
        return False
    return not torch.is_autocast_enabled(x.device.type)


def may_read(tensor: Tensor) -> bool:
    """Whether the tensor has values that can be read without waiting: eager mode on a CPU."""
    if not tensor.is_cpu or torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
        return False
    if forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None:
        return False  # `in_transform`, without a call
    return tensor.numel() > 0


def require_shape(name: str, tensor: Tensor, shape: tuple[int | str, ...]) -> None:
    """A letter in `shape` is any size, a number that size: `("B", "L", 64)`."""
    require_tensor(name, tensor)
    fits = tensor.dim() == len(shape) and all(
        isinstance(want, str) or want == have
        for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"{name} must have the shape [{wanted}], not {list(tensor.shape)}")


def require_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...] = REAL) -> None:
    """The tensor's dtype is one of `allowed`."""
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    have = str(tensor.dtype).removeprefix("torch.")
    require(tensor.dtype in allowed, f"{name} must be {names}, not {have}")


def require_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """The tensor lies on `device`."""
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device}, the layer on {device}: move one of them with .to()"
        )


def require_finite(name: str, tensor: Tensor) -> None:
    """No NaN and no infinity, where values may be read: not on a GPU, nor under a compiler.

    One NaN would otherwise reach every position, earlier ones too, through the FFT.
    """
    if not may_read(tensor):
        return
    values = tensor.detach()
    if math.isfinite(values.sum().item()):  # one pass, no temporary
        return
    for bad in (~values.isfinite()).nonzero().tolist():  # none if only the sum overflowed
        value = values[tuple(bad)]
        raise NotFiniteError(f"{name} holds {value} at {bad}: every value must be finite")
