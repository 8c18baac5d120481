"""Counts of the cells that agree with the paper, and the same in words, for all pages."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from dlrnn.paper.comparison import Cell, Table, markdown_table
from dlrnn.paper.numbers import PERCENTAGES
from dlrnn.paper.records import Record

INFORMATIVE = ".02 < paper < .98"
STRICTLY = "strictly (seed 0, last evaluation)"


class Counts(NamedTuple):
    """Counts of a table's cells; `near` means as in the paper.

    Strictly, a cell is as in the paper if the last evaluation of seed 0 is. A cell is informative
    if one of the paper's numbers for it lies between .02 and .98, of at most 1.
    """

    cells: int
    measured: int
    near: int
    better: int
    worse: int
    apart: int  # the mean is near, no seed is
    strict: int
    informative: int
    informative_near: int
    informative_strict: int
    open: int  # measured, without a verdict: fewer steps, other sizes or schedules
    stopped: int  # early, at 0 or 1

    @property
    def different(self) -> int:
        """The cells that are not as in the paper, in whichever direction."""
        return self.better + self.worse + self.apart


def counts(table: Table) -> Counts:
    """Count the cells of a table that were measured, and their verdicts."""
    cells = table.grid
    verdicts = [cell.verdict() for cell in cells]
    strict = [cell.is_strictly_near for cell in cells]
    informative = [is_informative(cell) for cell in cells]
    runs = [_runs(cell) for cell in cells]
    pairs = list(zip(informative, verdicts, strict, strict=True))
    measured = list(map(bool, runs))
    return Counts(
        cells=len(cells),
        measured=sum(measured),
        near=verdicts.count("near"),
        better=verdicts.count("better"),
        worse=verdicts.count("worse"),
        apart=verdicts.count("apart"),
        strict=sum(strict),
        informative=sum(informative),
        informative_near=sum(told and verdict == "near" for told, verdict, _ in pairs),
        informative_strict=sum(told and near for told, _, near in pairs),
        open=sum(ran and v is None for ran, v in zip(measured, verdicts, strict=True)),
        stopped=sum(any(record.stopped for record in records) for records in runs),
    )


def is_informative(cell: Cell) -> bool:
    """Whether one of the paper's numbers is neither near 0 nor near 1; losses always are."""
    units = {metric: 100 if metric in PERCENTAGES else 1 for metric in cell.paper}
    return any(
        math.isfinite(value) and ("loss" in metric or 0.02 < value / units[metric] < 0.98)
        for metric, value in cell.paper.items()
    )


def _runs(cell: Cell) -> list[Record]:
    return [record for seeds in cell.ours.values() for record in seeds.counted]


def count_text(table: Table) -> str:
    """The counts of a table in sentences."""
    found = counts(table)
    others = sum(bool(cell.found) for cell in table.cells.values())
    if not found.measured and others:
        return (
            f"None of {found.cells} cells has been measured with its recipe's settings yet;"
            f" {others} {'has' if others == 1 else 'have'} runs of other sizes or data."
        )
    if not found.measured:
        return f"Not run: none of {found.cells} cells has been measured yet."
    verdicts = {"as in the paper": found.near, "better": found.better, "worse": found.worse}
    verdicts["with seeds on both sides of the paper's number"] = found.apart
    verdicts["without a verdict (fewer steps, another size or schedule)"] = found.open
    told = ", ".join(f"{many} {how}" for how, many in verdicts.items() if many)
    told_of = f"{found.informative_near} are as in the paper, strictly {found.informative_strict}"
    sentences = [
        f"{found.measured} of {found.cells} cells measured: {told}",
        f"{STRICTLY.capitalize()}, {found.strict} {'is' if found.strict == 1 else 'are'}",
        f"Of {found.informative} informative cells ({INFORMATIVE}), {told_of}",
        f"{found.stopped} stopped early at 0 or 1" if found.stopped else "",
    ]
    return ". ".join(filter(None, sentences)) + "."


def count_table(tables: Sequence[Table]) -> str:
    """The counts of all tables as a table in Markdown."""
    names = ("cells", "measured", "as in the paper", "strictly", "different", "without a verdict")
    rows = []
    for found, table in zip(map(counts, tables), tables, strict=True):
        every = (found.cells, found.measured, found.near, found.strict, found.different, found.open)
        some = (found.informative, found.informative_near, found.informative_strict)
        rows.append((table.number, *map(str, every + some)))
    return markdown_table(("table", *names, "informative cells", *names[2:4]), rows)


def not_run(table: Table) -> str:
    """The cells without a run of ours: "L 262144 (SGConv), all of L 1048576"; or ""."""
    return _named(table, [cell for cell in table.grid if not cell.ours])


def run_in_part(table: Table) -> str:
    """The cells with a run that is not compared with the paper, in the same form."""
    return _named(table, [cell for cell in table.grid if cell.ours and cell.verdict() is None])


def _named(table: Table, chosen: Sequence[Cell]) -> str:
    """Cells by their task, or the tasks and the table of which all cells are chosen."""
    if len(chosen) == len(table.grid):
        return "all of it"
    every, some = [], []
    for task in dict.fromkeys(cell.task for cell in chosen):
        models = [table.title_of(cell.model) for cell in chosen if cell.task == task]
        if len(models) == sum(cell.task == task for cell in table.grid):
            every.append(table.title_of(task))
        else:
            some.append(f"{table.title_of(task)} ({'; '.join(models)})")
    return ", ".join(some + [f"all of {', '.join(every)}"] * bool(every))
