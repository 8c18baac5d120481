"""The runs of a recipe: where their run directories are, their status and their metrics."""

import hashlib
import math
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dlrnn.common.untrusted import brief, read_bytes
from dlrnn.paper.numbers import as_in_paper
from dlrnn.paper.recipes import Recipe, Scale, scaled
from dlrnn.paper.records import Split
from dlrnn.train import RunConfig, RunDirectory, from_json, load_best
from dlrnn.train.config import in_json
from dlrnn.train.evaluation import held_out, read_test, scores, write_test
from dlrnn.train.run_directory import CONFIG

DONE, NOT_RUN = "done", "not run"


@dataclass(frozen=True)
class Outcome:
    """The status of one run: "not run", "3100 of 40000 steps", "done", or an error.

    `metrics` are in the paper's units; None until they are known.
    """

    status: str
    metrics: dict[str, float] | None = None
    refused: bool = False
    """Whether a file of the run was refused."""


def run_config(recipe: Recipe, scale: Scale, seed: int) -> RunConfig:
    """The configuration of a recipe at a scale with a seed."""
    return replace(scaled(recipe, scale), seed=seed)


def run_path(recipe: Recipe, out: str | Path, scale: Scale, seed: int) -> Path:
    """The run directory OUT/SCALE/NAME/seed-K."""
    return Path(out) / scale / recipe.name / f"seed-{seed}"


def changed_path(recipe: Recipe, out: str | Path, scale: Scale, config: RunConfig) -> Path:
    """`run_path` for the recipe's own settings, and OUT/.../seed-K-DIGEST for others."""
    path = run_path(recipe, out, scale, config.seed)
    if config == run_config(recipe, scale, config.seed):
        return path
    digest = hashlib.sha256(in_json(config.identity()).encode()).hexdigest()
    return path.with_name(f"{path.name}-{digest[:8]}")


def outcome(recipe: Recipe, out: str | Path, scale: Scale, seed: int) -> Outcome:
    """The outcome of the run with that seed."""
    path = run_path(recipe, out, scale, seed)
    return outcome_in(path, recipe, run_config(recipe, scale, seed))


def outcome_in(path: Path, recipe: Recipe, config: RunConfig) -> Outcome:
    """The outcome of the run of a recipe with these settings in its run directory."""
    if not (path / CONFIG).is_file():
        return Outcome(NOT_RUN)
    try:
        check_folder(path, config)
        return _progress(recipe, RunDirectory.open(path), config)
    except ValueError as error:
        return Outcome(brief(error), refused=True)
    except OSError as error:
        return Outcome(f"{error.filename}: {error.strerror}", refused=True)
    except (KeyError, TypeError, AttributeError):
        return Outcome(f"{path} holds a file that dlrnn did not write", refused=True)


def outcomes(recipe: Recipe, out: str | Path, scale: Scale) -> dict[int, Outcome]:
    """The outcome of every seed that has a run directory."""
    parent = run_path(recipe, out, scale, 0).parent
    names = [re.fullmatch(r"seed-(\d+)", path.name) for path in parent.glob("seed-*")]
    seeds = sorted(int(name[1]) for name in names if name)
    return {seed: outcome(recipe, out, scale, seed) for seed in seeds}


def check_folder(path: Path, expected: RunConfig) -> None:
    """Refuse a run directory whose configuration is not the expected one."""
    found = _parsed(read_bytes(path / CONFIG), str(path / CONFIG))
    difference = _difference(asdict(found), asdict(expected))
    if difference:
        advice = "move it away or choose another --out"
        raise ValueError(f"{path} is not of this recipe: its {difference}; {advice}")


@cache
def _parsed(content: bytes, where: str) -> RunConfig:
    """Parse each configuration once in a process."""
    return from_json(content, where)


def evaluate_best(path: Path, device: str, *, trust: bool = False) -> None:
    """Test the best checkpoint of a complete run, once; regressions are not tested."""
    folder = RunDirectory.open(path)
    if folder.config.make_task().kind == "regression" or read_test(folder):
        return
    where = torch.device(device)
    best = load_best(path, where, trust=trust)
    batches = held_out(best.task, best.config, "test", where)
    write_test(path, best.step, scores(best.model, best.task, batches))


def _progress(recipe: Recipe, folder: RunDirectory, config: RunConfig) -> Outcome:
    records = folder.records()
    if folder.result is None:
        return Outcome(f"{records[-1]['step'] if records else 0} of {config.steps} steps")
    _, found = measured(folder, config)
    if not found:
        return Outcome("trained, not tested")
    return Outcome(DONE, {name: as_in_paper(name, found[name]) for name in recipe.paper})


def measured(
    folder: RunDirectory, config: RunConfig, *, unfinished: bool = False
) -> tuple[Split, dict[str, float]]:
    """The split of a run's result and its metrics, as fractions; {} while there are none.

    The result of a regression, and with `unfinished` of a run that was not tested, is its best
    validation, of other tasks the test of the best checkpoint. `train_loss` is the last recorded
    training loss, if there is one.
    """
    split: Split = "test"
    found = {}
    task = config.make_task()
    if task.kind != "regression":
        found = read_test(folder)
    if not found and (task.kind == "regression" or unfinished):
        split = "validation"
        sign = -1 if task.less_is_better else 1
        known = folder.evaluations(task.metric)
        known = [each for each in known if math.isfinite(each[task.metric])] or known[-1:]
        best = max(known, key=lambda each: sign * each[task.metric], default={})
        found = {name: value for name, value in best.items() if name not in ("step", "split")}
    losses = [each["loss"] for each in folder.records() if each["split"] == "train"]
    return split, found | ({"train_loss": losses[-1]} if found and losses else {})


def _difference(had: dict[str, Any], expected: dict[str, Any], inside: str = "") -> str:
    """The first setting that differs, as text; "" if all are equal."""
    for name in expected | had:
        here, there = had.get(name), expected.get(name)
        if isinstance(here, dict) and isinstance(there, dict):
            found = _difference(here, there, f"{inside}{name}.")
            if found:
                return found
        elif here != there:
            return f"{inside}{name} is {here}, not {there}"
    return ""
