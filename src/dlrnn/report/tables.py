"""A page for each table of the paper: the table, every number in a list, a dialog a cell."""

from collections.abc import Sequence

from dlrnn.paper.comparison import (
    OURS,
    Cell,
    Table,
    count_text,
    fall_text,
    our_number,
    paper_number,
    seeds_text,
    settings_text,
    state_text,
    steps_text,
)
from dlrnn.paper.numbers import METRICS
from dlrnn.paper.results import Results
from dlrnn.report.cells import badge, cell_id, dialog
from dlrnn.report.html import Html, join, tag
from dlrnn.report.svg import Axis, Number, Series, line_plot

TOLD = (state_text, settings_text, fall_text, seeds_text)  # under the number of a cell
NUMERIC = "0123456789–−"
NEAR = "“As in the paper” is within .03 (R², loss) or 1.5 points (percent)."
TIMED = ("table1", "table3", "table6")
JUDGED = (
    "Only runs of the paper's sizes and steps have a colour, and those that reach its number in"
    " fewer steps; others say what they are."
)


def table_page(table: Table, results: Sequence[Results]) -> Html:
    """The content of a table's page."""
    return join(
        tag("h1", f"Table {table.name[-1]}: {table.title}"),
        tag("p", table.caption, class_="lead"),
        tag("p", count_text(table)),
        _times_elsewhere() if table.name in TIMED else None,
        shift_plot(table) if table.name == "table2" else None,
        tag("h2", "As in the paper"),
        tag(
            "p",
            "In each cell the paper's number, and under it ours. It opens its curve, command,"
            " commit and hardware.",
            class_="quiet",
        ),
        _key(),
        _grid(table),
        tag("h2", "Every number"),
        tag("p", "The heads of the columns sort.", class_="quiet"),
        _list(table),
        [dialog(table, cell, results) for cell in table.cells.values()],
    )


def _times_elsewhere() -> Html:
    return tag("p", "Times per step are on the page ", tag("a", "Speed", href="speed.html"), ".")


def shift_plot(table: Table) -> Html | None:
    """Table 2: R2 against the length, ours as lines, the paper's dashed."""
    series = []
    for place, (model, title) in enumerate(table.rows.items()):
        cells = [(int(c), cell) for c in table.columns if (cell := table.at(model, c))]
        ours = [
            (float(length), mean)
            for length, cell in cells
            if "R2" in cell.ours and (mean := cell.ours["R2"].mean) is not None
        ]
        paper = [(float(length), cell.paper["R2"]) for length, cell in cells if "R2" in cell.paper]
        if ours:
            series.append(Series(f"{title}, ours", ours, place))
        if len(paper) > 1 or (paper and ours):
            series.append(Series(f"{title}, paper", paper, place, dashed=True))
    if not series:
        return None
    cut = [
        f"{table.rows[cell.model]} at {cell.task} ({text})"
        for cell in table.grid
        if "R2" in cell.ours and (text := state_text(cell.ours["R2"]))
    ]
    ends = [f"{one.name} {one.points[-1][1]:.2f}" for one in series]
    return line_plot(
        "shift-scale",
        "Shift: R² against the length",
        f"At the longest length of each: {', '.join(ends)}.",
        series,
        x=Axis("length", log=True, ticks=[int(column) for column in table.columns]),
        y=Axis("R²", limits=(0, 1)),
        note=f"With fewer steps than the paper: {'; '.join(cut)}." if cut else "",
    )


def _key() -> Html:
    entries = (("near", "≈ as in the paper"), ("better", "▲ better"), ("worse", "▼ worse"))
    badges = [join(tag("span", text, class_=f"badge {n}"), " ") for n, text in entries]
    return tag("p", badges, tag("span", f"{NEAR} {JUDGED}", class_="quiet"))


def _grid(table: Table) -> Html:
    """The paper's columns, and beside each the own runs that stand against it."""
    places = [
        (column, source) for column in table.columns for source in (OURS, *table.sources_of(column))
    ]
    heads = [_sorting_head("task" if table.rows_are == "task" else "model")]
    for column, source in places:
        title = table.columns[column]
        beside = tag("span", f" beside {title}", class_="hidden")
        heads.append(
            _sorting_head(title) if source == OURS else _sorting_head(source, "own", beside)
        )
    rows = [
        tag(
            "tr",
            tag("th", title, scope="row", role="rowheader", data_sort=str(place)),
            [
                _grid_cell(table.at(row, c), table.columns[c])
                if source == OURS
                else _own_cell(table.at(row, c), source)
                for c, source in places
            ],
            role="row",
        )
        for place, (row, title) in enumerate(table.rows.items())
    ]
    name = f"Table {table.name[-1]} as in the paper"
    return _scrolled(name, heads, rows, "sortable grid")


def _grid_cell(cell: Cell | None, title: str) -> Html:
    """The paper's number, and ours under it."""
    if cell is None:
        return tag("td", "–", class_="empty", role="cell", data_sort="")
    paper = " / ".join(paper_number(cell, metric) for metric in cell.metrics)
    lines = [tag("span", f"paper {paper}", class_="quiet"), *_numbers(cell, OURS)]
    return _opening(cell, OURS, lines, title, cell.verdict or "unknown")


def _own_cell(cell: Cell | None, source: str) -> Html:
    """A number of another column than ours."""
    if cell is None or source not in cell.found:
        return tag("td", "–", class_="empty own", role="cell", data_sort="")
    kind = f"own {cell.verdict_of(source) or 'unknown'}"
    return _opening(cell, source, _numbers(cell, source), source, kind)


def _numbers(cell: Cell, source: str) -> list[Html]:
    """A line a metric, and one that says what kept it from being the paper's run."""
    found = cell.found.get(source, {})
    if not found:
        return [tag("span", our_number(None), class_="ours missing")]
    lines = []
    for metric in cell.metrics:
        value = tag("span", our_number(found.get(metric)), class_="ours")
        lines.append(tag("span", value, " ", badge(cell, metric, source), class_="pair"))
    told = (text(seeds) for text in TOLD for seeds in found.values())
    for state in dict.fromkeys(told):
        lines += [tag("span", state, class_="share")] if state else []
    return lines


def _opening(cell: Cell, source: str, lines: list[Html], label: str, kind: str) -> Html:
    link = tag("a", lines, href=f"#{cell_id(cell)}", aria_haspopup="dialog")
    first = cell.found.get(source, {}).get(cell.metrics[0]) if cell.metrics else None
    sort = "" if first is None or first.mean is None else first.mean
    return tag("td", link, class_=kind, role="cell", data_label=label, data_sort=sort)


def _list(table: Table) -> Html:
    names = ("task", "model", "metric", "paper", "ours", "difference", "steps", "seeds")
    heads = [_sorting_head(n, "number" if k > 2 else None) for k, n in enumerate(names)]
    heads += [_sorting_head(name, "number own") for name in table.sources]
    rows = [
        _list_row(table, cell, metric) for cell in table.cells.values() for metric in cell.metrics
    ]
    name = f"Every number of Table {table.name[-1]}"
    metrics = {metric for cell in table.cells.values() for metric in cell.metrics}
    one = " one-metric" if len(metrics) == 1 else ""
    return _scrolled(name, heads, rows, f"sortable list{one}")


def _list_row(table: Table, cell: Cell, metric: str) -> Html:
    seeds, found = cell.ours.get(metric), cell.difference(metric)
    number = our_number(seeds)
    name = f"{number}, {table.cell_title(cell)}"
    link = tag("a", number, href=f"#{cell_id(cell)}", aria_haspopup="dialog", aria_label=name)
    records = seeds.counted if seeds else []
    return tag(
        "tr",
        tag("th", table.title_of(cell.task), scope="row", role="rowheader"),
        tag("td", table.title_of(cell.model), role="cell"),
        tag("td", METRICS.get(metric, metric), role="cell"),
        _number("paper", paper_number(cell, metric), cell.paper.get(metric)),
        _number("ours", link, seeds.mean if seeds else None),
        _number("difference", badge(cell, metric), found.value if found else None),
        _number("steps", steps_text(records), records[0].steps, "steps") if records else _nothing(),
        _number("seeds", str(len(records)), len(records)) if records else _nothing(),
        [_source_cell(cell, metric, source) for source in table.sources],
        role="row",
    )


def _source_cell(cell: Cell, metric: str, source: str) -> Html:
    seeds = cell.found.get(source, {}).get(metric)
    if seeds is None:
        return _nothing("own")
    told = ", ".join(filter(None, (state_text(seeds), seeds_text(seeds))))
    quiet = tag("span", f" {told}", class_="quiet") if told else None
    text = join(our_number(seeds), " ", badge(cell, metric, source), quiet)
    return _number(source, text, seeds.mean, "own")


def _number(label: str, content: str | None, sort: Number | None, kind: str = "") -> Html:
    """A cell that sorts by its number; what is missing comes last. Phones show its label."""
    key = "" if sort is None else round(sort, 6)
    return tag(
        "td",
        "–" if content is None else content,
        class_=f"number {kind}".strip(),
        role="cell",
        data_label=label,
        data_sort=key,
    )


def _nothing(kind: str = "") -> Html:
    return tag("td", "–", class_=f"number none {kind}".strip(), role="cell", data_sort="")


def _sorting_head(text: str, kind: str | None = None, *hidden: Html) -> Html:
    arrow = tag("span", class_="arrow", aria_hidden="true")
    button = tag("button", text, hidden, arrow, type="button")
    return tag("th", button, scope="col", role="columnheader", class_=kind)


def plain_table(
    name: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, stack: bool = True
) -> Html:
    """A table of text and numbers that does not sort; a phone shows its rows as cards, or not."""
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row", role="rowheader"),
            [
                tag(
                    "td",
                    text,
                    class_="number" if text[:1] in NUMERIC else None,
                    role="cell",
                    data_label=label,
                )
                for label, text in zip(head[1:], row[1:], strict=True)
            ],
            role="row",
        )
        for row in rows
    ]
    heads = [tag("th", text, scope="col", role="columnheader") for text in head]
    return _scrolled(name, heads, body, "plain stack" if stack else "plain")


def _scrolled(name: str, heads: list[Html], rows: list[Html], kind: str) -> Html:
    """A table that scrolls by itself where it is too wide, with the keyboard, too.

    The roles keep it a table for screen readers where a phone shows its rows as cards.
    """
    table = tag(
        "table",
        tag("caption", name, class_="hidden"),
        tag("thead", tag("tr", heads, role="row"), role="rowgroup"),
        tag("tbody", rows, role="rowgroup"),
        class_=kind,
        role="table",
    )
    inner = tag("div", table, class_="wide", tabindex=0, role="region", aria_label=name)
    return tag("div", inner, class_="box")
