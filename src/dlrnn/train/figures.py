"""What the paper's figures show, from the best checkpoints of runs."""

from itertools import islice
from pathlib import Path

import torch

from dlrnn.analysis.figures import MASK, Breakdown, Images
from dlrnn.analysis.listops_errors import error_rates
from dlrnn.train.checkpoint import Best, load_best
from dlrnn.train.evaluation import predictions
from dlrnn.train.step import forward, held_out


def listops_errors(
    run: str | Path,
    *,
    split: str = "validation",
    batches: int | None = None,
    device: str = "cpu",
    trust: bool = False,
) -> tuple[str, Breakdown]:
    """The mixer of a run, and its errors by height and operator on a split, or on some batches."""
    best = _best(run, "listops-subtrees", device, trust=trust)
    found = held_out(best.task, best.config, split, torch.device(device))
    samples = (each for batch in islice(found, batches) for each in predictions(best.model, batch))
    return best.config.model.mixer, error_rates(samples)


def predicted_masks(
    run: str | Path,
    samples: int = 4,
    *,
    split: str = "validation",
    device: str = "cpu",
    trust: bool = False,
) -> list[Images]:
    """The masks of some images of a split, and those that the best model of a run predicts."""
    best = _best(run, "pathfinder-segmentation", device, trust=trust)
    side = round(best.task.input_length**0.5)
    truth, predicted = [], []
    for k in range(samples):  # one after the other: an image may have 262144 positions
        batch = best.task.sample(1, split=split, device=device, first=k, of=samples)
        with torch.inference_mode():
            classes = forward(best.model, batch).argmax(-1)
        truth.append(batch.targets.view(side, side).cpu())
        predicted.append(classes.view(side, side).cpu())
    title = f"{side} × {side}"
    return [
        Images(f"{name}, {title}", torch.stack(masks).numpy(), MASK)
        for name, masks in (("mask", truth), (f"{best.config.model.mixer}'s prediction", predicted))
    ]


def _best(run: str | Path, task: str, device: str, *, trust: bool) -> Best:
    """The best model of a run on this task; another task raises."""
    best = load_best(run, torch.device(device), trust=trust)
    if best.task.name != task:
        raise ValueError(f"a run on {task} was expected, and {run} is one on {best.task.name}")
    return best
