"""Judging classes: losses and metrics of one batch, without waiting for the device."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dlrnn.tasks.task import IGNORED, Batch, wrong_output


def cross_entropy(
    logits: Float[Tensor, "*shape classes"],
    targets: Int[Tensor, "*shape"],
    count: Float[Tensor, "1"] | None = None,
) -> Float[Tensor, ""]:
    """The sum over the positions that count, divided by their number, or by `count`."""
    count = counted(targets) if count is None else count
    flat, total = _full(logits.flatten(0, -2)), count[0].clamp(min=1)
    summed = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return summed / total.to(summed.dtype)


def balanced_cross_entropy(
    logits: Float[Tensor, "*shape classes"],
    targets: Int[Tensor, "*shape"],
    counts: Float[Tensor, " classes"] | None = None,
) -> Float[Tensor, ""]:
    """Each class weighs the same: weighted by the inverse of its count here, or in `counts`."""
    counts = class_counts(targets, logits.shape[-1]) if counts is None else counts
    flat = _full(logits.flatten(0, -2))
    weight = (1 / counts.clamp(min=1)).to(flat.dtype)
    how = {"weight": weight, "ignore_index": IGNORED, "reduction": "sum"}
    summed = F.cross_entropy(flat, targets.flatten(), **how)  # type: ignore[arg-type]
    return summed / (counts > 0).sum().clamp(min=1)


def counted(targets: Int[Tensor, "*shape"]) -> Float[Tensor, "1"]:
    """How many positions count."""
    return (targets != IGNORED).sum(dtype=torch.float64)[None]


def class_counts(targets: Int[Tensor, "*shape"], classes: int) -> Float[Tensor, " classes"]:
    """How often each class is asked for."""
    every = torch.arange(classes, device=targets.device)
    return (targets.flatten()[:, None] == every).sum(0, dtype=torch.float64)


def _full(logits: Tensor) -> Tensor:
    """At least fp32: sums over many positions do not fit into half precision."""
    return logits if logits.dtype == torch.float64 else logits.float()


def accuracy(
    logits: Float[Tensor, "*shape classes"], targets: Int[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """The share of the positions that count whose most likely class is the right one."""
    counts = targets != IGNORED
    right = (logits.argmax(-1) == targets) & counts
    return right.sum() / counts.sum().clamp(min=1)


def confusion(
    logits: Float[Tensor, "*shape classes"], targets: Int[Tensor, "*shape"]
) -> Int[Tensor, "classes classes"]:
    """How often class i (row) was called j (column)."""
    classes = logits.shape[-1]
    cell = (targets.clamp(min=0) * classes + logits.argmax(-1)).flatten()
    counts = torch.zeros(classes * classes, dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, cell, (targets != IGNORED).long().flatten())
    return counts.view(classes, classes)


def macro_scores(
    logits: Float[Tensor, "*shape classes"], targets: Int[Tensor, "*shape"]
) -> dict[str, Tensor]:
    """F1 and accuracy (recall) of each class, averaged over the classes that are there."""
    table = confusion(logits, targets).double()
    hits, real, called = table.diagonal(), table.sum(1), table.sum(0)
    seen, there = real + called > 0, real > 0
    f1 = torch.where(seen, 2 * hits / (real + called).clamp(min=1), 0)
    recall = torch.where(there, hits / real.clamp(min=1), 0)
    return {
        "macro_f1": f1.sum() / seen.sum().clamp(min=1),
        "macro_accuracy": recall.sum() / there.sum().clamp(min=1),
    }


def logits_of(task: Any, output: Tensor, batch: Batch) -> Tensor:
    """A model's output, if it has a number for each class of each answer."""
    shape = (*batch.targets.shape, task.d_output)
    if output.shape != shape:
        raise wrong_output(task.name, output, shape)
    return output


class Classes:
    """For a task, before its base class: every answer is one of `d_output` classes."""

    metric: ClassVar[str] = "accuracy"
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy",)

    def loss(self, output: Tensor, batch: Batch, totals: Tensor | None = None) -> Tensor:
        """Cross-entropy."""
        return cross_entropy(logits_of(self, output, batch), batch.targets, totals)

    def totals(self, batch: Batch) -> Tensor:
        """Answers that count."""
        return counted(batch.targets)

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Accuracy of one batch; average over batches."""
        return {"accuracy": accuracy(logits_of(self, output, batch), batch.targets)}


class OneClass(Classes):
    """And there is one answer a sequence."""

    kind: ClassVar[str] = "classification"
    pooled: ClassVar[bool] = True

    @property
    def output_length(self) -> int:
        """One answer."""
        return 1
