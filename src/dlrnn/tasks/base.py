"""What a task is: it makes batches, gives the sizes of a model, and computes losses and metrics."""

import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from types import UnionType
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dlrnn.tasks.random import SPLITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IGNORED = -1
"""The target of a position that loss and metrics ignore."""
_WHOLE = int | Integral | torch.SymInt
Number = int | float
Kind = Literal["regression", "tagging", "classification", "language"]


class Request(NamedTuple):
    """The arguments of `Task.sample`, checked: the argument of `Task.make_batch`."""

    batch_size: int
    split: str
    step: int | Tensor
    device: torch.device | str
    first: int
    of: int | None


class Batch(NamedTuple):
    """Inputs of a model, and the targets with which `loss` and `metrics` compare its output.

    `inputs` are features [B, T, d_input] or int64 tokens [B, T]. `targets` are numbers
    [B, T_out, d_output], or classes [B, T] (IGNORED where a position has none) or [B]. `lengths`
    [B] is given where sequences are padded and a model must not read the padding.
    """

    inputs: Tensor
    targets: Tensor
    lengths: Tensor | None = None

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same batch on a device; copies from pinned memory to a GPU do not wait."""
        asynchronous = torch.device(device).type == "cuda"
        inputs, targets, lengths = (
            None if part is None else part.to(device, non_blocking=asynchronous) for part in self
        )
        assert inputs is not None
        assert targets is not None
        return Batch(inputs, targets, lengths)


def check_number(
    name: str, value: object, least: Number, most: Number, kind: type | UnionType = int
) -> None:
    """Refuse a value that is not a number of this kind from `least` to `most`."""
    if not isinstance(value, kind) or isinstance(value, bool):
        words = "a number" if isinstance(1.0, kind) else "a whole number"
        raise ValueError(f"{name} must be {words}, not {value!r}")
    if not least <= value <= most:  # type: ignore[operator]
        limits = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{name} must be {limits}, not {value}")


@dataclass(frozen=True)
class Task(ABC):
    """A task for sequence models. Its settings are fields; `seed` decides everything random."""

    seed: int = 0

    name: ClassVar[str]
    probes: ClassVar[str] = ""  # the ability that the task measures
    kind: ClassVar[str]  # one of Kind
    metric: ClassVar[str]  # the main entry of `metrics`, or "loss"
    less_is_better: ClassVar[bool] = False  # of `metric`
    metric_names: ClassVar[tuple[str, ...]]  # the entries of `metrics`
    causal: ClassVar[bool]  # True if the task is meant for models that read from left to right
    pair: ClassVar[bool] = False  # a sample is two sequences, [B, 2, T]
    drawable: ClassVar[bool] = True  # samples can be generated without a data set on disk
    pooled: ClassVar[bool] = False  # one answer for each sequence instead of one for each position
    gives_targets: ClassVar[bool] = False  # the model also gets the targets and returns -log p
    limits: ClassVar[Mapping[str, tuple[Number, Number]]] = {}  # the range of a setting
    on_device: ClassVar[bool] = False  # batches are made there, and `step` may be a tensor

    def __post_init__(self) -> None:
        for setting in fields(self):
            if setting.type in (int, "int"):
                limits = self.limits.get(setting.name, (-math.inf, math.inf))
                name = f"{self.name}: {setting.name}"
                check_number(name, getattr(self, setting.name), *limits)

    @property
    def definition(self) -> str:
        """The task in one or two sentences: the first paragraph of the class's docstring."""
        return " ".join((type(self).__doc__ or "").split("\n\n")[0].split())

    # ---------------------------------------------------------------------------------- sizes

    @property
    def d_input(self) -> int | None:
        """Features of a position; None if inputs are tokens."""
        return None

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens; None if inputs have features."""
        return None

    @property
    @abstractmethod
    def d_output(self) -> int:
        """Numbers to predict, or classes, for each position (for each sequence, if pooled)."""

    @property
    @abstractmethod
    def input_length(self) -> int:
        """T, the positions that a model reads."""

    @property
    def output_length(self) -> int:
        """The number of last positions at which the output is the prediction; 1 if pooled."""
        return 1 if self.pooled else self.input_length

    def digest(self) -> str | None:
        """Return the SHA-256 of the data set on disk; None where samples are generated."""
        return None

    @property
    def generator_version(self) -> int | None:
        """The version of the generator whose samples these are; None where there is only one."""
        return None

    def files(self) -> dict[str, bytes]:
        """Return the files that a model of this task needs, by name: a tokenizer."""
        return {}

    # ---------------------------------------------------------------------------------- batches

    def count(self, split: str) -> int | None:
        """Return the samples of a split; None if every step generates new ones."""
        return None

    def sample(
        self,
        batch_size: int,
        *,
        split: str = "train",
        step: int | Tensor = 0,
        device: torch.device | str = "cpu",
        first: int = 0,
        of: int | None = None,
    ) -> Batch:
        """Return the samples `first .. first + batch_size - 1` of a step's batch of size `of`.

        The result depends on the arguments and the seed alone. `of` is the size of the whole batch
        of which this may be a part; by default this is the whole batch.
        """
        check_number("batch_size", batch_size, 1, math.inf, _WHOLE)
        if split not in SPLITS[:3]:
            raise ValueError(f"split must be train, validation or test, not {split!r}")
        for name, value in (("step", step), ("first", first)):
            if isinstance(value, Tensor):  # its value is not read: that would wait for the GPU
                if value.dim() or value.dtype != torch.int64:
                    raise ValueError(f"{name}, if it is a tensor, must be one number of int64")
            else:
                check_number(name, value, 0, math.inf, _WHOLE)
        return self.make_batch(Request(batch_size, split, step, device, first, of))

    @abstractmethod
    def make_batch(self, request: Request) -> Batch:
        """Return the batch of a request, which is checked; nothing else may decide it."""

    # ---------------------------------------------------------------------------------- scores

    @abstractmethod
    def loss(self, output: Tensor, batch: Batch, totals: Tensor | None = None) -> Tensor:
        """Return the training loss.

        With the `totals` of a whole batch, the losses of its parts add up to the loss of the whole.
        """

    @abstractmethod
    def totals(self, batch: Batch) -> Tensor:
        """Return the divisors of the loss; those of the parts of a batch add up."""

    @abstractmethod
    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the metrics of one batch, to be averaged over batches."""

    def weight(self, batch: Batch) -> int:
        """Return the weight of a batch in that average: by default its number of sequences."""
        return batch.inputs.shape[0]

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Return averages of loss and metrics, with the values that are computed from them."""
        return means

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """Draw one sample."""
        raise ValueError(f"{self.name} draws no picture: its class has no method `preview`")

    def captioned(self, figure: "Figure") -> "Figure":
        """Write the task's name above a picture and its definition below it."""
        width = int(11.5 * figure.get_figwidth())
        caption = textwrap.fill(self.definition, width)
        figure.suptitle(self.name, fontsize=15, fontweight="bold", parse_math=False)
        figure.supxlabel(caption, x=0.02, ha="left", fontsize=11, parse_math=False)
        return figure

    def check_output(self, output: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a model's output if it has this shape: another shape would be broadcast."""
        if output.shape != torch.Size(shape):
            have = list(output.shape)
            raise ValueError(
                f"{self.name}: the output must have the shape {list(shape)}, not {have}"
            )
        return output


@dataclass(frozen=True)
class ClassTask(Task):
    """A task whose every target is one of `d_output` classes."""

    metric: ClassVar[str] = "accuracy"
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy",)

    def loss(self, output: Tensor, batch: Batch, totals: Tensor | None = None) -> Tensor:
        """Cross-entropy."""
        return cross_entropy(self.logits(output, batch), batch.targets, totals)

    def totals(self, batch: Batch) -> Tensor:
        """The number of targets that are not IGNORED."""
        return target_count(batch.targets)

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Accuracy of one batch."""
        return {"accuracy": accuracy(self.logits(output, batch), batch.targets)}

    def logits(self, output: Tensor, batch: Batch) -> Tensor:
        """Return a model's output if it has one number for each class of each target."""
        return self.check_output(output, (*batch.targets.shape, self.d_output))


@dataclass(frozen=True)
class ClassificationTask(ClassTask):
    """A task with one class for each sequence."""

    kind: ClassVar[str] = "classification"
    pooled: ClassVar[bool] = True


# ---------------------------------------------------------------------------------- metrics


def cross_entropy(
    logits: Float[Tensor, "*shape classes"],
    targets: Int[Tensor, "*shape"],
    count: Float[Tensor, "1"] | None = None,
) -> Float[Tensor, ""]:
    """Return the sum of `-log p` over targets that are not IGNORED, divided by their number.

    `count` replaces that number.
    """
    count = target_count(targets) if count is None else count
    flat, total = _at_least_fp32(logits.flatten(0, -2)), count[0].clamp(min=1)
    summed = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return summed / total.to(summed.dtype)


def balanced_cross_entropy(
    logits: Float[Tensor, "*shape classes"],
    targets: Int[Tensor, "*shape"],
    counts: Float[Tensor, " classes"] | None = None,
) -> Float[Tensor, ""]:
    """Return the cross-entropy in which every class has the same weight.

    A target is weighted by the inverse of its class's count in `targets`, or in `counts`.
    """
    counts = class_counts(targets, logits.shape[-1]) if counts is None else counts
    flat = _at_least_fp32(logits.flatten(0, -2))
    weight = (1 / counts.clamp(min=1)).to(flat.dtype)
    how = {"weight": weight, "ignore_index": IGNORED, "reduction": "sum"}
    summed = F.cross_entropy(flat, targets.flatten(), **how)  # type: ignore[arg-type]
    return summed / (counts > 0).sum().clamp(min=1)


def target_count(targets: Int[Tensor, "*shape"]) -> Float[Tensor, "1"]:
    """Return the number of targets that are not IGNORED."""
    return (targets != IGNORED).sum(dtype=torch.float64)[None]


def element_count(targets: Tensor) -> Float[Tensor, "1"]:
    """Return the number of targets where none is ignored."""
    return torch.full((1,), targets.numel(), dtype=torch.float64, device=targets.device)


def class_counts(targets: Int[Tensor, "*shape"], classes: int) -> Float[Tensor, " classes"]:
    """Return the number of targets of each class."""
    every = torch.arange(classes, device=targets.device)
    return (targets.flatten()[:, None] == every).sum(0, dtype=torch.float64)


def _at_least_fp32(logits: Tensor) -> Tensor:
    """Half precision cannot hold sums over many positions."""
    return logits if logits.dtype == torch.float64 else logits.float()


def accuracy(
    logits: Float[Tensor, "*shape classes"], targets: Int[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """Return the share of targets, those IGNORED left out, whose class has the largest logit."""
    counts = targets != IGNORED
    right = (logits.argmax(-1) == targets) & counts
    return right.sum() / counts.sum().clamp(min=1)


def confusion(
    logits: Float[Tensor, "*shape classes"], targets: Int[Tensor, "*shape"]
) -> Int[Tensor, "classes classes"]:
    """Return how often class i (row) was predicted as class j (column)."""
    classes = logits.shape[-1]
    cell = (targets.clamp(min=0) * classes + logits.argmax(-1)).flatten()
    counts = torch.zeros(classes * classes, dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, cell, (targets != IGNORED).long().flatten())
    return counts.view(classes, classes)


def macro_scores(
    logits: Float[Tensor, "*shape classes"], targets: Int[Tensor, "*shape"]
) -> dict[str, Tensor]:
    """Return F1 and accuracy (recall) of each class, averaged over the classes that occur."""
    table = confusion(logits, targets).double()
    hits, real, predicted = table.diagonal(), table.sum(1), table.sum(0)
    seen, present = real + predicted > 0, real > 0
    f1 = torch.where(seen, 2 * hits / (real + predicted).clamp(min=1), 0)
    recall = torch.where(present, hits / real.clamp(min=1), 0)
    return {
        "macro_f1": f1.sum() / seen.sum().clamp(min=1),
        "macro_accuracy": recall.sum() / present.sum().clamp(min=1),
    }


def r2(prediction: Tensor, targets: Tensor) -> Tensor:
    """Return `1 - MSE / variance`, the variance over every element of the batch, at least 1e-5."""
    variance = targets.var(correction=0).clamp(min=1e-5)
    return 1 - F.mse_loss(prediction, targets) / variance
