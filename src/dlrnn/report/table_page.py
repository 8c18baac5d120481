"""A page for each table of the paper: the table, every number in a list, a dialog for each cell."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from dlrnn.paper.comparison import (
    Cell,
    Seeds,
    Table,
    fall_text,
    paper_number,
    range_text,
    seeds_text,
    settings_text,
    state_text,
    steps_text,
)
from dlrnn.paper.numbers import METRICS, number
from dlrnn.paper.recipes import RECIPES
from dlrnn.paper.records import FULL, Record
from dlrnn.paper.results import thinned
from dlrnn.report.costs import TITLES as COST_TITLES
from dlrnn.report.costs import cost_rows
from dlrnn.report.plots import Axis, Plot, Series
from dlrnn.report.templates import render

POINTS = 100
"""The most points of a curve."""
MOST_LINES = 50
"""The most lines of a plot; further seeds are left out."""


def table_page(
    table: Table, problems: Sequence[str], step_times: dict[str, Any] | None = None
) -> str:
    """The page of a table; `step_times` are the output of `dlrnn bench step --tables`."""
    return render(
        "table",
        page=table.name,
        problems=problems,
        table=table,
        plot=shift_plot(table) if table.name == "table2" else None,
        costs=cost_rows(table, step_times),
        costs_title=COST_TITLES.get(table.name, ""),
        departures={name: RECIPES[name].departures for name in table.cells if name in RECIPES},
        curves={name: _curves(cell) for name, cell in table.cells.items()},
        cell_id=cell_id,
        remarks=_remarks,
        details=_details,
        facts=_facts,
    )


def cell_id(cell: Cell) -> str:
    """The id of the dialog of a cell."""
    return "cell-" + "".join(c if c.isalnum() or c == "-" else "-" for c in cell.recipe)


def _remarks(found: dict[str, Seeds]) -> list[str]:
    """The remarks under the numbers of a cell."""
    texts = (state_text, settings_text, fall_text, seeds_text)
    return _distinct(text(seeds) for text in texts for seeds in found.values())


def _details(seeds: Seeds) -> str:
    """The remarks on a number in a dialog."""
    spread = f"{range_text(seeds)} over seeds" if seeds.spread is not None else ""
    last = (
        "" if seeds.last is None else f"at the last evaluation {number(seeds.metric, seeds.last)}"
    )
    return ", ".join(filter(None, (state_text(seeds), last, spread)))


def shift_plot(table: Table) -> Plot | None:
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
    return Plot(
        "shift-scale",
        "Shift: R² against the length",
        f"At the longest length of each: {', '.join(ends)}.",
        series,
        x=Axis("length", log=True, ticks=[int(column) for column in table.columns]),
        y=Axis("R²", limits=(0, 1)),
        note=f"With fewer steps than the paper: {'; '.join(cut)}." if cut else "",
    )


def _curves(cell: Cell) -> list[Plot]:
    """The curves of a cell, a plot for each metric."""
    plots = []
    for metric in cell.metrics:
        names = {"train_loss": "train loss", "loss": "validation loss"}
        name = names.get(metric, f"validation {metric}")
        found = {column: by[metric].curves for column, by in cell.found.items() if metric in by}
        series: list[Series] = []
        for column, curves in found.items():
            for seed, curve in sorted(curves.items()):
                points = thinned(curve.get(name, []), POINTS)
                if points and len(series) < MOST_LINES:
                    series.append(Series(f"{column}, seed {seed}", points, len(series)))
        if series:
            plots.append(_curve(f"{cell_id(cell)}-{metric}", name, series, cell, metric))
    return plots


def _curve(key: str, name: str, series: list[Series], cell: Cell, metric: str) -> Plot:
    split, _, rest = name.partition(" ")
    label = name if rest == "loss" else f"{split} {METRICS.get(rest, rest)}"
    paper = cell.paper.get(metric)
    guides = []
    if paper is not None and math.isfinite(paper):  # it did not diverge
        guides.append((paper, f"paper {paper_number(cell, metric)}"))
    values = [value for one in series for _, value in one.points] + [each[0] for each in guides]
    low, high = min(values), max(values)
    if metric == "R2":
        low, high = max(-0.2, min(low, 0)), max(high, 1)
    last = " ".join(f"{one.name} ends at {number(metric, one.points[-1][1])}." for one in series)
    return Plot(
        key,
        f"{label} during training",
        f"{last} {guides[0][1] if guides else ''}",
        series,
        x=Axis("step", limits=(0, max(one.points[-1][0] for one in series))),
        y=Axis(label, limits=(low, high)),
        guides=guides,
    )


def _facts(by_metric: dict[str, Seeds]) -> list[tuple[str, str | list[str]]]:
    """How the numbers of a column were measured; what seeds have in common is said once."""
    first = next(iter(by_metric.values()))
    records = first.records
    counted = set(map(id, first.counted))
    left_out = [f"seed {each.seed}" for each in records if id(each) not in counted]
    facts: list[tuple[str, str | list[str]]] = [
        ("Steps", steps_text(records)),
        ("Stopped", _joined(record.stopped or _cut(record) for record in records)),
        ("Seeds", ", ".join(str(record.seed) for record in records)),
        ("Not in the mean", f"{', '.join(left_out)}: cut short" if left_out else ""),
        ("Measured on", _joined(f"the {r.split} split" for r in records)),
        ("Command", [record.command for record in records]),
        ("Not as in the recipe", _joined(r.differs for r in records)),
        ("Commit", _joined(r.commit or "unknown" for r in records)),
        ("Hardware", _joined(r.hardware for r in records)),
        ("Versions", _joined(_versions(r) for r in records)),
        ("Parameters", _joined(str(r.parameters or "") for r in records)),
        ("Median step", _joined(_seconds(r.seconds_per_step) for r in records)),
        ("Total time", _joined(_seconds(r.wall_seconds) for r in records)),
        ("Note", _joined(r.note for r in records)),
    ]
    return [(name, text) for name, text in facts if text]


def _cut(record: Record) -> str:
    """Where a run was interrupted: its command goes on to the end."""
    asked = re.search(r"--steps (\d+)", record.command)
    steps = int(asked[1]) if asked else record.steps_asked
    if not record.is_cut or record.size != FULL or record.steps >= steps:
        return ""
    return f"at step {record.steps}, before its end: the command goes on to {steps}"


def _versions(record: Record) -> str:
    return ", ".join(f"{name} {version}" for name, version in record.versions.items())


def _joined(texts: Iterable[str]) -> str:
    return "; ".join(_distinct(texts))


def _distinct(texts: Iterable[str]) -> list[str]:
    """The texts that are not empty, each once."""
    return list(dict.fromkeys(filter(None, texts)))


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    if value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 120 else f"{value / 60:.3g} minutes"
