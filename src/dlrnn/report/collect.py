"""From the folder of a run to records: what was measured, its curve, and what else lies there."""

import json
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, get_args

from dlrnn import recipes
from dlrnn.recipes import Recipe, Scale, as_in_paper
from dlrnn.recipes.outcome import measured
from dlrnn.report.records import Record
from dlrnn.report.results import Curve, check_breakdown, read_picture, read_snapshots
from dlrnn.train import RunConfig, RunFolder
from dlrnn.train.folder import CONFIG, ENVIRONMENT, TIMING

EVAL, PICTURE, SNAPSHOTS = "eval-test.json", "eval-test.png", "snapshots.jsonl"
POINTS, STEPS_SHOWN = 200, 16  # of a curve; of snapshots
HOW_OFTEN = {"log_every", "eval_every", "eval_batches", "checkpoint_every"}
"""Settings that change what is looked at, not what is learnt."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Collected:
    """Of one run."""

    records: list[Record]
    curve: Curve
    breakdown: dict[str, list[dict[str, Any]]] | None
    picture: bytes | None
    snapshots: list[dict[str, Any]] | None

    @property
    def stem(self) -> str:
        """Of its files."""
        return self.records[0].stem


def collect(
    path: str | Path,
    *,
    recipe: str | None = None,
    variant: str | None = None,
    note: str = "",
    commit: str | None = None,
    unfinished: bool = False,
) -> Collected:
    """Records of a run, of which recipe it is and how it differs being found out.

    A run that is not complete, or not tested yet, is refused unless `unfinished`: then it is what
    its last validation says. `commit` is for a run that does not know its own.
    """
    folder = RunFolder.open(path)
    config, result = folder.config, folder.result
    name, origin = _origin(folder.path, config, recipe)
    lines = folder.records()
    if not lines or (result is None and not unfinished):
        done = lines[-1]["step"] if lines else 0
        raise ValueError(f"{path} is not complete: {done} of {config.steps} steps")
    split, metrics = _scores(folder, config, lines, unfinished=unfinished)
    environment = _json(folder.path / ENVIRONMENT)
    per_step, wall = _seconds(folder.path / TIMING, result)
    if environment.get("git"):
        commit = environment["git"] + (" with changes" if environment.get("changed") else "")
    shared = Record(
        recipe=name,
        variant=origin.variant if variant is None else variant,
        seed=config.seed,
        metric="",
        value=None,
        split=split,
        steps=lines[-1]["step"],
        steps_asked=origin.recipe.config.steps,
        commit=commit,
        hardware=str((result or {}).get("device") or environment.get("device") or "unknown"),
        versions={n: str(environment[n]) for n in ("dlrnn", "python", "torch") if n in environment},
        seconds_per_step=per_step,
        wall_seconds=wall,
        parameters=(result or {}).get("parameters"),
        command=origin.command(config),
        differs=origin.differs,
        note=note,
    )
    records = [
        replace(shared, metric=metric, value=_shown(metric, metrics[metric]))
        for metric in origin.recipe.paper
        if metric in metrics
    ]
    if not records:
        wanted = " / ".join(origin.recipe.paper)
        raise ValueError(f"{path} has no {wanted}, which {name} is judged by")
    examined = _json(folder.path / EVAL)
    return Collected(
        records,
        _curve(lines),
        check_breakdown(examined["breakdown"]) if examined.get("breakdown") else None,
        _picture(folder.path) if config.make_task().kind == "tagging" else None,
        _snapshots(folder.path),
    )


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Folders of runs, at or below the paths."""
    found = []
    for path in map(Path, paths):
        here = sorted(each.parent for each in path.rglob(CONFIG)) if path.is_dir() else []
        if not here:
            raise ValueError(f"there is no run in {path}: no {CONFIG} at or below it")
        found += here
    return list(dict.fromkeys(found))


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """Evenly chosen, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


# ---------------------------------------------------------------------------- which recipe


@dataclass(frozen=True)
class _Origin:
    """The recipe, at a scale, that a run is nearest to, and the settings that are not its."""

    recipe: Recipe
    scale: Scale
    changed: dict[str, tuple[Any, Any]]  # here, there

    @property
    def variant(self) -> str:
        """Empty for the recipe's own task and model."""
        other = [
            name
            for name in self.changed
            if name.startswith(("model.", "task.")) and name != "task.settings.folder"
        ]
        parts: list[str] = [self.scale] if self.scale != "full" else []
        if "model.mixer" in self.changed:
            parts.insert(0, str(self.changed["model.mixer"][0]))
        elif other:
            parts.insert(0, "changed")
        return ", ".join(parts)

    @property
    def differs(self) -> str:
        """From the recipe at its scale: "lr 0.003 (0.0008), steps 5000 (300000)"."""
        told = {n: pair for n, pair in self.changed.items() if n not in HOW_OFTEN}
        return ", ".join(f"{n} {_json_of(a)} ({_json_of(b)})" for n, (a, b) in told.items())

    def command(self, config: RunConfig) -> str:
        """That trains the run again."""
        words = ["dlrnn", "train", self.recipe.name]
        words += [] if self.scale == "full" else ["--scale", self.scale]
        words += ["--seed", str(config.seed)]
        values = asdict(config)
        known = _flat(values)
        gone = dict.fromkeys(_options(name) for name in self.changed if name not in known)
        for outer, inner in gone:  # an option is left out by saying all the others
            words += [f"--{outer}.{inner}", json.dumps(values[outer][inner])]
        for name, (here, _) in self.changed.items():
            if _options(name) not in gone:
                words += [f"--{name}", _json_of(here)]
        return shlex.join(words)


def _origin(path: Path, config: RunConfig, asked: str | None) -> tuple[str, _Origin]:
    """The name to record, and the nearest recipe; a name without a recipe may be asked for."""
    named = "/".join(path.resolve().parts[-4:-1])
    name = asked or (named if named in recipes.RECIPES else None)
    if asked is not None and asked not in recipes.RECIPES:
        table, _, rest = asked.partition("/")
        if table not in recipes.TABLES or rest.count("/") != 1:
            recipes.get(asked)  # says what was meant
        candidates = recipes.TABLES[table]
    else:
        candidates = [recipes.RECIPES[name]] if name else list(recipes.RECIPES.values())
    same = [each for each in candidates if each.config.task.name == config.task.name]
    if not same:
        advice = "say --recipe table/task/model"
        raise ValueError(f"{path} is a run on {config.task.name}, which no recipe is: {advice}")
    flat = _flat(asdict(config))
    choices = [
        _Origin(each, scale, _changes(flat, _flat_recipe(each.name, scale)))
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
    return _flat(asdict(recipes.scaled(recipes.get(name), scale)))


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
    """Another mixer, or task, does not inherit the options of the one that it replaces."""
    gone = tuple(
        options
        for name, options in (("model.mixer", "model.mixer_options."), ("task.name", "task."))
        if here.get(name) != there.get(name)
    )
    there = {n: v for n, v in there.items() if not (gone and n.startswith(gone))} | {
        n: there[n] for n in ("model.mixer", "task.name")
    }
    names = [name for name in here | there if name not in ("seed", "task.settings.seed")]
    pairs = {name: (here.get(name), there.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# ---------------------------------------------------------------------------- what lies there


def _scores(
    folder: RunFolder, config: RunConfig, lines: list[dict[str, Any]], *, unfinished: bool
) -> tuple[str, dict[str, float]]:
    split, found = measured(folder, config)
    examined = _json(folder.path / EVAL).get("metrics")
    if not found and isinstance(examined, dict):
        found = examined
    last = {each["split"]: each for each in lines}
    if not found and unfinished:
        split = "validation"
        found = {n: value for n, value in last.get(split, {}).items() if isinstance(value, float)}
    if not found:
        advice = f"run `dlrnn eval {folder.path}`" if split == "test" else "it has no evaluation"
        raise ValueError(f"{folder.path} was trained and not judged yet: {advice}")
    if "train" in last:
        found = {"train_loss": last["train"]["loss"], **found}
    return split, found


def _shown(metric: str, value: float) -> float | None:
    value = as_in_paper(metric, value)
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _seconds(path: Path, result: dict[str, Any] | None) -> tuple[float | None, float | None]:
    """A step (median, so that evaluations do not count), and all of it, however often resumed."""
    sessions: list[list[dict[str, Any]]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        each = json.loads(line)
        if not sessions or _is_resumed(sessions[-1][-1], each):
            sessions.append([])
        sessions[-1].append(each)
    steps = [
        (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
        for session in sessions
        for before, after in pairwise(session)
        if after["step"] > before["step"]
    ]
    whole = [session[-1]["seconds"] for session in sessions]
    if whole and result is not None:
        whole[-1] = max(whole[-1], result["seconds"])
    return (
        float(f"{median(steps):.4g}") if steps else None,
        float(f"{sum(whole):.5g}") if whole else None,
    )


def _is_resumed(last: dict[str, Any], each: dict[str, Any]) -> bool:
    """Whether the run was begun again between two lines of timing.jsonl."""
    return bool(
        each["from"] != last["from"]
        or each["step"] <= last["step"]
        or each["seconds"] < last["seconds"]
    )


def _curve(lines: list[dict[str, Any]]) -> Curve:
    curve: Curve = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "split", "lr") and isinstance(value, int | float):
                points = curve.setdefault(f"{line['split']} {name}", [])
                if math.isfinite(value):
                    points.append((line["step"], as_in_paper(name, value)))
    return {name: thinned(points, POINTS) for name, points in curve.items()}


def _picture(folder: Path) -> bytes | None:
    path = folder / PICTURE
    return read_picture(path.read_bytes()) if path.exists() else None


def _snapshots(folder: Path) -> list[dict[str, Any]] | None:
    path = folder / SNAPSHOTS
    return thinned(read_snapshots(path.read_bytes()), STEPS_SHOWN) if path.exists() else None


def _json(path: Path) -> dict[str, Any]:
    """{} if it is not there."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _json_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
