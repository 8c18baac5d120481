"""Bad input gets one clear sentence, before any work starts."""

import math
from numbers import Real

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

REAL = (torch.float32, torch.float64)
FLOATING = (*REAL, torch.bfloat16, torch.float16)


class NotFiniteError(ValueError):
    """A NaN or an infinity where there must be none."""


def require(condition: bool, sentence: str) -> None:
    """Raise ValueError with `sentence` unless `condition` holds.

    Not for sentences that name a tensor's sizes: writing one down fixes it in a compiled graph.
    """
    if not condition:
        raise ValueError(sentence)


def require_tensor(name: str, value: object) -> None:
    """Not a list, not an array of another library."""
    kind = type(value).__name__
    require(isinstance(value, Tensor), f"{name} must be a torch tensor, not a {kind}")


def require_count(name: str, value: object) -> None:
    """A whole number of at least 1."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(fits, f"{name} must be a whole number of at least 1, not {value!r}")


def require_probability(name: str, value: object) -> None:
    """Of dropping something: never everything."""
    fits = 0 <= _number(value) < 1
    require(fits, f"{name} must be at least 0 and below 1, not {value!r}")


def require_positive(name: str, value: object, most: float = math.inf) -> None:
    """Above 0; at most so much, or finite."""
    number = _number(value)
    fits = 0 < number <= most and number < math.inf
    bound = "finite" if most == math.inf else f"at most {most:g}"
    require(fits, f"{name} must be above 0 and {bound}, not {value!r}")


def require_steps(dt_min: object, dt_max: object) -> None:
    """Bounds that a logarithm can be drawn between."""
    fits = 0 < _number(dt_min) <= _number(dt_max) < math.inf
    require(fits, f"0 < dt_min <= dt_max must hold, not {dt_min!r} and {dt_max!r}")


def _number(value: object) -> float:
    """What is none is NaN, which is within no bounds."""
    return float(value) if isinstance(value, Real) else math.nan


def require_flags(**flags: object) -> None:
    """A string would be taken for True, "no" as well."""
    for name, value in flags.items():
        require(isinstance(value, bool), f"{name} must be True or False, not {value!r}")


def in_transform() -> bool:
    """In forward-mode AD, or inside torch.func's jvp, vmap, grad and the like.

    Of the latter a compiler cannot ask.
    """
    if forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None


def require_no_transform() -> None:
    """They do not see into our ops: a jvp would silently be 0."""
    require(
        not in_transform(),
        "dlrnn cannot be used inside torch.func's jvp, vmap, grad or jacobians, nor in forward-mode"
        " AD: use torch.autograd's backward",
    )


def may_read(tensor: Tensor) -> bool:
    """Where there are values, and reading them waits for nobody: eager mode on the CPU."""
    if torch.compiler.is_compiling() or in_transform() or isinstance(tensor, FakeTensor):
        return False
    return tensor.device.type == "cpu" and tensor.numel() > 0


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
    sentence = f"{name} is on {tensor.device}, the layer on {device}: move one of them with .to()"
    require(tensor.device == device, sentence)


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
