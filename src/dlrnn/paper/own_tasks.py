"""Runs on tasks of users: rows of the paper's tables without a number of the paper."""

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from dlrnn.models import ModelConfig
from dlrnn.paper.nearest import FOLDER, HOW_OFTEN, NearestRecipe, json_of
from dlrnn.paper.recipes import Recipe
from dlrnn.paper.records import FULL, Size
from dlrnn.paper.runs import flat
from dlrnn.tasks import Task
from dlrnn.train import RunConfig
from dlrnn.train.defaults import default_run

TABLE_OF = {
    **{"regression": "table1", "tagging": "table3"},
    **{"classification": "table4", "language": "table5"},
}
"""The table with the tasks of a kind."""


@dataclass(frozen=True)
class OwnTask(NearestRecipe):
    """A run on a user's task, which is its own recipe; it differs from the defaults of `--task`."""

    @property
    def expected(self) -> RunConfig:
        """The run itself."""
        return self.config

    @cached_property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The settings that differ from the defaults: the run's value, the default."""
        usual = default_run(self.config.task.name)
        other = self.config.model.mixer != usual.model.mixer
        if other and isinstance(usual.model, ModelConfig):
            usual = replace(usual, model=replace(usual.model, mixer_options={}))
        there = flat(asdict(usual))
        names = [name for name in self.settings | there if name != "seed"]
        pairs = {name: (self.settings.get(name), there.get(name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def variant(self) -> str:
        """Nothing: the name has the task and the mixer."""
        return ""

    @property
    def size(self) -> Size:
        """The paper has no other size of it."""
        return FULL

    @property
    def differs(self) -> str:
        """The differences from the defaults of `--task`."""
        left_out = {*HOW_OFTEN, FOLDER, "model.mixer", "steps"}
        told = [(name, a) for name, (a, _) in self.changed.items() if name not in left_out]
        return ", ".join(f"{name} {json_of(value)}" for name, value in told)

    @property
    def beginning(self) -> list[str]:
        """The first words of the command."""
        return ["dlrnn", "train", "--task", self.config.task.name]


def own_task(config: RunConfig, task: Task, asked: str | None) -> tuple[str, OwnTask]:
    """The name to record, "table1/my_tasks.Forecast/dlr", and the run as its own recipe."""
    name = asked or f"{TABLE_OF[task.kind]}/{config.task.name}/{config.model.mixer}"
    metrics = dict.fromkeys((task.metric, *task.metric_names), math.nan)  # not in the paper
    itself = Recipe(name, lambda: config, metrics)
    return name, OwnTask(config, flat(asdict(config)), itself, "full")
