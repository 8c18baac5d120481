"""The overview, and the pages of ListOps and Pathfinder."""

from collections.abc import Iterator, Sequence
from typing import Any

from dlrnn.paper.comparison import OURS, Table, counts
from dlrnn.paper.records import Record
from dlrnn.paper.results import Results
from dlrnn.report.plots import Axis, Series, bar_plot, line_plot, shown
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
    """A table, and the percentages of its cells that are measured and near the paper or better."""
    found = counts(table)
    share = 100 / max(1, found.cells)
    good = found.near + found.better
    return table, round(share * found.measured, 1), round(share * good, 1)


# ---------------------------------------------------------------------------- ListOps, Pathfinder


def listops(results: Sequence[Results], tables: Sequence[Table], problems: Sequence[str]) -> str:
    """The page with the errors by height and operator."""
    runs = {
        name: one.breakdowns[r.stem] for name, r, one in runs_with("breakdowns", results, tables)
    }
    by_height = [
        Series(name, [(row["height"], 100 * row["error"]) for row in found["by height"]
                      if row["error"] is not None], place)
        for place, (name, found) in enumerate(runs.items())
    ]  # fmt: skip
    errors = {
        name: {row["operator"]: row["error"] for row in found["by operator"]}
        for name, found in runs.items()
    }
    operators = list(dict.fromkeys(operator for each in errors.values() for operator in each))
    bars = [
        (name, [None if each.get(one) is None else 100 * each[one] for one in operators])
        for name, each in errors.items()
    ]
    worst = max((value for one in by_height for _, value in one.points), default=0)
    described = [
        f"{one.name}: {shown(one.points[-1][1])}% at height {shown(one.points[-1][0])}."
        for one in by_height
        if one.points
    ]
    whose = f", {next(iter(runs))}" if len(runs) == 1 else ""  # several have a legend
    return render(
        "listops",
        page="listops",
        problems=problems,
        breakdowns={name: _breakdown_rows(found) for name, found in runs.items()},
        by_height=line_plot(
            "by-height",
            f"Errors by the height of the sub-tree{whose}",
            " ".join(described),
            by_height,
            x=Axis("height"),
            y=Axis("wrong, %", limits=(0, worst)),
        ),
        by_operator=bar_plot(
            "by-operator",
            f"Errors by operator{whose}",
            "A group of bars for each operator.",
            groups=operators,
            series=bars,
            y=Axis("wrong, %"),
        ),
    )


def _breakdown_rows(found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    return [
        [kind.removeprefix("by "), str(row.get("height", row.get("operator"))), str(row["nodes"]),
         "–" if row["error"] is None else f"{100 * row['error']:.2f}"]
        for kind, many in found.items()
        for row in many
    ]  # fmt: skip


def pathfinder(results: Sequence[Results], tables: Sequence[Table], problems: Sequence[str]) -> str:
    """The page with predictions as pictures."""
    found = enumerate(runs_with("pictures", results, tables))
    images = {f"{place}-{record.stem}.png": name for place, (name, record, _) in found}
    return render("pathfinder", page="pathfinder", problems=problems, images=images)


def pictures(results: Sequence[Results], tables: Sequence[Table]) -> dict[str, bytes]:
    """The files that `pathfinder` shows."""
    runs = enumerate(runs_with("pictures", results, tables))
    return {f"{place}-{r.stem}.png": one.pictures[r.stem] for place, (_, r, one) in runs}


def runs_with(
    kind: str, results: Sequence[Results], tables: Sequence[Table]
) -> Iterator[tuple[str, Record, Results]]:
    """Every run that has a file of that kind, once, with a title."""
    for place, one in enumerate(results):
        by_stem = {each.stem: each for each in reversed(one.records)}
        for stem in getattr(one, kind):
            record = by_stem.get(stem)
            if record is not None:
                owner = OURS if place == 0 else one.name
                other = f", but {record.variant}" if record.variant else ""
                title = f"{recipe_title(tables, record.recipe)}{other}"
                yield f"{title}, seed {record.seed} ({owner})", record, one


def recipe_title(tables: Sequence[Table], recipe: str) -> str:
    """The title of a recipe's dialog."""
    table = next((each for each in tables if recipe in each.cells), None)
    return recipe if table is None else table.cell_title(table.cells[recipe])
