"""The runs of a recipe: where their run directories are, their status and their metrics."""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dlrnn.common.untrusted import brief, read_bytes
from dlrnn.paper.numbers import as_in_paper
from dlrnn.paper.recipes import Recipe, Scale, scaled
from dlrnn.paper.records import Split
from dlrnn.tasks import Task
from dlrnn.train import RunConfig, RunDirectory, from_json, load_best, with_overrides
from dlrnn.train.checkpoint import trusted_task
from dlrnn.train.config import in_json
from dlrnn.train.evaluation import read_test, write_test
from dlrnn.train.run_directory import CONFIG
from dlrnn.train.step import held_out, scores

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


class Run(NamedTuple):
    """A run of a recipe: its configuration and its run directory."""

    recipe: Recipe
    config: RunConfig
    path: Path

    @property
    def name(self) -> str:
        """The recipe and the seed, for messages."""
        return f"{self.recipe.name}, seed {self.config.seed}"

    @property
    def begun(self) -> bool:
        """Whether it has a run directory."""
        return (self.path / CONFIG).is_file()

    def check(self) -> None:
        """Refuse a run directory whose configuration is not that of this run."""
        where = self.path / CONFIG
        found = flat(asdict(_parsed(read_bytes(where), str(where))))
        expected = flat(asdict(self.config))
        for name in expected | found:
            here, there = found.get(name), expected.get(name)
            if here != there:
                difference = f"its {name} is {here}, not {there}"
                advice = "move it away or choose another --out"
                raise ValueError(f"{self.path} is not of this recipe: {difference}; {advice}")

    def outcome(self) -> Outcome:
        """The outcome of the run in its run directory."""
        if not self.begun:
            return Outcome(NOT_RUN)
        try:
            self.check()
            return self._progress(RunDirectory.open(self.path))
        except ValueError as error:
            return Outcome(brief(error), refused=True)
        except OSError as error:
            return Outcome(f"{error.filename}: {error.strerror}", refused=True)
        except (KeyError, TypeError, AttributeError):
            said = f"{self.path} holds a file that dlrnn did not write"
            return Outcome(said, refused=True)

    def _progress(self, folder: RunDirectory) -> Outcome:
        if folder.result is None:
            records = folder.records()
            return Outcome(f"{records[-1]['step'] if records else 0} of {self.config.steps} steps")
        _, found = measured(folder, self.config.make_task())  # the user named it for these runs
        if not found:
            return Outcome("trained, not tested")
        known = [name for name in self.recipe.paper if name in found] or list(found)
        return Outcome(DONE, {name: as_in_paper(name, found[name]) for name in known})


def run_of(
    recipe: Recipe, out: str | Path, scale: Scale, seed: int = 0, overrides: Sequence[str] = ()
) -> Run:
    """The run of a recipe at a scale with a seed, and with other settings (`with_overrides`)."""
    usual = replace(scaled(recipe, scale), seed=seed)
    config = with_overrides(usual, overrides) if overrides else usual
    path = _folder(recipe, out, scale) / run_name(config, usual)
    return Run(recipe, config, path)


def changed_path(recipe: Recipe, out: str | Path, scale: Scale, config: RunConfig) -> Path:
    """OUT/SCALE/NAME/seed-K for the recipe's own settings, OUT/.../seed-K-DIGEST for others."""
    return _folder(recipe, out, scale) / run_name(config, scaled(recipe, scale))


def _folder(recipe: Recipe, out: str | Path, scale: Scale) -> Path:
    """The folder of the runs of a recipe."""
    return Path(out) / scale / recipe.name


def run_name(config: RunConfig, usual: RunConfig) -> str:
    """`seed-K` for the usual settings, `seed-K-DIGEST` for others."""
    if config == replace(usual, seed=config.seed):
        return f"seed-{config.seed}"
    digest = hashlib.sha256(in_json(config.identity()).encode()).hexdigest()
    return f"seed-{config.seed}-{digest[:8]}"


def outcomes(recipe: Recipe, out: str | Path, scale: Scale) -> dict[int, Outcome]:
    """The outcome of every seed that has a run directory."""
    paths = _folder(recipe, out, scale).glob("seed-*")
    names = [re.fullmatch(r"seed-(\d+)", path.name) for path in paths]
    seeds = sorted(int(name[1]) for name in names if name)
    return {seed: run_of(recipe, out, scale, seed).outcome() for seed in seeds}


@cache
def _parsed(content: bytes, where: str) -> RunConfig:
    """Parse each configuration once in a process."""
    return from_json(content, where)


def flat(values: dict[str, Any], inside: str = "") -> dict[str, Any]:
    """The values of nested dictionaries by their whole names: "model.mixer_options.d_state"."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{inside}{name}.")
        else:
            found[f"{inside}{name}"] = value
    return found


def evaluate_best(path: Path, device: str, *, trust: bool = False) -> None:
    """Test the best checkpoint of a complete run, once; regressions are not tested."""
    folder = RunDirectory.open(path)
    task = trusted_task(folder.config, folder.path / CONFIG, trust=trust)
    if task.kind == "regression" or read_test(folder):
        return
    where = torch.device(device)
    best = load_best(path, where, trust=trust)
    batches = held_out(best.task, best.config, "test", where)
    write_test(path, best.step, scores(best.model, best.task, batches))


def measured(
    folder: RunDirectory, task: Task, *, unfinished: bool = False
) -> tuple[Split, dict[str, float]]:
    """The split of a run's result and its metrics, as fractions; {} while there are none.

    The result of a regression is its best validation, of other tasks the test of the best
    checkpoint or, with `unfinished`, the best validation of a run that was not tested.
    `train_loss` is the last recorded training loss, if there is one.
    """
    split: Split = "test"
    found = {} if task.kind == "regression" else read_test(folder)
    if not found and (task.kind == "regression" or unfinished):
        split, sign = "validation", -1 if task.less_is_better else 1
        known = folder.evaluations(task.metric)
        known = [each for each in known if math.isfinite(each[task.metric])] or known[-1:]
        best = max(known, key=lambda each: sign * each[task.metric], default={})
        found = {name: value for name, value in best.items() if name not in ("step", "split")}
    losses = [each["loss"] for each in folder.records() if each["split"] == "train"]
    return split, found | ({"train_loss": losses[-1]} if found and losses else {})
