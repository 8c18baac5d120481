"""The overview, and the pages of ListOps and Pathfinder."""

from collections.abc import Iterator, Sequence
from typing import Any

from dlrnn.paper.comparison import OURS, Table
from dlrnn.paper.counts import counts
from dlrnn.paper.records import Record
from dlrnn.paper.results import Results
from dlrnn.report.plots import Axis, Plot, Series, shown
from dlrnn.report.speed import Lengths, length_plot
from dlrnn.report.table_page import shift_plot
from dlrnn.report.templates import render


def overview(tables: Sequence[Table], lengths: Lengths | None, problems: Sequence[str]) -> str:
    """The page that says how much there is, and how near to the paper."""
    shift = shift_plot(next(table for table in tables if table.name == "table2"))
    cells = [cell for table in tables for cell in table.cells.values()]
    nothing = ""
    if not any(cell.ours for cell in cells):
        others = any(cell.found for cell in cells)
        nothing = "No run of ours at the paper's sizes" if others else "No run of ours"
    columns: dict[str, list[tuple[Table, int]]] = {}
    for table in tables:
        for source in table.sources:
            count = sum(source in cell.found for cell in table.cells.values())
            columns.setdefault(source, []).append((table, count))
    return render(
        "overview",
        page="index",
        problems=problems,
        nothing=nothing,
        cards=[_card(table) for table in tables],
        columns=columns,
        plots=[plot for plot in (shift, length_plot(lengths)) if plot is not None],
    )


def _card(table: Table) -> tuple[Table, float, float]:
    """A table, and the percentages of its cells that are measured and as in the paper."""
    found = counts(table)
    share = 100 / max(1, found.cells)
    return table, round(share * found.measured, 1), round(share * found.near, 1)


# ---------------------------------------------------------------------------- ListOps, Pathfinder


def listops(results: Sequence[Results], tables: Sequence[Table], problems: Sequence[str]) -> str:
    """The page with the errors by height and operator."""
    runs = {
        name: one.breakdowns[r.stem] for name, r, one in runs_with("breakdowns", results, tables)
    }
    rows = [row for found in runs.values() for row in found["by operator"]]
    operators = list(dict.fromkeys(row["operator"] for row in rows))
    heights, bars = [], []
    for place, (name, found) in enumerate(runs.items()):
        by_height, by_operator = _known(found["by height"]), _known(found["by operator"])
        points = [(row["height"], 100 * row["error"]) for row in by_height]
        heights.append(Series(name, points, place))
        points = [(operators.index(row["operator"]), 100 * row["error"]) for row in by_operator]
        bars.append(Series(name, points, place))
    ends = [(one.name, *one.points[-1]) for one in heights if one.points]
    described = [f"{name}: {shown(b)}% at height {shown(a)}." for name, a, b in ends]
    whose = f", {next(iter(runs))}" if len(runs) == 1 else ""  # several have a legend
    return render(
        "listops",
        page="listops",
        problems=problems,
        breakdowns={name: _breakdown_rows(found) for name, found in runs.items()},
        by_height=Plot(
            "by-height",
            f"Errors by the height of the sub-tree{whose}",
            " ".join(described),
            heights,
            x=Axis("height"),
            y=_wrong(heights),
        ),
        by_operator=Plot(
            "by-operator",
            f"Errors by operator{whose}",
            "A group of bars for each operator.",
            bars,
            x=Axis("", limits=(0, len(operators))),
            y=_wrong(bars),
            groups=operators,
        ),
    )


def _known(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["error"] is not None]


def _wrong(series: Sequence[Series]) -> Axis:
    """The axis of errors in percent."""
    worst = max((value for one in series for _, value in one.points), default=0)
    return Axis("wrong, %", limits=(0, worst or 1))


def _breakdown_rows(found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    rows = [(kind, row) for kind in ("height", "operator") for row in found[f"by {kind}"]]
    return [[kind, str(row[kind]), str(row["nodes"]), _percent(row["error"])] for kind, row in rows]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}"


def runs_with(
    kind: str, results: Sequence[Results], tables: Sequence[Table]
) -> Iterator[tuple[str, Record, Results]]:
    """Every run that has a file of that kind, once, with a title."""
    cells = {name: (table, cell) for table in tables for name, cell in table.cells.items()}
    for place, one in enumerate(results):
        by_stem = {each.stem: each for each in reversed(one.records)}
        for stem in getattr(one, kind):
            if (record := by_stem.get(stem)) is not None:
                table, cell = cells[record.recipe]
                owner = OURS if place == 0 else one.name
                other = f", but {record.variant}" if record.variant else ""
                title = f"{table.cell_title(cell)}{other}, seed {record.seed} ({owner})"
                yield title, record, one
