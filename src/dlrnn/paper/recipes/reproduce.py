"""A table of the paper again: train what is missing, and write the paper's numbers beside ours."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from dlrnn.common.files import write_whole
from dlrnn.common.untrusted import brief
from dlrnn.paper.recipes.catalogue import RECIPES, TABLES, advice
from dlrnn.paper.recipes.outcome import (
    DONE,
    Outcome,
    check_folder,
    outcome,
    outcomes,
    run_config,
    run_path,
    score_best,
)
from dlrnn.paper.recipes.recipe import Recipe
from dlrnn.paper.recipes.rows import Row, make_row, markdown, numbers
from dlrnn.paper.recipes.scale import Scale
from dlrnn.tasks import TASKS
from dlrnn.train import RunConfig, RunDirectory, TaskConfig, train
from dlrnn.train.run_directory import CONFIG


def reproduce(
    table: str,
    *,
    only: str | None = None,
    scale: Scale = "full",
    seeds: Sequence[int] = (0,),
    out: str | Path = "runs",
    device: str = "cpu",
    early_stop: bool = False,
    show: bool = True,
    writer: str = "tensorboard",
) -> list[Row]:
    """Train what has no result yet, go on with what was stopped; rows of what was asked for.

    A run that breaks is reported in its row and does not stop the others. OUT/SCALE/TABLE.md holds
    the whole table and is written anew after each run.
    """
    chosen = select(table, only)
    how = {"device": device, "early_stop": early_stop, "show": show, "writer": writer}
    problems: dict[str, dict[int, Outcome]] = {}
    for number, recipe in enumerate(chosen, start=1):
        for seed in seeds:
            if outcome(recipe, out, scale, seed).status == DONE:
                continue
            path = run_path(recipe, out, scale, seed)
            if show:
                print(f"{number} of {len(chosen)}: {recipe.name}, seed {seed}", flush=True)
            try:
                _complete(run_config(recipe, scale, seed), path, how)
            except Exception as error:  # whatever happened, the other runs are not to blame
                sentence = brief(error) or type(error).__name__
                problems.setdefault(recipe.name, {})[seed] = Outcome(
                    f"broken: {sentence}", refused=isinstance(error, ValueError | OSError)
                )
                if show:
                    print(f"{recipe.name}, seed {seed}: {brief(error)}", flush=True)
            write_table(table, out, scale, problems)
    write_table(table, out, scale, problems)
    return [_row_on_disk(recipe, out, scale, problems) for recipe in chosen]


def select(table: str, only: str | None = None) -> list[Recipe]:
    """Recipes of a table; `only` is a task, a model, task/model or a pattern, `*-fixed/dlr-1`."""
    if table not in TABLES:
        raise ValueError(f"there is no {table!r} to reproduce; there are: {', '.join(TABLES)}")
    if only is None:
        return TABLES[table]
    patterns = [f"{table}/{part}" for part in (only, f"{only}/*", f"*/{only}")]
    chosen = [each for each in TABLES[table] if any(fnmatch(each.name, p) for p in patterns)]
    if not chosen:
        names = [each.name.removeprefix(f"{table}/") for each in TABLES[table]]
        raise ValueError(f"{table} has no recipe {only!r}: {advice(only, names)}")
    return chosen


def status_of(recipe: Recipe, out: str | Path, scale: Scale) -> str:
    """Of all seeds with a folder: "not run", "3100 of 40000 steps", "done", or what is wrong."""
    return make_row(recipe, outcomes(recipe, out, scale)).status


def listing(out: str | Path = "runs", scale: Scale = "full") -> list[dict[str, Any]]:
    """A line for each recipe, to print: the paper, what the runs in `out` gave, status, cost."""
    rows = []
    for recipe in RECIPES.values():
        row = make_row(recipe, outcomes(recipe, out, scale))
        line = {
            "name": recipe.name,
            "metric": " / ".join(recipe.paper),
            "paper": numbers(row.paper),
            "yours": numbers(row.yours) or None,
            "status": row.status,
            "refused": row.refused,
            "minutes": max(1, round(recipe.cost)),
        }
        rows.append(line)
    return rows


def write_table(
    table: str,
    out: str | Path,
    scale: Scale,
    problems: Mapping[str, Mapping[int, Outcome]] | None = None,
) -> Path:
    """OUT/SCALE/TABLE.md, from what lies in the folders (and the problems of this call)."""
    rows = [_row_on_disk(recipe, out, scale, problems or {}) for recipe in TABLES[table]]
    path = Path(out) / scale / f"{table}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, markdown(table, scale, rows).encode())
    return path


def _complete(config: RunConfig, path: Path, how: dict[str, Any]) -> None:
    """Bring a run to its end, whatever of it is there."""
    begun = (path / CONFIG).is_file()
    if begun:
        check_folder(path, config)
    if not begun or RunDirectory.open(path).result is None:
        _require_set(config.task)
        train(path, None if begun else config, **how)
    score_best(path, how["device"])


def _require_set(task: TaskConfig) -> None:
    """Before a folder is made: is the set there that the task reads?"""
    folder = task.settings.get("folder")
    if folder is None or Path(folder).is_dir():
        return
    resolution = task.settings.get("resolution")
    options = f" --resolution {resolution}" if resolution else ""
    command = (
        f"build {task.name}{options}" if TASKS[task.name].drawable else f"import {task.name} PATH"
    )
    raise ValueError(f"there is no {folder}: make it with `dlrnn data {command}`")


def _row_on_disk(
    recipe: Recipe, out: str | Path, scale: Scale, problems: Mapping[str, Mapping[int, Outcome]]
) -> Row:
    return make_row(recipe, {**outcomes(recipe, out, scale), **problems.get(recipe.name, {})})
