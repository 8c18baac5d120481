"""The pages that are neither tables nor speed nor the explorer: overview, ListOps, Pathfinder."""

from collections.abc import Iterator, Sequence
from typing import Any

from dlrnn.paper.comparison import OURS, Table, count_text, counts
from dlrnn.paper.records import Record
from dlrnn.paper.results import Results
from dlrnn.report.html import Html, join, tag
from dlrnn.report.speed import Lengths, length_plot
from dlrnn.report.svg import Axis, Series, bar_plot, line_plot, shown
from dlrnn.report.tables import JUDGED, NEAR, plain_table, shift_plot


def overview(tables: Sequence[Table], lengths: Lengths | None) -> Html:
    """What there is, and how near to the paper."""
    shift = shift_plot(next(table for table in tables if table.name == "table2"))
    plots = [plot for plot in (shift, length_plot(lengths)) if plot is not None]
    return join(
        tag("h1", "The paper, run again"),
        tag(
            "p",
            "Every table of ",
            tag(
                "cite", "Simplifying and Understanding State Space Models with Diagonal Linear RNNs"
            ),
            " (Gupta, Mehta, Berant) with our number beside the paper's. A number that was not run"
            " says so; none is taken from the paper into our column.",
            class_="lead",
        ),
        tag("h2", "How much there is"),
        _nothing_yet(tables),
        tag("ul", [_card(table) for table in tables], class_="cards"),
        tag("p", f"{NEAR} {JUDGED}", class_="quiet"),
        _own(tables),
        [tag("h2", "At a glance"), tag("div", plots, class_="plots")] if plots else None,
        tag("h2", "To make it again"),
        tag(
            "p",
            "Each cell of a table holds the command that trains it. ",
            tag("code", "dlrnn reproduce table1"),
            " trains what a table lacks, ",
            tag("code", "dlrnn results add RUN"),
            " records a run, and ",
            tag("code", "dlrnn report"),
            " writes these pages. ",
            tag("code", "dlrnn report --runs RUN"),
            " puts your own runs beside ours.",
        ),
    )


def _nothing_yet(tables: Sequence[Table]) -> Html | None:
    if any(cell.ours for table in tables for cell in table.cells.values()):
        return None
    others = any(cell.found for table in tables for cell in table.cells.values())
    run = "No run of ours at the paper's sizes" if others else "No run of ours"
    return tag("p", f"{run} is recorded here: every number of ours says “not run”.")


def _own(tables: Sequence[Table]) -> Html | None:
    """Columns that are neither ours nor the paper's, and where they stand."""
    found: dict[str, list[Html]] = {}
    for table in tables:
        for source in table.sources:
            cells = sum(source in cell.found for cell in table.cells.values())
            link = tag("a", f"Table {table.name[-1]}", href=f"{table.name}.html")
            text = f" ({cells} cell{'s' if cells > 1 else ''})"
            found.setdefault(source, []).append(join(" ", link, text))
    if not found:
        return None
    items = [tag("li", tag("strong", name), ":", links) for name, links in found.items()]
    return join(tag("h2", "Further columns"), tag("ul", items, class_="own"))


def _card(table: Table) -> Html:
    found = counts(table)
    share = 100 * found.measured / max(1, found.cells)
    right = 100 * (found.near + found.better) / max(1, found.cells)
    bar = tag(
        "svg",
        tag("rect", width=100, height=6, class_="all"),
        tag("rect", width=round(share, 1), height=6, class_="measured"),
        tag("rect", width=round(right, 1), height=6, class_="good"),
        viewBox="0 0 100 6",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    link = tag("a", f"Table {table.name[-1]}: {table.title}", href=f"{table.name}.html")
    return tag("li", tag("h3", link), bar, tag("p", count_text(table)))


# ---------------------------------------------------------------------------- ListOps, Pathfinder


def listops(results: Sequence[Results], tables: Sequence[Table]) -> Html:
    """Errors by height and operator."""
    runs = [
        (name, one.breakdowns[r.stem]) for name, r, one in runs_with("breakdowns", results, tables)
    ]
    head = join(
        tag("h1", "ListOps-SubTrees: where models are wrong"),
        tag(
            "p",
            "The share of sub-trees whose value is wrong, by the height of the sub-tree (a digit"
            " has height 0) and by its operator. SM is the sum modulo 10, MED the median.",
            class_="lead",
        ),
    )
    if not runs:
        command = tag("code", "dlrnn eval RUN")
        return join(head, tag("p", "Not run: no recorded run has what ", command, " writes."))
    by_height = [
        Series(name, [(row["height"], 100 * row["error"]) for row in found["by height"]
                      if row["error"] is not None], place)
        for place, (name, found) in enumerate(runs)
    ]  # fmt: skip
    errors = [
        (name, {row["operator"]: row["error"] for row in found["by operator"]})
        for name, found in runs
    ]
    operators = list(dict.fromkeys(operator for _, each in errors for operator in each))
    bars = [
        (name, [None if each.get(one) is None else 100 * each[one] for one in operators])
        for name, each in errors
    ]
    worst = max((value for one in by_height for _, value in one.points), default=0)
    described = [
        f"{one.name}: {shown(one.points[-1][1])}% at height {shown(one.points[-1][0])}."
        for one in by_height
        if one.points
    ]
    whose = f", {runs[0][0]}" if len(runs) == 1 else ""  # several have a legend
    return join(
        head,
        tag("h2", "By height"),
        line_plot("by-height", f"Errors by the height of the sub-tree{whose}", " ".join(described),
                  by_height, x=Axis("height"), y=Axis("wrong, %", limits=(0, worst))),
        tag("h2", "By operator"),
        bar_plot("by-operator", f"Errors by operator{whose}", "A group of bars for each operator.",
                 groups=operators, series=bars, y=Axis("wrong, %")),
        [_breakdown_table(name, found) for name, found in runs],
    )  # fmt: skip


def _breakdown_table(name: str, found: dict[str, list[dict[str, Any]]]) -> Html:
    rows = [
        [kind.removeprefix("by "), str(row.get("height", row.get("operator"))), str(row["nodes"]),
         "–" if row["error"] is None else f"{100 * row['error']:.2f}"]
        for kind, many in found.items()
        for row in many
    ]  # fmt: skip
    head = ["by", "value", "sub-trees", "wrong, %"]
    table = plain_table(f"Errors of {name}", head, rows, stack=False)
    return tag("details", tag("summary", f"{name} as a table"), table)


def pathfinder(results: Sequence[Results], tables: Sequence[Table]) -> Html:
    """Predictions as pictures."""
    head = join(
        tag("h1", "Pathfinder-Segmentation: predictions"),
        tag(
            "p",
            "Test images of each model; below, the masks to predict, then what it predicts. Black:"
            " the path that joins both discs; grey: a main path that does not join them.",
            class_="lead",
        ),
    )
    found = [(name, record) for name, record, _ in runs_with("pictures", results, tables)]
    if not found:
        command = tag("code", "dlrnn eval RUN")
        return join(head, tag("p", "Not run: no recorded run has what ", command, " draws."))
    figures = [
        tag(
            "figure",
            tag("img", src=f"pictures/{place}-{record.stem}.png", loading="lazy",
                alt=f"Four test images, their true masks, the predictions of {name}."),
            tag("figcaption", name),
        )
        for place, (name, record) in enumerate(found)
    ]  # fmt: skip
    return join(head, figures)


def pictures(results: Sequence[Results], tables: Sequence[Table]) -> dict[str, bytes]:
    """The files that `pathfinder` shows."""
    runs = enumerate(runs_with("pictures", results, tables))
    return {f"{place}-{r.stem}.png": one.pictures[r.stem] for place, (_, r, one) in runs}


def runs_with(
    kind: str, results: Sequence[Results], tables: Sequence[Table]
) -> Iterator[tuple[str, Record, Results]]:
    """Every run that has a file of that kind, once, with a name to show."""
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
    """As its dialog is called."""
    table = next((each for each in tables if recipe in each.cells), None)
    return recipe if table is None else table.cell_title(table.cells[recipe])
