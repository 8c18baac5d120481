"""One recipe for every number of the paper's Tables 1 to 6: a complete run and its value.

    from dlrnn.paper import recipes
    recipes.get("table1/shift/dlr-1").config
    recipes.reproduce("table1", only="shift/dlr-1", scale="tiny")

`dlrnn recipes` lists them.
"""

from dlrnn.paper.recipes.catalogue import RECIPES, TABLES, chosen, get
from dlrnn.paper.recipes.outcome import changed_path, run_config, run_path
from dlrnn.paper.recipes.recipe import Recipe, as_in_paper
from dlrnn.paper.recipes.reproduce import listing, reproduce, select, status_of, write_table
from dlrnn.paper.recipes.rows import Row
from dlrnn.paper.recipes.scale import Scale, scaled

__all__ = [
    "RECIPES",
    "TABLES",
    "Recipe",
    "Row",
    "Scale",
    "as_in_paper",
    "changed_path",
    "chosen",
    "get",
    "listing",
    "reproduce",
    "run_config",
    "run_path",
    "scaled",
    "select",
    "status_of",
    "write_table",
]
