"""Metrics on held-out batches: computed a batch, averaged over batches."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dlrnn.tasks import Batch, Task
from dlrnn.train.ahead import made_ahead, threads_for
from dlrnn.train.config import RunConfig
from dlrnn.train.step import forward


class Share(NamedTuple):
    """Every `of`-th batch from `first` on: what one of several processes evaluates."""

    first: int = 0
    of: int = 1


WHOLE = Share()
WEIGHT = "weight"


def held_out(
    task: Task, config: RunConfig, split: str, device: torch.device, share: Share = WHOLE
) -> Iterator[Batch]:
    """The batches of a split: all of a set on disk, else `eval_batches`."""
    size, count = config.batch_size, task.count(split)
    batches = config.eval_batches if count is None else -(-count // size)

    def batch(step: int) -> Batch:
        here = size if count is None else min(size, count - step * size)
        return task.sample(here, split=split, step=step, device=device, of=size)

    steps = range(share.first, batches, share.of)
    if task.on_device:
        return map(batch, steps)
    return made_ahead(batch, steps, threads_for(device, share.of))


def evaluate(
    model: nn.Module, task: Task, batches: Iterator[Batch], device: torch.device
) -> dict[str, Tensor]:
    """Weighted sums of loss and metrics over batches, and of the weights, on the device."""
    was_training = model.training
    names = (WEIGHT, "loss", *task.metric_names)
    total = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
    model.eval()
    with torch.no_grad():
        for batch in batches:
            output, weight = forward(model, batch, targets=task.gives_targets), task.weight(batch)
            total[WEIGHT] = total[WEIGHT] + weight
            for name, value in {
                "loss": task.loss(output, batch),
                **task.metrics(output, batch),
            }.items():
                total[name] = total[name] + weight * value.double()
    model.train(was_training)
    return total


def scores(model: nn.Module, task: Task, batches: Iterator[Batch]) -> dict[str, float]:
    """Loss and metrics, averaged over batches."""
    total = evaluate(model, task, batches, next(model.parameters()).device)
    return averaged(task, {name: float(value) for name, value in total.items()})


def averaged(task: Task, sums: dict[str, float]) -> dict[str, float]:
    """What `evaluate` gave, of all processes together, as averages."""
    means = {name: value / sums[WEIGHT] for name, value in sums.items() if name != WEIGHT}
    return task.summary(means)
