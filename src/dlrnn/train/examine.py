"""`dlrnn eval`: what a run's best checkpoint can do, in numbers and pictures."""

import json
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dlrnn.analysis.listops_errors import error_rates
from dlrnn.common.figures import new_figure
from dlrnn.common.files import write_whole
from dlrnn.tasks import Batch, Task
from dlrnn.train.evaluate import held_out, scores
from dlrnn.train.folder import RunFolder
from dlrnn.train.model import load_best
from dlrnn.train.step import forward
from dlrnn.train.tested import write_test

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 4  # samples in a picture
BROKEN_DOWN = 8  # batches


def examine_run(
    path: str | Path, *, split: str = "test", device: str = "cpu", trust: bool = False
) -> dict[str, Any]:
    """Metrics of a split; ListOps-SubTrees by height and operator; predictions as a picture.

    All of it is written into the run's folder: `eval-SPLIT.json`, `eval-SPLIT.png`, `test.json`.
    """
    path, where = Path(path), torch.device(device)
    model, task, config, step = load_best(path, where, trust=trust)
    result: dict[str, Any] = {
        "run": str(path),
        "split": split,
        "step": step,
        "complete": RunFolder(path).result is not None,
        "metrics": scores(model, task, held_out(task, config, split, where)),
        "breakdown": {},
        "pictures": [],
    }
    if task.name == "listops-subtrees":
        batches = islice(held_out(task, config, split, where), BROKEN_DOWN)
        answers = [(batch, _classes(model, batch)) for batch in batches]
        result["breakdown"] = error_rates(
            sample for batch, called in answers for sample in _samples(batch, called)
        )
    figure = _picture(model, task, task.sample(SHOWN, split=split, device=where))
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
    except OSError as error:  # the numbers are there all the same
        result["not_written"] = f"nothing was written into {path}: {error.strerror or error}"
    return result


def _classes(model: nn.Module, batch: Batch) -> Tensor:
    with torch.inference_mode():
        return forward(model, batch).argmax(-1)


def _samples(batch: Batch, called: Tensor) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    parts = (batch.inputs.cpu().numpy(), batch.targets.cpu().numpy(), called.cpu().numpy())
    return list(zip(*parts, strict=True))


def _picture(model: nn.Module, task: Task, batch: Batch) -> "Figure | None":
    """The truth above, the prediction below; None for what is one answer a sequence."""
    if task.pooled or task.vocabulary is not None:
        return None
    with torch.inference_mode():
        output = forward(model, batch).cpu()
    batch = batch.to("cpu")
    return _images(task, batch, output) if task.kind == "tagging" else _curves(task, batch, output)


def _images(task: Task, batch: Batch, output: Tensor) -> "Figure":
    """And above them the image that the model was given."""
    side = round(task.input_length**0.5)
    rows = {
        f"{task.name}: image": (batch.inputs[..., 0], -1, 1),
        "truth": (batch.targets, 0, 2),
        "prediction": (output.argmax(-1), 0, 2),
    }
    figure = new_figure(3 * SHOWN, 3 * len(rows))
    axes = figure.subplots(len(rows), SHOWN)
    for place, (name, (values, least, most)) in enumerate(rows.items()):
        axes[place, 0].set_title(name, fontsize=9)
        for k in range(SHOWN):
            shown = values[k].view(side, side).numpy()
            axes[place, k].imshow(shown, cmap="gray_r", vmin=least, vmax=most)
            axes[place, k].set(xticks=[], yticks=[])
    return figure


def _curves(task: Task, batch: Batch, output: Tensor) -> "Figure":
    figure = new_figure(3 * SHOWN, 6)
    axes = figure.subplots(2, SHOWN)
    rows = {f"{task.name}: truth": batch.targets, "prediction": output[:, -task.output_length :]}
    for place, (name, values) in enumerate(rows.items()):
        axes[place, 0].set_title(name, fontsize=9)
        for k in range(SHOWN):
            axes[place, k].plot(values[k].numpy(), linewidth=0.8)
            axes[place, k].set_ylim(-1.1, 1.1)
    return figure
