"""The paper's tables with what was measured: cells, means over seeds, differences."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Literal, NamedTuple

from dlrnn import recipes
from dlrnn.recipes import Recipe, table1, table2, table3, table4, table6
from dlrnn.recipes.paper import table as published
from dlrnn.recipes.recipe import PLACES
from dlrnn.report.records import Record
from dlrnn.report.results import Results

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
    """Ours less the paper's, in the paper's units, and what that means."""

    value: float
    verdict: Verdict


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
    return f"{value:.{PLACES.get(metric, 1)}f}".replace("-", "−")


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

    @property
    def mean(self) -> float | None:
        """None if a run diverged."""
        values = [record.value for record in self.records if record.value is not None]
        return mean(values) if len(values) == len(self.records) else None

    @property
    def spread(self) -> float | None:
        """The largest less the smallest, None for fewer than two seeds."""
        values = [record.value for record in self.records if record.value is not None]
        return max(values) - min(values) if len(values) > 1 else None

    def against(self, paper: float | None) -> Difference | None:
        """None where one of the two is missing."""
        if paper is None or self.mean is None:
            return None
        return difference(self.metric, self.mean, paper)


@dataclass
class Cell:
    """One recipe: the paper's numbers, and ours by column and metric."""

    recipe: str
    paper: dict[str, float]
    steps_asked: int | None
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

    @property
    def verdict(self) -> Verdict | None:
        """The worst of its metrics; None if nothing was run, or the paper has nothing."""
        verdicts = [each.verdict for m in self.metrics if (each := self.difference(m))]
        order: tuple[Verdict, ...] = ("worse", "near", "better")
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

    @property
    def grid(self) -> list[Cell]:
        """The cells that the paper has a number for, one a place."""
        places = [self.at(row, column) for row in self.rows for column in self.columns]
        return [cell for cell in places if cell is not None and cell.paper]


OTHERS = {"dlr-1-works": "DLR, 1 layer, L 4096, rate 4e-5"}
"""Recipes that are in no column of the paper."""


class Counts(NamedTuple):
    """Of a table's cells."""

    cells: int
    measured: int
    near_or_better: int


def counts(table: Table) -> Counts:
    """How much of a table there is, and how good it is."""
    verdicts = [cell.verdict for cell in table.grid]
    good = sum(verdict in ("near", "better") for verdict in verdicts)
    return Counts(len(verdicts), sum(bool(cell.ours) for cell in table.grid), good)


def make_tables(results: Sequence[Results]) -> list[Table]:
    """All six; the first results are ours, each of the others has columns of its own."""
    return [_table(name, results) for name in recipes.TABLES]


def _table(name: str, results: Sequence[Results]) -> Table:
    cells = {each.name: _cell(each, results) for each in recipes.TABLES[name]}
    sources: dict[str, None] = {}
    for place, one in enumerate(results):
        for record in one.records:
            if record.recipe.split("/")[0] != name:
                continue
            source = _source(one.name, record.variant, ours=place == 0)
            if source != OURS:
                sources[source] = None
            empty = Cell(record.recipe, {}, None, finding=one.notes.get(record.recipe, ""))
            cell = cells.setdefault(record.recipe, empty)
            metrics = cell.found.setdefault(source, {})
            metrics.setdefault(record.metric, Seeds(record.metric, [])).records.append(record)
    for cell in cells.values():
        for by_metric in cell.found.values():
            for seeds in by_metric.values():
                seeds.records.sort(key=lambda record: record.seed)
    return LAYOUTS[name](name, cells, list(sources))


def _cell(recipe: Recipe, results: Sequence[Results]) -> Cell:
    finding = results[0].notes.get(recipe.name, "") if results else ""
    return Cell(recipe.name, recipe.paper, recipe.config.steps, recipe.note, finding)


def _source(owner: str, variant: str, *, ours: bool) -> str:
    """The head of a column."""
    if ours:
        return f"{OURS}, {variant}" if variant else OURS
    return f"{owner}: {variant}" if variant else owner


# ---------------------------------------------------------------------------- layouts


def _with_layers(name: str, columns: dict[str, table1.Column]) -> dict[str, str]:
    """As in `DLR, 6 layers, L 512`."""
    shown = {}
    for key, column in columns.items():
        paper = published(name)["columns"][column.place]
        layers = f"{paper['layers']} layer{'s' if paper['layers'] > 1 else ''}"
        shown[key] = f"{paper['model']}, {layers}, L {paper['L']}"
    return shown


def _atomic(name: str, cells: dict[str, Cell], sources: list[str]) -> Table:
    six = name == "table6"
    paper = "table6_param_tied" if six else "table1_atomic"
    columns = _with_layers(paper, table6.COLUMNS if six else table1.COLUMNS)
    tasks = {key: title for key, title in table1.TASKS.items() if _has(cells, key)}
    title = "Attention with DLR's parameters" if six else "Atomic tasks"
    return Table(name, title, published(paper)["caption"], tasks, columns, "task", cells, sources)


def _shift(name: str, cells: dict[str, Cell], sources: list[str]) -> Table:
    lengths = sorted({int(cell.task) for cell in cells.values() if cell.task.isdecimal()})
    columns = {str(length): f"L {length}" for length in lengths}
    models = {key: entry[0] for key, entry in table2.MODELS.items()}
    caption = published("table2_shift_scale")["caption"]
    return Table(name, "Shift, ever longer", caption, models, columns, "model", cells, sources)


def _higher(name: str, cells: dict[str, Cell], sources: list[str]) -> Table:
    columns = {key: column.title for key, column in table3.COLUMNS.items()}
    caption = published("table3_higher_order")["caption"]
    title = "ListOps-SubTrees and Pathfinder-Segmentation"
    return Table(name, title, caption, table3.MODELS, columns, "model", cells, sources)


def _classification(name: str, cells: dict[str, Cell], sources: list[str]) -> Table:
    columns = {key: column.title for key, column in table4.COLUMNS.items()}
    caption = published("table4_classification")["caption"]
    return Table(name, "Classification", caption, table4.MODELS, columns, "model", cells, sources)


def _language(name: str, cells: dict[str, Cell], sources: list[str]) -> Table:
    kinds = {"dlr": "DLR", "attention": "Transformer"}
    rows = {}
    for cell in cells.values():
        kind, experts, norm = [*cell.model.split("-"), "", ""][:3]
        plural = "" if experts == "1" else "s"
        rows[cell.model] = f"{kinds.get(kind, kind)}, {experts} expert{plural}, {norm}-norm"
    caption = published("table5_language_model")["caption"]
    columns = {"pg19": "PG-19"}
    return Table(name, "Language model", caption, rows, columns, "model", cells, sources)


def _has(cells: dict[str, Cell], task: str) -> bool:
    return any(cell.task == task for cell in cells.values())


LAYOUTS = {
    "table1": _atomic,
    "table2": _shift,
    "table3": _higher,
    "table4": _classification,
    "table5": _language,
    "table6": _atomic,
}
