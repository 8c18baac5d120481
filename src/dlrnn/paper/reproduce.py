"""Reproduce a table of the paper: train what is missing and compare the numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from dlrnn.common.files import write_whole
from dlrnn.common.untrusted import brief
from dlrnn.paper.comparison import markdown_table, mean_of, spread_of
from dlrnn.paper.numbers import short
from dlrnn.paper.recipes import RECIPES, TABLES, Recipe, Scale, advice
from dlrnn.paper.runs import DONE, NOT_RUN, Outcome, Run, evaluate_best, outcomes, run_of
from dlrnn.tasks import TASKS
from dlrnn.train import RunDirectory, TaskConfig, train


@dataclass(frozen=True)
class Row:
    """The paper's numbers of a recipe and the means over its complete runs, by metric.

    All are in the paper's units. `spread` is the largest value less the smallest; it is empty for
    fewer than two seeds.
    """

    recipe: str
    paper: dict[str, float]
    yours: dict[str, float]
    seeds: int
    spread: dict[str, float]
    status: str
    refused: bool
    """Whether a file of a run was refused."""


def make_row(recipe: Recipe, found: Mapping[int, Outcome]) -> Row:
    """The row of a recipe from the outcomes of its seeds."""
    done = [each.metrics for each in found.values() if each.metrics is not None]
    values = {name: [one[name] for one in done] for name in recipe.paper if done}
    means = {name: mean for name, each in values.items() if (mean := mean_of(each)) is not None}
    spreads = {name: gap for name, each in values.items() if (gap := spread_of(each)) is not None}
    refused = any(each.refused for each in found.values())
    return Row(recipe.name, recipe.paper, means, len(done), spreads, _status(found), refused)


def _status(found: Mapping[int, Outcome]) -> str:
    rest = {seed: each.status for seed, each in found.items() if each.status != DONE}
    if not rest:
        return DONE if found else NOT_RUN
    if len(found) == 1:
        return next(iter(rest.values()))
    return "; ".join(f"seed {seed}: {status}" for seed, status in rest.items())


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
    """Train the runs that have no result, resume stopped ones, and return a row for each recipe.

    A run that fails is reported in its row and does not stop the others. OUT/SCALE/TABLE.md holds
    the whole table and is written again after each run.
    """
    chosen = [RECIPES[name] for name in select(table, only)]
    how = {"device": device, "early_stop": early_stop, "show": show, "writer": writer}
    problems: dict[str, dict[int, Outcome]] = {}

    def row(recipe: Recipe) -> Row:
        found = outcomes(recipe, out, scale) | problems.get(recipe.name, {})
        return make_row(recipe, found)

    def write_table() -> None:
        path = Path(out) / scale / f"{table}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row(RECIPES[name]) for name in TABLES[table]]
        write_whole(path, _markdown(table, scale, rows).encode())

    for number, recipe in enumerate(chosen, start=1):
        for run in (run_of(recipe, out, scale, seed) for seed in seeds):
            if run.outcome().status == DONE:
                continue
            if show:
                print(f"{number} of {len(chosen)}: {run.name}", flush=True)
            try:
                _complete(run, how)
            except Exception as error:  # the other runs go on
                said = f"broken: {brief(error) or type(error).__name__}"
                problem = Outcome(said, refused=isinstance(error, ValueError | OSError))
                problems.setdefault(recipe.name, {})[run.config.seed] = problem
                if show:
                    print(f"{run.name}: {brief(error)}", flush=True)
            write_table()
    write_table()
    return [row(recipe) for recipe in chosen]


def select(table: str, only: str | None = None) -> Sequence[str]:
    """Names of a table's recipes; `only` is a task, a model, task/model or a pattern."""
    if table not in TABLES:
        raise ValueError(f"there is no {table!r} to reproduce; there are: {', '.join(TABLES)}")
    if only is None:
        return TABLES[table]
    patterns = [f"{table}/{part}" for part in (only, f"{only}/*", f"*/{only}")]
    chosen = [name for name in TABLES[table] if any(fnmatch(name, p) for p in patterns)]
    if not chosen:
        names = [name.removeprefix(f"{table}/") for name in TABLES[table]]
        raise ValueError(f"{table} has no recipe {only!r}: {advice(only, names)}")
    return chosen


def listing(
    out: str | Path = "runs", scale: Scale = "full", asked: Iterable[Recipe] | None = None
) -> list[dict[str, Any]]:
    """A line for each recipe: the paper's number, that of the runs in `out`, status and cost.

    `asked` are the recipes, by default all. The cost is of the paper's sizes: for "full" only.
    """
    rows = []
    for recipe in RECIPES.values() if asked is None else asked:
        row = make_row(recipe, outcomes(recipe, out, scale))
        line = {
            "name": recipe.name,
            "metric": " / ".join(recipe.paper),
            "paper": short(row.paper),
            "yours": short(row.yours) or None,
            "status": row.status,
            "refused": row.refused,
        }
        rows.append(line | ({"minutes": max(1, round(recipe.cost))} if scale == "full" else {}))
    return rows


def _complete(run: Run, how: dict[str, Any]) -> None:
    """Train or resume a run until it is complete, and test it."""
    if run.begun:
        run.check()
    if not run.begun or RunDirectory.open(run.path).result is None:
        _require_data(run.config.task)
        train(run.path, None if run.begun else run.config, **how)
    evaluate_best(run.path, how["device"])


def _require_data(task: TaskConfig) -> None:
    """Refuse a task whose data set is missing, before a run directory is made."""
    folder = task.settings.get("folder")
    if folder is None or Path(folder).is_dir():
        return
    resolution = task.settings.get("resolution")
    options = f" --resolution {resolution}" if resolution else ""
    command = (
        f"build {task.name}{options}" if TASKS[task.name].drawable else f"import {task.name} PATH"
    )
    raise ValueError(f"there is no {folder}: make it with `dlrnn data {command}`")


def _markdown(table: str, scale: Scale, rows: Sequence[Row]) -> str:
    """All rows; before them, if each has one number, a grid of tasks and models."""
    lines = [
        f"# {table}, {scale}",
        "",
        "R2 and losses as they are, accuracies and F1 in percent. Yours is the mean over the"
        " complete seeds, the spread their largest value less their smallest.",
        "",
    ]
    if scale != "full":
        less = "a tenth of the steps" if scale == "short" else "small models and short inputs"
        told = f"{scale.capitalize()} runs have {less}: they check that the code works, no more."
        lines += [told, ""]
    if all(len(row.paper) == 1 for row in rows):
        lines += [_grid(rows)]
    head = ("recipe", "metric", "paper", "yours", "seeds", "spread", "status")
    return "\n".join([*lines, markdown_table(head, [_line(row) for row in rows])])


def _grid(rows: Sequence[Row]) -> str:
    tasks, models = (dict.fromkeys(row.recipe.split("/")[k] for row in rows) for k in (1, 2))
    table = rows[0].recipe.split("/")[0]
    numbers = {row.recipe: f"{short(row.paper)} / {short(row.yours) or '-'}" for row in rows}
    body = [(task, *(numbers.get(f"{table}/{task}/{m}", "") for m in models)) for task in tasks]
    return markdown_table(("paper / yours", *models), body)


def _line(row: Row) -> tuple[str, ...]:
    yours, spread = short(row.yours) or "-", short(row.spread) or "-"
    metrics = " / ".join(row.paper)
    return row.recipe, metrics, short(row.paper), yours, str(row.seeds), spread, row.status
