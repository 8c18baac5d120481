"""What a table of the paper consists of: cells, means over seeds, differences."""

from dataclasses import dataclass, field
from statistics import mean
from typing import Literal, NamedTuple

from dlrnn.paper.recipes.recipe import PLACES
from dlrnn.report.records import FULL, Record

OURS = "ours"
LESS_IS_BETTER = {"loss", "train_loss"}
METRICS = {
    "R2": "R²",
    "accuracy": "accuracy, %",
    "macro_f1": "macro F1, %",
    "macro_accuracy": "macro accuracy, %",
    "train_loss": "train loss",
    "loss": "test loss",
}

Verdict = Literal["better", "near", "worse"]


class Difference(NamedTuple):
    """Ours less the paper's, in the paper's units, and what that means; None: nothing."""

    value: float
    verdict: Verdict | None


def tolerance(metric: str) -> float:
    """How far from the paper is near: .03 R2 (or nats), 1.5 points."""
    return 0.03 if metric in PLACES else 1.5


def difference(metric: str, ours: float, paper: float) -> Difference:
    """Near within the tolerance, else better or worse."""
    less = ours - paper
    if abs(less) <= tolerance(metric) + 1e-9:
        return Difference(less, "near")
    better = (less < 0) == (metric in LESS_IS_BETTER)
    return Difference(less, "better" if better else "worse")


def number(metric: str, value: float) -> str:
    """As the paper writes them, one place more for R2: "0.998", "96.8"."""
    return f"{value:z.{PLACES.get(metric, 1)}f}".replace("-", "−")


def signed(metric: str, value: float) -> str:
    """With its sign: "+0.002", "−1.4", "0.000"."""
    places = PLACES.get(metric, 1)
    value = round(value, places)
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{abs(value):.{places}f}"


@dataclass(frozen=True)
class Seeds:
    """One metric of a cell, measured with one or more seeds."""

    metric: str
    records: list[Record]
    lasts: dict[int, float] = field(default_factory=dict)  # by seed: R2 at the end of its curve

    @property
    def counted(self) -> list[Record]:
        """Those that were not cut short, or diverged before that; if all were, all."""
        whole = [each for each in self.records if each.value is None or not each.is_cut]
        return whole or self.records

    @property
    def last(self) -> float | None:
        """The mean of the last evaluations, where the best one counts; None if one is not known."""
        values = [self.lasts[each.seed] for each in self.counted if each.seed in self.lasts]
        return mean(values) if len(values) == len(self.counted) else None

    @property
    def mean(self) -> float | None:
        """None if a run diverged."""
        values = [record.value for record in self.counted if record.value is not None]
        return mean(values) if len(values) == len(self.counted) else None

    @property
    def spread(self) -> float | None:
        """The largest less the smallest, None for fewer than two seeds, or if one diverged."""
        values = [record.value for record in self.counted if record.value is not None]
        return max(values) - min(values) if len(values) == len(self.counted) > 1 else None

    @property
    def size(self) -> str:
        """Of the first that is not "full"."""
        return next((record.size for record in self.counted if record.size != FULL), FULL)

    @property
    def is_comparable(self) -> bool:
        """Every one has the paper's sizes and steps, or stopped when its value was plain."""
        return all(record.is_comparable for record in self.counted)

    def against(self, paper: float | None) -> Difference | None:
        """None where one of the two is missing, or the sizes are others.

        What was not tested has no verdict, nor has what was cut short, unless it has reached the
        paper's number already, and that number is not about 0.
        """
        if paper is None or self.mean is None or self.size != FULL:
            return None
        found = difference(self.metric, self.mean, paper)
        sign = -1 if self.metric in LESS_IS_BETTER else 1
        reached = sign * found.value >= 0 and abs(paper) > tolerance(self.metric)
        untested = any(record.is_untested for record in self.counted)
        longer = any(record.is_longer for record in self.counted)
        judged = self.is_comparable or (reached and not untested and not longer)
        return found if judged else found._replace(verdict=None)


@dataclass
class Cell:
    """One recipe: the paper's numbers, and ours by column and metric."""

    recipe: str
    paper: dict[str, float]
    note: str = ""
    finding: str = ""
    found: dict[str, dict[str, Seeds]] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """Second part of its name."""
        return self.recipe.split("/")[1]

    @property
    def model(self) -> str:
        """Third part of its name."""
        return self.recipe.split("/")[2]

    @property
    def metrics(self) -> list[str]:
        """The paper's, or those that were measured."""
        measured = [metric for each in self.found.values() for metric in each]
        return list(dict.fromkeys([*self.paper, *measured]))

    @property
    def ours(self) -> dict[str, Seeds]:
        """{}: not run."""
        return self.found.get(OURS, {})

    def difference(self, metric: str, column: str = OURS) -> Difference | None:
        """None where one of the two is missing."""
        seeds = self.found.get(column, {}).get(metric)
        return None if seeds is None else seeds.against(self.paper.get(metric))

    def is_good_at_the_end(self, metric: str) -> bool:
        """Near the paper or better by its last evaluation, too, if another one counts."""
        last = self.ours[metric].last if metric in self.ours else None
        paper = self.paper.get(metric)
        if last is None or paper is None:
            return True
        return difference(metric, last, paper).verdict != "worse"

    @property
    def verdict(self) -> Verdict | None:
        """The worst of its metrics; None if nothing can be compared."""
        return self.verdict_of(OURS)

    def verdict_of(self, column: str) -> Verdict | None:
        """The same for another column; None if one of the paper's metrics has none."""
        found = [self.difference(metric, column) for metric in self.paper]
        verdicts = [None if each is None else each.verdict for each in found]
        order: tuple[Verdict | None, ...] = (None, "worse", "near", "better")
        return next((each for each in order if each in verdicts), None)


@dataclass(frozen=True)
class Table:
    """One of the paper's tables: its cells by name, and how they lie in it."""

    name: str
    title: str
    caption: str
    rows: dict[str, str]  # our names, and those to show
    columns: dict[str, str]
    rows_are: Literal["task", "model"]
    cells: dict[str, Cell]
    sources: list[str]  # further columns beside ours

    def at(self, row: str, column: str) -> Cell | None:
        """The cell there, if there is one."""
        parts = (row, column) if self.rows_are == "task" else (column, row)
        return self.cells.get("/".join((self.name, *parts)))

    def title_of(self, part: str) -> str:
        """To show for a task or a model."""
        return self.rows.get(part) or self.columns.get(part) or OTHERS.get(part, part)

    def cell_title(self, cell: Cell) -> str:
        """Of one of its cells: the task and the model."""
        return f"{self.title_of(cell.task)} · {self.title_of(cell.model)}"

    def sources_of(self, column: str) -> list[str]:
        """Further columns beside one of the paper's: those that have a number in it."""
        cells = [cell for row in self.rows if (cell := self.at(row, column))]
        return [each for each in self.sources if any(each in cell.found for cell in cells)]

    @property
    def grid(self) -> list[Cell]:
        """The cells that the paper has a number for, one a place."""
        places = [self.at(row, column) for row in self.rows for column in self.columns]
        return [cell for cell in places if cell is not None and cell.paper]


OTHERS = {
    "dlr-1-works": "DLR, 1 layer, L 4096, rate 4e-5",
    "attention-1-longer": "Attention, 1 layer, L 4096, 160000 steps",
}
"""Recipes that are in no column of the paper."""


class Counts(NamedTuple):
    """Of a table's cells."""

    cells: int
    measured: int
    near: int
    better: int
    worse: int
    worse_at_the_end: int  # by the last evaluation, not the best
    cut: int  # fewer steps than the paper's, or other sizes: not judged
    stopped: int  # early, at 0 or 1


def counts(table: Table) -> Counts:
    """How much of a table there is, and how good it is."""
    verdicts = [cell.verdict for cell in table.grid]
    good = [cell for cell in table.grid if cell.verdict in ("near", "better")]
    fell = sum(not all(map(cell.is_good_at_the_end, cell.metrics)) for cell in good)
    worse = verdicts.count("worse")
    ours = [[r for seeds in cell.ours.values() for r in seeds.counted] for cell in table.grid]
    cut = sum(
        verdict is None and any(r.is_cut or r.size != FULL for r in records)
        for verdict, records in zip(verdicts, ours, strict=True)
    )
    stopped = sum(any(record.stopped for record in records) for records in ours)
    return Counts(
        cells=len(verdicts),
        measured=sum(map(bool, ours)),
        near=verdicts.count("near"),
        better=verdicts.count("better"),
        worse=worse,
        worse_at_the_end=worse + fell,
        cut=cut,
        stopped=stopped,
    )
