"""All recipes, by table and by name."""

from difflib import get_close_matches

from dlrnn.recipes import table1, table2, table3, table4, table5, table6
from dlrnn.recipes.recipe import Recipe

TABLES = {
    "table1": table1.RECIPES,
    "table2": table2.RECIPES,
    "table3": table3.RECIPES,
    "table4": table4.RECIPES,
    "table5": table5.RECIPES,
    "table6": table6.RECIPES,
}
RECIPES: dict[str, Recipe] = {each.name: each for table in TABLES.values() for each in table}
"""Every recipe by its name."""


def get(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        near = get_close_matches(name.lower(), list(RECIPES), n=1, cutoff=0)
        raise ValueError(f"there is no recipe {name!r}: did you mean {near[0]!r}?")
    return RECIPES[name]
