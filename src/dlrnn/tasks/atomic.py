"""The 11 atomic tasks, as the paper's section "Atomic Tasks" defines them.

x is drawn from N(0, 1) and divided by its largest absolute value; sums and sorts are float64.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dlrnn.tasks.random import Random
from dlrnn.tasks.reflections import orthonormal
from dlrnn.tasks.regression import RegressionTask
from dlrnn.tasks.search import largest_product


def _signal(random: Random, length: int) -> Tensor:
    """[B, length], the largest absolute value is 1."""
    x = random.normal(length)
    return x / x.abs().amax(dim=1, keepdim=True)


def _column(x: Tensor) -> Tensor:
    return x[..., None]


class _OneNumber(RegressionTask):
    """One number in, one number out at every position."""

    @property
    def d_output(self) -> int:
        return 1

    def _features(self) -> int:
        return 1


@dataclass(frozen=True)
class Shift(RegressionTask):
    """C = 8 copies of x, shifted to the right by 0, L/8, 2L/8, ...; what comes in is 0.

    Length 16: x = (.3, -1, .2, ...), y_5 = (x_5, x_3, x_1, 0, 0, 0, 0, 0).
    """

    copies: int = 8

    name: ClassVar[str] = "shift"
    probes: ClassVar[str] = "one long kernel an output"
    shortest: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copies < 1 or self.length % self.copies:
            multiple = f"the length must be a multiple of the {self.copies} copies"
            raise ValueError(f"shift: {multiple}, and {self.length} is not")

    @property
    def d_output(self) -> int:
        """One for each copy."""
        return self.copies

    def _features(self) -> int:
        return 1

    def _draw(self, random: Random) -> tuple[Tensor, Tensor]:
        x, unit = _signal(random, self.length), self.length // self.copies
        shifted = [F.pad(x, (j * unit, 0))[:, : self.length] for j in range(self.copies)]
        return _column(x), torch.stack(shifted, dim=-1)


@dataclass(frozen=True)
class CumSum(_OneNumber):
    """y_i = (x_0 + ... + x_i) / sqrt(i + 1).

    x = (1, -.5, .1): y = (1, .35, .35).
    """

    name: ClassVar[str] = "cumsum"
    probes: ClassVar[str] = "a kernel of ones"

    def _draw(self, random: Random) -> tuple[Tensor, Tensor]:
        x = _signal(random, self.length)
        count = torch.arange(1, self.length + 1, device=x.device, dtype=torch.float32)
        return _column(x), _column(x.cumsum(1) / count.sqrt())


@dataclass(frozen=True)
class CumMax(_OneNumber):
    """y_i = max(x_0, ..., x_i).

    x = (.2, -1, .5): y = (.2, .2, .5).
    """

    name: ClassVar[str] = "cummax"
    probes: ClassVar[str] = "what no fixed kernel does"

    def _draw(self, random: Random) -> tuple[Tensor, Tensor]:
        x = _signal(random, self.length)
        return _column(x), _column(x.cummax(1).values)


class _ReadThenWrite(_OneNumber):
    """x is followed by as many zeros; the answer is written over them."""

    @property
    def input_length(self) -> int:
        """2 L."""
        return 2 * self.length

    def _draw(self, random: Random) -> tuple[Tensor, Tensor]:
        x = _signal(random, self.length)
        return _column(F.pad(x, (0, self.length))), _column(self._answer(x))

    @abstractmethod
    def _answer(self, x: Tensor) -> Tensor:
        """What is to be written for x [B, L]."""


@dataclass(frozen=True)
class Reverse(_ReadThenWrite):
    """y_i = x_{L-1-i}.

    in (.2, -1, .5, 0, 0, 0), out (., ., ., .5, -1, .2).
    """

    name: ClassVar[str] = "reverse"
    probes: ClassVar[str] = "many kernels at once"

    def _answer(self, x: Tensor) -> Tensor:
        return x.flip(1)


@dataclass(frozen=True)
class Sort(_ReadThenWrite):
    """The elements of x by their distance from x_0, nearest first.

    in (.2, -1, .5, 0, 0, 0), out (., ., ., .2, .5, -1).
    """

    name: ClassVar[str] = "sort"
    probes: ClassVar[str] = "an order that the input decides"

    def _answer(self, x: Tensor) -> Tensor:
        distance = (x - x[:, :1]).abs()
        return x.gather(1, distance.argsort(dim=1, stable=True))


@dataclass(frozen=True)
class Select(RegressionTask):
    """Repeat the M = 32 marked ones of L + M numbers, in order, over M zeros at the end.

    M = 2, L = 2: in (.1, .7, -1, .4, 0, 0) with marks (0, 1, 0, 1, 0, 0), out (..., .7, .4).
    """

    marked: int = 32

    name: ClassVar[str] = "select"
    probes: ClassVar[str] = "shifts that the input decides"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.marked < 1:
            raise ValueError(f"{self.name}: marked must be at least 1, not {self.marked}")

    @property
    def d_output(self) -> int:
        """The number."""
        return 1

    @property
    def input_length(self) -> int:
        """L + 2 M."""
        return self.length + 2 * self.marked

    @property
    def output_length(self) -> int:
        """M."""
        return self.marked

    def _features(self) -> int:
        return 2

    def _draw(self, random: Random) -> tuple[Tensor, Tensor]:
        x = _signal(random, self.length + self.marked)
        places = self._places(random).expand(len(x), -1)  # [B, M]
        marks = torch.zeros_like(x).scatter_(1, places, 1.0)
        both = F.pad(torch.stack((x, marks), dim=-1), (0, 0, 0, self.marked))
        return both, _column(x.gather(1, places))

    def _places(self, random: Random) -> Tensor:
        """M distinct positions, in order: where the smallest of random numbers lie."""
        lottery = random.uniform(self.length + self.marked)
        return lottery.topk(self.marked, dim=1, largest=False).indices.sort(dim=1).values


@dataclass(frozen=True)
class SelectFixed(Select):
    """Select, with the same marked positions in every sample (drawn from the seed)."""

    name: ClassVar[str] = "select-fixed"
    probes: ClassVar[str] = "shifts that are always the same"

    def _places(self, random: Random) -> Tensor:
        return self._fixed(super()._places, random.device)


@dataclass(frozen=True)
class MIPS(RegressionTask):
    """For the query at i, the value at the position j <= i whose key has the largest product.

    d = 1: q, k, v = (1, 1), (-1, 1), (.3, .8) gives y = (.3, .8).
    """

    width: int = 4

    name: ClassVar[str] = "mips"
    probes: ClassVar[str] = "attention: look up by content"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width < 1:
            raise ValueError(f"mips: width must be at least 1, not {self.width}")

    @property
    def d_output(self) -> int:
        """A value."""
        return self.width

    def _features(self) -> int:
        return 3 * self.width

    def _draw(self, random: Random) -> tuple[Tensor, Tensor]:
        vectors = random.normal(self.length, 3, self.width)
        vectors = (vectors / vectors.norm(dim=-1, keepdim=True)).float()
        query, key, value = vectors.unbind(2)
        best = largest_product(query, key)
        return vectors.flatten(2), value.gather(1, best[..., None].expand_as(value))


@dataclass(frozen=True)
class ContextShift(_OneNumber):
    """Shift x by s, which the first two inputs say as cos and sin of 2 pi s / L.

    s = 1: in (cos, sin, .2, -1), out (0, cos, sin, .2).
    """

    name: ClassVar[str] = "context-shift"
    probes: ClassVar[str] = "a kernel that the input decides"
    shortest: ClassVar[int] = 3

    def _draw(self, random: Random) -> tuple[Tensor, Tensor]:
        x = _signal(random, self.length - 2)
        shift = random.integer(self.length - 1, 1)  # [B, 1], 0 .. L-2
        angle = 2 * math.pi * shift.float() / self.length
        x = torch.cat((angle.cos(), angle.sin(), x), dim=1)
        source = torch.arange(self.length, device=x.device) - shift
        shifted = x.gather(1, source.clamp(min=0)).masked_fill(source < 0, 0)
        return _column(x), _column(shifted)


@dataclass(frozen=True)
class Solve(_OneNumber):
    """Find the unit vector X from an orthonormal A, row by row, and B = A X.

    N is the largest with N^2 + 2 N <= L; in (a_1, b_1, ..., a_N, b_N, 0, ...), out (..., X).
    """

    name: ClassVar[str] = "solve"
    probes: ClassVar[str] = "an algorithm in context"
    shortest: ClassVar[int] = 3

    @property
    def size(self) -> int:
        """N, the number of unknowns."""
        return math.isqrt(self.length + 1) - 1

    @property
    def output_length(self) -> int:
        """N."""
        return self.size

    def _draw(self, random: Random) -> tuple[Tensor, Tensor]:
        X = random.normal(self.size)
        X = X / X.norm(dim=1, keepdim=True)
        A = self._matrix(random).expand(len(X), -1, -1)
        B = (A * X[:, None]).sum(2, keepdim=True)  # a matrix product would be a kernel of its own
        rows = torch.cat((A, B), dim=2).flatten(1)  # [B, N^2 + N]
        return _column(F.pad(rows, (0, self.length - rows.shape[1]))), _column(X)

    def _matrix(self, random: Random) -> Tensor:
        return orthonormal(random.normal(self.size, self.size))


@dataclass(frozen=True)
class SolveFixed(Solve):
    """Solve, with the same A in every sample (drawn from the seed)."""

    name: ClassVar[str] = "solve-fixed"
    probes: ClassVar[str] = "a fixed linear map of the input"

    def _matrix(self, random: Random) -> Tensor:
        return self._fixed(super()._matrix, random.device)


ATOMIC: tuple[type[RegressionTask], ...] = (
    *(Shift, CumSum, CumMax, Reverse, Sort, Select, SelectFixed, MIPS, ContextShift),
    *(Solve, SolveFixed),
)
