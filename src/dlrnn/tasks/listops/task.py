"""The ListOps tasks: the value of every sub-tree (ListOps-SubTrees), or of the expression (LRA)."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlrnn.common.figures import new_figure
from dlrnn.tasks.base import IGNORED, Batch, ClassificationTask, ClassTask
from dlrnn.tasks.listops import generator
from dlrnn.tasks.listops.text import CLOSE, OPERATOR, OPERATORS, VOCABULARY, sub_values, to_text
from dlrnn.tasks.storage.sets import SetTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


@dataclass(frozen=True)
class _ListOps(ClassTask, SetTask):
    """Inputs are tokens, padded on the right; targets are the digits."""

    @abstractmethod
    def spec(self) -> generator.ListOpsGenerator:
        """The data set with the paper's settings."""

    def _required(self) -> dict[str, Any]:
        parameters = self.spec().parameters
        return {key: parameters[key] for key in ("min_length", "max_length")}

    @property
    def vocabulary(self) -> int:
        """16: padding, ten digits, four operators, the closing bracket."""
        return len(VOCABULARY)

    @property
    def d_output(self) -> int:
        """The ten digits."""
        return 10

    def _drawn(self, split: str, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        spec = self.spec()
        return [self._columns(spec.draw(split, number)) for number in numbers]

    @abstractmethod
    def _columns(self, tree: generator.Expression) -> Mapping[str, Any]:
        """Return the columns of a tree that this task reads."""

    def _tokens(self, samples: Sequence[Mapping[str, Any]]) -> Tensor:
        tokens = np.zeros((len(samples), self.input_length), dtype=np.int64)
        for row, sample in zip(tokens, samples, strict=True):
            row[: len(sample["tokens"])] = sample["tokens"]
        return torch.from_numpy(tokens)

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """Draw every sub-tree as a bar over its tokens, coloured by operator, with its value."""
        from matplotlib.patches import Patch, Rectangle

        tokens = self.sample(1, split=split, step=step).inputs[0].numpy().astype(np.uint8)
        figure = new_figure(11, 6)
        try:
            axes, bars = figure.subplots(), subtrees_of(tokens)
        except (ValueError, IndexError, StopIteration):
            raise ValueError(
                f"{self.folder} has a {split} sample that is not an expression"
            ) from None
        for place, (start, stop, depth, operator, value) in enumerate(bars):
            bar = Rectangle((start, -depth), stop - start, -0.9, color=_COLOURS[operator])
            axes.add_patch(bar)
            if (stop - start) * 60 > len(tokens) or place == 0:
                middle = (start + stop) / 2, -depth - 0.45
                axes.annotate(str(value), middle, ha="center", va="center", color="white")
        depth = max((bar.depth for bar in bars), default=0)  # a single digit has no bars
        end = int((tokens != 0).sum())
        axes.set(xlim=(0, end), ylim=(-depth - 1, 0), xlabel="position", yticks=[])
        axes.set_ylabel("depth")
        axes.set_title(f"a tree of {end} tokens: each bar is a sub-tree, with its value")
        axes.spines[["top", "right", "left"]].set_visible(False)
        names = [Patch(color=c, label=n) for c, n in zip(_COLOURS, OPERATORS, strict=True)]
        figure.legend(handles=names, loc="outside right center", frameon=False)
        return self.captioned(figure)


@dataclass(frozen=True)
class ListOpsSubTrees(_ListOps):
    """The input is an expression of nested MIN, MAX, MED (median) and SM (sum modulo 10) of digits.
    The output at every closing bracket is the value, 0 to 9, of the sub-expression that it closes;
    other positions are ignored: [MAX 2 [SM 3 8 ] ] gives 1, then 2.

    In  `[MAX 2 6 [MED [SM 3 1 6 ] 8 3 ] 4 5 ]`
    out ` -   - -  -    -  - - - 0 - - 3 - - 6` (- is ignored).
    """

    length: int = 8192

    name: ClassVar[str] = "listops-subtrees"
    kind: ClassVar[str] = "tagging"
    probes: ClassVar[str] = "hierarchical computation, at every node"
    causal: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("tokens", "values", "positions")

    def spec(self) -> generator.ListOpsGenerator:
        """Trees of 7000 < length < 8180; another `length` than 8192 scales these limits."""
        if not 64 <= self.length <= 65_536:
            limits = f"must be from 64 to 65536, not {self.length}"
            raise ValueError(f"{self.name}: the length {limits}")
        least, most = (self.length * limit // 8192 for limit in (7000, 8180))
        return generator.subtrees(seed=self.seed, min_length=least, max_length=most)

    @property
    def input_length(self) -> int:
        """Tokens of a sample, padding included."""
        return self.length

    def _columns(self, tree: generator.Expression) -> Mapping[str, Any]:
        return {"tokens": tree.tokens, "values": tree.values, "positions": tree.positions}

    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        targets = np.full((len(samples), self.length), IGNORED, dtype=np.int64)
        for row, sample in zip(targets, samples, strict=True):
            row[sample["positions"]] = sample["values"]
        return Batch(self._tokens(samples), torch.from_numpy(targets))


@dataclass(frozen=True)
class ListOps(_ListOps, ClassificationTask):
    """The input is an expression of nested MIN, MAX, MED (median) and SM (sum modulo 10) of digits.
    The output is its value, one of ten classes: [MAX 2 6 [SM 3 9 ] ] gives 6.

    Expressions have 500 to 2000 tokens, as in the Long Range Arena.
    """

    name: ClassVar[str] = "listops"
    probes: ClassVar[str] = "hierarchical computation"
    causal: ClassVar[bool] = False
    columns: ClassVar[tuple[str, ...]] = ("tokens", "label")

    def spec(self) -> generator.ListOpsGenerator:
        """Trees of 500 < length < 2000."""
        return generator.lra(seed=self.seed)

    @property
    def input_length(self) -> int:
        """Tokens of a sample, padding included."""
        return 2000

    def _columns(self, tree: generator.Expression) -> Mapping[str, Any]:
        return {"tokens": tree.tokens, "label": tree.value}

    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        return Batch(
            self._tokens(samples),
            torch.tensor([int(sample["label"]) for sample in samples]),
            torch.tensor([len(sample["tokens"]) for sample in samples]),
        )


class SubTree(NamedTuple):
    """One operator of an expression: the positions `start .. stop - 1`, its depth and value."""

    start: int
    stop: int
    depth: int
    operator: int  # an index of OPERATORS
    value: int


def subtrees_of(tokens: np.ndarray) -> list[SubTree]:
    """Return the sub-trees of an expression by their start, the root first."""
    values = iter(sub_values(to_text(tokens)))
    stack: list[tuple[int, int]] = []
    found = []
    for place, token in enumerate(tokens):
        if OPERATOR <= token < CLOSE:
            stack.append((place, int(token) - OPERATOR))
        elif token == CLOSE:
            start, operator = stack.pop()
            found.append(SubTree(start, place + 1, len(stack), operator, next(values)))
    return sorted(found)
