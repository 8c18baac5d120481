"""A recipe's line of a table, and a table as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from dlrnn.paper.recipes.outcome import DONE, NOT_RUN, Outcome
from dlrnn.paper.recipes.recipe import PLACES, Recipe
from dlrnn.paper.recipes.scale import Scale


@dataclass(frozen=True)
class Row:
    """A recipe's line: means over the seeds that are done, by metric, in the paper's units.

    `spread` is the largest less the smallest, empty for fewer than two seeds.
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
    """From the outcomes of its seeds."""
    scores = [each.scores for each in found.values() if each.scores is not None]
    values = {name: [one[name] for one in scores] for name in recipe.paper if scores}
    yours = {name: mean(of_seeds) for name, of_seeds in values.items()}
    spread = {name: max(v) - min(v) for name, v in values.items() if len(scores) > 1}
    refused = any(each.refused for each in found.values())
    return Row(recipe.name, recipe.paper, yours, len(scores), spread, _status(found), refused)


def _status(found: Mapping[int, Outcome]) -> str:
    rest = {seed: each.status for seed, each in found.items() if each.status != DONE}
    if not rest:
        return DONE if found else NOT_RUN
    if len(found) == 1:
        return next(iter(rest.values()))
    return "; ".join(f"seed {seed}: {status}" for seed, status in rest.items())


def markdown(table: str, scale: Scale, rows: Sequence[Row]) -> str:
    """All rows; before them, where each has one number, a grid of tasks and models."""
    lines = [
        f"# {table}, {scale}",
        "",
        "R2 and losses as they are, accuracies and F1 in percent. Yours is the mean over the seeds"
        " that are done, the spread their largest less their smallest.",
        "",
    ]
    if scale != "full":
        less = "a tenth of the steps" if scale == "short" else "small models and short inputs"
        lines += [f"{scale.capitalize()} runs have {less}: they show what works, no more.", ""]
    if all(len(row.paper) == 1 for row in rows):
        lines += _grid(rows)
    head = ("recipe", "metric", "paper", "yours", "seeds", "spread", "status")
    return "\n".join(lines + _lines(head, [_cells(row) for row in rows]))


def _grid(rows: Sequence[Row]) -> list[str]:
    tasks, models = (dict.fromkeys(row.recipe.split("/")[k] for row in rows) for k in (1, 2))
    table = rows[0].recipe.split("/")[0]
    cells = {row.recipe: f"{numbers(row.paper)} / {numbers(row.yours) or '-'}" for row in rows}
    body = [(task, *(cells.get(f"{table}/{task}/{m}", "") for m in models)) for task in tasks]
    return _lines(("paper / yours", *models), body)


def _cells(row: Row) -> tuple[str, ...]:
    yours, spread = numbers(row.yours) or "-", numbers(row.spread) or "-"
    status = row.status.replace("|", "\\|")
    name, metric = row.recipe, " / ".join(row.paper)
    return name, metric, numbers(row.paper), yours, str(row.seeds), spread, status


def _lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    every = [head, ["---"] * len(head), *body]
    return [f"| {' | '.join(cells)} |" for cells in every] + [""]


def numbers(values: Mapping[str, float]) -> str:
    """R2 to three places, losses to two, percent to one: "0.998" or "96.8 / 97.7"."""
    shown = (round(v, PLACES.get(name, 1)) + 0.0 for name, v in values.items())
    return " / ".join(f"{v:g}" for v in shown)
