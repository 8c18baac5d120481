"""What is done with the best model of a run: evaluate it, export it, generate text with it."""

import json
from collections.abc import Iterator
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
from dlrnn.common.untrusted import fit, read_bytes
from dlrnn.models import (
    LanguageConfig,
    LanguageModel,
    causal,
    generate,
    push_to_hub,
    save_pretrained,
)
from dlrnn.models.pretrained import LARGEST_FILE, TOKENIZER
from dlrnn.tasks import Batch, Task
from dlrnn.tasks.atomic.pictures import BLUE, GRAY
from dlrnn.tasks.listops import ListOpsSubTrees
from dlrnn.tasks.pathfinder import PathfinderSegmentation
from dlrnn.tasks.pg19 import end_token, make_tokenizer, tokenizer_errors, vocabulary_of
from dlrnn.train.checkpoint import BEST, load_best, read_header
from dlrnn.train.config import in_json
from dlrnn.train.run_directory import RunDirectory
from dlrnn.train.step import forward, held_out, scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEST = "test.json"
PICTURE_SAMPLES, PICTURE_OUTPUTS, PICTURE_POSITIONS = 4, 4, 128
BREAKDOWN_BATCHES = 8


def best_step(folder: RunDirectory) -> int | None:
    """The step of the best checkpoint so far; None if there is none."""
    if (result := folder.result) is not None:
        return int(result["best_step"])
    path = folder.path / BEST
    return int(read_header(path)["step"]) if path.exists() else None


def write_test(path: Path, step: int, metrics: dict[str, float]) -> None:
    """Write test.json: the test metrics (fractions) of the best checkpoint, made at this step."""
    write_whole(path / TEST, in_json({"step": step, **metrics}).encode())


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
    if isinstance(task, ListOpsSubTrees):
        batches = islice(held_out(task, config, split, where), BREAKDOWN_BATCHES)
        result["breakdown"] = error_rates(
            sample for batch in batches for sample in predictions(model, batch)
        )
    try:
        curves = task.kind == "regression" and not task.pooled
        if curves or isinstance(task, PathfinderSegmentation):
            batch = task.sample(PICTURE_SAMPLES, split=split, device=where)
            with torch.inference_mode():
                output = forward(model, batch).cpu()
            figure = draw(task, batch.to("cpu"), output)
            picture = path / f"eval-{split}.png"
            content = BytesIO()
            figure.savefig(content, dpi=110)
            write_whole(picture, content.getvalue())
            result["pictures"].append(str(picture))
        write_whole(path / f"eval-{split}.json", in_json(result).encode())
        if split == "test":
            write_test(path, step, result["metrics"])
    except OSError as error:  # the metrics are still returned
        result["not_written"] = f"nothing was written into {path}: {error.strerror or error}"
    return result


def predictions(model: nn.Module, batch: Batch) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(tokens, targets, predicted classes) of each sample."""
    with torch.inference_mode():
        predicted = forward(model, batch).argmax(-1)
    parts = (each.cpu().numpy() for each in (batch.inputs, batch.targets, predicted))
    return list(zip(*parts, strict=True))


def draw(task: Task, batch: Batch, output: Tensor) -> "Figure":
    """Predictions beside the truth: images of a segmentation, or curves of a regression."""
    if task.kind == "tagging":
        return _draw_images(task, batch, output.argmax(-1))
    return _draw_curves(task, batch.targets, output[:, -task.output_length :])


def _draw_images(task: Task, batch: Batch, predicted: Tensor) -> "Figure":
    """Each sample's image, truth and prediction in a column."""
    rows = {"image": batch.inputs[..., 0], "truth": batch.targets, "prediction": predicted}
    side = round(task.input_length**0.5)
    figure = new_figure(3 * PICTURE_SAMPLES, 3 * len(rows))
    panels = figure.subplots(len(rows), PICTURE_SAMPLES)
    for line, (name, values) in zip(panels, rows.items(), strict=True):
        line[0].set_title(f"{task.name}: {name}" if name == "image" else name, fontsize=9)
        least, most = (-1, 1) if name == "image" else (0, 2)
        for axes, value in zip(line, values.numpy(), strict=True):
            axes.imshow(value.reshape(side, side), cmap="gray_r", vmin=least, vmax=most)
            axes.set(xticks=[], yticks=[])
    return figure


def _draw_curves(task: Task, targets: Tensor, predicted: Tensor) -> "Figure":
    """Each sample's prediction over the truth in a column, with a row for each of a few outputs.

    The last PICTURE_POSITIONS positions are drawn: more could not be told apart.
    """
    length, width = targets.shape[1:]
    first = max(0, length - PICTURE_POSITIONS)
    place = range(task.input_length - length + first, task.input_length)
    highest = 1.1 * max(1.0, float(targets.abs().max()))
    outputs = sorted({round(k) for k in np.linspace(0, width - 1, PICTURE_OUTPUTS)})
    figure = new_figure(4 * PICTURE_SAMPLES, 1 + 2 * len(outputs))
    panels = figure.subplots(len(outputs), PICTURE_SAMPLES, squeeze=False, sharex=True, sharey=True)
    for line, k in zip(panels, outputs, strict=True):
        for axes, truth, value in zip(line, targets[..., k], predicted[..., k], strict=True):
            axes.plot(place, truth[first:], color=GRAY, linewidth=3, label="truth")
            axes.plot(place, value[first:], color=BLUE, linewidth=1, label="prediction")
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(f"output {k}" if width > 1 else "output")
    for axes in panels[-1]:
        axes.set(xlabel="position", xlim=(place[0], place[-1] + 1), ylim=(-highest, highest))
    panels[0, 0].set_title(task.name, loc="left")
    panels[0, -1].legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2)
    return figure


# ---------------------------------------------------------------------------------- export


def export_run(
    run: str | Path, folder: str | Path, *, push: str | None = None, trust: bool = False
) -> str:
    """Write the best model with its card; returns the folder, or the address on the Hub."""
    model, _, config, _ = load_best(run, torch.device("cpu"), trust=trust, any_samples=True)
    tokenizer = Path(run) / TOKENIZER
    save_pretrained(
        model,
        folder,
        tokenizer=read_bytes(tokenizer, LARGEST_FILE) if tokenizer.is_file() else None,
        results=_results(RunDirectory.open(run)),
        run=json.loads(config.to_json()),
    )
    return str(folder) if push is None else push_to_hub(folder, push)


def _results(folder: RunDirectory) -> dict[str, Any]:
    """The results for the model card: the best validation, and the test if there was one."""
    records = [each for each in folder.records() if each["split"] == "validation"]
    found = {"steps": records[-1]["step"]} if records else {}
    result = folder.result or {}
    names = ("task", "metric", "best", "best_step", "device", "seconds")
    found |= {name: result[name] for name in names if name in result}
    return found | {f"test {name}": value for name, value in read_test(folder).items()}


def generate_text(
    run: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    trust: bool = False,
) -> Iterator[str]:
    """Pieces of the text after a prompt: at most `tokens` of them, or up to the end token.

    Wrong arguments raise in this call, not when the first piece is read. Generation cannot look
    ahead, so experts are chosen by their thresholds, also if training chose them over whole
    sequences (docs/language.md).
    """
    from tokenizers.decoders import DecodeStream

    config = RunDirectory.open(run).config
    if not isinstance(config.model, LanguageConfig):
        raise ValueError(f"{run} is not a language model: it was trained on {config.task.name}")
    path = Path(run) / TOKENIZER
    if not path.is_file():
        raise ValueError(f"{run} has no {TOKENIZER}: its text cannot be read")
    tokenizer = make_tokenizer(read_bytes(path, LARGEST_FILE), path)
    model = load_best(run, torch.device(device), trust=trust).model
    with tokenizer_errors(path):
        prompt_tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not prompt_tokens:
        raise ValueError("the prompt is empty: give at least one word")
    size, known = vocabulary_of(tokenizer), config.model.vocabulary
    if size > known:
        raise ValueError(f"{path} has more tokens than the {known} of the model")
    assert isinstance(model, LanguageModel)
    limits: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    start = torch.tensor(prompt_tokens, device=device)
    generated = generate(causal(model), start, tokens, **limits, vocabulary=size, seed=seed)
    end = end_token(tokenizer, path)
    stream = DecodeStream(ids=prompt_tokens, skip_special_tokens=True)

    def pieces() -> Iterator[str]:
        for token in generated:
            if token == end:
                return
            with tokenizer_errors(path):
                piece = stream.step(tokenizer, token)
            yield piece or ""

    return pieces()
