"""The recipe that a run is nearest to, how the run differs, and the command that repeats it."""

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from dlrnn.paper.recipes import RECIPES, TABLES, Recipe, Scale, get, scaled
from dlrnn.paper.records import FULL, Size
from dlrnn.train import RunConfig

HOW_OFTEN = {"log_every", "eval_every", "eval_batches", "checkpoint_every"}
"""Settings that change what is recorded, not what is learnt."""

FOLDER = "task.settings.folder"

SIZES = ("d_", "kernel_length", "length", "chunk", "heads")
"""Beginnings of the names of options that change the size of a mixer."""


@dataclass(frozen=True)
class NearestRecipe:
    """The recipe, at a scale, that a run is nearest to, and the settings that differ."""

    recipe: Recipe
    scale: Scale
    changed: dict[str, tuple[Any, Any]]  # the run's value, the recipe's

    @property
    def expected(self) -> RunConfig:
        """The recipe's run at the paper's size or, for a tiny run, at the tiny scale."""
        return scaled(self.recipe, "tiny" if self.scale == "tiny" else "full")

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
        told = {n: pair for n, pair in self.changed.items() if n not in HOW_OFTEN}
        if self.scale == "short":
            short, full = scaled(self.recipe, "short"), self.recipe.config
            for name in ("steps", "warmup"):
                here = told.get(name, (getattr(short, name),))[0]
                told[name] = here, getattr(full, name)
            told = {name: pair for name, pair in told.items() if pair[0] != pair[1]}
        return ", ".join(f"{n} {json_of(a)} ({json_of(b)})" for n, (a, b) in told.items())

    def command(self, config: RunConfig) -> str:
        """The command that trains the run again."""
        words = ["dlrnn", "train", self.recipe.name]
        words += [] if self.scale == "full" else ["--scale", self.scale]
        words += ["--seed", str(config.seed)]
        values = asdict(config)
        known = _flat(values)
        dropped = dict.fromkeys(_options(name) for name in self.changed if name not in known)
        for outer, inner in dropped:  # an option is dropped by giving all the others at once
            words += [f"--{outer}.{inner}", json.dumps(values[outer][inner])]
        for name, (here, _) in self.changed.items():
            if _options(name) not in dropped:
                words += [f"--{name}", json_of(here)]
        return shlex.join(words)


def nearest_recipe(path: Path, config: RunConfig, asked: str | None) -> tuple[str, NearestRecipe]:
    """The name to record and the nearest recipe; `asked` may name none of the recipes."""
    name, named = asked, RECIPES.get("/".join(path.resolve().parts[-4:-1]))
    if name is None and named is not None and named.config.task.name == config.task.name:
        name = named.name
    if asked is not None and asked not in RECIPES:
        table, _, rest = asked.partition("/")
        if table not in TABLES or rest.count("/") != 1:
            get(asked)  # raises, with a suggestion
        names: Iterable[str] = TABLES[table]
    else:
        names = [name] if name else RECIPES
    candidates = [RECIPES[each] for each in names]
    same = [each for each in candidates if each.config.task.name == config.task.name]
    if not same:
        here = f"{path} is a run on {config.task.name}"
        if asked is not None:
            raise ValueError(f"{here}, and {asked} is not")
        raise ValueError(f"{here}, and no recipe has this task: give --recipe table/task/model")
    flat = _flat(asdict(config))
    choices = [
        NearestRecipe(each, scale, _changes(flat, _flat_recipe(each.name, scale)))
        for each in same
        for scale in get_args(Scale)
    ]
    nearest = min(choices, key=lambda one: len(one.changed))
    return name or nearest.recipe.name, nearest


def _options(name: str) -> tuple[str, str]:
    """("model", "mixer_options") of "model.mixer_options.dt_min"."""
    outer, _, rest = name.partition(".")
    return outer, rest.partition(".")[0]


@cache
def _flat_recipe(name: str, scale: Scale) -> dict[str, Any]:
    return _flat(asdict(scaled(get(name), scale)))


def _flat(values: dict[str, Any], inside: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= (
            _flat(value, f"{inside}{name}.")
            if isinstance(value, dict)
            else {f"{inside}{name}": value}
        )
    return found


def _changes(here: dict[str, Any], there: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ; a changed mixer or task inherits no options of the recipe's."""
    replaced = tuple(
        options
        for name, options in (("model.mixer", "model.mixer_options."), ("task.name", "task."))
        if here.get(name) != there.get(name)
    )
    there = {n: v for n, v in there.items() if not (replaced and n.startswith(replaced))} | {
        n: there[n] for n in ("model.mixer", "task.name")
    }
    names = [name for name in here | there if name != "seed"]
    pairs = {name: (here.get(name), there.get(name)) for name in names}
    if all(pairs.get(FOLDER, (None,))):
        del pairs[FOLDER]  # the path of a data set changes nothing
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def json_of(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
