"""The recipe that a run is nearest to, how the run differs, and the command that repeats it."""

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from dlrnn.paper.recipes import RECIPES, TABLES, Recipe, Scale, get, scaled
from dlrnn.paper.records import FULL, Size
from dlrnn.paper.runs import flat
from dlrnn.train import RunConfig

HOW_OFTEN = {"log_every", "eval_every", "eval_batches", "checkpoint_every"}
"""Settings that change what is recorded, not what is learnt."""

FOLDER = "task.settings.folder"

SIZES = ("d_", "kernel_length", "length", "chunk", "heads")
"""Beginnings of the names of options that change the size of a mixer."""


@dataclass(frozen=True)
class NearestRecipe:
    """The recipe, at a scale, that a run is nearest to."""

    config: RunConfig  # of the run
    settings: dict[str, Any]  # the same, flat
    recipe: Recipe
    scale: Scale

    @property
    def expected(self) -> RunConfig:
        """The recipe's run at the paper's size or, for a tiny run, at the tiny scale."""
        return scaled(self.recipe, "tiny" if self.scale == "tiny" else "full")

    @cached_property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The settings that differ from the recipe at this scale: the run's value, the recipe's."""
        return _changes(self.settings, scaled(self.recipe, self.scale))

    @property
    def variant(self) -> str:
        """What differs in the task and the model; "" if nothing does."""
        mixer = [str(here) for name, (here, _) in self.changed.items() if name == "model.mixer"]
        other = ["changed"] if self._other and (self.size == "changed" or not mixer) else []
        return ", ".join((*mixer, *other, *(["tiny"] if self.scale == "tiny" else [])))

    @property
    def size(self) -> Size:
        """The size in comparison with the paper's: "full", "tiny" or "changed"."""
        if self.scale == "tiny":
            return "tiny"
        mixers = "model.mixer_options."
        changed = any(
            "model.mixer" not in self.changed and name.removeprefix(mixers).startswith(SIZES)
            if name.startswith(mixers)
            else name != "model.mixer"
            for name in self._other
        )
        return "changed" if changed else FULL

    @property
    def _other(self) -> list[str]:
        """Names of the settings of model and task that differ."""
        parts = [name for name in self.changed if name.startswith(("model.", "task."))]
        return [name for name in parts if name != FOLDER]

    @property
    def differs(self) -> str:
        """The differences from the recipe: "lr 0.003 (0.0008), steps 5000 (300000)"."""
        pairs = _changes(self.settings, self.expected).items()
        told = [(name, *pair) for name, pair in pairs if name not in HOW_OFTEN]
        return ", ".join(f"{name} {json_of(a)} ({json_of(b)})" for name, a, b in told)

    @property
    def beginning(self) -> list[str]:
        """The first words of the command."""
        scale = [] if self.scale == "full" else ["--scale", self.scale]
        return ["dlrnn", "train", self.recipe.name, *scale]

    @property
    def command(self) -> str:
        """The command that trains the run again."""
        words = [*self.beginning, "--seed", str(self.config.seed)]
        unset = (name for name in self.changed if name not in self.settings)
        dropped = dict.fromkeys(map(_options, unset))
        for outer, inner in dropped:  # an option is dropped by giving all the others at once
            words += [f"--{outer}.{inner}", json.dumps(getattr(getattr(self.config, outer), inner))]
        for name, (here, _) in self.changed.items():
            if _options(name) not in dropped:
                words += [f"--{name}", json_of(here)]
        return shlex.join(words)


def nearest_recipe(path: Path, config: RunConfig, asked: str | None) -> tuple[str, NearestRecipe]:
    """The name to record and the nearest recipe; `asked` may name none of the recipes."""
    if asked is None:
        named = RECIPES.get("/".join(path.resolve().parts[-4:-1]))
        if named is not None and named.config.task.name == config.task.name:
            asked = named.name
    names: Iterable[str] = RECIPES if asked is None else [asked]
    if asked is not None and asked not in RECIPES:
        table, _, rest = asked.partition("/")
        if table not in TABLES or rest.count("/") != 1:
            get(asked)  # raises, with a suggestion
        names = TABLES[table]
    same = [name for name in names if RECIPES[name].config.task.name == config.task.name]
    if not same:
        other = "no recipe has this task: give --recipe table/task/model"
        other = other if asked is None else f"{asked} is not"
        raise ValueError(f"{path} is a run on {config.task.name}, and {other}")
    scales: tuple[Scale, ...] = get_args(Scale)
    settings = flat(asdict(config))
    choices = [
        NearestRecipe(config, settings, RECIPES[name], scale) for name in same for scale in scales
    ]
    nearest = min(choices, key=lambda one: len(one.changed))
    return asked or nearest.recipe.name, nearest


def _options(name: str) -> tuple[str, str]:
    """("model", "mixer_options") of "model.mixer_options.dt_min"."""
    outer, _, rest = name.partition(".")
    return outer, rest.partition(".")[0]


def _changes(here: dict[str, Any], recipe: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that differ; a changed mixer or task inherits no options of the recipe's."""
    there = flat(asdict(recipe))
    for name, options in (("model.mixer", "model.mixer_options."), ("task.name", "task.settings.")):
        if here.get(name) != there[name]:
            there = {n: value for n, value in there.items() if not n.startswith(options)}
    pairs = {name: (here.get(name), there.get(name)) for name in here | there if name != "seed"}
    if all(pairs.get(FOLDER, (None,))):
        del pairs[FOLDER]  # the path of a data set changes nothing
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def json_of(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
