"""Parameters, relative times and throughput beside the paper's: a small table for each table."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from dlrnn.paper.comparison import Table, markdown_table
from dlrnn.paper.numbers import table as published
from dlrnn.paper.recipes import RECIPES, table1, table2, table5
from dlrnn.report.plots import shown
from dlrnn.train import make_model

Rows = tuple[Sequence[str], list[list[str]]]
NOT_MEASURED = "not measured"
TITLES = {
    "table1": "Parameters and relative time per step",
    "table2": "Parameters",
    "table3": "Relative time per step",
    "table5": "Parameters and throughput",
    "table6": "Parameters and relative time per step",
}
"""The tables of the paper that have such numbers."""


@cache
def parameters(recipe: str) -> int:
    """The number of parameters of a recipe's model, which is built without memory."""
    config = RECIPES[recipe].config
    with torch.device("meta"):
        return sum(each.numel() for each in make_model(config, config.make_task()).parameters())


def cost_rows(table: Table, step_times: dict[str, Any] | None) -> Rows | None:
    """The head and the rows of a table's parameters and times; None if the paper has none."""
    times = step_times or {}
    if table.name in ("table1", "table6"):
        return _atomic(table, times.get("models", []))
    if table.name == "table2":
        return _lengths()
    if table.name == "table3":
        return _higher_order(times.get("table3", []))
    return _language(times.get("table5", [])) if table.name == "table5" else None


def cost_text(table: Table, step_times: dict[str, Any] | None) -> str:
    """The same in Markdown, with a title; "" if the paper has none."""
    found = cost_rows(table, step_times)
    if found is None:
        return ""
    where = f", {step_times['device']}" if step_times and "time" in TITLES[table.name] else ""
    return f"### {TITLES[table.name]}{where}\n\n{markdown_table(*found)}"


def _atomic(table: Table, measured: list[dict[str, Any]]) -> Rows:
    """Models at the same length, DLR's shortest model as the unit: inputs of L and of 2 L."""
    name = "table1_atomic" if table.name == "table1" else "table6_param_tied"
    columns = table1.COLUMNS if table.name == "table1" else table1.COLUMNS_OF_TABLE_6
    task = "cumsum" if table.name == "table1" else "solve"  # one output, as the paper counts
    rows = []
    for model, column in columns.items():
        paper = published(name)["columns"][column.place]
        counts = [paper["params"], _count(parameters(f"{table.name}/{task}/{model}"))]
        times = list(paper["relative_time"].values())
        found = [row for row in measured if row["model"] == model]
        ours = [_several(found, key) for key in ("L", "2L")]
        pairs = zip(map(shown, times), ours, strict=True)
        rows.append([table.columns[model], *counts, *(text for pair in pairs for text in pair)])
    names = ("time at L, paper", "ours", "time at 2 L, paper", "ours")
    return ("model", "parameters, paper", "ours", *names), rows


def _several(found: list[dict[str, Any]], key: str) -> str:
    """The measured numbers of a model, each with its precision."""
    texts = [f"{shown(row[key])} ({row['precision']})" for row in found if row.get(key) is not None]
    return ", ".join(texts) or NOT_MEASURED


def _lengths() -> Rows:
    rows = []
    for model, (title, *_) in table2.MODELS.items():
        paper = next(
            row for row in published("table2_shift_scale")["rows"] if row["model"] == title
        )
        length = 256 if model == "dlr-r" else 262_144  # SGConv's count depends on the length
        rows.append([title, paper["params"], _count(parameters(f"table2/{length}/{model}"))])
    return ("model", "parameters, paper", "ours"), rows


def _higher_order(measured: list[dict[str, Any]]) -> Rows:
    rows = []
    for paper in published("table3_higher_order")["rows"]:
        for task, values in paper.items():
            if isinstance(values, dict) and "relative_time" in values:
                same = (task, paper["model"])
                found = [row for row in measured if (row["task"], row["model"]) == same]
                ours = _several(found, "relative")
                rows.append([task, paper["model"], shown(values["relative_time"]), ours])
    return ("task", "model", "time, paper", "ours"), rows


def _language(measured: list[dict[str, Any]]) -> Rows:
    rows = []
    for paper in published("table5_language_model")["rows"]:
        model = f"{table5.MODELS[paper['model']]}-{paper['experts']}"
        ours = _count(parameters(f"table5/pg19/{model}-pre"))
        found = [row for row in measured if row["model"] == model]
        numbers = [paper["params"], ours, shown(paper["throughput"]), _several(found, "relative")]
        experts = f"{paper['experts']} expert{'' if paper['experts'] == 1 else 's'}"
        rows.append([f"{paper['model']}, {experts}", *numbers])
    names = ("throughput, paper", "ours")
    return ("model", "parameters, paper", "ours", *names), rows


def _count(number: int) -> str:
    """A count as the paper writes it, with a digit more: "84.4K", "1.08M", "1.23B"."""
    for unit, letter in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.2f}{letter}"
    return f"{number / 1e3:.1f}K"
