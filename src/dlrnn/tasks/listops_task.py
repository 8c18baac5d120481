"""ListOps as tasks: every sub-tree's value (ListOps-SubTrees), or the value of the whole (LRA)."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dlrnn.common.figures import new_figure
from dlrnn.tasks import listops
from dlrnn.tasks.classes import Classes, OneClass
from dlrnn.tasks.listops_text import CLOSE, OPERATOR, OPERATORS, VOCABULARY
from dlrnn.tasks.sets import SetTask
from dlrnn.tasks.task import IGNORED, Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


@dataclass(frozen=True)
class _ListOps(Classes, SetTask):
    """Tokens in, padded on the right; ten classes out."""

    @abstractmethod
    def spec(self) -> listops.ListOps:
        """The set, as the paper has it."""

    def _fixed(self) -> dict[str, Any]:
        parameters = self.spec().parameters
        return {key: parameters[key] for key in ("min_length", "max_length")}

    @property
    def vocabulary(self) -> int:
        """16: padding, ten digits, four operators, the closing bracket."""
        return len(VOCABULARY)

    @property
    def d_output(self) -> int:
        """The digits."""
        return 10

    def _drawn(self, split: str, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        spec = self.spec()
        return [self._columns(spec.draw(split, number)) for number in numbers]

    @abstractmethod
    def _columns(self, tree: listops.Expression) -> Mapping[str, Any]:
        """What of a tree is a sample, as in a set on disk."""

    def _tokens(self, samples: Sequence[Mapping[str, Any]]) -> Tensor:
        tokens = np.zeros((len(samples), self.input_length), dtype=np.int64)
        for row, sample in zip(tokens, samples, strict=True):
            row[: len(sample["tokens"])] = sample["tokens"]
        return torch.from_numpy(tokens)

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """Every sub-tree is a bar over its tokens, coloured by its operator, with its value."""
        from matplotlib.patches import Patch, Rectangle

        tokens = self.sample(1, split=split, step=step).inputs[0].numpy().astype(np.uint8)
        figure = new_figure(11, 5)
        try:
            axes, bars = figure.subplots(), _bars(tokens)
        except (ValueError, IndexError, StopIteration):
            raise ValueError(f"{self.folder} holds a {split} sample that is no tree") from None
        for place, (start, stop, depth, operator, value) in enumerate(bars):
            bar = Rectangle((start, -depth), stop - start, -0.9, color=_COLOURS[operator])
            axes.add_patch(bar)
            if (stop - start) * 60 > len(tokens) or place == 0:
                middle = (start + stop) / 2, -depth - 0.45
                axes.annotate(str(value), middle, ha="center", va="center", color="white")
        depth = max((bar[2] for bar in bars), default=0)  # none of a lone digit
        end = int((tokens != 0).sum())
        axes.set(xlim=(0, end), ylim=(-depth - 1, 0), xlabel="position", yticks=[])
        axes.set_ylabel("depth, the root above")
        axes.set_title(
            f"{self.name}: a tree of {end} tokens; each bar is a sub-tree, with its value"
        )
        axes.spines[["top", "right", "left"]].set_visible(False)
        names = [Patch(color=c, label=n) for c, n in zip(_COLOURS, OPERATORS, strict=True)]
        figure.legend(handles=names, loc="outside lower center", ncols=4, frameon=False)
        return figure


@dataclass(frozen=True)
class ListOpsSubTrees(_ListOps):
    """Tag every closing bracket with the value of the sub-tree that it closes.

    In  `[MAX 2 6 [MED [SM 3 1 6 ] 8 3 ] 4 5 ]`
    out ` -   - -  -    -  - - - 0 - - 3 - - 6` (- is ignored).
    """

    length: int = 8192

    name: ClassVar[str] = "listops-subtrees"
    kind: ClassVar[str] = "tagging"
    probes: ClassVar[str] = "hierarchical computation, at every node"
    causal: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("tokens", "values", "positions")

    def spec(self) -> listops.ListOps:
        """Trees of 7000 < length < 8180; another `length` than 8192 scales these limits."""
        if not 64 <= self.length <= 65_536:
            limits = f"must be from 64 to 65536, not {self.length}"
            raise ValueError(f"{self.name}: the length {limits}")
        least, most = (self.length * limit // 8192 for limit in (7000, 8180))
        return listops.subtrees(seed=self.seed, min_length=least, max_length=most)

    @property
    def input_length(self) -> int:
        """The longest tree, padded."""
        return self.length

    @property
    def output_length(self) -> int:
        """Every position; those that close no sub-tree are ignored."""
        return self.length

    def _columns(self, tree: listops.Expression) -> Mapping[str, Any]:
        return {"tokens": tree.tokens, "values": tree.values, "positions": tree.positions}

    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        targets = np.full((len(samples), self.length), IGNORED, dtype=np.int64)
        for row, sample in zip(targets, samples, strict=True):
            row[sample["positions"]] = sample["values"]
        return Batch(self._tokens(samples), torch.from_numpy(targets))


@dataclass(frozen=True)
class ListOps(OneClass, _ListOps):
    """The value of an expression of 500 to 2000 tokens (Long Range Arena): one of ten classes.

    `[MAX 2 6 [MED [SM 3 1 6 ] 8 3 ] 4 5 ]` is 6.
    """

    name: ClassVar[str] = "listops"
    probes: ClassVar[str] = "hierarchical computation"
    causal: ClassVar[bool] = False
    columns: ClassVar[tuple[str, ...]] = ("tokens", "label")

    def spec(self) -> listops.ListOps:
        """Trees of 500 < length < 2000."""
        return listops.lra(seed=self.seed)

    @property
    def input_length(self) -> int:
        """The longest tree, padded."""
        return 2000

    def _columns(self, tree: listops.Expression) -> Mapping[str, Any]:
        return {"tokens": tree.tokens, "label": tree.value}

    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        return Batch(
            self._tokens(samples),
            torch.tensor([int(sample["label"]) for sample in samples]),
            torch.tensor([len(sample["tokens"]) for sample in samples]),
        )


def _bars(tokens: np.ndarray) -> list[tuple[int, int, int, int, int]]:
    """(first position, last + 1, depth, operator, value) of each sub-tree, the root first."""
    values = iter(listops.sub_values(listops.to_text(tokens)))
    stack: list[tuple[int, int]] = []
    bars = []
    for place, token in enumerate(tokens):
        if OPERATOR <= token < CLOSE:
            stack.append((place, int(token) - OPERATOR))
        elif token == CLOSE:
            start, operator = stack.pop()
            bars.append((start, place + 1, len(stack), operator, next(values)))
    return sorted(bars)
