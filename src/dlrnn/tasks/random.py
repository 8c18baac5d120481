"""Counter-based random numbers: functions of (seed, split, step, index, position) alone.

SplitMix64 (Steele, Lea, Flood 2014) in integer tensor arithmetic: the same bits on every device,
for every batch size and any number of workers, and no state to save in a checkpoint.
"""

import math

import torch
from torch import Tensor

SPLITS = ("train", "validation", "test", "constants")
"""`constants` is for numbers that a task draws once: its fixed matrix, its fixed positions."""

GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64's increment: 2^64 divided by the golden ratio."""
_MASK = 2**64 - 1


class Random:
    """The numbers of the samples `first .. first + count - 1` of one step's batch.

    Each call draws new numbers for every sample, [count, *shape]. `step` may be an integer tensor
    on the device, so that a captured CUDA graph can increment it.
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
        key = torch.full((), signed(seed), dtype=torch.int64, device=device)
        key = mix(mix(key) ^ SPLITS.index(split))
        key = mix(key ^ step)
        index = _as_int64(torch.arange(first, first + count, device=device), key)
        self._key = mix(key + index * signed(GOLDEN))  # [count]
        self._drawn = 0

    @property
    def device(self) -> torch.device:
        """The device of the numbers."""
        return self._key.device

    def bits(self, *shape: int) -> Tensor:
        """Return 64 random bits each, as int64."""
        size = math.prod(shape)
        counter = torch.arange(self._drawn + 1, self._drawn + size + 1, device=self._key.device)
        counter = _as_int64(counter, self._key[:1])
        self._drawn += size
        return mix(self._key[:, None] + counter * signed(GOLDEN)).view(-1, *shape)

    def uniform(self, *shape: int) -> Tensor:
        """Return uniform numbers in [0, 1), float64 with 53 random bits."""
        numbers: Tensor = _shift(self.bits(*shape), 11).double() * 2.0**-53
        return numbers

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers in float64 (Box and Muller: two from two uniform ones)."""
        size = math.prod(shape)
        radius = (-2 * (1 - self.uniform((size + 1) // 2)).log()).sqrt()
        angle = 2 * math.pi * self.uniform((size + 1) // 2)
        both = torch.cat((radius * angle.cos(), radius * angle.sin()), dim=1)
        return both[:, :size].reshape(-1, *shape)

    def integer(self, below: int, *shape: int) -> Tensor:
        """Return uniform integers in 0 .. below-1; for the tasks the bias is less than 2^-40."""
        return (self.uniform(*shape) * below).long()


def _as_int64(counter: Tensor, key: Tensor) -> Tensor:
    """Keep Inductor from computing with a 32-bit index, whose product with GOLDEN would overflow.

    The counter is combined with data that is 64 bits wide.
    """
    return counter + (key & 0) if torch.compiler.is_compiling() else counter


def signed(value: int) -> int:
    """Return the int64 that has the same 64 bits."""
    value &= _MASK
    return value - 2**64 if value >= 2**63 else value


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical shift to the right."""
    shifted: Tensor = (x >> count) & (2 ** (64 - count) - 1)
    return shifted


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser; products wrap modulo 2^64."""
    x = (x ^ _shift(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)
