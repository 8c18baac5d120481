"""A cell of a table: its number, its difference, and the dialog with all that is behind it."""

import re
from collections.abc import Iterable, Sequence

from dlrnn.paper.comparison import (
    OURS,
    SIGNS,
    Cell,
    Seeds,
    Table,
    our_number,
    paper_number,
    state_text,
    steps_text,
)
from dlrnn.paper.numbers import METRICS, number, signed
from dlrnn.paper.records import FULL, Record
from dlrnn.paper.results import Results, thinned
from dlrnn.report.html import Html, join, tag
from dlrnn.report.svg import Axis, Series, line_plot

WORDS = {"better": "better than the paper", "near": "as in the paper", "worse": "worse"}
POINTS = 100  # of a curve
MOST_LINES = 50  # of a plot: more seeds than anybody reads are left out


def cell_id(cell: Cell) -> str:
    """Of its dialog."""
    return "cell-" + "".join(c if c.isalnum() or c == "-" else "-" for c in cell.recipe)


def badge(cell: Cell, metric: str, column: str = OURS) -> Html | None:
    """The difference, with a sign and a word: never by colour alone; without both if cut short."""
    found = cell.difference(metric, column)
    if found is None:
        return None
    text = signed(metric, found.value)
    if found.verdict is None:
        cut = any(record.is_cut for record in cell.found[column][metric].counted)
        why = " cut short, not judged" if cut else " not judged"
        hidden = tag("span", why, class_="hidden")
        return tag("span", text, hidden, class_="badge open")
    hidden = tag("span", f" {WORDS[found.verdict]}", class_="hidden")
    sign = tag("span", SIGNS[found.verdict], aria_hidden="true")
    return tag("span", sign, f" {text}", hidden, class_=f"badge {found.verdict}")


def dialog(table: Table, cell: Cell, results: Sequence[Results]) -> Html:
    """Everything about a cell."""
    key = cell_id(cell)
    close = tag("button", "×", class_="close", aria_label="Close")
    body = [_values(table, cell), _curves(key, cell, results)]
    for text, name in ((cell.finding, "Finding"), (cell.note, "About this recipe")):
        if text:
            body.append(tag("p", tag("strong", f"{name}: "), text))
    if not cell.ours:
        command = tag("code", f"dlrnn train {cell.recipe}")
        text = "As the recipe says it, we have not run it." if cell.found else "We have not run it."
        body.append(tag("p", text, " It would be run by ", command, "."))
    body += [_runs(column, by_metric) for column, by_metric in cell.found.items()]
    return tag(
        "dialog",
        tag("form", close, method="dialog"),
        tag("h2", table.cell_title(cell), id=f"{key}-name"),
        tag("p", tag("code", cell.recipe), class_="quiet"),
        body,
        id=key,
        aria_labelledby=f"{key}-name",
    )


def _values(table: Table, cell: Cell) -> Html:
    """A line for the paper, for us and for each further column: narrow enough for a phone."""
    heads = [tag("th", METRICS.get(metric, metric), scope="col") for metric in cell.metrics]
    paper = [tag("td", paper_number(cell, metric)) for metric in cell.metrics]
    rows = [tag("tr", tag("th", "paper", scope="row"), paper)]
    for column in [OURS, *(name for name in table.sources if name in cell.found)]:
        numbers = [tag("td", _value(cell, metric, column)) for metric in cell.metrics]
        rows.append(tag("tr", tag("th", column, scope="row"), numbers))
    head = tag("thead", tag("tr", tag("td"), heads))
    return tag("div", tag("table", head, tag("tbody", rows), class_="values"), class_="wide")


def _value(cell: Cell, metric: str, column: str) -> Html:
    """With its difference, and what else one must know to read it."""
    seeds = cell.found.get(column, {}).get(metric)
    if seeds is None:
        return tag("span", our_number(seeds), class_="quiet")
    spread = None if seeds.spread is None else f"spread {number(metric, seeds.spread)}"
    last = None if seeds.last is None else f"at the last evaluation {number(metric, seeds.last)}"
    rest = ", ".join(filter(None, (state_text(seeds), last, spread)))
    quiet = tag("span", rest, class_="quiet") if rest else None
    return join(our_number(seeds), " ", badge(cell, metric, column), " ", quiet)


def _curves(key: str, cell: Cell, results: Sequence[Results]) -> Html | None:
    if not cell.found:
        return None
    plots = []
    owners = {id(record): one for one in results for record in one.records}
    for metric in cell.metrics:
        name = {"train_loss": "train loss", "loss": "validation loss"}.get(
            metric, f"validation {metric}"
        )
        series: list[Series] = []
        for column, by_metric in cell.found.items():
            for record in by_metric[metric].records if metric in by_metric else []:
                points = _points(record, name, owners.get(id(record)))
                if points and len(series) < MOST_LINES:
                    series.append(Series(f"{column}, seed {record.seed}", points, len(series)))
        if series:
            plots.append(_curve(f"{key}-{metric}", name, series, cell, metric))
    if plots:
        return join(plots)
    return tag("p", "Its curve is missing.", class_="quiet")


def _points(record: Record, name: str, owner: Results | None) -> list[tuple[int, float]]:
    curve = {} if owner is None or not owner.curves else owner.curves.get(record.stem, {})
    return thinned(curve.get(name, []), POINTS)


def _curve(key: str, name: str, series: list[Series], cell: Cell, metric: str) -> Html:
    split, _, rest = name.partition(" ")
    label = name if rest == "loss" else f"{split} {METRICS.get(rest, rest)}"
    paper = cell.paper.get(metric)
    guides = [] if paper is None else [(paper, f"paper {paper_number(cell, metric)}")]
    values = [value for one in series for _, value in one.points] + [each[0] for each in guides]
    low, high = min(values), max(values)
    if metric == "R2":
        low, high = max(-0.2, min(low, 0)), max(high, 1)
    last = " ".join(f"{one.name} ends at {number(metric, one.points[-1][1])}." for one in series)
    return line_plot(
        key,
        f"{label} during training",
        f"{last} {guides[0][1] if guides else ''}",
        series,
        x=Axis("step", limits=(0, max(one.points[-1][0] for one in series))),
        y=Axis(label, limits=(low, high)),
        guides=guides,
    )


def _runs(column: str, by_metric: dict[str, Seeds]) -> Html:
    """How the numbers of a column came about; what several seeds share is said once."""
    first = next(iter(by_metric.values()))
    records = first.records
    counted = set(map(id, first.counted))
    aside = [f"seed {each.seed}" for each in records if id(each) not in counted]
    facts: list[tuple[str, Html | str | None]] = [
        ("Steps", steps_text(records)),
        ("Stopped", _joined(record.stopped or _cut(record) for record in records)),
        ("Seeds", ", ".join(str(record.seed) for record in records)),
        ("Not in the mean", f"{', '.join(aside)}: cut short" if aside else None),
        ("Measured on", _joined(f"the {r.split} split" for r in records)),
        ("Command", join([tag("code", record.command) for record in records])),
        ("Not as in the recipe", _joined(r.differs for r in records)),
        ("Commit", _joined(r.commit or "unknown" for r in records)),
        ("Hardware", _joined(r.hardware for r in records)),
        ("Versions", _joined(_versions(r) for r in records)),
        ("Parameters", _joined(str(r.parameters or "") for r in records)),
        ("A step, median", _joined(_seconds(r.seconds_per_step) for r in records)),
        ("All of it", _joined(_seconds(r.wall_seconds) for r in records)),
        ("Note", _joined(r.note for r in records)),
    ]
    rows = [join(tag("dt", name), tag("dd", text)) for name, text in facts if text]
    name = "Our runs" if column == OURS else f"Runs of {column}"
    return join(tag("h3", name), tag("dl", rows))


def _cut(record: Record) -> str:
    """What the command of a run that was not brought to its end does not say."""
    asked = re.search(r"--steps (\d+)", record.command)
    steps = int(asked[1]) if asked else record.steps_asked
    if not record.is_cut or record.size != FULL or record.steps >= steps:
        return ""
    return f"at step {record.steps}, before its end: the command goes on to {steps}"


def _versions(record: Record) -> str:
    return ", ".join(f"{name} {version}" for name, version in record.versions.items())


def _joined(texts: Iterable[str]) -> str:
    """Those that are not empty, each once."""
    return "; ".join(dict.fromkeys(filter(None, texts)))


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    if value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 120 else f"{value / 60:.3g} minutes"
