"""Judging classes: losses and metrics of one batch, without waiting for the device."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dlrnn.tasks.task import IGNORED


def cross_entropy(
    logits: Float[Tensor, "*shape classes"], targets: Int[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """The mean over the positions that count."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def balanced_cross_entropy(
    logits: Float[Tensor, "*shape classes"], targets: Int[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """Each class weighs the same: weighted by the inverse of its count in the batch."""
    classes = logits.shape[-1]
    of_position = F.one_hot(targets.clamp(min=0).flatten(), classes)
    count = (of_position * (targets.flatten() != IGNORED)[:, None]).sum(0)
    weight = 1 / count.clamp(min=1).to(logits.dtype)
    flat = logits.flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), weight=weight, ignore_index=IGNORED)


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
