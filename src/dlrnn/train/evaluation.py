"""Metrics of a model on a split, and the evaluation of a run's best checkpoint."""

import json
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dlrnn.analysis.listops_errors import error_rates
from dlrnn.common.figures import new_figure
from dlrnn.common.files import write_whole
from dlrnn.common.untrusted import fit
from dlrnn.tasks import Batch, Task
from dlrnn.train.checkpoint import BEST, read_header
from dlrnn.train.config import RunConfig
from dlrnn.train.model import load_best
from dlrnn.train.prefetch import prefetch, thread_count
from dlrnn.train.run_directory import RunDirectory
from dlrnn.train.step import forward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEST = "test.json"
PICTURE_SAMPLES = 4
BREAKDOWN_BATCHES = 8
_WEIGHT = "weight"


class Share(NamedTuple):
    """Every `of`-th batch from `first` on: the batches that one process evaluates."""

    first: int = 0
    of: int = 1


WHOLE = Share()


def held_out(
    task: Task, config: RunConfig, split: str, device: torch.device, share: Share = WHOLE
) -> Iterator[Batch]:
    """The batches of a split: all of a set on disk, otherwise `eval_batches`."""
    size, count = config.batch_size, task.count(split)
    batches = config.eval_batches if count is None else -(-count // size)

    def batch(step: int) -> Batch:
        here = size if count is None else min(size, count - step * size)
        return task.sample(here, split=split, step=step, device=device, of=size)

    steps = range(share.first, batches, share.of)
    if task.on_device:
        return map(batch, steps)
    return prefetch(batch, steps, thread_count(device, share.of))


def metric_sums(
    model: nn.Module, task: Task, batches: Iterator[Batch], device: torch.device
) -> dict[str, Tensor]:
    """Sums over batches of weight * loss, weight * metric, and weight, on the device."""
    was_training = model.training
    names = (_WEIGHT, "loss", *task.metric_names)
    total = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
    model.eval()
    with torch.no_grad():
        for batch in batches:
            output, weight = forward(model, batch, targets=task.gives_targets), task.weight(batch)
            total[_WEIGHT] = total[_WEIGHT] + weight
            values = {"loss": task.loss(output, batch), **task.metrics(output, batch)}
            for name, value in values.items():
                total[name] = total[name] + weight * value.double()
    model.train(was_training)
    return total


def averaged(task: Task, sums: dict[str, float]) -> dict[str, float]:
    """The averages that the sums of `metric_sums`, added over all processes, give."""
    means = {name: value / sums[_WEIGHT] for name, value in sums.items() if name != _WEIGHT}
    return task.summary(means)


def scores(model: nn.Module, task: Task, batches: Iterator[Batch]) -> dict[str, float]:
    """Loss and metrics, averaged over batches."""
    total = metric_sums(model, task, batches, next(model.parameters()).device)
    return averaged(task, {name: float(value) for name, value in total.items()})


# ---------------------------------------------------------------------------------- a run


def best_step(folder: RunDirectory) -> int | None:
    """The step of the best checkpoint so far; None if there is none."""
    if (result := folder.result) is not None:
        return int(result["best_step"])
    path = folder.path / BEST
    return int(read_header(path)["step"]) if path.exists() else None


def write_test(path: Path, step: int, metrics: dict[str, float]) -> None:
    """Write test.json: the test metrics (fractions) of the best checkpoint, made at this step."""
    content = {"step": step, **metrics}
    write_whole(path / TEST, (json.dumps(content, indent=1) + "\n").encode())


def read_test(folder: RunDirectory) -> dict[str, float]:
    """The metrics in test.json; {} if it is missing or belongs to an older best checkpoint."""
    advice = f"`dlrnn eval {folder.path}` writes it again"
    found = folder.values(TEST, advice) or {}
    try:
        metrics: dict[str, float] = fit(found, dict[str, float], str(folder.path / TEST))
    except ValueError as error:
        raise ValueError(f"{error}: {advice}") from error
    return metrics if metrics and metrics.pop("step", None) == best_step(folder) else {}


def evaluate_run(
    path: str | Path, *, split: str = "test", device: str = "cpu", trust: bool = False
) -> dict[str, Any]:
    """Evaluate the best checkpoint of a run: metrics of a split, and pictures of predictions.

    ListOps-SubTrees also gets error rates by height and operator. The run directory receives
    `eval-SPLIT.json`, `eval-SPLIT.png` and `test.json`.
    """
    path, where = Path(path), torch.device(device)
    model, task, config, step = load_best(path, where, trust=trust)
    result: dict[str, Any] = {
        "run": str(path),
        "split": split,
        "step": step,
        "complete": RunDirectory(path).result is not None,
        "metrics": scores(model, task, held_out(task, config, split, where)),
        "breakdown": {},
        "pictures": [],
    }
    if task.name == "listops-subtrees":
        batches = islice(held_out(task, config, split, where), BREAKDOWN_BATCHES)
        result["breakdown"] = error_rates(
            sample for batch in batches for sample in _predictions(model, batch)
        )
    figure = _picture(model, task, task.sample(PICTURE_SAMPLES, split=split, device=where))
    try:
        if figure is not None:
            picture = path / f"eval-{split}.png"
            content = BytesIO()
            figure.savefig(content, dpi=110)
            write_whole(picture, content.getvalue())
            result["pictures"].append(str(picture))
        write_whole(path / f"eval-{split}.json", (json.dumps(result, indent=1) + "\n").encode())
        if split == "test":
            write_test(path, step, result["metrics"])
    except OSError as error:  # the metrics are still returned
        result["not_written"] = f"nothing was written into {path}: {error.strerror or error}"
    return result


def _predictions(model: nn.Module, batch: Batch) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(tokens, targets, predicted classes) of each sample."""
    with torch.inference_mode():
        predicted = forward(model, batch).argmax(-1)
    parts = (each.cpu().numpy() for each in (batch.inputs, batch.targets, predicted))
    return list(zip(*parts, strict=True))


def _picture(model: nn.Module, task: Task, batch: Batch) -> "Figure | None":
    """Targets above predictions; None for tasks with one answer for each sequence, or tokens."""
    if task.pooled or task.vocabulary is not None:
        return None
    with torch.inference_mode():
        output = forward(model, batch).cpu()
    draw = draw_images if task.kind == "tagging" else draw_curves
    return draw(task, batch.to("cpu"), output)


def draw_images(task: Task, batch: Batch, output: Tensor) -> "Figure":
    """For each sample of a segmentation: the image, the target classes, the predicted classes."""
    side = round(task.input_length**0.5)
    rows = {
        f"{task.name}: image": (batch.inputs[..., 0], -1, 1),
        "truth": (batch.targets, 0, 2),
        "prediction": (output.argmax(-1), 0, 2),
    }
    figure = new_figure(3 * PICTURE_SAMPLES, 3 * len(rows))
    axes = figure.subplots(len(rows), PICTURE_SAMPLES)
    for place, (name, (values, least, most)) in enumerate(rows.items()):
        axes[place, 0].set_title(name, fontsize=9)
        for k in range(PICTURE_SAMPLES):
            shown = values[k].view(side, side).numpy()
            axes[place, k].imshow(shown, cmap="gray_r", vmin=least, vmax=most)
            axes[place, k].set(xticks=[], yticks=[])
    return figure


def draw_curves(task: Task, batch: Batch, output: Tensor) -> "Figure":
    """For each sample of a regression: the targets and the predictions by position."""
    figure = new_figure(3 * PICTURE_SAMPLES, 6)
    axes = figure.subplots(2, PICTURE_SAMPLES)
    rows = {f"{task.name}: truth": batch.targets, "prediction": output[:, -task.output_length :]}
    for place, (name, values) in enumerate(rows.items()):
        axes[place, 0].set_title(name, fontsize=9)
        for k in range(PICTURE_SAMPLES):
            axes[place, k].plot(values[k].numpy(), linewidth=0.8)
            axes[place, k].set_ylim(-1.1, 1.1)
    return figure
