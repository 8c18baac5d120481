"""A page for each table of the paper: the table, every number in a list, a dialog a cell."""

from collections.abc import Sequence

from dlrnn.report.book import METRICS, OURS, Cell, Table, counts
from dlrnn.report.cells import (
    badge,
    cell_id,
    dialog,
    our_number,
    paper_number,
    share_of_steps,
    steps_text,
)
from dlrnn.report.html import Html, join, tag
from dlrnn.report.results import Results
from dlrnn.report.svg import Axis, Number, Series, line_plot

NUMERIC = "0123456789–−"
NEAR = "“As in the paper” is within .03 (R², loss) or 1.5 points (percent)."


def table_page(table: Table, results: Sequence[Results]) -> Html:
    """The content of a table's page."""
    return join(
        tag("h1", f"Table {table.name[-1]}: {table.title}"),
        tag("p", table.caption, class_="lead"),
        tag("p", count_text(table)),
        shift_plot(table) if table.name == "table2" else None,
        tag("h2", "As in the paper"),
        tag("p", "Each cell opens its curve, command, commit and hardware.", class_="quiet"),
        _key(),
        _grid(table),
        tag("h2", "Every number"),
        tag("p", "The heads of the columns sort.", class_="quiet"),
        _list(table),
        [dialog(table, cell, results) for cell in table.cells.values()],
    )


def count_text(table: Table) -> str:
    """In a sentence."""
    cells, measured, good = counts(table)
    if not measured:
        return f"Not run: none of {cells} cells has been measured yet."
    return f"{measured} of {cells} cells measured; {good} of them as in the paper, or better."


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
    ends = [f"{one.name} {one.points[-1][1]:.2f}" for one in series]
    return line_plot(
        "shift-scale",
        "Shift: R² against the length",
        f"At the longest length of each: {', '.join(ends)}.",
        series,
        x=Axis("length", log=True, ticks=[int(column) for column in table.columns]),
        y=Axis("R²", limits=(0, 1)),
    )


def _key() -> Html:
    entries = (("near", "≈ as in the paper"), ("better", "▲ better"), ("worse", "▼ worse"))
    badges = [join(tag("span", text, class_=f"badge {n}"), " ") for n, text in entries]
    return tag("p", badges, tag("span", NEAR, class_="quiet"))


def _grid(table: Table) -> Html:
    corner = "task" if table.rows_are == "task" else "model"
    heads = [_sorting_head(corner), *(_sorting_head(title) for title in table.columns.values())]
    rows = [
        tag(
            "tr",
            tag("th", title, scope="row", data_sort=str(place)),
            [_grid_cell(table.at(row, column)) for column in table.columns],
        )
        for place, (row, title) in enumerate(table.rows.items())
    ]
    name = f"Table {table.name[-1]} as in the paper"
    return _scrolled(name, tag("tr", heads), rows, "sortable grid")


def _grid_cell(cell: Cell | None) -> Html:
    if cell is None:
        return tag("td", "–", class_="empty", data_sort="")
    lines = []
    for metric in cell.metrics if cell.ours else cell.metrics[:1]:
        seeds = cell.ours.get(metric)
        value = tag("span", our_number(seeds), class_="ours" if seeds else "ours missing")
        lines.append(tag("span", value, " ", badge(cell, metric), class_="pair"))
    paper = " / ".join(paper_number(cell, metric) for metric in cell.metrics)
    lines.append(tag("span", f"paper {paper}", class_="quiet"))
    records = [record for seeds in cell.ours.values() for record in seeds.records]
    if records and (share := share_of_steps(records)) < 0.995:
        lines.append(tag("span", f"{100 * share:.2g}% of the steps", class_="share"))
    for source, by_metric in cell.found.items():
        if source != OURS:
            numbers = " / ".join(our_number(seeds) for seeds in by_metric.values())
            lines.append(tag("span", f"{source} {numbers}", class_="share"))
    link = tag("a", lines, href=f"#{cell_id(cell)}", aria_haspopup="dialog")
    first = cell.ours.get(cell.metrics[0]) if cell.metrics else None
    sort = "" if first is None or first.mean is None else first.mean
    return tag("td", link, class_=cell.verdict or "unknown", data_sort=sort)


def _list(table: Table) -> Html:
    names = ("task", "model", "metric", "paper", "ours", "difference", "steps", "seeds")
    heads = [_sorting_head(n, "number" if k > 2 else None) for k, n in enumerate(names)]
    heads += [_sorting_head(name, "number") for name in table.sources]
    rows = [
        _list_row(table, cell, metric) for cell in table.cells.values() for metric in cell.metrics
    ]
    name = f"Every number of Table {table.name[-1]}"
    return _scrolled(name, tag("tr", heads), rows, "sortable list")


def _list_row(table: Table, cell: Cell, metric: str) -> Html:
    seeds, found = cell.ours.get(metric), cell.difference(metric)
    number = our_number(seeds)
    name = f"{number}, {table.cell_title(cell)}"
    link = tag("a", number, href=f"#{cell_id(cell)}", aria_haspopup="dialog", aria_label=name)
    return tag(
        "tr",
        tag("th", table.title_of(cell.task), scope="row"),
        tag("td", table.title_of(cell.model)),
        tag("td", METRICS.get(metric, metric)),
        _number(paper_number(cell, metric), cell.paper.get(metric)),
        _number(link, seeds.mean if seeds else None),
        _number(badge(cell, metric), found.value if found else None),
        _number(
            steps_text(seeds.records) if seeds else None, seeds.records[0].steps if seeds else None
        ),
        _number(str(len(seeds.records)) if seeds else None, len(seeds.records) if seeds else None),
        [_source_cell(cell, metric, source) for source in table.sources],
    )


def _source_cell(cell: Cell, metric: str, source: str) -> Html:
    seeds = cell.found.get(source, {}).get(metric)
    if seeds is None:
        return _number(None, None)
    return _number(join(our_number(seeds), " ", badge(cell, metric, source)), seeds.mean)


def _number(content: str | None, sort: Number | None) -> Html:
    """A cell that sorts by its number; what is missing comes last."""
    key = "" if sort is None else round(sort, 6)
    return tag("td", "–" if content is None else content, class_="number", data_sort=key)


def _sorting_head(text: str, kind: str | None = None) -> Html:
    button = tag("button", text, tag("span", class_="arrow", aria_hidden="true"), type="button")
    return tag("th", button, scope="col", class_=kind)


def plain_table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """A table of text and numbers that does not sort."""
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            [tag("td", text, class_="number" if text[:1] in NUMERIC else None) for text in row[1:]],
        )
        for row in rows
    ]
    heads = tag("tr", [tag("th", text, scope="col") for text in head])
    return _scrolled(name, heads, body, "plain")


def _scrolled(name: str, head: Html, rows: list[Html], kind: str) -> Html:
    """A table that scrolls by itself where it is too wide, with the keyboard, too."""
    caption = tag("caption", name, class_="hidden")
    table = tag("table", caption, tag("thead", head), tag("tbody", rows), class_=kind)
    return tag("div", table, class_="wide", tabindex=0, role="region", aria_label=name)
