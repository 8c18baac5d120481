"""The numbers and hyper-parameters of the paper (paper.json), and how its metrics are written."""

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

METRICS = {
    "R2": "R²",
    "accuracy": "accuracy, %",
    "macro_f1": "macro F1, %",
    "macro_accuracy": "macro accuracy, %",
    "train_loss": "train loss",
    "loss": "test loss",
}
"""The metrics of the paper and their titles."""

PLACES = {"R2": 3, "train_loss": 2, "loss": 2}
"""Decimal places of the paper's metrics that are not percentages."""

PERCENTAGES = {"accuracy", "macro_f1", "macro_accuracy"}
"""Metrics that the paper gives in percent."""

LESS_IS_BETTER = {"loss", "train_loss"}


@cache
def published() -> dict[str, Any]:
    """The content of paper.json: `tables` and `hyperparameters`."""
    text = files("dlrnn.paper").joinpath("paper.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def table(name: str) -> dict[str, Any]:
    """One table of the paper, for example `table1_atomic`."""
    found: dict[str, Any] = published()["tables"][name]
    return found


def row_of(name: str, model: str) -> dict[str, Any]:
    """The row of a model in a table that has rows."""
    return next(dict(row) for row in table(name)["rows"] if row["model"] == model)


def settings_of(name: str) -> dict[str, dict[str, Any]]:
    """The hyper-parameters that the paper states, by task."""
    return {row["task"]: row for row in published()["hyperparameters"][name]}


def as_in_paper(metric: str, value: float) -> float:
    """Convert a metric to the paper's units: percent for accuracies and F1.

    Nothing else converts: run directories hold fractions, records and recipes the paper's units.
    """
    return 100 * value if metric in PERCENTAGES else value


def places(metric: str) -> int:
    """The decimal places of a metric: one of a percentage, three of a metric of the user's."""
    return PLACES.get(metric, 1 if metric in PERCENTAGES else 3)


def number(metric: str, value: float) -> str:
    """A number with a fixed count of decimal places: "0.998", "96.8"."""
    return f"{value:z.{places(metric)}f}".replace("-", "−")


def signed(metric: str, value: float) -> str:
    """A number with its sign: "+0.002", "−1.4", "0.000"; "" for an infinite one."""
    if math.isinf(value):  # the paper's run diverged, ours did not
        return ""
    value = round(value, places(metric))
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{abs(value):.{places(metric)}f}"


def short(values: Mapping[str, float]) -> str:
    """Numbers without trailing zeros, separated by slashes: "0.998" or "96.8 / 97.7"."""
    if values and all(map(math.isinf, values.values())):
        return "diverged"
    shown = (round(v, places(name)) + 0.0 for name, v in values.items())
    return " / ".join(f"{v:g}" for v in shown)
