"""Counted randomness: a number is a function of (seed, split, step, index, position), no more.

SplitMix64 (Steele, Lea, Flood 2014) in integer tensor arithmetic: the same bits on every device,
for every batch size and any number of workers, with nothing to save when a run stops.
"""

import math

import torch
from torch import Tensor

SPLITS = ("train", "validation", "test", "constants")
"""`constants` is for what a task draws once: its fixed matrix, its fixed positions."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class Random:
    """The numbers of the samples `first .. first + count - 1` of one step's batch.

    Each call draws further numbers of every sample, [count, *shape]. A step may be an integer
    tensor on the device, so that a captured graph can count by itself.
    """

    def __init__(
        self,
        seed: int,
        split: str,
        step: int | Tensor,
        *,
        first: int,
        count: int,
        device: torch.device | str,
    ) -> None:
        key = torch.full((), _signed(seed), dtype=torch.int64, device=device)
        key = _mix(_mix(key) ^ SPLITS.index(split))
        key = _mix(key ^ step)
        index = _counted(torch.arange(first, first + count, device=device), key)
        self._key = _mix(key + index * _signed(_GOLDEN))  # [count]
        self._drawn = 0

    @property
    def device(self) -> torch.device:
        """Where the numbers are made."""
        return self._key.device

    def bits(self, *shape: int) -> Tensor:
        """64 random bits each, as int64."""
        size = math.prod(shape)
        counter = torch.arange(self._drawn + 1, self._drawn + size + 1, device=self._key.device)
        counter = _counted(counter, self._key[:1])
        self._drawn += size
        return _mix(self._key[:, None] + counter * _signed(_GOLDEN)).view(-1, *shape)

    def uniform(self, *shape: int) -> Tensor:
        """In [0, 1), float64 with 53 random bits."""
        numbers: Tensor = _shift(self.bits(*shape), 11).double() * 2.0**-53
        return numbers

    def normal(self, *shape: int) -> Tensor:
        """Standard normal, float64, by Box and Muller: two numbers from two."""
        size = math.prod(shape)
        radius = (-2 * (1 - self.uniform((size + 1) // 2)).log()).sqrt()
        angle = 2 * math.pi * self.uniform((size + 1) // 2)
        both = torch.cat((radius * angle.cos(), radius * angle.sin()), dim=1)
        return both[:, :size].reshape(-1, *shape)

    def integer(self, below: int, *shape: int) -> Tensor:
        """Uniform in 0 .. below-1, int64 (the bias, below 2^-40 for what tasks ask, is ignored)."""
        return (self.uniform(*shape) * below).long()


def _counted(counter: Tensor, key: Tensor) -> Tensor:
    """Inductor takes a range for a 32-bit index, whose product with GOLDEN does not fit: tie it to
    something that is 64-bit data.
    """
    return counter + (key & 0) if torch.compiler.is_compiling() else counter


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK
    return value - 2**64 if value >= 2**63 else value


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical shift to the right."""
    shifted: Tensor = (x >> count) & (2 ** (64 - count) - 1)
    return shifted


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser; products wrap modulo 2^64."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)
