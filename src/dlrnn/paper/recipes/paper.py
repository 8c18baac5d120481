"""The paper's tables and hyper-parameters, as published: paper.json."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def published() -> dict[str, Any]:
    """All of paper.json: `tables` and `hyperparameters`."""
    text = files("dlrnn.paper.recipes").joinpath("paper.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def table(name: str) -> dict[str, Any]:
    """One of its tables, `table1_atomic`, ..."""
    found: dict[str, Any] = published()["tables"][name]
    return found


def row_of(name: str, model: str) -> dict[str, Any]:
    """The row of a model in a table that has rows."""
    return next(dict(row) for row in table(name)["rows"] if row["model"] == model)
