"""One recipe for each number of the paper's Tables 1 to 6: a complete run and the paper's value.

    from dlrnn.paper import recipes
    recipes.get("table1/shift/dlr-1").config
    recipes.reproduce("table1", only="shift/dlr-1", scale="tiny")

`dlrnn recipes` lists them.
"""

from importlib import import_module
from typing import Any

from dlrnn.paper.recipes.catalogue import RECIPES, TABLES, chosen, get
from dlrnn.paper.recipes.recipe import Recipe
from dlrnn.paper.recipes.scale import Scale, scaled

__all__ = ["RECIPES", "TABLES", "Recipe", "Scale", "chosen", "get", "scaled"]


def __getattr__(name: str) -> Any:
    """The functions `reproduce` and `sweep`; their modules import this package."""
    if name in ("reproduce", "sweep"):
        return getattr(import_module(f"dlrnn.paper.{name}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
