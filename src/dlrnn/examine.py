"""`dlrnn eval`: what a run's best checkpoint can do, in numbers and pictures."""

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dlrnn._disk import write_whole
from dlrnn._figures import new_figure
from dlrnn.analysis.listops_errors import error_rates
from dlrnn.tasks import Batch, Task
from dlrnn.train.evaluate import held_out, scores
from dlrnn.train.folder import RunFolder
from dlrnn.train.model import load_best
from dlrnn.train.step import forward
from dlrnn.train.tested import best_step, write_test

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 4  # samples in a picture
BROKEN_DOWN = 8  # batches


def examine_run(path: str | Path, *, split: str = "test", device: str = "cpu") -> dict[str, Any]:
    """Metrics of a split; ListOps-SubTrees by height and operator; predictions as a picture.

    All of it is written into the run's folder: `eval-SPLIT.json`, `eval-SPLIT.png`, `test.json`.
    """
    path, where = Path(path), torch.device(device)
    model, task, config = load_best(path, where)
    result: dict[str, Any] = {
        "run": str(path),
        "split": split,
        "step": best_step(RunFolder(path)),
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
            figure.savefig(picture, dpi=110)
            result["pictures"].append(str(picture))
        write_whole(path / f"eval-{split}.json", (json.dumps(result, indent=1) + "\n").encode())
        if split == "test":
            write_test(path, result["metrics"])
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
    figure = new_figure(3 * SHOWN, 6)
    axes = figure.subplots(2, SHOWN)
    for k in range(SHOWN):
        for place, name in enumerate(("truth", "prediction")):
            axes[place, k].set_title(f"{task.name}: {name}" if k == 0 else name, fontsize=9)
        if task.kind == "tagging":
            side = round(task.input_length**0.5)
            pair = (batch.targets[k].cpu(), output[k].argmax(-1))
            for place, mask in enumerate(pair):
                axes[place, k].imshow(mask.view(side, side).numpy(), cmap="gray_r", vmin=0, vmax=2)
                axes[place, k].set(xticks=[], yticks=[])
        else:
            predicted = output[k, -task.output_length :]
            for place, values in enumerate((batch.targets[k].cpu(), predicted)):
                axes[place, k].plot(values.numpy(), linewidth=0.8)
                axes[place, k].set_ylim(-1.1, 1.1)
    return figure
