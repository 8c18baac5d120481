"""The 11 atomic tasks, as the paper's section "Atomic Tasks" defines them.

x is drawn from N(0, 1) and divided by its largest absolute value. Sums and sorts are float64.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dlrnn.tasks.atomic import pictures
from dlrnn.tasks.atomic.operations import largest_product, orthonormal
from dlrnn.tasks.atomic.regression import RegressionTask
from dlrnn.tasks.random import Random

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MARKED = (pictures.ORANGE, pictures.BLUE)


def _signal(random: Random, length: int) -> Tensor:
    """Return x [B, length], whose largest absolute value is 1."""
    x = random.normal(length)
    return x / x.abs().amax(dim=1, keepdim=True)


@dataclass(frozen=True)
class Shift(RegressionTask):
    """The output is C = 8 copies of the input x, shifted right by 0, L/C, 2L/C, ... positions:
    y_ij = x_{i - j L/C} for j = 0, ..., C-1, with zeros before the start of x.

    Length 16: x = (.3, -1, .2, ...), y_5 = (x_5, x_3, x_1, 0, 0, 0, 0, 0).
    """

    copies: int = 8

    name: ClassVar[str] = "shift"
    probes: ClassVar[str] = "one long kernel for each output"
    heights: ClassVar[tuple[int, int]] = (1, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copies < 1 or self.length % self.copies:
            multiple = f"the length must be a multiple of the {self.copies} copies"
            raise ValueError(f"shift: {multiple}, and {self.length} is not")

    @property
    def d_output(self) -> int:
        """One number for each copy."""
        return self.copies

    def generate(self, random: Random) -> tuple[Tensor, Tensor]:
        """The signal x, and its copies, each shifted further."""
        x, unit = _signal(random, self.length), self.length // self.copies
        shifted = [F.pad(x, (j * unit, 0))[:, : self.length] for j in range(self.copies)]
        return x[..., None], torch.stack(shifted, dim=-1)

    def _draw(self, above: "Axes", below: "Axes", inputs: Tensor, targets: Tensor) -> None:
        pictures.sequence(above, inputs)
        unit = self.length // self.copies
        for j, copy in enumerate(targets.T.numpy()):
            below.fill_between(range(self.length), -j, copy * 0.8 - j, color=pictures.BLUE)
        names = [f"j = {j}: x shifted by {j * unit}" for j in range(self.copies)]
        below.set_yticks(range(0, -self.copies, -1), names)


@dataclass(frozen=True)
class CumSum(RegressionTask):
    """The output is the running sum of the input x, scaled so that its variance is constant:
    y_i = (x_0 + x_1 + ... + x_i) / sqrt(i+1).

    x = (1, -.5, .1): y = (1, .35, .35).
    """

    name: ClassVar[str] = "cumsum"
    probes: ClassVar[str] = "a kernel of ones"

    def generate(self, random: Random) -> tuple[Tensor, Tensor]:
        """The signal x, and its cumulative sums over sqrt(k)."""
        x = _signal(random, self.length)
        count = torch.arange(1, self.length + 1, device=x.device, dtype=torch.float32)
        return x[..., None], (x.cumsum(1) / count.sqrt())[..., None]


@dataclass(frozen=True)
class CumMax(RegressionTask):
    """The output is the running maximum of the input x: y_i = max(x_0, x_1, ..., x_i).

    x = (.2, -1, .5): y = (.2, .2, .5).
    """

    name: ClassVar[str] = "cummax"
    probes: ClassVar[str] = "a function that no fixed kernel computes"

    def generate(self, random: Random) -> tuple[Tensor, Tensor]:
        """The signal x, and its cumulative maxima."""
        x = _signal(random, self.length)
        return x[..., None], x.cummax(1).values[..., None]

    def _draw(self, above: "Axes", below: "Axes", inputs: Tensor, targets: Tensor) -> None:
        new = inputs == targets
        pictures.sequence(above, inputs, colours=np.where(new.flatten(), *_MARKED))
        pictures.legend(above, {"new maximum": pictures.ORANGE})
        below.step(range(self.length), targets.flatten(), where="post", color=pictures.ORANGE)
        pictures.sequence(below, inputs, colours=pictures.GRAY)
        pictures.legend(below, {"y, the running maximum": pictures.ORANGE, "x": pictures.GRAY})


@dataclass(frozen=True)
class _ReadThenWrite(RegressionTask):
    """x is followed by L zeros, at whose positions the model writes the answer."""

    @property
    def input_length(self) -> int:
        """2 L."""
        return 2 * self.length

    @property
    def output_length(self) -> int:
        """The last L positions."""
        return self.length

    def generate(self, random: Random) -> tuple[Tensor, Tensor]:
        """The signal x before blanks, and the answer."""
        x = _signal(random, self.length)
        return F.pad(x, (0, self.length))[..., None], self._answer(x)[..., None]

    @abstractmethod
    def _answer(self, x: Tensor) -> Tensor:
        """Return the target for x [B, L]."""

    def _draw(self, above: "Axes", below: "Axes", inputs: Tensor, targets: Tensor) -> None:
        x = inputs[: self.length, 0]
        colours = pictures.by_value(self._colour_key(x))
        pictures.sequence(above, x, colours=colours)
        pictures.region(above, self.length, self.input_length, "zeros: the answer is written here")
        source = pictures.source_of(targets, x)
        pictures.sequence(below, targets, self.length, colours=colours[source])

    @abstractmethod
    def _colour_key(self, x: Tensor) -> Tensor:
        """Return a number for each element of x [L], by which a picture colours it."""


@dataclass(frozen=True)
class Reverse(_ReadThenWrite):
    """The input is L numbers x followed by L zeros. At the positions of the zeros, the output is x
    in reverse order: y_i = x_{L-1-i}.

    In (.2, -1, .5, 0, 0, 0), out (., ., ., .5, -1, .2).
    """

    name: ClassVar[str] = "reverse"
    probes: ClassVar[str] = "many kernels at once"

    def _answer(self, x: Tensor) -> Tensor:
        return x.flip(1)

    def _colour_key(self, x: Tensor) -> Tensor:
        return torch.arange(float(len(x)))


@dataclass(frozen=True)
class Sort(_ReadThenWrite):
    """The input is L numbers x followed by L zeros. At the positions of the zeros, the output is x
    sorted by the distance from its first element, nearest first: y_i is the x_j with the i-th
    smallest |x_j - x_0|, and y_0 = x_0.

    In (.2, -1, .5, 0, 0, 0), out (., ., ., .2, .5, -1).
    """

    name: ClassVar[str] = "sort"
    probes: ClassVar[str] = "an order that depends on the input"

    def _answer(self, x: Tensor) -> Tensor:
        distance = (x - x[:, :1]).abs()
        return x.gather(1, distance.argsort(dim=1, stable=True))

    def _colour_key(self, x: Tensor) -> Tensor:
        return -(x - x[0]).abs()

    def _draw(self, above: "Axes", below: "Axes", inputs: Tensor, targets: Tensor) -> None:
        super()._draw(above, below, inputs, targets)
        for axes in (above, below):
            axes.axhline(float(inputs[0, 0]), color=pictures.ORANGE, linestyle="--")
        text = "x_0, the first element (the brighter a number, the closer it is to x_0)"
        pictures.legend(above, {text: pictures.ORANGE})

    def preview(self, *, split: str = "train", step: int = 5) -> "Figure":
        """Draw a sample; at length 64, that of step 5 has x_0 in the middle of the others."""
        return super().preview(split=split, step=step)


@dataclass(frozen=True)
class Select(RegressionTask):
    """The input is L + M numbers x followed by M zeros (32 in the paper). A second feature marks M
    random positions i_1 < ... < i_M of x. At the positions of the zeros, the output is the marked
    numbers in their order: y_j = x_{i_j}.

    M = 2, L = 2: in (.1, .7, -1, .4, 0, 0), marks (0, 1, 0, 1, 0, 0), out (..., .7, .4).
    """

    marked: int = 32

    name: ClassVar[str] = "select"
    probes: ClassVar[str] = "shifts that depend on the input"
    limits: ClassVar = {"length": (1, math.inf), "marked": (1, math.inf)}
    features: ClassVar[int] = 2  # the number and its mark

    @property
    def input_length(self) -> int:
        """L + 2 M."""
        return self.length + 2 * self.marked

    @property
    def output_length(self) -> int:
        """M."""
        return self.marked

    def generate(self, random: Random) -> tuple[Tensor, Tensor]:
        """The signal x with marks, and its marked values."""
        x = _signal(random, self.length + self.marked)
        places = self._places(random).expand(len(x), -1)  # [B, M]
        marks = torch.zeros_like(x).scatter_(1, places, 1.0)
        both = F.pad(torch.stack((x, marks), dim=-1), (0, 0, 0, self.marked))
        return both, x.gather(1, places)[..., None]

    def _places(self, random: Random) -> Tensor:
        """Return M distinct positions in order: those of the smallest of random numbers."""
        lottery = random.uniform(self.length + self.marked)
        return lottery.topk(self.marked, dim=1, largest=False).indices.sort(dim=1).values

    def _draw(self, above: "Axes", below: "Axes", inputs: Tensor, targets: Tensor) -> None:
        from matplotlib.colors import to_rgba

        count = self.length + self.marked
        x, places = inputs[:count, 0], inputs[:count, 1].nonzero().flatten()
        colours = pictures.by_value(torch.arange(float(count)))
        marked = colours[places]
        colours[inputs[:count, 1] == 0] = to_rgba(pictures.GRAY)
        pictures.sequence(above, x, colours=colours)
        top = above.get_xaxis_transform()
        above.scatter(places, [0.97] * len(places), c=marked, marker="v", s=24, transform=top)
        pictures.legend(above, {"marked number": "#21918c", "other number": pictures.GRAY})
        pictures.region(above, count, self.input_length, "zeros")
        pictures.sequence(below, targets, count, colours=marked)


@dataclass(frozen=True)
class SelectFixed(Select):
    """As Select, but the M marked positions i_1 < ... < i_M are the same in every sample:
    y_j = x_{i_j} is written over the M zeros at the end.
    """

    name: ClassVar[str] = "select-fixed"
    probes: ClassVar[str] = "fixed shifts"

    def _places(self, random: Random) -> Tensor:
        return self._constant(super()._places, random.device)


@dataclass(frozen=True)
class MIPS(RegressionTask):
    """Every position has a query q, a key k and a value v: unit vectors of D = 4 numbers. The
    output is the value at the position, up to the current one, whose key has the largest inner
    product with the query: y_i = v_{i'} with i' = argmax_{j <= i} <q_i, k_j>.
    """

    width: int = 4

    name: ClassVar[str] = "mips"
    probes: ClassVar[str] = "attention: look up by content"
    heights: ClassVar[tuple[int, int]] = (3, 1)
    limits: ClassVar = {"length": (1, math.inf), "width": (1, math.inf)}

    @property
    def features(self) -> int:
        """A query, a key and a value."""
        return 3 * self.width

    @property
    def d_output(self) -> int:
        """The size of a value."""
        return self.width

    def generate(self, random: Random) -> tuple[Tensor, Tensor]:
        """Queries, keys and values; the value of the best key."""
        vectors = random.normal(self.length, 3, self.width)
        vectors = (vectors / vectors.norm(dim=-1, keepdim=True)).float()
        query, key, value = vectors.unbind(2)
        best = largest_product(query, key)
        return vectors.flatten(2), value.gather(1, best[..., None].expand_as(value))

    def _draw(self, above: "Axes", below: "Axes", inputs: Tensor, targets: Tensor) -> None:
        D = self.width
        query, key, _ = inputs.view(self.length, 3, D).unbind(1)
        best = largest_product(query.contiguous()[None], key.contiguous()[None])[0]
        pictures.rows(above, inputs, [f"{part}[{d}]" for part in "qkv" for d in range(D)])
        pictures.rows(below, targets, [f"y[{d}]" for d in range(D)])
        i = self.length * 3 // 4
        j = int(best[i])
        pictures.box(above, i, 0, D, f"query q_i, i = {i}")
        pictures.box(above, j, D, 2 * D, f"of k_0 ... k_{i}, k_{j} has the largest <q_i, k_j>")
        pictures.box(above, j, 2 * D, 3 * D, f"its value v_{j}")
        pictures.box(below, i, 0, D, f"y_i = v_{j}")


@dataclass(frozen=True)
class ContextShift(RegressionTask):
    """The first two inputs are cos(2 pi s / L) and sin(2 pi s / L) of a random shift s. The output
    is the whole input, shifted right by s positions: y_i = x_{i - s}, with zeros before the start
    of x.

    s = 1: in (cos, sin, .2, -1), out (0, cos, sin, .2).
    """

    name: ClassVar[str] = "context-shift"
    probes: ClassVar[str] = "a kernel that depends on the input"
    limits: ClassVar = {"length": (3, math.inf)}

    def generate(self, random: Random) -> tuple[Tensor, Tensor]:
        """An angle and the signal x; x shifted by what the angle says."""
        x = _signal(random, self.length - 2)
        shift = random.integer(self.length - 1, 1)  # [B, 1], 0 .. L-2
        angle = 2 * math.pi * shift.float() / self.length
        x = torch.cat((angle.cos(), angle.sin(), x), dim=1)
        source = torch.arange(self.length, device=x.device) - shift
        shifted = x.gather(1, source.clamp(min=0)).masked_fill(source < 0, 0)
        return x[..., None], shifted[..., None]

    def _draw(self, above: "Axes", below: "Axes", inputs: Tensor, targets: Tensor) -> None:
        angle = math.atan2(float(inputs[1]), float(inputs[0]))
        shift = round(angle / (2 * math.pi) * self.length) % self.length
        colours = np.array([pictures.ORANGE] * 2 + [pictures.BLUE] * (self.length - 2))
        pictures.sequence(above, inputs, colours=colours)
        text = f"cos and sin of 2 pi s / L, s = {shift}"
        pictures.legend(above, {text: pictures.ORANGE, "x": pictures.BLUE})
        if shift:
            pictures.region(below, 0, shift, f"{shift} zeros")
        pictures.sequence(below, targets[shift:], shift, colours=colours[: self.length - shift])


@dataclass(frozen=True)
class Solve(RegressionTask):
    """The input is a linear system, row by row: (a_1, b_1, ..., a_N, b_N, 0, ...), where a_i are
    the rows of a random orthonormal N x N matrix A, B = A X, and N is the largest with N^2 + 2 N <=
    L. The output at the last N positions is the solution, the unit vector X.
    """

    name: ClassVar[str] = "solve"
    probes: ClassVar[str] = "an algorithm in context"
    limits: ClassVar = {"length": (3, math.inf)}

    @property
    def size(self) -> int:
        """N, the number of unknowns."""
        return math.isqrt(self.length + 1) - 1

    @property
    def output_length(self) -> int:
        """N."""
        return self.size

    def generate(self, random: Random) -> tuple[Tensor, Tensor]:
        """The equations A X = B and their solution X."""
        X = random.normal(self.size)
        X = X / X.norm(dim=1, keepdim=True)
        A = self._matrix(random).expand(len(X), -1, -1)
        B = (A * X[:, None]).sum(2, keepdim=True)  # a matrix product would be a separate kernel
        rows = torch.cat((A, B), dim=2).flatten(1)  # [B, N^2 + N]
        return F.pad(rows, (0, self.length - rows.shape[1]))[..., None], X[..., None]

    def _matrix(self, random: Random) -> Tensor:
        return orthonormal(random.normal(self.size, self.size))

    def _draw(self, above: "Axes", below: "Axes", inputs: Tensor, targets: Tensor) -> None:
        N, stop = self.size, self.size * (self.size + 1)
        is_b = np.arange(stop) % (N + 1) == N
        pictures.sequence(above, inputs[:stop], colours=np.where(is_b, *_MARKED))
        texts = f"rows a_1 ... a_{N} of A", f"b_1 ... b_{N}, B = A X"
        pictures.legend(above, {texts[0]: pictures.BLUE, texts[1]: pictures.ORANGE})
        for row in range(0, N, 2) if N <= 12 else ():
            start = row * (N + 1)
            pictures.region(above, start, start + N + 1, f"a_{row + 1}, b_{row + 1}")
        pictures.region(above, stop, self.length, "zeros")
        pictures.sequence(below, targets, self.length - N)


@dataclass(frozen=True)
class SolveFixed(Solve):
    """As Solve, but the orthonormal N x N matrix A is the same in every sample: from (a_1, b_1,
    ..., a_N, b_N, 0, ...) with B = A X, the output at the last N positions is X.
    """

    name: ClassVar[str] = "solve-fixed"
    probes: ClassVar[str] = "a fixed linear map of the input"

    def _matrix(self, random: Random) -> Tensor:
        return self._constant(super()._matrix, random.device)


ATOMIC: tuple[type[RegressionTask], ...] = (
    *(Shift, CumSum, CumMax, Reverse, Sort, Select, SelectFixed, MIPS, ContextShift),
    *(Solve, SolveFixed),
)
