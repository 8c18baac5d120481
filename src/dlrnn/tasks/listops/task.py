"""The ListOps tasks: the value of every sub-tree (ListOps-SubTrees), or of the expression (LRA)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from dlrnn.common.figures import new_figure
from dlrnn.tasks.base import IGNORED, Batch, ClassificationTask, ClassTask
from dlrnn.tasks.listops import generator
from dlrnn.tasks.listops.text import OPERATORS, VOCABULARY, sub_trees, to_text
from dlrnn.tasks.storage.sets import SetTask, labels_of
from dlrnn.tasks.storage.specs import Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = dict(zip(OPERATORS, ("#0072b2", "#d55e00", "#009e73", "#cc79a7"), strict=True))


@dataclass(frozen=True)
class _ListOps(ClassTask, SetTask):
    """Inputs are tokens, padded on the right; targets are the digits."""

    vocabulary: ClassVar[int] = len(VOCABULARY)
    d_output: ClassVar[int] = 10
    required: ClassVar[tuple[str, ...]] = ("min_length", "max_length")

    def _tokens(self, samples: Sequence[Sample]) -> Tensor:
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
            axes, bars = figure.subplots(), sorted(sub_trees(to_text(tokens)))  # the root first
        except ValueError as error:
            raise ValueError(f"{self.folder} has an invalid {split} sample: {error}") from None
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
        names = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
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
    limits: ClassVar = {"length": (64, 65_536)}

    def spec(self) -> generator.ListOpsGenerator:
        """Trees of 7000 < length < 8180; another `length` than 8192 scales these limits."""
        least, most = (self.length * limit // 8192 for limit in (7000, 8180))
        return generator.subtrees(seed=self.seed, min_length=least, max_length=most)

    @property
    def input_length(self) -> int:
        """Tokens of a sample, padding included."""
        return self.length

    def _batch(self, samples: Sequence[Sample]) -> Batch:
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
    input_length: ClassVar[int] = 2000

    def spec(self) -> generator.ListOpsGenerator:
        """Trees of 500 < length < 2000."""
        return generator.lra(seed=self.seed)

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        return Batch(
            self._tokens(samples),
            labels_of(samples),
            torch.tensor([len(sample["tokens"]) for sample in samples]),
        )
