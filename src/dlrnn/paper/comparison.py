"""The comparison of measured numbers with the paper's: means over seeds, differences, verdicts."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Literal, NamedTuple

from dlrnn.paper.numbers import LESS_IS_BETTER, PLACES, number
from dlrnn.paper.recipes import RECIPES
from dlrnn.paper.records import FULL, Record, Size
from dlrnn.paper.results import Curve

OURS = "ours"
SIGNS = {"better": "▲", "near": "≈", "worse": "▼", "apart": "≠"}
NOT_RUN, DIVERGED = "not run", "diverged"
SCHEDULE = {"lr", "kernel_lr", "warmup", "schedule", "steps"}
"""The settings of a learning rate schedule."""

Verdict = Literal["better", "near", "worse", "apart"]
"""`apart`: the mean over seeds is near the paper's number, and no seed is."""


class Difference(NamedTuple):
    """Our number less the paper's, in the paper's units, and the verdict, if there is one."""

    value: float
    verdict: Verdict | None


def tolerance(metric: str) -> float:
    """The largest difference that counts as near: .03 for R2 and losses, 1.5 percent points."""
    return 0.03 if metric in PLACES else 1.5


def difference(metric: str, ours: float, paper: float) -> Difference:
    """The difference: near within the tolerance, else better or worse."""
    less = ours - paper
    if abs(less) <= tolerance(metric) + 1e-9:
        return Difference(less, "near")
    better = (less < 0) == (metric in LESS_IS_BETTER)
    return Difference(less, "better" if better else "worse")


def has_other_schedule(record: Record) -> bool:
    """Whether a run has another learning rate schedule than its recipe, which has a warm-up."""
    recipe = RECIPES.get(record.recipe)
    changed = SCHEDULE.intersection(re.findall(r"(?:^|, )([\w.]+) ", record.differs))
    return bool(changed) and recipe is not None and recipe.config.warmup > 0


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean; None if there is no value, or one is None, as of a run that diverged."""
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


def spread_of(values: Sequence[float | None]) -> float | None:
    """The largest less the smallest; None for fewer than two values, or if one is None."""
    known = [value for value in values if value is not None]
    return max(known) - min(known) if len(known) == len(values) > 1 else None


@dataclass(frozen=True)
class Seeds:
    """One metric of a table cell, measured with one or more seeds."""

    metric: str
    records: list[Record] = field(default_factory=list)  # by seed
    curves: dict[int, Curve] = field(default_factory=dict)  # of each seed, {} if it is missing

    @property
    def counted(self) -> list[Record]:
        """The records of complete or diverged runs; if there are none, all records."""
        whole = [each for each in self.records if each.value is None or not each.is_cut]
        return whole or self.records

    @property
    def last(self) -> float | None:
        """The mean of the last R2, where the best one counts; None if one is not known."""
        return mean_of([self._last(record) for record in self.counted])

    def _last(self, record: Record) -> float | None:
        """R2 at the end of a curve that reaches the last step. Curves leave NaN out."""
        curve = self.curves.get(record.seed, {}).get("validation R2")
        if self.metric != "R2" or not curve or curve[-1][0] != record.steps:
            return None
        return curve[-1][1]

    @property
    def mean(self) -> float | None:
        """The mean over seeds; None if a run diverged."""
        return mean_of([record.value for record in self.counted])

    @property
    def spread(self) -> float | None:
        """The largest value less the smallest; None for fewer than two, or if one diverged."""
        return spread_of([record.value for record in self.counted])

    @property
    def size(self) -> Size:
        """The first size that is not "full"."""
        return next((record.size for record in self.counted if record.size != FULL), FULL)

    @property
    def is_comparable(self) -> bool:
        """Whether every run has the paper's sizes and steps, or stopped early."""
        return all(record.is_comparable for record in self.counted)

    def against(self, paper: float | None) -> Difference | None:
        """The difference from the paper; None if a number is missing, or the sizes differ.

        Runs that were not tested, or have another learning rate schedule, have no verdict. Runs
        with fewer steps have one only if they have reached the paper's number and that number is
        not near 0. Where the paper's run diverged, one that diverges is near.
        """
        diverged = paper == math.inf and any(each.value is None for each in self.counted)
        if paper is None or self.size != FULL or (self.mean is None and not diverged):
            return None
        if diverged or self.mean is None:
            return Difference(0.0, "near")
        found = difference(self.metric, self.mean, paper)
        if found.verdict == "near" and not self._is_one_near(paper):
            found = found._replace(verdict="apart")
        sign = -1 if self.metric in LESS_IS_BETTER else 1
        reached = sign * found.value >= 0 and tolerance(self.metric) < abs(paper) < math.inf
        others = any(record.is_untested or record.is_longer for record in self.counted)
        comparable = self.is_comparable or (reached and not others)
        comparable = comparable and not any(map(has_other_schedule, self.counted))
        return found if comparable else found._replace(verdict=None)

    def _is_one_near(self, paper: float) -> bool:
        """Whether at least one seed is as in the paper."""
        values = [record.value for record in self.counted if record.value is not None]
        return any(difference(self.metric, each, paper).verdict == "near" for each in values)

    def strictly(self, paper: float | None) -> Difference | None:
        """The difference of the last evaluation of seed 0; None if it is not known.

        A test metric is that of the best checkpoint, as in the paper: it has no last evaluation.
        """
        first = next((record for record in self.records if record.seed == 0), None)
        if first is None:
            return None
        if self.metric == "R2":
            first = replace(first, value=self._last(first))
        return Seeds(self.metric, [first]).against(paper)


@dataclass
class Cell:
    """One recipe: the paper's numbers, and the measured ones by column and metric."""

    recipe: str
    paper: dict[str, float]
    note: str = ""
    finding: str = ""
    found: dict[str, dict[str, Seeds]] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """The second part of the recipe's name."""
        return self.recipe.split("/")[1]

    @property
    def model(self) -> str:
        """The third part of the recipe's name."""
        return self.recipe.split("/")[2]

    @property
    def metrics(self) -> list[str]:
        """The paper's metrics, then other measured ones."""
        measured = [metric for each in self.found.values() for metric in each]
        return list(dict.fromkeys([*self.paper, *measured]))

    @property
    def ours(self) -> dict[str, Seeds]:
        """Our numbers by metric; {} if the recipe was not run."""
        return self.found.get(OURS, {})

    def difference(self, metric: str, column: str = OURS) -> Difference | None:
        """The difference of a column from the paper; None if a number is missing."""
        seeds = self.found.get(column, {}).get(metric)
        return None if seeds is None else seeds.against(self.paper.get(metric))

    @property
    def is_strictly_near(self) -> bool:
        """Whether the last evaluation of seed 0 is as in the paper, by every metric."""
        found = [
            None if (seeds := self.ours.get(metric)) is None else seeds.strictly(value)
            for metric, value in self.paper.items()
        ]
        return bool(found) and all(each is not None and each.verdict == "near" for each in found)

    def verdict(self, column: str = OURS) -> Verdict | None:
        """The verdict of the metric that differs; None if one of the paper's metrics has none."""
        found = [self.difference(metric, column) for metric in self.paper]
        verdicts = [None if each is None else each.verdict for each in found]
        order: tuple[Verdict | None, ...] = (None, "worse", "apart", "better", "near")
        return next((each for each in order if each in verdicts), None)


@dataclass(frozen=True)
class Table:
    """One of the paper's tables: its cells by recipe, its rows and its columns."""

    name: str
    title: str
    caption: str
    rows: dict[str, str]  # our names and the titles to show
    columns: dict[str, str]
    rows_are: Literal["task", "model"]
    cells: dict[str, Cell]
    sources: list[str]  # further measured columns

    @property
    def number(self) -> str:
        """The number of the table in the paper."""
        return self.name[-1]

    @property
    def metrics(self) -> list[str]:
        """The metrics of all cells."""
        return list({metric: None for cell in self.cells.values() for metric in cell.metrics})

    def at(self, row: str, column: str) -> Cell | None:
        """The cell in a row and a column, if there is one."""
        parts = (row, column) if self.rows_are == "task" else (column, row)
        return self.cells.get("/".join((self.name, *parts)))

    def title_of(self, part: str) -> str:
        """The title of a task or a model."""
        return self.rows.get(part) or self.columns.get(part) or OTHERS.get(part, part)

    def cell_title(self, cell: Cell) -> str:
        """The title of a cell: the task and the model."""
        return f"{self.title_of(cell.task)} · {self.title_of(cell.model)}"

    def sources_of(self, column: str) -> list[str]:
        """The further columns that have a number in one of the paper's columns."""
        cells = [cell for row in self.rows if (cell := self.at(row, column))]
        return [each for each in self.sources if any(each in cell.found for cell in cells)]

    @property
    def grid(self) -> list[Cell]:
        """The cells that the paper has a number for."""
        places = [self.at(row, column) for row in self.rows for column in self.columns]
        return [cell for cell in places if cell is not None and cell.paper]


OTHERS = {
    "dlr-1-works": "DLR, 1 layer, L 4096, rate 4e-5",
    "attention-1-longer": "Attention, 1 layer, L 4096, 160000 steps",
    "dlr-r-1": "DLR-R, 1 layer, L 4096 (text)",
    "524288": "L 524288 (text)",
}
"""Titles of the recipes that are in no column of the paper; "text": a claim of its text."""


def paper_number(cell: Cell, metric: str) -> str:
    """The paper's number."""
    value = cell.paper.get(metric)
    if value == math.inf:
        return DIVERGED
    return "–" if value is None else f"{value:.{2 if metric in PLACES else 1}f}"


def our_number(seeds: Seeds | None) -> str:
    """The mean over seeds, "not run" or "diverged"."""
    if seeds is None:
        return NOT_RUN
    return DIVERGED if seeds.mean is None else number(seeds.metric, seeds.mean)


def steps_text(records: Sequence[Record]) -> str:
    """The steps of the runs: "40000 of 40000", "200 of 1000, tiny"."""
    steps = sorted({record.steps for record in records})
    several = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
    early = ", stopped early" if any(record.stopped for record in records) else ""
    tiny = ", tiny" if any(record.size == "tiny" for record in records) else ""
    return f"{several} of {records[0].steps_asked}{early}{tiny}"


def state_text(seeds: Seeds) -> str:
    """Why a number is not that of the paper's run: "tiny", "5000 of 40000 steps"; or ""."""
    other = {FULL: "", "tiny": "tiny"}.get(seeds.size, "other sizes")
    untested = any(record.is_untested for record in seeds.counted)
    parts = [other, "validation, not tested" if untested else ""]
    if any(record.steps != record.steps_asked for record in seeds.counted):
        steps, *early = steps_text(seeds.counted).removesuffix(", tiny").split(", ")
        parts.append(f"{early[0]}: {steps} steps" if early else f"{steps} steps")
    return ", ".join(filter(None, parts))


def no_verdict_text(seeds: Seeds) -> str:
    """Why a difference has no verdict."""
    if any(map(has_other_schedule, seeds.counted)):
        return " another schedule, no verdict"
    cut = any(record.is_cut for record in seeds.counted)
    return " fewer steps, no verdict" if cut else " no verdict"


def settings_text(seeds: Seeds) -> str:
    """The settings that differ from the recipe's: "precision bf16", "other lr, warmup"."""
    settings = seeds.counted[0].settings
    if alone := re.fullmatch(r"(?:\w+\.)*(\w+ [\w.+-]+) \([\w.+-]+\)", settings):
        return alone[1]
    names = re.findall(r"(?:^|, )([\w.]+) ", settings)
    return f"other {', '.join(name.rpartition('.')[2] for name in names)}" if names else ""


def seeds_text(seeds: Seeds) -> str:
    """The seeds of a mean: "2 seeds, 0.144 to 0.332"; "" for one seed."""
    count = f"{len(seeds.counted)} seeds" if len(seeds.counted) > 1 else ""
    return ", ".join(filter(None, (count, range_text(seeds))))


def range_text(seeds: Seeds) -> str:
    """The values of several seeds: "0.144 to 0.332"; "" for one seed, or if one diverged."""
    if seeds.spread is None:
        return ""
    values = [record.value for record in seeds.counted if record.value is not None]
    low, high = (number(seeds.metric, value) for value in (min(values), max(values)))
    return f"{low} to {high}"


def fall_text(seeds: Seeds) -> str:
    """The last evaluation if it is far from the best one, which counts: "0.423 at the end"."""
    if seeds.last is None or seeds.mean is None:
        return ""
    far = abs(seeds.mean - seeds.last) > tolerance(seeds.metric)
    return f"{number(seeds.metric, seeds.last)} at the end" if far else ""


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; text in a cell is on one line and has no bars or tags of its own."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(map(escaped, line))} |\n" for line in lines)


def escaped(text: str) -> str:
    """Text on one line for Markdown, without bars or tags of its own."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
